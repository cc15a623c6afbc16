"""The judge against a real HTTP server that answers, stalls, refuses and sends invalid replies."""

from __future__ import annotations

import json
import time

import pytest
from chat_server import ChatServer
from scored_episodes import episode, group

from pixelis import config
from pixelis.config import RewardsConfig
from pixelis.errors import BadConfig, DataFailure
from pixelis.rewards.judge import Judge, read_verdict
from pixelis.rewards.llm_client import completion
from pixelis.rewards.services import Services
from pixelis.rewards.terms import score_group

KEY = "TEST_JUDGE_KEY"


def verdict(score, why: str = "same") -> str:
    return json.dumps({"score": score, "why": why})


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = ChatServer(verdict(1))
    yield server
    server.close()


@pytest.fixture
def judge(server, monkeypatch):
    monkeypatch.setenv(KEY, "sesame")
    opened = []

    def build(*replies, cache=None, **settings) -> Judge:
        server.replies = list(replies) or server.replies
        values = {"url": server.url, "model": "tiny", "api_key_env": KEY, "timeout_s": 5, **settings}
        opened.append(Judge(config.JudgeConfig(**values), cache))
        return opened[-1]

    yield build
    for client in opened:
        client.close()


def code_of(judge: Judge, answer: str = "crimson") -> str:
    with pytest.raises(DataFailure) as error:
        judge.score("Which colour?", ["red"], answer)
    return error.value.code


def test_a_verdict(server, judge, monkeypatch):
    monkeypatch.setenv("OPENAI_ORG_ID", "mine")
    assert judge(verdict(1)).score("Which colour?", ["red"], "crimson") == 1.0
    (request,) = server.requests
    expected = ("/v1/chat/completions", "tiny", 0.0)
    assert (request["path"], request["model"], request["temperature"]) == expected
    expected = {"accepted": ["red"], "question": "Which colour?", "student": "crimson"}
    assert json.loads(request["messages"][1]["content"]) == expected
    sent = {name.lower(): value for name, value in server.headers[0].items()}
    assert sent["authorization"] == "Bearer sesame"
    assert not {"openai-organization", "openai-project"} & set(sent), (
        "nothing of the user's account goes to another server"
    )


def test_requests_to_busy_and_broken_servers_are_retried(server, judge):
    started = time.monotonic()
    answers = [(429, {"Retry-After": "0.2"}), (500, {}), b"<html>", verdict(0)]
    assert judge(*answers).score("Which colour?", ["red"], "blue") == 0.0
    assert [r["temperature"] for r in server.requests] == [0.0, 0.2, 0.4, 0.6]
    assert 0.2 < time.monotonic() - started < 30


@pytest.mark.parametrize(
    "reply",
    [
        "", "1", "right", "[1]", '{"score": 2, "why": ""}', '{"score": "1"}', '{"score": true}', '{"score": NaN}',
        '{"why": "x"}', '{"score": 1, "why": "x", "more": 1}', 'Sure! {"score": 1, "why": "x"}',
        '{"score": 0.5, "why": ""}',
    ],
)  # fmt: skip
def test_invalid_verdicts_are_rejected(reply):
    with pytest.raises(ValueError):
        read_verdict(reply)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"null", b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}', b"[" * 99999],
)
def test_invalid_completions_are_rejected(body):
    with pytest.raises(ValueError):
        completion(body)


@pytest.mark.parametrize("around", ["%s", "<think>hm</think>\n%s", "```json\n%s\n```"])
def test_thoughts_and_fences_around_a_verdict_are_cut_off(around):
    assert read_verdict(around % verdict(1, "x")) == (1.0, "x")


@pytest.mark.parametrize(
    ("replies", "tries", "code", "requests"),
    [
        (["nonsense"], 3, "judge_garbage", 3),
        ([(500, {})], 2, "judge_error", 2),
        ([(429, {"Retry-After": "0"})], 2, "judge_busy", 2),
        ([(401, {})], 5, "judge_refused", 1),
    ],
)
def test_persistent_failures_have_a_code_and_are_not_cached(replies, tries, code, requests, server, judge):
    client = judge(*replies, tries=tries)
    assert code_of(client) == code
    assert len(server.requests) == requests
    server.replies = [verdict(1)]
    assert client.score("Which colour?", ["red"], "crimson") == 1.0


def test_a_judge_that_stalls_or_is_away_has_a_code(judge):
    started = time.monotonic()
    assert code_of(judge(30.0, timeout_s=0.3, tries=2)) == "judge_timeout"
    assert time.monotonic() - started < 10
    assert code_of(judge(url="http://127.0.0.1:9/v1", tries=2)) == "judge_error"


def test_no_redirect_is_followed_and_no_key_is_sent_without_one(server, judge, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "not for this server")
    elsewhere = ChatServer(verdict(1))
    client = judge((307, {"Location": f"{elsewhere.url}/chat/completions"}), tries=1, api_key_env="")
    assert code_of(client) == "judge_refused"
    elsewhere.close()
    assert elsewhere.requests == []
    assert "authorization" not in {name.lower() for name in server.headers[0]}


def test_verdicts_are_cached_in_memory_and_on_disk(server, judge, tmp_path):
    cache = tmp_path / "run" / "judge.sqlite"
    first = judge(verdict(1), cache=cache)
    assert [first.score("?", ["red"], "crimson") for _ in range(3)] == [1.0] * 3
    assert (first.client.counts, len(server.requests)) == ({"asked": 1, "cached": 2}, 1)
    restarted = judge(verdict(0), cache=cache)
    assert restarted.score("?", ["red"], "crimson") == 1.0
    assert len(server.requests) == 1
    assert restarted.score("?", ["red"], "blue") == 0.0
    other = judge(verdict(0), cache=cache, model="larger")
    assert other.score("?", ["red"], "crimson") == 0.0


def test_a_group_is_judged_by_rule_first_and_each_answer_once(server, monkeypatch):
    monkeypatch.setenv(KEY, "sesame")

    def scored(*answers: str | None) -> list[tuple[float | None, str | None]]:
        settings = RewardsConfig(judge={"url": server.url, "model": "tiny", "api_key_env": KEY, "tries": 2})
        services = Services(settings)
        row = group(*map(episode, answers), answers=["red"], scorer="judge")
        trajectories = score_group(row, settings, services=services).trajectories
        services.close()
        return [(t.reward, t.unscored) for t in trajectories]

    # How long an answer may be is the preset's
    rewards = scored("Red", "crimson", "crimson", None, "x" * 1000)
    assert rewards == [(1.0, None), (1.0, None), (1.0, None), (0.0, None), (1.0, None)]
    assert len(server.requests) == 2
    server.replies = ["nonsense"]
    assert scored("red", "crimson") == [(1.0, None), (None, "judge_garbage")]


def test_a_required_judge_without_settings_stops_the_run(monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    url = {"url": "http://judge:8000/v1", "model": "tiny", "api_key_env": KEY}
    with pytest.raises(BadConfig, match=KEY):
        Services(RewardsConfig(judge=url)).check()
    with pytest.raises(BadConfig, match=r"rewards\.judge\.url"):
        Services(RewardsConfig(preset="mini-o3")).check()
    Services(RewardsConfig(judge={**url, "api_key_env": ""})).check()
    Services(RewardsConfig(preset="mini-o3", judge={"required": False})).check()
    Services(RewardsConfig(preset="r1v")).check()
