"""Answers of a required format over real HTTP: JSON objects and schemas, the second try, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from gateway_helpers import messages
from pydantic import BaseModel
from scripted import KEY, Deployed, picture_url

pytestmark = pytest.mark.slow


class Digit(BaseModel):
    digit: int


@pytest.fixture(scope="module")
def client(deployed: Deployed) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key=KEY, max_retries=0, timeout=30) as client:
        yield client


def chat(client: openai.OpenAI, question: str, kind: Any, **options: Any) -> Any:
    asked = messages(question, picture_url())
    return client.chat.completions.create(
        model="pixelis-nano", messages=asked, response_format=kind, **options
    )


def schema() -> Any:
    return {
        "type": "json_schema",
        "json_schema": {"name": "digit", "schema": Digit.model_json_schema(), "strict": True},
    }


def test_samples_without_the_format_do_not_vote(client: openai.OpenAI) -> None:
    reply = chat(client, 'say 8,8,{"digit":7},8', schema(), n=2)
    assert [json.loads(choice.message.content) for choice in reply.choices] == [{"digit": 7}] * 2
    verdict = reply.model_extra["pixelis"]["verdict"]
    assert [vote["answer"] for vote in verdict["votes"]] == ['{"digit":7}']
    assert reply.usage.completion_tokens == 12
    assert chat(client, 'say 8,{"a":1}', {"type": "json_object"}).choices[0].message.content == '{"a":1}'


def test_equal_values_are_one_answer(client: openai.OpenAI) -> None:
    reply = chat(client, 'say {"digit":8},{"digit":7},{"digit":7.0},{"digit":9}', schema())
    assert json.loads(reply.choices[0].message.content) == {"digit": 7}
    assert reply.model_extra["pixelis"]["confidence"] == 0.5


def test_a_group_without_an_answer_of_the_format_is_sampled_once_more(client: openai.OpenAI) -> None:
    options = {"seed": 0}
    assert (
        chat(client, 'say 8 mend {"digit":7}', schema(), **options).choices[0].message.content
        == '{"digit":7}'
    )
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        chat(client, 'say 8 mend {"digit":"x"}', schema(), **options)
    assert caught.value.code == "response_format_failed"
    streamed = list(chat(client, 'say 8 mend {"digit":7} once more', schema(), stream=True, **options))
    attempts = {
        c.model_extra["pixelis"]["event"]["attempt"]
        for c in streamed
        if "event" in (c.model_extra or {}).get("pixelis", {})
    }
    assert attempts == {0, 1}
    assert "".join(c.choices[0].delta.content or "" for c in streamed if c.choices) == '{"digit":7}'


def test_responses_have_formats_too(client: openai.OpenAI) -> None:
    response = client.responses.parse(model="pixelis-nano", input='say {"digit":7}', text_format=Digit)
    assert response.output_parsed == Digit(digit=7)
    completion = client.chat.completions.parse(
        model="pixelis-nano", messages=[{"role": "user", "content": 'say {"digit":7}'}], response_format=Digit
    )
    assert completion.choices[0].message.parsed == Digit(digit=7)


def test_a_schema_that_is_not_accepted_is_refused(client: openai.OpenAI) -> None:
    hostile = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "(a+)+$"}},
    }
    with pytest.raises(openai.BadRequestError, match="pattern") as caught:
        chat(client, "q", hostile)
    assert caught.value.code == "invalid_schema"
