"""Scores of multi-object tracking: HOTA, IDF1, MOTA, MOTP and identity switches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pixelis.rewards.scorers import box_iou

Tracks = Sequence[Mapping[int, Sequence[float]]]
"""For each object, its box (left, top, right, bottom; pixels or shares) in the frames that show it."""
ALPHAS = np.arange(0.05, 0.99, 0.05)
OUTWEIGHS = 1000.0
"""More than the overlaps of all new pairs of a frame."""


@dataclass
class TrackingScores:
    """Counts over clips, from which the scores follow."""

    hota_counts: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Of each clip, for each alpha: TP, FN and FP [3, A], and the sum of the association score over the TP
    [A].
    """
    identities: np.ndarray = field(default_factory=lambda: np.zeros(3))
    """IDTP, boxes of the truth, boxes of the result."""
    clear: np.ndarray = field(default_factory=lambda: np.zeros(5))
    """FN + FP, identity switches, boxes of the truth, TP, and the sum of their IoU."""

    def add(self, truth: Tracks, result: Tracks) -> None:
        """Count a clip.

        HOTA: Luiten et al. 2021, with the matching of their TrackEval. IDF1: Ristani et al. 2016. MOTA, MOTP:
        Bernardin and Stiefelhagen 2008.
        """
        frames = sorted({frame for track in (*truth, *result) for frame in track})
        alike = np.array(
            [
                [[box_iou(t[f], r[f]) if f in t and f in r else 0.0 for r in result] for t in truth]
                for f in frames
            ]
        )
        alike = alike.reshape(len(frames), len(truth), len(result))
        in_truth, in_result = (
            np.array([[f in track for track in tracks] for f in frames], bool).reshape(
                len(frames), len(tracks)
            )
            for tracks in (truth, result)
        )
        self._add_hota(alike, in_truth, in_result)
        common = (alike >= 0.5).sum(0)
        self.identities += common[_assignment(-common)].sum(), in_truth.sum(), in_result.sum()
        self._add_clear(alike, in_truth, in_result)

    @property
    def hota(self) -> float:
        """Mean over the thresholds of the geometric mean of detection and association accuracy."""
        hits, misses, extra = np.sum([counts for counts, _ in self.hota_counts], 0)
        association = np.sum([score for _, score in self.hota_counts], 0) / np.maximum(1, hits)
        return float(np.sqrt(hits / np.maximum(1, hits + misses + extra) * association).mean())

    @property
    def idf1(self) -> float:
        """F1 of boxes under the best one-to-one pairing of whole tracks."""
        idtp, in_truth, in_result = self.identities
        return float(2 * idtp / max(1, in_truth + in_result))

    @property
    def mota(self) -> float:
        """1 minus misses, false boxes and identity switches by box of the truth; may be negative."""
        return float(1 - self.clear[:2].sum() / max(1, self.clear[2]))

    @property
    def motp(self) -> float:
        """Mean IoU of the boxes that MOTA counts as right."""
        return float(self.clear[4] / max(1, self.clear[3]))

    @property
    def switches(self) -> int:
        return int(self.clear[1])

    def _add_hota(self, alike: np.ndarray, in_truth: np.ndarray, in_result: np.ndarray) -> None:
        counts = in_truth.sum(0)[:, None] + in_result.sum(0)[None]
        share = alike / np.maximum(1e-9, alike.sum(1, keepdims=True) + alike.sum(2, keepdims=True) - alike)
        potential = share.sum(0)
        alignment = potential / np.maximum(1e-9, counts - potential)
        matches = np.zeros((len(ALPHAS), *alignment.shape))
        for iou in alike:
            for row, column in zip(*_assignment(-alignment * iou), strict=True):
                matches[:, row, column] += (iou[row, column] > 0) & (iou[row, column] >= ALPHAS - 1e-9)
        hits = matches.sum((1, 2))
        association = (matches * matches / np.maximum(1, counts - matches)).sum((1, 2))
        self.hota_counts.append(
            (np.stack([hits, in_truth.sum() - hits, in_result.sum() - hits]), association)
        )

    def _add_clear(self, alike: np.ndarray, in_truth: np.ndarray, in_result: np.ndarray) -> None:
        last: dict[int, int] = {}
        pairs: list[tuple[int, int]] = []
        hits, switches, overlaps = 0, 0, 0.0
        for iou in alike:
            # A pair of the frame before stays a pair where it can, however good new ones are.
            known = np.zeros_like(iou)
            for row, column in pairs:
                known[row, column] = OUTWEIGHS
            assigned = zip(*_assignment(-(iou + known) * (iou >= 0.5)), strict=True)
            pairs = [(row, column) for row, column in assigned if iou[row, column] >= 0.5]
            hits += len(pairs)
            overlaps += sum(float(iou[pair]) for pair in pairs)
            switches += sum(last.get(row, column) != column for row, column in pairs)
            last |= dict(pairs)
        wrong = in_truth.sum() + in_result.sum() - 2 * hits
        self.clear += wrong, switches, in_truth.sum(), hits, overlaps

    def __str__(self) -> str:
        return f"HOTA {self.hota:.3f}, IDF1 {self.idf1:.3f}, MOTA {self.mota:.3f}"


def _assignment(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    from scipy.optimize import linear_sum_assignment  # takes a third of a second to import

    return linear_sum_assignment(costs)
