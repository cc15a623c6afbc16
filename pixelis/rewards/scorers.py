"""Scorers: compare an answer with accepted truths, 0..1; a registry by the scorer name of a question.

Unreadable truths raise DataFailure; an unreadable answer is wrong and counted as ``parse_fail``.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rapidfuzz.distance import Indel, Levenshtein

from pixelis.config.references import is_function
from pixelis.errors import BadInput, DataFailure
from pixelis.records import Question
from pixelis.rewards import mathematics
from pixelis.rewards.mmmu import chosen_option, mmmu_open
from pixelis.rewards.notation import Quantity, canonical, clean, quantity
from pixelis.rewards.services import Services


@dataclass(frozen=True)
class Case:
    answer: str | None
    truths: tuple[str, ...]
    question: str = ""
    options: tuple[str, ...] = ()


Scorer = Callable[[Case, Services], float]
T = TypeVar("T")


def case_of(question: Question, answer: str | None, truths: Sequence[str]) -> Case:
    """The case of an answer; options come from ``meta['options']`` or from lines ``A. text``."""
    options = question.meta.get("options")
    if isinstance(options, dict):
        options = list(options.values())
    if not isinstance(options, list | tuple):
        options = [line[4].strip() for line in option_lines(question.question)]
    return Case(answer, tuple(truths), question.conversation, tuple(map(str, options)))


def find_scorer(name: str) -> Scorer:
    """The scorer of this name, or a user's function of (answer, truth)."""
    if is_function(name):
        return lambda case, services: services.equal(name, case.answer, case.truths)
    if name not in SCORERS:
        near = difflib.get_close_matches(name, SCORERS, n=1)
        fix = f"did you mean `{near[0]}`?" if near else f"one of {', '.join(SCORERS)}"
        raise BadInput(f"no scorer `{name}`", code="unknown_scorer", fix=fix)
    return SCORERS[name]


def _truths(case: Case, read: Callable[[str], T | None], what: str) -> list[T]:
    """The truths that can be read; DataFailure if none can."""
    values = [value for truth in case.truths if (value := read(truth)) is not None]
    if not values:
        raise DataFailure(f"no truth of {list(case.truths)!r:.100} {what}", code="truth_unparsable")
    return values


def _answer(case: Case, read: Callable[[str], T | None], services: Services) -> T | None:
    """The answer as it is read; None, counted as ``parse_fail``, if it cannot be."""
    if case.answer is None:
        return None
    value = read(case.answer)
    if value is None:
        services.note("parse_fail")
    return value


def _by_text(score: Callable[..., float], **options: Any) -> Scorer:
    return lambda case, services: score(case.answer, case.truths, **options)


# Text


def exact(answer: str | None, truths: Sequence[str]) -> float:
    return float(answer is not None and canonical(answer) in map(canonical, truths))


def partial(answer: str | None, truths: Sequence[str]) -> float:
    """1 for equal text, else half the similarity (1 - insertions and deletions / characters of both)."""
    if answer is None:
        return 0.0
    best = max(Indel.normalized_similarity(canonical(answer), canonical(truth)) for truth in truths)
    return exact(answer, truths) or 0.5 * best


def anls(answer: str | None, truths: Sequence[str]) -> float:
    """1 - edits / longer length, 0 below one half (ANLS of ST-VQA, arXiv 1905.13648)."""
    if answer is None:
        return 0.0
    best = max(Levenshtein.normalized_similarity(canonical(answer), canonical(truth)) for truth in truths)
    return best if best >= 0.5 else 0.0


def cer(answer: str | None, truths: Sequence[str]) -> float:
    """1 - character error rate (edits / length of the truth), at least 0; case matters."""
    if answer is None:
        return 0.0
    text, best = clean(answer), 0.0
    for truth in truths:
        expected = clean(truth)
        edits = Levenshtein.distance(text, expected)
        best = max(best, 1.0 - edits / len(expected) if expected else float(not text))
    return best


# Choices

_OPTION = re.compile(
    r"^([ \t]*(?:\*\*)?[(（]?)([A-Z])((?:\*\*)?[.):：．）、][ \t]*(?:\*\*)?[ \t]*)(\S.*?)[ \t]*$",
    re.MULTILINE,
)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ASIDE = re.compile(
    r"(?:.*\banswer\b|options?\b|choices?\b)(?:\s+(?:is|are)\b)?\s*:?\s*(?=\S)", re.IGNORECASE | re.DOTALL
)
_SIGN = r"(?:option |choice )?(?:[(\[]([A-Z])[)\]]|([A-Z])(?![A-Za-z0-9']))"
_SINGLE = re.compile(r"[(\[]?([A-Za-z])[)\]]?[.:]?")
_SEVERAL = re.compile(rf"{_SIGN}(?:(?: ?[,;&+] ?(?:and )?| and | )?{_SIGN})+|[A-Z]{{2,}}")
_LEADING = re.compile(r"[(\[]?([A-Za-z])([)\]][.:,]?|[.:,]|\s-\s)(\s*)(.*)", re.DOTALL)
_FURTHER = re.compile(rf"(?:or|and|[,;/&])?\s*{_SIGN}\s*(?:$|[.,;:)\]/&]|or\b|and\b)")
_NAMED = re.compile(
    r"[(\[]([A-Za-z])[)\]]|(?<![A-Za-z0-9'])([A-Z])"
    r"(?=\s*(?:$|[/&]|[.,;:)\]](?![A-Za-z])|(?:or|and|because|is (?:correct|right|the))\b))"
)
_ALONE = re.compile(r"(?<![\w'])[B-HJ-Z](?![\w'])")
_DENIED = re.compile(r"(?:\bnot|n't|\bneither|\bnor|\bexcept)\s*(?:option|choice)?\s*$", re.IGNORECASE)
_BETWEEN = re.compile(r"\s*(?:,?\s*(or|and)|([/&,;]))?\s*(?:option |choice )?", re.IGNORECASE)


def option_lines(text: str) -> list[re.Match[str]]:
    """The lines ``A. text`` of the options in order: before the sign, sign, after it, text."""
    lines: list[re.Match[str]] = []
    for match in _OPTION.finditer(text):
        if match[2] == chr(ord("A") + len(lines)):
            lines.append(match)
        elif match[2] == "A":
            lines = [match]
    return lines if len(lines) > 1 else []


def letter(text: str, options: Sequence[str] = ()) -> str | None:
    """The choices that a text names, in upper case and alphabetical order (``B``, ``AC``); None for none.

    Of the last answer tag or box, else the whole text: a letter such as ``(B)``, several such as ``A, C``, an
    option's text, or the letter named last, unless denied. ``A or B`` names none.
    """
    inner = clean((_ANSWER.findall(text) or [text])[-1])
    last = chr(ord("A") + len(options) - 1) if options else "Z"
    plain = [canonical(option) for option in options]
    if canonical(inner) not in plain and (aside := _ASIDE.match(inner)):
        inner = inner[aside.end() :]
    if (single := _SINGLE.fullmatch(inner)) and single[1].upper() <= last:
        return single[1].upper()
    if canonical(inner) in plain:
        return chr(ord("A") + plain.index(canonical(inner)))
    if _SEVERAL.fullmatch(inner):
        signs = re.findall(r"[A-Z]", inner)
        return "".join(sorted(signs)) if len(set(signs)) == len(signs) and max(signs) <= last else None
    if (leading := _LEADING.match(inner)) and leading[1].upper() <= last and not _FURTHER.match(leading[4]):
        sign, mark, gap, rest = leading.groups()
        own = "".join(plain[ord(sign.upper()) - ord("A") :][:1])
        if canonical(rest) == own:
            return sign.upper()
        if gap or mark not in ".:,":  # U.S. names no option
            other = canonical(rest) in plain or (
                own and canonical(rest).startswith(own) and _NAMED.search(rest, len(own))
            )
            return None if other else sign.upper()
    return _named_last(inner, last)


def _named_last(text: str, last: str) -> str | None:
    """The letters that a sentence names last and does not deny; None for alternatives."""
    named: list[str] = []
    end, undecided = 0, False
    for match in _NAMED.finditer(text):
        choice = (match[1] or match[2]).upper()
        if choice > last or _DENIED.search(text, max(0, match.start() - 40), match.start()):
            continue
        joint = _BETWEEN.fullmatch(text, end, match.start()) if named else None
        if joint is None or not (joint[1] or joint[2]):
            named, undecided = [], False
        elif joint[2] == "/" or (joint[1] or "").lower() == "or":
            undecided = True
        named.append(choice)
        end = match.end()
    later = _ALONE.search(text, end)  # A, but B fits better
    return None if undecided or not named or (later and later[0] <= last) else "".join(sorted(set(named)))


def mc_letter(case: Case, services: Services) -> float:
    """1.0 when the answer names the option of a truth, or all of its several."""
    read = functools.partial(letter, options=case.options)
    letters = _truths(case, read, "names an option")
    return float(_answer(case, read, services) in letters)


def mmmu_choice(case: Case, services: Services) -> float:
    """``mc_letter`` of the letter that MMMU's rules read, or of the whole answer."""
    chosen = chosen_option(case.answer, case.options) if case.answer is not None else None
    return mc_letter(case if chosen is None else dataclasses.replace(case, answer=chosen), services)


# Numbers

LOW, HIGH = 0.05, 0.20
"""Relative error up to which a number scores 1, and from which on it scores 0."""


_PLAIN_UNITS = ("", "%", "$", "€", "£")


def number(text: str) -> float | None:
    """The value of a text that is one number, with thousands commas, currency or percent sign."""
    measure = quantity(text)
    return _finite(measure) if measure is not None and measure.unit in _PLAIN_UNITS else None


def _finite(measure: Quantity) -> float | None:
    if measure.kind != "number" or len(measure.values) != 1:
        return None
    try:
        value = float(measure.values[0])
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def numeric_band(answer: str | None, truths: Sequence[str]) -> float:
    """1 within 5 % of the truth, 0 beyond 20 %, a half cosine in between (Reason-RFT, arXiv 2503.20752).

    A truth of 0 has absolute bands. Another unit is wrong. ``exact`` for other text.
    """
    if answer is None:
        return 0.0
    best = exact(answer, truths)
    answer_quantity = quantity(answer)
    for truth in truths:
        truth_quantity = quantity(truth)
        if answer_quantity is None or truth_quantity is None:
            continue
        value, expected = _finite(answer_quantity), _finite(truth_quantity)
        units = {answer_quantity.unit, truth_quantity.unit} - {""}
        if value is None or expected is None or len(units) > 1:
            continue
        error = abs(value - expected) / (abs(expected) or 1.0)
        if error <= LOW:
            return 1.0
        if error < HIGH:
            best = max(best, 0.5 * (math.cos(math.pi * (error - LOW) / (HIGH - LOW)) + 1.0))
    return best


def count(case: Case, services: Services) -> float:
    """1.0 when the answer equals a truth as a whole number."""

    def whole(text: str) -> float | None:
        value = number(text)
        return value if value is not None and value.is_integer() else None

    numbers = _truths(case, whole, "is a whole number")
    return float(_answer(case, number, services) in numbers)


ACCEPTED_ERRORS = tuple(1 - (0.5 + 0.05 * i) for i in range(10))
"""VSI-Bench's ten relative errors, 0.5, 0.45, ... 0.05, with the rounding of its code: 9 of 10 is above 0.1."""


def mean_relative_accuracy(case: Case, services: Services) -> float:
    """Share of the ACCEPTED_ERRORS that the relative error does not exceed (VSI-Bench, arXiv 2412.14171)."""

    def read(text: str) -> float | None:
        measure = quantity(text)
        return _finite(measure) if measure is not None else None

    expected = [value for value in _truths(case, read, "is a number") if value > 0]
    if not expected:
        raise DataFailure(f"no truth of {list(case.truths)!r:.100} is above 0", code="truth_unparsable")
    value = _answer(case, read, services)
    if value is None:
        return 0.0
    error = min(abs(value - truth) / truth for truth in expected)
    return sum(error <= accepted for accepted in ACCEPTED_ERRORS) / len(ACCEPTED_ERRORS)


# Sequences of functions

_TRIPLE = re.compile(r"\b(\w+)\((\w+),\s*'?(\w+)'?\)")
Triple = tuple[str, str, str]
PARTIAL = (1.0, 0.5, 0.5, 0.25)
FULL_ONLY = (1.0, 0.0, 0.0, 0.0)
PENALTY = (1.0, -0.25, -0.25, -0.5)


def func_seq(
    answer: str | None,
    truths: Sequence[str],
    credit: tuple[float, float, float, float] = PARTIAL,
    unique: bool = True,
) -> float:
    """Best score over the truths of a set of triples ``func(object, value)`` (Reason-RFT, arXiv 2503.20752).

    Greedy passes match equal triples, then function and object, function and value, function, each worth its
    ``credit``; the sum is divided by the larger set's size and, with ``unique``, times the share of distinct
    triples.
    """
    sequences = [triples for truth in truths if (triples := _TRIPLE.findall(clean(truth)))]
    if not sequences:
        raise DataFailure(
            f"no truth of {list(truths)!r:.100} has a func(object, value)", code="truth_unparsable"
        )
    triples = _TRIPLE.findall(clean(answer or ""))
    if not triples:
        return 0.0
    share = len(set(triples)) / len(triples) if unique else 1.0
    return max(share * _match(triples, expected, credit) for expected in sequences)


def _match(triples: list[Triple], expected: list[Triple], credit: Sequence[float]) -> float:
    left, right = list(dict.fromkeys(triples)), list(dict.fromkeys(expected))
    larger = max(len(left), len(right))
    total = 0.0
    for places, value in zip(((0, 1, 2), (0, 1), (0, 2), (0,)), credit, strict=True):
        for triple in list(left):
            match = next((other for other in right if all(other[i] == triple[i] for i in places)), None)
            if match is not None:
                left.remove(triple)
                right.remove(match)
                total += value
    return total / larger


# Boxes


_SIDE = r"\s*(-?\d{1,9}(?:\.\d{1,9})?)\s*"
_BOX = re.compile(rf"\[{_SIDE},{_SIDE},{_SIDE},{_SIDE}\]", re.ASCII)


def read_box(text: str) -> tuple[float, float, float, float] | None:
    """The only box ``[x0, y0, x1, y1]`` of a text, with x0 < x1 and y0 < y1; None without one, or for several."""
    boxes = {tuple(map(float, sides)) for sides in _BOX.findall(clean(text))}
    if len(boxes) != 1:
        return None
    x0, y0, x1, y1 = boxes.pop()
    return (x0, y0, x1, y1) if x0 < x1 and y0 < y1 else None


def box_iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection over union of two boxes."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    overlap = max(width, 0.0) * max(height, 0.0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - overlap
    return overlap / union


def iou(case: Case, services: Services) -> float:
    """IoU of a box ``[x0, y0, x1, y1]`` with the best of the truths."""
    boxes = _truths(case, read_box, "is a box")
    answer = _answer(case, read_box, services)
    return 0.0 if answer is None else max(box_iou(answer, box) for box in boxes)


def iou_50(case: Case, services: Services) -> float:
    """1.0 when the IoU is at least 0.5, the accuracy of RefCOCO."""
    return float(iou(case, services) >= 0.5)


# Slow scorers


def math_equal(case: Case, services: Services) -> float:
    """1.0 when the answer equals a truth by ``mathematics.equal``."""
    if not case.answer or not case.answer.strip():
        return 0.0
    failures = []
    for truth in case.truths:
        try:
            if mathematics.equal(case.answer, truth, lambda a, b: services.math(a, [b]) > 0):
                return 1.0
        except DataFailure as failure:
            failures.append(failure)
    if failures and len(failures) == len(case.truths):
        raise failures[0]
    if any(map(mathematics.readable, case.truths)) and not mathematics.readable(case.answer):
        services.note("parse_fail")
    return 0.0


def pixel_reasoner(case: Case, services: Services) -> float:
    """``math_equal``, or 1.0 when every comma-separated piece of a truth occurs in the answer."""
    if not case.answer or not case.answer.strip():
        return 0.0
    text = _words(case.answer)
    for truth in case.truths:
        pieces = [_words(piece) for piece in truth.split(",") if piece.strip()]
        single = quantity(truth)
        is_list = len(pieces) > 1 and (single is None or len(single.values) > 1)
        if is_list and all(piece in text for piece in pieces):
            return 1.0
    return math_equal(case, services)


def _words(text: str) -> str:
    """Canonical words between blanks, so that a piece is found as whole words only."""
    return " " + " ".join(re.findall(r"[^\s,;]+", canonical(text))) + " "


def judged(case: Case, services: Services) -> float:
    """1.0 for equal text or the same option; for other text the verdict of a language model."""
    if not case.answer or not case.answer.strip():
        return 0.0
    if exact(case.answer, case.truths):
        return 1.0
    if case.options and (chosen := letter(case.answer, case.options)):
        letters = {letter(truth, case.options) for truth in case.truths} - {None}
        if letters:
            return float(chosen in letters)
    return services.judge(case.question, case.truths, case.answer)


def mm_vet(case: Case, services: Services) -> float:
    """The grade of a language model, 0.0, 0.1, ... 1.0 (MM-Vet, arXiv 2308.02490)."""
    if not case.answer or not case.answer.strip():
        return 0.0
    return services.grade(case.question, case.truths, case.answer)


def math_judged(case: Case, services: Services) -> float:
    """``math_equal``, and ``judged`` when that is 0 or fails."""
    try:
        if math_equal(case, services):
            return 1.0
    except DataFailure as failure:
        services.note(f"math_{failure.code}")
    return judged(case, services)


def _of_system(name: str) -> Scorer:
    return lambda case, services: services.system(name, case.answer, case.truths)


SYSTEMS = ("r1_v_repo", "reason_rft_repo", "reason_rft_band_repo", "pixel_reasoner_repo")
"""Comparisons of ``system_scorers``."""
SCORERS: dict[str, Scorer] = {
    "exact": _by_text(exact),
    "partial": _by_text(partial),
    "mc_letter": mc_letter,
    "math": math_equal,
    "pixel_reasoner": pixel_reasoner,
    "numeric_band": _by_text(numeric_band),
    "count": count,
    "mean_relative_accuracy": mean_relative_accuracy,
    "func_seq": _by_text(func_seq),
    "func_seq_eval": _by_text(func_seq, unique=False),
    "func_seq_full": _by_text(func_seq, credit=FULL_ONLY),
    "func_seq_penalty": _by_text(func_seq, credit=PENALTY),
    "anls": _by_text(anls),
    "iou": iou,
    "iou_50": iou_50,
    "cer": _by_text(cer),
    "judge": judged,
    "math_judge": math_judged,
    "mmmu_choice": mmmu_choice,
    "mmmu_open": _by_text(mmmu_open),
    "mm_vet": mm_vet,
    **{name: _of_system(name) for name in SYSTEMS},
}
LOWEST = {"func_seq_penalty": -0.5, "pixel_reasoner_repo": -1.0}
GRADED = {name for name in SCORERS if name.startswith("func_seq")}
GRADED |= {
    "reason_rft_band_repo",
    "partial",
    "numeric_band",
    "mean_relative_accuracy",
    "anls",
    "iou",
    "cer",
    "mm_vet",
}
"""Scorers with values between right and wrong."""
JUDGED = {"judge", "math_judge", "mm_vet"}
SLOW = JUDGED | {"math", "pixel_reasoner", *SYSTEMS}
"""Scorers that wait for another process; a group's answers are scored in parallel."""
