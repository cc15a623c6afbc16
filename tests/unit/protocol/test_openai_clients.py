"""The official client runs tool loops with pictures against these bodies: both APIs, streamed and not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from pixelis.protocol.branches import Branches, Extends, Forks, Repeats
from pixelis.protocol.chat import ChatBody, ChatWriter
from pixelis.protocol.completion import Completion
from pixelis.protocol.errors import ApiError, parse_body
from pixelis.protocol.messages import Message
from pixelis.protocol.responses import ResponsesBody, ResponseWriter
from pixelis.records import Action, Observation, StopReason, Trajectory, Turn

PICTURE = "data:image/png;base64,AAAA"
SCHEMA = {"type": "object", "properties": {"box": {"type": "array", "items": {"type": "number"}}}}
LOOK = {"name": "look", "description": "Zooms in.", "parameters": SCHEMA}
DIALECT = "qwen"
CALL_TEXT = "<think>I must look.</think><tool_call>{}</tool_call><tool_call>{}</tool_call>"
ANSWER_TEXT = "<think>Seen.</think><answer>siebenundzwanzigstes Käsebrot</answer>"


class Served:
    """An episode whose scripted policy zooms in, calls ``look`` twice, and answers what it then sees."""

    def __init__(self) -> None:
        self.branches = Branches()
        self.trajectories: dict[str, Trajectory] = {}
        self.placed: list[Any] = []
        self.app = FastAPI()
        self.app.exception_handler(ApiError)(lambda request, error: error.response())
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.post("/v1/responses")(self.response)

    def complete(self, messages: list[Message], functions: list[str]) -> Completion:
        place = self.branches.place(messages)
        self.placed.append(place)
        assert not isinstance(place, Repeats)
        if isinstance(place, Forks):
            self.trajectories[place.branch] = Trajectory(question_id="q", policy_version=3)
        trajectory = self.trajectories[place.branch]
        start = len(trajectory.turns)
        trajectory.turns += [Turn(role="tool" if m.role == "tool" else "user", tokens=[1]) for m in place.new]
        if isinstance(place, Extends):
            trajectory.turns.append(
                Turn(role="assistant", text=ANSWER_TEXT, tokens=[2, 3], log_probs=[0, -1])
            )
            trajectory.answer, trajectory.stop_reason = "siebenundzwanzigstes Käsebrot", StopReason.ANSWER
        else:
            zoom = Action(op="zoom_in", arguments={"box": [0, 0, 1, 1]})
            seen = Observation(status="ok", id="obs1", text="a part")
            looks = [Action(op="look", target="", arguments={"box": [n, 0.5], "of": "ä"}) for n in range(2)]
            trajectory.turns += [
                Turn(role="assistant", text="<think>Closer.</think>", tokens=[4], log_probs=[0], action=zoom),
                Turn(role="tool", tokens=[5], observation=seen),
                Turn(role="assistant", text=CALL_TEXT, tokens=[6, 7], log_probs=[0, 0], action=looks[0]),
            ]
            trajectory.turns[-1].further_actions = looks[1:]
            trajectory.stop_reason = StopReason.CALL
        completion = Completion.of(trajectory, start, functions, place.branch)
        if trajectory.answer:
            token = {"token": "sieben", "bytes": list(b"sieben"), "logprob": -1.0, "top_logprobs": []}
            completion = replace(completion, log_probs={"content": [token], "refusal": None})
        self.branches.reply(place.branch, completion.message)
        return completion

    async def chat(self, request: Request) -> Response:
        return self.respond(parse_body(ChatBody, await request.body()))

    async def response(self, request: Request) -> Response:
        return self.respond(parse_body(ResponsesBody, await request.body()))

    def respond(self, body: ChatBody | ResponsesBody) -> Response:
        tools, writer = body.toolset({"zoom_in"}), body.writer(body.model, DIALECT)
        completion = self.complete(body.normal_messages(), [f.name for f in tools.offered])
        tools.check(completion.calls)
        reply = writer.reply([completion], completion.fields)
        if body.stream:
            return streamed(writer, completion, reply)
        return Response(json.dumps(reply), media_type="application/json")


def streamed(stream: ChatWriter | ResponseWriter, completion: Completion, reply: dict[str, Any]) -> Response:
    async def events() -> AsyncIterator[str]:
        yield stream.start()
        for turn in completion.turns:
            for n in range(0, len(turn.text), 5):
                yield stream.text(turn.text[n : n + 5])
            yield stream.turn(turn)
        yield stream.end(reply)

    return StreamingResponse(events(), media_type="text/event-stream")


Talk = Callable[[openai.AsyncOpenAI], Awaitable[None]]


def run(served: Served, talk: Talk) -> None:
    async def talked() -> None:
        transport = httpx.ASGITransport(app=served.app)
        async with openai.AsyncOpenAI(
            base_url="http://episode/v1",
            api_key="k",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=transport),
        ) as client:
            await talk(client)

    asyncio.run(talked())


def shown(text: str) -> list[Any]:
    return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": PICTURE}}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_tools_and_pictures(stream: bool) -> None:
    served = Served()

    async def talk(client: openai.AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": "m", "tools": [{"type": "function", "function": LOOK}]}
        messages: list[Any] = [{"role": "user", "content": shown("What is this?")}]
        for _ in range(2):
            if stream:
                async with client.chat.completions.stream(
                    messages=messages, stream_options={"include_usage": True}, **asked
                ) as events:
                    kinds = [event.type async for event in events]
                    reply: Any = await events.get_final_completion()
                assert "chunk" in kinds
            else:
                reply = await client.chat.completions.create(messages=messages, **asked)
            choice = reply.choices[0]
            messages.append(choice.message.model_dump(exclude_none=True))
            if choice.finish_reason != "tool_calls":
                break
            assert choice.message.content is None or choice.message.content == ""
            calls = choice.message.tool_calls
            assert [(c.type, c.function.name) for c in calls] == [("function", "look")] * 2
            assert [json.loads(c.function.arguments)["box"][0] for c in calls] == [0, 1]
            assert len({c.id for c in calls}) == 2
            assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (1, 3)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": shown("seen")}
                for call in reversed(calls)
            ]
        assert (choice.finish_reason, choice.message.content) == ("stop", "siebenundzwanzigstes Käsebrot")
        assert choice.logprobs.content[0].token == "sieben"
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (7, 2)

    run(served, talk)
    first, second = served.placed
    assert first.new == [Message("user", "What is this?", (PICTURE,))]
    assert isinstance(second, Extends)
    assert [(m.role, m.text, m.media) for m in second.new] == [("tool", "seen", (PICTURE,))] * 2
    calls = served.branches.branches["main"].messages[1].calls
    assert [m.call_id for m in second.new] == [call.id for call in calls]


def test_the_chunks_of_a_call_have_its_name_first_and_then_its_arguments() -> None:
    chunks = list[Any]()

    async def talk(client: openai.AsyncOpenAI) -> None:
        tools: Any = [{"type": "function", "function": LOOK}]
        messages: Any = [{"role": "user", "content": "q"}]
        async for chunk in await client.chat.completions.create(
            model="m", messages=messages, tools=tools, stream=True
        ):
            chunks.append(chunk)

    run(Served(), talk)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thoughts = "".join((delta.model_extra or {}).get("reasoning") or "" for delta in deltas)
    assert thoughts == "Closer.I must look."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in calls] == [0, 0, 1, 1]
    for named, filled in (calls[:2], calls[2:]):
        assert (named.function.name, named.function.arguments, named.type) == ("look", "", "function")
        assert named.id
        assert (filled.id, filled.function.name) == (None, None)
        assert "ä" in filled.function.arguments
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_with_tools_and_pictures(stream: bool) -> None:
    served, kinds = Served(), list[list[str]]()

    async def talk(client: openai.AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": "m", "tools": [{"type": "function", "strict": False, **LOOK}]}
        asked["instructions"] = "Be brief."
        items: list[Any] = [{"role": "user", "content": "What is this?"}]
        for _ in range(2):
            if stream:
                async with client.responses.stream(input=items, **asked) as events:
                    kinds.append([event.type async for event in events])
                    reply: Any = await events.get_final_response()
            else:
                reply = await client.responses.create(input=items, **asked)
            assert reply.status == "completed"
            assert reply.tools[0].name == "look"
            calls = [item for item in reply.output if item.type == "function_call"]
            if not calls:
                break
            types = ["reasoning", "mcp_call", "reasoning", "function_call", "function_call"]
            assert [item.type for item in reply.output] == types
            assert reply.output[1].output == "a part"
            assert [json.loads(call.arguments)["box"][0] for call in calls] == [0, 1]
            picture = {"type": "input_image", "image_url": PICTURE, "detail": "auto"}
            results = [
                {"type": "function_call_output", "call_id": call.call_id, "output": [picture]}
                for call in calls
            ]
            items += [item.model_dump(exclude_none=True) for item in reply.output] + results
        assert [item.type for item in reply.output] == ["reasoning", "message"]
        assert reply.output_text == "siebenundzwanzigstes Käsebrot"
        assert (reply.usage.input_tokens, reply.usage.output_tokens) == (8, 2)

    run(served, talk)
    assert isinstance(served.placed[1], Extends)
    assert [m.media for m in served.placed[1].new] == [(PICTURE,)] * 2
    if stream:
        call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
        names = [f"response.{name}" for name in [*call, "output_item.done"]]
        assert kinds[0][-9:] == [*names, *names, "response.completed"]


def test_errors_are_the_clients_own() -> None:
    async def talk(client: openai.AsyncOpenAI) -> None:
        search: Any = [{"type": "web_search_preview"}]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", input="q", tools=search)
        assert (caught.value.code, caught.value.param) == ("unsupported_tool", "tools[0].type")
        tools: Any = [{"type": "function", "function": LOOK}]
        messages: Any = [{"role": "user", "content": "q"}]
        with pytest.raises(openai.UnprocessableEntityError) as unmet:
            await client.chat.completions.create(
                model="m", messages=messages, tools=tools, parallel_tool_calls=False
            )
        assert unmet.value.code == "tool_choice_unmet"
        for fields in ({"n": 2}, {"stop": "x"}):
            with pytest.raises(openai.BadRequestError, match="not supported"):
                await client.chat.completions.create(model="m", messages=messages, **fields)  # type: ignore[call-overload]

    run(Served(), talk)


def replied(text: str, reason: StopReason, answer: str | None = None) -> Completion:
    turns = [Turn(role="user", tokens=[1, 2]), Turn(role="assistant", text=text, tokens=[3])]
    trajectory = Trajectory(question_id="q", turns=turns, stop_reason=reason, answer=answer)
    return Completion.of(trajectory, 0, ["look"])


def test_a_reply_without_calls_is_its_answer_or_its_text_or_a_refusal() -> None:
    said = replied("<think>Hm.</think>\nHello!", StopReason.NO_ACTION)
    assert (said.text, said.thought, said.finish, said.refusal) == ("Hello!", "Hm.", "stop", None)
    said = replied("Hello!", StopReason.NO_ACTION)
    assert (said.text, said.thought) == ("Hello!", "")
    cut = replied("<think>Hm", StopReason.LENGTH)
    assert (cut.text, cut.finish, cut.refusal) == (None, "length", "no answer (length)")
    chat = parse_body(ChatBody, b'{"model": "m", "messages": [{"role": "user", "content": "q"}]}')
    assert chat.writer("m", DIALECT).reply([cut], {})["choices"][0]["finish_reason"] == "length"
    response = parse_body(ResponsesBody, b'{"model": "m", "input": "q"}')
    assert response.writer("m", DIALECT).reply([cut], {})["status"] == "incomplete"
    assert cut.message == Message("assistant")
