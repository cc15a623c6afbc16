"""Scores answers with the question's own scorer, and finds plausible answers that it rejects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np

from pixelis.config import RewardsConfig
from pixelis.datasets.synthesis import naming
from pixelis.errors import DataFailure
from pixelis.records import Annotations, Question, SampleKind
from pixelis.rewards.scorers import (
    Services,
    canonical,
    case_of,
    find_scorer,
    letter,
    number,
)
from pixelis.rewards.services import shared_services

T = TypeVar("T")

RIGHT = {"iou": 0.5, "anls": 0.9, "cer": 0.9}
"""Lowest score of a right answer, where it is not 1."""
SAMPLE_WEIGHTS: dict[SampleKind, float] = {
    "trap_perceptual": 1.5,
    "trap_logical": 1.5,
    "self_correction": 1.2,
}
"""Sampling weight of a kind; 1 for the others (Pixelis, arXiv 2603.25091)."""
WRONG = {"partial": 0.5, "cer": 0.5, "iou": 0.3, "func_seq": 0.5, "func_seq_eval": 0.5}
"""Highest score of a wrong answer, where mere similarity earns a score; 0 for every other scorer."""

OPPOSITES = (
    ("yes", "no"),
    ("left", "right"),
    ("above", "below"),
    ("up", "down"),
    ("upper", "lower"),
    ("larger", "smaller"),
    ("before", "after"),
    ("in front of", "behind"),
    ("inside", "outside"),
)
COLOURS = (
    "red",
    "green",
    "blue",
    "yellow",
    "purple",
    "cyan",
    "orange",
    "brown",
    "black",
    "white",
    "grey",
    "pink",
)
THINGS = ("bottle", "chair", "bird", "cup", "book", "clock", "hat", "ball", "key", "shoe", "lamp", "box")
"""Labels that a thing may be mistaken for in a picture with one kind of thing."""
MISREAD = dict(zip("0123456789oaecilnhumst", "8778965134aecelihnvnzf", strict=True))
"""Characters and those that they are misread as."""
_CHOICE = re.compile(r"(?:the |an? )?([\w][\w -]*?),? or (?:the |an? )?([\w][\w -]*?)\s*\?")


def score(question: Question, answer: str | None, services: Services) -> float:
    """The score of the answer by the question's scorer; DataFailure ``no_truth`` without an accepted answer."""
    if not question.answers:
        raise DataFailure(f"{question.id} has no accepted answer", code="no_truth")
    return float(find_scorer(question.scorer)(case_of(question, answer, question.answers), services))


def counts_as_right(question: Question, value: float) -> bool:
    return value >= RIGHT.get(question.scorer, 1.0)


def counts_as_wrong(question: Question, value: float) -> bool:
    return value <= WRONG.get(question.scorer, 0.0)


def is_right(question: Question, answer: str | None, rewards: RewardsConfig | None = None) -> bool:
    return counts_as_right(question, score(question, answer, shared_services(rewards or RewardsConfig())))


def is_wrong(question: Question, answer: str | None, rewards: RewardsConfig | None = None) -> bool:
    """True if the scorer rejects the answer, also with synonyms of its colours (grey for gray)."""
    refused = counts_as_wrong(question, score(question, answer, shared_services(rewards or RewardsConfig())))
    meanings = [
        " ".join(naming.COLOUR_SYNONYMS.get(word, word) for word in canonical(text).split())
        for text in (answer or "", *(question.answers or ()))
    ]
    return refused and meanings[0] not in meanings[1:]


def wrong_answer(
    question: Question, answer: str, rng: np.random.Generator, rewards: RewardsConfig | None = None
) -> tuple[str, str]:
    """The first alternative to the right ``answer`` that the scorer rejects, and its origin."""
    for other, origin in alternatives(question, answer, rng):
        if canonical(other) != canonical(answer) and is_wrong(question, other, rewards):
            return other, origin
    raise DataFailure(f"{question.id}: there is no wrong answer like {answer[:40]!r}", code="no_alternative")


def alternatives(question: Question, answer: str, rng: np.random.Generator) -> Iterator[tuple[str, str]]:
    """Answers of the same type with their origin, the most plausible first."""
    plain, annotations = canonical(answer), question.annotations or Annotations()
    if options := case_of(question, None, question.answers or [answer]).options:
        right = letter(answer, options)
        for index in rng.permutation(len(options)).tolist():
            if (sign := chr(ord("A") + index)) != right:
                yield (sign if len(answer) == 1 else options[index]), "option"
    bare = plain.removeprefix("the ")
    # The answer is one thing that the question names; the others are as likely
    names_in_question, text = [], canonical(question.question)
    for name in naming.describe([region for region in annotations.regions if region.frame is None]).values():
        pattern = rf"\b{re.escape(canonical(name))}\b"
        if re.search(pattern, text) and not re.search(rf"\b(to|from|than) {pattern}", text):
            names_in_question.append(name.removeprefix("the "))
    if bare in map(canonical, names_in_question):
        yield from (
            (_like(answer, f"the {n}" if plain != bare else n), "choice")
            for n in names_in_question
            if canonical(n) != bare
        )
    for first, second in _CHOICE.findall(question.question):
        for chosen, other in ((first, second), (second, first)):
            if canonical(chosen) == bare and len(other.split()) <= 4:
                yield _like(answer, f"the {other}" if plain != bare else other), "choice"
    yield from ((_like(answer, other), "picture") for other in _shuffled(_siblings(annotations, plain), rng))
    for word, other in (order for pair in OPPOSITES for order in (pair, pair[::-1])):
        if match := re.search(rf"\b{re.escape(word)}\b", answer, re.IGNORECASE):
            yield answer[: match.start()] + _like(match[0], other) + answer[match.end() :], "opposite"
    if (value := number(answer)) is not None:
        yield from ((other, "number") for other in _numbers(answer, value, rng))
        return
    if plain in COLOURS:
        yield from ((_like(answer, other), "colour") for other in _shuffled(COLOURS, rng))
        return
    labels = dict.fromkeys(region.label for region in annotations.regions)
    if any(canonical(label) == plain for label in labels):
        yield from ((_like(answer, other), "common") for other in _shuffled(THINGS, rng))
        return
    yield from ((other, "misread") for other in _misread(answer, rng))


def _siblings(annotations: Annotations, plain: str) -> list[str]:
    kinds = {"label": [region.label for region in annotations.regions]}
    for region in annotations.regions:
        for key, value in region.attributes.items():
            kinds.setdefault(f"attribute {key}", []).append(str(value))
    kinds["line"] = [line.text for line in annotations.lines]
    kinds["event"] = [event.text for event in annotations.events]
    kinds["relation"] = [relation.predicate for relation in annotations.relations]
    matching = [kind for kind in kinds.values() if plain in map(canonical, kind)]
    return list(dict.fromkeys(value for kind in matching for value in kind if canonical(value) != plain))


def _numbers(answer: str, value: float, rng: np.random.Generator) -> Iterator[str]:
    """A count off by one to three, or a measured value off by a third to twice, written like the answer."""
    if value.is_integer() and abs(value) <= 20:
        others = [value + step for step in (*_shuffled((1, -1), rng), 2, -2, 3)]
    else:
        others = [value * factor for factor in _shuffled((0.6, 0.7, 1.35, 1.5, 2.0), rng)]
    digits = len(match[1]) if (match := re.search(r"\.(\d+)", answer)) else 0
    for other in others:
        if other < 0 <= value:
            continue
        yield re.sub(r"[-+]?\d[\d,]*(\.\d*)?([eE][-+]?\d+)?", f"{other:.{digits}f}", answer, count=1)


def _misread(answer: str, rng: np.random.Generator) -> Iterator[str]:
    indices = [i for i, sign in enumerate(answer) if sign.casefold() in MISREAD]
    for count in (1, 2, 3):
        if len(indices) >= count:
            chosen = set(rng.choice(indices, count, replace=False).tolist())
            yield "".join(_like(s, MISREAD[s.casefold()]) if i in chosen else s for i, s in enumerate(answer))
    words = answer.split()
    if len(words) > 1:
        yield " ".join(words[1:])
        yield words[0]
    if len(indices) > 3:
        yield "".join(_like(s, MISREAD.get(s.casefold(), s)) for s in answer)


def _like(model: str, text: str) -> str:
    """``text`` in the case of ``model``: upper case, capitalised, or unchanged."""
    if model.isupper() and len(model) > 1:
        return text.upper()
    return text[:1].upper() + text[1:] if model[:1].isupper() else text


def _shuffled(values: Iterable[T], rng: np.random.Generator) -> list[T]:
    items = list(values)
    return [items[i] for i in rng.permutation(len(items)).tolist()]
