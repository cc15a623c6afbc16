"""Row formats, recognised by the columns of a row or named by the source."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

from pyarrow import fs
from pydantic import ValidationError

from pixelis.datasets.bad_rows import BadRow, UniqueIds
from pixelis.datasets.fields import RowError
from pixelis.datasets.files import Part, Source, read_file, read_part, split_file
from pixelis.datasets.files import Row as FileRow
from pixelis.datasets.formats.base import IMAGES, VIDEOS, Format, find_columns
from pixelis.datasets.labels import MASK, MASKED, Labels, OnLabels, labels_of, mask_truths, without_truths
from pixelis.datasets.media_root import MediaRoot
from pixelis.datasets.question_changes import question_changes
from pixelis.errors import BadInput, first_problem
from pixelis.records import Demonstration, Question


@dataclass(frozen=True)
class Entry:
    """Where a format is (``module:NAME`` in this package), and the columns, in one text, that tell it.

    A row has all ``required`` columns, one of ``any_of`` (if any), none of ``excluded``, no other than
    ``allowed``.
    """

    place: str
    required: str
    any_of: str = ""
    excluded: str = ""
    allowed: str = ""

    def matches(self, columns: set[str]) -> bool:
        return (
            bool(self.required)
            and columns.issuperset(self.required.split())
            and columns.isdisjoint(self.excluded.split())
            and (not self.any_of or not columns.isdisjoint(self.any_of.split()))
            and (not self.allowed or columns.issubset(self.allowed.split()))
        )


_NO_MEDIA = " ".join(("reward_model", *IMAGES, *VIDEOS))
FORMATS = {
    "question": Entry(
        "native:QUESTION", "id question", excluded="turns", allowed=" ".join(Question.model_fields)
    ),
    "demonstration": Entry(
        "native:DEMONSTRATION", "id question turns", allowed=" ".join(Demonstration.model_fields)
    ),
    "pixel_reasoner": Entry("pixel_reasoner:PIXEL_REASONER", "qid question answer"),
    "pixel_reasoner_sft": Entry("pixel_reasoner:PIXEL_REASONER_SFT", "message_list"),
    "reason_rft": Entry("columns:REASON_RFT", "problem solution answer", excluded="doc_id cot"),
    "reason_rft_text": Entry(
        "columns:REASON_RFT_TEXT", "problem solution", excluded="answer image images image_path doc_id cot"
    ),
    "reason_rft_cot": Entry("columns:REASON_RFT_COT", "problem cot", excluded="doc_id"),
    "sharegpt": Entry("sharegpt:CONVERSATIONS", "conversations", excluded="messages message_list"),
    "sharegpt_messages": Entry("sharegpt:MESSAGES", "messages", excluded="conversations message_list"),
    "ttrl": Entry("columns:TTRL", "prompt", any_of="answer source", excluded=_NO_MEDIA),
    "ttrl_parquet": Entry("verl:VERL", "prompt reward_model", excluded="images videos env_name"),
    "deepeyes": Entry("verl:VERL", "prompt reward_model", any_of="images videos env_name"),
    "mini_o3": Entry(
        "columns:MINI_O3", "problem solution", any_of="doc_id images", excluded="answer image cot"
    ),
    "r1v": Entry("columns:R1V", "image problem solution", excluded="answer doc_id cot"),
    "r1v_evaluation": Entry(
        "columns:R1V_EVALUATION", "image_path question ground_truth", excluded="trajectory"
    ),
    "easyr1": Entry("columns:EASYR1", "problem answer", excluded="solution image image_path doc_id cot"),
    "pixelis_trajectory": Entry("pixelis_v0:TRAJECTORY", "question trajectory answer", excluded="turns"),
    "pixelis_chain": Entry("pixelis_v0:CHAIN", "answer", any_of="chain_of_thought visual_operations"),
    "memory": Entry("memory:MEMORY", "experience policy_version pictures"),
    "table": Entry("table:plain", ""),
}


def load_format(name: str, columns: Mapping[str, str] | None = None) -> Format:
    module, _, attribute = FORMATS[name].place.partition(":")
    format_ = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return format_(columns or {}) if name == "table" else format_


def detect(columns: Iterable[str], row: str = "the row") -> str:
    """The one format that has these columns, ``table`` for a plain table. BadInput ``unknown_format``."""
    names = set(columns)
    matches = [name for name, entry in FORMATS.items() if entry.matches(names)]
    if len(matches) == 1:
        return matches[0]
    problem = f"match the formats {' and '.join(matches)}" if matches else "match no format"
    if not matches and not names & {"media", "turns"}:  # these are rows of Pixelis with another mistake
        try:
            find_columns(dict.fromkeys(columns), {})
            return "table"
        except RowError as error:
            problem += f", and as a table {error.column} {error.message}"
    entries = FORMATS.items()
    lines = [f"    {name}: {', '.join(f'{e.required} {e.any_of}'.split())}" for name, e in entries]
    fix = "name the columns, `?question=COLUMN&answer=COLUMN`, or the format, `?format=NAME`:"
    message = f"{row}: the columns {', '.join(sorted(names)) or '(none)'} {problem}"
    raise BadInput(message, code="unknown_format", fix="\n".join([fix, *lines]))


# Reading


class Record(NamedTuple):
    """A row: the record, or what is wrong with it, and the labels that were cut off."""

    file: str
    row: str
    value: Question | BadRow
    labels: Labels | None = None


@dataclass(frozen=True)
class Records:
    """The records of a source of files, of a ``kind``; without ``labels`` the truths are cut off."""

    source: Source
    kind: type[Question]
    system: fs.FileSystem
    folder: str
    labels: bool = True

    @classmethod
    def open(
        cls, text: str, kind: type[Question] = Question, labels: bool = True
    ) -> tuple[Records, list[str]]:
        """The records of a source, and its files in order. MissingFile, BadInput."""
        source = Source.of(text)
        if source.format is not None and source.format not in FORMATS:
            fix = f"one of {', '.join(FORMATS)}"
            raise BadInput(f"{text}: no format `{source.format}`", code="unknown_format", fix=fix)
        if source.columns and source.format not in (None, "table"):
            message = (
                f"{text}: {' and '.join(source.columns)} name columns of a table, not of {source.format}"
            )
            raise BadInput(message, fix="leave out format, or the columns")
        question_changes(text, vars(source))
        if source.shuffle_options and issubclass(kind, Demonstration):
            message = f"{text}: the turns of demonstrations name their options by letter"
            raise BadInput(message, fix="leave out shuffle_options")
        system, folder, files = source.files()
        return cls(source, kind, system, folder, labels), files

    def parts(self, files: Iterable[str], size: int) -> list[tuple[Part, str | None]]:
        """Parts of at least ``size`` bytes in order, with the format of their file (None: unknown yet)."""
        parts: list[tuple[Part, str | None]] = []
        for path in files:
            cut, name = split_file(self.system, path, size), self.source.format
            if len(cut) > 1 and name is None:
                # All parts of a file have the format of its first row, which only the first one holds.
                rows = (row for row in read_file(self.system, path) if isinstance(row, FileRow))
                name = next((self._detect(row) for row in rows), None)
            parts += [(part, name) for part in cut]
        return parts

    def read(self, part: Part, name: str | None = None) -> Iterator[Record]:
        """The records of a part in order. BadInput."""
        name, format = name or self.source.format, None
        path = PurePosixPath(part.path).with_suffix("")
        file = path.relative_to(self.folder) if path.is_relative_to(self.folder) else path
        root = MediaRoot.of_source(self.system, self.folder, self.source.media, self.source.cache)
        change = question_changes(self.source.path, vars(self.source))
        for row in read_part(self.system, part):
            if isinstance(row, BadRow):
                yield Record(row.file, row.row, row)
                continue
            name = name or self._detect(row)
            format = format or load_format(name, self.source.columns)
            arguments, place = (f"{file}-{row.number}", name, format, root), (row.file, str(row.number))
            values = self._records(row, *arguments, labels=self.labels)
            labelled = [] if self.labels else self._records(row, *arguments)[: len(values)]
            for value, known in itertools.zip_longest(values, labelled):
                if isinstance(value, BadRow):
                    yield Record(*place, value)
                else:
                    labels = labels_of(change(known)) if isinstance(known, Question) else None
                    yield Record(*place, change(value).read_from(*place), labels)

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
        known = Demonstration.model_fields.keys() & set(columns)
        if {"id", "question"} & known and 2 * len(known) > len(columns):
            return "demonstration" if "turns" in known else "question"
        raise problems[0]

    def _records(
        self, row: FileRow, id: str, name: str, format: Format, root: MediaRoot, labels: bool = True
    ) -> Sequence[Question | BadRow]:
        """The records of a row, or what is wrong with it; without ``labels`` only the first."""
        values, own_id = row.values, row.values.get("id")
        if not labels:
            answer = self.source.columns.get("answer")
            truths = [*MASKED, *filter(None, [answer])]
            required = FORMATS[name].required.split() or [answer or "answer"]
            masked = {column: MASK for column in required if column in truths}
            values = mask_truths({**masked, **values}, truths)
        read = (format.demonstrate if issubclass(self.kind, Demonstration) else None) or format.read
        try:
            result = read(values, id, root)
            records = [result] if isinstance(result, Question) else result
            for i, record in enumerate(records):
                if not isinstance(record, self.kind):
                    raise RowError("turns", "no_turns", "the row has no assistant turns")
                records[i] = record if labels else without_truths(record)
                records[i].model_dump_json()  # fails on half of a surrogate pair
            return records if labels else records[:1]
        except RowError as error:
            problem = error.column, error.code, error.message
        except ValidationError as error:
            path, code, message = first_problem(error, self.kind.model_fields)[:3]
            problem = path or "all", code, message
        except ValueError as error:  # pydantic's serialiser, and UnicodeError
            problem = "all", "unicode", f"text is not valid Unicode: {' '.join(str(error).split())[:100]}"
        named = str(own_id) if isinstance(own_id, str | int) else ""
        return [BadRow(row.file, str(row.number), *problem, named)]


def read_records(
    text: str, kind: type[Question] = Question, on_labels: OnLabels | None = None
) -> Iterator[Question | BadRow]:
    """All records of a source in order; a repeated id is a bad row. ``on_labels`` alone gets the truths."""
    (records, files), ids = Records.open(text, kind, labels=on_labels is None), UniqueIds()
    for path in files:
        for file, row, value, labels in records.read(Part(path)):
            if on_labels is not None and labels is not None and not isinstance(value, BadRow):
                on_labels(value.id, labels)
            yield value if isinstance(value, BadRow) else ids.check(value.id, file, row) or value
