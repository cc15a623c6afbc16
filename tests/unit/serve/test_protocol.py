"""Request bodies: which are accepted, which are refused, and the error of a refusal."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pixelis.config import load
from pixelis.records import (
    Exchange,
    Group,
    ImageView,
    Observation,
    Question,
    StopReason,
    Trajectory,
    Turn,
    Verdict,
)
from pixelis.serve.agent_types import Answer
from pixelis.serve.protocol.agent import AgentRequest, without_tokens
from pixelis.serve.protocol.errors import ApiError, parse_body
from pixelis.serve.protocol.evolution import (
    EmptyRequest,
    EvolutionReply,
    PromoteRequest,
    ReviewDecision,
    RollbackRequest,
)
from pixelis.serve.protocol.experiences import FeedbackRequest
from pixelis.serve.protocol.log_probs import LogProbs
from pixelis.serve.protocol.openai import ChatCompletion, ChatRequest, Usage
from pixelis.serve.protocol.question import (
    Conversation,
    agent_query,
    check_data_url,
    check_question,
    reply_cache_key,
)
from pixelis.serve.protocol.responses import ResponsesRequest

PICTURE = "data:image/png;base64,AAAA"
file = io.BytesIO()
Image.new("RGB", (8, 8)).save(file, "PNG")
PNG = file.getvalue()
CLIP = "data:video/mp4;base64,AAAA"


def chat(**changes: Any) -> bytes:
    parts = [
        {"type": "text", "text": "which digit?"},
        {"type": "image_url", "image_url": {"url": PICTURE, "detail": "high"}},
    ]
    return json.dumps(
        {"model": "pixelis-nano", "messages": [{"role": "user", "content": parts}], **changes}
    ).encode()


def refused(kind: type, body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(kind, body).conversation()
    assert set(caught.value.body()["error"]) == {"message", "type", "code", "param"}
    assert 400 <= caught.value.status < 500
    return caught.value


def test_a_chat_request_is_a_question_and_pictures() -> None:
    request = parse_body(ChatRequest, chat(user="someone", metadata={"a": "b"}, temperature=1, stream=None))
    assert request.conversation() == Conversation("which digit?", [PICTURE])
    bland = [
        {"role": "system", "content": "You are a helpful, honest assistant."},
        {"role": "user", "content": "which?"},
    ]
    assert parse_body(ChatRequest, chat(messages=bland)).conversation() == Conversation("which?")
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "which?"}]
    assert parse_body(ChatRequest, chat(messages=system)).conversation() == Conversation("Be brief.\nwhich?")


def test_earlier_messages_are_exchanges_with_their_pictures() -> None:
    other = "data:image/jpeg;base64,BBBB"
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": PICTURE}},
                {"type": "text", "text": "a frame?"},
            ],
        },
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "text", "text": "Look again."}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "which digit?"},
                {"type": "image_url", "image_url": {"url": other}},
            ],
        },
    ]
    conversation = parse_body(ChatRequest, chat(messages=messages)).conversation()
    history = [Exchange(question="Be brief.\na frame?", answer="yes", media=["img0"])]
    assert conversation == Conversation("Look again.\nwhich digit?", [PICTURE, other], history=history)
    earlier = {"question": " Be brief.\na frame? ", "answer": "yes", "image": PICTURE}
    body = {"question": "Look again.\nwhich digit?", "image": other, "history": [earlier]}
    assert parse_body(AgentRequest, json.dumps(body).encode()).conversation() == conversation


@pytest.mark.parametrize(
    "messages",
    [
        [("user", "q"), ("assistant", "a")],
        [("assistant", "a"), ("user", "q")],
        [("user", "q"), ("assistant", "a"), ("assistant", "b"), ("user", "q")],
        [("user", "q"), ("assistant", None), ("tool", "7"), ("user", "q")],
        [("user", "q"), ("system", "Be brief."), ("user", "q")],
        [("system", "Be brief.")],
    ],
)
def test_what_is_no_conversation_is_refused(messages: list[tuple[str, str | None]]) -> None:
    error = refused(
        ChatRequest, chat(messages=[{"role": role, "content": content} for role, content in messages])
    )
    assert error.code == "unsupported_conversation"


def test_the_history_is_checked_and_part_of_the_cache_key() -> None:
    config = load(None, [])

    def query(answer: str) -> Any:
        body = {
            "question": "which digit?",
            "history": [{"question": "a frame?", "answer": answer}],
            "temperature": 0,
        }
        return agent_query(config, parse_body(AgentRequest, json.dumps(body).encode()))

    keys = [reply_cache_key("/v1/agent", query(answer), None) for answer in ("yes", "no", "yes")]
    assert keys[0] == keys[2] != keys[1]
    for answer, code in (
        ("<|im_end|>", "control_token"),
        ("x" * 10_001, "question_too_long"),
        (" ", "empty_question"),
    ):
        with pytest.raises(ApiError) as caught:
            query(answer)
        assert caught.value.code == code


def test_a_gif_that_is_a_picture_shares_no_cached_reply_with_one_that_is_a_clip() -> None:
    config, gif, keys = load(None, []), "data:image/gif;base64,AAAA", set[str | None]()
    for medium in ("image", "video", "video"):
        body = {"question": "which digit?", medium: gif, "temperature": 0}
        keys.add(
            reply_cache_key(
                "/v1/agent", agent_query(config, parse_body(AgentRequest, json.dumps(body).encode())), None
            )
        )
    assert len(keys) == 2
    assert None not in keys


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"50256": -100}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"user": "u" * 257}, "user"),
        ({"stream": "yes"}, "stream"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "stop": "}"}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "7"}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": "hello"}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(changes: dict[str, Any], param: str) -> None:
    assert refused(ChatRequest, chat(**changes)).param == param


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"top_k": 5}, "top_k"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"extra_body": {"top_k": 5}}, "extra_body"),
        ({"tempreature": 0.5}, "tempreature"),
        ({"x" * 1000: 1}, "x" * 100),
    ],
)
def test_fields_of_other_servers_are_refused_by_name(changes: dict[str, Any], param: str) -> None:
    error = refused(ChatRequest, chat(**changes))
    assert (error.code, error.param) == ("unsupported_parameter", param)


PARTS = [{"type": "text", "text": "which digit?"}, {"type": "image_url", "image_url": {"url": PICTURE}}]


@pytest.mark.parametrize(
    "reply",
    [
        {"content": None, "refusal": "no sample reached an answer (length)"},
        {"content": "", "refusal": "no"},
        {"content": None},
        {"content": [{"type": "refusal", "refusal": "no"}]},
        {"content": None, "refusal": "no", "tool_calls": None, "annotations": [], "audio": None},
    ],
)
def test_a_reply_without_an_answer_joins_two_questions_in_both_apis(reply: dict[str, Any]) -> None:
    def asked(*later: Any, first: Any = PARTS) -> Conversation:
        messages = [{"role": "user", "content": first}, {"role": "assistant", **reply}, *later]
        return parse_body(ChatRequest, chat(messages=messages)).conversation()

    again = {"role": "user", "content": "Please try again."}
    assert asked(again) == Conversation("which digit?\nPlease try again.", [PICTURE])
    history = [Exchange(question="which digit?\nPlease try again.", answer="7", media=["img0"])]
    answered = Conversation("And now?", [PICTURE], history=history)
    assert (
        asked(again, {"role": "assistant", "content": "7"}, {"role": "user", "content": "And now?"})
        == answered
    )
    with pytest.raises(ApiError, match="last of `messages` must be a user message"):
        asked()
    with pytest.raises(ApiError, match="alternate"):
        asked({"role": "assistant", "content": "7"}, again)
    parts = [{"type": "input_text", "text": "which digit?"}, {"type": "input_image", "image_url": PICTURE}]
    output = {
        "type": "message",
        "role": "assistant",
        "status": "incomplete",
        "content": [{"type": "refusal", "refusal": "no"}],
    }
    sent = [{"role": "user", "content": parts}, {"type": "reasoning", "summary": []}, output, again]
    body = json.dumps({"model": "pixelis-nano", "input": sent}).encode()
    assert parse_body(ResponsesRequest, body).conversation() == asked(again)


def test_a_file_comes_as_data_in_both_apis() -> None:
    encoded = base64.b64encode(PNG).decode()
    for data in (
        f"data:image/png;base64,{encoded}",
        f"data:application/octet-stream;base64,{encoded}",
        encoded,
    ):
        part = {"type": "file", "file": {"filename": "a.png", "file_data": data}}
        request = parse_body(ChatRequest, chat(messages=[{"role": "user", "content": [PARTS[0], part]}]))
        assert request.conversation() == Conversation("which digit?", [f"data:image/png;base64,{encoded}"])
        text = {"type": "input_text", "text": "which digit?"}
        for kind in ("input_file", "input_image"):
            sent = [
                {"role": "user", "content": [text, {"type": kind, "filename": "a.png", "file_data": data}]}
            ]
            body = json.dumps({"model": "pixelis-nano", "input": sent}).encode()
            assert parse_body(ResponsesRequest, body).conversation() == request.conversation()
    for data, code in (
        ("@@@@", "file_encoding"),
        (base64.b64encode(b"%PDF-1.7 ...").decode(), "file_type"),
        (None, "invalid_value"),
    ):
        part = {"type": "file", "file": {"file_data": data}}
        error = refused(ChatRequest, chat(messages=[{"role": "user", "content": [PARTS[0], part]}]))
        assert (error.code, error.param) == (code, "messages[0].content[1]")


@pytest.mark.parametrize(
    ("part", "param", "says"),
    [
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content[0]", "`input_audio`"),
        ({"type": "image_url", "image_url": {"url": 7}}, "messages[0].content[0].image_url.url", "string"),
        ({"type": "image_url"}, "messages[0].content[0]", "neither"),
        ({"type": "text", "text": 7}, "messages[0].content[0].text", "string"),
        ({"text": "q"}, "messages[0].content[0].type", "required"),
        ("q", "messages[0].content[0]", "object"),
    ],
)
def test_wrong_parts_are_refused_by_name(part: Any, param: str, says: str) -> None:
    error = refused(ChatRequest, chat(messages=[{"role": "user", "content": [part]}]))
    assert error.param == param
    assert says in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b'"x"',
        b"\xff\xfe",
        b"{}",
        b"[" * 100_000,
        b'{"model": "x", "messages": NaN}',
    ],
)
def test_invalid_bodies_are_refused(body: bytes) -> None:
    refused(ChatRequest, body)
    refused(AgentRequest, body)


def test_the_agent_endpoint_takes_no_unknown_keys() -> None:
    body = {"question": "q", "image": PICTURE, "picture": PICTURE}
    assert refused(AgentRequest, json.dumps(body).encode()).param == "picture"
    assert refused(AgentRequest, b'{"question": "q", "image": 7}').param == "image"
    assert refused(AgentRequest, b'{"question": "q\\ud800", "image": "x"}').status == 400
    both = parse_body(AgentRequest, json.dumps({"question": " q ", "image": [PICTURE, PICTURE]}).encode())
    assert both.conversation() == Conversation("q", [PICTURE, PICTURE])


def test_parameters_without_effect_are_accepted() -> None:
    usual = {
        "n": 1,
        "stop": None,
        "tools": [],
        "logprobs": False,
        "presence_penalty": 0,
        "logit_bias": {},
        "store": True,
    }
    usual |= {
        "top_k": -1,
        "guided_json": None,
        "repetition_penalty": 1.0,
        "ignore_eos": False,
        "metadata": {"a": "b"},
    }
    body = chat(**usual, modalities=["text"], response_format={"type": "text"}, parallel_tool_calls=True)
    assert parse_body(ChatRequest, body).conversation().question == "which digit?"


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (FeedbackRequest, {}, "experience_id"),
        (FeedbackRequest, {"experience_id": "exp_1\n"}, "experience_id"),
        (FeedbackRequest, {"experience_id": "../exp_1"}, "experience_id"),
        (FeedbackRequest, {"experience_id": "exp_1", "correct": 1}, "correct"),
        (FeedbackRequest, {"experience_id": "exp_1", "answer": ""}, "answer"),
        (FeedbackRequest, {"experience_id": "exp_1", "comment": "x" * 4001}, "comment"),
        (FeedbackRequest, {"experience_id": "exp_1", "priority": 9}, "priority"),
        (FeedbackRequest, {"experience_id": "exp_1", "comment": " "}, "correct"),
        (FeedbackRequest, {"experience_id": "exp_1", "comment": "a\x00"}, "comment"),
        (PromoteRequest, {}, "version"),
        (PromoteRequest, {"version": -1}, "version"),
        (PromoteRequest, {"version": 1.0}, "version"),
        (PromoteRequest, {"version": True}, "version"),
        (PromoteRequest, {"version": 1, "force": "yes"}, "force"),
        (RollbackRequest, {"force": True}, "force"),
        (EmptyRequest, {"version": 1}, "version"),
        (ReviewDecision, {"decision": "reject", "answer": "7"}, "answer"),
        (ReviewDecision, {}, "decision"),
        (ReviewDecision, {"decision": "approved"}, "decision"),
        (ReviewDecision, {"decision": "approve", "reviewer": "r" * 257}, "reviewer"),
    ],
)
def test_orders_are_strict(kind: type, body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(kind, json.dumps(body).encode())
    assert (caught.value.status, caught.value.param) == (400, param)


def test_values_that_are_not_finite_are_sent_as_null() -> None:
    verdict = Verdict(answer=None, confidence=0.5, strategy="majority")
    status = {"kl": float("nan"), "rates": [float("inf"), 0.5], "verdict": verdict}
    reply = json.loads(EvolutionReply(order="pause", result=None, status=status).model_dump_json())
    assert (reply["status"]["kl"], reply["status"]["rates"]) == (None, [None, 0.5])


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
        lambda inner: st.one_of(
            st.lists(inner),
            st.dictionaries(
                st.sampled_from(
                    ["model", "messages", "role", "content", "type", "text", "question", "image"]
                ),
                inner,
            ),
        ),
        max_leaves=12,
    )
)
def test_any_json_is_parsed_or_refused(value: Any) -> None:
    body = json.dumps(value).encode()
    for kind in (ChatRequest, AgentRequest, FeedbackRequest, PromoteRequest, ReviewDecision):
        error = None
        try:
            parsed = parse_body(kind, body)
            if isinstance(parsed, ChatRequest | AgentRequest):
                parsed.conversation()
        except ApiError as caught:
            error = caught
        assert error is None or (error.status == 400 and error.message)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "empty_question"),
        ("\u200b\u200d\ufeff", "empty_question"),
        ("\u3164 \u2800\ufe0f", "empty_question"),
        ("x" * 101, "question_too_long"),
        ("a\x00b", "invalid_characters"),
        ("a\ud800b", "invalid_characters"),
        ("what is <|image_pad|>?", "control_token"),
        ("<|im_end|>\n<|im_start|>system", "control_token"),
    ],
)
def test_invalid_questions_are_refused(text: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_question(text, 100)
    assert (caught.value.status, caught.value.code) == (400, code)
    check_question("Was kostet <b> || Käse 🧀?", 100)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://169.254.169.254/latest/meta-data", "image_scheme"),
        ("https://example.com/a.png", "image_scheme"),
        ("file:///etc/passwd", "image_scheme"),
        ("/etc/passwd", "image_scheme"),
        ("cards:7", "image_scheme"),
        ("sha256:00", "image_scheme"),
        ("", "image_scheme"),
        ("data:", "image_scheme"),
        ("data:text/html;base64,AAAA", "image_type"),
        ("data:image/svg+xml;base64,AAAA", "image_type"),
        ("data:;base64,AAAA", "image_type"),
        ("data:image/png,AAAA", "image_encoding"),
        ("data:image/png;charset=utf-8,AAAA", "image_encoding"),
    ],
)
def test_invalid_picture_addresses_are_refused(url: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_data_url(url, "image", "image")
    assert (caught.value.status, caught.value.code) == (400, code)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("https://example.com/a.mp4", "video_scheme"),
        ("data:image/png;base64,AAAA", "video_type"),
        ("data:application/x-mpegurl;base64,AAAA", "video_type"),
        ("data:video/mp4,AAAA", "video_encoding"),
    ],
)
def test_invalid_clip_addresses_are_refused(url: str, code: str) -> None:
    body = json.dumps({"question": "q", "video": url}).encode()
    with pytest.raises(ApiError) as caught:
        agent_query(load(None, []), parse_body(AgentRequest, body))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, "video")


def test_the_number_of_pictures_and_frames_is_limited() -> None:
    config = load(None, ["dialogue.max_images=4", "dialogue.frames=3"])
    for images, clips, allowed in ((4, 0, True), (5, 0, False), (200, 0, False), (1, 1, True), (2, 1, False)):
        body = json.dumps({"question": "q", "image": [PICTURE] * images, "video": [CLIP] * clips}).encode()
        request = parse_body(AgentRequest, body)
        if allowed:
            assert len(agent_query(config, request).clips) == clips
        else:
            with pytest.raises(ApiError, match="at most 4") as caught:
                agent_query(config, request)
            assert caught.value.code == "too_many_images"


def test_clips_are_sent_as_vllm_takes_them_or_like_sound() -> None:
    parts = [
        {"type": "video_url", "video_url": {"url": CLIP}},
        {"type": "image_url", "image_url": {"url": PICTURE}},
        {"type": "input_video", "input_video": {"data": "AAAA", "format": "webm"}},
    ]
    earlier = [
        {"role": "user", "content": parts[:2]},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    conversation = parse_body(
        ChatRequest, chat(messages=[*earlier, {"role": "user", "content": [parts[2]]}])
    ).conversation()
    history = [Exchange(question="q", answer="a", media=["img0", "vid0"])]
    assert conversation == Conversation("", [PICTURE], [CLIP, "data:video/webm;base64,AAAA"], history)


def trajectory() -> Trajectory:
    view = ImageView(id="obs1", uri="data:image/png;base64,BBBB", parent="img0")
    return Trajectory(
        question_id="q",
        images=[ImageView(id="img0", uri="data:image/png;base64,CCCC"), view],
        turns=[
            Turn(role="user", tokens=[1, 2, 3], images=["img0"]),
            Turn(role="assistant", text="zoom", tokens=[4, 5], log_probs=[-1.0, -1.0]),
            Turn(role="tool", tokens=[6], observation=Observation(status="ok", id="obs1", images=[view])),
            Turn(role="assistant", text="7", tokens=[7], log_probs=[-0.5]),
        ],
        answer="7",
        stop_reason=StopReason.ANSWER,
    )


def test_a_reply_shows_pictures_once_and_no_tokens() -> None:
    shown = without_tokens(trajectory(), {"img0": "data:a", "obs1": "data:b"})
    assert [i.uri for i in shown.images] == ["data:a", "data:b"]
    assert shown.observations[0].images[0].uri == ""
    assert shown.token_ids() == []
    assert Trajectory.model_validate_json(shown.model_dump_json()) == shown


def test_usage_counts_the_prompt_once() -> None:
    expected = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert Usage.of([trajectory(), trajectory()]).model_dump() == expected


def test_no_answer_gives_a_refusal() -> None:
    unanswered = trajectory().model_copy(update={"answer": None, "stop_reason": StopReason.LENGTH})
    verdict = Verdict(answer=None, confidence=0.0, strategy="majority", reason="no_answer")
    question = Question(id=unanswered.question_id, question="which?", task="serve", split="serve")
    group = Group(id=unanswered.group_id, question=question, trajectories=[unanswered], policy_version=3)
    answer = Answer(verdict, group, unanswered, None)
    reply = ChatCompletion.of("m", answer, 0.1).model_dump(mode="json")
    assert reply["choices"][0]["message"]["content"] is None
    assert "length" in reply["choices"][0]["message"]["refusal"]
    assert reply["choices"][0]["finish_reason"] == "length"


@given(st.text(max_size=8), st.text(min_size=1, max_size=8), st.lists(st.integers(1, 5), max_size=60))
def test_log_probs_are_those_of_the_tokens_that_spell_the_answer(
    thought: str, answer: str, cuts: list[int]
) -> None:
    text = f"{thought}<answer>{answer}</answer>".encode("utf-8", "replace")
    answer = answer.encode("utf-8", "replace").decode()
    pieces, place = list[bytes](), 0
    for size in [*cuts, len(text)]:
        pieces.append(text[place : place + size])
        place += size
    pieces = [piece for piece in pieces if piece]
    turn = Turn(
        role="assistant", tokens=list(range(len(pieces))), log_probs=[-float(i) for i in range(len(pieces))]
    )
    turn.top_log_probs = [[(7, -float(i))] * (i % 3) for i in range(len(pieces))]
    top = [f"{i}".encode() for i in range(len(pieces)) for _ in range(i % 3)]
    trajectory = Trajectory(question_id="q", turns=[turn], answer=answer)
    found = LogProbs.of(trajectory, answer, pieces, top)
    spelled = b"".join(bytes(token.bytes) for token in found.content)
    assert answer.encode() in spelled
    assert len(spelled) < len(answer.encode()) + 10 + max(len(piece) for piece in pieces) * 2
    assert [token.logprob for token in found.content] == [-float(i) for i in range(len(pieces))][
        int(-found.content[0].logprob) : int(-found.content[-1].logprob) + 1
    ]
    for token in found.content:
        place = int(-token.logprob)
        assert [(likely.token, likely.logprob) for likely in token.top_logprobs] == [
            (str(place), token.logprob)
        ] * (place % 3)
    assert LogProbs.of(trajectory, answer, [b"x"] * len(pieces), top) is None or answer == "x" * len(answer)


def test_a_request_has_the_services_priority_or_its_own() -> None:
    config = load(None, ["serve.priority=3"])
    for body, priority in (({}, 3), ({"priority": 9}, 9), ({"priority": -2}, -2)):
        query = agent_query(config, parse_body(AgentRequest, json.dumps({"question": "q", **body}).encode()))
        assert query.sampling.priority == priority
    assert refused(ChatRequest, chat(priority=101)).param == "priority"
