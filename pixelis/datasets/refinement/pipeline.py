"""The stages of refinement: checks of single rows, duplicates, hold-out, pass rates, difficulty, gates.

Apart from the judge and the policy's episodes, the result depends only on the input, the configuration and
the seed. The demonstrations are in a file: a process holds some hundred bytes of each.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pixelis.config import Config
from pixelis.datasets import questions
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.refinement import difficulty, duplicates, filters, gates, judging, quality
from pixelis.datasets.refinement.actions import WRONG_KINDS, actions
from pixelis.datasets.refinement.media_hashes import group_similar
from pixelis.datasets.refinement.row_checks import CheckedRow, RowChecker
from pixelis.datasets.refinement.spool import Spool
from pixelis.errors import BadInput, DataFailure
from pixelis.records import Demonstration, Question
from pixelis.rewards.services import Services

log = logging.getLogger(__name__)

ROWS_AT_A_TIME = 64
"""Rows that this process checks together, so that their pictures are decoded by several threads."""
CARDS = 3000
"""Demonstrations of a `cards:` source, which has no end, without `data.limit`."""
WORKING = "working"
"""Folder of the demonstrations under refinement in the run's folder."""
ProgressCallback = Callable[[str, int, int], None]
"""Called with a stage, the number of finished items and the number of all items."""


@dataclass
class Pipeline:
    """A set under refinement: the remaining demonstrations, the causes of drops, and the results of gates.

    ``excluded_from_rft``: ids whose question the policy always or never answers.
    """

    config: Config
    folder: Path
    services: Services
    report: ProgressCallback = lambda stage, finished, total: None
    bad: list[BadRow] = field(default_factory=list)
    rows: int = 0
    dropped: dict[str, str] = field(default_factory=dict)
    gates: list[gates.Gate] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    excluded_from_rft: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.settings = self.config.refinement
        self.checker = RowChecker(self.config, self.folder, self.services)
        self.demonstrations: Spool
        self.contents: dict[str, list[str]] = {}
        """Hashes of the content of each demonstration's media, by id."""
        self.looks: dict[str, list[int]] = {}
        """Perceptual hashes of each demonstration's media, by id; until near duplicates are dropped."""

    def prepare(self, rows: Iterable[CheckedRow | BadRow] | None = None) -> None:
        """Run every stage before the episodes on checked ``rows``, by default the source's, read here."""
        if self.settings.quality.judge:
            self._open_judge().close()
        self.demonstrations = Spool.write(
            self.folder / WORKING / "rows.jsonl", self._read(self._check() if rows is None else rows)
        )
        if not self.rows - len(self.bad):
            cause = f": {self.bad[0].error().message}" if self.bad else ""
            message = f"{self.config.data.demonstrations} has no usable demonstration{cause}"
            raise BadInput(message, code="no_rows", fix="choose another source")
        self._require_rows()
        if self.settings.quality.judge:
            self._apply_judge()
        self._change(lambda d: d.model_copy(update={"weight": quality.weight(d.kind, d.quality or 0.0)}))
        self._drop_duplicates()
        self._check_hold_out()

    def finish(self, outcomes: Mapping[str, filters.Outcomes] | None = None) -> None:
        """Run every stage after the episodes, whose ``outcomes`` are by the ids of ``questions``."""
        if outcomes is not None:
            self._apply_pass_rates(outcomes)
        self._grade()
        checker, replayed = self.checker, self.settings.gates.replay
        self.gates = gates.check(
            self.demonstrations, self.settings.gates, checker.operations, checker.score, self.rows, self.bad
        )
        if replayed:
            self.gates.append(
                gates.replay(self.demonstrations, checker.executor, replayed, self.config.run.seed)
            )

    def close(self) -> None:
        if hasattr(self, "demonstrations"):
            self.demonstrations.close()
        shutil.rmtree(self.folder / WORKING, ignore_errors=True)

    def questions(self) -> list[Question]:
        unique: dict[str, Question] = {}
        for d in self.demonstrations:
            unique.setdefault(self._question_key(d), Question.of(d))
        return list(unique.values())

    # Stages

    def _check(self) -> Iterator[CheckedRow | BadRow]:
        rows = iter(records(self.config))
        while block := list(itertools.islice(rows, ROWS_AT_A_TIME)):
            checked = iter(self.checker.check([row for row in block if not isinstance(row, BadRow)]))
            yield from (row if isinstance(row, BadRow) else next(checked) for row in block)

    def _read(self, rows: Iterable[CheckedRow | BadRow]) -> Iterator[Demonstration]:
        source, ids = self.config.data.demonstrations, set[str]()
        for row in rows:
            self.rows += 1
            self.report("rows", self.rows, self.rows)
            if isinstance(row, BadRow):
                self.bad.append(row)
                continue
            d = row.demonstration
            if d.id in ids:
                self.bad.append(BadRow(source, d.id, "id", "duplicate_id", f"the id {d.id!r} occurs twice"))
                continue
            ids.add(d.id)
            if row.unreadable is not None:
                self.bad.append(BadRow(source, d.id, "media", *row.unreadable))
            elif row.dropped is not None:
                self.dropped[d.id] = row.dropped
            else:
                self.contents[d.id] = [sys.intern(content) for content in row.contents]
                self.looks[d.id] = row.looks
                yield d

    def _open_judge(self) -> judging.QualityJudge:
        return judging.QualityJudge(self.config.rewards.judge, self.folder / "quality.sqlite")

    def _apply_judge(self) -> None:
        judge, verdicts = self._open_judge(), dict[str, judging.Verdict]()
        try:
            for verdict in judging.judge_all(self.demonstrations, judge):
                verdicts[verdict.id] = verdict
                self.report("judge", len(verdicts), len(self.demonstrations))
        finally:
            judge.close()

        def cause(d: Demonstration) -> str | None:
            verdict = verdicts[d.id]
            if verdict.score is None:
                return verdict.failure
            return "judge" if verdict.score < judging.MIN_SCORE else None

        self._drop(cause)
        scores = {key: (v.score - 1) / 4 for key, v in verdicts.items() if v.score is not None}
        self._change(lambda d: d.model_copy(update={"quality": round(scores[d.id], 6)}))
        scattered = {
            v.id: round(v.std, 3) for v in verdicts.values() if v.std is not None and v.std > judging.MAX_STD
        }
        repeated = sum(v.std is not None for v in verdicts.values())
        self.facts["judge"] = {"asked": len(verdicts), "repeated": repeated, "scattered": scattered}
        if scattered:
            log.warning("the judge contradicts itself on %d of %d repetitions", len(scattered), repeated)

    def _drop_duplicates(self) -> None:
        near, keys = self.settings.duplicates.near, [(-(d.quality or 0.0), d.id) for d in self.demonstrations]
        self.demonstrations = self.demonstrations.select(sorted(range(len(keys)), key=keys.__getitem__))
        hashes = [duplicates.content_hash(d, self.contents[d.id]) for d in self.demonstrations]
        self._drop_indices("duplicate", duplicates.exact(hashes))
        if near:
            ids = [d.id for d in self.demonstrations]
            similar = [tuple[str | int, ...](self.contents[key]) for key in ids]
            if self.checker.by_appearance:
                looks = list(dict.fromkeys(itertools.chain.from_iterable(self.looks[key] for key in ids)))
                groups = dict(zip(looks, group_similar(looks), strict=True))
                similar = [tuple(groups[look] for look in self.looks[key]) for key in ids]
            self._drop_indices("near_duplicate", duplicates.near(self.demonstrations, similar, near))
        self.looks.clear()

    def _drop_indices(self, cause: str, indices: Mapping[int, int]) -> None:
        self.dropped |= {self.demonstrations[i].id: cause for i in indices}
        self.demonstrations = self.demonstrations.select(
            [i for i in range(len(self.demonstrations)) if i not in indices]
        )

    def _check_hold_out(self) -> None:
        s = self.settings.holdout
        hits: dict[str, str] = {}
        for source in s.sources:
            limit = self.config.evaluate.questions if source.startswith("cards:") else 0
            held_out = list(questions.read_questions(source, limit=limit, epochs=1))
            media = {q.id: [self.checker.media_hashes.content(m) for m in q.media] for q in held_out}
            hits |= filters.leaks(self.demonstrations, self.contents, held_out, media, s.match)
        if not s.drop:
            filters.refuse(hits)
        self._drop(lambda d: "held_out" if d.id in hits else None)
        self.facts["held_out"] = hits

    def _question_key(self, question: Question) -> str:
        return duplicates.question_hash(question, self.contents[question.id])

    def _apply_pass_rates(self, outcomes: Mapping[str, filters.Outcomes]) -> None:
        s = self.settings.pass_rate
        by_key = {self._question_key(q): outcomes.get(q.id) for q in self.questions()}
        causes: dict[str, str | None] = {}

        def with_rates(d: Demonstration) -> Demonstration:
            outcome = by_key[self._question_key(d)]
            causes[d.id] = filters.drop_cause(outcome, s)
            rates = {"pass_rate": outcome.rate, "utility": outcome.utility} if outcome is not None else {}
            meta = {**d.meta, **{name: rate for name, rate in rates.items() if rate is not None}}
            return d.model_copy(update={"meta": meta})

        self._change(with_rates)
        self.facts["pass_rate"] = dict(Counter(cause or "kept" for cause in causes.values()))
        self.excluded_from_rft = {key for key, cause in causes.items() if cause}

    def _grade(self) -> None:
        ids = [d.id for d in self.demonstrations]
        grades = dict(zip(ids, difficulty.grade(self.demonstrations), strict=True))
        self.dropped |= {key: "difficulty_outlier" for key, (_, level) in grades.items() if level is None}
        inside = [i for i, key in enumerate(ids) if grades[key][1] is not None]
        self.demonstrations = self.demonstrations.select(sorted(inside, key=ids.__getitem__))

        def graded(d: Demonstration) -> Demonstration:
            score, level = grades[d.id]
            return d.model_copy(update={"difficulty": score, "level": level})

        self._change(graded)
        floors = self.settings.quality.levels
        self._drop(lambda d: "level_quality" if (d.quality or 0.0) < floors.get(d.level or "", 0.0) else None)

    def _change(self, change: Callable[[Demonstration], Demonstration]) -> None:
        self.demonstrations = self.demonstrations.rewrite(change)

    def _drop(self, cause: Callable[[Demonstration], str | None]) -> None:
        def stays(d: Demonstration) -> bool:
            if (code := cause(d)) is not None:
                self.dropped[d.id] = code
            return code is None

        self.demonstrations = self.demonstrations.where(stays)
        self._require_rows()

    def _require_rows(self) -> None:
        if not self.demonstrations:
            causes = Counter([*self.dropped.values(), *(row.code for row in self.bad)]).most_common()
            counts = ", ".join(f"{cause} {n}" for cause, n in causes)
            raise DataFailure(
                f"no demonstration is left of {self.rows} rows ({counts})",
                code="no_rows",
                fix="docs/refinement.md names the key of each cause",
            )

    def summary(self) -> dict[str, Any]:
        return {
            "source": self.config.data.demonstrations,
            "rows": self.rows,
            "bad_rows": dict(Counter(row.code for row in self.bad)),
            "kept": len(self.demonstrations),
            "dropped": dict(Counter(self.dropped.values()).most_common()),
            "levels": difficulty.statistics(self.demonstrations),
            "gates": [g.summary() for g in self.gates],
            **distributions(self.demonstrations),
            **self.facts,
        }


def records(config: Config) -> Iterable[Demonstration | BadRow]:
    """The rows of ``data.demonstrations``, up to ``data.limit`` usable ones."""
    source = config.data.demonstrations
    if source.startswith("cards:"):
        count = config.data.limit or CARDS
        return questions.read_demonstrations(source, count, config.run.seed, config.data.direct_share)
    return questions.first_rows(questions.read_rows(source, Demonstration), config.data.limit)  # type: ignore[arg-type]


def distributions(demonstrations: Iterable[Demonstration]) -> dict[str, Any]:
    names = ("tasks", "kinds", "sources", "operations", "lengths")
    counts: dict[str, Counter] = {name: Counter() for name in names}
    corrections = recovered = 0
    sequences, answers = set[tuple](), set[str | None]()
    for d in demonstrations:
        counts["tasks"][d.task] += 1
        counts["kinds"][d.kind] += 1
        counts["sources"][d.provenance.source if d.provenance else "unknown"] += 1
        counts["operations"].update(step.op or "" for step in d.steps)
        counts["lengths"][len(actions(d))] += 1
        if any(not step.learn for step in d.steps):
            corrections += 1
            recovered += d.kind not in WRONG_KINDS
        sequences.add(tuple(step.op for step in d.steps))
        answers.add(d.final)
    lengths = counts.pop("lengths")
    return {
        **{name: dict(counter.most_common()) for name, counter in counts.items()},
        "lengths": {str(n): lengths[n] for n in sorted(lengths)},
        "recovery": round(recovered / corrections, 4) if corrections else None,
        "sequences": len(sequences),
        "answers": len(answers),
    }
