"""What the learner trains on: one trajectory as arrays, with the views of its images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pixelis.errors import DataFailure

if TYPE_CHECKING:
    from pixelis.dialogue.spec import ModelSpec
    from pixelis.records import Trajectory

CAUSES = (
    "bad_shape",
    "over_context",
    "no_policy_tokens",
    "first_token",
    "bad_token",
    "banned_token",
    "bad_view",
    "views_mismatch",
    "non_finite",
)
"""Why a sample cannot be trained on, see `unusable`."""


@dataclass(slots=True)
class TrainSample:
    """One sequence to train on.

    tokens: int64 [L], image pads expanded; mask: bool [L], True on every token the policy wrote; log_probs: float32 [L],
    behaviour log-probabilities, 0 where the mask is False (all 0 in a demonstration); advantage: of the whole trajectory, unused
    by `sft`; views: uint8 [h, w, 3] of each image in order of appearance; version: the policy that wrote it; weights: float32
    [L], what each token counts in `sft`, None for 1 each.
    """

    tokens: np.ndarray
    mask: np.ndarray
    log_probs: np.ndarray
    advantage: float
    views: list[np.ndarray]
    version: int = 0
    id: str = ""
    weights: np.ndarray | None = None
    _digests: list[bytes] = field(default_factory=list, repr=False)

    @property
    def digests(self) -> list[bytes]:
        """One content hash per view: equal views share their features. Computed once."""
        if len(self._digests) != len(self.views):
            self._digests = [view_digest(view) for view in self.views]
        return self._digests

    @property
    def policy_tokens(self) -> int:
        """How many tokens the loss covers."""
        return int(self.mask.sum())

    @property
    def weight(self) -> float:
        """What these tokens count together."""
        return float(self.policy_tokens if self.weights is None else self.weights[self.mask].sum(dtype=np.float64))


@dataclass
class LearnerBatch:
    """One worker's samples of batch ``step``, and how they are learnt from.

    kind: the loss; metrics: what is known of the batch before; state: what a checkpoint keeps, so that a run that goes on begins
    after this batch; options: of `Trainer.update`; optional: without a usable sample the batch is skipped instead of an error.
    """

    step: int
    samples: list[TrainSample]
    kind: Literal["sft", "policy"] = "policy"
    metrics: dict[str, float] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    optional: bool = False


def view_digest(view: np.ndarray) -> bytes:
    """Content hash of a view: equal shape and pixels give equal digests."""
    shape = f"{view.shape}{view.dtype}".encode()
    return hashlib.blake2b(np.ascontiguousarray(view).data, digest_size=16, key=hashlib.sha256(shape).digest()).digest()


def from_trajectory(trajectory: Trajectory, views: Sequence[np.ndarray], advantage: float | None = None) -> TrainSample:
    """A trajectory record and its views (aligned with `trajectory.images`) as arrays.

    advantage: overrides the record's; both None count as 0. A trajectory that ends with an observation the policy never answered
    is cut behind the policy's last token. Raises DataFailure when tokens, log-probabilities and views disagree.
    """
    tokens = np.asarray(trajectory.token_ids(), dtype=np.int64)
    mask = np.asarray(trajectory.loss_mask(), dtype=bool)
    if len(views) != len(trajectory.images):
        raise DataFailure(f"{trajectory.id}: {len(views)} views for {len(trajectory.images)} images", code="views_mismatch")
    weight = trajectory.advantage if advantage is None else advantage
    sample = TrainSample(
        tokens=tokens,
        mask=mask,
        log_probs=np.asarray(trajectory.behaviour_log_probs(), dtype=np.float32),
        advantage=0.0 if weight is None else float(weight),
        views=list(views),
        version=trajectory.policy_version,
        id=trajectory.id,
    )
    return _cut_unanswered(sample, trajectory)


def _cut_unanswered(sample: TrainSample, trajectory: Trajectory) -> TrainSample:
    shown = kept = end = last = 0
    for turn in trajectory.turns:
        shown += len(turn.images)
        end += len(turn.tokens)
        if turn.is_policy:
            kept, last = shown, end
    if not sample.mask.any() or last == len(sample.tokens):
        return sample
    sample.tokens, sample.mask, sample.log_probs = sample.tokens[:last], sample.mask[:last], sample.log_probs[:last]
    sample.views = sample.views[:kept]
    return sample


def unusable(sample: TrainSample, spec: ModelSpec, row_tokens: int) -> str | None:
    """Why a sample cannot be trained on, one of `CAUSES`, or None when it can."""
    length = len(sample.tokens)
    weights = sample.log_probs if sample.weights is None else sample.weights
    if not (length == len(sample.mask) == len(sample.log_probs) == len(weights)) or length == 0:
        return "bad_shape"
    if length > row_tokens:
        return "over_context"
    if not sample.mask.any():
        return "no_policy_tokens"
    if sample.mask[0]:
        return "first_token"
    if sample.tokens.min() < 0 or sample.tokens.max() >= spec.vocab:
        return "bad_token"
    if np.isin(sample.tokens[sample.mask], spec.banned).any():
        return "banned_token"
    if any(view.shape[0] % spec.multiple or view.shape[1] % spec.multiple or not view.size for view in sample.views):
        return "bad_view"
    pads = sum(spec.image_tokens(view.shape[0], view.shape[1]) for view in sample.views)
    if pads != int((sample.tokens == spec.image_token).sum()):
        return "views_mismatch"
    if not np.isfinite(sample.advantage) or not np.isfinite(sample.log_probs).all() or not np.isfinite(weights).all():
        return "non_finite"
    return None
