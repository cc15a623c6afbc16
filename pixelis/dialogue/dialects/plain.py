"""R1-V, Reason-RFT and EasyR1's r1v: a thought and an answer, no operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pixelis.dialogue.dialects.base import Dialect, Piece, Tag, interleaved
from pixelis.records import ImageView

RULE = (
    "\nFirst think inside <think> </think> tags, then give the final answer inside <answer> </answer> tags."
)


class Plain(Dialect):
    """``<think>..</think><answer>..</answer>``, requested at the end of the question."""

    name = "plain"
    call = None
    boxes = True
    rule: ClassVar[str] = RULE

    def question(self, text: str, views: Sequence[ImageView], tools: bool, instruct: bool) -> list[Piece]:
        return [*interleaved(text, views), *([Tag(self.rule)] if instruct else [])]
