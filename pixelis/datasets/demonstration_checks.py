"""Checks demonstrations before they are played; nothing is opened or executed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from pixelis.datasets.bad_rows import BadRow
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
    try:
        environment = environment_of(row, environments or {})
    except BadInput as error:
        return BadRow.of(row, source, "environment", error.code, f"{error.message} ({error.fix})")
    if environment is not None:
        operations = {action.name: action for action in environment.actions}
    if row.scorer is not None:
        try:
            find_scorer(row.scorer)
        except BadInput as error:
            return BadRow.of(row, source, "scorer", error.code, f"{error.message} ({error.fix})")
    last = len(row.turns) - 1
    for number, turn in enumerate(row.turns):
        if turn.answer is not None and number < last:
            return BadRow.of(row, source, f"turns.{number}", "early_answer", "only the last turn answers")
        for call in (
            [Action(op=turn.op, arguments=turn.arguments), *turn.further]
            if turn.op is not None and turn.learn
            else []
        ):
            if problem := _call_problem(call, operations):
                return BadRow.of(row, source, f"turns.{number}.{problem[0]}", problem[1], problem[2])
    if row.turns[last].answer is None and environment is None:
        message = 'the last turn calls an operation; end with {"answer": "..."}'
        return BadRow.of(row, source, f"turns.{last}", "no_answer", message)
    return None


def _call_problem(call: Action, operations: Mapping[str, type[Operation]]) -> tuple[str, str, str] | None:
    name = call.op
    if name not in operations:
        near = difflib.get_close_matches(name, operations, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"operations: {', '.join(operations)}"
        hint = hint if operations else "the dialect has none: set dialogue.dialect=qwen"
        return "op", "unknown_op", f"no operation `{name}` ({hint})"
    for key, place in PLACES.items() if operations[name].targeted else ():
        values = call.arguments.get(key)
        places = values if place.many and isinstance(values, list | tuple) else [values]
        numbers = [
            v for item in places if isinstance(item, list | tuple) for v in item if isinstance(v, int | float)
        ]
        if any(not -SLACK <= v <= 1 + SLACK for v in numbers):
            message = (
                f"{list(numbers)} lies outside the picture: coordinates are 0..1 of the picture, not pixels"
            )
            return key, "out_of_range", message
    try:
        operations[name].check(call.arguments)
    except OperationError as error:
        fields = list(operations[name].Arguments.model_fields)
        return "arguments", error.code, f"{name}: {error.message}; arguments are {', '.join(fields)}"
    return None
