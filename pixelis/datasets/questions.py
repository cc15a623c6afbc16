"""Questions and demonstrations of any source: files of rows, annotated data sets, generated worlds."""

from __future__ import annotations

import importlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from pixelis.datasets import readers
from pixelis.datasets.bad_rows import BadRow, UniqueIds
from pixelis.datasets.labels import OnLabels, labels_of, read_without_truths
from pixelis.errors import BadConfig, BadInput
from pixelis.records import Demonstration, Question

T = TypeVar("T")

CARDS_EPOCH = 1_000_000
"""Questions of an epoch of a `cards:` source, which is practically endless."""
SHUFFLE_ROWS = 10_000
SHARE_ROWS = 1000
"""A share of bad rows is checked after this many rows, and at the end of the source."""
MAX_REPORTED = 5
_MODULES = {"cards": "card_questions", "packaged": "packaged", "rows": "formats"}
"""Imported on use."""


def _module(kind: str) -> Any:
    return importlib.import_module(f"pixelis.datasets.{_MODULES[kind]}")


class BadRowBudget:
    """Counts bad rows: up to ``limit`` (below 1: a share of all rows) are skipped, one more is BadInput.

    Without a limit it is a held-out set, which must be complete.
    """

    def __init__(
        self, source: str, limit: float | None = None, on_bad_row: Callable[[BadRow], None] | None = None
    ):
        self.source, self.limit, self.on_bad_row = source, limit or 0, on_bad_row
        self.complete = limit is None
        self.rows, self.causes, self.first = 0, Counter[str](), list[BadRow]()

    def add(self, row: BadRow | None) -> None:
        self.rows += 1
        if row is not None:
            self.causes[row.code] += 1
            self.first = [*self.first, row][:MAX_REPORTED]
            if self.on_bad_row is not None:
                self.on_bad_row(row)
        if self.limit == 0 or self.limit >= 1 or self.rows % SHARE_ROWS == 0:
            self.check()

    def check(self) -> None:
        """Called after the last row too."""
        bad = self.causes.total()
        if bad <= math.floor(self.limit if self.limit >= 1 else self.limit * self.rows):
            return
        lines = "\n".join(f"    {row}" for row in self.first)
        if self.limit == 0:
            fix = "correct the row, or set data.max_bad_rows to skip and count a number or a share of them"
            if self.complete:
                fix = "correct or remove the row: a held-out set must be complete"
            raise BadInput(lines.strip(), code=self.first[0].code, fix=fix)
        causes = ", ".join(f"{code} {count}" for code, count in self.causes.most_common())
        message = f"{self.source}: {bad} bad rows of {self.rows} ({causes}) exceed {self.limit:g}; the first:"
        fix = "correct them, or raise data.max_bad_rows"
        raise BadInput(f"{message}\n{lines}", code="bad_rows", fix=fix)


def read_questions(
    source: str,
    seed: int | None = None,
    start: int = 0,
    limit: int = 0,
    epochs: int | None = None,
    max_bad_rows: float | None = None,
    shuffle_rows: int = SHUFFLE_ROWS,
    on_bad_row: Callable[[BadRow], None] | None = None,
    on_labels: OnLabels | None = None,
) -> Iterator[Question]:
    """Questions of ``source`` from number ``start`` on, endlessly unless ``epochs`` is set.

    The order depends on the arguments alone, so that a run resumes by number. ``seed`` shuffles every epoch
    anew within windows of ``shuffle_rows`` (None: source order); a row of ``meta.weight`` w comes w times as
    often. Up to ``max_bad_rows`` (None: a held-out set, which must be complete) are skipped. ``on_labels``
    alone gets the truths. MissingFile, BadInput.
    """
    if source.startswith("cards:"):
        questions = _module("cards").read(source, seed, start, limit or CARDS_EPOCH, epochs)
        return questions if on_labels is None else _cut(questions, on_labels)
    return epochs_of(
        lambda: read_rows(source, on_labels=on_labels),
        sampling_weight,
        BadRowBudget(source, max_bad_rows, on_bad_row),
        seed=seed,
        start=start,
        limit=limit,
        epochs=epochs,
        window=shuffle_rows,
    )


def count_questions(
    source: str, limit: int = 0, max_bad_rows: float = 0, on_labels: OnLabels | None = None
) -> int:
    """The number of questions in one pass; BadConfig for `cards:` without a limit."""
    if source.startswith("cards:"):
        if not limit:
            fix = "set data.limit, or steps instead of epochs"
            raise BadConfig(f"an epoch of {source} has no end", fix=fix)
        return limit
    rows = read_questions(source, limit=limit, epochs=1, max_bad_rows=max_bad_rows, on_labels=on_labels)
    return sum(1 for _ in rows)


def require_text(question: Question, source: str) -> Question:
    if not question.question.strip():
        message = f"{source}: {question.id} has no question text"
        raise BadInput(message, code="no_question", fix="generate questions from it with pixelis synthesize")
    return question


def read_demonstrations(source: str, count: int, seed: int, direct_share: float) -> list[Demonstration]:
    if source.startswith("cards:"):
        return _module("cards").read_demonstrations(source, count, seed, direct_share)
    rows = cast("Callable[[], Iterator[Demonstration | BadRow]]", lambda: read_rows(source, Demonstration))
    shuffled_rows = epochs_of(rows, sampling_weight, BadRowBudget(source), seed=seed, kind="demonstration")
    return list(itertools.islice(shuffled_rows, count))


def _cut(rows: Iterator[T], on_labels: OnLabels) -> Iterator[T | Question]:
    for row in rows:
        if isinstance(row, Question):
            if (labels := labels_of(row)) is not None:
                on_labels(row.id, labels)
            yield read_without_truths(row)
        else:
            yield row


def read_rows(
    source: str, kind: type[Question] = Question, on_labels: OnLabels | None = None
) -> Iterator[Question | BadRow]:
    """The records of a source, once, in source order; unusable rows are values. Not for `cards:`."""
    if not is_annotated(source):
        return _module("rows").read_records(source, kind, on_labels)
    if not issubclass(Question, kind):
        message = f"{source} holds annotated media, not demonstrations"
        raise BadInput(message, fix="generate demonstrations from it with pixelis synthesize")
    ids, read = UniqueIds(), _module("packaged").read if source.startswith("packaged:") else readers.read
    checked = (
        row if isinstance(row, BadRow) else ids.check(row.id, source, row.id) or row for row in read(source)
    )
    return checked if on_labels is None else _cut(checked, on_labels)


def is_annotated(source: str) -> bool:
    return source.startswith("packaged:") or readers.is_dataset(source)


def first_rows(rows: Iterable[T | BadRow], limit: int) -> Iterator[T | BadRow]:
    """The rows up to the usable one of number ``limit``; all if that is 0."""
    count = 0
    for row in rows:
        yield row
        count += not isinstance(row, BadRow)
        if 0 < limit == count:
            return


def epochs_of(
    rows: Callable[[], Iterator[T | BadRow]],
    weight: Callable[[T], float],
    budget: BadRowBudget,
    *,
    seed: int | None,
    start: int = 0,
    limit: int = 0,
    epochs: int | None = None,
    window: int = SHUFFLE_ROWS,
    kind: str = "question",
) -> Iterator[T]:
    """The usable rows from number ``start`` on, in the order of `read_questions`; ``rows()`` is one pass.

    Bad rows are counted in the first pass only. BadInput if they exceed the budget, or without a usable row.
    """
    number, epoch, length = 0, 0, 0
    while epochs is None or epoch < epochs:
        if length and (skipped := (start - number) // length) > 0:  # whole epochs before the start
            number, epoch = number + skipped * length, epoch + skipped
            continue
        first = number
        usable = _usable(rows(), limit, budget if epoch == 0 else None)
        size = window if seed is not None else 1  # of a window
        windows = iter(lambda: list(itertools.islice(usable, size)), [])  # noqa: B023
        for position, block in enumerate(windows):
            order = np.arange(len(block))
            if seed is not None:
                rng = np.random.default_rng([seed, epoch, position])
                order = shuffled([weight(row) for row in block], rng)
            for i in order[max(0, start - number) :]:
                yield block[i]
            number += len(block)
        length, epoch = number - first, epoch + 1
        if not length:
            message = f"{budget.source} holds no {kind}"
            raise BadInput(message, code="no_rows", fix="name a source that has some")


def _usable(rows: Iterator[T | BadRow], limit: int, budget: BadRowBudget | None) -> Iterator[T]:
    for row in first_rows(rows, limit):
        bad = row if isinstance(row, BadRow) else None
        if budget is not None:
            budget.add(bad)
        if bad is None:
            yield cast("T", row)
    if budget is not None:
        budget.check()


def shuffled(weights: Sequence[float] | np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """As many positions as weights, int64: each comes weight / mean weight times, rounded at random."""
    order, shares = rng.permutation(len(weights)), np.asarray(weights)
    if (shares == shares[0]).all():
        return order
    # Systematic sampling: equidistant points, shifted at random, over the cumulative weights.
    edges = np.cumsum(shares) / shares.sum()
    positions = np.searchsorted(edges, (np.arange(len(weights)) + rng.random()) / len(weights))
    return np.minimum(positions, len(weights) - 1)[order]


def sampling_weight(question: Question) -> float:
    weight = question.meta.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        message = f"{question.id}: meta.weight {weight!r} is not a positive number"
        raise BadInput(message, fix="remove or correct it")
    return float(weight)
