"""Words the thoughts of a demonstration from templates.

A thought consists of a framing of the question, remarks on the last observation, and the aim of the next
operation, which never says what will be found. The style ``terse`` suits the embedded model.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from pixelis.datasets.synthesis.phrases import choose, thoughts

Style = Literal["full", "terse"]


class Narrator:
    """Words one demonstration; the same ``rng`` gives the same words."""

    def __init__(self, rng: np.random.Generator, style: Style = "full"):
        self.rng, self.style = rng, style
        self.voice = choose(tuple(thoughts().voices), rng)
        self._remarks: list[str] = []
        self._announcement = ""

    def remark(self, kind: str, **slots: object) -> None:
        """Comment on the last observation in the next thought."""
        if self.style == "full":
            self._remarks.append(thoughts().remarks[kind].pick(self.rng, **slots))

    def think(self, aim: str, what: str, topic: str = "", where: str = "", **slots: object) -> str:
        """The thought before an operation; a ``topic`` frames it."""
        phrases = thoughts()
        if self.style == "terse":
            return phrases.terse[aim].pick(self.rng, thing=what.removeprefix("the "), **slots)
        parts = [phrases.framings.pick(self.rng, topic=topic)] if topic and self.rng.random() < 0.75 else []
        parts += self._take_remarks()
        if where and self.rng.random() < 0.6:
            parts.append(phrases.places.pick(self.rng, what=what, where=where))
        if topic and self.rng.random() < 0.4:
            parts.append(phrases.doubts.pick(self.rng))
        self._announcement = choose(
            tuple(t for t in phrases.voices[self.voice].texts if t != self._announcement), self.rng
        )
        parts.append(self._announcement.format(aim=phrases.aims[aim].pick(self.rng, what=what, **slots)))
        return _sentences(parts)

    def conclude(self, conclusion: str) -> str | None:
        """The thought before the answer; None in the terse style."""
        if self.style == "terse":
            return None
        return _sentences(
            [*self._take_remarks(), thoughts().conclusions.pick(self.rng, conclusion=conclusion)]
        )

    def _take_remarks(self) -> list[str]:
        remarks, self._remarks = self._remarks, []
        return remarks


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sentences(parts: list[str]) -> str:
    return " ".join(map(capitalised, parts))
