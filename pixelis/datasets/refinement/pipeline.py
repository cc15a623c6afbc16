"""The stages of refinement: rules, media, observations, quality, duplicates, hold-out, pass rates, difficulty, gates.

Dropped demonstrations are counted by cause and recorded by id. Apart from the judge and the policy's episodes, the result depends
only on the input, the configuration and the seed, so that a second run writes the same files.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pixelis.config import Config
from pixelis.datasets import questions
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.refinement import difficulty, duplicates, filters, gates, judging, quality
from pixelis.datasets.refinement.actions import WRONG_KINDS, actions
from pixelis.datasets.refinement.media_hashes import MediaHashes, group_similar
from pixelis.datasets.synthesis.executor import Executor
from pixelis.errors import BadInput, DataFailure, PixelisError
from pixelis.operations import Operation, select
from pixelis.records import Demonstration, Media, Question
from pixelis.rewards.services import Services

log = logging.getLogger(__name__)

ProgressCallback = Callable[[str, int, int], None]
"""Called with a stage, the number of finished items and the number of all items."""


@dataclass
class Pipeline:
    """A set under refinement: the remaining demonstrations, the causes of drops, and the results of gates.

    ``excluded_from_rft`` are ids that stay for sft only: the policy always or never answers their questions.
    """

    config: Config
    folder: Path
    services: Services
    report: ProgressCallback = lambda stage, finished, total: None
    demonstrations: list[Demonstration] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    rows: int = 0
    dropped: dict[str, str] = field(default_factory=dict)
    gates: list[gates.Gate] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    excluded_from_rft: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.settings = self.config.refinement
        self.media_hashes = MediaHashes(self.config.toolbox, self.folder / "pictures.jsonl")
        self.operations: dict[str, type[Operation]] = {o.name: o for o in select(self.config.toolbox.operations)}
        self.score = quality.scorer(self.services)
        self.contents: dict[str, list[str]] = {}
        """Hashes of the content of each demonstration's media, by id."""
        self.similar: dict[str, tuple] = {}
        """By id, what stands for each demonstration's media when near duplicates are compared; equal for similar media."""

    def prepare(self) -> None:
        """Run every stage before the policy's episodes; BadConfig before the first one if the judge is not configured."""
        if self.settings.quality.judge:
            self._open_judge().close()
        self._read()
        s = self.settings.quality
        self._drop(lambda d: quality.rule_violation(d, self.operations, s.length, s.question, s.provenance))
        self._hash_media()
        if self.settings.observe:
            self._add_observations()
        self._score_quality()
        self._drop_duplicates()
        self._check_hold_out()

    def finish(self, outcomes: Mapping[str, filters.Outcomes] | None = None) -> None:
        """Run every stage after the episodes, whose ``outcomes`` are by the ids of ``questions``; fills ``gates``."""
        if outcomes is not None:
            self._apply_pass_rates(outcomes)
        self._grade()
        self.gates = gates.check(self.demonstrations, self.settings.gates, self.operations, self.score, self.rows, self.bad)
        if self.settings.gates.replay:
            executor = Executor(self.config.toolbox, self.config.dialogue)
            self.gates.append(gates.replay(self.demonstrations, executor, self.settings.gates.replay, self.config.run.seed))

    def questions(self) -> list[Question]:
        """The different questions that remain, without their demonstrations; the policy answers these in its episodes."""
        unique: dict[str, Question] = {}
        for d in self.demonstrations:
            values = {name: getattr(d, name) for name in Question.model_fields}
            unique.setdefault(self._question_key(d), Question(**values))
        return list(unique.values())

    # Stages

    def _read(self) -> None:
        """Read the whole source; a repeated id is a bad row."""
        ids: set[str] = set()
        source = self.config.data.demonstrations
        for row in records(self.config):
            self.rows += 1
            if isinstance(row, BadRow):
                self.bad.append(row)
            elif row.id in ids:
                self.bad.append(BadRow(source, row.id, "id", "duplicate_id", f"the id {row.id!r} occurs twice"))
            else:
                ids.add(row.id)
                self.demonstrations.append(row)
            self.report("read", self.rows, self.rows)
        if not self.demonstrations:
            cause = f": {self.bad[0].error().message}" if self.bad else ""
            raise BadInput(f"{source} has no usable demonstration{cause}", code="no_rows", fix="choose another source")

    def _hash_media(self) -> None:
        """Hash the content of all media, and for near duplicates the appearance; demonstrations without media are bad rows."""
        by_appearance = bool(self.settings.duplicates.near) and self.settings.duplicates.pictures == "look"
        media = {_media_key(m): m for d in self.demonstrations for m in d.media}
        contents: dict[str, str] = {}
        failures: dict[str, PixelisError] = {}
        for key, item in media.items():
            try:
                contents[key] = self.media_hashes.content(item)
            except PixelisError as error:
                failures[key] = error
        readable = {key: media[key] for key in contents} if by_appearance else {}
        perceptual: dict[str, int] = {}
        hashes = self.media_hashes.perceptual_hashes(readable.values())
        for finished, (key, value) in enumerate(zip(readable, hashes, strict=True), 1):
            if isinstance(value, PixelisError):
                failures[key] = value
            else:
                perceptual[key] = value
            self.report("pictures", finished, len(readable))
        groups = dict(zip(perceptual, group_similar(list(perceptual.values()), self.settings.duplicates.bits), strict=True))
        for d in self.demonstrations:
            keys = [_media_key(m) for m in d.media]
            if (failure := next((failures[key] for key in keys if key in failures), None)) is not None:
                self.bad.append(BadRow(self.config.data.demonstrations, d.id, "media", failure.code, failure.message))
                continue
            self.contents[d.id] = [contents[key] for key in keys]
            self.similar[d.id] = tuple(groups[key] if by_appearance else contents[key] for key in keys)
        self.demonstrations = [d for d in self.demonstrations if d.id in self.contents]

    def _add_observations(self) -> None:
        """Execute calls without an observation; drop demonstrations in which a call fails."""
        executor = Executor(self.config.toolbox, self.config.dialogue)
        complete = []
        for finished, d in enumerate(self.demonstrations, 1):
            result = with_observations(d, executor)
            if isinstance(result, str):
                self.dropped[d.id] = result
            else:
                complete.append(result)
            self.report("observations", finished, len(self.demonstrations))
        self.demonstrations = complete

    def _score_quality(self) -> None:
        """Set the quality and the sampling weight of each demonstration; drop those of low quality."""
        s, scored = self.settings.quality, []
        for finished, d in enumerate(self.demonstrations, 1):
            scored.append(d.model_copy(update={"quality": quality.heuristic(d, self.score)}))
            self.report("quality", finished, len(self.demonstrations))
        self.demonstrations = scored
        self._drop(lambda d: "quality" if (d.quality or 0.0) < s.least else None)
        if s.judge:
            self._apply_judge()
        self.demonstrations = [
            d.model_copy(update={"weight": quality.weight(d.kind, d.quality or 0.0)}) for d in self.demonstrations
        ]

    def _open_judge(self) -> judging.QualityJudge:
        """The judge of rewards with another prompt; it stores its verdicts in the run's folder."""
        return judging.QualityJudge(self.config.rewards.judge, self.settings.quality, self.folder / "quality.sqlite")

    def _apply_judge(self) -> None:
        """Replace the quality by the judge's score; drop demonstrations with a low score or without one."""
        s, verdicts = self.settings.quality, dict[str, judging.Verdict]()
        judge = self._open_judge()
        try:
            for verdict in judging.judge_all(self.demonstrations, judge, s):
                verdicts[verdict.id] = verdict
                self.report("judge", len(verdicts), len(self.demonstrations))
        finally:
            judge.close()

        def cause(d: Demonstration) -> str | None:
            verdict = verdicts[d.id]
            if verdict.score is None:
                return verdict.failure
            return "judge" if verdict.score < s.judge_least else None

        self._drop(cause)
        scores = {key: (v.score - 1) / 4 for key, v in verdicts.items() if v.score is not None}
        self.demonstrations = [d.model_copy(update={"quality": round(scores[d.id], 6)}) for d in self.demonstrations]
        scattered = {v.id: round(v.std, 3) for v in verdicts.values() if v.std is not None and v.std > s.judge_std}
        repeated = sum(v.std is not None for v in verdicts.values())
        self.facts["judge"] = {"asked": len(verdicts), "repeated": repeated, "scattered": scattered}
        if scattered:
            log.warning("the judge contradicts itself on %d of %d demonstrations scored three times", len(scattered), repeated)

    def _drop_duplicates(self) -> None:
        """Drop exact and near duplicates; the one of higher quality stays."""
        s = self.settings.duplicates
        self.demonstrations.sort(key=lambda d: (-(d.quality or 0.0), d.id))
        if s.exact:
            hashes = [duplicates.content_hash(d, self.contents[d.id]) for d in self.demonstrations]
            self._drop_indices("duplicate", duplicates.exact(hashes))
        if s.near:
            similar = [self.similar[d.id] for d in self.demonstrations]
            self._drop_indices("near_duplicate", duplicates.near(self.demonstrations, similar, s.near))

    def _check_hold_out(self) -> None:
        """Raise for evaluation questions among the demonstrations, or drop them where the configuration says so."""
        s = self.settings.holdout
        hits: dict[str, str] = {}
        for source in s.sources:
            limit = self.config.evaluate.questions if source.startswith("cards:") else 0
            held_out = list(questions.read_questions(source, limit=limit, epochs=1))
            media = {q.id: [self.media_hashes.content(m) for m in q.media] for q in held_out}
            hits |= filters.leaks(self.demonstrations, self.contents, held_out, media, s.match)
        if not s.drop:
            filters.refuse(hits)
        self._drop(lambda d: "held_out" if d.id in hits else None)
        self.facts["held_out"] = hits

    def _question_key(self, question: Question) -> str:
        """Equal for demonstrations of one question: a hash of its text and media."""
        return duplicates.question_hash(question, self.contents[question.id])

    def _apply_pass_rates(self, outcomes: Mapping[str, filters.Outcomes]) -> None:
        """Record the policy's pass rate in each demonstration; drop or exclude those outside the configured range."""
        s = self.settings.pass_rate
        by_key = {self._question_key(q): outcomes.get(q.id) for q in self.questions()}
        causes: dict[str, str | None] = {}
        with_rates = []
        for d in self.demonstrations:
            outcome = by_key[self._question_key(d)]
            causes[d.id] = filters.drop_cause(outcome, s)
            rates = {"pass_rate": outcome.rate, "utility": outcome.utility} if outcome is not None else {}
            meta = {**d.meta, **{name: rate for name, rate in rates.items() if rate is not None}}
            with_rates.append(d.model_copy(update={"meta": meta}))
        self.demonstrations = with_rates
        self.facts["pass_rate"] = dict(Counter(cause or "kept" for cause in causes.values()))
        if s.apply_to == "all":
            self._drop(lambda d: causes[d.id])
        else:
            self.excluded_from_rft = {key for key, cause in causes.items() if cause}

    def _grade(self) -> None:
        """Set difficulty and level; drop outliers and demonstrations below the quality of their level."""
        if not self.demonstrations:
            causes = ", ".join(f"{cause} {n}" for cause, n in Counter(self.dropped.values()).most_common())
            raise DataFailure(f"no demonstration is left ({causes})", code="no_rows", fix="loosen the rules under refinement")
        graded, outliers = difficulty.grade(self.demonstrations)
        self.dropped |= {d.id: "difficulty_outlier" for d in outliers}
        self.demonstrations = sorted(graded, key=lambda d: d.id)
        floors = self.settings.quality.levels
        self._drop(lambda d: "level_quality" if (d.quality or 0.0) < floors.get(d.level or "", 0.0) else None)

    def _drop(self, cause: Callable[[Demonstration], str | None]) -> None:
        causes = {d.id: code for d in self.demonstrations if (code := cause(d)) is not None}
        self.dropped |= causes
        self.demonstrations = [d for d in self.demonstrations if d.id not in causes]

    def _drop_indices(self, cause: str, indices: Mapping[int, int]) -> None:
        self.dropped |= {self.demonstrations[i].id: cause for i in indices}
        self.demonstrations = [d for i, d in enumerate(self.demonstrations) if i not in indices]

    def summary(self) -> dict[str, Any]:
        """The statistics of the set as plain values, for ``summary.json`` and the data card."""
        return {
            "source": self.config.data.demonstrations,
            "rows": self.rows,
            "bad_rows": dict(Counter(row.code for row in self.bad)),
            "kept": len(self.demonstrations),
            "dropped": dict(Counter(self.dropped.values()).most_common()),
            "levels": difficulty.statistics(self.demonstrations),
            "gates": [
                {"name": g.name, "passed": g.passed, "figure": g.figure, "limit": g.limit, "says": g.measure, "ids": g.ids}
                for g in self.gates
            ],
            **distributions(self.demonstrations),
            **self.facts,
        }


def records(config: Config) -> Iterable[Demonstration | BadRow]:
    """The rows of ``data.demonstrations``."""
    source = config.data.demonstrations
    if source.startswith("cards:"):
        count = config.data.limit or config.refinement.count
        return questions.read_demonstrations(source, count, config.run.seed, config.data.direct_share)
    return questions.read_rows(source, Demonstration)  # type: ignore[return-value]


def with_observations(d: Demonstration, executor: Executor) -> Demonstration | str:
    """The demonstration with every call executed that has no observation; an error code if a call is refused.

    The other calls are executed too, because later ones may refer to their results.
    """
    if all(step.observation is not None for step in d.steps):
        return d
    try:
        session = executor.open(d)
        turns = []
        for turn in d.turns:
            if turn.op is not None:
                observation = session.execute(turn.op, turn.target, allow_error=not turn.learn, **turn.arguments)
                turn = turn if turn.observation is not None else turn.model_copy(update={"observation": observation})
            turns.append(turn)
    except PixelisError as failure:
        return failure.code
    return d.model_copy(update={"turns": turns})


def distributions(demonstrations: Sequence[Demonstration]) -> dict[str, Any]:
    """Tasks, kinds, sources, operations, lengths, the share of corrections that recover, and different sequences and answers."""
    lengths = Counter(len(actions(d)) for d in demonstrations)
    corrections = [d for d in demonstrations if any(not step.learn for step in d.steps)]
    recovered = sum(d.kind not in WRONG_KINDS for d in corrections)
    return {
        "tasks": dict(Counter(d.task for d in demonstrations).most_common()),
        "kinds": dict(Counter(d.kind for d in demonstrations).most_common()),
        "sources": dict(Counter(d.provenance.source if d.provenance else "unknown" for d in demonstrations).most_common()),
        "operations": dict(Counter(step.op or "" for d in demonstrations for step in d.steps).most_common()),
        "lengths": {str(n): lengths[n] for n in sorted(lengths)},
        "recovery": round(recovered / len(corrections), 4) if corrections else None,
        "sequences": len({tuple(step.op for step in d.steps) for d in demonstrations}),
        "answers": len({d.final for d in demonstrations}),
    }


def _media_key(media: Media) -> str:
    return f"{media.kind} {media.uri} {' '.join(media.frames or [])}"
