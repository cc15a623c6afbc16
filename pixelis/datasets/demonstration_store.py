"""Demonstrations of a run, written down once and read by number, and which of them are in which batch.

The rows of a source, however large and wherever it is, are streamed into one JSON-lines file with an index of places, levels and
weights: some bytes a row are all that a process holds. What is left to draw from is then the same when the run resumes.
"""

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
from pixelis.errors import BadInput, DataFailure
from pixelis.policy import checkpoint
from pixelis.records import Demonstration

ROWS, INDEX, COUNTS = "demonstrations.jsonl", "index.npz", "counts.json"

UNREAD: Any = {"annotations": True, "turns": {"__all__": {"observation"}}}
"""What nobody reads of a demonstration that is played: observations are made anew."""


class DemonstrationStore:
    """Demonstrations in a folder, by number.

    offsets: int64 [n + 1], where each row begins in the file; levels: int8 [n], place in LEVELS, -1 for none; weights: float64
    [n]; refused: how many rows of each other kind were left out; about: as given to `fill`.
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
        cls, folder: str | Path, rows: Iterable[Demonstration], kinds: Iterable[str], about: Mapping[str, Any] | None = None
    ) -> DemonstrationStore:
        """Write the rows of these kinds; a folder that was there is replaced. DataFailure when there is none.

        about: plain values to keep beside them.
        """
        kinds, refused = set(kinds), Counter[str]()
        offsets, levels, weights = array("q", [0]), array("b"), array("d")

        def write(aside: Path) -> None:
            with (aside / ROWS).open("wb") as file:
                for row in rows:
                    if row.kind not in kinds:
                        refused[row.kind] += 1
                        continue
                    offsets.append(offsets[-1] + file.write(row.model_dump_json(exclude=UNREAD).encode() + b"\n"))
                    levels.append(LEVELS.index(row.level) if row.level else -1)
                    weights.append(row.weight)
            if not weights:
                message = f"none of its {sum(refused.values())} demonstrations" if refused else "no demonstration"
                raise DataFailure(f"there is {message} of kind {', '.join(sorted(kinds))} to learn from", fix="see sft.kinds")
            np.savez(aside / INDEX, offsets=np.asarray(offsets), levels=np.asarray(levels, np.int8), weights=np.asarray(weights))
            counts = {"rows": len(weights), "refused": dict(refused), "about": dict(about or {})}
            (aside / COUNTS).write_text(json.dumps(counts), encoding="utf-8")

        checkpoint.write_folder(folder, write)
        return cls(folder)

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, number: int) -> Demonstration:
        """Row ``number``, from 0."""
        self._file.seek(self.offsets[number])
        return Demonstration.model_validate_json(self._file.read(self.offsets[number + 1] - self.offsets[number]))


class BatchSampler:
    """The rows of each batch: they depend on the seed, the step and the mixture in force, and on nothing else.

    The slots of batches, numbered through the run, walk through a shuffle of the rows, a new one when it is through; with a
    mixture those of each level through its own. A row of weight w is w / mean weight times in a shuffle, rounded up or down at
    random. ``sft.share`` keeps that part of the rows; those of a smaller share are among those of a larger one. Without
    ``shuffle`` the first pass is in order.
    """

    def __init__(self, store: DemonstrationStore, settings: SftConfig, seed: int, shuffle: bool = True):
        self.seed, self.batch, self.shuffle = seed, settings.batch, shuffle
        everything = np.random.default_rng([seed, 1]).permutation(len(store))
        kept = np.sort(everything[: math.ceil(settings.share * len(store))])
        self.pools = [kept, *(kept[store.levels[kept] == level] for level in range(len(LEVELS)))]
        self.weights = store.weights
        self._order = lru_cache(maxsize=2 * len(self.pools))(self._shuffled)

    def __len__(self) -> int:
        return len(self.pools[0])

    def steps(self, epochs: float) -> int:
        """Steps in which as many rows are drawn as ``epochs`` passes have."""
        return max(1, math.ceil(epochs * len(self) / self.batch))

    def check(self, stages: Iterable[StageConfig]) -> None:
        """BadInput when a stage wants demonstrations of a level that has none."""
        for stage in stages:
            for level, share, pool in zip(LEVELS, stage.mixture, self.pools[1:], strict=True):
                if share > 0 and not len(pool):
                    have = {name: len(rows) for name, rows in zip(LEVELS, self.pools[1:], strict=True)}
                    raise BadInput(
                        f"stage {stage.name} draws {level} demonstrations, but of {len(self)} there are {have}",
                        fix="give demonstrations a level (pixelis refine), or set sft.curriculum.stages",
                    )

    def rows(self, step: int, mixture: Mixture | None = None) -> np.ndarray:
        """Numbers of the rows of batch ``step``, int64 [batch]. Each level has its share of the batch, rounded up or down."""
        begun, slots = step * self.batch, np.arange(self.batch)
        if mixture is None:
            return np.asarray([self._row(0, place) for place in (begun + slots).tolist()])
        ends = np.cumsum(mixture)
        points = (slots + np.random.default_rng([self.seed, 2, step]).random()) / self.batch * ends[-1]
        last = max(i for i, share in enumerate(mixture) if share > 0)
        levels = np.minimum(np.searchsorted(ends, points, side="right"), last)
        rows = []
        for level, share in enumerate(mixture):
            # As if this mixture had been in force from the first step: a level's shuffle is used up before the next.
            place = int(begun * share / ends[-1])
            rows += [self._row(1 + level, place + i) for i in range(int((levels == level).sum()))]
        return np.asarray(rows)

    def _row(self, pool: int, place: int) -> int:
        epoch, at = divmod(place, len(self.pools[pool]))
        return int(self._order(pool, epoch)[at])

    def _shuffled(self, pool: int, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, 3, pool, epoch])
        rows = self.pools[pool]
        weights = self.weights[rows]
        if (weights != weights[0]).any():
            # Systematic sampling: as many points as rows at equal distances over the summed weights.
            ends = np.cumsum(weights) / weights.sum() * len(rows)
            points = np.arange(len(rows)) + rng.random()
            rows = rows[np.minimum(np.searchsorted(ends, points, side="right"), len(rows) - 1)]
        elif not self.shuffle and epoch == 0:
            return rows
        return rng.permutation(rows)
