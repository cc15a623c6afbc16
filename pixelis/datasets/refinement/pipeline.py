"""The order of refinement: rules, media, observations, quality, duplicates, hold-out, pass rates, difficulty, gates.

Whatever is dropped is counted by cause and named by id. Everything but the judge and the policy's episodes depends on the input,
the configuration and the seed alone, so that a second run gives the same files.
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
from pixelis.datasets.refinement.actions import WRONG, actions
from pixelis.datasets.refinement.pictures import Pictures, alike
from pixelis.datasets.synthesis.executor import Executor
from pixelis.errors import BadInput, DataFailure, PixelisError
from pixelis.operations import Operation, select
from pixelis.records import Demonstration, Media, Question
from pixelis.rewards.services import Services

log = logging.getLogger(__name__)

Tick = Callable[[str, int, int], None]
"""Told the step, how many are done, and how many there are."""


@dataclass
class Refinery:
    """A set on its way: what is left, what was dropped and why, what each gate found.

    ``not_asked`` are ids that stay for sft and are no question of rft: the policy always or never knows them.
    """

    config: Config
    folder: Path
    services: Services
    tick: Tick = lambda step, done, total: None
    demonstrations: list[Demonstration] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    rows: int = 0
    dropped: dict[str, str] = field(default_factory=dict)
    gates: list[gates.Gate] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    not_asked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.settings = self.config.refinement
        self.pictures = Pictures(self.config.toolbox, self.folder / "pictures.jsonl")
        self.operations: dict[str, type[Operation]] = {o.name: o for o in select(self.config.toolbox.operations)}
        self.score = quality.scorer(self.services)
        self.contents: dict[str, list[str]] = {}
        self.looks: dict[str, tuple] = {}

    def prepare(self) -> None:
        """Every step before the policy's episodes; BadConfig at once for a judge that cannot be asked."""
        if self.settings.quality.judge:
            self.quality_judge().close()
        self.read()
        self.rule()
        self.look()
        self.observe()
        self.judge()
        self.drop_duplicates()
        self.hold_out()

    def finish(self, outcomes: Mapping[str, filters.Outcomes] | None = None) -> None:
        """Every step after them; DataFailure ``gate`` when a gate fails (``gates`` then says which)."""
        if outcomes is not None:
            self.pass_rates(outcomes)
        self.grade()
        self.gates = gates.check(self.demonstrations, self.settings.gates, self.operations, self.score, self.rows, self.bad)
        if self.settings.gates.replay:
            executor = Executor(self.config.toolbox, self.config.dialogue)
            again = gates.replay(self.demonstrations, executor, self.settings.gates.replay, self.config.run.seed)
            self.gates.append(again)

    # -- steps ------------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """The whole source; rows that cannot be used are kept as such, an id that comes again is one."""
        seen: set[str] = set()
        source = self.config.data.demonstrations
        for row in records(self.config):
            self.rows += 1
            if isinstance(row, BadRow):
                self.bad.append(row)
            elif row.id in seen:
                self.bad.append(BadRow(source, row.id, "id", "duplicate_id", f"the id {row.id!r} is there twice"))
            else:
                seen.add(row.id)
                self.demonstrations.append(row)
            self.tick("read", self.rows, self.rows)
        if not self.demonstrations:
            first = f": {self.bad[0].error().message}" if self.bad else ""
            raise BadInput(f"{source} holds no demonstration{first}", code="no_rows", fix="name a source that has some")

    def rule(self) -> None:
        """Stage 1: rules on length, question, operations, fields and provenance."""
        s = self.settings.quality
        self._keep(lambda d: quality.fault(d, self.operations, s.length, s.question, s.provenance))

    def look(self) -> None:
        """Content of every picture, and its look where near duplicates want it; a demonstration without is a corrupted row."""
        decode = bool(self.settings.duplicates.near) and self.settings.duplicates.pictures == "look"
        media = list({_media_key(m): m for d in self.demonstrations for m in d.media}.values())
        known: dict[str, str] = {}
        broken: dict[str, PixelisError] = {}
        for item in media:
            try:
                known[_media_key(item)] = self.pictures.content(item)
            except PixelisError as error:
                broken[_media_key(item)] = error
        shown = [item for item in media if _media_key(item) in known] if decode else []
        seen: dict[str, int] = {}
        for done, (item, look) in enumerate(zip(shown, self.pictures.looks(shown), strict=True), 1):
            if isinstance(look, PixelisError):
                broken[_media_key(item)] = look
            else:
                seen[_media_key(item)] = look
            self.tick("pictures", done, len(shown))
        groups = dict(zip(seen, alike(list(seen.values()), self.settings.duplicates.bits), strict=True))
        for d in self.demonstrations:
            keys = [_media_key(m) for m in d.media]
            if (why := next((broken[key] for key in keys if key in broken), None)) is not None:
                self.bad.append(BadRow(self.config.data.demonstrations, d.id, "media", why.code, why.message))
                continue
            self.contents[d.id] = [known[key] for key in keys]
            self.looks[d.id] = tuple(groups[key] if decode else known[key] for key in keys)
        self.demonstrations = [d for d in self.demonstrations if d.id in self.contents]

    def observe(self) -> None:
        """Execute what a source left unexecuted, so that every call has an observation; drop what then fails."""
        if not self.settings.observe:
            return
        executor = Executor(self.config.toolbox, self.config.dialogue)
        out = []
        for done, d in enumerate(self.demonstrations, 1):
            made = observed(d, executor)
            if isinstance(made, str):
                self.dropped[d.id] = made
            else:
                out.append(made)
            self.tick("observations", done, len(self.demonstrations))
        self.demonstrations = out

    def judge(self) -> None:
        """Quality of each and its sampling weight; those below the least are dropped."""
        s, judged = self.settings.quality, dict[str, judging.Judged]()
        self._score()
        self._keep(lambda d: "quality" if (d.quality or 0.0) < s.least else None)
        if s.judge:
            client = self.quality_judge()
            total = len(self.demonstrations)
            try:
                for verdict in judging.judge_all(self.demonstrations, client, s):
                    judged[verdict.id] = verdict
                    self.tick("judge", len(judged), total)
            finally:
                client.close()
            self._take(judged)
        self.demonstrations = [
            d.model_copy(update={"weight": quality.weight(d.kind, d.quality or 0.0)}) for d in self.demonstrations
        ]

    def quality_judge(self) -> judging.QualityJudge:
        """A client of the judge of rewards that keeps its verdicts in the run's folder."""
        return judging.QualityJudge(self.config.rewards.judge, self.settings.quality, self.folder / "quality.sqlite")

    def _score(self) -> None:
        total, scored = len(self.demonstrations), []
        for done, d in enumerate(self.demonstrations, 1):
            scored.append(d.model_copy(update={"quality": quality.heuristic(d, self.score)}))
            self.tick("quality", done, total)
        self.demonstrations = scored

    def _take(self, judged: Mapping[str, judging.Judged]) -> None:
        s = self.settings.quality

        def cause(d: Demonstration) -> str | None:
            verdict = judged[d.id]
            if verdict.score is None:
                return verdict.failure
            return "judge" if verdict.score < s.judge_least else None

        self._keep(cause)
        scores = {key: (v.score - 1) / 4 for key, v in judged.items() if v.score is not None}
        self.demonstrations = [d.model_copy(update={"quality": round(scores[d.id], 6)}) for d in self.demonstrations]
        scattered = {v.id: round(v.std, 3) for v in judged.values() if v.std is not None and v.std > s.judge_std}
        repeated = sum(v.std is not None for v in judged.values())
        self.facts["judge"] = {"asked": len(judged), "repeated": repeated, "scattered": scattered}
        if scattered:
            log.warning("the judge contradicts itself on %d of %d demonstrations scored three times", len(scattered), repeated)

    def drop_duplicates(self) -> None:
        """Exact and near duplicates; of two the better one stays."""
        s = self.settings.duplicates
        self.demonstrations.sort(key=lambda d: (-(d.quality or 0.0), d.id))
        if s.exact:
            hashes = [duplicates.content_hash(d, self.contents[d.id]) for d in self.demonstrations]
            self._drop_numbers("duplicate", duplicates.exact(hashes))
        if s.near:
            alike_pictures = [self.looks[d.id] for d in self.demonstrations]
            self._drop_numbers("near_duplicate", duplicates.near(self.demonstrations, alike_pictures, s.near))

    def hold_out(self) -> None:
        """No evaluation question may be left: a hit is an error, or dropped where the configuration says so."""
        s = self.settings.holdout
        hits: dict[str, str] = {}
        for source in s.sources:
            limit = self.config.evaluate.questions if source.startswith("cards:") else 0
            held = list(questions.read_questions(source, limit=limit, epochs=1))
            held_pictures = {q.id: [self.pictures.content(m) for m in q.media] for q in held}
            hits |= filters.leaks(self.demonstrations, self.contents, held, held_pictures, s.match)
        if not s.drop:
            filters.refuse(hits)
        self._keep(lambda d: "held_out" if d.id in hits else None)
        self.facts["held_out"] = hits

    def asked(self) -> list[Question]:
        """The different questions left, without their demonstrations: what the policy's episodes are about."""
        out: dict[str, Question] = {}
        for d in self.demonstrations:
            values = {name: getattr(d, name) for name in Question.model_fields}
            out.setdefault(self.question_key(d), Question(**values))
        return list(out.values())

    def question_key(self, question: Question) -> str:
        """What demonstrations of one question share: its text and pictures."""
        return duplicates.question_hash(question, self.contents[question.id])

    def pass_rates(self, outcomes: Mapping[str, filters.Outcomes]) -> None:
        """Mark each demonstration with the policy's pass rate on its question, and drop where the configuration says so.

        ``outcomes`` by the ids of ``asked``.
        """
        s = self.settings.pass_rate
        keys = {self.question_key(q): outcomes.get(q.id) for q in self.asked()}
        causes: dict[str, str | None] = {}
        marked = []
        for d in self.demonstrations:
            found = keys[self.question_key(d)]
            causes[d.id] = filters.decide(found, s)
            known = {"pass_rate": found.rate, "utility": found.utility} if found is not None else {}
            marked.append(d.model_copy(update={"meta": {**d.meta, **{k: v for k, v in known.items() if v is not None}}}))
        self.demonstrations = marked
        self.facts["pass_rate"] = dict(Counter(cause or "kept" for cause in causes.values()))
        if s.apply_to == "all":
            self._keep(lambda d: causes[d.id])
        else:
            self.not_asked = {key for key, cause in causes.items() if cause}

    def grade(self) -> None:
        """Difficulty and level; outliers, and what is too poor for its level, are dropped."""
        if not self.demonstrations:
            causes = ", ".join(f"{cause} {n}" for cause, n in Counter(self.dropped.values()).most_common())
            raise DataFailure(f"no demonstration is left ({causes})", code="no_rows", fix="loosen the rules under refinement")
        kept, outliers = difficulty.grade(self.demonstrations)
        self.dropped |= {d.id: "difficulty_outlier" for d in outliers}
        self.demonstrations = sorted(kept, key=lambda d: d.id)
        floors = self.settings.quality.levels
        self._keep(lambda d: "level_quality" if (d.quality or 0.0) < floors.get(d.level or "", 0.0) else None)

    # -- bookkeeping ------------------------------------------------------------------------------------------------

    def _keep(self, cause: Callable[[Demonstration], str | None]) -> None:
        kept = []
        for d in self.demonstrations:
            if (why := cause(d)) is None:
                kept.append(d)
            else:
                self.dropped[d.id] = why
        self.demonstrations = kept

    def _drop_numbers(self, cause: str, numbers: Mapping[int, int]) -> None:
        self.dropped |= {self.demonstrations[i].id: cause for i in numbers}
        self.demonstrations = [d for i, d in enumerate(self.demonstrations) if i not in numbers]

    def summary(self) -> dict[str, Any]:
        """What is known of the set as plain values."""
        causes = Counter(row.code for row in self.bad)
        return {
            "source": self.config.data.demonstrations,
            "rows": self.rows,
            "bad_rows": dict(causes),
            "kept": len(self.demonstrations),
            "dropped": dict(Counter(self.dropped.values()).most_common()),
            "levels": difficulty.statistics(self.demonstrations),
            "gates": [
                {"name": g.name, "passed": g.passed, "figure": g.figure, "limit": g.limit, "says": g.says, "ids": g.ids}
                for g in self.gates
            ],
            **describe(self.demonstrations),
            **self.facts,
        }


def records(config: Config) -> Iterable[Demonstration | BadRow]:
    """The rows of ``data.demonstrations``, once."""
    source = config.data.demonstrations
    if source.startswith("cards:"):
        count = config.data.limit or config.refinement.count
        return questions.read_demonstrations(source, count, config.run.seed, config.data.direct_share)
    return questions.read_rows(source, Demonstration)  # type: ignore[return-value]


def observed(d: Demonstration, executor: Executor) -> Demonstration | str:
    """The demonstration with every call executed that has no observation; the code of the failure when one is refused.

    Calls that have their observation are executed too when a later one lacks its own: that one may build on them.
    """
    if all(step.observation is not None for step in d.steps):
        return d
    try:
        session = executor.open(d)
        turns = []
        for turn in d.turns:
            if turn.op is not None:
                made = session.execute(turn.op, turn.target, allow_error=not turn.learn, **turn.arguments)
                turn = turn if turn.observation is not None else turn.model_copy(update={"observation": made})
            turns.append(turn)
    except PixelisError as failure:
        return failure.code
    return d.model_copy(update={"turns": turns})


def describe(demonstrations: Sequence[Demonstration]) -> dict[str, Any]:
    """Distributions: tasks, kinds, sources, operations, lengths, how many corrections recover, and how diverse answers are."""
    lengths = Counter(len(actions(d)) for d in demonstrations)
    corrections = [d for d in demonstrations if any(not step.learn for step in d.steps)]
    recovered = sum(d.kind not in WRONG for d in corrections)
    sequences = {tuple(step.op for step in d.steps) for d in demonstrations}
    return {
        "tasks": dict(Counter(d.task for d in demonstrations).most_common()),
        "kinds": dict(Counter(d.kind for d in demonstrations).most_common()),
        "sources": dict(Counter(d.provenance.source if d.provenance else "unknown" for d in demonstrations).most_common()),
        "operations": dict(Counter(step.op or "" for d in demonstrations for step in d.steps).most_common()),
        "lengths": {str(n): lengths[n] for n in sorted(lengths)},
        "recovery": round(recovered / len(corrections), 4) if corrections else None,
        "sequences": len(sequences),
        "answers": len({d.final for d in demonstrations}),
    }


def _media_key(media: Media) -> str:
    return f"{media.kind} {media.uri} {' '.join(media.frames or [])}"
