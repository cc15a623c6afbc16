"""Answers as JSON: checks the schemas of callers, which are hostile, and answers against them.

A schema may use keywords whose validation takes time proportional to its size: no regular expressions, no
references outside the schema or to itself.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from pixelis.dialogue.dialects import strict_json
from pixelis.errors import BadInput, PixelisError
from pixelis.protocol.errors import invalid

T = TypeVar("T")

MAX_SCHEMA_CHARS = 8000
MAX_DEPTH = 16
MAX_NODES = 2000
"""Most parts once every `$ref` is replaced: subschemas, required names, COMPARISONS values of `enum`."""
MAX_CHECKS = 20_000
"""Most parts times values of a check, which then takes a quarter of a second."""
COMPARISONS = 8
"""Values of `enum` that are compared in the time of a subschema."""
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "format", "$schema", "$comment", "deprecated"}
)
VALUES = frozenset({"type", "minItems", "maxItems", "minLength", "maxLength", "minProperties"})
VALUES |= {"maxProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
ONE = frozenset({"items", "additionalProperties", "not", "contains"})
MANY = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
DEFINITIONS = frozenset({"$defs", "definitions"})
"""Their parts count where they are named."""
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([A-Za-z0-9_.-]+)")
"""References without escapes."""
OBJECT = {"type": "object"}


class AnswerFormat:
    """A JSON schema that answers must fulfil. Raises BadInput ``invalid_schema`` if it is not accepted."""

    def __init__(self, schema: Any):
        self.schema = schema
        try:
            self.text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            raise refusal("it has numbers that JSON lacks") from None
        if len(self.text) > MAX_SCHEMA_CHARS:
            raise refusal(f"it has {len(self.text)} characters, at most {MAX_SCHEMA_CHARS} are allowed")
        self.nodes = 0
        try:
            for parts in _parts(schema, schema, 0, ()):
                self.nodes += parts
                if self.nodes > MAX_NODES:
                    raise refusal(f"it has more than {MAX_NODES} parts")
            Draft202012Validator.check_schema(schema)
        except (SchemaError, RecursionError):
            raise refusal("it is no JSON schema of draft 2020-12") from None
        self.validator = Draft202012Validator(schema)

    @property
    def instruction(self) -> str:
        """The text below the question."""
        if self.schema == OBJECT:
            return "\nWrite the answer as a JSON object."
        return f"\nWrite the answer as JSON that fulfils this schema: {self.text}"

    def accepts(self, answer: str | None) -> bool:
        try:
            value = strict_json(answer or "")
            return self.nodes * _count(value) <= MAX_CHECKS and bool(self.validator.is_valid(value))
        # The last from a huge integer and `multipleOf`
        except (PixelisError, ValueError, RecursionError, OverflowError):
            return False

    async def filter(self, items: Sequence[T], answer_of: Callable[[T], str | None]) -> list[T]:
        """The ``items`` whose answers are accepted. In a thread, because some checks take long."""
        return await asyncio.to_thread(lambda: [item for item in items if self.accepts(answer_of(item))])

    @staticmethod
    def same(a: str, b: str) -> bool:
        """Whether two accepted answers have the same value."""
        return canonical(a) == canonical(b)


def answer_format(kind: Any, schema: Any, param: str) -> AnswerFormat | None:
    """The format ``text`` (None), ``json_object``, or ``json_schema``. Raises ApiError 400."""
    if kind == "text":
        return None
    if kind == "json_object":
        return AnswerFormat(OBJECT)
    if kind != "json_schema":
        raise invalid(f"{param}.type", "it must be text, json_object or json_schema")
    match schema:
        case {"name": str(), "schema": dict() as required}:
            return AnswerFormat(required)
    raise invalid(param, "it needs a `name` and a `schema`", "missing_parameter")


def canonical(answer: str) -> str:
    """JSON text that does not depend on the order of keys and the spelling of whole numbers."""

    def number(digits: str) -> float | int:
        return int(value) if (value := float(digits)).is_integer() else value

    return json.dumps(json.loads(answer, parse_float=number), sort_keys=True)


def refusal(problem: str) -> BadInput:
    return BadInput(f"the schema of the answer is not accepted: {problem}", code="invalid_schema")


def _parts(schema: Any, root: Any, depth: int, references: tuple[str, ...]) -> Iterator[int]:
    """The sizes of all parts of ``schema``; ``references`` are those on the way to it.

    Refuses keywords, depths and references that could make a check expensive.
    """
    if depth > MAX_DEPTH:
        raise refusal(f"it is deeper than {MAX_DEPTH} levels")
    yield 1
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise refusal("a part of it is neither an object nor a boolean")
    for keyword, value in schema.items():
        inner: Iterable[Any] = ()
        if keyword == "$ref":
            match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if match is None:
                raise refusal("`$ref` must name a part of its own `$defs`, such as #/$defs/Point")
            definitions = root.get(match[1]) if isinstance(root, Mapping) else None
            if not isinstance(definitions, Mapping) or match[2] not in definitions:
                raise refusal(f"`$ref` names {value[:80]}, which it does not define")
            if value in references:
                raise refusal(f"{value[:80]} refers to itself")
            yield from _parts(definitions[match[2]], root, depth + 1, (*references, value))
        elif keyword in ONE:
            inner = [value]
        elif keyword in MANY:
            inner = value if isinstance(value, list) else [value]
        elif keyword == "properties":
            inner = value.values() if isinstance(value, Mapping) else [value]
        elif keyword == "required":
            yield _count(value)
        elif keyword in ("enum", "const"):
            yield _count(value) // COMPARISONS
        elif keyword not in VALUES | ANNOTATIONS | DEFINITIONS:
            raise refusal(f"the keyword `{keyword[:40]}` is not supported")
        for part in inner:
            yield from _parts(part, root, depth + 1, references)


def _count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_count, value.values()))
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1
