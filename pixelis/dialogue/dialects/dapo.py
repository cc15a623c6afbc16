"""DAPO and EasyR1's dapo: free reasoning that ends with the line ``Answer: 7``, no operations."""

from __future__ import annotations

import re

from pixelis.dialogue.dialects.base import Tag
from pixelis.dialogue.dialects.plain import Plain
from pixelis.errors import OperationError

RULE = (
    "\nReason step by step. Write the final answer on a line of its own at the end, in the form "
    "`Answer: ...`."
)
_LINE = re.compile(r"answer\s*:[ \t]*([^\n]+)", re.IGNORECASE)


class Dapo(Plain):
    """Reasoning, then ``Answer: 7``: the last of several counts, in any case (DAPO, arXiv 2503.14476).

    The public code reads only the last 300 characters; here the line may stand anywhere after the thought.
    """

    name = "dapo"
    thinks = False
    boxes = False
    rule = RULE

    def __init__(self) -> None:
        super().__init__()
        self.tags = ("Answer:",)
        self._answer = _LINE

    def well_formed(self, text: str, calls: int = 1) -> bool:
        """True for a text whose last line is its only ``Answer: ...``."""
        _, body = super()._split(text)
        matches = list(_LINE.finditer(body))
        return len(matches) == 1 and not body[matches[0].end() :].strip()

    def _render_thought(self, think: str | None) -> list[str]:
        return [think, "\n"] if think else []

    def _render_answer(self, answer: str) -> list[str]:
        if "\n" in answer or not answer.strip():
            raise OperationError("the answer is not one line of text", code="bad_answer")
        return [Tag("Answer: "), answer]

    def _split(self, text: str) -> tuple[str | None, str]:
        think, body = super()._split(text)
        if think is None and (matches := list(_LINE.finditer(body))):
            think = body[: matches[-1].start()].strip()
        return think or None, body
