"""Questions and demonstrations by source: files of rows, families of annotated data sets, packaged media, the picture world.

    cards:?split=train                      the embedded picture world
    NAME:ROOT?split=train                   a data set in its official layout, see pixelis.datasets.readers
    packaged:NAME?split=train               annotated pictures and clips that ship in packages
    rows.parquet?format=NAME&media=FOLDER   files of rows or a folder of them, see pixelis.datasets.formats

Nothing is held as a whole: rows are read as they are wanted, and shuffled in windows.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast
from urllib.parse import parse_qsl

import numpy as np

from pixelis.datasets import cards
from pixelis.datasets.bad_rows import BadRow
from pixelis.errors import BadConfig, BadInput
from pixelis.records import Demonstration, Question

R = TypeVar("R", bound=Question)

CARDS_QUESTIONS = 1_000_000
"""A `cards:` source is as good as endless; nobody reads an epoch of it."""
SHUFFLE_ROWS = 10_000
"""Questions of a window: a smaller source is shuffled as a whole."""
SHARE_ROWS = 1000
"""A share of bad rows is checked each time that so many rows were read, and at the end of the source."""
NAMED = 5
"""Bad rows that an error names."""


class Tolerance:
    """Bad rows so far: skipped and counted up to ``most`` (below 1 a share of all rows), an error beyond."""

    def __init__(self, source: str, most: float = 0, told: Callable[[BadRow], None] | None = None):
        self.source, self.most, self.told = source, most, told
        self.rows, self.causes, self.first = 0, Counter[str](), list[BadRow]()

    def add(self, row: BadRow | None) -> None:
        """Count a row, bad or not; BadInput when there are too many bad ones."""
        self.rows += 1
        if row is not None:
            self.causes[row.code] += 1
            self.first = [*self.first, row][:NAMED]
            if self.told is not None:
                self.told(row)
        if self.most == 0 or self.most >= 1:
            self._check(int(self.most))
        elif self.rows % SHARE_ROWS == 0:
            self._check(math.floor(self.most * self.rows))

    def end(self) -> None:
        """Called after the last row."""
        self._check(int(self.most) if self.most >= 1 else math.floor(self.most * self.rows))

    def _check(self, most: int) -> None:
        bad = self.causes.total()
        if bad <= most:
            return
        named = "\n".join(f"    {row.file}, row {row.row}, column {row.column}: {row.message}" for row in self.first)
        if self.most == 0:
            raise BadInput(
                named.strip(),
                code=self.first[0].code,
                fix="mend the row, or skip and count a number or a share of bad rows with data.max_bad_rows",
            )
        causes = ", ".join(f"{code} {count}" for code, count in self.causes.most_common())
        raise BadInput(
            f"{self.source}: {bad} bad rows of {self.rows} ({causes}) are more than data.max_bad_rows={self.most:g}; the first:\n"
            f"{named}",
            code="bad_rows",
            fix="mend them, or raise data.max_bad_rows",
        )


def read_questions(
    source: str,
    seed: int | None = None,
    start: int = 0,
    limit: int = 0,
    epochs: int | None = None,
    max_bad_rows: float = 0,
    shuffle_rows: int = SHUFFLE_ROWS,
    bad: Callable[[BadRow], None] | None = None,
) -> Iterator[Question]:
    """Questions of ``source`` from number ``start`` on, endless unless ``epochs`` says otherwise.

    ``seed`` shuffles the rows anew in every epoch, within windows of ``shuffle_rows`` (None: their own order), in which rows come
    as often as their ``meta.weight`` says, and chooses the pictures of a `cards:` source that names no seed. ``limit`` keeps the
    first N. The order depends on these arguments alone, so a run resumes by number. Up to ``max_bad_rows`` (below 1 a share) are
    skipped, each told to ``bad`` once.
    Raises MissingFile, and BadInput naming file, row and column.
    """
    if source.startswith("cards:"):
        return _read_cards(source, seed, start, limit or CARDS_QUESTIONS, epochs)
    return _read(source, Question, seed, start, limit, epochs, Tolerance(source, max_bad_rows, bad), shuffle_rows)


def count_questions(source: str, limit: int = 0, max_bad_rows: float = 0) -> int:
    """How many questions one pass through ``source`` has; BadConfig for `cards:` without a limit."""
    if source.startswith("cards:"):
        if not limit:
            raise BadConfig(f"{source} has no end that an epoch could reach", fix="set data.limit, or steps instead of epochs")
        return limit
    return sum(1 for _ in read_questions(source, limit=limit, epochs=1, max_bad_rows=max_bad_rows))


def asked(question: Question, source: str) -> Question:
    """The question, which is to be put to a policy; BadInput for an annotated picture that nobody has asked about yet."""
    if not question.question.strip():
        raise BadInput(
            f"{source}: {question.id} asks nothing", code="no_question", fix="make questions of it with jobs.synthesize"
        )
    return question


def read_demonstrations(
    source: str,
    count: int,
    seed: int,
    direct_share: float,
    max_bad_rows: float = 0,
    bad: Callable[[BadRow], None] | None = None,
) -> list[Demonstration]:
    """``count`` demonstrations: of a file in an order that ``seed`` shuffles anew in every epoch; of `cards:` made anew."""
    if source.startswith("cards:"):
        split, own_seed, fields = _cards_fields(source, seed, "aim")
        try:
            aim = float(fields.get("aim", 0))
        except ValueError:
            raise BadInput(f"{source}: aim={fields['aim']} is no number") from None
        rows = cards.demonstration_rows(split, count, own_seed, direct_share, aim)
        return [Demonstration.model_validate(row) for row in rows]
    tolerance = Tolerance(source, max_bad_rows, bad)
    return list(itertools.islice(_read(source, Demonstration, seed, 0, 0, None, tolerance, SHUFFLE_ROWS), count))


def rows_of(source: str, kind: type[Question] = Question) -> Iterator[Question | BadRow]:
    """The records of a source, once, in their own order; rows that cannot be used are values. Not for `cards:`, which is endless.

    Raises MissingFile and BadInput for a source that cannot be read at all.
    """
    # Who plays with cards alone need not wait for what the other sources import.
    from pixelis.datasets import packaged, readers
    from pixelis.datasets.formats import read_records

    if source.startswith("packaged:") or readers.is_dataset(source):
        if not issubclass(Question, kind):
            raise BadInput(
                f"{source} holds pictures that nobody asked about yet", fix="make demonstrations of it with jobs.synthesize"
            )
        rows = packaged.read(source) if source.startswith("packaged:") else readers.read(source)
        return _unique(source, rows)
    return read_records(source, kind)


def _unique(source: str, rows: Iterable[Question | BadRow]) -> Iterator[Question | BadRow]:
    seen = set[int]()
    for row in rows:
        if isinstance(row, BadRow) or (key := hash(row.id)) not in seen:
            yield row
            if not isinstance(row, BadRow):
                seen.add(key)
        else:
            yield BadRow(source, row.id, "id", "duplicate_id", f"the id {row.id!r} is there twice")


def _read(
    source: str,
    kind: type[R],
    seed: int | None,
    start: int,
    limit: int,
    epochs: int | None,
    tolerance: Tolerance,
    window: int,
) -> Iterator[R]:
    number, epoch, length = 0, 0, 0
    while epochs is None or epoch < epochs:
        if length and (whole := (start - number) // length) > 0:
            number, epoch = number + whole * length, epoch + whole  # epochs that were learnt from are not read again
            continue
        begun = number
        rows = _usable(source, kind, limit, tolerance if epoch == 0 else None)
        if seed is None:
            for record in rows:
                if number >= start:
                    yield record
                number += 1
        else:
            for place, block in enumerate(_batched(rows, window)):
                order = _order(block, np.random.default_rng([seed, epoch, place]))
                for at in order[max(0, start - number) :]:
                    yield block[at]
                number += len(block)
        length, epoch = number - begun, epoch + 1
        if not length:
            raise BadInput(f"{source} holds no {kind.__name__.lower()}", code="no_rows", fix="name a source that has some")


def _order(block: Sequence[Question], rng: np.random.Generator) -> np.ndarray:
    """Places of a shuffled window, as many as it has: one of ``meta.weight`` 3 among others of 1 comes three times as often."""
    order = rng.permutation(len(block))
    weights = np.array([_weight(question) for question in block])
    if (weights == weights[0]).all():
        return order
    # Systematic sampling: each place comes its expected number of times, rounded down or up.
    edges = np.cumsum(weights) / weights.sum()
    drawn = np.searchsorted(edges, (np.arange(len(block)) + rng.random()) / len(block))
    return np.minimum(drawn, len(block) - 1)[order]


def _weight(question: Question) -> float:
    weight = question.meta.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise BadInput(f"{question.id}: meta.weight {weight!r} is not a positive number", fix="leave it out, or make it one")
    return float(weight)


def _usable(source: str, kind: type[R], limit: int, tolerance: Tolerance | None) -> Iterator[R]:
    """The records of one pass, the first ``limit`` if that is not 0; bad rows are counted in the first pass only."""
    left = limit or math.inf
    for row in rows_of(source, kind):
        bad = row if isinstance(row, BadRow) else None
        if tolerance is not None:
            tolerance.add(bad)
        if bad is None:
            yield cast("R", row)
            left -= 1
            if not left:
                break
    if tolerance is not None:
        tolerance.end()


def _batched(rows: Iterator[R], count: int) -> Iterator[list[R]]:
    while block := list(itertools.islice(rows, count)):
        yield block


def _read_cards(source: str, seed: int | None, start: int, count: int, epochs: int | None) -> Iterator[Question]:
    rows = _cards(source, seed)
    for epoch in itertools.count(start // count) if epochs is None else range(start // count, epochs):
        for number in range(max(0, start - epoch * count), count):
            yield Question.model_validate(rows(number))


def _cards_fields(source: str, seed: int | None, option: str) -> tuple[str, int, dict[str, str]]:
    """Split, seed and all that a `cards:` source says; BadInput for anything but these and ``option``."""
    fields = dict(parse_qsl(source.partition("?")[2], keep_blank_values=True))
    known = ("split", "seed", option)
    if unknown := next((key for key in fields if key not in known), None):
        raise BadInput(f"{source}: no option `{unknown}` here", fix=f"options are {', '.join(known)}")
    try:
        return fields.get("split", "train"), int(fields.get("seed", seed or 0)), fields
    except ValueError:
        raise BadInput(f"{source}: the seed {fields['seed']!r} is not a whole number") from None


def _cards(source: str, seed: int | None) -> Callable[[int], dict[str, Any]]:
    split, own_seed, fields = _cards_fields(source, seed, "shift")
    return lambda number: cards.question_row(split, own_seed, number, fields.get("shift", ""))
