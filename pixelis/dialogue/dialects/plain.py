"""R1-V, Reason-RFT and EasyR1's r1v: a thought and an answer, no operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pixelis.dialogue.dialects.base import Dialect, Piece, Tag, interleaved
from pixelis.errors import OperationError
from pixelis.operations.operation import Operation
from pixelis.operations.scale import Scale
from pixelis.records import Action, ImageView

RULE = (
    "\nFirst think inside <think> </think> tags, then give the final answer inside <answer> </answer> tags."
)


class Plain(Dialect):
    """``<think>..</think><answer>..</answer>``, requested at the end of the question."""

    name = "plain"
    call = None
    boxes = True

    def offers(self, operation: type[Operation]) -> bool:
        return False

    def question(self, text: str, views: Sequence[ImageView], tools: bool, instruct: bool) -> list[Piece]:
        return [*interleaved(text, views), *([Tag(RULE)] if instruct else [])]

    def _write_call(self, action: Action, scale: Scale) -> dict[str, Any]:
        raise OperationError("answer without operations", code="unknown_op")

    def _read_call(self, call: Any, operations: Mapping[str, type[Operation]], scale: Scale) -> Action:
        raise OperationError("answer without operations", code="unknown_op")
