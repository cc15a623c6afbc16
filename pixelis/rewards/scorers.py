"""How an answer is compared with accepted truths. Each scorer gives a value in 0..1."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence

Scorer = Callable[[str | None, Sequence[str]], float]


def canonical(text: str) -> str:
    """Text as it is compared: Unicode NFC, stripped, runs of white space as one blank, case folded."""
    return " ".join(unicodedata.normalize("NFC", text).split()).casefold()


def exact(answer: str | None, truths: Sequence[str]) -> float:
    """1.0 when the answer equals any truth after ``canonical``, else 0.0; no answer is a wrong answer."""
    if answer is None:
        return 0.0
    return float(canonical(answer) in {canonical(truth) for truth in truths})


SCORERS: dict[str, Scorer] = {"exact": exact}
"""Scorers by the name a question asks for."""
