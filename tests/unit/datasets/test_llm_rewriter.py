"""A writer of thoughts against a real HTTP server: it words thoughts anew and can change nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from chat_server import ChatServer

from pixelis.config.synthesis import WriterConfig
from pixelis.datasets.synthesis.llm_rewriter import UNCHANGED, LlmRewriter, read_thoughts
from pixelis.errors import BadConfig, DataFailure
from pixelis.records import Demonstration, Observation, Provenance, Step

SEEN = Observation(status="ok", id="obs1", text="shows 100,200,300,400 of img0")
LOOKED = {"op": "zoom_in", "target": "img0", "arguments": {"box": [0.1, 0.2, 0.3, 0.4]}, "observation": SEEN}
READ = {"op": "read_text", "target": "obs1", "observation": Observation(status="ok", id="obs2", text="7")}
MADE = Demonstration(
    id="d",
    question="Which digit is in the red frame?",
    answers=["7"],
    provenance=Provenance(source="s", original_id="o", method="templates"),
    turns=[
        Step(think="I look at the frame.", **LOOKED),
        Step(**READ),
        Step(think="The text in obs2 settles it.", answer="7"),
    ],
)
GOOD = ["The red frame deserves a closer look.", "What was read in obs2 is the digit 7, so that is it."]


def said(*thoughts: str) -> str:
    return json.dumps({"thoughts": list(thoughts)})


@pytest.fixture
def writer(opened: Callable) -> Callable[..., tuple[LlmRewriter, ChatServer]]:
    def build(*replies: object, **settings: object) -> tuple[LlmRewriter, ChatServer]:
        server = opened(ChatServer(*replies))
        values = {"url": server.url, "model": "m", "api_key_env": "", "calls_per_minute": 60000, **settings}
        return opened(LlmRewriter(WriterConfig.model_validate(values), None)), server

    return build


def test_only_thoughts_change(writer: Callable) -> None:
    rewriter, server = writer(said(*GOOD))
    written = rewriter.rewrite(MADE)
    assert [turn.think for turn in written.turns] == [GOOD[0], None, GOOD[1]]
    bare = [turn.model_copy(update={"think": None}) for turn in MADE.turns]
    assert [turn.model_copy(update={"think": None}) for turn in written.turns] == bare
    assert str(written.provenance.writer).startswith("m ")
    assert written.model_copy(update={"turns": MADE.turns, "provenance": MADE.provenance}) == MADE
    (request,) = server.requests
    assert request["path"] == "/v1/chat/completions"
    assert json.loads(request["messages"][1]["content"])["question"] == MADE.question


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (said("It is the 7 I can guess.", GOOD[1]), "reveals the answer"),
        (said("I will see obs1 soon, no doubt.", GOOD[1]), "before it exists"),
        (said(GOOD[0]), "1 thoughts for 2"),
        (said("short", GOOD[1]), "characters"),
        (said("long " * 200, GOOD[1]), "characters"),
        (said("Now </think> I cheat", GOOD[1]), "tags"),
        (said("About 42 of them stand there.", GOOD[1]), "the unknown number"),
        ("no json", "JSON"),
        ("[1]", "reply|object"),
        (said("x").replace("thoughts", "turns"), "reply|object"),
        ('{"thoughts": [1, 2]}', "reply|object"),
    ],
)
def test_errors_in_a_reply_are_named(reply: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_thoughts(reply, MADE)


def test_a_last_thought_that_is_the_answer_is_refused() -> None:
    last = MADE.turns[2].model_copy(update={"answer": "a large brown dog"})
    sample = MADE.model_copy(update={"turns": [last]})
    with pytest.raises(ValueError, match="repeats the answer"):
        read_thoughts(said("A large brown dog"), sample)
    assert read_thoughts(said("The animal in front is large and brown"), sample)


def test_after_all_tries_the_template_stays_and_the_provenance_says_so(writer: Callable) -> None:
    rewriter, server = writer("nonsense")
    unchanged = rewriter.rewrite(MADE)
    assert unchanged.turns == MADE.turns
    assert unchanged.provenance.writer == UNCHANGED
    assert len(server.requests) == 3


def test_with_on_reject_drop_the_sample_is_dropped(writer: Callable) -> None:
    rewriter, _ = writer("nonsense", on_reject="drop")
    with pytest.raises(DataFailure) as error:
        rewriter.rewrite(MADE)
    assert error.value.code == "writer_rejected"


@pytest.mark.parametrize(
    ("reply", "code", "requests"),
    [((400, {}), "chat_refused", 1), ((503, {"Retry-After": "0"}), "chat_error", 3)],
)
def test_a_server_that_fails_is_no_rejection(
    writer: Callable, reply: tuple, code: str, requests: int
) -> None:
    rewriter, server = writer(reply)
    with pytest.raises(DataFailure) as error:
        rewriter.rewrite(MADE)
    assert error.value.code == code
    assert len(server.requests) == requests


def test_the_key_comes_from_the_environment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(BadConfig, match="NO_SUCH_KEY"):
        LlmRewriter(WriterConfig(url="http://127.0.0.1:1/v1", model="m", api_key_env="NO_SUCH_KEY"))
    with pytest.raises(BadConfig, match=r"synthesis\.writer\.url"):
        LlmRewriter(WriterConfig())
