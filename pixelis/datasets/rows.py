"""Row formats of the systems that Pixelis replaces, and its own, into ``Question`` and ``Demonstration``.

A format is told by the columns of a row, or named by the source (``rows.parquet?format=deepeyes``). Columns that a record has no
field for stay in ``meta``, where an own reward finds them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from pydantic import ValidationError

from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.fields import Fields, Root, RowError, root_of
from pixelis.datasets.files import Row, Source, read_file
from pixelis.datasets.rows_history import read_chain, read_trajectory
from pixelis.datasets.rows_sft import read_conversations, read_message_list, read_messages
from pixelis.errors import BadInput, first_problem
from pixelis.records import Demonstration, Media, Question
from pixelis.rewards.scorers import find_scorer

_LETTER = re.compile(r"\(?([A-H])\)?\.?")
_TRANCE = re.compile(r"(?<![a-z])trance", re.IGNORECASE)
"""In the ids of Reason-RFT's questions about transformations, which are answered by sequences of functions."""


@dataclass(frozen=True)
class Format:
    """A kind of row: the columns it has to have, those that tell it from others, and its reader.

    ``read(fields, name)`` makes the record; ``name`` is the id of a row that has none. ``only`` are all columns it may have.
    """

    needs: frozenset[str]
    read: Callable[[Fields, str], Question]
    without: frozenset[str] = frozenset()
    any_of: frozenset[str] = frozenset()
    only: frozenset[str] | None = None

    def fits(self, columns: set[str]) -> bool:
        """True when a row with these columns may be of this format."""
        return (
            self.needs <= columns
            and not self.without & columns
            and (not self.any_of or bool(self.any_of & columns))
            and (self.only is None or columns <= self.only)
        )


def _canonical(kind: type[Question]) -> Callable[[Fields, str], Question]:
    def read(row: Fields, name: str) -> Question:
        record = kind.model_validate(row.values)
        for at, media in enumerate(record.media):
            if media.frames:
                media.frames = [row.root.reference(f"media.{at}.frames", frame) for frame in media.frames]
            else:
                media.uri = row.root.reference(f"media.{at}.uri", media.uri)
        for column in ("regions", "lines"):
            for at, thing in enumerate(getattr(record.annotations, column, ())):
                if thing.box is not None and not all(0 <= edge <= 1 for edge in thing.box):
                    raise RowError(f"annotations.{column}.{at}.box", "out_of_range", "a place is 0..1 of its picture, not pixels")
        return record

    return read


def _pixel_reasoner(row: Fields, name: str) -> Question:
    own = row.name("qid") or name
    media = row.media("image")
    if row.values.get("is_video"):
        if not media:
            raise RowError("image", "no_media", "a clip has no frames")
        media = [Media(id="vid0", kind="video", frames=[item.uri for item in media])]
    answers = row.answers("answer")
    return Question(
        id=own,
        question=row.question(row.text("question"), "question", media),
        media=media,
        answers=answers,
        scorer=_choice(answers, "exact"),
        task=own.partition("-")[0] if "-" in own else "qa",
        meta=row.rest("qid", "question", "answer", "image", "is_video"),
    )


def _problem(answer: str, pictures: str, otherwise: str, videos: str | None = None, source: str = "data_source"):
    """Rows with a ``problem``: the truth in column ``answer``, and the scorer of whatever is no letter."""

    def read(row: Fields, name: str) -> Question:
        media, own = row.media(pictures, videos), row.name("id", "doc_id") or name
        answers = row.answers(answer)
        scorer = "func_seq" if _TRANCE.search(own) else _choice(answers, otherwise)
        return Question(
            id=own,
            question=row.question(row.text("problem"), "problem", media),
            media=media,
            answers=answers,
            scorer=scorer,
            task=row.name(source) or "qa",
            meta=row.rest("id", "doc_id", "problem", answer, pictures, videos or "", source),
        )

    return read


def _r1v_evaluation(row: Fields, name: str) -> Question:
    media, answers = row.media("image_path"), row.answers("ground_truth")
    return Question(
        id=name,
        question=row.question(row.text("question"), "question", media),
        media=media,
        answers=answers,
        scorer=_choice(answers, "math"),
        split="test",
        meta=row.rest("image_path", "question", "ground_truth"),
    )


def _ttrl(row: Fields, name: str) -> Question:
    source, own, answers = row.name("source"), row.name("id"), row.answers("answer")
    return Question(
        id=f"{source}-{own}" if source and own else own or name,
        question=row.text("prompt").strip(),
        answers=answers,
        scorer=_choice(answers, "math"),
        task=source or "qa",
        meta=row.rest("id", "source", "prompt", "answer"),
    )


def _chat(row: Fields, name: str) -> Question:
    """verl's rows, as TTRL and DeepEyes write them: a chat, pictures, and the truth in ``reward_model``."""
    messages, source = row.get("prompt"), row.name("data_source")
    if not isinstance(messages, list) or not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        raise RowError("prompt", "wrong_type", "a list of messages with `role` and `content` is wanted")
    said = [m["content"] for m in messages if m.get("role") == "user"]
    if not said:
        raise RowError("prompt", "empty", "the chat has no turn of a user")
    media = row.media("images", "videos")
    extra = row.section("extra_info") if "extra_info" in row else Fields({}, row.root)
    index, answers = extra.name("index"), row.section("reward_model").answers("ground_truth")
    meta = row.rest("prompt", "images", "videos", "data_source")
    if system := "\n".join(m["content"] for m in messages if m.get("role") == "system"):
        meta["system"] = system
    pictured = "images" in row or "env_name" in row
    otherwise = ("math_judge" if "thinklite" in (source or "").lower() else "judge") if pictured else "math"
    return Question(
        id=f"{source}-{index}" if source and index else index or name,
        question=row.question(said[-1], "prompt", media),
        media=media,
        answers=answers,
        scorer=_choice(answers, otherwise),
        task=source or "qa",
        split=extra.name("split") or "train",
        meta=meta,
    )


def _choice(answers: list[str], otherwise: str) -> str:
    return "mc_letter" if all(_LETTER.fullmatch(answer) for answer in answers) else otherwise


def _columns(text: str) -> frozenset[str]:
    return frozenset(text.split())


_QUESTION, _DEMONSTRATION = frozenset(Question.model_fields), frozenset(Demonstration.model_fields)
FORMATS: dict[str, Format] = {
    "question": Format(_columns("id question"), _canonical(Question), without=_columns("turns"), only=_QUESTION),
    "demonstration": Format(_columns("id question turns"), _canonical(Demonstration), only=_DEMONSTRATION),
    "pixel_reasoner": Format(_columns("qid question answer"), _pixel_reasoner),
    "pixel_reasoner_sft": Format(_columns("message_list"), read_message_list),
    "reason_rft": Format(_columns("problem solution answer"), _problem("answer", "image", "math"), without=_columns("doc_id")),
    "sharegpt_messages": Format(_columns("messages"), read_messages, without=_columns("conversations message_list")),
    "ttrl": Format(_columns("prompt answer"), _ttrl, without=_columns("reward_model")),
    "ttrl_parquet": Format(_columns("prompt reward_model"), _chat, without=_columns("images videos env_name")),
    "deepeyes": Format(_columns("prompt reward_model"), _chat, any_of=_columns("images videos env_name")),
    "mini_o3": Format(_columns("doc_id problem solution"), _problem("solution", "images", "judge")),
    "sharegpt": Format(_columns("conversations"), read_conversations, without=_columns("messages message_list")),
    "r1v": Format(_columns("image problem solution"), _problem("solution", "image", "math"), without=_columns("answer doc_id")),
    "r1v_evaluation": Format(_columns("image_path question ground_truth"), _r1v_evaluation, without=_columns("trajectory")),
    "easyr1": Format(
        _columns("problem answer"), _problem("answer", "images", "math", "videos"), without=_columns("solution image doc_id")
    ),
    "pixelis_trajectory": Format(_columns("question trajectory answer"), read_trajectory, without=_columns("turns")),
    "pixelis_chain": Format(_columns("answer"), read_chain, any_of=_columns("chain_of_thought visual_operations")),
}
"""Readers by name. The layouts of the published Pixelis are the last two; the first of them knows three ways to write a step."""


def detect(columns: Iterable[str], place: str = "the row") -> str:
    """The name of the one format that has these columns; BadInput lists the formats when there is none or more than one."""
    have = set(columns)
    found = [name for name, format in FORMATS.items() if format.fits(have)]
    if len(found) == 1:
        return found[0]
    lines = "\n".join(f"    {name}: {', '.join(sorted(format.needs | format.any_of))}" for name, format in FORMATS.items())
    problem = f"may be of {' or '.join(found)}" if found else "are of no known format"
    raise BadInput(
        f"{place}: the columns {', '.join(sorted(have)) or '(none)'} {problem}",
        code="unknown_format",
        fix=f"name one after the file, `?format=NAME`:\n{lines}",
    )


def read_records(text: str, kind: type[Question] = Question) -> Iterator[Question | BadRow]:
    """Records of a source of files in their order; those that are no ``kind`` are bad rows, as are rows of a wrong schema.

    MissingFile, and BadInput for what cannot be read at all: no such format, a damaged file.
    """
    source = Source.of(text)
    if source.format is not None and source.format not in FORMATS:
        raise BadInput(f"{text}: no format `{source.format}`", code="unknown_format", fix=f"one of {', '.join(FORMATS)}")
    if source.scorer is not None:
        find_scorer(source.scorer)
    system, folder, files = source.files()
    root = root_of(system, folder, source.media, source.cache)
    seen = set[int]()  # hashes of ids: all that is kept of the rows that went by
    for path in files:
        name = source.format
        for row in read_file(system, path):
            if isinstance(row, BadRow):
                yield row
                continue
            name = name or _detected(row)
            record = _record(row, f"{_stem(path, folder)}-{row.number}", FORMATS[name], root, kind, source.scorer)
            if isinstance(record, Question):
                if (key := hash(record.id)) in seen:
                    record = BadRow(path, str(row.number), "id", "duplicate_id", f"the id {record.id!r} is there twice")
                seen.add(key)
            yield record


def _detected(row: Row) -> str:
    try:
        return detect(row.values, f"{row.file}, row {row.number}")
    except BadInput:
        # A row of ours with a column too few or too many is a bad row of a known format; another schema ends the job.
        ours = {"id", "question"} & row.values.keys() and len(_DEMONSTRATION & row.values.keys()) * 2 > len(row.values)
        if ours:
            return "demonstration" if "turns" in row.values else "question"
        raise


def _stem(path: str, folder: str) -> str:
    """The name of a file without its ending, from the folder of the source on: several below it may be called `train`."""
    inside = PurePosixPath(path)
    if inside.is_relative_to(folder):
        inside = inside.relative_to(folder)
    return str(inside.with_suffix(""))


def _record(row: Row, own: str, format: Format, root: Root, kind: type[Question], scorer: str | None) -> Question | BadRow:
    place = (row.file, str(row.number))
    try:
        record = format.read(Fields(row.values, root), own)
        if not isinstance(record, kind):
            raise RowError("turns", "no_turns", f"a {kind.__name__.lower()} is wanted, this row has no turns of an assistant")
        record.model_dump_json()  # half a surrogate pair cannot be written
        return record.model_copy(update={"scorer": scorer}) if scorer else record
    except RowError as fault:
        return BadRow(*place, fault.column, fault.code, fault.message)
    except ValidationError as error:
        problem = first_problem(error, kind.model_fields)
        return BadRow(*place, problem.path or "all", problem.code, problem.message)
    except (UnicodeError, ValueError) as error:  # pydantic's serialiser raises a ValueError of its own
        return BadRow(*place, "all", "unicode", f"text that is no Unicode: {' '.join(str(error).split())[:100]}")
