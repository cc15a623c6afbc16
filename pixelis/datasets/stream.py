"""Streams a source by Ray Data: several tasks read its parts, a bounded number of rows ahead of the consumer.

The order is that of a plain loop: Ray Data returns the parts in order, and the consumer shuffles.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from pixelis.config import DataConfig
from pixelis.datasets.bad_rows import BadRow, UniqueIds
from pixelis.datasets.files import PART_BYTES, Part
from pixelis.datasets.formats import Record, Records
from pixelis.datasets.labels import Labels, OnLabels
from pixelis.datasets.questions import (
    BadRowBudget,
    epochs_of,
    first_rows,
    is_annotated,
    read_questions,
    read_rows,
    require_text,
    sampling_weight,
)
from pixelis.records import Question

if TYPE_CHECKING:
    from pixelis.datasets.execution import Change, Read

TASKS = 128
"""Read tasks of one execution, which takes a second to start: it may pass through a source several times."""
END: dict[str, Any] = dict.fromkeys(("id", "text", "weight", "file", "row", "problem", "labels"))
"""The row at the end of a pass; others hold a record as JSON, or a bad row as ``problem``."""


class Text(NamedTuple):
    """A record as JSON, with its weight and origin."""

    id: str
    text: str
    weight: float
    labels: str | None = None
    origin: tuple[str, str] = ("", "")


def question_stream(
    data: DataConfig,
    seed: int,
    start: int = 0,
    on_bad_row: Callable[[BadRow], None] | None = None,
    on_labels: OnLabels | None = None,
) -> Iterator[Question]:
    """The questions of ``data.train`` from number ``start`` on, endlessly, as of `read_questions`."""
    source = data.train
    if source.startswith("cards:"):  # making a question is cheaper than passing it between processes
        yield from read_questions(source, seed, start, data.limit, on_labels=on_labels)
        return
    reads = [*_reads(source, Question, data.limit, with_text=True, labels=on_labels is None)]
    passes, budget = _passes("Questions", reads), BadRowBudget(source, data.max_bad_rows, on_bad_row)
    window = data.shuffle_rows
    for text in epochs_of(passes, lambda row: row.weight, budget, seed=seed, start=start, window=window):
        question = Question.model_validate_json(text.text).read_from(*text.origin)
        if on_labels is not None and text.labels is not None:
            on_labels(question.id, Labels(*json.loads(text.labels)))
        yield question


def record_stream(
    source: str, kind: type[Question], change: Change, cards: Read | None = None, limit: int = 0
) -> Iterator[Text | BadRow]:
    """The first ``limit`` usable records of a source, once, with changed texts; ``cards`` reads `cards:`."""
    reads = [cards] if cards is not None else [*_reads(source, kind, limit)]
    return _passes(kind.__name__ + "s", reads, change)()


def _passes(
    name: str, reads: list[Read], change: Change | None = None
) -> Callable[[], Iterator[Text | BadRow]]:
    """A function that returns the rows of the next pass through a source; only one if they are changed."""
    from pixelis.datasets.execution import execute  # imports Ray Data: half a second, which cards do not need

    repeats = 1 if change else max(1, TASKS // len(reads))
    executions = (0,) if change else itertools.count()
    rows = itertools.chain.from_iterable(execute(name, reads, repeats, change) for _ in executions)

    def next_pass() -> Iterator[Text | BadRow]:
        ids = UniqueIds()
        for row in rows:
            place = row["file"], row["row"]
            if row["file"] is None:  # the END of the pass
                return
            if row["problem"] is not None:
                yield BadRow(*place, *row["problem"])
            else:
                text = Text(row["id"], row["text"], row["weight"], row["labels"], place)
                yield ids.check(text.id, *place) or text

    return next_pass


def _reads(
    source: str, kind: type[Question], limit: int, with_text: bool = False, labels: bool = True
) -> Iterator[Read]:
    """The reading of each part of a source; of the whole source where it cannot be divided."""
    row = functools.partial(_row, source, with_text)
    if limit or is_annotated(source):
        yield functools.partial(_read_all, source, kind, limit, row, labels)
        return
    records, files = Records.open(source, kind, labels)
    parts = records.parts(files, PART_BYTES)
    for i, (part, name) in enumerate(parts, 1):
        yield functools.partial(_read_part, records, part, name, row, i == len(parts))


def _read_all(
    source: str, kind: type[Question], limit: int, row: Callable[[Record], dict], labels: bool
) -> Iterator[dict]:
    cut = dict[str, Labels]()
    for value in first_rows(read_rows(source, kind, None if labels else cut.__setitem__), limit):
        if isinstance(value, BadRow):
            yield row(Record(value.file, value.row, value))
        else:
            yield row(Record(*(value.origin or (source, value.id)), value, cut.pop(value.id, None)))
    yield END


def _read_part(
    records: Records, part: Part, name: str | None, row: Callable[[Record], dict], is_last: bool
) -> Iterator[dict]:
    yield from map(row, records.read(part, name))
    if is_last:
        yield END


def _row(source: str, with_text: bool, record: Record) -> dict[str, Any]:
    file, row, value, labels = record
    if isinstance(value, BadRow):
        return END | {"file": file, "row": row, "problem": list(value[2:])}
    weight, fields = 1.0, None
    if with_text:  # a question for a policy: of a demonstration, without its turns
        require_text(value, source)
        weight, fields = sampling_weight(value), Question.model_fields.keys() - {"annotations"}
    text = value.model_dump_json(include=fields)
    cut = None if labels is None else json.dumps(labels)
    return END | {"id": value.id, "text": text, "weight": weight, "file": file, "row": row, "labels": cut}
