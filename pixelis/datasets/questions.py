"""Questions and demonstrations from a named source: the picture world (`cards:?split=train`) or a JSON-lines file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs

import numpy as np
from pydantic import ValidationError

from pixelis.datasets import cards
from pixelis.errors import BadInput, MissingFile
from pixelis.records import Demonstration, Question

R = TypeVar("R", bound=Question)

CARDS_QUESTIONS = 1_000_000
"""A `cards:` source is as good as endless; nobody reads an epoch of it."""


def read_questions(
    source: str, seed: int | None = None, start: int = 0, limit: int = 0, epochs: int | None = None
) -> Iterator[Question]:
    """Questions of ``source`` from number ``start`` on, endless unless ``epochs`` says otherwise.

    ``seed`` shuffles a file's rows anew in every epoch (None: file order) and chooses the pictures of a `cards:` source that
    names no seed. ``limit`` keeps the first N rows. The order depends on these arguments alone, so a run resumes by number.
    Raises MissingFile, and BadInput naming file, line and column.
    """
    if source.startswith("cards:"):
        rows = _cards(source, seed, limit or CARDS_QUESTIONS)
        count = limit or CARDS_QUESTIONS
        numbers = range(count)
        for epoch in itertools.count() if epochs is None else range(epochs):
            for number in numbers[max(0, start - epoch * count) :]:
                yield Question.model_validate(rows(number))
        return
    questions = _read_file(Path(source), limit)
    for epoch in itertools.count() if epochs is None else range(epochs):
        order = np.arange(len(questions))
        if seed is not None:
            np.random.default_rng([seed, epoch]).shuffle(order)
        for number in order[max(0, start - epoch * len(questions)) :]:
            yield questions[number]


def read_demonstrations(source: str, count: int, seed: int, direct_share: float) -> list[Demonstration]:
    """``count`` demonstrations: of a file in an order that ``seed`` shuffles, over and over; of `cards:` made anew."""
    if source.startswith("cards:"):
        fields = _cards_fields(source)
        split, own_seed = fields.get("split", "train"), int(fields.get("seed", seed))
        aim = fields.get("aim", "0")
        try:
            spread = float(aim)
        except ValueError:
            raise BadInput(f"{source}: aim={aim} is no number") from None
        return [
            Demonstration.model_validate(row) for row in cards.demonstration_rows(split, count, own_seed, direct_share, spread)
        ]
    path = Path(source)
    rows = [_checked(Demonstration, path, number, row) for number, row in _json_lines(path)]
    if not rows:
        raise BadInput(f"{source} holds no demonstration")
    order = np.random.default_rng(seed).permutation(len(rows))
    return [rows[i] for i in itertools.islice(itertools.cycle(order), count)]


def _cards_fields(source: str) -> dict[str, str]:
    return {key: values[-1] for key, values in parse_qs(source.partition("?")[2], keep_blank_values=True).items()}


def _cards(source: str, seed: int | None, count: int):
    fields = _cards_fields(source)
    split, shift = fields.get("split", "train"), fields.get("shift", "")
    try:
        own_seed = int(fields.get("seed", seed or 0))
    except ValueError:
        raise BadInput(f"{source}: the seed {fields['seed']!r} is not a whole number") from None
    return lambda number: cards.question_row(split, own_seed, number, shift)


def _read_file(path: Path, limit: int) -> list[Question]:
    questions, seen = [], set()
    for number, row in _json_lines(path):
        question = _checked(Question, path, number, row)
        if question.id in seen:
            raise BadInput(f"{path}, line {number}: the id {question.id!r} is there twice", fix="give every row its own id")
        seen.add(question.id)
        questions.append(question)
        if limit and len(questions) >= limit:
            break
    if not questions:
        raise BadInput(f"{path} holds no question")
    return questions


def _checked(record: type[R], path: Path, number: int, row: Any) -> R:
    try:
        return record.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        column = ".".join(str(part) for part in first["loc"]) or "all"
        raise BadInput(
            f"{path}, line {number}, column {column}: {first['msg']}",
            fix="a row is a JSON object with id, question, media, answers, ...; each of the `turns` of a demonstration has `op` "
            "or `answer`",
        ) from None


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    if not path.is_file():
        raise MissingFile(f"no file {path}", fix="name a JSON-lines file, or cards:?split=train for the embedded picture world")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except json.JSONDecodeError as error:
                    raise BadInput(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from None
