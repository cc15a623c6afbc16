"""DeepEyes: image_zoom_in_tool and image_rotate_tool on the question's picture, in pixels as shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pixelis.dialogue.dialects.base import (
    RESPONSE,
    RESPONSE_END,
    Dialect,
    Piece,
    Tag,
    checked_action,
    error_text,
    first_image,
    function,
    interleaved,
    numbers_schema,
    region,
    rounded,
)
from pixelis.errors import OperationError
from pixelis.operations.operation import Operation
from pixelis.operations.scale import Scale
from pixelis.records import Action, ImageView, Observation

TOOLS = {"zoom_in": "image_zoom_in_tool", "rotate": "image_rotate_tool"}
"""Supported operations and their names in calls."""
SCHEMAS = {
    "zoom_in": function(
        TOOLS["zoom_in"],
        "Zoom in on a region of the question's image.",
        {
            "bbox_2d": {
                **numbers_schema("integer", 4),
                "description": "left, top, right, bottom in pixels of the image as shown",
            },
            "label": {"type": "string", "description": "optional description of the region"},
        },
        ["bbox_2d"],
    ),
    "rotate": function(
        TOOLS["rotate"],
        "Rotate the question's image.",
        {"angle": {"type": "number", "description": "degrees clockwise; -90 is counter-clockwise"}},
        ["angle"],
    ),
}
FIELDS = {"zoom_in": "bbox_2d", "rotate": "angle"}
MIN_SIDE, MAX_RATIO, MAX_ANGLE = 30, 100, 3600
"""Sides of a region are longer than this many pixels, and their ratio is no larger, in DeepEyes' code."""
RULE = "\nThink first inside <think>...</think>, {call}then answer inside <answer>...</answer>."
CALL = "call a function inside <tool_call>...</tool_call> if you need to see more, "


class DeepEyes(Dialect):
    """A thought, then a call or an answer in tags.

    Boxes are pixels of the first picture as shown; no other picture can be named. Angles are clockwise, as
    DeepEyes describes its tool; its code turns counter-clockwise. As in its code the last of several calls
    counts (with ``max_calls`` above 1 the first ones, as in `visual_toolbox_v5`), but an answer before any
    call; fractions of pixels are rounded, further fields are ignored, and a region of 30 pixels or less, or
    thinner than 1:100, is refused.
    """

    name = "deepeyes"
    tools = TOOLS
    schemas = SCHEMAS
    scale = "pixels"
    boxes = True
    parallel_calls = True
    several = "last"
    both = "answer"
    clamps = True
    rows_clamp = True

    def adapt(self, action: Action) -> Action:
        """Convert any zoom to a box."""
        super().adapt(action)
        if action.op == "zoom_in":
            return action.model_copy(update={"arguments": {"box": region(action)}})
        if set(action.arguments) != {"angle"}:
            raise OperationError("deepeyes rotates whole pictures only", code="bad_arguments")
        return action

    def question(self, text: str, views: Sequence[ImageView], tools: bool, instruct: bool) -> list[Piece]:
        return [*interleaved(text, views), *self._rule(tools, instruct)]

    def observation(self, observation: Observation, images_so_far: int, instruct: bool) -> list[Piece]:
        pieces: list[Piece] = [*observation.images]
        if observation.status == "error":
            pieces = [error_text(observation)]
        elif not pieces:
            pieces = [observation.text]
        return [RESPONSE, *pieces, RESPONSE_END, *self._rule(True, instruct)]

    def _rule(self, tools: bool, instruct: bool) -> list[Piece]:
        return [Tag(RULE.format(call=CALL if tools else ""))] if instruct else []

    def _write_call(self, action: Action, scale: Scale) -> dict[str, Any]:
        if action.target != first_image(scale):
            raise OperationError(f"deepeyes has no name for {action.target[:20]}", code="bad_target")
        arguments = dict(action.arguments)
        if action.op == "zoom_in":
            arguments = {"bbox_2d": scale.write(arguments["box"], action.target)}
            _box(arguments["bbox_2d"], action.target, scale)  # never write what would be refused
        return {"name": TOOLS[action.op], "arguments": arguments}

    def _read_call(self, call: Any, operations: Mapping[str, type[Operation]], scale: Scale) -> Action:
        if isinstance(call, dict):
            call = {key: value for key, value in call.items() if key in ("name", "arguments")}
        op, arguments = self._named_call(call, operations)
        target, key = first_image(scale), FIELDS[op]
        if key not in arguments:
            raise OperationError(f"{key} is missing", code="bad_arguments")
        canonical: dict[str, Any] = {}
        if op == "zoom_in":
            canonical["box"] = _box(arguments[key], target, scale)
        else:
            angle = arguments[key]
            if type(angle) not in (int, float) or abs(angle) > MAX_ANGLE:
                raise OperationError(f"angle is a number of degrees up to {MAX_ANGLE}", code="bad_arguments")
            canonical["angle"] = float(angle % 360)
        return checked_action(operations, op, target, canonical)


def _box(value: Any, target: str, scale: Scale) -> Any:
    """A box in pixels of the image as shown that DeepEyes does not refuse."""
    left, top, right, bottom = scale.read("bbox_2d", rounded(value), target)  # type: ignore[misc]
    width, height = scale.extent(target)
    sides = round((right - left) * width), round((bottom - top) * height)
    if min(sides) <= MIN_SIDE:
        raise OperationError(
            f"the region is {sides[0]}x{sides[1]} pixels, more than {MIN_SIDE} are needed", code="too_small"
        )
    if max(sides) > MAX_RATIO * min(sides):
        raise OperationError(f"the region is thinner than 1:{MAX_RATIO}", code="bad_box")
    return left, top, right, bottom
