"""Answers as JSON: schemas of callers, which are hostile until checked, and the check of answers against them.

A schema may use the keywords whose validation takes time proportional to its size: none with regular expressions, none that
refers outside the schema or to itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from pixelis.dialogue.dialects import strict_json
from pixelis.errors import BadInput, PixelisError

MAX_SCHEMA_CHARS = 8000
MAX_DEPTH = 16
MAX_NODES = 2000
"""Most subschemas after every `$ref` has been replaced by what it names."""
MAX_CHECKS = 500_000
"""Most subschemas times values of a check."""
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "format", "$schema", "$comment", "deprecated"})
VALUES = frozenset({"type", "enum", "const", "required", "minItems", "maxItems", "minLength", "maxLength", "minProperties"})
VALUES |= {"maxProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
ONE = frozenset({"items", "additionalProperties", "not", "contains"})
MANY = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
NAMED = frozenset({"properties", "$defs", "definitions"})
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([A-Za-z0-9_.-]+)")
"""References without escapes, which mean what they spell."""
OBJECT = {"type": "object"}


class AnswerFormat:
    """A JSON schema that answers have to fulfil. Raises BadInput ``invalid_schema`` for one that is not accepted."""

    def __init__(self, schema: Any):
        self.schema = schema
        try:
            self.text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            raise refusal("it has numbers that JSON lacks") from None
        if len(self.text) > MAX_SCHEMA_CHARS:
            raise refusal(f"it has {len(self.text)} characters, at most {MAX_SCHEMA_CHARS} are allowed")
        self.nodes = _Size(schema).of(schema, 0, ())
        try:
            Draft202012Validator.check_schema(schema)
        except (SchemaError, RecursionError):
            raise refusal("it is no JSON schema of draft 2020-12") from None

    @cached_property
    def _validator(self) -> Draft202012Validator:
        return Draft202012Validator(self.schema)

    @property
    def instruction(self) -> str:
        """What the policy is told below the question."""
        if self.schema == OBJECT:
            return "\nWrite the answer as a JSON object."
        return f"\nWrite the answer as JSON that fulfils this schema: {self.text}"

    def accepts(self, answer: str | None) -> bool:
        """Whether the answer is JSON that fulfils the schema."""
        try:
            value = strict_json(answer or "")
            return self.nodes * _count(value) <= MAX_CHECKS and bool(self._validator.is_valid(value))
        except (PixelisError, ValueError, RecursionError):
            return False

    @staticmethod
    def same(a: str, b: str) -> bool:
        """Whether two accepted answers are the same value, however it is written."""
        return _canonical(a) == _canonical(b)


def _canonical(answer: str) -> str:
    def number(digits: str) -> float | int:
        return int(value) if (value := float(digits)).is_integer() else value

    return json.dumps(json.loads(answer, parse_float=number), sort_keys=True)


def refusal(problem: str) -> BadInput:
    """The error for a schema that is not accepted."""
    return BadInput(f"the schema of the answer is not accepted: {problem}", code="invalid_schema")


class _Size:
    """Counts subschemas, and refuses keywords, depths and references that could make a check expensive."""

    def __init__(self, root: Any):
        self.root = root
        self.nodes = 0

    def of(self, schema: Any, depth: int, references: tuple[str, ...]) -> int:
        """Number of subschemas of ``schema``; ``references`` are those on the way to it."""
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise refusal(f"it is deeper than {MAX_DEPTH} levels or has more than {MAX_NODES} parts")
        if isinstance(schema, bool):
            return self.nodes
        if not isinstance(schema, Mapping):
            raise refusal("a part of it is neither an object nor a boolean")
        for keyword, value in schema.items():
            if keyword == "$ref":
                self._follow(value, depth, references)
            elif keyword in ONE:
                self.of(value, depth + 1, references)
            elif keyword in MANY:
                for part in value if isinstance(value, list) else [value]:
                    self.of(part, depth + 1, references)
            elif keyword in ("$defs", "definitions"):
                continue  # counted where they are named
            elif keyword in NAMED:
                for part in value.values() if isinstance(value, Mapping) else [value]:
                    self.of(part, depth + 1, references)
            elif keyword not in VALUES | ANNOTATIONS:
                raise refusal(f"the keyword `{keyword[:40]}` is not supported")
        return self.nodes

    def _follow(self, reference: Any, depth: int, references: tuple[str, ...]) -> None:
        match = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
        if match is None:
            raise refusal("`$ref` must name a part of its own `$defs`, such as #/$defs/Point")
        definitions = self.root.get(match[1]) if isinstance(self.root, Mapping) else None
        if not isinstance(definitions, Mapping) or match[2] not in definitions:
            raise refusal(f"`$ref` names {reference[:80]}, which it does not define")
        if reference in references:
            raise refusal(f"{reference[:80]} refers to itself")
        self.of(definitions[match[2]], depth + 1, (*references, reference))


def _count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_count, value.values()))
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1
