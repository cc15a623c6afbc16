"""How an answer is compared with accepted truths: pure functions of text, and a registry by the name a question asks for.

A score is 0..1. What cannot be compared raises DataFailure and leaves the rollout unscored; an answer that says nothing the
scorer can read is wrong, scores 0 and is counted as ``parse_fail``.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rapidfuzz.distance import Indel, Levenshtein

from pixelis.errors import BadInput, DataFailure
from pixelis.records import Question


class Tools(Protocol):
    """What slow scorers need; ``pixelis.rewards.services.Tools`` in the product."""

    def math(self, answer: str, truths: Sequence[str]) -> float:
        """1.0 when the formulas are equal."""
        ...

    def judge(self, question: str, truths: Sequence[str], answer: str) -> float:
        """1.0 when a language model takes the answer as right."""
        ...

    def note(self, status: str) -> None:
        """Count a status."""
        ...


@dataclass(frozen=True)
class Case:
    """One comparison. ``answer`` is what the policy gave, None for nothing; ``options`` are the choices in order, if any."""

    answer: str | None
    truths: tuple[str, ...]
    question: str = ""
    options: tuple[str, ...] = ()


Scorer = Callable[[Case, Tools], float]


def case_of(question: Question, answer: str | None, truths: Sequence[str]) -> Case:
    """The comparison of an answer to a question; options come from ``meta['options']`` or from lines ``A. text``."""
    options = question.meta.get("options")
    if isinstance(options, dict):
        options = list(options.values())
    if not isinstance(options, (list, tuple)):
        options = _OPTION_LINE.findall(question.question)
    return Case(answer, tuple(truths), question.question, tuple(str(option) for option in options))


def find_scorer(name: str) -> Scorer:
    """The scorer of this name; BadInput ``unknown_scorer`` tells the nearest known one."""
    if name not in SCORERS:
        near = difflib.get_close_matches(name, SCORERS, n=1)
        fix = f"did you mean `{near[0]}`?" if near else f"one of {', '.join(SCORERS)}"
        raise BadInput(f"no scorer `{name}`", code="unknown_scorer", fix=fix)
    return SCORERS[name]


# -- text -----------------------------------------------------------------------------------------------------------


def canonical(text: str) -> str:
    """Text as it is compared: Unicode NFC, stripped, runs of white space as one blank, case folded."""
    return " ".join(unicodedata.normalize("NFC", text).split()).casefold()


def exact(answer: str | None, truths: Sequence[str]) -> float:
    """1.0 when the answer equals any truth after ``canonical``, else 0.0; no answer is a wrong answer."""
    if answer is None:
        return 0.0
    return float(canonical(answer) in {canonical(truth) for truth in truths})


def partial(answer: str | None, truths: Sequence[str]) -> float:
    """1 for the same text, else half its similarity (1 - insertions and deletions / characters of both), best of the truths.

    Pixelis' task reward with partial credit, arXiv 2603.25091.
    """
    if answer is None:
        return 0.0
    best = max(Indel.normalized_similarity(canonical(answer), canonical(truth)) for truth in truths)
    return exact(answer, truths) or 0.5 * best


def anls(answer: str | None, truths: Sequence[str], threshold: float = 0.5) -> float:
    """Average normalised Levenshtein similarity: 1 - distance / longer length, best of the truths, 0 below the threshold.

    Text is compared after ``canonical``. Source: ST-VQA, arXiv 1905.13648; threshold 0.5 as in DocVQA and InfographicVQA.
    """
    if answer is None:
        return 0.0
    best = max(Levenshtein.normalized_similarity(canonical(answer), canonical(truth)) for truth in truths)
    return best if best >= threshold else 0.0


def cer(answer: str | None, truths: Sequence[str]) -> float:
    """1 - character error rate (edits / length of the truth), at least 0, best of the truths; case matters."""
    if answer is None:
        return 0.0
    said, best = " ".join(unicodedata.normalize("NFC", answer).split()), 0.0
    for truth in truths:
        wanted = " ".join(unicodedata.normalize("NFC", truth).split())
        edits = Levenshtein.distance(said, wanted)
        best = max(best, 1.0 - edits / len(wanted) if wanted else float(not said))
    return best


# -- choices --------------------------------------------------------------------------------------------------------

_OPTION_LINE = re.compile(r"^\s*\(?[A-Z][).:]\s+(.+?)\s*$", re.MULTILINE)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_LEADING = re.compile(r"\(?([A-Za-z])(?:\)|[.:](?=\s|$)|$)")
_INSIDE = re.compile(r"\(([A-Za-z])\)|(?<![A-Za-z])([A-Z])(?:\.(?=\s|$)|$)")


def letter(text: str, options: Sequence[str] = ()) -> str | None:
    """The choice a text names, as an upper-case letter; None when it names none.

    The last answer tag counts, else the last box, else all of the text: a lone letter or ``(B) text`` or ``B. text``, the text of
    an option, else the last ``(X)`` or ``X.``. With options known, letters beyond them name nothing.
    """
    inner = (_ANSWER.findall(text) or _BOX.findall(text) or [text])[-1].strip()
    last = chr(ord("A") + len(options) - 1) if options else "Z"

    def known(found: str) -> str | None:
        return found.upper() if found.upper() <= last else None

    if (leading := _LEADING.match(inner)) and (first := known(leading[1])):
        return first
    plain = [canonical(option) for option in options]
    if canonical(inner) in plain:
        return chr(ord("A") + plain.index(canonical(inner)))
    named = [known(a or b) for a, b in _INSIDE.findall(inner)]
    return next((found for found in reversed(named) if found), None)


def mc_letter(case: Case, tools: Tools) -> float:
    """1.0 when the answer names the letter of a truth; a truth may be the letter or the text of the option.

    DataFailure ``truth_unparsable`` when no truth names an option.
    """
    wanted = {found for truth in case.truths if (found := letter(truth, case.options))}
    if not wanted:
        raise DataFailure(f"no truth of {list(case.truths)!r:.100} names an option", code="truth_unparsable")
    if case.answer is None:
        return 0.0
    chosen = letter(case.answer, case.options)
    if chosen is None:
        tools.note("parse_fail")
    return float(chosen in wanted)


# -- numbers --------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][-+]?\d+)?")
LOW, HIGH = 0.05, 0.20
"""Relative errors up to which a number is right, and from which on it is wrong."""


def number(text: str) -> float | None:
    """A text that is one finite number (thousands commas, a currency or a percent sign around it allowed), else None."""
    plain = text.strip().strip("$€£").removesuffix("%").strip()
    if not any(c.isdigit() for c in plain) or not _NUMBER.fullmatch(plain):
        return None
    try:
        value = float(plain.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def numeric_band(answer: str | None, truths: Sequence[str]) -> float:
    """1 within 5 % of the truth, 0 beyond 20 %, a half cosine between; best of the truths. Not numbers: ``exact``.

    A truth of 0 has the bands as absolute errors, 0.05 and 0.20. Source: Reason-RFT, arXiv 2503.20752, its math accuracy reward.
    """
    if answer is None:
        return 0.0
    best = exact(answer, truths)
    said = number(answer)
    for truth in truths:
        wanted = number(truth)
        if said is None or wanted is None:
            continue
        error = abs(said - wanted) / (abs(wanted) or 1.0)
        if error <= LOW:
            return 1.0
        if error < HIGH:
            best = max(best, 0.5 * (math.cos(math.pi * (error - LOW) / (HIGH - LOW)) + 1.0))
    return best


def count(case: Case, tools: Tools) -> float:
    """1.0 when the answer is the whole number that a truth is (7, 7.0 and 1,000 are whole numbers)."""
    wanted = {value for truth in case.truths if (value := number(truth)) is not None and value.is_integer()}
    if not wanted:
        raise DataFailure(f"no truth of {list(case.truths)!r:.100} is a whole number", code="truth_unparsable")
    if case.answer is None:
        return 0.0
    said = number(case.answer)
    if said is None:
        tools.note("parse_fail")
    return float(said in wanted)


# -- sequences of functions -----------------------------------------------------------------------------------------

_TRIPLE = re.compile(r"(\w+)\((\w+),\s*'?(\w+)'?\)")
Triple = tuple[str, str, str]
PARTIAL = (1.0, 0.5, 0.5, 0.25)
FULL_ONLY = (1.0, 0.0, 0.0, 0.0)
PENALTY = (1.0, -0.25, -0.25, -0.5)


def func_seq(
    answer: str | None, truths: Sequence[str], credit: tuple[float, float, float, float] = PARTIAL, unique: bool = True
) -> float:
    """Score of a set of triples ``func(object, value)``, -0.5..1 with PENALTY, else 0..1; the order says nothing.

    Pairs are matched greedily and removed in four passes: equal, same function and object, same function and value, same
    function; ``credit`` is what a pair of each earns. The sum is divided by the larger set and, with ``unique``, multiplied by
    the share of triples that are not repetitions. Best of the truths; DataFailure ``truth_unparsable`` for truths without
    triples. Source: Reason-RFT, arXiv 2503.20752, its reward for spatial transformation.
    """
    sequences = [triples for truth in truths if (triples := _TRIPLE.findall(truth))]
    if not sequences:
        raise DataFailure(f"no truth of {list(truths)!r:.100} has a func(object, value)", code="truth_unparsable")
    said = _TRIPLE.findall(answer or "")
    if not said:
        return 0.0
    share = len(set(said)) / len(said) if unique else 1.0
    return max(share * _matched(said, wanted, credit) for wanted in sequences)


def _matched(said: list[Triple], wanted: list[Triple], credit: Sequence[float]) -> float:
    left, right = list(dict.fromkeys(said)), list(dict.fromkeys(wanted))
    larger = max(len(left), len(right))
    keys: list[Callable[[Triple], tuple[str, ...]]] = [lambda t: t, lambda t: t[:2], lambda t: (t[0], t[2]), lambda t: t[:1]]
    total = 0.0
    for key, value in zip(keys, credit, strict=True):
        for triple in list(left):
            match = next((other for other in right if key(other) == key(triple)), None)
            if match is not None:
                left.remove(triple)
                right.remove(match)
                total += value
    return total / larger


# -- boxes ----------------------------------------------------------------------------------------------------------


def read_box(text: str) -> tuple[float, float, float, float] | None:
    """A text that is four finite numbers ``[x0, y0, x1, y1]`` with x0 < x1 and y0 < y1, else None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, list) or len(value) != 4:
        return None
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) < 1e9 for v in value):
        return None
    x0, y0, x1, y1 = (float(v) for v in value)
    return (x0, y0, x1, y1) if x0 < x1 and y0 < y1 else None


def box_iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Area of the overlap of two boxes over the area of their union, 0..1; both in the same scale."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    overlap = max(width, 0.0) * max(height, 0.0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - overlap
    return overlap / union


def iou(case: Case, tools: Tools) -> float:
    """IoU of a box ``[x0, y0, x1, y1]`` with the best of the truths, both written in the scale of the question."""
    wanted = [box for truth in case.truths if (box := read_box(truth))]
    if not wanted:
        raise DataFailure(f"no truth of {list(case.truths)!r:.100} is a box", code="truth_unparsable")
    if case.answer is None:
        return 0.0
    said = read_box(case.answer)
    if said is None:
        tools.note("parse_fail")
        return 0.0
    return max(box_iou(said, box) for box in wanted)


# -- slow ones ------------------------------------------------------------------------------------------------------


def math_equal(case: Case, tools: Tools) -> float:
    """1.0 when the answer and a truth are the same text or the same mathematics (math-verify, both ways, in a child process)."""
    if case.answer is None or not case.answer.strip():
        return 0.0
    return exact(case.answer, case.truths) or tools.math(case.answer, case.truths)


LONGEST = 1000
"""Characters from which on no judge is asked: long answers talk judges into anything (DeepEyes)."""


def judged(case: Case, tools: Tools) -> float:
    """The rule first: the same text, or the same option. Else a language model says whether the answer is right."""
    if case.answer is None or not case.answer.strip() or len(case.answer) >= LONGEST:
        return 0.0
    if exact(case.answer, case.truths):
        return 1.0
    if case.options and (chosen := letter(case.answer, case.options)):
        wanted = {letter(truth, case.options) for truth in case.truths} - {None}
        if wanted:
            return float(chosen in wanted)
    return tools.judge(case.question, case.truths, case.answer)


def math_judged(case: Case, tools: Tools) -> float:
    """``math``, and a judge where that says no or fails."""
    try:
        if math_equal(case, tools):
            return 1.0
    except DataFailure as failure:
        tools.note(f"math_{failure.code}")
    return judged(case, tools)


SCORERS: dict[str, Scorer] = {
    "exact": lambda case, tools: exact(case.answer, case.truths),
    "partial": lambda case, tools: partial(case.answer, case.truths),
    "mc_letter": mc_letter,
    "math": math_equal,
    "numeric_band": lambda case, tools: numeric_band(case.answer, case.truths),
    "count": count,
    "func_seq": lambda case, tools: func_seq(case.answer, case.truths),
    "func_seq_eval": lambda case, tools: func_seq(case.answer, case.truths, unique=False),
    "func_seq_full": lambda case, tools: func_seq(case.answer, case.truths, FULL_ONLY),
    "func_seq_penalty": lambda case, tools: func_seq(case.answer, case.truths, PENALTY),
    "anls": lambda case, tools: anls(case.answer, case.truths),
    "iou": iou,
    "cer": lambda case, tools: cer(case.answer, case.truths),
    "judge": judged,
    "math_judge": math_judged,
}
"""Scorers by the name a question asks for."""
LOWEST = {"func_seq_penalty": -0.5}
"""Least score where it is not 0."""
SLOW = frozenset({"math", "judge", "math_judge"})
"""Scorers that wait for another process: those of a group run beside each other."""
