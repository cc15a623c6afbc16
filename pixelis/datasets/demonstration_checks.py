"""Checks demonstrations before they are played; nothing is opened or executed."""

from __future__ import annotations

from collections.abc import Mapping

from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.source_options import suggest
from pixelis.dialogue.dialects.base import DEFAULT_TARGET
from pixelis.errors import BadInput, OperationError
from pixelis.operations.environment import Environment, environment_of
from pixelis.operations.operation import Operation
from pixelis.operations.scale import PLACES
from pixelis.records import Action, Demonstration
from pixelis.rewards.scorers import find_scorer

SLACK = 0.01
"""How far outside of 0..1 a rounded coordinate may lie."""


def check_demonstration(
    row: Demonstration,
    source: str,
    operations: Mapping[str, type[Operation]],
    environments: Mapping[str, type[Environment]] | None = None,
) -> BadRow | None:
    """The first thing that is wrong with ``row``, or None; turns that are not learnt may be mistaken.

    An environment may end the episode, so such a row need not end with an answer.
    """
    column = "environment"
    try:
        environment = environment_of(row, environments or {})
        column = "scorer"
        find_scorer(row.scorer)
    except BadInput as error:
        return BadRow.of(row, source, column, error.code, f"{error.message} ({error.fix})")
    if environment is not None:
        operations = {action.name: action for action in environment.actions}
    last = len(row.turns) - 1
    for number, turn in enumerate(row.turns):
        if turn.answer is not None and number < last:
            return BadRow.of(row, source, f"turns.{number}", "early_answer", "only the last turn answers")
        if turn.op is None or not turn.learn:
            continue
        for call in turn.calls(DEFAULT_TARGET):
            if problem := _call_problem(call, operations):
                field, code, message = problem
                return BadRow.of(row, source, f"turns.{number}.{field}", code, message)
    if row.turns[last].answer is None and environment is None:
        message = 'the last turn calls an operation; end with {"answer": "..."}'
        return BadRow.of(row, source, f"turns.{last}", "no_answer", message)
    return None


def _call_problem(call: Action, operations: Mapping[str, type[Operation]]) -> tuple[str, str, str] | None:
    name = call.op
    if name not in operations:
        hint = f"operations: {', '.join(operations)}{suggest(name, operations)}"
        hint = hint if operations else "the dialect has none: set dialogue.dialect=qwen"
        return "op", "unknown_op", f"no operation `{name}` ({hint})"
    for key, place in PLACES.items() if operations[name].targeted else ():
        values = call.arguments.get(key)
        places = values if place.many and isinstance(values, list | tuple) else [values]
        numbers = [
            v for item in places if isinstance(item, list | tuple) for v in item if isinstance(v, int | float)
        ]
        if any(not -SLACK <= v <= 1 + SLACK for v in numbers):
            return key, "out_of_range", f"{numbers} lies outside 0..1: coordinates are shares, not pixels"
    try:
        operations[name].check(call.arguments)
    except OperationError as error:
        fields = ", ".join(operations[name].Arguments.model_fields)
        return "arguments", error.code, f"{name}: {error.message}; arguments are {fields}"
    return None
