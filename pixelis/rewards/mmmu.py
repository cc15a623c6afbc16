"""MMMU's way of reading replies: the option that one names, and the text or number that it states.

Source: https://github.com/MMMU-Benchmark/MMMU, eval/eval_utils.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

MARKERS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
"""Words before a conclusion; in the last line also ``=``."""
PUNCTUATION = ",.!?;:'"
MAX_LIST_CHARACTERS = 10_000
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?\d+(?:\.\d+)?e[+-]?\d+"),
    re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?!e[+-]?\d)(?![,\d])"),
)


FEW_WORDS = 5


def chosen_option(answer: str, options: Sequence[str]) -> str | None:
    """The letter of the option that is named last: in brackets, else between blanks, else by its text."""
    text = f" {answer.strip().strip(PUNCTUATION)} "
    letters = [chr(ord("A") + i) for i in range(len(options))]
    places = {letter: text.rfind(f"({letter})") for letter in letters}
    if max(places.values(), default=-1) < 0:
        places = {letter: text.rfind(f" {letter} ") for letter in letters}
    if max(places.values(), default=-1) < 0 and len(text.split()) > FEW_WORDS:
        lower = text.lower()
        places = {
            letter: lower.rfind(option.lower()) for letter, option in zip(letters, options, strict=True)
        }
    last = max(places, key=places.__getitem__, default=None)
    return last if last is not None and places[last] >= 0 else None


def mmmu_open(answer: str | None, truths: Sequence[str]) -> float:
    """1.0 when the answer contains an accepted text, or a number equal to an accepted one to two decimals."""
    if answer is None:
        return 0.0
    # For each line the shortest text after a marker; the whole answer if no line has one.
    whole = answer.strip().strip(".").lower()
    lines, conclusions = whole.split("\n"), list[str]()
    for index, line in enumerate(lines):
        markers = (*MARKERS, "=") if index == len(lines) - 1 else MARKERS
        tails = [line.rsplit(marker, 1)[1].strip() for marker in markers if marker in line]
        shortest = min(filter(None, tails), key=len, default="")
        if shortest and shortest not in PUNCTUATION:
            conclusions.append(shortest)
    conclusions = conclusions or [whole]
    pieces = [
        *conclusions,
        *(number for text in conclusions for pattern in _NUMBERS for number in pattern.findall(text)),
    ]
    values = {value for text in pieces if (value := _rounded(text)) is not None}
    texts = [text.strip().lower() for text in pieces if _rounded(text) is None]
    for truth in truths:
        if (number := _rounded(truth)) is not None:
            if number in values:
                return 1.0
            continue
        plain = truth.strip().lower()
        # A single character must stand beside a blank: otherwise every word with it would be right.
        variants = (f" {plain}", f"{plain} ") if len(plain) == 1 else (plain,)
        if plain in texts or any(variant in text for variant in variants for text in texts):
            return 1.0
    return 0.0


def _rounded(text: str) -> float | None:
    try:
        return round(float(text.strip().replace(",", "")), 2)
    except (ValueError, OverflowError):
        return None


def list_text(text: str) -> list[str] | None:
    """The texts of a list written as Python does; None for anything else."""
    if len(text) > MAX_LIST_CHARACTERS:
        return None
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None
    return [str(item) for item in value] if isinstance(value, list) else None
