"""How actions and answers are written: one adapter per wire format, between text and the canonical Action.

Tool calls are JSON and nothing else: duplicate keys, NaN, booleans as numbers and unknown arguments are errors with a code that
the model can read. Coordinates are in one scale per model; a box in another scale is refused, never guessed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pixelis.dialogue.spec import Coordinates
from pixelis.errors import OperationError
from pixelis.operations.geometry import as_box
from pixelis.operations.operation import Operation
from pixelis.records import Action, Box, ImageView

DEFAULT_TARGET = "img0"


class Tag(str):
    """Text written by the dialect itself, which may become one special token; other text never does."""

    __slots__ = ()


@dataclass(frozen=True)
class Scale:
    """The numbers in which a model writes boxes, and how they map to 0..1 of a view.

    ``thousand``: whole numbers 0..1000. ``pixels``: whole pixels of the view as the model saw it, ``sizes`` holds (width, height)
    by image id; up to ``slack`` pixels beyond the border are let through (the operation clamps). None in ``sizes`` means that
    the images of the episode are not known and targets are not checked.
    """

    kind: Coordinates
    sizes: Mapping[str, tuple[int, int]] | None = None
    slack: int = 0

    @classmethod
    def of(cls, kind: Coordinates, images: Sequence[ImageView], slack: int = 0) -> Scale:
        """The scale for an episode with these views."""
        return cls(kind, {image.id: image.view_size for image in images} if images else None, slack if kind == "pixels" else 0)

    def extent(self, target: str) -> tuple[int, int]:
        """Largest x and y of a target; ``bad_target`` when the image does not exist."""
        if self.sizes is not None and target not in self.sizes:
            raise OperationError(f"no image {target[:20]}, use {', '.join(list(self.sizes)[:8])}", code="bad_target")
        if self.kind == "thousand":
            return 1000, 1000
        width, height = (self.sizes or {}).get(target, (0, 0))
        if width < 1 or height < 1:
            raise OperationError(f"the size of {target[:20]} is not known", code="bad_target")
        return width, height

    def read(self, value: Any, target: str) -> Box:
        """Numbers on the wire -> Box; ``bad_box`` or ``out_of_range``."""
        extent = self.extent(target)
        if not isinstance(value, list) or len(value) != 4:
            raise OperationError("bbox_2d is four numbers x0,y0,x1,y1", code="bad_box")
        for i, v in enumerate(value):
            limit = extent[i % 2]
            if type(v) is not int:
                raise OperationError(f"bbox_2d holds whole numbers 0..{limit}", code="bad_box")
            if not -self.slack <= v <= limit + self.slack:
                raise OperationError(f"bbox_2d must be between 0 and {limit}", code="out_of_range")
        x0, y0, x1, y1 = value
        if x0 >= x1 or y0 >= y1:
            raise OperationError("bbox_2d needs x0 < x1 and y0 < y1", code="bad_box")
        return x0 / extent[0], y0 / extent[1], x1 / extent[0], y1 / extent[1]

    def write(self, box: Box, target: str) -> list[int]:
        """Box -> nearest numbers on the wire; ``too_small`` when it has no area on that grid."""
        extent = self.extent(target)
        x0, y0, x1, y1 = (round(v * extent[i % 2]) for i, v in enumerate(as_box(box)))
        if x0 >= x1 or y0 >= y1:
            raise OperationError("the box is smaller than one step of the coordinates", code="too_small")
        return [x0, y0, x1, y1]


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
    ``box`` is written ``bbox_2d``.
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
            if key == "box":
                arguments["bbox_2d"] = scale.write(value, said.target)
            else:
                arguments[key] = value
        if said.target != DEFAULT_TARGET:
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
        properties, required = dict(schema.get("properties", {})), list(schema.get("required", []))
        if "box" in properties:
            unit = "0 to 1000 of the image" if kind == "thousand" else "pixels of the image as shown"
            properties = {"bbox_2d": _box_schema(unit), **{k: v for k, v in properties.items() if k != "box"}}
            required = ["bbox_2d" if name == "box" else name for name in required]
        properties["target"] = {"type": "string", "description": f"id of the image: img0, obs1, ...; {DEFAULT_TARGET} by default"}
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
        target = arguments.pop("target", DEFAULT_TARGET)
        if not isinstance(target, str):
            raise OperationError("target is the id of an image", code="bad_target")
        scale.extent(target)
        if "box" in arguments:
            raise OperationError("box is unknown, write bbox_2d", code="bad_arguments")
        fields = operations[name].Arguments.model_fields
        if "bbox_2d" in arguments and "box" in fields:
            arguments["box"] = scale.read(arguments.pop("bbox_2d"), target)
        elif "box" in fields and fields["box"].is_required():
            raise OperationError("bbox_2d is missing", code="bad_arguments")
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


def _box_schema(unit: str) -> dict[str, Any]:
    return {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 4,
        "maxItems": 4,
        "description": f"left, top, right, bottom of the region in {unit}",
    }
