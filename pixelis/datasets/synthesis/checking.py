"""Scores answers with the question's own scorer, and finds plausible answers that are verifiably wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np

from pixelis.config import RewardsConfig
from pixelis.datasets.synthesis import grounding
from pixelis.errors import DataFailure
from pixelis.records import Annotations, Question
from pixelis.rewards.scorers import Tools, box_iou, canonical, case_of, find_scorer, letter, number, read_box
from pixelis.rewards.services import shared_tools

T = TypeVar("T")

RIGHT = {"iou": 0.5, "anls": 0.9, "cer": 0.9}
"""Least score of a right answer where it is not 1."""
WRONG = {"partial": 0.5, "cer": 0.5, "iou": 0.3, "func_seq": 0.5, "func_seq_eval": 0.5}
"""Largest score of a wrong answer where likeness alone earns something; 0 for every other scorer."""

OPPOSITES = (
    ("yes", "no"),
    ("true", "false"),
    ("left", "right"),
    ("above", "below"),
    ("up", "down"),
    ("upward", "downward"),
    ("upwards", "downwards"),
    ("top", "bottom"),
    ("upper", "lower"),
    ("larger", "smaller"),
    ("bigger", "smaller"),
    ("before", "after"),
    ("in front of", "behind"),
    ("inside", "outside"),
    ("brighter", "darker"),
    ("taller", "shorter"),
    ("wider", "narrower"),
    ("closer", "farther"),
    ("stationary", "moving"),
    ("first", "second"),
    ("earlier", "later"),
)
COLOURS = ("red", "green", "blue", "yellow", "purple", "cyan", "orange", "brown", "black", "white", "grey", "pink")
THINGS = ("bottle", "chair", "bird", "cup", "book", "clock", "hat", "ball", "key", "shoe", "lamp", "box")
"""What a thing may be taken for in a picture that shows nothing else."""
MISREAD = {"0": "8", "1": "7", "2": "7", "3": "8", "4": "9", "5": "6", "6": "5", "7": "1", "8": "3", "9": "4"}
MISREAD |= {
    "o": "a",
    "a": "e",
    "e": "c",
    "c": "e",
    "i": "l",
    "l": "i",
    "n": "h",
    "h": "n",
    "u": "v",
    "m": "n",
    "s": "z",
    "t": "f",
}
"""Characters and what they are taken for."""
_CHOICE = re.compile(r"(?:the |an? )?([\w][\w -]*?),? or (?:the |an? )?([\w][\w -]*?)\s*\?")


def score(question: Question, answer: str | None, tools: Tools) -> float:
    """What the question's scorer gives the answer. DataFailure ``no_truth`` without truths, or whatever the scorer raises."""
    if not question.answers:
        raise DataFailure(f"{question.id} has no accepted answer", code="no_truth")
    return float(find_scorer(question.scorer)(case_of(question, answer, question.answers), tools))


def counts_as_right(question: Question, value: float) -> bool:
    """True when this score means that the scorer takes the answer."""
    return value >= RIGHT.get(question.scorer, 1.0)


def counts_as_wrong(question: Question, value: float) -> bool:
    """True when this score is nothing, or no more than likeness to a truth earns (``WRONG``)."""
    return value <= WRONG.get(question.scorer, 0.0)


def is_right(question: Question, answer: str | None, rewards: RewardsConfig | None = None) -> bool:
    """True when the scorer takes the answer."""
    return counts_as_right(question, score(question, answer, shared_tools(rewards or RewardsConfig())))


def is_wrong(question: Question, answer: str | None, rewards: RewardsConfig | None = None) -> bool:
    """True when the scorer refuses the answer and it is no truth with another name of a colour: grey for gray."""
    refused = counts_as_wrong(question, score(question, answer, shared_tools(rewards or RewardsConfig())))
    return refused and _meaning(answer or "") not in {_meaning(truth) for truth in question.answers or ()}


def _meaning(text: str) -> str:
    return " ".join(grounding.SAME_COLOUR.get(word, word) for word in canonical(text).split())


def wrong_answer(
    question: Question, answer: str, rng: np.random.Generator, rewards: RewardsConfig | None = None
) -> tuple[str, str]:
    """A plausible wrong answer in place of the right ``answer``, and where it was taken from: the first that the scorer refuses.

    DataFailure ``no_alternative`` when there is none.
    """
    for other, origin in alternatives(question, answer, rng):
        if canonical(other) != canonical(answer) and is_wrong(question, other, rewards):
            return other, origin
    raise DataFailure(f"{question.id}: no wrong answer like {answer[:40]!r} was found", code="no_alternative")


def alternatives(question: Question, answer: str, rng: np.random.Generator) -> Iterator[tuple[str, str]]:
    """Answers of the same type and where they come from (option, choice, picture, opposite, ...), the most plausible first."""
    plain, known = canonical(answer), question.annotations or Annotations()
    yield from _options(question, answer, rng)
    bare = plain.removeprefix("the ")
    named = [name.removeprefix("the ") for name in _named(question, known)]
    if bare in map(canonical, named):  # the answer is one of the things that the question names: another of them is as likely
        yield from ((_like(answer, f"the {n}" if plain != bare else n), "choice") for n in named if canonical(n) != bare)
    for first, second in _CHOICE.findall(question.question):
        for mine, other in ((first, second), (second, first)):
            if canonical(mine) == bare and len(other.split()) <= 4:
                yield _like(answer, f"the {other}" if plain != bare else other), "choice"
    yield from ((_like(answer, other), "picture") for other in _shuffled(_siblings(known, plain), rng))
    yield from ((other, "opposite") for other in _opposites(answer))
    if (box := read_box(answer)) is not None:
        yield from _boxes(box, known, rng)
        return
    if (value := number(answer)) is not None:
        yield from ((other, "number") for other in _numbers(answer, value, rng))
        return
    if plain in COLOURS:
        yield from ((_like(answer, other), "colour") for other in _shuffled(COLOURS, rng))
        return
    labels = dict.fromkeys(region.label for region in known.regions)
    if any(canonical(label) == plain for label in labels):
        yield from ((_like(answer, other), "common") for other in _shuffled(THINGS, rng))
        return
    yield from ((other, "misread") for other in _misread(answer, rng))


def _named(question: Question, known: Annotations) -> list[str]:
    """Annotated things that the question names, but for those that others are compared with: "closer to the tree"."""
    names = grounding.describe([region for region in known.regions if region.frame is None]).values()
    text = canonical(question.question)
    said = [name for name in names if re.search(rf"\b{re.escape(canonical(name))}\b", text)]
    return [name for name in said if not re.search(rf"\b(to|from|than) {re.escape(canonical(name))}\b", text)]


def _options(question: Question, answer: str, rng: np.random.Generator) -> Iterator[tuple[str, str]]:
    options = case_of(question, None, question.answers or [answer]).options
    if not options:
        return
    named = letter(answer, options)
    for place in rng.permutation(len(options)).tolist():
        sign = chr(ord("A") + place)
        if sign != named:
            yield (sign if len(answer.strip()) == 1 and answer.strip().isalpha() else options[place]), "option"


def _siblings(known: Annotations, plain: str) -> list[str]:
    """What the picture holds of the same kind as the answer: labels, values of an attribute, lines, events, predicates."""
    kinds: list[list[str]] = [[region.label for region in known.regions]]
    keys = dict.fromkeys(key for region in known.regions for key in region.attributes)
    kinds += [[str(region.attributes[key]) for region in known.regions if key in region.attributes] for key in keys]
    kinds += [[line.text for line in known.lines], [event.text for event in known.events]]
    kinds += [[relation.predicate for relation in known.relations]]
    found: list[str] = []
    for kind in kinds:
        if plain in {canonical(value) for value in kind}:
            found += [value for value in kind if canonical(value) != plain]
    return list(dict.fromkeys(found))


def _opposites(answer: str) -> Iterator[str]:
    for pair in OPPOSITES:
        for mine, other in (pair, pair[::-1]):
            match = re.search(rf"\b{re.escape(mine)}\b", answer, re.IGNORECASE)
            if match:
                yield answer[: match.start()] + _like(match[0], other) + answer[match.end() :]


def _boxes(box: Iterable[float], known: Annotations, rng: np.random.Generator) -> Iterator[tuple[str, str]]:
    x0, y0, x1, y1 = box
    scale = 1000.0 if max(x1, y1) > 1 else 1.0
    for region in sorted(known.regions, key=lambda r: abs(r.box[0] * scale - x0) + abs(r.box[1] * scale - y0)):
        other = [v * scale for v in region.box]
        if box_iou(other, (x0, y0, x1, y1)) < 0.3:
            yield json.dumps([round(v) if scale > 1 else round(v, 3) for v in other]), "picture"
    for sign_x, sign_y in rng.permutation([(1, 0), (-1, 0), (0, 1), (0, -1)]).tolist():
        dx, dy = sign_x * (x1 - x0), sign_y * (y1 - y0)
        if x0 + dx >= 0 and x1 + dx <= scale and y0 + dy >= 0 and y1 + dy <= scale:
            moved = (x0 + dx, y0 + dy, x1 + dx, y1 + dy)
            yield json.dumps([round(v) if scale > 1 else round(v, 3) for v in moved]), "beside"


def _numbers(answer: str, value: float, rng: np.random.Generator) -> Iterator[str]:
    """Near miss first: a count off by one or two, a measured value off by a quarter to a half, written as the answer is."""
    if value.is_integer() and abs(value) <= 20:
        others: list[float] = [value + step for step in _shuffled((1, -1), rng)] + [value + 2, value - 2, value + 3]
    else:
        others = [value * factor for factor in _shuffled((0.6, 0.7, 1.35, 1.5, 2.0), rng)]
    digits = len(match[1]) if (match := re.search(r"\.(\d+)", answer)) else 0
    for other in others:
        if other < 0 <= value:
            continue
        yield re.sub(r"[-+]?\d[\d,]*(\.\d*)?([eE][-+]?\d+)?", f"{other:.{digits}f}", answer, count=1)


def _misread(answer: str, rng: np.random.Generator) -> Iterator[str]:
    """The text with one or two characters taken for others that look alike."""
    places = [i for i, sign in enumerate(answer) if sign.casefold() in MISREAD]
    for count in (1, 2, 3):
        if len(places) >= count:
            chosen = set(rng.choice(places, count, replace=False).tolist())
            yield "".join(_like(s, MISREAD[s.casefold()]) if i in chosen else s for i, s in enumerate(answer))
    words = answer.split()
    if len(words) > 1:
        yield " ".join(words[1:])
        yield words[0]
    if len(places) > 3:
        yield "".join(_like(s, MISREAD.get(s.casefold(), s)) for s in answer)


def _like(model: str, text: str) -> str:
    """``text`` in the case of ``model``: upper, capitalised, or as it is."""
    if model.isupper() and len(model) > 1:
        return text.upper()
    return text[:1].upper() + text[1:] if model[:1].isupper() else text


def _shuffled(values: Iterable[T], rng: np.random.Generator) -> list[T]:
    items = list(values)
    return [items[i] for i in rng.permutation(len(items)).tolist()]
