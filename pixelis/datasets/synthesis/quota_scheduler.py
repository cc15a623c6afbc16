"""Schedules attempts until every quota of task, kind and source is met.

The attempts of a round depend only on the results before it, and an outcome only on its attempt and the seed:
a run that is killed and resumed builds the same samples as an uninterrupted one.
"""

from __future__ import annotations

import json
import math
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from pixelis.config.synthesis import SynthesisConfig
from pixelis.datasets.media_root import SCHEME
from pixelis.datasets.questions import read_questions
from pixelis.datasets.synthesis.sample_builder import Attempt, content_key
from pixelis.errors import BadConfig, BadInput
from pixelis.files import replacing, write_json
from pixelis.records import Demonstration, Question, SampleKind

SHARD = 32
"""Attempts per file; a stopped job repeats at most this many."""
PASSES = 4
"""Passes over the rows of a source before the target of a task counts as unmet."""
INITIAL_YIELD = 0.95
"""Assumed share of successful attempts of a quota before MIN_MEASURED attempts."""
MIN_YIELD = 0.05
MIN_MEASURED = 20
"""Attempts of a quota after which its measured yield counts."""
SPARE = 1.05
"""Planned attempts relative to those that the yield requires."""
MIN_ATTEMPTS = 32
"""Attempts of a quota in every round after the first; each round starts a pool of workers."""


@dataclass
class Quota:
    """A target and its progress.

    ``draw``: earlier passes over the rows; ``pass_start``: samples completed before this pass.
    """

    task: str
    kind: SampleKind
    source: str
    target: int
    completed: int = 0
    attempts: int = 0
    next_row: int = 0
    draw: int = 0
    pass_start: int = 0
    ended: bool = False
    causes: Counter[str] = field(default_factory=Counter)

    @property
    def key(self) -> str:
        return f"{self.task}/{self.kind}/{self.source}"

    @property
    def open(self) -> bool:
        return self.completed < self.target and not self.ended


def quotas(settings: SynthesisConfig) -> list[Quota]:
    """The quotas of every enabled task by kind and source, which add up to the task's target."""
    result = []
    for name, task in settings.tasks.items():
        if not task.enabled:
            continue
        total = sum(task.source_datasets.values())
        weights = {source: weight / total for source, weight in task.source_datasets.items()}
        shares = {(k, s): a * b for k, a in settings.shares().items() for s, b in weights.items()}
        counts = apportion(task.target_sample_count, list(shares.values()))
        result += [
            Quota(name, cast(SampleKind, kind), source, count)
            for (kind, source), count in zip(shares, counts, strict=True)
            if count
        ]
    if not result:
        raise BadConfig(
            "synthesis.tasks names no enabled task", fix="add at least one task with its source_datasets"
        )
    return result


def apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers that add up to ``total`` by shares that add up to 1: the largest remainders round up."""
    exact = [total * share for share in shares]
    counts = [math.floor(value + 1e-9) for value in exact]
    order = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in order[: max(0, total - sum(counts))]:
        counts[i] += 1
    return counts


class SourceRows:
    """Rows of the sources as JSON, read lazily into unnamed files; ``bad``: unusable ones by source."""

    def __init__(self, settings: SynthesisConfig, max_bad_rows: float = 0, folder: str | Path | None = None):
        self.settings, self.max_bad_rows, self.folder = settings, max_bad_rows, folder
        self.bad: Counter[str] = Counter()
        self._files: dict[str, IO[bytes]] = {}
        self._ends: dict[str, array[int]] = {}
        self._open: dict[str, Iterator[Question]] = {}

    def get(self, source: str, row: int) -> str | None:
        """The row as JSON, None beyond the last; BadInput for a source without rows."""
        if source not in self._open:
            settings = self.settings.datasources[source]
            self._open[source] = read_questions(
                settings.path,
                limit=settings.rows,
                epochs=1,
                max_bad_rows=self.max_bad_rows,
                on_bad_row=lambda _: self.bad.update([source]),
            )
            self._files[source] = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
            self._ends[source] = array("q", [0])
        file, ends = self._files[source], self._ends[source]
        if row >= self.count(source):
            file.seek(ends[-1])
            for question in islice(self._open[source], row + 1 - self.count(source)):
                for item in question.media:  # workers and readers of the samples run in other folders
                    item.uri = _absolute(item.uri)
                    item.frames = [_absolute(frame) for frame in item.frames] if item.frames else item.frames
                ends.append(ends[-1] + file.write(question.model_dump_json().encode()))
            if not self.count(source):
                raise BadInput(f"datasource {source} ({self.settings.datasources[source].path}) has no rows")
        if row >= self.count(source):
            return None
        file.seek(ends[row])
        return file.read(ends[row + 1] - ends[row]).decode()

    def count(self, source: str) -> int:
        """Number of rows read so far: all of them once ``get`` returns None."""
        return len(self._ends.get(source, [0])) - 1


class QuotaScheduler:
    """The state of a synthesis, with plans in ``rounds/``, outcomes in ``shards/`` and ``samples/``.

    A shard is complete when its file in ``shards/`` exists, which is written after its samples.
    """

    def __init__(self, folder: str | Path, settings: SynthesisConfig, seed: int):
        self.folder, self.settings, self.seed = Path(folder), settings, seed
        self.quotas = {quota.key: quota for quota in quotas(settings)}
        self.seen: set[str] = set()
        self.writers: Counter[str] = Counter()
        self.round = -1
        self.attempts: list[Attempt] = []
        self.shards = 0
        for name in ("rounds", "shards", "samples"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._resume()

    @property
    def completed(self) -> int:
        return sum(quota.completed for quota in self.quotas.values())

    @property
    def target(self) -> int:
        return sum(quota.target for quota in self.quotas.values())

    def left(self) -> list[Attempt]:
        return self.attempts[self.shards * SHARD :]

    def plan(self, rows: SourceRows) -> bool:
        """Start the next round and write its plan to disk; False when no attempts are left."""
        counts = {}
        for quota in self.quotas.values():
            if quota.open:
                measured = quota.attempts >= MIN_MEASURED
                rate = max(MIN_YIELD, quota.completed / quota.attempts) if measured else INITIAL_YIELD
                needed = math.ceil((quota.target - quota.completed) / rate * SPARE)
                counts[quota.key] = max(needed, MIN_ATTEMPTS if self.round >= 0 else 1)
        scale = min(1.0, self.settings.round / max(1, sum(counts.values())))
        attempts: list[Attempt] = []
        for key, count in counts.items():
            attempts += self._next(self.quotas[key], max(1, math.ceil(count * scale)), rows)
        if not attempts:
            return False
        # Neighbours share media and golden demonstrations, so that a worker decodes them once.
        attempts.sort(key=lambda a: (a.draw, a.source, a.row, a.task, a.kind != "golden", a.kind))
        self.round, self.attempts, self.shards = self.round + 1, attempts, 0
        state = {
            "settings": self._identity(),
            "cells": {c.key: [c.next_row, c.draw, c.pass_start, c.ended] for c in self.quotas.values()},
            "attempts": [astuple(attempt) for attempt in attempts],
        }
        write_json(self.folder / "rounds" / f"{self.round:03d}.json", state)
        return True

    def commit(self, outcomes: Sequence[tuple[Demonstration | None, str]]) -> int:
        """Write the next shard, of samples or None with the cause; returns the number of samples."""
        attempts = self.left()[: len(outcomes)]
        samples: list[Demonstration] = []
        record = []
        for attempt, (sample, cause) in zip(attempts, outcomes, strict=True):
            quota, key, writer = self.quotas[attempt.quota], "", ""
            if sample is not None:
                key, writer = content_key(sample), (sample.provenance and sample.provenance.writer) or ""
                if quota.completed >= quota.target:
                    cause = "surplus"
                elif key in self.seen:
                    cause = "duplicate"
                else:
                    samples.append(sample)
            self._apply(quota, key, cause, writer)
            record.append([attempt.quota, key, cause, writer])
        name = f"{self.round:03d}-{self.shards:05d}"
        path = self.folder / "samples" / f"{name}.jsonl"
        if samples:
            with replacing(path) as file:
                file.writelines(sample.model_dump_json().encode() + b"\n" for sample in samples)
        else:  # after a restart, a language model may reply differently and every attempt fail
            path.unlink(missing_ok=True)
        write_json(self.folder / "shards" / f"{name}.json", record)
        self.shards += 1
        return len(samples)

    def shortfall(self) -> dict[str, int]:
        return {
            quota.key: quota.target - quota.completed
            for quota in self.quotas.values()
            if quota.completed < quota.target
        }

    def summary(self) -> dict[str, Any]:
        tasks: dict[str, Counter[str]] = {}
        drops: dict[str, Counter[str]] = {}
        kinds, sources, causes = Counter[str](), Counter[str](), Counter[str]()
        for quota in self.quotas.values():
            counts = {"target": quota.target, "made": quota.completed, quota.kind: quota.completed}
            tasks.setdefault(quota.task, Counter()).update(counts)
            drops.setdefault(f"{quota.task}/{quota.kind}", Counter()).update(quota.causes)
            kinds[quota.kind] += quota.completed
            sources[quota.source] += quota.completed
            causes.update(quota.causes)
        return {
            "samples": self.completed,
            "target": self.target,
            "attempts": sum(quota.attempts for quota in self.quotas.values()),
            "kinds": dict(kinds),
            "sources": dict(sources),
            "thoughts_by": dict(self.writers),
            "tasks": {name: dict(counts) for name, counts in tasks.items()},
            "shortfall": self.shortfall(),
            "dropped": dict(causes.most_common()),
            "dropped_by_task_and_kind": {
                name: dict(counts.most_common()) for name, counts in drops.items() if counts
            },
        }

    def _next(self, quota: Quota, count: int, rows: SourceRows) -> list[Attempt]:
        """Up to ``count`` attempts of a quota, which ends after its last pass or a fruitless one."""
        result: list[Attempt] = []
        while len(result) < count:
            if rows.get(quota.source, quota.next_row) is None:
                if result:  # whether this pass was fruitless is known in the next round
                    break
                fruitless = quota.completed == quota.pass_start and quota.attempts > 0
                quota.ended = quota.draw + 1 >= PASSES or fruitless
                if quota.ended:
                    break
                quota.next_row, quota.draw, quota.pass_start = 0, quota.draw + 1, quota.completed
                continue
            result.append(Attempt(quota.task, quota.kind, quota.source, quota.next_row, quota.draw))
            quota.next_row += 1
        return result

    def _apply(self, quota: Quota, key: str, cause: str, writer: str) -> None:
        quota.attempts += 1
        if cause:
            quota.causes[cause] += 1
        else:
            quota.completed += 1
            self.seen.add(key)
            self.writers[writer or "none"] += 1

    def _identity(self) -> str:
        relevant = self.settings.model_dump(mode="json", exclude={"workers", "cpus", "strict"})
        return json.dumps([self.seed, relevant], sort_keys=True)

    def _resume(self) -> None:
        for path in sorted((self.folder / "rounds").glob("*.json"), key=lambda path: int(path.stem)):
            state = json.loads(path.read_text(encoding="utf-8"))
            if state["settings"] != self._identity():
                raise BadConfig(
                    f"{self.folder} holds a synthesis with other settings or another seed",
                    fix="choose another run.dir, or start over with run.resume=false",
                )
            self.round = int(path.stem)
            self.attempts = [Attempt(*row) for row in state["attempts"]]
            self.shards = 0
            for key, (next_row, draw, pass_start, ended) in state["cells"].items():
                quota = self.quotas[key]
                quota.next_row, quota.draw, quota.pass_start, quota.ended = next_row, draw, pass_start, ended
            while (shard := self.folder / "shards" / f"{self.round:03d}-{self.shards:05d}.json").is_file():
                for key, content, cause, writer in json.loads(shard.read_text(encoding="utf-8")):
                    self._apply(self.quotas[key], content, cause, writer)
                self.shards += 1


def _absolute(uri: str) -> str:
    return str(Path(uri).absolute()) if uri and not SCHEME.match(uri) else uri
