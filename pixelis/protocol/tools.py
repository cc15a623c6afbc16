"""The tools of a request, which its client runs, and how the reply may call them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from pixelis.protocol.errors import ApiError, PlainText, invalid, text_or
from pixelis.protocol.messages import Call
from pixelis.protocol.parts import LenientModel
from pixelis.records import Function
from pixelis.records.question import MAX_FUNCTIONS


class FunctionBody(LenientModel):
    """A function: its name, what it does, and the JSON schema of its arguments."""

    name: str | None = None
    description: PlainText | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(FunctionBody):
    """A tool as chat completions spell it, with a ``function``, or as responses do, without."""

    type: str
    function: FunctionBody | None = None


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
        names = {call.name for call in calls}
        unmet = ""
        if len(calls) > 1 and not self.parallel:
            unmet = "parallel_tool_calls"
        elif (
            (names and self.choice == "none")
            or (not names and self.choice == "required")
            or (self.named is not None and names != {self.named})
        ):
            unmet = "tool_choice"
        if unmet:
            message = f"the model's calls are not what `{unmet}` asks for: {', '.join(names) or 'none'}"
            raise ApiError(422, message, "tool_choice_unmet", unmet)


class ToolsBody(BaseModel):
    """The fields of a request with tools."""

    tools: Annotated[list[ToolBody], Field(max_length=MAX_FUNCTIONS, fail_fast=True)] | None = None
    tool_choice: text_or(ToolBody) | None = None  # type: ignore[valid-type]
    parallel_tool_calls: bool | None = None

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def toolset(self, operations: Collection[str] = ()) -> Toolset:
        """The client's tools; no name may be that of one of our ``operations``. Raises ApiError 400."""
        functions = dict[str, Function]()
        for i, tool in enumerate(self.tools or ()):
            place = f"tools[{i}]"
            function = _function(tool, place)
            if function.name in operations or function.name in functions:
                owner = "an operation of the server" if function.name in operations else "another tool"
                raise invalid(place, f"{function.name} is also the name of {owner}", "name_taken")
            functions[function.name] = function
        read = Toolset(tuple(functions.values()), parallel=self.parallel_tool_calls is not False)
        choice = self.tool_choice
        if choice in (None, "auto"):
            return read
        if choice == "none":
            return replace(read, choice="none")
        if choice == "required" and functions:
            return replace(read, choice="required")
        if isinstance(choice, ToolBody) and choice.type == "function":
            name = (choice.function or choice).name
            if name in functions:
                return replace(read, choice="required", named=name)
        raise invalid("tool_choice", "it must be none, auto, required or one of the functions in `tools`")


def _function(tool: ToolBody, place: str) -> Function:
    if tool.type != "function":
        problem = f"tools of type `{tool.type[:40]}` are not supported: send functions"
        raise invalid(f"{place}.type", problem, "unsupported_tool")
    body, place = (tool.function, f"{place}.function") if tool.function is not None else (tool, place)
    try:
        return Function(
            name=body.name or "",
            description=body.description or "",
            parameters=body.parameters or {},
            strict=bool(body.strict),
        )
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        code = "invalid_schema" if first["loc"] == ("parameters",) else "invalid_value"
        raise invalid(
            f"{place}.{first['loc'][0]}", first["msg"].removeprefix("Value error, "), code
        ) from None
