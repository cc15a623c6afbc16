"""The thought of a turn while the turn is generated."""

from __future__ import annotations

import re

from pixelis.dialogue.dialects import DIALECTS
from pixelis.serve.agent_types import TextEvent, TurnEvent

_PARTIAL_TAG = re.compile(r"<[^<>\s]{0,20}$")
"""The end of a text that may become a tag."""


class ThoughtStream:
    """Follows the first sample of a stream and returns what each piece of text adds to the thought of its turn."""

    def __init__(self, dialect: str):
        self.dialect = DIALECTS[dialect]
        self.attempt, self.text, self.sent = 0, "", ""

    def add(self, event: TextEvent) -> str:
        """What a piece of text adds; "" while it may be a part of a tag, and for what follows the thought."""
        if event.attempt != self.attempt:
            self.attempt, self.text, self.sent = event.attempt, "", ""
        self.text += event.text
        return self._new(self.dialect.thought(_PARTIAL_TAG.sub("", self.text)))

    def end(self, event: TurnEvent) -> str:
        """What a complete policy turn adds to what has been sent of it."""
        rest = self._new(self.dialect.thought(event.turn.text)) if event.attempt == self.attempt or not self.sent else ""
        self.attempt, self.text, self.sent = event.attempt, "", ""
        return rest

    def _new(self, thought: str) -> str:
        if not thought.startswith(self.sent):  # it was no thought after all
            return ""
        new, self.sent = thought[len(self.sent) :], thought
        return new
