"""Redacts text before it is stored: personal data of a known form becomes ``[CATEGORY_xxxxxx]``.

The six hex digits come from a SHA-256 of the value, so the same address gets the same mark in all records.
Names and streets in running text have no known form and stay.
"""

from __future__ import annotations

import functools
import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from PIL import Image

from pixelis.evolution.privacy_patterns import MARK, PATTERNS, WEIGHTS
from pixelis.records import (
    Action,
    Exchange,
    Experience,
    Feedback,
    ImageView,
    Media,
    Observation,
    Question,
    Record,
    Trajectory,
    Turn,
    Verdict,
    Vote,
)

RecordT = TypeVar("RecordT", bound=Record)

MAX_CHARS = 10_000
"""Longest stored text; the rest is cut off before any pattern is applied."""

AHEAD = 300
"""Characters beyond the cut that patterns see, so that a value at the cut is found whole."""

ROUNDS = 8

PSEUDONYM = re.compile(r"(?=.)([0-9a-f]{16}\.)?([0-9a-f]{16})?")


def redact(text: str) -> str:
    """Replace personal data in ``text`` by marks and cut it to MAX_CHARS. Idempotent."""
    original = text
    text = text[: MAX_CHARS + AHEAD]
    for _ in range(ROUNDS):  # a replacement may make more data match
        before = text
        for category, pattern, valid in PATTERNS:
            text = pattern.sub(functools.partial(_replacement, category, valid), text)
        text = _cut(text)
        if text == before:
            return text
    return f"[TEXT_{_digest(original)[:6]}]"  # crafted: natural text takes two rounds


def _cut(text: str) -> str:
    """The first MAX_CHARS, or fewer where that would split a mark."""
    for mark in re.finditer(MARK, text[MAX_CHARS - 40 : MAX_CHARS + 40]):
        if mark.start() < 40 < mark.end():
            return text[: MAX_CHARS - 40 + mark.start()]
    return text[:MAX_CHARS]


def _replacement(category: str, valid: Callable[[re.Match[str]], bool] | None, match: re.Match[str]) -> str:
    whole = match[0]
    if match["value"] is None or (valid is not None and not valid(match)):
        return whole
    start, end = match.start("value") - match.start(), match.end("value") - match.start()
    return f"{whole[:start]}[{category}_{_digest(match['value'])[:6]}]{whole[end:]}"


def _digest(value: str) -> str:
    """SHA-256 of the casefolded value; of a number's digits only, to ignore its spelling."""
    folded = value.casefold()
    return _sha256(
        folded if any(letter.isalpha() for letter in folded) else "".join(filter(str.isdigit, folded))
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def is_redacted(text: str) -> bool:
    """True when ``text`` contains a mark; a redacted answer does not vote."""
    return re.search(MARK, text) is not None


def pseudonym(user: str) -> str:
    """16 hex digits that stand for a user in stored records."""
    return _sha256(user)[:16]


@dataclass(frozen=True, slots=True)
class Risk:
    """Personal data in a text. ``score`` adds 10, 5 or 1 for each; low < 10 <= medium < 50 <= high."""

    score: int
    level: Literal["low", "medium", "high"]
    counts: dict[str, int]


def risk(text: str) -> Risk:
    """The personal data in ``text``; existing marks do not count."""
    before, after = (
        Counter(mark[1:].rsplit("_", 1)[0] for mark in re.findall(MARK, part))
        for part in (text[:MAX_CHARS], redact(text))
    )
    counts = dict(after - before)
    score = sum(WEIGHTS.get(category, 10) * count for category, count in counts.items())
    return Risk(score, "low" if score < 10 else "medium" if score < 50 else "high", counts)


def clean_png(view: np.ndarray) -> bytes:
    """PNG of uint8 pixels [H, W], [H, W, 3] or [H, W, 4], without metadata, profile or comment."""
    buffer = io.BytesIO()
    # Level 1 takes a third of the default's time for a quarter more bytes.
    Image.fromarray(np.ascontiguousarray(view, dtype=np.uint8)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


# -- records

TEXT_FIELDS: dict[type[Record], tuple[str, ...]] = {
    Question: ("question", "answers", "system"),
    Exchange: ("question", "answer"),
    Trajectory: ("answer", "unscored"),
    Turn: ("text", "error"),
    Observation: ("text",),
    Verdict: ("answer", "self_answer", "strategies"),
    Vote: ("answer",),
    Feedback: ("answer", "comment"),
}


Redact = Callable[[str], str]


def redact_record(record: RecordT) -> RecordT:
    """A copy of an experience, or of a record in one, that may be stored.

    Images and clips keep only their ids, because a URI may hold the picture or a name. A turn whose text
    changed loses token ids, which spell the text, and log-probs: it cannot be trained on.
    """
    return _redact_record(record, functools.cache(redact))  # the same answers and questions recur in a record


def _redact_record(record: RecordT, redact: Redact) -> RecordT:
    update: dict[str, Any] = {}
    texts = next((TEXT_FIELDS[base] for base in type(record).__mro__ if base in TEXT_FIELDS), ())
    for name, value in record:
        if name in texts:
            update[name] = _redact_texts(value, redact)
        elif isinstance(value, Record):
            update[name] = _redact_record(value, redact)
        elif isinstance(value, list) and value and isinstance(value[0], Record):
            update[name] = [_redact_record(item, redact) for item in value]
    match record:
        case Question():
            update |= {"meta": redact_data(record.meta, redact), "annotations": None, "functions": []}
        case Media():
            update |= {"uri": f"stored:{record.id}", "frames": None}
        case ImageView():
            update["uri"] = ""
        case Turn():
            update["top_log_probs"] = []
            if update["text"] != record.text:
                update |= {"tokens": [], "log_probs": []}
        case Action():
            update["arguments"] = redact_data(record.arguments, redact)
        case Observation():
            update["data"] = redact_data(record.data, redact)
        case Verdict():
            weights: Counter[str] = Counter()
            for answer, weight in record.answer_weights.items():
                weights[redact(answer)] += weight  # type: ignore[assignment]
            update["answer_weights"] = dict(weights)
        case Experience():
            update["response"] = redact_data(record.response, redact)
            if record.user is not None and not PSEUDONYM.fullmatch(record.user):
                update["user"] = pseudonym(record.user)
    return record.model_copy(update=update)


def _redact_texts(value: Any, redact: Redact) -> Any:
    if isinstance(value, dict):
        return {key: _redact_texts(text, redact) for key, text in value.items()}
    if isinstance(value, list):
        return [redact(text) for text in value]
    return None if value is None else redact(value)


def redact_data(value: Any, redact: Redact = redact) -> Any:
    """JSON values with their texts and keys redacted and data URLs removed; numbers and masks stay."""
    if isinstance(value, str):
        return "" if value.startswith("data:") else redact(value)
    if isinstance(value, Mapping):
        # A run-length mask
        if value.keys() == {"counts", "size"} and isinstance(value["size"], list | tuple):
            return dict(value)
        cleaned = {redact(key): redact_data(inner, redact) for key, inner in value.items()}
        if "words" in cleaned and cleaned.get("text") != value.get("text"):
            cleaned["words"] = []  # they spell the recognised line again
        return cleaned
    if isinstance(value, list | tuple):
        return [redact_data(inner, redact) for inner in value]
    return value
