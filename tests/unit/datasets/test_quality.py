"""Rules, the score without a model, and a judge behind a real HTTP server."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from chat_server import ChatServer
from refined import SCORE, demonstration, zoom

from pixelis.config import JudgeConfig as JudgeSettings
from pixelis.config.refinement import QualityConfig
from pixelis.datasets.refinement import judging, quality
from pixelis.operations import OPERATIONS
from pixelis.records import Observation, Step


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({}, None),
        ({"question": "Which?"}, "question_length"),
        ({"question": "Which digit? " * 60}, "question_length"),
        ({"turns": [Step(answer="7")]}, "length"),
        ({"zooms": 11}, "length"),
        ({"turns": [Step(op="teleport", think="t"), Step(answer="7")]}, "unknown_op"),
        ({"turns": [zoom(), Step(answer=" ")]}, "missing_field"),
        ({"answers": None}, "missing_field"),
        ({"provenance": None}, "no_provenance"),
        ({"scorer": "levenstein"}, "unknown_scorer"),
    ],
)
def test_rules(fields: dict, cause: str | None):
    assert quality.rule_violation(demonstration(**fields), OPERATIONS, QualityConfig()) == cause


def test_every_fault_lowers_its_component_of_the_score():
    good = quality.components(demonstration(), SCORE)
    assert good == {
        "completeness": 1.0,
        "coherence": 1.0,
        "correctness": 1.0,
        "efficiency": 1.0,
        "complexity": pytest.approx(0.5 * 2 / 4 + 0.5 / 3),
        "consistency": 1.0,
    }
    assert quality.heuristic(demonstration(), SCORE) == pytest.approx(0.9 + 0.1 * good["complexity"])

    def part(name: str, **fields) -> float:
        return quality.components(demonstration(**fields), SCORE)[name]

    assert part("completeness", provenance=None) == pytest.approx(0.8)
    answer = Step(think="the digit is 7", answer="7")
    assert part("coherence", turns=[zoom(target="obs9"), answer]) == pytest.approx(0.75)
    nonsense = [zoom(think="Lorem ipsum dolor"), Step(think="amet", answer="7")]
    assert part("coherence", turns=nonsense) == pytest.approx(0.25)
    assert part("correctness", answers=["8"]) == pytest.approx(0.5)
    failed = Observation(status="error", code="bad_box", text="no")
    assert part("correctness", turns=[zoom(observation=failed), Step(answer="7")]) == pytest.approx(0.5)
    assert part("efficiency", turns=[zoom(1), zoom(1), Step(answer="7")]) == pytest.approx(0.5)
    assert part("consistency", turns=[zoom(), Step(think="it must be eight", answer="7")]) == 0
    assert part("consistency", turns=[zoom(), Step(answer="7")]) == 0.5
    asked = {"question": "Which digit is in the frame?\nA. 3\nB. 7", "answers": ["B"], "scorer": "mc_letter"}
    assert part("consistency", turns=[zoom(), Step(think="it is a seven: 7", answer="B")], **asked) == 1
    assert part("consistency", turns=[zoom(), Step(think="it is a seven: 7", answer="A")], **asked) == 0


def test_weights():
    assert quality.weight("golden", 0.81) == pytest.approx(0.9)
    assert quality.weight("trap_logical", 1.0) == 1.5
    assert quality.weight("self_correction", 0.25) == pytest.approx(0.6)
    assert quality.weight("golden", 0.0) > 0


@pytest.fixture
def server(opened: Callable) -> ChatServer:
    return opened(ChatServer())


def rated(score: int, why: str = "fine") -> str:
    return json.dumps({"score": score, "why": why})


def client(server: ChatServer) -> judging.QualityJudge:
    reached = JudgeSettings(url=server.url, model="m", api_key_env="", tries=2, concurrency=1)
    return judging.QualityJudge(reached)


def test_the_judge_scores_one_to_five_and_reads_the_turns(server: ChatServer):
    server.replies = [rated(9), rated(4), rated(2)]
    judge = client(server)
    verdicts = list(judging.judge_all([demonstration("a"), demonstration("b", zooms=1)], judge))
    assert [f.score for f in verdicts] == [4.0, 2.0]  # 9 is no verdict: asked again
    sent = server.requests[0]
    assert sent["temperature"] == pytest.approx(0.7)
    shown = json.loads(sent["messages"][1]["content"])
    assert [turn.get("operation") for turn in shown["turns"]] == ["zoom_in", "zoom_in", None]


def test_a_failed_judgement_has_a_cause_and_no_score(server: ChatServer):
    server.replies = ["I like it"]
    judge = client(server)
    (verdicts,) = judging.judge_all([demonstration()], judge)
    assert (verdicts.score, verdicts.failure) == (None, "judge_garbage")
