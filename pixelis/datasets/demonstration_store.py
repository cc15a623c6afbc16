"""The demonstrations of a run in a file, read by number, and the sampler of their batches."""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from pixelis.config import SftConfig, StageConfig
from pixelis.datasets.curriculum import LEVELS, Mixture
from pixelis.datasets.questions import shuffled
from pixelis.errors import BadInput, DataFailure
from pixelis.policy import checkpoint
from pixelis.records import Demonstration

ROWS, INDEX, COUNTS = "demonstrations.jsonl", "index.npz", "counts.json"

UNUSED_FIELDS: Any = {"annotations": True, "turns": {"__all__": {"observation"}}}
"""Fields that training does not read: observations come from executing the calls again."""


class DemonstrationStore:
    """Demonstrations in a folder, by number; a process holds only some bytes per row.

    offsets: int64 [n + 1] in the file; levels: int8 [n], index in LEVELS or -1; weights: float64 [n];
    refused: excluded rows by kind; about: as passed to `fill`.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        with np.load(self.folder / INDEX) as index:
            self.offsets, self.levels, self.weights = index["offsets"], index["levels"], index["weights"]
        counts = json.loads((self.folder / COUNTS).read_text(encoding="utf-8"))
        self.refused: dict[str, int] = counts["refused"]
        self.about: dict[str, Any] = counts.get("about", {})
        self._file = (self.folder / ROWS).open("rb")

    @classmethod
    def fill(
        cls,
        folder: str | Path,
        rows: Iterable[Demonstration],
        kinds: Iterable[str],
        about: Mapping[str, Any] | None = None,
    ) -> DemonstrationStore:
        """Write the rows of these kinds, and the plain values ``about``. DataFailure."""
        kinds, refused = set(kinds), Counter[str]()
        offsets, levels, weights = array("q", [0]), array("b"), array("d")

        def write(aside: Path) -> None:
            with (aside / ROWS).open("wb") as file:
                for row in rows:
                    if row.kind not in kinds:
                        refused[row.kind] += 1
                        continue
                    line = f"{json.dumps(row.origin)}\t{row.model_dump_json(exclude=UNUSED_FIELDS)}\n"
                    offsets.append(offsets[-1] + file.write(line.encode()))
                    levels.append(LEVELS.index(row.level) if row.level else -1)
                    weights.append(row.weight)
            if not weights:
                message = f"none of {refused.total()} demonstrations is of kind {', '.join(sorted(kinds))}"
                raise DataFailure(message, fix="see sft.kinds")
            np.savez(
                aside / INDEX,
                offsets=np.asarray(offsets),
                levels=np.asarray(levels, np.int8),
                weights=np.asarray(weights),
            )
            counts = {"rows": len(weights), "refused": dict(refused), "about": dict(about or {})}
            (aside / COUNTS).write_text(json.dumps(counts), encoding="utf-8")

        checkpoint.write_folder(folder, write)
        return cls(folder)

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, number: int) -> Demonstration:
        self._file.seek(self.offsets[number])
        origin, _, text = self._file.read(self.offsets[number + 1] - self.offsets[number]).partition(b"\t")
        row = Demonstration.model_validate_json(text)
        return row.read_from(*json.loads(origin)) if origin != b"null" else row


class BatchSampler:
    """Selects the rows of each batch; they depend only on the seed, the step and the current mixture.

    Batches exhaust one shuffle of the rows after the other; with a mixture, each level has its own. A row of
    weight w occurs w / mean weight times in a shuffle, rounded up or down at random. A smaller ``sft.share``
    is a subset of a larger one. Without ``shuffle`` the first pass is in order.
    """

    def __init__(self, store: DemonstrationStore, settings: SftConfig, seed: int, shuffle: bool = True):
        self.seed, self.batch, self.shuffle = seed, settings.batch, shuffle
        rows = np.random.default_rng([seed, 1]).permutation(len(store))
        rows = np.sort(rows[: math.ceil(settings.share * len(store))])
        self.pools = [rows, *(rows[store.levels[rows] == level] for level in range(len(LEVELS)))]
        self.weights, self.sizes = store.weights, np.diff(store.offsets)
        self._order = lru_cache(maxsize=2 * len(self.pools))(self._shuffled)

    def __len__(self) -> int:
        return len(self.pools[0])

    def steps(self, epochs: float) -> int:
        return max(1, math.ceil(epochs * len(self) / self.batch))

    def check(self, stages: Iterable[StageConfig]) -> None:
        counts = {name: len(rows) for name, rows in zip(LEVELS, self.pools[1:], strict=True)}
        for stage in stages:
            for level, share in zip(LEVELS, stage.mixture, strict=True):
                if share > 0 and not counts[level]:
                    message = f"stage {stage.name} draws {level} demonstrations; there are {counts}"
                    fix = "give demonstrations a level (pixelis refine), or set sft.curriculum.stages"
                    raise BadInput(message, fix=fix)

    def rows(self, step: int, mixture: Mixture | None = None) -> np.ndarray:
        """The rows of batch ``step``, int64 [batch]; each level has its share, rounded up or down."""
        if mixture is None:
            return np.asarray([self._row(0, step * self.batch + slot) for slot in range(self.batch)])
        # Systematic sampling: the slots of each batch so far are equidistant points, shifted at random, among
        # the shares.
        ends = np.cumsum(mixture)
        # Of a step the same, however many there are
        shifts = np.random.default_rng([self.seed, 2]).random((step + 1, 1))
        counts = np.diff(np.ceil(ends / ends[-1] * self.batch - shifts).astype(np.int64), axis=1, prepend=0)
        # As if this mixture had applied from the first step: a level's shuffle is exhausted before the next
        starts, stops = counts[:step].sum(0).tolist(), counts.sum(0).tolist()
        spans = enumerate(zip(starts, stops, strict=True), 1)
        return np.asarray(
            [self._row(pool, position) for pool, (start, stop) in spans for position in range(start, stop)]
        )

    def share(self, step: int, mixture: Mixture | None, share: int, shares: int) -> np.ndarray:
        """One of ``shares`` equally large parts of `rows`, with about equally many bytes of text."""
        rows = self.rows(step, mixture)
        turn, place = np.divmod(np.arange(len(rows)), shares)
        owners = np.empty(len(rows), np.int64)
        owners[np.argsort(-self.sizes[rows], kind="stable")] = np.where(turn % 2, shares - 1 - place, place)
        return rows[owners == share]

    def _row(self, pool: int, position: int) -> int:
        epoch, index = divmod(position, len(self.pools[pool]))
        return int(self._order(pool, epoch)[index])

    def _shuffled(self, pool: int, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, 3, pool, epoch])
        rows = self.pools[pool]
        weights = self.weights[rows]
        in_order = not self.shuffle and epoch == 0 and (weights == weights[0]).all()
        return rows if in_order else rows[shuffled(weights, rng)]
