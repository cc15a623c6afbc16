"""Mini-o3: a region of a named picture as ``<grounding>`` JSON in 0..1; zooming in is the only operation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pixelis.dialogue.dialects.base import (
    ANSWER_RULE,
    Dialect,
    Piece,
    Tag,
    checked_action,
    describe_view,
    error_text,
    first_image,
    region,
)
from pixelis.dialogue.dialects.strict import only, strict_json
from pixelis.errors import OperationError
from pixelis.operations.operation import Operation
from pixelis.operations.scale import Scale
from pixelis.records import Action, Coordinates, ImageView, Observation

ORIGINAL = "original_image"
ORIGINALS = (ORIGINAL, "observation_0")
"""Names of the first picture; the first one is written."""
ZOOM = "zoom_in"
RULE = """Think inside <think>...</think>. In each turn, either zoom in on a region or answer.
To zoom in: <grounding>{"bbox_2d": [x0, y0, x1, y1], "source": "original_image"}</grounding>. The box is left, top, right, \
bottom as fractions 0 to 1 of the source, which is "original_image" or an earlier observation such as "observation_1".
To answer: <answer>...</answer>."""
CONTINUE = "\nContinue: think, then zoom in on a region or answer."
_CANONICAL_ID = re.compile(r"obs(\d+)")
_QUOTED = re.compile(r"""([{,:]\s*)['"]([^'"\\]*)['"](?=\s*[,:}])""")
"""A key or value of a call in single, double or mixed quotes."""
_WIRE_ID = re.compile(r"observation_(\d{1,4})(?!\d)")


class MiniO3(Dialect):
    """A thought, then ``<grounding>{"bbox_2d":[..],"source":"observation_1"}</grounding>`` or an answer.

    ``original_image`` is the first picture, or the first frame of a clip; ``observation_1`` is the first
    successful observation. As in Mini-o3's code ``observation_0`` is the picture, words after the number and
    single or mixed quotes are read, and a turn ends with its first call, also inside a thought or before an
    answer. Calls are written with a blank after commas and colons, the box first: Mini-o3's parser reads no
    other form.
    """

    name = "mini_o3"
    call = "grounding"
    tools = {ZOOM: "grounding"}  # noqa: RUF012
    scale = "unit"
    several = "first"
    both = "call"
    rows_clamp = True
    separators = (", ", ": ")
    stop = "</grounding>"

    def adapt(self, action: Action) -> Action:
        super().adapt(action)
        return action.model_copy(update={"arguments": {"box": region(action)}})

    def system(
        self,
        views: Sequence[ImageView],
        operations: Mapping[str, type[Operation]],
        coordinates: Coordinates,
        max_calls: int = 1,
    ) -> list[Piece]:
        if not operations:
            return [Tag(ANSWER_RULE)]
        if len(views) < 2:
            return [Tag(RULE)]
        return [
            Tag(RULE),
            Tag("\nFurther sources: "),
            ", ".join(describe_view(view) for view in views[1:]),
            Tag("."),
        ]

    def observation(self, observation: Observation, images_so_far: int, instruct: bool) -> list[Piece]:
        if observation.status == "error":
            return [error_text(observation), Tag("\nTry again.") if instruct else ""]
        return [f"{_wire_id(str(observation.id))}: ", *observation.images, Tag(CONTINUE) if instruct else ""]

    def _write_call(self, action: Action, scale: Scale) -> dict[str, Any]:
        box = scale.write(action.arguments["box"], action.target)
        return {
            "bbox_2d": box,
            "source": ORIGINAL if action.target == first_image(scale) else _wire_id(action.target),
        }

    def _read_call(self, call: Any, operations: Mapping[str, type[Operation]], scale: Scale) -> Action:
        if not isinstance(call, dict):
            raise OperationError('a region is {"bbox_2d":[...],"source":"..."}', code="bad_json")
        if ZOOM not in operations:
            raise OperationError("answer without operations", code="unknown_op")
        only(call, ("bbox_2d", "source"))
        if not isinstance(source := call["source"], str):
            raise OperationError("source is the name of an image", code="bad_target")
        match = _WIRE_ID.match(source)
        name = f"observation_{int(match[1])}" if match else source
        targets = {_wire_id(image): image for image in scale.images[1:]}
        targets |= dict.fromkeys(ORIGINALS, first_image(scale))
        if name not in targets:
            names = [ORIGINAL, *(target for target in targets if target not in ORIGINALS)]
            raise OperationError(f"no image {source[:20]}, use {', '.join(names[:8])}", code="bad_target")
        box = scale.read("bbox_2d", call["bbox_2d"], targets[name])
        return checked_action(operations, ZOOM, targets[name], {"box": box})

    def _load(self, text: str) -> Any:
        return strict_json(_QUOTED.sub(r'\1"\2"', text) if "'" in text else text)


def _wire_id(name: str) -> str:
    match = _CANONICAL_ID.fullmatch(name)
    return f"observation_{match[1]}" if match else name
