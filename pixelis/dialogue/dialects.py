"""How actions and answers are written: one adapter per wire format, between text and the canonical Action.

Tool calls are JSON and nothing else: duplicate keys, NaN, booleans as numbers and unknown arguments are errors with a code that
the model can read. Coordinates are in one scale per model; a box in another scale is refused, never guessed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pixelis.dialogue.spec import Coordinates
from pixelis.errors import OperationError
from pixelis.operations.operation import Operation
from pixelis.operations.scale import WIRE, Scale
from pixelis.records import Action

DEFAULT_TARGET = "img0"


def default_target(sizes: Mapping[str, Any] | None) -> str:
    """What a call without a target is about: the first picture, or the first clip of a question without pictures."""
    return DEFAULT_TARGET if not sizes or DEFAULT_TARGET in sizes else next(iter(sizes))


class Tag(str):
    """Text written by the dialect itself, which may become one special token; other text never does."""

    __slots__ = ()


@dataclass(frozen=True)
class Reply:
    """What a policy turn says. At most one of ``action``, ``answer`` and ``error`` is set; none of them is idle talk."""

    think: str | None = None
    action: Action | None = None
    answer: str | None = None
    error: OperationError | None = None


@dataclass(frozen=True)
class _Qwen:
    """``<think>..</think>`` then ``<tool_call>{"name":..,"arguments":{..}}</tool_call>`` or ``<answer>..</answer>``.

    The format of Qwen's agents. An optional ``target`` argument names the image, ``img0`` when it is left out; a canonical
    ``box``, ``point`` or ``center`` is written ``bbox_2d``, ``point_2d`` or ``center_2d``.
    """

    name: str = "qwen"
    tags: tuple[str, ...] = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>")
    _call: re.Pattern[str] = field(default=re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL), repr=False)
    _answer: re.Pattern[str] = field(default=re.compile(r"<answer>(.*?)</answer>", re.DOTALL), repr=False)

    def render(self, said: Action | str, scale: Scale, think: str | None = None) -> list[str]:
        """A policy turn that calls an operation or answers, in pieces; pieces of type Tag may become special tokens."""
        parts: list[str] = [Tag("<think>"), think, Tag("</think>")] if think else []
        if isinstance(said, str):
            return [*parts, Tag("<answer>"), said, Tag("</answer>")]
        arguments: dict[str, Any] = {}
        for key, value in said.arguments.items():
            if key in WIRE:
                arguments[WIRE[key]] = scale.write(value, said.target)
            else:
                arguments[key] = value
        if said.target != default_target(scale.sizes):
            arguments["target"] = said.target
        call = json.dumps({"name": said.op, "arguments": arguments}, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return [*parts, Tag("<tool_call>"), call, Tag("</tool_call>")]

    def parse(self, text: str, operations: Mapping[str, type[Operation]], scale: Scale) -> Reply:
        """Read a policy turn. Never raises: a broken call is a Reply with ``error``.

        Codes: bad_json, unknown_op, bad_arguments, bad_target, bad_box, out_of_range, limit (several calls, or a call and an
        answer). Tags inside the thought are not looked at; of several answers the last one counts.
        """
        think, body = self._split(text)
        answers = self._answer.findall(self._call.sub("", body))
        opened, closed = body.count("<tool_call>"), body.count("</tool_call>")
        if not opened and not closed:
            return Reply(think=think, answer=answers[-1].strip() if answers else None)
        try:
            if max(opened, closed) > 1:
                raise OperationError(f"{max(opened, closed)} calls in a turn, make one", code="limit")
            call = self._call.search(body)
            if call is None:
                raise OperationError("the call is not closed" if opened else "the call is not opened", code="bad_json")
            if answers:
                raise OperationError("call or answer, not both", code="limit")
            return Reply(think=think, action=self._action(call[1], operations, scale))
        except OperationError as error:
            return Reply(think=think, error=error)

    def well_formed(self, text: str) -> bool:
        """True for an optional thought and then exactly one call or one answer, with nothing around them."""
        think, body = self._split(text)
        body = body.strip()
        match = self._call.fullmatch(body) or self._answer.fullmatch(body)
        if match is None or any(tag in match[1] or (think is not None and tag in think) for tag in self.tags):
            return False
        return "</think>" not in text or text.lstrip().startswith("<think>")

    def schema(self, operation: type[Operation], kind: Coordinates) -> dict[str, Any]:
        """The JSON schema of a call, as Qwen's tool prompt wants it."""
        schema = operation.Arguments.model_json_schema()
        unit = "0 to 1000 of the image" if kind == "thousand" else "pixels of the image as shown"
        properties = {}
        for name, described in schema.get("properties", {}).items():
            place = _place_schema(name, unit)
            if place and "description" in described:
                place["description"] = f"{described['description']}: {place['description']}"
            properties[WIRE.get(name, name)] = place or _plain(described)
        required = [WIRE.get(name, name) for name in schema.get("required", [])]
        properties["target"] = {
            "type": "string",
            "description": "id of the image or video: img0, obs1, vid0, ...; default: the first",
        }
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": operation.name, "description": operation.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def _split(self, text: str) -> tuple[str | None, str]:
        before, closing, after = text.partition("</think>")
        if not closing:
            return None, text
        return before.lstrip().removeprefix("<think>"), after

    def _action(self, text: str, operations: Mapping[str, type[Operation]], scale: Scale) -> Action:
        call = strict_json(text)
        if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
            raise OperationError('a call is {"name":...,"arguments":{...}}', code="bad_json")
        name, arguments = call["name"], call["arguments"]
        if not isinstance(name, str) or name not in operations:
            offered = ", ".join(operations)
            raise OperationError(f"use {offered}" if offered else "answer without operations", code="unknown_op")
        if not isinstance(arguments, dict):
            raise OperationError("arguments is an object", code="bad_arguments")
        arguments = dict(arguments)
        target = arguments.pop("target", default_target(scale.sizes))
        if not isinstance(target, str):
            raise OperationError("target is the id of an image", code="bad_target")
        scale.extent(target)
        fields = operations[name].Arguments.model_fields
        for field_name, wire in WIRE.items():
            if field_name in arguments:
                raise OperationError(f"{field_name} is unknown, write {wire}", code="bad_arguments")
            if field_name not in fields:
                continue
            if (place := arguments.pop(wire, None)) is not None:
                arguments[field_name] = scale.read(wire, place, target)
            elif fields[field_name].is_required():
                raise OperationError(f"{wire} is missing", code="bad_arguments")
        checked = operations[name].check(arguments)
        return Action(op=name, target=target, arguments=checked.model_dump(mode="json", exclude_none=True))


DIALECTS: dict[str, _Qwen] = {"qwen": _Qwen()}
"""Dialects by the name a trajectory carries."""


def strict_json(text: str) -> Any:
    """JSON and nothing more: ``bad_json`` for duplicate keys, NaN, infinities, huge numbers, half characters, deep nesting."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            raise ValueError("a key stands twice")
        return out

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ValueError("a number is not finite")
        return value

    def constant(name: str) -> float:
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_float=number, parse_constant=constant)
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise OperationError("an escape is half a character", code="bad_json") from None
    except json.JSONDecodeError as error:
        raise OperationError(f"the call is not JSON at character {error.pos}", code="bad_json") from None
    except ValueError as error:
        reason = str(error) if len(str(error)) < 60 else "a number is too long"
        raise OperationError(reason, code="bad_json") from None
    except RecursionError:
        raise OperationError("the call is nested too deeply", code="bad_json") from None


def _place_schema(name: str, unit: str) -> dict[str, Any] | None:
    """The wire schema of an argument that is a place, None for others."""
    if name not in WIRE:
        return None
    count, what = (4, "left, top, right, bottom") if name == "box" else (2, "x, y")
    shape = {"type": "array", "items": {"type": "integer"}, "minItems": count, "maxItems": count}
    return {**shape, "description": f"{what} in {unit}"}


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """A property without what tells the policy nothing: titles, and the null of an optional argument."""
    schema = {key: value for key, value in schema.items() if key != "title"}
    kinds = [kind for kind in schema.get("anyOf", []) if kind.get("type") != "null"]
    if len(kinds) == 1 and len(kinds) < len(schema["anyOf"]):
        schema = {**kinds[0], **{key: value for key, value in schema.items() if key != "anyOf" and value is not None}}
    return schema
