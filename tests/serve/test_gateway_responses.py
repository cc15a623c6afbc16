"""``/v1/responses`` with the official client: output items, events of a stream, conversations, refusals."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from gateway_helpers import messages
from scripted import Deployed, picture_url

from pixelis.serve.keys import KeyFile

pytestmark = pytest.mark.slow


def asked(text: str) -> list[Any]:
    picture = {"type": "input_image", "image_url": picture_url(), "detail": "auto"}
    return [{"role": "user", "content": [{"type": "input_text", "text": text}, picture]}]


def create(client: openai.OpenAI, input: Any, **options: Any) -> Any:
    return client.responses.create(model="pixelis-nano", input=input, **options)


def test_a_response_has_the_thoughts_operations_and_answer_of_the_winner(client: openai.OpenAI) -> None:
    response = create(client, asked("say 7,8,7,7"), instructions="Be brief.", metadata={"a": "b"})
    assert (response.output_text, response.status, response.error) == ("7", "completed", None)
    assert [item.type for item in response.output] == ["reasoning", "mcp_call", "message"]
    thought, call, _ = response.output
    assert thought.content[0].text == "zoom"
    assert (call.name, call.status, call.output) == ("zoom_in", "completed", "obs1 = zoom_in(img0)")
    assert "0.25" in call.arguments
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (3, 12, 15)
    assert (response.metadata, response.instructions) == ({"a": "b"}, "Be brief.")
    assert response.model_extra["pixelis"]["confidence"] == 0.75


def test_a_response_continues_a_stored_one(client: openai.OpenAI) -> None:
    def recall(id: str, user: str = "anna") -> Any:
        return create(client, "recall", previous_response_id=id, user=user)

    first = create(client, asked("say 7"), user="anna")
    second = recall(first.id)
    assert (second.output_text, second.previous_response_id) == ("7 1 of 1", first.id)
    third = create(client, asked("recall"), previous_response_id=second.id, user="anna")
    assert third.output_text == "77 1 of 1 10 of 2"
    unstored = create(client, asked("say 7"), store=False, user="anna")
    for id, user in (
        (first.id, "bob"),
        ("resp_0123456789abcdef", "anna"),
        ("../x", "anna"),
        (unstored.id, "anna"),
    ):
        with pytest.raises(openai.BadRequestError, match="not stored") as caught:
            recall(id, user)
        error = caught.value
        assert (error.code, error.param) == ("previous_response_not_found", "previous_response_id")


def test_a_stored_response_can_be_read_and_deleted(client: openai.OpenAI) -> None:
    options: Any = {"instructions": "Write to ann@example.com.", "metadata": {"a": "b"}, "temperature": 0.5}
    created = create(client, asked("say 7,8,7,7"), user="anna", **options)
    read = client.responses.retrieve(created.id)
    assert read.instructions is not None
    assert "ann@example.com" not in str(read.model_dump())
    assert [item.id for item in read.output] == [item.id for item in created.output]
    for one in (created, read):
        one.instructions = None
        one.model_extra["pixelis"].pop("seconds")
    assert read.model_dump() == created.model_dump()
    assert client.responses.delete(created.id) is None
    for method in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="not found") as caught:
            method(created.id)
        assert (caught.value.code, caught.value.param) == ("response_not_found", "response_id")
    with pytest.raises(openai.BadRequestError, match="not stored"):
        create(client, "recall", previous_response_id=created.id, user="anna")


def test_a_response_without_an_answer_is_incomplete_with_a_refusal_and_can_be_read(
    client: openai.OpenAI,
) -> None:
    failed = create(client, asked("say none"))
    assert (failed.status, failed.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert failed.output[-1].content[0].type == "refusal"
    read = client.responses.retrieve(failed.id)
    assert (read.status, read.incomplete_details) == (failed.status, failed.incomplete_details)
    assert read.output[-1].content[0].type == "refusal"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.retrieve(failed.id, stream=True)
    assert caught.value.code == "unsupported_parameter"


def test_a_response_exists_for_its_key_alone_and_while_its_user_does(
    client: openai.OpenAI, deployed: Deployed, file: KeyFile
) -> None:
    secrets = file.create("mill", ["ask"]), file.create("barn", ["ask", "read", "steer"])
    mill, barn = (
        openai.OpenAI(base_url=f"{deployed.url}/v1", api_key=secret, max_retries=0) for secret in secrets
    )
    response = create(mill, asked("say 7"), user="anna")
    for other in (client, barn):
        for method in (other.responses.retrieve, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                method(response.id)
    assert mill.responses.retrieve(response.id).output_text == "7"
    with deployed.client(secrets[0]) as http:
        assert http.delete("/v1/experiences?user=anna").json()["deleted"] == 1
    unstored = create(mill, asked("say 7"), store=False)
    chat = deployed.ask("say 7", key=secrets[0]).json()["experience_id"]
    for id in (response.id, unstored.id, chat.replace("exp_", "resp_"), "resp_1", "x"):
        with pytest.raises(openai.NotFoundError):
            mill.responses.retrieve(id)


def test_earlier_output_items_are_context(client: openai.OpenAI) -> None:
    first = create(client, asked("say 7"))
    output = [item.model_dump() for item in first.output]
    second = create(client, [*asked("say 7"), *output, {"role": "user", "content": "recall"}])
    assert second.output_text == "7 1 of 1"


def test_a_stream_has_openais_events(client: openai.OpenAI) -> None:
    with client.responses.stream(model="pixelis-nano", input=asked("say 7,8,8,8")) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    for kind in ("reasoning_text.delta", "mcp_call.completed", "output_text.delta", "output_item.done"):
        assert f"response.{kind}" in kinds
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "8"
    added = [e.item.id for e in events if e.type == "response.output_item.added"]
    assert added == [item.id for item in final.output]
    assert (final.output_text, final.id) == ("8", events[0].response.id)
    follow_up = create(client, "recall", previous_response_id=final.id)
    assert follow_up.output_text == "8 1 of 1"


def test_a_response_has_the_log_probs_that_it_includes(client: openai.OpenAI) -> None:
    options: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = create(client, asked("say 7"), **options)
    (token,) = response.output[-1].content[0].logprobs
    assert (token.token, token.bytes, token.logprob, response.top_logprobs) == ("7", [55], -0.3, 2)
    assert [(likely.token, likely.logprob) for likely in token.top_logprobs] == [("7", -0.3), ("8", -1.3)]
    with client.responses.stream(model="pixelis-nano", input=asked("say 7"), **options) as stream:
        deltas = [event for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response().output[-1].content[0].logprobs
    for log_probs in (deltas[0].logprobs, final):
        assert [likely.token for likely in log_probs[0].top_logprobs] == ["7", "8"]
    assert create(client, asked("say 7")).output[-1].content[0].logprobs == []


def test_a_repeated_request_is_the_same_response(client: openai.OpenAI) -> None:
    first = create(client, asked("say 7 once"), temperature=0)
    again = create(client, asked("say 7 once"), temperature=0)
    assert (again.id, again.model_extra["pixelis"]["cached"]) == (first.id, True)
    with client.responses.stream(model="pixelis-nano", input=asked("say 7 once"), temperature=0) as stream:
        final = stream.get_final_response()
    assert (final.id, len(final.output)) == (first.id, 3)


def test_a_bad_picture_is_refused_with_the_index_of_the_part(client: openai.OpenAI) -> None:
    bad = "data:image/png;base64,@@@@"
    (message,) = asked("q")
    message["content"].append({"type": "input_image", "image_url": bad})
    with pytest.raises(openai.BadRequestError, match="base64") as caught:
        create(client, [message])
    assert (caught.value.code, caught.value.param) == ("image_undecodable", "input[0].content[2]")
    message["content"][1:] = [{"type": "input_image", "image_url": picture_url((900, 3))}]
    with pytest.raises(openai.BadRequestError, match="too thin") as caught:
        create(client, [message])
    assert caught.value.param == "input[0].content[1]"
    for stream in (False, True):
        chat = messages("q", picture_url(), bad)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="pixelis-nano", messages=chat, stream=stream)
        assert caught.value.param == "messages[0].content[2]"


def test_a_stream_that_fails_ends_with_an_error(client: openai.OpenAI) -> None:
    events = list(create(client, asked("break"), stream=True))
    assert [e.type for e in events[-2:]] == ["error", "response.failed"]
    assert (events[-2].code, events[-1].response.status) == ("internal_error", "failed")
    assert "secret" not in str(events)
