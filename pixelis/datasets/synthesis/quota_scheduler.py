"""Schedules attempts until every quota of task, kind and source is met; a killed run resumes from its shards.

Attempts of a round are a function of what was made before it; the outcome of an attempt of its row, task, kind and the seed. So a
run that is killed and started again makes the same samples as one that was not: nothing is lost and nothing is made twice.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

from pixelis.config.synthesis import SynthesisConfig
from pixelis.datasets.questions import read_questions
from pixelis.datasets.synthesis.sample_builder import Attempt, content_key
from pixelis.errors import BadConfig, BadInput
from pixelis.records import Demonstration, Question, SampleKind

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:")

FIRST_YIELD = 0.95
"""Share of attempts that succeed, until it is known."""
LEAST_YIELD = 0.05
SPARE = 1.05
"""Attempts planned beyond those that the yield asks for."""
STARTED = 20
"""Attempts of a cell after which its own yield counts."""
LEAST_ATTEMPTS = 32
"""Attempts of a cell in every round after the first: a round costs the start of a pool, so that there should be few."""


@dataclass
class Quota:
    """A target and how far it is. ``place``: attempts planned; ``pass_began``: samples made when the current pass began."""

    task: str
    kind: SampleKind
    source: str
    target: int
    made: int = 0
    tried: int = 0
    place: int = 0
    draw: int = 0
    pass_began: int = 0
    ended: bool = False
    causes: Counter[str] = field(default_factory=Counter)

    @property
    def key(self) -> str:
        """As ``Attempt.cell``."""
        return f"{self.task}/{self.kind}/{self.source}"

    @property
    def open(self) -> bool:
        """More can be made and is wanted."""
        return self.made < self.target and not self.ended


def quotas(settings: SynthesisConfig) -> list[Quota]:
    """Targets of every enabled task by kind and source, adding up to the task's target: largest remainders get the rest.

    BadConfig for templates of a task that does not exist, and without any task.
    """
    out = []
    for name, task in settings.tasks.items():
        if not task.enabled:
            continue
        weights = {source: weight / sum(task.source_datasets.values()) for source, weight in task.source_datasets.items()}
        shares = {(k, s): a * b for k, a in settings.shares().items() for s, b in weights.items()}
        counts = apportion(task.target_sample_count, list(shares.values()))
        out += [
            Quota(name, cast(SampleKind, kind), source, count)
            for (kind, source), count in zip(shares, counts, strict=True)
            if count
        ]
    if not out:
        raise BadConfig("synthesis.tasks names no enabled task", fix="give at least one task with its source_datasets")
    return out


def apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers that add up to ``total``, each the share rounded down or up; shares add up to 1."""
    exact = [total * share for share in shares]
    counts = [math.floor(value + 1e-9) for value in exact]
    order = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


class Rows:
    """Rows of the sources as JSON, read as far as they are asked for. ``bad``: rows that could not be used, by source."""

    def __init__(self, settings: SynthesisConfig, max_bad_rows: float = 0):
        self.settings, self.max_bad_rows = settings, max_bad_rows
        self.bad: Counter[str] = Counter()
        self._rows: dict[str, list[str]] = {}
        self._open: dict[str, Iterator[Any]] = {}

    def get(self, source: str, row: int) -> str | None:
        """The row as JSON, None beyond the last one; raises what the reader raises, and BadInput for a source without rows."""
        rows = self._rows.setdefault(source, [])
        if source not in self._open:
            named = self.settings.datasources[source]
            self._open[source] = read_questions(
                named.path,
                limit=named.rows,
                epochs=1,
                max_bad_rows=self.max_bad_rows,
                on_bad_row=lambda _: self.bad.update([source]),
            )
        if row >= len(rows):
            rows += [_placed(question).model_dump_json() for question in islice(self._open[source], row + 1 - len(rows))]
            if not rows:
                raise BadInput(f"datasource {source} ({self.settings.datasources[source].path}) holds no row")
        return rows[row] if row < len(rows) else None

    def count(self, source: str) -> int:
        """Rows read so far: all of them once ``get`` gave None."""
        return len(self._rows.get(source, []))


class QuotaScheduler:
    """The state of a synthesis and its files: ``rounds/`` are plans, ``shards/`` what came of them, ``samples/`` the samples.

    A shard is done when its file below ``shards/`` is there; it is written after its samples, both by rename.
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
    def made(self) -> int:
        """Samples so far."""
        return sum(quota.made for quota in self.quotas.values())

    @property
    def target(self) -> int:
        """Samples wanted."""
        return sum(quota.target for quota in self.quotas.values())

    def left(self) -> list[Attempt]:
        """Attempts of the current round that no finished shard holds."""
        return self.attempts[self.shards * self.settings.shard :]

    def plan(self, rows: Rows) -> bool:
        """Begin the next round; False when there is nothing left to try. The plan is on disk before this returns."""
        wanted = {quota.key: self._wanted(quota) for quota in self.quotas.values() if quota.open}
        scale = min(1.0, self.settings.round / max(1, sum(wanted.values())))
        attempts: list[Attempt] = []
        for key, count in wanted.items():
            attempts += self._next(self.quotas[key], max(1, math.ceil(count * scale)), rows)
        if not attempts:
            return False
        # Neighbours share media and golden demonstrations: a worker makes them from one decode.
        attempts.sort(key=lambda a: (a.draw, a.source, a.row, a.task, a.kind != "golden", a.kind))
        self.round, self.attempts, self.shards = self.round + 1, attempts, 0
        state = {
            "settings": self._identity(),
            "cells": {c.key: [c.place, c.draw, c.pass_began, c.ended] for c in self.quotas.values()},
            "attempts": [[a.task, a.kind, a.source, a.row, a.draw] for a in attempts],
        }
        _write(self.folder / "rounds" / f"{self.round:03d}.json", json.dumps(state))
        return True

    def commit(self, outcomes: Sequence[tuple[Demonstration | None, str]]) -> int:
        """The next shard of the round, outcomes in the order of its attempts: a sample, or None and its cause.

        Samples beyond a target and those that say what another said are left out, under ``surplus`` and ``duplicate``. Returns
        how many were kept.
        """
        first = self.shards * self.settings.shard
        kept: list[Demonstration] = []
        record = []
        for attempt, (made, cause) in zip(self.attempts[first : first + len(outcomes)], outcomes, strict=True):
            quota, key = self.quotas[attempt.quota], ""
            if made is not None:
                key = content_key(made)
                cause = "surplus" if quota.made >= quota.target else "duplicate" if key in self.seen else ""
                if not cause:
                    kept.append(made)
            writer = made.provenance.writer or "" if made is not None and made.provenance is not None else ""
            self._apply(quota, key, cause, writer)
            record.append([attempt.quota, key, cause, writer])
        name = f"{self.round:03d}-{self.shards:05d}"
        samples = self.folder / "samples" / f"{name}.jsonl"
        if kept:
            _write(samples, "".join(made.model_dump_json() + "\n" for made in kept))
        else:  # a model that is asked again after a kill may give nothing this time
            samples.unlink(missing_ok=True)
        _write(self.folder / "shards" / f"{name}.json", json.dumps(record))
        self.shards += 1
        return len(kept)

    def shortfall(self) -> dict[str, int]:
        """Samples that are missing, by cell."""
        return {quota.key: quota.target - quota.made for quota in self.quotas.values() if quota.made < quota.target}

    def summary(self) -> dict[str, Any]:
        """Counts by task, kind and source, targets, what is missing, and why attempts gave nothing."""
        tasks: dict[str, dict[str, int]] = {}
        drops: dict[str, Counter[str]] = {}
        for quota in self.quotas.values():
            row = tasks.setdefault(quota.task, {"target": 0, "made": 0})
            row["target"] += quota.target
            row["made"] += quota.made
            row[quota.kind] = row.get(quota.kind, 0) + quota.made
            drops.setdefault(f"{quota.task}/{quota.kind}", Counter()).update(quota.causes)
        kinds, sources, causes = Counter[str](), Counter[str](), Counter[str]()
        for quota in self.quotas.values():
            kinds[quota.kind] += quota.made
            sources[quota.source] += quota.made
            causes.update(quota.causes)
        return {
            "samples": self.made,
            "target": self.target,
            "attempts": sum(quota.tried for quota in self.quotas.values()),
            "kinds": dict(kinds),
            "sources": dict(sources),
            "thoughts_by": dict(self.writers),
            "tasks": tasks,
            "shortfall": self.shortfall(),
            "dropped": dict(causes.most_common()),
            "dropped_by_task_and_kind": {name: dict(counts.most_common()) for name, counts in drops.items() if counts},
        }

    def _wanted(self, quota: Quota) -> int:
        rate = max(LEAST_YIELD, quota.made / quota.tried) if quota.tried >= STARTED else FIRST_YIELD
        return max(math.ceil((quota.target - quota.made) / rate * SPARE), LEAST_ATTEMPTS if self.round >= 0 else 1)

    def _next(self, quota: Quota, count: int, rows: Rows) -> list[Attempt]:
        """Up to ``count`` attempts of a cell from where it is; ends it after the last pass, or a pass that made nothing."""
        out: list[Attempt] = []
        while len(out) < count:
            if rows.get(quota.source, quota.place) is None:
                if out:  # what this pass makes is known only once these are done: it ends, or the next begins, next round
                    break
                fruitless = quota.made == quota.pass_began and quota.tried > 0
                quota.ended = quota.draw + 1 >= self.settings.passes or fruitless
                if quota.ended:
                    break
                quota.place, quota.draw, quota.pass_began = 0, quota.draw + 1, quota.made
                continue
            out.append(Attempt(quota.task, quota.kind, quota.source, quota.place, quota.draw))
            quota.place += 1
        return out

    def _apply(self, quota: Quota, key: str, cause: str, writer: str) -> None:
        quota.tried += 1
        if cause:
            quota.causes[cause] += 1
        else:
            quota.made += 1
            self.seen.add(key)
            self.writers[writer or "none"] += 1

    def _identity(self) -> str:
        """What decides which samples are made: all settings but those that say where and how fast."""
        named = self.settings.model_dump(mode="json", exclude={"workers", "cpus", "strict"})
        return json.dumps([self.seed, named], sort_keys=True)

    def _resume(self) -> None:
        for path in sorted((self.folder / "rounds").glob("*.json"), key=lambda path: int(path.stem)):
            state = json.loads(path.read_text(encoding="utf-8"))
            if state["settings"] != self._identity():
                raise BadConfig(
                    f"{self.folder} holds a synthesis with other settings or another seed",
                    fix="choose another run.dir, or start over with run.resume=false",
                )
            self.round, self.attempts, self.shards = int(path.stem), [Attempt(*row) for row in state["attempts"]], 0
            for key, (place, draw, began, ended) in state["cells"].items():
                quota = self.quotas[key]
                quota.place, quota.draw, quota.pass_began, quota.ended = place, draw, began, ended
            while (shard := self.folder / "shards" / f"{self.round:03d}-{self.shards:05d}.json").is_file():
                for key, content, cause, writer in json.loads(shard.read_text(encoding="utf-8")):
                    self._apply(self.quotas[key], content, cause, writer)
                self.shards += 1


def _placed(question: Question) -> Question:
    """The question with media paths made absolute: workers, and those who read the samples, run in other folders."""

    def absolute(uri: str) -> str:
        return str(Path(uri).absolute()) if uri and not _SCHEME.match(uri) else uri

    for item in question.media:
        item.uri = absolute(item.uri)
        item.frames = [absolute(frame) for frame in item.frames] if item.frames else item.frames
    return question


def _write(path: Path, text: str) -> None:
    """A file that appears whole: written beside its place, flushed to the disk, then renamed."""
    partial = path.with_suffix(".part")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
