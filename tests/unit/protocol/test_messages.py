"""Messages and tools of clients in their normal form, and the errors of those that have none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pixelis.protocol.chat import ChatBody
from pixelis.protocol.errors import ApiError, parse_body
from pixelis.protocol.messages import Call, Message
from pixelis.protocol.request import CompletionBody
from pixelis.protocol.responses import ResponsesBody
from pixelis.protocol.tools import Toolset
from pixelis.records import Function

PICTURE = "data:image/png;base64,AAAA"
SHOWN = {"type": "image_url", "image_url": {"url": PICTURE}}
SCHEMA = {"type": "object", "properties": {"box": {"type": "array"}}, "required": ["box"]}
ZOOM = {"name": "look", "description": "Zooms in.", "parameters": SCHEMA}


def called(id: str, arguments: str = "{}", name: str = "look") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat(*messages: dict[str, Any], **fields: Any) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"model": "m", "messages": messages, **fields}).encode())


def response(items: Any, **fields: Any) -> ResponsesBody:
    return parse_body(ResponsesBody, json.dumps({"model": "m", "input": items, **fields}).encode())


USER = {"role": "user", "content": "Which digit?"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [called("a", '{"box": [1]}'), called("b")]}
NORMAL = [
    Message("system", "Be brief."),
    Message("user", "Which digit?", (PICTURE,)),
    Message("assistant", calls=(Call("a", "look", {"box": [1]}), Call("b", "look", {}))),
    Message("tool", "first", call_id="a"),
    Message("tool", "second", (PICTURE,), call_id="b"),
]


def test_both_apis_spell_the_same_conversation() -> None:
    second = [{"type": "text", "text": "second "}, SHOWN]
    sent = chat(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [SHOWN, {"type": "text", "text": " Which digit?"}]},
        CALLS,
        {"role": "tool", "tool_call_id": "b", "content": second},
        {"role": "tool", "tool_call_id": "a", "content": "first"},
    )
    assert sent.normal_messages() == NORMAL
    picture = {"type": "input_image", "image_url": PICTURE}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Which digit?"}, picture]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"box": [1]}'},
        {"type": "function_call", "call_id": "b", "name": "look", "arguments": ""},
        {"type": "function_call_output", "call_id": "a", "output": "first"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "second"}, picture],
        },
    ]
    assert response(items, instructions="Be brief.").normal_messages() == NORMAL
    assert response("Which digit?").normal_messages() == [Message("user", "Which digit?")]


def test_pictures_of_results_may_be_uploaded_files_and_clips_are_told_by_their_type() -> None:
    gif = "data:image/gif;base64,AAAA"
    output = [{"type": "input_image", "file_id": "file-1"}, {"type": "video_url", "video_url": {"url": gif}}]
    called_once = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": output}
    request = response([USER, called_once, result])
    assert request.file_ids() == ["file-1"]
    request.use_files({"file-1": gif})
    message = request.normal_messages()[2]
    assert message.media == (gif, "data:video/gif;base64,AAAA")
    assert message.places == ("input[2].output[0]", "input[2].output[1]")


def test_a_reply_without_an_answer_is_an_empty_message() -> None:
    refusals: list[dict[str, Any]] = [
        {"content": None, "refusal": "no answer (length)", "tool_calls": None},
        {"content": [{"type": "refusal", "refusal": "no answer (length)"}]},
        {"content": ""},
    ]
    for fields in refusals:
        assert chat(USER, {"role": "assistant", **fields}, USER).normal_messages()[1] == Message("assistant")


RESULT = {"role": "tool", "tool_call_id": "a", "content": "7"}
ONE = {"role": "assistant", "content": None, "tool_calls": [called("a")]}
WRONG_CHATS: list[tuple[list[dict[str, Any]], str, str]] = [
    ([USER, RESULT], "invalid_value", "messages[1].tool_call_id"),
    ([USER, ONE, {"role": "tool", "content": "7"}], "invalid_value", "messages[2].tool_call_id"),
    ([USER, ONE, RESULT, RESULT], "invalid_value", "messages[3].tool_call_id"),
    ([USER, ONE, USER], "missing_tool_result", "messages[2]"),
    ([USER, CALLS, RESULT, ONE], "missing_tool_result", "messages[3]"),
    ([USER, ONE], "missing_tool_result", "messages"),
    ([USER, {"role": "assistant", "content": "7"}], "unsupported_conversation", "messages"),
    ([USER, {**ONE, "tool_calls": [called("a"), called("a")]}], "invalid_value", "messages[1]"),
    ([USER, {**ONE, "tool_calls": [{"id": "a"}]}], "missing_parameter", "messages[1].tool_calls[0].function"),
    ([USER, {**ONE, "tool_calls": [called("a")] * 65}], "invalid_value", "messages[1].tool_calls"),
    ([USER, ONE, {**RESULT, "content": [{"type": "audio"}]}], "unsupported_part", "messages[2].content[0]"),
    ([USER, {"role": "function", "content": "7"}], "invalid_value", "messages[1].role"),
    ([{"role": "user", "content": [{"type": "text"}]}], "invalid_value", "messages[0].content[0]"),
]
WRONG_CHATS += [
    (
        [USER, {**ONE, "tool_calls": [called("b"), called("a", arguments)]}],
        "invalid_value",
        "messages[1].tool_calls[1].function.arguments",
    )
    for arguments in ("[1]", "7", "{", '{"a": 1, "a": 2}', "9" * 70_000)
]
CALL = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "7"}
WRONG_INPUTS: list[tuple[list[dict[str, Any]], str, str]] = [
    ([USER, OUTPUT], "invalid_value", "input[1].call_id"),
    ([USER, CALL], "missing_tool_result", "input"),
    ([USER, {**CALL, "arguments": "[]"}], "invalid_value", "input[1].arguments"),
    ([USER, {**CALL, "name": None}], "missing_parameter", "input[1]"),
    ([USER, CALL, {**OUTPUT, "output": [{"type": "input_audio"}]}], "unsupported_part", "input[2].output[0]"),
    ([USER, {"type": "web_search_call"}], "unsupported_part", "input[1]"),
    ([{"content": "q"}], "missing_parameter", "input[0].role"),
]


def refused(code: str, param: str, read: Any) -> None:
    with pytest.raises(ApiError) as caught:
        read()
    error = caught.value
    assert (error.status, error.code, error.param) == (400, code, param), error.message
    assert set(error.body()["error"]) == {"message", "type", "code", "param"}
    assert len(error.message) < 500


@pytest.mark.parametrize(("messages", "code", "param"), WRONG_CHATS)
def test_a_wrong_chat_is_refused_by_its_place(messages: list[dict[str, Any]], code: str, param: str) -> None:
    refused(code, param, lambda: chat(*messages).normal_messages())


@pytest.mark.parametrize(("items", "code", "param"), WRONG_INPUTS)
def test_a_wrong_input_is_refused_by_its_place(items: list[dict[str, Any]], code: str, param: str) -> None:
    refused(code, param, lambda: response(items).normal_messages())


def requests(tools: list[dict[str, Any]], **fields: Any) -> list[CompletionBody]:
    nested = [{"type": "function", "function": tool} for tool in tools]
    flat = [{"type": "function", **tool} for tool in tools]
    return [chat(USER, tools=nested, **fields), response("q", tools=flat, **fields)]


def test_tools_of_both_apis_are_functions() -> None:
    look = Function(name="look", description="Zooms in.", parameters=SCHEMA)
    bare = Function(name="stop")
    for request in requests([ZOOM, {"name": "stop", "strict": None}], parallel_tool_calls=False):
        assert request.toolset({"zoom_in"}) == Toolset((look, bare), parallel=False)
    for request in requests([ZOOM], tool_choice="none"):
        assert request.toolset().functions == (look,)
        assert request.toolset().offered == ()
    assert chat(USER, tool_choice="auto").toolset() == response("q").toolset() == Toolset()


def test_schemas_of_real_clients_are_accepted() -> None:
    keywords: dict[str, Any] = {"$schema": "http://json-schema.org/draft-07/schema#", "x-order": [1]}
    text = {"type": "string", "pattern": "^[a-z]+$", "default": "a"}
    properties = {
        "name": text,
        "tags": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/T"}},
    }
    schema = {**keywords, "type": "object", "properties": properties, "$defs": {"T": text}}
    for request in requests([{"name": "look", "parameters": schema}]):
        assert request.toolset().functions[0].parameters == schema


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"name": "zoom_in"}, "name_taken", None),
        ({"name": "a b"}, "invalid_value", "name"),
        ({"name": None}, "invalid_value", "name"),
        ({"name": "n" * 65}, "invalid_value", "name"),
        ({"description": 7}, "invalid_value", "description"),
        ({"parameters": []}, "invalid_value", "parameters"),
        ({"parameters": {"type": "string"}}, "invalid_schema", "parameters"),
        (
            {"parameters": {"type": "object", "properties": {"a": {"type": 7}}}},
            "invalid_schema",
            "parameters",
        ),
        ({"parameters": {"$ref": "https://example.org"}}, "invalid_schema", "parameters"),
        ({"parameters": {"if": {"$ref": "https://example.org"}}}, "invalid_schema", "parameters"),
        ({"parameters": {"type": "object", "enum": ["x" * 16_000]}}, "invalid_schema", "parameters"),
    ],
)
def test_a_wrong_tool_is_refused_by_its_place(changes: dict[str, Any], code: str, field: str | None) -> None:
    nested = {"type": "function", "function": {**ZOOM, **changes}}
    place = f"tools[1].function.{field}" if field else "tools[1]"
    fine = {"type": "function", "function": {"name": "fine"}}
    refused(code, place, lambda: chat(USER, tools=[fine, nested]).toolset({"zoom_in"}))
    place = place.replace(".function", "")
    flat = {"type": "function", **nested["function"]}  # type: ignore[dict-item]
    refused(code, place, lambda: response("q", tools=[{**flat, **ZOOM}, flat]).toolset({"zoom_in"}))


def test_other_types_of_tools_and_choices_are_refused_by_name() -> None:
    searches = [{"type": "web_search_preview"}]
    refused("unsupported_tool", "tools[0].type", lambda: response("q", tools=searches).toolset())
    refused("name_taken", "tools[1]", lambda: requests([ZOOM, ZOOM])[1].toolset())
    refused("invalid_value", "tools", lambda: requests([{"name": f"t{i}"} for i in range(129)]))
    named = {"type": "function", "name": "other"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": []}
    for choice, code, param in (
        ("always", "invalid_value", "tool_choice"),
        (named, "invalid_value", "tool_choice"),
        ({"type": "function"}, "invalid_value", "tool_choice"),
        (allowed, "invalid_value", "tool_choice"),
    ):
        for request in requests([ZOOM], tool_choice=choice):
            refused(code, param, request.toolset)
    refused("invalid_value", "tool_choice", chat(USER, tool_choice="required").toolset)


def test_a_reply_fulfils_the_choice_of_tools_or_is_refused() -> None:
    one, other = Call("a", "look", {}), Call("b", "stop", {})
    named = {"type": "function", "function": {"name": "look"}}
    cases: list[tuple[dict[str, Any], list[list[Call]], list[list[Call]]]] = [
        ({}, [[], [one], [one, other]], []),
        ({"tool_choice": "none"}, [[]], [[one]]),
        ({"tool_choice": "required"}, [[one], [one, other]], [[]]),
        ({"tool_choice": named}, [[one]], [[], [other], [one, other]]),
        ({"parallel_tool_calls": False}, [[], [one]], [[one, other]]),
    ]
    for fields, right, wrong in cases:
        for request in requests([ZOOM, {"name": "stop"}], **fields):
            toolset = request.toolset()
            for calls in right:
                toolset.check(calls)
            for calls in wrong:
                with pytest.raises(ApiError) as caught:
                    toolset.check(calls)
                assert (caught.value.status, caught.value.code) == (422, "tool_choice_unmet")
