"""Questions and demonstrations by source: files of rows, annotated data sets, packaged media, the card world.

    cards:?split=train                      the card world of pixelis-nano
    NAME:ROOT?split=train                   a data set in its official layout, see pixelis.datasets.readers
    packaged:NAME?split=train               annotated images and clips that ship in packages
    rows.parquet?format=NAME&media=FOLDER   a file of rows or a folder of them, see pixelis.datasets.formats

Rows are streamed, and shuffled in windows.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar, cast

import numpy as np

from pixelis.datasets import card_questions
from pixelis.datasets.bad_rows import BadRow, UniqueIds
from pixelis.datasets.corruptions import corruption_of
from pixelis.datasets.labels import OnLabels, labels_of, read_without_truths
from pixelis.datasets.source_options import parse_options, whole_option
from pixelis.errors import BadConfig, BadInput
from pixelis.records import Demonstration, Question

T = TypeVar("T")

CARDS_EPOCH = 1_000_000
"""Questions of an epoch of a `cards:` source, which is practically endless."""
SHUFFLE_ROWS = 10_000
"""Questions of a window: a smaller source is shuffled as a whole."""
SHARE_ROWS = 1000
"""A share of bad rows is checked each time that so many rows were read, and at the end of the source."""
MAX_REPORTED = 5
"""Bad rows that an error lists."""


class BadRowBudget:
    """Counts bad rows: up to ``limit`` (below 1: a share of all rows) are skipped, one more is an error.

    Without a ``limit`` none is skipped, whatever data.max_bad_rows is.
    """

    def __init__(self, source: str, limit: float | None = None, on_bad_row: Callable[[BadRow], None] | None = None):
        self.source, self.limit, self.on_bad_row = source, limit or 0, on_bad_row
        self.complete = limit is None
        self.rows, self.causes, self.first = 0, Counter[str](), list[BadRow]()

    def add(self, row: BadRow | None) -> None:
        """Count a row, bad or not (None); BadInput if too many are bad."""
        self.rows += 1
        if row is not None:
            self.causes[row.code] += 1
            self.first = [*self.first, row][:MAX_REPORTED]
            if self.on_bad_row is not None:
                self.on_bad_row(row)
        if self.limit == 0 or self.limit >= 1 or self.rows % SHARE_ROWS == 0:
            self.check()

    def check(self) -> None:
        """BadInput if too many of the rows so far are bad; called after the last one too."""
        bad = self.causes.total()
        if bad <= math.floor(self.limit if self.limit >= 1 else self.limit * self.rows):
            return
        lines = "\n".join(f"    {row}" for row in self.first)
        if self.limit == 0:
            fix = "correct the row, or set data.max_bad_rows to skip and count a number or a share of bad rows"
            if self.complete:
                fix = "correct or remove the row: a held-out set must be complete"
            raise BadInput(lines.strip(), code=self.first[0].code, fix=fix)
        causes = ", ".join(f"{code} {count}" for code, count in self.causes.most_common())
        message = f"{self.source}: {bad} bad rows of {self.rows} ({causes}) exceed data.max_bad_rows={self.limit:g}"
        raise BadInput(f"{message}; the first:\n{lines}", code="bad_rows", fix="correct them, or raise data.max_bad_rows")


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

    ``seed`` shuffles the rows differently in every epoch, within windows of ``shuffle_rows`` (None: source order), in which a row
    of ``meta.weight`` w comes w times as often as one of weight 1; it also selects the pictures of a `cards:` source without a
    seed. ``limit`` keeps the first N rows. The order depends on these arguments alone, so a run resumes by number. Up to
    ``max_bad_rows`` (below 1: a share; None: a held-out set, which must be complete) are skipped, and ``on_bad_row`` is called
    once for each. With ``on_labels`` truths are cut off at the reader, see ``pixelis.datasets.labels``, and only passed to it.

    Raises MissingFile, and BadInput naming file, row and column.
    """
    if source.startswith("cards:"):
        questions = _read_cards(source, seed, start, limit or CARDS_EPOCH, epochs)
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


def count_questions(source: str, limit: int = 0, max_bad_rows: float = 0, on_labels: OnLabels | None = None) -> int:
    """The number of questions in one pass through ``source``; BadConfig for `cards:` without a limit.

    With ``on_labels`` rows may lack truths, as in `read_questions`.
    """
    if source.startswith("cards:"):
        if not limit:
            raise BadConfig(f"an epoch of {source} has no end", fix="set data.limit, or steps instead of epochs")
        return limit
    return sum(1 for _ in read_questions(source, limit=limit, epochs=1, max_bad_rows=max_bad_rows, on_labels=on_labels))


def require_text(question: Question, source: str) -> Question:
    """The question; BadInput if it has annotations alone and no text to put to a policy."""
    if not question.question.strip():
        message = f"{source}: {question.id} has no question text"
        raise BadInput(message, code="no_question", fix="generate questions from it with jobs.synthesize")
    return question


def read_demonstrations(source: str, count: int, seed: int, direct_share: float) -> list[Demonstration]:
    """``count`` demonstrations: of a file in an order that ``seed`` shuffles in every epoch, of `cards:` generated."""
    if source.startswith("cards:"):
        options = _cards_options(source, "aim")
        shares = [_share_option(source, options, name) for name in ("aim", "follow_up", "clips", "crops")]
        split, seed = options.get("split", "train"), whole_option(source, options, "seed", seed)
        rows = card_questions.demonstration_rows(split, count, seed, direct_share, *shares)
        return [Demonstration.model_validate(row) for row in rows]
    demonstrations = cast("Callable[[], Iterator[Demonstration | BadRow]]", lambda: read_rows(source, Demonstration))
    return list(
        itertools.islice(epochs_of(demonstrations, sampling_weight, BadRowBudget(source), seed=seed, kind="demonstration"), count)
    )


def _cut(rows: Iterator[T], on_labels: OnLabels) -> Iterator[T | Question]:
    for row in rows:
        if isinstance(row, Question):
            if (labels := labels_of(row)) is not None:
                on_labels(row.id, labels)
            yield read_without_truths(row)
        else:
            yield row


def read_rows(source: str, kind: type[Question] = Question, on_labels: OnLabels | None = None) -> Iterator[Question | BadRow]:
    """The records of a source, once, in source order; unusable rows are values. Not for `cards:`, which is endless.

    With ``on_labels`` truths are cut off and only passed to it.

    Raises MissingFile and BadInput for a source that cannot be read at all.
    """
    # Imported late, because the card world needs none of what they import.
    from pixelis.datasets import packaged, readers
    from pixelis.datasets.formats import read_records

    if not source.startswith("packaged:") and not readers.is_dataset(source):
        return read_records(source, kind, on_labels)
    if not issubclass(Question, kind):
        message = f"{source} holds annotated media, not demonstrations"
        raise BadInput(message, fix="generate demonstrations from it with jobs.synthesize")
    ids, rows = UniqueIds(), packaged.read(source) if source.startswith("packaged:") else readers.read(source)
    checked = (row if isinstance(row, BadRow) else ids.check(row.id, source, row.id) or row for row in rows)
    return checked if on_labels is None else _cut(checked, on_labels)


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
    """The usable rows from number ``start`` on, in the order of `read_questions`; ``rows()`` is one pass through the source.

    Bad rows are counted in the first pass only. Raises BadInput if they exceed the budget, or if there is no usable row.
    """
    number, epoch, length = 0, 0, 0
    while epochs is None or epoch < epochs:
        if length and (skipped := (start - number) // length) > 0:  # whole epochs before the start
            number, epoch = number + skipped * length, epoch + skipped
            continue
        first = number
        usable = _usable(rows(), limit, budget if epoch == 0 else None)
        if seed is None:
            for row in usable:
                if number >= start:
                    yield row
                number += 1
        else:
            for position, block in enumerate(_windows(usable, window)):
                order = _shuffled([weight(row) for row in block], np.random.default_rng([seed, epoch, position]))
                for i in order[max(0, start - number) :]:
                    yield block[i]
                number += len(block)
        length, epoch = number - first, epoch + 1
        if not length:
            raise BadInput(f"{budget.source} holds no {kind}", code="no_rows", fix="name a source that has some")


def _usable(rows: Iterator[T | BadRow], limit: int, budget: BadRowBudget | None) -> Iterator[T]:
    """The usable ones of one pass, the first ``limit`` unless that is 0."""
    for row in first_rows(rows, limit):
        bad = row if isinstance(row, BadRow) else None
        if budget is not None:
            budget.add(bad)
        if bad is None:
            yield cast("T", row)
    if budget is not None:
        budget.check()


def _windows(rows: Iterator[T], count: int) -> Iterator[list[T]]:
    while block := list(itertools.islice(rows, count)):
        yield block


def _shuffled(weights: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """As many positions as weights, shuffled; those of higher weights several times, of lower ones maybe never."""
    order, shares = rng.permutation(len(weights)), np.asarray(weights)
    if (shares == shares[0]).all():
        return order
    # Systematic sampling: each position comes its expected number of times, rounded down or up.
    edges = np.cumsum(shares) / shares.sum()
    positions = np.searchsorted(edges, (np.arange(len(weights)) + rng.random()) / len(weights))
    return np.minimum(positions, len(weights) - 1)[order]


def sampling_weight(question: Question) -> float:
    """``meta.weight`` of a question, by default 1; BadInput if it is not a positive number."""
    weight = question.meta.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise BadInput(f"{question.id}: meta.weight {weight!r} is not a positive number", fix="remove or correct it")
    return float(weight)


def _read_cards(source: str, seed: int | None, start: int, count: int, epochs: int | None) -> Iterator[Question]:
    options = _cards_options(source, "shift", "corruption", "severity")
    scene = options.get("split", "train"), whole_option(source, options, "seed", seed or 0)
    corruption = corruption_of(source, options)
    follow_up, clips, crops = (_share_option(source, options, name) for name in ("follow_up", "clips", "crops"))
    shift = options.get("shift", "")
    for epoch in itertools.count(start // count) if epochs is None else range(start // count, epochs):
        for number in range(max(0, start - epoch * count), count):
            yield Question.model_validate(card_questions.question_row(*scene, number, shift, follow_up, clips, corruption, crops))


def _cards_options(source: str, *own: str) -> dict[str, str]:
    return parse_options(source, ("split", "seed", "follow_up", "clips", "crops", *own))[1]


def _share_option(source: str, options: dict[str, str], name: str) -> float:
    try:
        return float(options.get(name, 0))
    except ValueError:
        raise BadInput(f"{source}: {name}={options[name]} is not a number") from None
