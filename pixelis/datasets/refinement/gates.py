"""Gates that a set must pass before it is written: each has a figure, a limit, and the ids that broke it.

The gates are those of Pixelis' data fusion (arXiv 2603.25091), with those of its levels and of its critical kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pixelis.config.refinement import GatesConfig
from pixelis.datasets.refinement.actions import CRITICAL, WRONG, rounded, signature
from pixelis.datasets.refinement.difficulty import LEVELS
from pixelis.datasets.refinement.quality import Score
from pixelis.datasets.synthesis.checking import counts_as_right, counts_as_wrong
from pixelis.errors import DataFailure, OperationError, PixelisError
from pixelis.operations import Operation, geometry
from pixelis.records import Demonstration, Observation, Question, Step

if TYPE_CHECKING:
    from pixelis.datasets.bad_rows import BadRow

SHOWN = 10
"""Ids that an error names."""


@dataclass(frozen=True)
class Gate:
    """What one gate found: ``figure`` against ``limit``, and for each id that broke it why."""

    name: str
    passed: bool
    figure: float
    limit: float
    says: str
    ids: dict[str, str] = field(default_factory=dict)

    @property
    def failure(self) -> str:
        """One line for an error: name, figure, limit and the first ids with their reasons."""
        named = "; ".join(f"{key}: {why}" for key, why in list(self.ids.items())[:SHOWN])
        more = f"; and {len(self.ids) - SHOWN} more" if len(self.ids) > SHOWN else ""
        return f"gate {self.name}: {self.says} is {self.figure:.4g}, limit {self.limit:.4g}" + (
            f" ({named}{more})" if named else ""
        )


def check(
    demonstrations: Sequence[Demonstration],
    settings: GatesConfig,
    operations: Mapping[str, type[Operation]],
    score: Score,
    rows: int | None = None,
    bad: Sequence[BadRow] = (),
) -> list[Gate]:
    """Every gate but ``replay`` on a set. ``rows``: how many were read, usable or not; ``bad``: those that were not."""
    gates = [
        _each("actions", "actions that are not valid", demonstrations, lambda d: invalid_action(d, operations)),
        _each("observations", "actions without an observation", demonstrations, missing_observation),
        _each("answers", "answers that contradict the trajectory", demonstrations, lambda d: wrong_answer(d, score)),
        _each("cycles", "repeated cycles of actions", demonstrations, cycle),
        *_balance(demonstrations, settings),
    ]
    read = rows if rows is not None else len(demonstrations) + len(bad)
    share = len(bad) / read if read else 0.0
    ids = {f"{row.file}, row {row.row}": f"{row.column}: {row.message}" for row in bad}
    gates.append(Gate("corrupted", share <= settings.corrupted, share, settings.corrupted, "share of corrupted rows", ids))
    return gates


def enforce(gates: Iterable[Gate]) -> None:
    """DataFailure ``gate`` naming every gate that failed, its figure and the ids."""
    failed = [gate for gate in gates if not gate.passed]
    if failed:
        names = ", ".join(gate.name for gate in failed)
        raise DataFailure(
            "the set is rejected by " + "\n".join(gate.failure for gate in failed),
            code="gate",
            fix=f"mend or drop what is named, or change refinement.gates ({names}); rejected.json holds every id",
        )


# -- of one demonstration -------------------------------------------------------------------------------------------


def invalid_action(d: Demonstration, operations: Mapping[str, type[Operation]]) -> str | None:
    """The first call that is not valid: operation, arguments, a place outside the picture, a target that is not there (yet).

    A call that is not to be learnt may be invalid when its observation says so: it is a mistake to learn from.
    """
    known: dict[str, str] = {media.id: media.kind for media in d.media}
    for number, step in enumerate(d.turns, 1):
        if step.op is None:
            continue
        problem = _problem(step, operations, known)
        observed = step.observation
        if problem and (step.learn or observed is None or observed.status == "ok"):
            return f"turn {number}: {problem}"
        if observed is not None and observed.status == "ok":
            known |= {str(observed.id): "image"} | {image.id: "image" for image in observed.images}
    return None


def _problem(step: Step, operations: Mapping[str, type[Operation]], known: Mapping[str, str]) -> str | None:
    operation = operations.get(step.op or "")
    if operation is None:
        return f"no operation {step.op}"
    try:
        operation.check(step.arguments)
        if step.arguments.get("box") is not None:
            geometry.clamp(geometry.as_box(step.arguments["box"]))
    except OperationError as error:
        return f"{step.op}: {error.message}"
    target = step.target
    if target is not None and target not in known:
        root, _, frame = target.partition(".")
        if not (known.get(root) == "video" and frame.isdigit()):
            return f"{step.op}: no image {target}"
    return None


def missing_observation(d: Demonstration) -> str | None:
    """The first call without an observation, and the first to learn whose observation is an error."""
    for number, step in enumerate(d.turns, 1):
        if step.op is None:
            continue
        if step.observation is None:
            return f"turn {number}: {step.op} has no observation"
        if step.learn and step.observation.status != "ok":
            return f"turn {number}: {step.op} failed with {step.observation.code} and is to be learnt"
    return None


def wrong_answer(d: Demonstration, score: Score) -> str | None:
    """Why the answer does not fit the kind: golden and corrections are right, what is wrong on purpose is verifiably wrong.

    A correction also has a mistake that is not learnt, and a different call after it.
    """
    if d.final is None:
        return "ends without an answer"
    try:
        value = score(d, d.final)
    except DataFailure as failure:
        return f"the answer cannot be checked: {failure.message}"
    if d.kind in WRONG:
        return None if counts_as_wrong(d, value) else f"{d.kind}, but the answer {d.final[:40]!r} is right (score {value:.2g})"
    if not counts_as_right(d, value):
        return f"{d.kind}, but the answer {d.final[:40]!r} is wrong"
    if d.kind != "self_correction":
        return None
    mistakes = [i for i, turn in enumerate(d.turns) if turn.op is not None and not turn.learn]
    if not mistakes:
        return "a correction without a mistake"
    later = [turn for turn in d.turns[mistakes[-1] + 1 :] if turn.op is not None]
    made = {signature(d.turns[i]) for i in mistakes}
    return None if later and all(signature(turn) not in made for turn in later) else "the mistake is not corrected"


def cycle(d: Demonstration) -> str | None:
    """A run of calls that is at once repeated: A A, A B A B, ..."""
    calls = [signature(step) for step in d.steps]
    for length in range(1, len(calls) // 2 + 1):
        for at in range(len(calls) - 2 * length + 1):
            if calls[at : at + length] == calls[at + length : at + 2 * length]:
                names = " ".join(step.op or "" for step in d.steps[at : at + length])
                return f"call {at + 1}: {names} is repeated"
    return None


def _each(name: str, says: str, demonstrations: Sequence[Demonstration], why: Any) -> Gate:
    ids = {d.id: reason for d in demonstrations if (reason := why(d)) is not None}
    return Gate(name, not ids, float(len(ids)), 0.0, f"number of demonstrations with {says}", ids)


# -- of the whole set -----------------------------------------------------------------------------------------------


def _balance(demonstrations: Sequence[Demonstration], settings: GatesConfig) -> list[Gate]:
    tasks = Counter(d.task for d in demonstrations)
    kinds = Counter(d.kind for d in demonstrations)
    least = min(tasks.values(), default=0)
    gates = [
        Gate("total", len(demonstrations) >= settings.total, len(demonstrations), settings.total, "number of demonstrations"),
        Gate(
            "per_task",
            least >= settings.per_task,
            least,
            settings.per_task,
            "demonstrations of the rarest task",
            {task: f"{n} demonstrations" for task, n in tasks.items() if n < settings.per_task},
        ),
        _imbalance("imbalance", "tasks", tasks, settings.imbalance),
    ]
    rare = min((kinds[kind] for kind in CRITICAL), default=0)
    ids: dict[str, str] = {kind: f"{kinds[kind]} demonstrations" for kind in CRITICAL if kinds[kind] < settings.critical}
    gates.append(Gate("critical", not ids, rare, settings.critical, "demonstrations of the rarest critical kind", ids))
    levels = Counter(d.level for d in demonstrations if d.level is not None)
    if levels:
        total = sum(levels.values())
        shares = {level: levels[level] / total for level in LEVELS}
        low: dict[str, str] = {level: f"share {share:.3f}" for level, share in shares.items() if share < settings.level_share}
        gates.append(Gate("level_share", not low, min(shares.values()), settings.level_share, "share of the smallest level", low))
        different = {level: len({d.task for d in demonstrations if d.level == level}) for level in LEVELS}
        few: dict[str, str] = {level: f"{n} tasks" for level, n in different.items() if n < settings.level_tasks}
        fewest = min(different.values())
        gates.append(Gate("level_tasks", not few, fewest, settings.level_tasks, "tasks in the poorest level", few))
    return gates


def _imbalance(name: str, what: str, counts: Mapping[str, int], limit: float) -> Gate:
    ratio = max(counts.values()) / min(counts.values()) if counts else 0.0
    ends = {max(counts.values()), min(counts.values())} if ratio > limit else set()
    ids = {key: f"{n} demonstrations" for key, n in counts.items() if n in ends}
    return Gate(name, ratio <= limit, ratio, limit, f"ratio of the largest to the smallest of the {what}", ids)


# -- replay ---------------------------------------------------------------------------------------------------------


class Session(Protocol):
    """Where the operations of one question are executed."""

    def execute(self, op: str, target: str | None = None, *, allow_error: bool = False, **arguments: Any) -> Observation: ...


class Executor(Protocol):
    """Opens rooms; ``pixelis.datasets.synthesis.executor.Studio`` in the product."""

    def open(self, question: Question) -> Session: ...


def replay(demonstrations: Sequence[Demonstration], executor: Executor, share: float, seed: int) -> Gate:
    """The gate ``replay``: of a share of the set every call is executed again and must give what is written.

    Perceptual traps are left out: an observation of theirs is wrong on purpose.
    """
    honest = [d for d in demonstrations if d.kind != "trap_perceptual"]
    count = min(len(honest), round(share * len(honest)) or (1 if share else 0))
    chosen = sorted(np.random.default_rng(seed).permutation(len(honest))[:count].tolist())
    ids = {honest[i].id: why for i in chosen if (why := replayed(honest[i], executor)) is not None}
    return Gate("replay", not ids, float(len(ids)), 0.0, f"number that differ of {count} executed again", ids)


def replayed(d: Demonstration, executor: Executor) -> str | None:
    """What differs when its calls are executed again; None for nothing."""
    try:
        session = executor.open(d)
        for number, step in enumerate(d.turns, 1):
            if step.op is None or step.observation is None:
                continue
            now = session.execute(step.op, step.target, allow_error=True, **step.arguments)
            if differs := difference(step.observation, now):
                return f"turn {number}: {step.op} gives another {differs}"
    except PixelisError as error:
        return error.message
    return None


def difference(before: Observation, now: Observation) -> str | None:
    """The first field in which two observations differ; numbers are compared to five places, seconds not at all."""
    fields = ("status", "code", "id", "text", "images", "data")
    one, other = before.model_dump(mode="json"), now.model_dump(mode="json")
    return next((name for name in fields if rounded(one[name], 5) != rounded(other[name], 5)), None)
