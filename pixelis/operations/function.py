"""Functions of clients and of tool servers as operations: a JSON schema describes and checks their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, ClassVar

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import extend
from pydantic import ConfigDict, model_serializer
from referencing.exceptions import Unresolvable

from pixelis.errors import OperationError
from pixelis.operations.operation import Operation, OperationArguments
from pixelis.records import Function

MAX_STEPS = 10_000
"""Most keywords that the check of one call applies, in less than a second."""
UNCHECKED = frozenset(
    {"$schema", "$dynamicRef", "pattern", "patternProperties", "uniqueItems"}
    | {"unevaluatedItems", "unevaluatedProperties"}
)
"""Keywords whose check no number of steps limits, as a regular expression's; whoever runs the function has them."""
NAMED = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose schemas have names."""
VALUES = frozenset({"enum", "const", "default", "examples"})

_steps: ContextVar[Iterator[int]] = ContextVar("steps")


class FunctionArguments(OperationArguments):
    """The arguments of a call as they were written."""

    model_config = ConfigDict(extra="allow")

    @model_serializer(mode="plain")
    def _as_written(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class FunctionOperation(Operation):
    """Base class of functions, which run elsewhere: it has no ``run``. Calls name no image of ours.

    Numbers are passed on as the policy writes them, also those of an argument ``box`` or ``bbox_2d``: only the
    function's owner knows their scale. ``parameters``: the schema that the policy reads.
    """

    Arguments = FunctionArguments
    targeted = False
    validator: ClassVar[Draft202012Validator]

    @classmethod
    def check(cls, arguments: Mapping[str, Any]) -> FunctionArguments:
        """Check arguments by the schema. Raises OperationError ``bad_arguments``, which the policy reads."""
        steps = _steps.set(iter(range(MAX_STEPS)))
        try:
            error = best_match(cls.validator.iter_errors(dict(arguments)))
        except (RecursionError, OverflowError, Unresolvable):
            raise OperationError("these arguments take too long to check", code="bad_arguments") from None
        finally:
            _steps.reset(steps)
        if error is not None:
            path = ".".join(str(part) for part in error.absolute_path)
            problem = f"{path[:40]}: {error.message[:200]}".removeprefix(": ")
            raise OperationError(problem, code="bad_arguments")
        return FunctionArguments.model_validate(dict(arguments))


def function_operation(function: Function) -> type[FunctionOperation]:
    """The operation of a function."""
    fields = {
        "name": function.name,
        "description": function.description,
        "parameters": {"type": "object", "properties": {}, **function.parameters},
        "validator": _Validator(_checkable(function.parameters)),
    }
    return type("ClientFunction", (FunctionOperation,), fields)


def _counted(check: Callable[..., Any]) -> Callable[..., Any]:
    """A keyword's check that ends the whole check once its steps are used up, as references can multiply them."""

    def counted(*arguments: Any) -> Any:
        if next(_steps.get(), None) is None:
            raise RecursionError
        return check(*arguments)

    return counted


_Validator = extend(
    Draft202012Validator,
    {keyword: _counted(check) for keyword, check in Draft202012Validator.VALIDATORS.items()},
)


def _checkable(schema: Any) -> Any:
    """The schema without the keywords that are not checked."""
    if isinstance(schema, list):
        return [_checkable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for keyword, value in schema.items():
        if keyword in VALUES:
            out[keyword] = value
        elif keyword in NAMED and isinstance(value, dict):
            out[keyword] = {name: _checkable(part) for name, part in value.items()}
        elif keyword not in UNCHECKED and not (
            keyword == "additionalProperties" and "patternProperties" in schema
        ):
            out[keyword] = _checkable(value)
    return out
