"""What the writers of OpenAI's formats share: server-sent events, and thoughts as they are generated."""

from __future__ import annotations

import json
import re
from typing import Any

from pixelis.dialogue.dialects import DIALECTS

_PARTIAL_TAG = re.compile(r"<[^<>\s]{0,20}$")
"""The end of a text that may become a tag."""


def sse_event(data: dict[str, Any], name: str | None = None) -> str:
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


class ThoughtStream:
    """Tells what each piece of text of a stream's first sample adds to its thought."""

    def __init__(self, dialect: str):
        self.dialect = DIALECTS[dialect]
        self.attempt, self.text, self.sent = 0, "", ""

    def add(self, text: str, attempt: int = 0) -> str:
        """What a piece of text adds; "" while it may be part of a tag, and after the thought."""
        if attempt != self.attempt:
            self.attempt, self.text, self.sent = attempt, "", ""
        self.text += text
        return self._new(self.dialect.thought(_PARTIAL_TAG.sub("", self.text)))

    def end(self, text: str, attempt: int = 0) -> str:
        """What a complete policy turn, given as text, adds to what has been sent of it."""
        known = attempt == self.attempt or not self.sent
        rest = self._new(self.dialect.thought(text)) if known else ""
        self.attempt, self.text, self.sent = attempt, "", ""
        return rest

    def _new(self, thought: str) -> str:
        if not thought.startswith(self.sent):  # it was no thought after all
            return ""
        new, self.sent = thought[len(self.sent) :], thought
        return new
