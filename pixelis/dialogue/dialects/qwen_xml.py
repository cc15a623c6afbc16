"""Qwen from 3.5 on, and Qwen3-Coder: the calls of `qwen` with a tag for the function and for each parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pixelis.dialogue.dialects.base import Piece, Tag, is_of_client
from pixelis.dialogue.dialects.qwen import Qwen
from pixelis.dialogue.dialects.strict import strict_json
from pixelis.errors import OperationError
from pixelis.operations.operation import Operation
from pixelis.operations.scale import Scale
from pixelis.records import Action, Observation

FUNCTIONS = """You have access to the following functions:

<tools>
{schemas}
</tools>

Call a function in this form, with nothing after it:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This value
has several lines
</parameter>
</function>
</tool_call>"""

NOT_TEXT = ["integer", "number", "boolean", "array", "object", "null"]
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)


class QwenXml(Qwen):
    """The form of calls, thoughts and results that the chat templates of these models write."""

    name = "qwen_xml"
    signatures = FUNCTIONS

    def observation(self, observation: Observation, images_so_far: int, instruct: bool) -> list[Piece]:
        opening, *content, closing = super().observation(observation, images_so_far, instruct)
        if is_of_client(observation):
            return [opening, *content, closing]
        return [opening, "\n", *content, "\n", closing]

    def _render_thought(self, think: str | None) -> list[str]:
        return [Tag("<think>"), f"\n{think}\n", Tag("</think>"), "\n\n"] if think else []

    def _dump(self, call: Any) -> str:
        return write_call(call)

    def _load(self, text: str) -> Any:
        return read_call(text)

    def _read_call(self, call: Any, operations: Mapping[str, type[Operation]], scale: Scale) -> Action:
        if (operation := operations.get(call["name"])) is not None:
            described = self.schema(operation, scale.kind)["function"]["parameters"]["properties"]
            arguments = {
                name: read_value(text, described.get(name, {})) for name, text in call["arguments"].items()
            }
            call = {"name": call["name"], "arguments": arguments}
        return super()._read_call(call, operations, scale)


def write_call(call: dict[str, Any]) -> str:
    """``{"name":..,"arguments":{..}}`` in tags, between line breaks."""
    lines = [f"<function={call['name']}>"]
    for name, value in call["arguments"].items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"<parameter={name}>", text, "</parameter>"]
    return "\n".join(["", *lines, "</function>", ""])


def read_call(text: str) -> dict[str, Any]:
    """Name and arguments of a call in tags, values as text. OperationError ``bad_json``."""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        raise OperationError("a call is <function=name>...</function>", code="bad_json")
    parameters = list(_PARAMETER.finditer(function[2]))
    arguments = {match[1].strip(): match[2] for match in parameters}
    if _PARAMETER.sub("", function[2]).strip() or len(arguments) != len(parameters):
        raise OperationError("write each parameter once: <parameter=name>...</parameter>", code="bad_json")
    return {"name": function[1].strip(), "arguments": arguments}


def read_value(text: str, described: Any) -> Any:
    """A parameter's value, by its JSON schema: text as it stands, all else JSON."""
    described = described if isinstance(described, Mapping) else {}
    options = described.get("anyOf", [described])
    kinds = [option.get("type") if isinstance(option, Mapping) else None for option in options]
    if kinds == ["string"] or not text:
        return text
    try:
        return strict_json(text.lower() if text in ("True", "False", "None") else text)
    except OperationError:
        if all(kind in NOT_TEXT for kind in kinds):
            raise
        return text
