"""Mini-o3: a region of a named picture as ``<grounding>`` JSON, 0..1 of it; zooming in is its only operation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pixelis.dialogue.dialects.base import ANSWER_RULE, DEFAULT_TARGET, Dialect, Piece, Tag, first_image, named, region
from pixelis.dialogue.dialects.strict import only
from pixelis.errors import OperationError
from pixelis.operations.operation import Operation
from pixelis.operations.scale import Scale
from pixelis.records import Action, Coordinates, ImageView, Observation

ORIGINAL = "original_image"
ZOOM = "zoom_in"
RULE = """Think inside <think>...</think>. Then either look closer at a region or answer, one of them in each turn.
To look closer: <grounding>{"bbox_2d": [x0, y0, x1, y1], "source": "original_image"}</grounding>. The box is left, top, right, \
bottom as shares 0 to 1 of the source, which is "original_image" or an earlier observation such as "observation_1".
To answer: <answer>...</answer>."""
AGAIN = "\nGo on: think, then look closer at a region or answer."
_OWN = re.compile(r"obs(\d+)")
_WIRE = re.compile(r"observation_(\d+)")


class MiniO3(Dialect):
    """A thought, then ``<grounding>{"bbox_2d":[..],"source":"observation_1"}</grounding>`` or an answer in tags.

    ``original_image`` is the first picture, or the first frame of a clip; further ones go by their ids. ``observation_1`` is the
    first region that could be shown: a refused one takes no number, so that names never shift.
    """

    name = "mini_o3"
    call = "grounding"
    scale = "unit"

    def offers(self, operation: type[Operation]) -> bool:
        """Zooming in alone."""
        return operation.name == ZOOM

    def adapt(self, action: Action) -> Action:
        """Any zoom as a box; ``unknown_op`` for other operations."""
        if action.op != ZOOM:
            raise OperationError(f"mini_o3 has no form for {action.op[:30]}", code="unknown_op")
        return action.model_copy(update={"arguments": {"box": region(action)}})

    def system(
        self, views: Sequence[ImageView], operations: Mapping[str, type[Operation]], coordinates: Coordinates
    ) -> list[Piece]:
        """How to ground and to answer; further pictures by their ids."""
        if not operations:
            return [Tag(ANSWER_RULE)]
        if len(views) < 2:
            return [Tag(RULE)]
        more = [Tag("\nFurther sources: "), ", ".join(named(view) for view in views[1:]), Tag(".")]
        return [Tag(RULE), *more]

    def observation(self, observation: Observation, seen: int, instruct: bool) -> list[Piece]:
        """The region with its name, or why there is none."""
        if observation.status == "error":
            message = f"error {observation.code}" + (f": {observation.text}" if observation.text else "")
            return [message, Tag("\nTry again.") if instruct else ""]
        return [f"{_wire(str(observation.id))}: ", *observation.images, Tag(AGAIN) if instruct else ""]

    def _write(self, action: Action, scale: Scale) -> dict[str, Any]:
        box = scale.write(action.arguments["box"], action.target)
        return {"bbox_2d": box, "source": ORIGINAL if action.target == first_image(scale) else _wire(action.target)}

    def _read(self, call: Any, operations: Mapping[str, type[Operation]], scale: Scale) -> Action:
        if not isinstance(call, dict):
            raise OperationError('a region is {"bbox_2d":[...],"source":"..."}', code="bad_json")
        if ZOOM not in operations:
            raise OperationError("answer without operations", code="unknown_op")
        only(call, ("bbox_2d", "source"))
        target = self._target(call["source"], scale)
        arguments = operations[ZOOM].check({"box": scale.read("bbox_2d", call["bbox_2d"], target)})
        return Action(op=ZOOM, target=target, arguments=arguments.model_dump(mode="json", exclude_none=True))

    def _target(self, source: Any, scale: Scale) -> str:
        if not isinstance(source, str):
            raise OperationError("source is the name of an image", code="bad_target")
        if not scale.images:
            match = _WIRE.fullmatch(source)
            return f"obs{match[1]}" if match else DEFAULT_TARGET if source == ORIGINAL else source
        known = {_wire(name): name for name in scale.images[1:]} | {ORIGINAL: scale.images[0]}
        if source not in known:
            raise OperationError(f"no image {source[:20]}, use {', '.join([ORIGINAL, *known][:8])}", code="bad_target")
        return known[source]


def _wire(name: str) -> str:
    """``obs2`` as Mini-o3 writes it: ``observation_2``."""
    own = _OWN.fullmatch(name)
    return f"observation_{own[1]}" if own else name
