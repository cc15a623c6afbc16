"""Questions about pictures and clips, with their annotations, and the base class of all records."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

SCHEMA_VERSION = 1

MAX_FUNCTIONS = 128
"""Most functions of a question, as OpenAI has it."""
MAX_SCHEMA_CHARS = 16_000
"""Longest JSON schema of a function."""

Box = tuple[float, float, float, float]
"""x0, y0, x1, y1 with x0 < x1 and y0 < y1, each 0..1 of a *named* observation."""

Point = tuple[float, float]
"""x, y, each 0..1 of a *named* observation."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Span = tuple[Seconds, Seconds]
"""From start to end."""

Coordinates = Literal["thousand", "pixels", "unit"]
"""A model's coordinate scale: 0..1000, pixels of the view, or 0..1."""


_MARK = re.compile(r"<(image|video)>")
_OBSERVATION = re.compile(r"obs\d+(\.\d+)?")


def new_id(prefix: str) -> str:
    """A new random id such as ``traj_3f9c…``."""
    return f"{prefix}_{uuid.uuid4().hex[:16]}"


class Record(BaseModel):
    """Base class of all records. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", validate_assignment=False, ser_json_inf_nan="constants")


class Media(Record):
    """A picture or clip of a question.

    ``uri`` is a file path, a ``data:`` URL or a ``cards:`` name. A clip may also be a list of pictures,
    ``frames``, at ``fps`` per second. ``spans`` cuts a clip to its parts from start to end seconds: only
    their frames exist, numbered from 0, with their times in the whole clip. ``width`` and ``height`` in
    pixels; None until it is decoded. ``details`` of a served picture: see `pixelis.operations.image`.
    """

    id: str
    uri: str = ""
    kind: Literal["image", "video"] = "image"
    frames: list[str] | None = None
    fps: Annotated[float, Field(gt=0)] = 1.0
    spans: list[Span] | None = None
    width: int | None = None
    height: int | None = None
    details: str = ""

    @property
    def is_inline(self) -> bool:
        """Whether the ``uri`` has or names the content itself, instead of a file."""
        return self.uri[:6].lower().startswith(("data:", "cards:"))

    @model_validator(mode="after")
    def _one_source(self) -> Media:
        if bool(self.uri) == bool(self.frames) or (self.frames and self.kind != "video"):
            raise ValueError("media needs either a `uri`, or `frames` for a video")
        if self.spans is not None:
            if self.kind != "video":
                raise ValueError("only a video has `spans`")
            ends = [end for span in self.spans for end in span]
            if not ends or ends != sorted(ends) or any(start == end for start, end in self.spans):
                raise ValueError("`spans` are pairs of seconds [start, end], in order and without overlap")
        return self


def place_media(text: str, kinds: Sequence[str]) -> list[int | str]:
    """The text in pieces with the number of each medium at its ``<image>`` or ``<video>``.

    Media of a kind without marks come first. If a kind has another number of marks than media, its marks are
    text.
    """
    marked = {kind for kind in kinds if text.count(f"<{kind}>") == kinds.count(kind)}
    numbers = {kind: iter([i for i, own in enumerate(kinds) if own == kind]) for kind in marked}
    pieces: list[int | str] = [i for i, kind in enumerate(kinds) if kind not in marked]
    end = 0
    for mark in _MARK.finditer(text):
        if mark[1] in marked:
            pieces += [text[end : mark.start()], next(numbers[mark[1]])]
            end = mark.end()
    return [piece for piece in [*pieces, text[end:]] if piece != ""]


class Region(Record):
    """An annotated object in a picture, or in one frame of a clip (``frame`` from 0).

    Coordinates are 0..1 of ``media``. ``mask`` is a COCO run-length code at full resolution; ``outline`` is a
    list of polygons. Regions of one object in several frames share a ``track``.
    """

    id: str
    label: str
    box: Box
    media: str = "img0"
    mask: dict[str, Any] | None = None
    outline: list[list[Point]] | None = None
    frame: int | None = None
    track: str | None = None
    attributes: dict[str, Any] = Field(default_factory=dict)


class Line(Record):
    """Annotated text with its box (0..1 of ``media``) if known."""

    text: str
    box: Box | None = None
    media: str = "img0"
    frame: int | None = None
    level: Literal["word", "line", "paragraph"] = "line"


class Event(Record):
    text: str
    start: Annotated[float, Field(ge=0)]
    end: Annotated[float, Field(ge=0)]
    media: str = "vid0"


class Relation(Record):
    """A relation between two annotated regions, given by id."""

    subject: str
    predicate: str
    object: str


class Annotations(Record):
    """Annotations of a question's media, never shown to a policy."""

    regions: list[Region] = Field(default_factory=list)
    lines: list[Line] = Field(default_factory=list)
    events: list[Event] = Field(default_factory=list)
    relations: list[Relation] = Field(default_factory=list)
    captions: list[str] = Field(default_factory=list)


class Exchange(Record):
    """An earlier question of a conversation and its answer; ``media``: ids of what was sent with it."""

    question: str
    answer: str
    media: list[str] = Field(default_factory=list)


class Function(Record):
    """A tool that a client runs. ``parameters``: JSON schema (draft 2020-12) of an object, the arguments.

    A schema that is long, invalid or refers to others is an error. ``strict`` is OpenAI's; arguments are always
    checked.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Annotated[str, Field(max_length=MAX_SCHEMA_CHARS)] = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False

    @field_validator("parameters")
    @classmethod
    def _is_sound(cls, schema: dict[str, Any]) -> dict[str, Any]:
        from jsonschema import Draft202012Validator, SchemaError  # only clients with tools need them
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import DRAFT202012, SchemaRegistry

        try:
            if len(json.dumps(schema, allow_nan=False)) > MAX_SCHEMA_CHARS:
                raise ValueError(f"the schema is longer than {MAX_SCHEMA_CHARS} characters")
            Draft202012Validator.check_schema(schema)
            parts = SchemaRegistry().resolver_with_root(DRAFT202012.create_resource(schema))
            for target in _references(schema):
                parts.lookup(target)
        except SchemaError as error:
            raise ValueError(f"no JSON schema of draft 2020-12: {error.message[:200]}") from None
        except Unresolvable:
            raise ValueError("a `$ref` of the schema names no part of it") from None
        except (TypeError, RecursionError):
            raise ValueError("the schema is no JSON, or too deep") from None
        if schema.get("type", "object") != "object":
            raise ValueError("the schema must be of the type `object`")
        return schema


def _references(schema: Any) -> Iterator[str]:
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    for value in inner:
        yield from _references(value)
    if isinstance(schema, dict):
        yield from (v for k in ("$ref", "$dynamicRef") if isinstance(v := schema.get(k), str))


class Question(Record):
    """A question about media. ``answers`` are the accepted answers; None means unlabelled.

    ``history`` are the earlier exchanges, oldest first; media that none of them names came with the question.
    ``media`` are sorted as shown: at the ``<image>`` and ``<video>`` in a text, others before it. Annotated
    pictures without a question have an empty ``question`` and ``annotations``. ``tools`` names the operations
    of this question; None means all of the run. ``environment``: its actions replace them. ``functions`` are
    offered beside them. ``system``: a client's system message, shown in front of the rules of the tools.
    """

    id: str
    question: str
    history: list[Exchange] = Field(default_factory=list)
    media: list[Media] = Field(default_factory=list)
    answers: list[str] | None = None
    scorer: str = "exact"
    task: str = "qa"
    split: str = "train"
    tools: list[str] | None = None
    environment: str | None = None
    functions: Annotated[list[Function], Field(max_length=MAX_FUNCTIONS)] = Field(default_factory=list)
    system: str = ""
    meta: dict[str, Any] = Field(default_factory=dict)
    annotations: Annotations | None = None
    _origin: tuple[str, str] | None = PrivateAttr(None)

    @classmethod
    def of(cls, question: Question, /, **fields: Any) -> Self:
        """A record of this kind with the fields of a question, and ``fields`` over them."""
        return cls(**{name: getattr(question, name) for name in Question.model_fields} | fields)

    @property
    def origin(self) -> tuple[str, str] | None:
        """The file and row that the question was read from, for messages; not a part of its JSON."""
        return self._origin

    def read_from(self, file: str, row: str) -> Self:
        self._origin = (file, row)
        return self

    @property
    def place(self) -> str:
        """How messages name the question: file, row and id, as far as they are known."""
        if self._origin is None:
            return self.id
        file, row = self._origin
        return f"{file}, row {row}{f' ({self.id})' if self.id != row else ''}"

    @property
    def conversation(self) -> str:
        """The texts of the earlier exchanges and of the question, one a line."""
        earlier = [text for exchange in self.history for text in (exchange.question, exchange.answer)]
        return "\n".join([*earlier, self.question])

    @field_validator("functions")
    @classmethod
    def _functions_by_name(cls, functions: list[Function]) -> list[Function]:
        names = [function.name for function in functions]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several `functions` are called {', '.join(repeated)}")
        return functions

    @model_validator(mode="after")
    def _media_by_id(self) -> Question:
        names = [name for exchange in self.history for name in exchange.media]
        ids = [item.id for item in self.media]
        if repeated := sorted({id for id in ids if ids.count(id) > 1}):
            raise ValueError(f"several `media` have the id {', '.join(repeated)}")
        if taken := [id for id in ids if _OBSERVATION.fullmatch(id)]:
            raise ValueError(f"`media` cannot be named {', '.join(taken)}, as observations are")
        if len(set(names)) < len(names) or not set(names) <= set(ids):
            raise ValueError("each medium named in `history` must be one of `media`, and be named once")
        asked = [(e.question, [item for item in self.media if item.id in e.media]) for e in self.history]
        asked.append((self.question, [item for item in self.media if item.id not in names]))
        self.media = [
            items[i]
            for text, items in asked
            for i in place_media(text, [item.kind for item in items])
            if isinstance(i, int)
        ]
        return self
