"""The tools of a request, which its client runs, and how the reply may call them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from pixelis.errors import BadInput
from pixelis.protocol.answer_format import check_schema
from pixelis.protocol.errors import MAX_NAME_CHARS, ApiError, PlainText, text_or
from pixelis.protocol.messages import Call
from pixelis.protocol.parts import LenientModel
from pixelis.records import Function

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARS = 4096
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class FunctionBody(LenientModel):
    """A function: its name, what it does, and the JSON schema of its arguments."""

    name: str | None = Field(None, max_length=MAX_NAME_CHARS)
    description: PlainText | None = Field(None, max_length=MAX_DESCRIPTION_CHARS)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(FunctionBody):
    """A tool as chat completions spell it, with a ``function``, or as responses do, without."""

    type: str
    function: FunctionBody | None = None


Tools = Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = text_or(ToolBody)


@dataclass(frozen=True)
class Toolset:
    """The functions of a request. ``named`` is the one that a ``required`` call must call, None: any."""

    functions: tuple[Function, ...] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    named: str | None = None
    parallel: bool = True

    @property
    def offered(self) -> tuple[Function, ...]:
        return () if self.choice == "none" else self.functions

    def check(self, calls: Sequence[Call]) -> None:
        """Raises ApiError 422 ``tool_choice_unmet`` for a reply that calls otherwise than it must."""
        if len(calls) > 1 and not self.parallel:
            raise ApiError(422, "the model made several calls", "tool_choice_unmet", "parallel_tool_calls")
        allowed = {self.named} if self.named is not None else {call.name for call in calls}
        if (
            (calls and self.choice == "none")
            or (not calls and self.choice == "required")
            or not allowed.issuperset(call.name for call in calls)
        ):
            choice = self.named or self.choice
            message = f"the model's reply is not what `tool_choice` asks for: {choice}"
            raise ApiError(422, message, "tool_choice_unmet", "tool_choice")


def read_tools(
    tools: Sequence[ToolBody] | None,
    choice: str | ToolBody | None,
    parallel: bool | None,
    operations: Collection[str] = (),
) -> Toolset:
    """The functions of a request; no name may be that of one of the ``operations``. Raises ApiError 400."""
    functions = list[Function]()
    for i, tool in enumerate(tools or ()):
        place = f"tools[{i}]"
        functions.append(_function(tool, f"{place}.function" if tool.function else place))
        name = functions[-1].name
        if name in operations or name in [other.name for other in functions[:-1]]:
            owner = "an operation of the server" if name in operations else "another tool"
            raise ApiError(400, f"`{place}`: {name} is also the name of {owner}", "name_taken", place)
    read = Toolset(tuple(functions), parallel=parallel is not False)
    if choice is None or choice == "auto" or (choice == "none" and not functions):
        return read
    if isinstance(choice, str):
        if choice not in ("none", "required"):
            message = "`tool_choice` must be none, auto, required or a function"
            raise ApiError(400, message, "invalid_value", "tool_choice")
        named = None
    else:
        named = (choice.function or choice).name
        if choice.type != "function":
            message = f"`tool_choice` of type `{choice.type[:40]}` is not supported"
            raise ApiError(400, message, "unsupported_tool", "tool_choice.type")
    if not functions or (named is None) is not isinstance(choice, str):
        raise ApiError(400, "`tool_choice` names no function of `tools`", "invalid_value", "tool_choice")
    if named is not None and named not in [function.name for function in functions]:
        raise ApiError(400, f"`tools` has no function {named[:64]!r}", "invalid_value", "tool_choice")
    return Toolset(read.functions, "none" if choice == "none" else "required", named, read.parallel)


def _function(tool: ToolBody, place: str) -> Function:
    if tool.type != "function":
        message = f"tools of type `{tool.type[:40]}` are not supported: send functions"
        raise ApiError(400, message, "unsupported_tool", f"{place.removesuffix('.function')}.type")
    body = tool.function or tool
    if _NAME.fullmatch(body.name or "") is None:
        message = f"`{place}.name` must be 1 to 64 letters, digits, underscores or dashes"
        raise ApiError(400, message, "invalid_value", f"{place}.name")
    parameters = body.parameters or {"type": "object", "properties": {}}
    try:
        check_schema(parameters, tool=True)
        if parameters.get("type") != "object":
            raise BadInput("the arguments of a function are an object", code="invalid_schema")
    except BadInput as error:
        where = f"{place}.parameters"
        raise ApiError(400, f"`{where}`: {error.message}", error.code, where) from None
    return Function(
        name=body.name or "",
        description=body.description or "",
        parameters=parameters,
        strict=bool(body.strict),
    )
