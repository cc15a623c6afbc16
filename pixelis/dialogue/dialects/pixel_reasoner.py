r"""Pixel-Reasoner: crop_image_normalized and select_frames, images by number, answers in ``\boxed{}``."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pixelis.dialogue.dialects.base import (
    BOXED,
    Dialect,
    Piece,
    Tag,
    boxed,
    checked_action,
    error_text,
    function,
    interleaved,
    numbers_schema,
    region,
)
from pixelis.dialogue.dialects.strict import only
from pixelis.errors import OperationError
from pixelis.operations.operation import Operation
from pixelis.operations.scale import Scale
from pixelis.records import Action, ImageView, Observation

TOOLS = {"zoom_in": "crop_image_normalized", "select_frames": "select_frames"}
SCHEMAS = {
    "zoom_in": function(
        TOOLS["zoom_in"],
        "Zoom in on a region of an image to see small details.",
        {
            "bbox_2d": {
                **numbers_schema("number", 4),
                "description": "left, top, right, bottom as fractions 0 to 1 of the image",
            },
            "target_image": {
                "type": "integer",
                "description": "number of the image in the order shown: 1 is the first image of the question",
            },
        },
        ["bbox_2d", "target_image"],
    ),
    "select_frames": function(
        TOOLS["select_frames"],
        "Show frames of the video in more detail.",
        {
            "target_frames": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "frame numbers, starting at 1",
            }
        },
        ["target_frames"],
    ),
}
RULE = "\nReason step by step{call}, and put the final answer in \\boxed{{}}."
CALL = " and call functions when you need to see more"
_END_OF_THOUGHT = re.compile(rf"<tool_call>|{BOXED.pattern}")
_END = re.compile(r"[\s.$*\])]*")


class PixelReasoner(Dialect):
    """Free text that ends with a call or contains the answer in ``\\boxed{}``.

    ``target_image`` counts all images from 1 in the order shown, ``target_frames`` the frames of the first
    clip. Boxes are fractions of the image; larger whole numbers are read as its pixels as shown. ``padding`` is
    added on each side of every crop. As in Pixel-Reasoner's code a turn is a call only if it ends with one, and
    the last of several calls counts.
    """

    name = "pixel_reasoner"
    tools = TOOLS
    schemas = SCHEMAS
    scale = "unit"
    thinks = False
    several = "last"
    both = "end"
    clamps = True
    rows_clamp = True

    def __init__(self, padding: float = 0.1) -> None:
        super().__init__()
        self.padding = padding

    def adapt(self, action: Action) -> Action:
        super().adapt(action)
        if action.op == "select_frames":
            if set(action.arguments) != {"frames"}:
                raise OperationError("pixel_reasoner selects frames by number only", code="bad_arguments")
            return action
        if action.arguments.get("padding") == self.padding and "box" in action.arguments:
            return action
        return action.model_copy(update={"arguments": {"box": region(action), "padding": self.padding}})

    def well_formed(self, text: str, calls: int = 1) -> bool:
        r"""True for a text that ends with its only call, or with its only ``\boxed{}``."""
        _, body = self._split(text)
        call, boxes = self._call.search(body), boxed(body)
        opened, closed = body.count("<tool_call>"), body.count("</tool_call>")
        if call is not None:
            return opened == closed == 1 and not boxes and not body[call.end() :].strip()
        return opened == closed == 0 and len(boxes) == 1 and _END.fullmatch(body, boxes[0][1] + 1) is not None

    def question(self, text: str, views: Sequence[ImageView], tools: bool, instruct: bool) -> list[Piece]:
        if not instruct:
            return interleaved(text, views)
        frames = ", ".join(str(view.frame + 1) for view in views if view.frame is not None)
        note = f"\nThe images are frames {frames} of the video." if frames else ""
        return [*interleaved(text, views), Tag(note + RULE.format(call=CALL if tools else ""))]

    def observation(self, observation: Observation, images_so_far: int, instruct: bool) -> list[Piece]:
        if observation.status == "error":
            return [f"Execution {error_text(observation)}"]
        images = observation.images
        if not images:
            return [observation.text]
        size = "{}x{}".format(*images[0].view_size)
        if images[0].frame is None:
            return [f"Image {images_so_far + 1}, the region asked for ({size}): ", *images]
        numbers = f"{images_so_far + 1}" + f" to {images_so_far + len(images)}" * (len(images) > 1)
        frames = ", ".join(str(image.frame + 1) for image in images if image.frame is not None)
        return [f"Images {numbers}, frames {frames} ({size}): ", *images]

    def _render_thought(self, think: str | None) -> list[str]:
        return [think, "\n"] if think else []

    def _render_answer(self, answer: str) -> list[str]:
        depths = list(itertools.accumulate({"{": 1, "}": -1}.get(sign, 0) for sign in answer))
        if min(depths, default=0) < 0 or depths[-1:] not in ([], [0]):
            raise OperationError("the braces of the answer do not match", code="bad_answer")
        return [Tag("\\boxed{"), answer, Tag("}")]

    def _answers(self, body: str) -> list[str]:
        """The boxes, else the answer tags, which Pixel-Reasoner's code accepts too."""
        return [body[start:end] for start, end in boxed(body)] or super()._answers(body)

    def _split(self, text: str) -> tuple[str | None, str]:
        """The thought is the text before the call or the first box, or in think tags if there are any."""
        think, body = super()._split(text)
        if think is None:
            end = _END_OF_THOUGHT.search(body)
            think = body[: end.start()].strip() if end else None
        return think or None, body

    def _write_call(self, action: Action, scale: Scale) -> dict[str, Any]:
        if action.op == "select_frames":
            if action.target != _clip(scale):
                raise OperationError(
                    f"pixel_reasoner has no name for {action.target[:20]}", code="bad_target"
                )
            numbers = [number + 1 for number in action.arguments["frames"]]
            arguments: dict[str, Any] = {"target_frames": numbers}
        else:
            if action.target not in scale.images:
                raise OperationError(f"no image {action.target[:20]}", code="bad_target")
            box = scale.write(action.arguments["box"], action.target)
            if max(box) > 1:
                raise OperationError("a number above 1 would be read as pixels", code="out_of_range")
            arguments = {"bbox_2d": box, "target_image": scale.images.index(action.target) + 1}
        return {"name": TOOLS[action.op], "arguments": arguments}

    def _read_call(self, call: Any, operations: Mapping[str, type[Operation]], scale: Scale) -> Action:
        op, arguments = self._named_call(call, operations)
        if op == "select_frames":
            only(arguments, ("target_frames",))
            target, frames = _clip(scale), arguments["target_frames"]
            if not isinstance(frames, list) or any(type(v) is not int for v in frames):
                raise OperationError("target_frames is a list of whole numbers", code="bad_arguments")
            if any(v < 1 for v in frames):
                raise OperationError("target_frames counts from 1", code="out_of_range")
            canonical: dict[str, Any] = {"frames": [v - 1 for v in frames]}
        else:
            only(arguments, ("bbox_2d", "target_image"))
            number, images = arguments["target_image"], scale.images
            if type(number) is not int or number < 1:
                raise OperationError("target_image is a number from 1", code="bad_target")
            if number > len(images):
                raise OperationError(
                    f"no image {str(number)[:20]}, there are {len(images)}", code="bad_target"
                )
            target = images[number - 1]
            canonical = {"box": _box(arguments["bbox_2d"], target, scale), "padding": self.padding}
        return checked_action(operations, op, target, canonical)


def _box(value: Any, target: str, scale: Scale) -> Any:
    """A box in fractions, or in whole pixels of the image as shown."""
    numbers = isinstance(value, list) and all(type(v) in (int, float) for v in value)
    if not numbers or all(v <= 1 for v in value):  # a box that begins left of the image too
        return scale.read("bbox_2d", value, target)
    if any(v != int(v) for v in value):
        raise OperationError("bbox_2d is four fractions 0..1, or four whole pixels", code="bad_box")
    return dataclasses.replace(scale, kind="pixels").read("bbox_2d", [int(v) for v in value], target)


def _clip(scale: Scale) -> str:
    """The first clip; else the first picture, which the operation then refuses."""
    return scale.clips[0] if scale.clips else next(iter(scale.images), "vid0")
