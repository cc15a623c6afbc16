"""Answers as JSON."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelis.errors import BadInput
from pixelis.protocol.answer_format import MAX_CHECKS, OBJECT, AnswerFormat

POINT = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/Number"}, "label": {"type": "string", "enum": ["cat", "dog"]}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"Number": {"type": "number", "minimum": 0}},
}


def test_answers_are_checked_against_the_schema() -> None:
    point = AnswerFormat(POINT)
    assert all(point.accepts(answer) for answer in ('{"x": 1}', ' {"x": 0.5, "label": "cat"}\n'))
    wrong = [None, "", "7", "x", '{"x": -1}', '{"y": 1}', '{"x": 1, "label": "cow"}', '{"x": NaN}']
    wrong += ['{"x": 1} {"x": 1}', "[" * 10**5]
    assert not any(point.accepts(answer) for answer in wrong)
    assert AnswerFormat(OBJECT).accepts('{"anything": [1]}')
    assert not AnswerFormat(OBJECT).accepts("[1]")
    assert json.dumps(POINT["properties"]) in point.instruction


def test_the_same_value_may_be_written_in_several_ways() -> None:
    assert AnswerFormat.same('{"a":1, "b": [2.0]}', '{"b":[2],"a":1}')
    assert not AnswerFormat.same("1", "true")
    assert not AnswerFormat.same("[1, 2]", "[2, 1]")


def doubling(depth: int) -> dict[str, Any]:
    """A schema of a few lines that has 2 ** depth parts once its references are followed."""
    names = [f"d{i}" for i in range(depth)]
    definitions: dict[str, Any] = {
        name: {"anyOf": [{"$ref": f"#/$defs/{after}"}] * 2} for name, after in pairwise(names)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, names[-1]: {"type": "string"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "(a+)+$"},
        {"properties": {"a": {"pattern": "a"}}},
        {"patternProperties": {"(a+)+$": {}}},
        {"uniqueItems": True},
        {"$ref": "https://example.com/schema.json"},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}},
        {"$ref": "#/$defs/none"},
        {"$id": "https://example.com", "type": "string"},
        {"$dynamicRef": "#x"},
        {"unevaluatedProperties": False},
        {"type": "strin"},
        {"description": "x" * 10_000},
        {"minimum": float("nan")},
        {"$ref": "#/$defs/a%62", "$defs": {"a%62": {}, "ab": {"pattern": "(a+)+$"}}},
        doubling(14),
        {"anyOf": [{"$ref": "#/$defs/a"}] * 60, "$defs": {"a": {"enum": [1] * 2000}}},
    ],
)
def test_a_hostile_schema_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as caught:
        AnswerFormat(schema)
    assert caught.value.code == "invalid_schema"


def test_a_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(BadInput):
        AnswerFormat(schema)


def each(part: dict[str, Any], **definitions: Any) -> dict[str, Any]:
    """A schema of which every value of an array fails ``part``, and is accepted afterwards."""
    return {"items": {"anyOf": [part, {}]}, "$defs": definitions}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (each({"$ref": "#/$defs/d0"}, **doubling(7)["$defs"]), 1),
        (each({"anyOf": [{"type": "string"}] * 300}), 1),
        (each({"anyOf": [{"multipleOf": 0.3}] * 60}), 1e308),
        (each({"anyOf": [{"enum": [*range(1500)]}]}), -1),
        (each({"anyOf": [{"$ref": "#/$defs/a"}] * 7}, a={"enum": [1] * 800}), 2),
        (each({"anyOf": [{"$ref": "#/$defs/a"}] * 6}, a={"required": [f"a{i}" for i in range(300)]}), {}),
    ],
)
def test_no_answer_makes_a_check_long(schema: dict[str, Any], value: Any) -> None:
    form = AnswerFormat(schema)
    most = MAX_CHECKS // form.nodes - 1
    started = time.process_time()
    assert form.accepts(json.dumps([value] * most))
    assert time.process_time() - started < 3, "of .3 on an idle core"
    started = time.process_time()
    assert not form.accepts(json.dumps([value] * (most + 1)))
    assert time.process_time() - started < 0.1


def test_long_arrays_of_a_simple_schema_are_accepted() -> None:
    assert AnswerFormat({"type": "array", "items": {"type": "integer"}}).accepts(json.dumps([1] * 5000))


def test_a_number_too_large_for_a_fraction_is_no_answer() -> None:
    assert not AnswerFormat({"multipleOf": 0.5}).accepts("1" + "0" * 400)
    assert AnswerFormat({"multipleOf": 5}).accepts("1" + "0" * 400)


def test_answers_are_checked_beside_the_event_loop() -> None:
    threads = set[int]()

    def answer_of(text: str) -> str:
        threads.add(threading.get_ident())
        return text

    assert asyncio.run(AnswerFormat(OBJECT).filter(["{}", "[]", '{"a": 1}'], answer_of)) == ["{}", '{"a": 1}']
    assert threading.get_ident() not in threads


KEYWORDS = [
    "type", "properties", "items", "anyOf", "$ref", "$defs", "enum", "required", "minimum", "not",
    "multipleOf", "const",
]  # fmt: skip
TEXTS = st.sampled_from(["object", "string", "#/$defs/a", "a"])
NAMES = st.sampled_from([*KEYWORDS, "a"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=4), VALUES)
def test_any_schema_is_used_or_refused(schema: dict[str, Any], value: Any) -> None:
    try:
        form = AnswerFormat(schema)
    except BadInput as error:
        if error.code != "invalid_schema":
            raise
        return
    form.accepts(json.dumps(value))
