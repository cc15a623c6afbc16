"""Redacts text before it is stored: personal data becomes ``[CATEGORY_xxxxxx]``, other numbers stay.

The six hex digits are of a SHA-256 of what was there, so that the same address is the same mark in all records and nobody needs
the address; whoever guesses an address can confirm the guess. Patterns find what has a form; a name or a street in running
text has none and stays.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image

from pixelis.evolution.privacy_patterns import MARK, PATTERNS, WEIGHTS
from pixelis.records import Action, Experience, Feedback, ImageView, Media, Observation, Question, Trajectory, Turn, Verdict, Vote

MAX_CHARS = 10_000
"""Longest text that is stored; what stands beyond is cut before any pattern looks at it."""

AHEAD = 300
"""Characters beyond the cut that patterns see: what a cut would halve is found whole."""

ROUNDS = 8
"""Natural text is done after two: one that finds, one that finds nothing."""

PSEUDONYM = re.compile(r"[0-9a-f]{16}")


def redact(text: str) -> str:
    """``text`` with personal data replaced by marks, at most MAX_CHARS long. Redacting again changes nothing.

    What is found may uncover more beside it, so it is looked at until nothing is found; a text that is still not done after
    ROUNDS was made for that, and becomes one mark ``TEXT``.
    """
    whole = text
    text = text[: MAX_CHARS + AHEAD]
    for _ in range(ROUNDS):
        before = text
        for category, pattern, valid in PATTERNS:
            text = pattern.sub(lambda found, c=category, v=valid: _replaced(found, c, v), text)  # type: ignore[misc]
        text = _cut(text)
        if text == before:
            return text
    return f"[TEXT_{_digest(whole)[:6]}]"


def _replaced(found: re.Match[str], category: str, valid: Callable[[re.Match[str]], bool] | None) -> str:
    """A match with its group ``value`` as a mark; a mark that is there already, or what is not valid, as it is."""
    whole = found[0]
    if found["value"] is None or (valid is not None and not valid(found)):
        return whole
    start, end = found.start("value") - found.start(), found.end("value") - found.start()
    return f"{whole[:start]}[{category}_{_digest(found['value'])[:6]}]{whole[end:]}"


def _cut(text: str) -> str:
    """At most MAX_CHARS, and no half of a mark."""
    if len(text) <= MAX_CHARS:
        return text
    for mark in re.finditer(MARK, text[MAX_CHARS - 40 : MAX_CHARS + 40]):
        start = MAX_CHARS - 40 + mark.start()
        if start < MAX_CHARS < start + len(mark[0]):
            return text[:start]
    return text[:MAX_CHARS]


def _digest(value: str) -> str:
    """Of the value without case; of a number without its separators: the same phone in two spellings is one."""
    folded = value.casefold()
    plain = folded if any(letter.isalpha() for letter in folded) else "".join(filter(str.isdigit, folded))
    return _sha256(plain)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def is_redacted(text: str) -> bool:
    """True when a mark stands in ``text``: it says less than what was said, and is no answer to vote with."""
    return re.search(MARK, text) is not None


def pseudonym(user: str) -> str:
    """16 hex digits that stand for a user in stored records."""
    return _sha256(user)[:16]


@dataclass(frozen=True, slots=True)
class Risk:
    """``score``: 10, 5 or 1 for each finding by its category; ``level`` low below 10, medium below 50, else high."""

    score: int
    level: Literal["low", "medium", "high"]
    found: dict[str, int]


def risk(text: str) -> Risk:
    """How much personal data ``text`` holds, by category; marks of an earlier redaction count for nothing."""
    marks_before = re.findall(MARK, text[:MAX_CHARS])
    found: dict[str, int] = {}
    for mark in re.findall(MARK, redact(text)):
        category = mark[1:].rsplit("_", 1)[0]
        found[category] = found.get(category, 0) + 1
    for mark in marks_before:
        category = mark[1:].rsplit("_", 1)[0]
        found[category] = found.get(category, 0) - 1
    found = {category: count for category, count in found.items() if count > 0}
    score = sum(WEIGHTS.get(category, 10) * count for category, count in found.items())
    return Risk(score, "low" if score < 10 else "medium" if score < 50 else "high", found)


def clean_png(view: np.ndarray) -> bytes:
    """PNG of the pixels alone (uint8 [H, W], [H, W, 3] or [H, W, 4]): no metadata, profile or comment comes along."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(view, dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


# -- records ----------------------------------------------------------------------------------------------------------


def redact_experience(experience: Experience) -> Experience:
    """A copy that may be stored: all text redacted, pictures and clips by name only, no annotation, the user a pseudonym.

    Numbers of structured fields are untouched. The token ids of a turn spell its text: where the text changed they are cut,
    and the log-probs with them; that trajectory can be read but not trained on.
    """
    user = experience.user
    return experience.model_copy(
        update={
            "question": _question(experience.question),
            "trajectory": _trajectory(experience.trajectory),
            "verdict": _verdict(experience.verdict),
            "feedback": [redact_feedback(said) for said in experience.feedback],
            "user": user if user is None or PSEUDONYM.fullmatch(user) else pseudonym(user),
        }
    )


def redact_feedback(said: Feedback) -> Feedback:
    """A copy with answer and comment redacted."""
    answer = None if said.answer is None else redact(said.answer)
    return said.model_copy(update={"answer": answer, "comment": redact(said.comment)})


def redact_data(value: Any) -> Any:
    """Plain values with their texts redacted: numbers, keys and masks as they are, inline pictures cut.

    Where the text of a line of writing changed, its words go: they would spell it again.
    """
    if isinstance(value, str):
        return "" if value.startswith("data:") else redact(value)
    if isinstance(value, Mapping):
        if "counts" in value and "size" in value:  # the run lengths of a mask
            return dict(value)
        cleaned = {key: redact_data(inner) for key, inner in value.items()}
        if "words" in cleaned and cleaned.get("text") != value.get("text"):
            cleaned["words"] = []
        return cleaned
    if isinstance(value, list | tuple):
        return [redact_data(inner) for inner in value]
    return value


def _maybe(text: str | None) -> str | None:
    return None if text is None else redact(text)


def _question(question: Question) -> Question:
    return question.model_copy(
        update={
            "question": redact(question.question),
            "answers": None if question.answers is None else [redact(answer) for answer in question.answers],
            "media": [_medium(medium) for medium in question.media],
            "meta": redact_data(question.meta),
            "annotations": None,
        }
    )


def _medium(medium: Media) -> Media:
    """By name: a data URL holds the picture, a path or an address may hold a person's name."""
    return medium.model_copy(update={"uri": f"stored:{medium.id}", "frames": None})


def _view(view: ImageView) -> ImageView:
    return view.model_copy(update={"uri": ""})


def _trajectory(trajectory: Trajectory) -> Trajectory:
    return trajectory.model_copy(
        update={
            "images": [_view(view) for view in trajectory.images],
            "turns": [_turn(turn) for turn in trajectory.turns],
            "answer": _maybe(trajectory.answer),
            "unscored": _maybe(trajectory.unscored),
        }
    )


def _turn(turn: Turn) -> Turn:
    cleaned = redact(turn.text)
    update: dict[str, Any] = {
        "text": cleaned,
        "error": _maybe(turn.error),
        "action": None if turn.action is None else _action(turn.action),
        "observation": None if turn.observation is None else _observation(turn.observation),
    }
    if cleaned != turn.text:
        update |= {"tokens": [], "log_probs": []}
    return turn.model_copy(update=update)


def _action(action: Action) -> Action:
    return action.model_copy(update={"arguments": redact_data(action.arguments)})


def _observation(observation: Observation) -> Observation:
    return observation.model_copy(
        update={
            "text": redact(observation.text),
            "images": [_view(view) for view in observation.images],
            "data": redact_data(observation.data),
        }
    )


def _verdict(verdict: Verdict) -> Verdict:
    weights: dict[str, float] = {}
    for answer, weight in verdict.answer_weights.items():
        key = redact(answer)
        weights[key] = weights.get(key, 0.0) + weight
    return verdict.model_copy(
        update={
            "answer": _maybe(verdict.answer),
            "self_answer": _maybe(verdict.self_answer),
            "votes": [_vote(vote) for vote in verdict.votes],
            "answer_weights": weights,
            "strategies": {name: _maybe(answer) for name, answer in verdict.strategies.items()},
        }
    )


def _vote(vote: Vote) -> Vote:
    return vote.model_copy(update={"answer": _maybe(vote.answer)})
