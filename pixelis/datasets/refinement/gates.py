"""Gates that a set must pass before it is written (Pixelis, arXiv 2603.25091)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pixelis.config.refinement import GatesConfig
from pixelis.datasets.refinement.actions import CRITICAL_KINDS, WRONG_KINDS, rounded, signature
from pixelis.datasets.refinement.difficulty import LEVELS
from pixelis.datasets.refinement.quality import Score
from pixelis.datasets.synthesis.checking import counts_as_right, counts_as_wrong
from pixelis.datasets.synthesis.executor import Executor
from pixelis.errors import DataFailure, OperationError, PixelisError
from pixelis.operations import Operation, geometry
from pixelis.operations.scale import PLACES
from pixelis.records import Demonstration, Step

if TYPE_CHECKING:
    from pixelis.datasets.bad_rows import BadRow

MAX_IDS = 10
TOTAL, CRITICAL, LEVEL_SHARE, LEVEL_TASKS = 1000, 50, 0.25, 3
"""Smallest set, demonstrations of a critical kind, share of a level, and tasks in a level."""


@dataclass(frozen=True)
class Gate:
    """The ``figure`` of a ``measure`` against its ``limit``, and a reason for each violating id."""

    name: str
    passed: bool
    figure: float
    limit: float
    measure: str
    ids: dict[str, str] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values, "says": values.pop("measure")}

    @property
    def failure(self) -> str:
        """One line for an error."""
        reasons = [f"{key}: {reason}" for key, reason in list(self.ids.items())[:MAX_IDS]]
        if len(self.ids) > MAX_IDS:
            reasons.append(f"and {len(self.ids) - MAX_IDS} more")
        details = f" ({'; '.join(reasons)})" if reasons else ""
        return f"gate {self.name}: {self.measure} is {self.figure:.4g}, limit {self.limit:.4g}{details}"


def check(
    demonstrations: Sequence[Demonstration],
    settings: GatesConfig,
    operations: Mapping[str, type[Operation]],
    score: Score,
    rows: int | None = None,
    bad: Sequence[BadRow] = (),
) -> list[Gate]:
    """Every gate except ``replay``. ``rows``: number of rows read, usable or not; ``bad``: the unusable ones."""
    faults: dict[str, tuple[str, Callable[[Demonstration], str | None]]] = {
        "actions": ("invalid actions", lambda d: invalid_action(d, operations)),
        "observations": ("actions without an observation", missing_observation),
        "answers": ("answers that contradict the trajectory", lambda d: wrong_answer(d, score)),
        "cycles": ("repeated cycles of actions", cycle),
    }
    faulty: dict[str, dict[str, str]] = {name: {} for name in faults}
    cells: Counter[tuple[str, str, str | None]] = Counter()
    for d in demonstrations:
        cells[d.task, d.kind, d.level] += 1
        for name, (_, find_fault) in faults.items():
            if (reason := find_fault(d)) is not None:
                faulty[name][d.id] = reason
    gates = [
        Gate(name, not ids, float(len(ids)), 0.0, f"number of demonstrations with {faults[name][0]}", ids)
        for name, ids in faulty.items()
    ]
    gates += _balance(cells, settings)
    read = rows if rows is not None else cells.total() + len(bad)
    share = len(bad) / read if read else 0.0
    ids = {f"{row.file}, row {row.row}": f"{row.column}: {row.message}" for row in bad}
    limit = settings.corrupted
    return [*gates, Gate("corrupted", share <= limit, share, limit, "share of corrupted rows", ids)]


def enforce(gates: Iterable[Gate]) -> None:
    """DataFailure ``gate`` naming every gate that failed, its figure and the ids."""
    failed = [gate for gate in gates if not gate.passed]
    if failed:
        raise DataFailure(
            "the set is rejected by " + "\n".join(gate.failure for gate in failed),
            code="gate",
            fix="correct or drop the demonstrations in rejected.json, or change refinement.gates",
        )


# Single demonstrations


def invalid_action(d: Demonstration, operations: Mapping[str, type[Operation]]) -> str | None:
    """The first invalid call: unknown operation or target, wrong arguments, a box outside the picture.

    A deliberate mistake may be invalid if its observation is an error.
    """
    targets: dict[str, str] = {media.id: media.kind for media in d.media}
    for number, step in enumerate(d.turns, 1):
        if step.op is None:
            continue
        problem = _problem(step, operations, targets)
        observation = step.observation
        if problem and (step.learn or observation is None or observation.status == "ok"):
            return f"turn {number}: {problem}"
        if observation is not None and observation.status == "ok":
            targets |= {str(observation.id): "image"} | {image.id: "image" for image in observation.images}
    return None


def _problem(step: Step, operations: Mapping[str, type[Operation]], targets: Mapping[str, str]) -> str | None:
    operation = operations.get(step.op or "")
    if operation is None:
        return f"unknown operation {step.op}"
    try:
        operation.check(step.arguments)
        for name, place in PLACES.items():
            if place.count == 4 and (value := step.arguments.get(name)) is not None:
                for box in value if place.many else [value]:
                    geometry.clamp(geometry.as_box(box))
    except OperationError as error:
        return f"{step.op}: {error.message}"
    target = step.target
    if target is not None and target not in targets:
        root, _, frame = target.partition(".")
        if not (targets.get(root) == "video" and frame.isdigit()):
            return f"{step.op}: unknown image {target}"
    return None


def missing_observation(d: Demonstration) -> str | None:
    """The first call without an observation, or that failed and would be learnt."""
    for number, step in enumerate(d.turns, 1):
        if step.op is None:
            continue
        if step.observation is None:
            return f"turn {number}: {step.op} has no observation"
        if step.learn and step.observation.status != "ok":
            return f"turn {number}: {step.op} failed with {step.observation.code} but has learn set"
    return None


def wrong_answer(d: Demonstration, score: Score) -> str | None:
    """Why the answer does not fit the kind; a correction must have a mistake and another call after it."""
    if d.final is None:
        return "it ends without an answer"
    try:
        value = score(d, d.final)
    except DataFailure as failure:
        return f"the answer cannot be checked: {failure.message}"
    if d.kind in WRONG_KINDS:
        return None if counts_as_wrong(d, value) else f"{d.kind}, but the answer {d.final[:40]!r} is right"
    if not counts_as_right(d, value):
        return f"{d.kind}, but the answer {d.final[:40]!r} is wrong"
    if d.kind != "self_correction":
        return None
    mistakes = [i for i, turn in enumerate(d.turns) if turn.op is not None and not turn.learn]
    if not mistakes:
        return "a correction without a mistake"
    later = [turn for turn in d.turns[mistakes[-1] + 1 :] if turn.op is not None]
    mistaken = {signature(d.turns[i]) for i in mistakes}
    is_corrected = later and all(signature(turn) not in mistaken for turn in later)
    return None if is_corrected else "the mistake is not corrected"


def cycle(d: Demonstration) -> str | None:
    """A sequence of calls that is repeated immediately: A A, A B A B, ..."""
    calls = [signature(step) for step in d.steps]
    for length in range(1, len(calls) // 2 + 1):
        for start in range(len(calls) - 2 * length + 1):
            middle = start + length
            if calls[start:middle] == calls[middle : middle + length]:
                names = " ".join(step.op or "" for step in d.steps[start:middle])
                return f"call {start + 1}: {names} is repeated"
    return None


# The whole set


def _balance(cells: Counter[tuple[str, str, str | None]], settings: GatesConfig) -> list[Gate]:
    tasks, kinds, levels = Counter[str](), Counter[str](), Counter[str]()
    tasks_by_level: dict[str, set[str]] = {level: set() for level in LEVELS}
    for (task, kind, level), n in cells.items():
        tasks[task] += n
        kinds[kind] += n
        if level is not None:
            levels[level] += n
            tasks_by_level[level].add(task)
    total = cells.total()
    critical = {kind: kinds[kind] for kind in CRITICAL_KINDS}
    ratio = max(tasks.values()) / min(tasks.values()) if tasks else 0.0
    extremes = {max(tasks.values()), min(tasks.values())} if ratio > settings.imbalance else set()
    unbalanced = {task: f"{n} demonstrations" for task, n in tasks.items() if n in extremes}
    measure = "ratio of the largest to the smallest of the tasks"
    gates = [
        _minimum(
            "per_task", "demonstrations of the rarest task", tasks, settings.per_task, "{} demonstrations"
        ),
        Gate("imbalance", ratio <= settings.imbalance, ratio, settings.imbalance, measure, unbalanced),
    ]
    if not settings.sizes:
        return gates
    shares = {level: levels[level] / levels.total() for level in LEVELS if levels}
    tasks_of_levels = {level: len(names) for level, names in tasks_by_level.items() if levels}
    return [
        *gates,
        Gate("total", total >= TOTAL, total, TOTAL, "number of demonstrations"),
        _minimum(
            "critical", "demonstrations of the rarest critical kind", critical, CRITICAL, "{} demonstrations"
        ),
        _minimum("level_share", "share of the smallest level", shares, LEVEL_SHARE, "share {:.3f}"),
        _minimum("level_tasks", "tasks in the poorest level", tasks_of_levels, LEVEL_TASKS, "{} tasks"),
    ]


def _minimum(name: str, measure: str, figures: Mapping[Any, float], limit: float, reason: str) -> Gate:
    smallest = min(figures.values(), default=0)
    return Gate(
        name,
        smallest >= limit,
        smallest,
        limit,
        measure,
        {k: reason.format(v) for k, v in figures.items() if v < limit},
    )


# Replay


def replay(demonstrations: Sequence[Demonstration], executor: Executor, share: float, seed: int) -> Gate:
    """Execute the calls of a share of the set again and compare, but not those of perceptual traps."""
    candidates = [i for i, d in enumerate(demonstrations) if d.kind != "trap_perceptual"]
    count = min(len(candidates), round(share * len(candidates)) or (1 if share else 0))
    sample = sorted(np.random.default_rng(seed).permutation(len(candidates))[:count].tolist())
    repeated = (demonstrations[candidates[i]] for i in sample)
    ids = {d.id: reason for d in repeated if (reason := _replay_difference(d, executor)) is not None}
    return Gate("replay", not ids, float(len(ids)), 0.0, f"number that differ of {count} executed again", ids)


def _replay_difference(d: Demonstration, executor: Executor) -> str | None:
    """The first difference; numbers are compared to five decimals, seconds not at all."""
    try:
        session = executor.open(d)
        for number, step in enumerate(d.turns, 1):
            if step.op is None or step.observation is None:
                continue
            again = session.execute(step.op, step.target, allow_error=True, **step.arguments)
            repeated, stored = again.model_dump(mode="json"), step.observation.model_dump(mode="json")
            for name in ("status", "code", "id", "text", "images", "data"):
                if rounded(stored[name], 5) != rounded(repeated[name], 5):
                    return f"turn {number}: {step.op} returns another {name}"
    except PixelisError as error:
        return error.message
    return None
