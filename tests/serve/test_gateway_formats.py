"""Answers of a required format over real HTTP: JSON objects and schemas, the second try, refusals."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from gateway_helpers import messages
from pydantic import BaseModel
from scripted import picture_url

pytestmark = pytest.mark.slow


class Digit(BaseModel):
    digit: int


def chat(client: openai.OpenAI, question: str, kind: Any, **options: Any) -> Any:
    asked = messages(question, picture_url())
    return client.chat.completions.create(
        model="pixelis-nano", messages=asked, response_format=kind, **options
    )


SCHEMA = {"name": "digit", "schema": Digit.model_json_schema(), "strict": True}
DIGIT = {"type": "json_schema", "json_schema": SCHEMA}


def test_samples_without_the_format_do_not_vote(client: openai.OpenAI) -> None:
    reply = chat(client, 'say 8,8,{"digit":7},8', DIGIT, n=2)
    assert [json.loads(choice.message.content) for choice in reply.choices] == [{"digit": 7}] * 2
    verdict = reply.model_extra["pixelis"]["verdict"]
    assert [vote["answer"] for vote in verdict["votes"]] == ['{"digit":7}']
    assert reply.usage.completion_tokens == 12
    assert chat(client, 'say 8,{"a":1}', {"type": "json_object"}).choices[0].message.content == '{"a":1}'


def test_a_group_without_an_answer_of_the_format_is_sampled_once_more(client: openai.OpenAI) -> None:
    right = chat(client, 'say 8 mend {"digit":7}', DIGIT, seed=0)
    assert right.choices[0].message.content == '{"digit":7}'
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        chat(client, 'say 8 mend {"digit":"x"}', DIGIT, seed=0)
    assert caught.value.code == "response_format_failed"
    streamed = list(chat(client, 'say 8 mend {"digit":7} once more', DIGIT, stream=True, seed=0))
    extras = [(c.model_extra or {}).get("pixelis", {}) for c in streamed]
    assert {extra["event"]["attempt"] for extra in extras if "event" in extra} == {0, 1}
    assert "".join(c.choices[0].delta.content or "" for c in streamed if c.choices) == '{"digit":7}'


def test_the_official_client_parses_formats_in_both_apis(client: openai.OpenAI) -> None:
    question: Any = [{"role": "user", "content": 'say {"digit":7}'}]
    response = client.responses.parse(model="pixelis-nano", input=question, text_format=Digit)
    assert response.output_parsed == Digit(digit=7)
    reply = client.chat.completions.parse(model="pixelis-nano", messages=question, response_format=Digit)
    assert reply.choices[0].message.parsed == Digit(digit=7)
