"""Qwen3-VL and Qwen3.5: the zoom that these models are trained with, in the form of their chat templates.

Sources: QwenLM/Qwen3-VL, cookbooks/think_with_images.ipynb and the maintainer's reply in issue 1667;
QwenLM/Qwen-Agent, qwen_agent/tools/image_zoom_in_qwen3vl.py and llm/fncall_prompts/nous_fncall_prompt.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pixelis.dialogue.dialects.base import (
    RESPONSE,
    RESPONSE_END,
    SIGNATURES,
    Dialect,
    Piece,
    Tag,
    checked_action,
    error_text,
    function,
    interleaved,
    numbers_schema,
    region,
    rounded,
    signatures,
)
from pixelis.dialogue.dialects.qwen_xml import FUNCTIONS, read_call, read_value, write_call
from pixelis.errors import OperationError
from pixelis.operations.operation import Operation
from pixelis.operations.scale import Scale
from pixelis.records import Action, Coordinates, ImageView, Observation

TOOL = "image_zoom_in_tool"
# In the words of Qwen-Agent, which the models know
PROPERTIES = {
    "bbox_2d": {
        **numbers_schema("number", 4),
        "description": "The bounding box of the region to zoom in, as [x1, y1, x2, y2], where (x1, y1) is the "
        "top-left corner and (x2, y2) is the bottom-right corner",
    },
    "label": {
        "type": "string",
        "description": "The name or label of the object in the specified bounding box",
    },
    "img_idx": {
        "type": "number",
        "description": "The index of the zoomed-in image (starting from 0)",
    },
}
SCHEMA = function(
    TOOL,
    "Zoom in on a specific region of an image by cropping it based on a bounding box (bbox) and an optional "
    "object label",
    PROPERTIES,
    list(PROPERTIES),
)
LABEL = "region"
"""What is written for the label, which the tool requires and no operation needs."""
RULE = "\nWrite the final answer as <answer>...</answer>."
_ACT = re.compile("<tool_call>|<answer>")
_OBSERVED = re.compile(r"obs\d")


class QwenZoom(Dialect):
    """A thought, in tags or before the call or answer, then a call in JSON or an answer in tags or a box.

    Boxes are in 0..1000 of the picture ``img_idx``, which counts the question's pictures from 0, then the
    crops. Qwen-Agent executes all calls of a turn; here the first ``max_calls``. Numbers are rounded, further
    fields are ignored, and a missing ``img_idx`` is 0.
    """

    name = "qwen_zoom"
    tools = {"zoom_in": TOOL}  # noqa: RUF012
    schemas = {"zoom_in": SCHEMA}  # noqa: RUF012
    scale = "thousand"
    thinks = False
    boxes = True
    parallel_calls = True
    several = "first"
    both = "call"
    clamps = True
    rows_clamp = True
    separators = (", ", ": ")
    signatures: ClassVar[str] = (
        f"# Tools\n\nYou may call one or more functions to assist with the user query.\n\n{SIGNATURES}"
    )

    def adapt(self, action: Action) -> Action:
        """Convert any zoom to a box."""
        super().adapt(action)
        return action.model_copy(update={"arguments": {"box": region(action)}})

    def system(
        self,
        views: Sequence[ImageView],
        operations: Mapping[str, type[Operation]],
        coordinates: Coordinates,
        max_calls: int = 1,
    ) -> list[Piece]:
        return signatures([SCHEMA], self.signatures) if operations else []

    def question(self, text: str, views: Sequence[ImageView], tools: bool, instruct: bool) -> list[Piece]:
        return [*interleaved(text, views), *([Tag(RULE)] if instruct else [])]

    def observation(self, observation: Observation, images_so_far: int, instruct: bool) -> list[Piece]:
        pieces: list[Piece] = [*observation.images]
        if not pieces:
            pieces = [error_text(observation) if observation.status == "error" else observation.text]
        return [RESPONSE, "\n", *pieces, "\n", RESPONSE_END]

    def _render_thought(self, think: str | None) -> list[str]:
        return [Tag("<think>"), f"\n{think}\n", Tag("</think>"), "\n\n"] if think else []

    def _split(self, text: str) -> tuple[str | None, str]:
        """Models without a thought in tags reason in prose before the call."""
        think, body = super()._split(text)
        if (act := _ACT.search(body)) is not None:
            think, body = think or body[: act.start()].strip(), body[act.start() :]
        return think or None, body

    def _dump(self, call: Any) -> str:
        return f"\n{super()._dump(_labelled(call))}\n"

    def _write_call(self, action: Action, scale: Scale) -> dict[str, Any]:
        images = _in_order(scale)
        if action.target not in images:
            raise OperationError(f"no image {action.target[:20]}", code="bad_target")
        box = scale.write(action.arguments["box"], action.target)
        return {"name": TOOL, "arguments": {"bbox_2d": box, "img_idx": images.index(action.target)}}

    def _read_call(self, call: Any, operations: Mapping[str, type[Operation]], scale: Scale) -> Action:
        if isinstance(call, dict):
            call = {key: value for key, value in call.items() if key in ("name", "arguments")}
        op, arguments = self._named_call(call, operations)
        if "bbox_2d" not in arguments:
            raise OperationError("bbox_2d is missing", code="bad_arguments")
        images, number = _in_order(scale), arguments.get("img_idx", 0)
        if type(number) is not int or not 0 <= number < len(images):
            raise OperationError(f"img_idx counts the {len(images)} images from 0", code="bad_target")
        box = scale.read("bbox_2d", rounded(arguments["bbox_2d"]), images[number])
        return checked_action(operations, op, images[number], {"box": box})


class QwenZoomXml(QwenZoom):
    """The same tool with a tag for the function and for each parameter."""

    name = "qwen_zoom_xml"
    signatures = f"# Tools\n\n{FUNCTIONS}"

    def _dump(self, call: Any) -> str:
        return write_call(_labelled(call))

    def _load(self, text: str) -> Any:
        call = read_call(text)
        values = {
            name: read_value(value, PROPERTIES.get(name, {})) for name, value in call["arguments"].items()
        }
        return {**call, "arguments": values}


def _labelled(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "arguments": {"label": LABEL, **call["arguments"]}}


def _in_order(scale: Scale) -> list[str]:
    """The user's images, as the models count them, then those of observations, as Qwen-Agent does."""
    return sorted(scale.images, key=lambda name: _OBSERVED.match(name) is not None)
