"""The words beside a number: whether two short texts can mean the same before only their numbers are compared.

math-verify reads one number of a text and drops the rest, so that ``52 degrees north`` would equal ``52 degrees south``.
"""

from __future__ import annotations

import re

from pixelis.rewards.notation import MAX_CHARS, UNITS, Quantity, quantity, unwrap

_RANGE = re.compile(r"\d+(?:\.\d+)?(?:\s*[-–/]\s*\d+(?:\.\d+)?)+")
_FORMULA = re.compile(r"[\\=^_{}+*<>|]")
_BOUND = re.compile(r"not\b|at (?:least|most)\b|(?:no )?(?:more|less|fewer|greater) than\b|(?:over|under|above|below)\b")
_WORD = re.compile(r"(?<!\w)[^\W\d_]+")
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_JOINT = re.compile(r"(?<=[^\W\d_]),?\s+(?:and\s+)?(?=\d)")
_FILLER = re.compile(
    r"a|about|an|and|answer|approx|approximately|are|around|because|equals|final|get|gives|hence|i|is|it|its|of|or|out|result"
    r"|roughly|see|so|that|the|there|therefore|this|thus|total|value|was|we|were"
)
"""Words that say nothing of what the number counts."""


def alike(a: str, b: str) -> bool:
    """False when what stands beside the numbers of two texts differs, so that equal numbers do not make them equal.

    Ranges and dates of digits, and quantities such as ``1 hour 30 minutes``, are equal as a whole only. ``at least 7`` is neither
    7 nor ``at most 7``. Otherwise the words of one must occur in the other, or be abbreviated there, and where both have words
    and several numbers, the numbers must too. Symmetric; True for formulas, for texts without digits and for long ones.
    """
    if max(len(a), len(b)) > MAX_CHARS:
        return True
    a, b = (unwrap(text).casefold().strip(" .") for text in (a, b))
    if not all(re.search(r"\d", text) and not _FORMULA.search(text) for text in (a, b)):
        return True
    if _RANGE.fullmatch(a) and _RANGE.fullmatch(b):
        return quantity(a) is not None or quantity(b) is not None or _range(a) == _range(b)
    parts = _parts(a), _parts(b)
    if max(map(len, parts)) > 1:
        return len(parts[0]) == len(parts[1]) and all(one.equals(other) for one, other in zip(*parts, strict=True))
    if [match and match[0] for match in (_BOUND.match(a), _BOUND.match(b))].count(None) == 1:
        return False
    words, others = _words(a), _words(b)
    if not (_covers(words, others) or _covers(others, words)):
        return False
    numbers, other_numbers = set(_NUMBER.findall(a)), set(_NUMBER.findall(b))
    several = bool(words and others) and min(len(numbers), len(other_numbers)) > 1
    return not several or numbers <= other_numbers or other_numbers <= numbers


def _range(text: str) -> str:
    return re.sub(r"\s", "", text).replace("–", "-")


def _parts(text: str) -> list[Quantity]:
    """The quantities of a text that is a row of at least two with units, else those of the text as one."""
    whole = quantity(text)
    parts = [quantity(part) for part in _JOINT.split(text)] if whole is None else [whole]
    return [part for part in parts if part is not None] if all(part is not None and part.unit for part in parts) else []


def _words(text: str) -> set[str]:
    words = _WORD.findall(re.sub(r"(?<=[^\W\d_])\.", "", text))
    return {UNITS.get(word, word) for word in words if not _FILLER.fullmatch(word)}


def _covers(words: set[str], others: set[str]) -> bool:
    """Whether each of ``words`` is one of the others or abbreviates or spells out one."""
    return all(any(_same(word, other) for other in others) for word in words)


def _same(word: str, other: str) -> bool:
    if word == other or (word in UNITS and other in UNITS):
        return word == other
    short, long = sorted((word, other), key=len)
    letters = iter(long)
    return short[0] == long[0] and all(letter in letters for letter in short)
