"""Row formats: Pixelis's own and those of other systems, read into questions and demonstrations and written from them.

A format is recognised by the columns of a row, or named by the source (``rows.parquet?format=deepeyes``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

from pyarrow import fs
from pydantic import ValidationError

from pixelis.datasets.bad_rows import BadRow, UniqueIds
from pixelis.datasets.choices import option_seed, shuffle_options
from pixelis.datasets.fields import RowError
from pixelis.datasets.files import Part, Source, read_file, read_part, split_file
from pixelis.datasets.files import Row as FileRow
from pixelis.datasets.formats import (
    chat,
    deepeyes,
    easyr1,
    mini_o3,
    native,
    pixel_reasoner,
    pixelis_v0,
    r1_v,
    reason_rft,
    sharegpt,
    table,
    ttrl,
)
from pixelis.datasets.formats.base import Format, Row
from pixelis.datasets.labels import MASK, MASKED, Labels, OnLabels, labels_of, mask_truths, without_truths
from pixelis.datasets.media_root import MediaRoot
from pixelis.datasets.prompts import PromptTemplate
from pixelis.errors import BadInput, first_problem
from pixelis.records import Demonstration, Question
from pixelis.rewards.scorers import find_scorer

_MODULES = (native, pixel_reasoner, reason_rft, sharegpt, ttrl, deepeyes, mini_o3, r1_v, easyr1, pixelis_v0, table)
UNLABELLED = ("ttrl", "ttrl_parquet")
"""Formats whose rows may lack an answer: TTRL learns without."""
FORMATS: dict[str, Format] = {name: format for module in _MODULES for name, format in module.FORMATS.items()}


def detect(columns: Iterable[str], row: str = "the row") -> str:
    """The name of the one format that has these columns, or ``table`` if they are those of a plain table.

    BadInput lists all formats if there is none or more than one.
    """
    names = set(columns)
    matches = [name for name, format in FORMATS.items() if format.matches(names)]
    if len(matches) == 1:
        return matches[0]
    table_problem = ""
    if not matches and not names & {"media", "turns"}:  # these are rows of Pixelis with another mistake
        try:
            table.find_columns(dict.fromkeys(columns), {})
            return "table"
        except RowError as error:
            table_problem = f", and as a table {error.column} {error.message}"
    lines = "\n".join(
        f"    {name}: {', '.join(f'{format.required} {format.any_of}'.split())}" for name, format in FORMATS.items()
    )
    problem = f"match the formats {' and '.join(matches)}" if matches else f"match no format{table_problem}"
    raise BadInput(
        f"{row}: the columns {', '.join(sorted(names)) or '(none)'} {problem}",
        code="unknown_format",
        fix=f"name the columns of a table, `?question=COLUMN&answer=COLUMN`, or the format, `?format=NAME`:\n{lines}",
    )


# -- reading ----------------------------------------------------------------------------------------------------------------


class Record(NamedTuple):
    """A row with its file and number: the record, or what is wrong with it, and the labels that were cut off."""

    file: str
    row: str
    value: Question | BadRow
    labels: Labels | None = None


@dataclass(frozen=True)
class Records:
    """The records of a source of files; rows of the wrong schema, or that are not a ``kind``, are bad rows.

    Without ``labels`` the truths are cut off, and rows may lack them. ``ambiguous``: the files whose names differ from another's
    only in the suffix, which the ids of their rows keep.
    """

    source: Source
    kind: type[Question]
    system: fs.FileSystem
    folder: str
    labels: bool = True
    ambiguous: frozenset[str] = frozenset()

    @classmethod
    def open(cls, text: str, kind: type[Question] = Question, labels: bool = True) -> tuple[Records, list[str]]:
        """The records of a source, and its files in order.

        MissingFile, or BadInput for an unknown format, scorer or template, and for demonstrations with shuffled options.
        """
        source = Source.of(text)
        if source.format is not None and source.format not in FORMATS:
            raise BadInput(f"{text}: no format `{source.format}`", code="unknown_format", fix=f"one of {', '.join(FORMATS)}")
        if source.columns and source.format not in (None, "table"):
            message = f"{text}: {' and '.join(source.columns)} name columns of a table, not of rows of {source.format}"
            raise BadInput(message, fix="leave out format, or the columns")
        if source.scorer is not None:
            find_scorer(source.scorer)
        if source.prompt is not None:
            PromptTemplate(source.prompt)
        if option_seed(source.shuffle_options) is not None and issubclass(kind, Demonstration):
            message = f"{text}: the turns of demonstrations name their options by letter, so that these cannot be shuffled"
            raise BadInput(message, fix="leave out shuffle_options")
        system, folder, files = source.files()
        stems = {path: _stem(path, folder) for path in files}
        names = Counter(stems.values()) + Counter({_inside(path, folder) for path in files})
        ambiguous = frozenset(path for path, stem in stems.items() if names[stem] > 1)
        return cls(source, kind, system, folder, labels, ambiguous), files

    def parts(self, files: Iterable[str], size: int) -> list[tuple[Part, str | None]]:
        """Parts of at least ``size`` bytes in order, each with the format of its file, None for that of its first row."""
        parts: list[tuple[Part, str | None]] = []
        for path in files:
            cut = split_file(self.system, path, size)
            # All parts of a file have the format of its first row, which only the first one holds.
            rows = (row for row in read_file(self.system, path) if isinstance(row, FileRow)) if len(cut) > 1 else iter(())
            first = next(rows, None)
            name = self._detect(first) if first is not None and self.source.format is None else self.source.format
            parts += [(part, name) for part in cut]
        return parts

    def read(self, part: Part, name: str | None = None) -> Iterator[Record]:
        """The records of a part in order. name: of its format. BadInput for a damaged file or an unknown format."""
        root = MediaRoot.of_source(self.system, self.folder, self.source.media, self.source.cache)
        name, columns = name or self.source.format, self.source.columns
        file = (_inside if part.path in self.ambiguous else _stem)(part.path, self.folder)
        seed = option_seed(self.source.shuffle_options)
        prompt = PromptTemplate(self.source.prompt) if self.source.prompt is not None else None
        for row in read_part(self.system, part):
            if isinstance(row, BadRow):
                yield Record(row.file, row.row, row)
                continue
            name = name or self._detect(row)
            format = table.plain(columns) if columns else FORMATS[name]
            arguments = f"{file}-{row.number}", format, root, self.kind, self.source
            values = _records(row, *arguments, labels=self.labels)
            labelled = values if self.labels else _records(row, *arguments)
            for value, known in itertools.zip_longest(values, labelled[: len(values)]):
                if isinstance(value, BadRow):
                    yield Record(row.file, str(row.number), value)
                    continue
                known = known if isinstance(known, Question) else None
                if seed is not None:
                    value, known = shuffle_options(value, seed), shuffle_options(known, seed) if known is not None else None
                labels = labels_of(known) if not self.labels and known is not None else None
                value = (prompt.apply(value) if prompt is not None else value).read_from(row.file, str(row.number))
                yield Record(row.file, str(row.number), value, labels)

    def _detect(self, row: FileRow) -> str:
        if self.source.columns:
            return "table"
        problems, columns = list[BadInput](), [*row.values]
        for names in (columns,) if self.labels or "answer" in columns else (columns, [*columns, "answer"]):
            try:
                return detect(names, f"{row.file}, row {row.number}")
            except BadInput as problem:
                problems.append(problem)
        # One column too few or too many makes a bad row of our own format; any other schema ends the job.
        if intended := native.intended_format(set(columns)):
            return intended
        raise problems[0]


def read_records(text: str, kind: type[Question] = Question, on_labels: OnLabels | None = None) -> Iterator[Question | BadRow]:
    """All records of a source in order, as `Records` reads them; a repeated id is a bad row.

    With ``on_labels`` truths are cut off and only passed to it.
    """
    (records, files), ids = Records.open(text, kind, labels=on_labels is None), UniqueIds()
    for path in files:
        for file, row, value, labels in records.read(Part(path)):
            if on_labels is not None and labels is not None and not isinstance(value, BadRow):
                on_labels(value.id, labels)
            yield value if isinstance(value, BadRow) else ids.check(value.id, file, row) or value


def _inside(path: str, folder: str) -> str:
    """The path of a file below the folder of its source: several may be called `train`."""
    whole = PurePosixPath(path)
    return str(whole.relative_to(folder) if whole.is_relative_to(folder) else whole)


def _stem(path: str, folder: str) -> str:
    return str(PurePosixPath(_inside(path, folder)).with_suffix(""))


def _records(
    row: FileRow, name: str, format: Format, root: MediaRoot, kind: type[Question], source: Source, labels: bool = True
) -> Sequence[Question | BadRow]:
    """The records of a row, or what is wrong with it. Without ``labels`` those that show no answers of others: the first."""
    values, own_id = row.values, row.values.get("id")
    named = str(own_id) if isinstance(own_id, str | int) else ""

    def bad(column: str, code: str, message: str) -> list[BadRow]:
        return [BadRow(row.file, str(row.number), column, code, message, named)]

    if not labels:
        truths = [*MASKED, *filter(None, [source.columns.get("answer")])]
        required = [*format.required.split(), *([source.columns.get("answer", "answer")] if format.required == "" else [])]
        values = mask_truths({**{column: MASK for column in required if column in truths}, **values}, truths)
    try:
        read = (format.demonstrate if issubclass(kind, Demonstration) else None) or format.read
        result = read(values, name, root)
        records = [result] if isinstance(result, Question) else result
        for i, record in enumerate(records):
            if not isinstance(record, kind):
                raise RowError("turns", "no_turns", f"not a {kind.__name__.lower()}: the row has no assistant turns")
            record = record if labels else without_truths(record)
            record.model_dump_json()  # fails on half of a surrogate pair
            records[i] = record.model_copy(update={"scorer": source.scorer}) if source.scorer else record
        return records if labels else records[:1]
    except RowError as error:
        return bad(error.column, error.code, error.message)
    except ValidationError as error:
        problem = first_problem(error, kind.model_fields)
        return bad(problem.path or "all", problem.code, problem.message)
    except (UnicodeError, ValueError) as error:  # pydantic's serialiser raises a ValueError of its own
        return bad("all", "unicode", f"text is not valid Unicode: {' '.join(str(error).split())[:100]}")


# -- writing ----------------------------------------------------------------------------------------------------------------


def write_question(record: Question, format: str) -> Row:
    """The row of a question in ``format``; BadInput if the format is not one of questions or cannot hold this one."""
    write = FORMATS[format].write if format in FORMATS else None
    if write is None:
        names = ", ".join(name for name, known in FORMATS.items() if known.write)
        raise BadInput(f"questions cannot be written as `{format}`", code="unknown_format", fix=f"use one of {names}")
    if record.history and format != "question":
        raise BadInput(f"{record.id}: rows of {format} hold no earlier questions", fix="write it as `question`")
    if not record.answers and format not in UNLABELLED:
        raise BadInput(f"{record.id} has no answer, which rows of {format} need", code="no_label")
    return _with_meta(write(record), record, format)


def _with_meta(row: Row, record: Question, format: str) -> Row:
    """The row with the columns that the record was read with and has no field for, if it is still a row of this format."""
    full = {**{key: value for key, value in record.meta.items() if key != "system"}, **row}
    return full if [name for name, known in FORMATS.items() if known.matches(set(full))] == [format] else row


def write_chat(record: Demonstration, format: str, images: Sequence[Sequence[str]] | None = None, dialect: str = "") -> Row:
    """The row of a demonstration in ``format``, its calls in ``dialect`` (by default the one of its row, or the format's).

    ``images`` are the files of the images that each call returned, in order, by default those of its row. BadInput if the
    format is not one of chats, if there are not as many entries as calls, or if the dialect cannot express a turn.
    """
    known = FORMATS.get(format)
    if known is None or known.write_chat is None:
        names = ", ".join(name for name, known in FORMATS.items() if known.write_chat)
        raise BadInput(f"demonstrations cannot be written as `{format}`", code="unknown_format", fix=f"use one of {names}")
    if record.history:
        raise BadInput(f"{record.id}: rows of {format} hold no earlier questions", fix="write rows of Pixelis")
    calls, rows = chat.calls_of(record), [turn.verbatim for turn in record.turns if turn.verbatim is not None]
    if images is None:
        images = [turn.verbatim.images for turn in calls if turn.verbatim is not None]
    if len(images) != len(calls):
        raise BadInput(
            f"{record.id} calls {len(calls)} operations, but images of {len(images)} are given",
            code="media_count",
            fix="give the files that each operation returned, an empty list for one that returned none",
        )
    dialect = dialect or (rows[0].dialect if rows else known.dialect)
    row = known.write_chat(record, chat.render_replies(record, dialect, images), list(map(list, images)))
    return _with_meta(row, record, format)
