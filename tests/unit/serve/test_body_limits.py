"""Request bodies of the largest size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from pixelis.config import load
from pixelis.protocol.chat import ChatBody
from pixelis.protocol.errors import ApiError, parse_body
from pixelis.protocol.responses import ResponsesBody
from pixelis.serve.protocol.agent import AgentRequest
from pixelis.serve.protocol.evolution import EmptyRequest, PromoteRequest, ReviewDecision
from pixelis.serve.protocol.experiences import ExperienceSearch, FeedbackRequest
from pixelis.serve.protocol.openai import ChatFormat, ResponsesFormat

VALID: dict[type[BaseModel], dict[str, Any]] = {
    AgentRequest: {"question": "q"},
    ChatBody: {"model": "m", "messages": [{"role": "user", "content": "q"}]},
    ResponsesBody: {"model": "m", "input": "q"},
    FeedbackRequest: {"experience_id": "exp_1", "correct": True},
    ExperienceSearch: {"text": "q"},
    EmptyRequest: {},
    PromoteRequest: {"version": 1},
    ReviewDecision: {"decision": "approve"},
}
MANY = [
    [1] * 300,
    [[]] * 300,
    ["a"] * 300,
    [{}] * 300,
    {f"k{i}": 1 for i in range(300)},
    {f"{i}" * 100: "a" for i in range(300)},
    [{f"k{i}": 1 for i in range(300)}] * 30,
    [{"role": "user", "content": [1] * 200}] * 60,
    [{"question": "q", "answer": "a", "image": [1] * 200}] * 30,
    {"format": {f"k{i}": 1 for i in range(300)}},
]


def errors_of(kind: type[BaseModel], body: dict[str, Any]) -> int:
    try:
        kind.model_validate_json(json.dumps(body))
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("kind", VALID)
def test_a_body_with_many_faults_has_few_errors(kind: type[BaseModel]) -> None:
    """pydantic records each error, and describing a million of them froze the gateway for half a minute."""
    names = [field.alias or name for name, field in kind.model_fields.items()]
    bodies = [{**VALID[kind], name: value} for name in names for value in MANY]
    for body in [*bodies, {**VALID[kind], **MANY[4]}]:
        assert errors_of(kind, body) <= len(names) + 1


def respond(**fields: Any) -> ResponsesFormat:
    body = {"model": "pixelis-nano", "input": "Which digit?", **fields}
    return ResponsesFormat(load(None, []), parse_body(ResponsesBody, json.dumps(body).encode()), 0.0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": {str(i): "a" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "a"}}, "metadata." + "k" * 65),
        ({"metadata": {"k": "a" * 513}}, "metadata.k"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"metadata": {"a\x00": "b"}}, "metadata"),
        ({"text": {"k" * 1000: 1}}, "text." + "k" * 95),
        ({"text": {"format": {"type": "text", "colour": "red"}}}, "text.format.colour"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "name": "n" * 65}}}, "text.format.name"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {}, "name": "n", "strict": {}}}},
            "text.format.strict",
        ),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": 7}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"include": ["message.output_text.logprobs"] * 17}, "include"),
    ],
)
def test_what_a_response_would_store_is_limited_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        respond(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_response_repeats_its_metadata_and_format() -> None:
    schema = {"type": "json_schema", "name": "digit", "schema": {"type": "integer"}, "strict": True}
    response = respond(
        metadata={"k" * 64: "v" * 512}, text={"format": schema, "verbosity": "medium"}
    ).writer.base
    assert response["metadata"] == {"k" * 64: "v" * 512}
    assert response["text"] == {"format": schema, "verbosity": "medium"}
    assert respond(text={}).writer.base["text"] == {"format": {"type": "text"}}


def test_a_schema_is_checked_once_for_a_request() -> None:
    schema = {"type": "json_schema", "name": "digit", "schema": {"type": "integer"}}
    body = VALID[ChatBody] | {"model": "pixelis-nano"}
    body["response_format"] = {"type": "json_schema", "json_schema": schema}
    chat = parse_body(ChatBody, json.dumps(body).encode())
    assert ChatFormat(load(None, []), chat, 0.0).query.answers is chat.answer_format is not None
