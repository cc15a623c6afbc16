"""Imitated and distilled demonstrations: a real HTTP server plays the model, and answers are filtered."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_server import ChatServer

from pixelis.config.synthesis import TeacherConfig
from pixelis.datasets import packaged
from pixelis.datasets.questions import read_demonstrations
from pixelis.datasets.synthesis.distillation import Distiller, describe_annotations
from pixelis.datasets.synthesis.executor import Executor
from pixelis.datasets.synthesis.imitation import Imitator
from pixelis.errors import BadConfig, BadInput, DataFailure
from pixelis.protocol.errors import parse_body
from pixelis.records import (
    Action,
    Annotations,
    Demonstration,
    Exchange,
    Question,
    Region,
    Relation,
    StopReason,
    Trajectory,
    Turn,
    Verdict,
)
from pixelis.serve.protocol.agent import AgentReply, AgentRequest

EXECUTOR = Executor()
CALL = '<think>I look.</think><tool_call>{"name":"zoom_in","arguments":{"bbox_2d":[280,320,380,420]}}</tool_call>'
CALL_AGAIN = CALL.replace("[280,320,380,420]", '[100,100,900,900],"target":"obs1"')
RIGHT, WRONG = "<think>It is in the frame.</think><answer>7</answer>", "<think>Hm.</think><answer>4</answer>"


def served(answer: str, box: list[float], op: str = "zoom_in", **arguments: object) -> bytes:
    """What a gateway replies for an episode of one call."""
    action = Action(op=op, target="vid0" if arguments else "img0", arguments=arguments or {"box": box})
    turns = [
        Turn(role="user", text="?"),
        Turn(role="assistant", text=CALL, action=action),
        Turn(role="tool", text="obs1 = zoom_in(img0)"),
        Turn(role="assistant", text=RIGHT),
    ]
    played = Trajectory(question_id="q", turns=turns, answer=answer, stop_reason=StopReason.ANSWER)
    verdict = Verdict(answer=answer, confidence=1.0, strategy="majority")
    fields = {"model": "nano", "answer": answer, "confidence": 1.0, "policy_version": 3, "seconds": 0.1}
    reply = AgentReply(verdict=verdict, trajectory=played, remembered="no", **fields)
    return reply.model_dump_json().encode()


@pytest.fixture(scope="module")
def shown() -> list[Demonstration]:
    return read_demonstrations("cards:?split=train", 3, 5, 0.0)


@pytest.fixture
def imitator(opened: Callable, shown: list[Demonstration]) -> Callable:
    def build(*replies: object, **settings: object) -> tuple[Imitator, ChatServer]:
        server = opened(ChatServer(*replies))
        values = {"url": server.url, "model": "m", "api_key_env": "", "calls_per_minute": 60000, "tries": 2}
        teacher = TeacherConfig.model_validate({**values, **settings})
        return opened(Imitator(teacher, EXECUTOR, shown[1:])), server

    return build


def test_no_example_gives_the_answer_away(imitator: Callable, shown: list[Demonstration]) -> None:
    one, server = imitator(CALL, "<answer>" + str((shown[1].answers or [""])[0]) + "</answer>")
    one.play(shown[1].model_copy(update={"id": "another name"}))
    system = server.requests[0]["messages"][0]["content"]
    assert shown[1].question not in system
    assert shown[2].question in system
    assert "Example 2" not in system


def test_an_episode_is_played_with_real_operations(imitator: Callable, shown: list[Demonstration]) -> None:
    one, server = imitator(CALL, CALL_AGAIN, RIGHT)
    sample = one.play(shown[0])
    assert [turn.op for turn in sample.turns] == ["zoom_in", "zoom_in", None]
    assert [turn.target for turn in sample.turns] == ["img0", "obs1", None]
    assert sample.turns[1].observation.id == "obs2"
    assert sample.final == "7"
    assert (sample.provenance.method, sample.provenance.writer) == ("imitation", "m")
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("replies", "code"),
    [
        ([CALL, WRONG], "wrong_answer"),
        ([CALL.replace("[280,320,380,420]", "[380,320,280,420]"), RIGHT], "call_refused"),
        ([CALL_AGAIN, RIGHT], "call_refused"),
        ([CALL], "over_turn"),
        (["I would rather not say"], "chat_rejected"),
        ([(500, {"Retry-After": "0"})], "chat_error"),
        ([served("4", [0.28, 0.32, 0.38, 0.42])], "wrong_answer"),
        ([served("7", [0.5, 0.5, 0.5, 0.9])], "bad_box"),
        ([b'{"answer": "7"}'], "chat_garbage"),
    ],
)
def test_wrong_episodes_are_dropped_with_their_code(
    imitator: Callable, shown: list[Demonstration], replies: list, code: str
) -> None:
    plays = "gateway" if isinstance(replies[0], bytes) else "turns"
    one, _ = imitator(*replies, max_turns=3, plays=plays)
    with pytest.raises(DataFailure) as error:
        one.play(shown[0])
    assert error.value.code == code


def test_imitation_without_demonstrations_is_an_error() -> None:
    with pytest.raises(BadConfig, match="demonstrations to imitate"):
        Imitator(TeacherConfig(url="http://127.0.0.1:1", model="m", api_key_env=""), EXECUTOR, [])


def test_a_policy_behind_a_gateway_plays_episodes(imitator: Callable, shown: list[Demonstration]) -> None:
    one, server = imitator(served("7", [0.28, 0.32, 0.38, 0.42]), plays="gateway")
    sample = one.play(shown[0], draw=2)
    expected = [("zoom_in", "I look."), (None, "It is in the frame.")]
    assert [(turn.op, turn.think) for turn in sample.turns] == expected
    assert sample.turns[0].observation is not None
    (request,) = server.requests
    assert request.pop("path") == "/v1/agent"
    assert parse_body(AgentRequest, json.dumps(request).encode()).seed == 2


@pytest.fixture
def follow_up(tmp_path: Path) -> Question:
    """The second question of a conversation about a clip."""
    (clip,) = packaged.read("packaged:clips?event=cut&count=1", tmp_path)
    earlier = Exchange(question="Is this a clip?", answer="yes", media=["vid0"])
    return Question(
        id="c", question="How many scenes does it have?", history=[earlier], media=clip.media, answers=["2"]
    )


def test_a_gateway_gets_the_clip_and_the_conversation(imitator: Callable, follow_up: Question) -> None:
    one, server = imitator(served("2", [], "select_frames", frames=[3, 30]), plays="gateway")
    sample = one.play(follow_up)
    assert sample.history == follow_up.history
    assert [(turn.op, turn.target) for turn in sample.turns] == [("select_frames", "vid0"), (None, None)]
    assert [frame["index"] for frame in sample.turns[0].observation.data["frames"]] == [3, 30]
    (request,) = server.requests
    del request["path"]
    conversation = parse_body(AgentRequest, json.dumps(request).encode()).conversation()
    assert conversation.question == follow_up.question
    assert conversation.history == follow_up.history
    (url,) = request["history"][0]["video"]
    clip = base64.b64decode(url.removeprefix("data:video/mp4;base64,"))
    assert clip == Path(follow_up.media[0].uri).read_bytes()
    assert request["image"] == request["video"] == []


def ask(*replies: str, **fields: object) -> Question:
    values = {"id": "q", "question": "How many?", "answers": ["3"], "scorer": "count"}
    return Question.model_validate({**values, "meta": {"responses": list(replies)}, **fields})


GOOD = "<think>There are two on the left and one on the right.</think>\n<answer> 3 </answer>"


def test_a_right_reply_becomes_a_demonstration() -> None:
    sample = Distiller(TeacherConfig()).distil(ask(WRONG, GOOD), draw=1)
    (turn,) = sample.turns
    assert (turn.think, turn.answer) == ("There are two on the left and one on the right.", "3")
    assert sample.meta == {}
    assert sample.provenance.method == "distillation"


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (GOOD.replace("3", "4"), "wrong_answer"),
        ("<answer>3</answer>", "bad_format"),
        (GOOD + " Done.", "bad_format"),
        (GOOD.replace("left", "<answer>left</answer>"), "bad_format"),
        ("<think>Yes.</think><answer>3</answer>", "too_short"),
        (f"<think>{'long ' * 1000}</think><answer>3</answer>", "too_long"),
        ("<think>There are two on the left and one.</think><answer> </answer>", "bad_format"),
    ],
)
def test_other_replies_are_dropped_with_their_cause(reply: str, code: str) -> None:
    with pytest.raises(DataFailure) as error:
        Distiller(TeacherConfig()).distil(ask(reply))
    assert error.value.code == code


def test_requests_contain_the_annotations_as_text(opened: Callable) -> None:
    server = opened(ChatServer(GOOD))
    regions = [
        Region(id="a", label="cube", box=(0.1, 0.2, 0.3, 0.4), attributes={"colour": "red"}),
        Region(id="b", label="ball", box=(0.5, 0.2, 0.7, 0.4)),
    ]
    relation = Relation(subject="a", predicate="left of", object="b")
    annotations = Annotations(regions=regions, relations=[relation])
    teacher = TeacherConfig(url=server.url, model="r", api_key_env="", calls_per_minute=60000)
    one = opened(Distiller(teacher))
    sample = one.distil(ask(meta={}, annotations=annotations))
    assert sample.provenance.writer == "r"
    assert "- cube at [100, 200, 300, 400], colour red" in server.requests[0]["messages"][1]["content"]
    assert "- cube left of ball" in describe_annotations(annotations)


def test_rows_without_replies_need_a_model() -> None:
    with pytest.raises(BadInput, match=r"no meta\.responses"):
        Distiller(TeacherConfig()).distil(ask(meta={}))
    with pytest.raises(BadInput, match="neither text"):
        Distiller(TeacherConfig()).distil(ask(meta={"responses": [1]}))
    with pytest.raises(DataFailure) as error:
        Distiller(TeacherConfig()).distil(ask(GOOD), draw=1)
    assert error.value.code == "no_response"
