"""The gateway over real HTTP: the official client, caps, keys, overload, failures, learning."""

from __future__ import annotations

import base64
import io
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import ray
from gateway_helpers import error_of, messages, publish, until
from PIL import Image
from scripted import KEY, Deployed, picture_url

from pixelis.actors.group_views import fetch
from pixelis.records import Trajectory

pytestmark = pytest.mark.slow


# -- the official client -------------------------------------------------------------------------------------


def complete(client: openai.OpenAI, question: str = "say 7", **options: Any) -> Any:
    asked = {"model": "pixelis-nano", "messages": messages(question, picture_url())}
    return client.chat.completions.create(**asked | options)


def test_the_openai_client_works_unchanged(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["pixelis-nano"]
    assert client.models.retrieve("pixelis-nano").owned_by == "pixelis"
    reply = complete(client, "say 7,8,7,7", user="x")
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("7", "stop")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 12)
    assert reply.system_fingerprint == "policy-0"
    assert reply.model_extra["pixelis"]["confidence"] == 0.75


def test_the_openai_client_sees_typed_errors(deployed: Deployed, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="pixelis-nano"):
        complete(client, model="gpt-9")
    with pytest.raises(openai.BadRequestError, match="data URL"):
        complete(client, messages=messages("q", "https://example.com/a.png"))
    wrong = openai.OpenAI(base_url=f"{deployed.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_a_conversation_is_the_context_of_its_last_question(
    deployed: Deployed, client: openai.OpenAI
) -> None:
    answered, last = {"role": "assistant", "content": "seven"}, {"role": "user", "content": "recall"}
    reply = complete(client, messages=[*messages("say 7", picture_url()), answered, last])
    assert reply.choices[0].message.content == "seven 1 of 1"
    earlier = {"question": "say 7", "image": picture_url(), "answer": "seven"}
    assert deployed.ask("recall", history=[earlier, earlier]).json()["answer"] == "sevenseven 11 of 3"


def test_several_choices_end_before_a_stop(client: openai.OpenAI) -> None:
    question = "say 7up,8,7up,none"
    reply = complete(client, question, n=4, stop="p")
    assert [c.message.content for c in reply.choices] == ["7u", "8", "7u", None]
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    assert reply.choices[3].message.refusal
    greedy = complete(client, question, n=2, temperature=0)
    assert [c.message.content for c in greedy.choices] == ["7up", "7up"]
    stream = complete(client, question, n=2, stop=["u", "p"], stream=True)
    streamed = [c.choices[0] for c in stream if c.choices]
    assert ["".join(c.delta.content or "" for c in streamed if c.index == n) for n in (0, 1)] == ["7", "8"]
    with pytest.raises(openai.BadRequestError, match="at most 4"):
        complete(client, n=5)


def test_answers_have_the_log_probs_of_their_tokens(client: openai.OpenAI) -> None:
    def ask(**options: Any) -> Any:
        return complete(client, "say 7,8,7,none", logprobs=True, **options).choices

    choices = ask(n=4)
    assert [choice.logprobs and choice.logprobs.content[0].token for choice in choices] == [
        "7",
        "8",
        "7",
        None,
    ]
    token = choices[0].logprobs.content[0]
    assert (token.logprob, token.bytes, token.top_logprobs) == (-0.3, [55], [])
    stream = complete(client, "say 7,8,7,none", logprobs=True, stream=True)
    streamed = [c.choices[0] for c in stream if c.choices and c.choices[0].logprobs]
    assert [(c.delta.content, c.logprobs.content[0].logprob) for c in streamed] == [("7", -0.3)]
    (token,) = ask(top_logprobs=3)[0].logprobs.content
    likely = [(likely.token, likely.bytes, likely.logprob) for likely in token.top_logprobs]
    assert likely == [("7", [55], -0.3), ("8", [56], -1.3), ("9", [57], -2.3)]


# -- the agent -----------------------------------------------------------------------------------------------


def test_the_agent_returns_verdict_and_trajectory(deployed: Deployed) -> None:
    response = deployed.ask("say 8,7,7,7", learn=False)
    assert response.status_code == 200
    reply = response.json()
    assert (reply["answer"], reply["confidence"], reply["policy_version"]) == ("7", 0.75, 0)
    assert [v["answer"] for v in reply["verdict"]["votes"]] == ["8", "7", "7", "7"]
    trajectory = Trajectory.model_validate(reply["trajectory"])
    assert trajectory.answer == "7"
    assert trajectory.images[0].source_size == (40, 30)
    assert trajectory.images[1].box == (0.25, 0.25, 0.75, 0.75)
    crop = np.asarray(Image.open(io.BytesIO(base64.b64decode(trajectory.images[1].uri.partition(",")[2]))))
    assert crop.shape == (8, 8, 3)
    assert (crop == 200).all()
    assert 0 < reply["seconds"] < deployed.config.serve.timeout_s


def test_the_agent_follows_the_parameters(deployed: Deployed) -> None:
    direct = deployed.ask("say 7", operations=False, samples=3).json()
    assert len(direct["verdict"]["votes"]) == 3
    assert direct["trajectory"]["turns"][1]["action"] is None
    greedy = deployed.ask("say 7", temperature=0).json()
    assert len(greedy["verdict"]["votes"]) == 1
    assert error_of(deployed.ask("say 7", samples=5))["param"] == "samples"
    assert error_of(deployed.ask("say 7", max_turns=99))["param"] == "max_turns"


# -- caps ----------------------------------------------------------------------------------------------------


def test_large_bodies_are_refused_before_they_are_read(deployed: Deployed) -> None:
    headers, chunks = {"Content-Type": "application/json"}, (b" " * 100_000 for _ in range(200))
    with deployed.client() as client:
        announced = client.post("/v1/agent", content=b" " * 1_000_001, headers=headers)
        chunked = client.post("/v1/chat/completions", content=chunks, headers=headers)
    for response in (announced, chunked):
        assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
    assert deployed.ask("say 7", learn=False).status_code == 200


def test_a_failure_shows_no_internals_and_the_key_is_in_no_log(deployed: Deployed) -> None:
    deployed.ask("say 7", learn=False)
    response = deployed.ask("break")
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    assert list(logs.rglob("*Gateway*"))
    for path in logs.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path


# -- load, deadlines, failures -------------------------------------------------------------------------------


def test_a_deadline_cancels_the_work(deployed: Deployed) -> None:
    before = deployed.counters()["cancelled"]
    response = deployed.ask("wait 30")
    assert (response.status_code, error_of(response)["code"]) == (504, "timeout")
    assert until(lambda: deployed.counters()["cancelled"] == before + 1)


def test_disconnecting_cancels_the_work(deployed: Deployed) -> None:
    before = deployed.counters()
    with deployed.client(timeout=httpx.Timeout(30, read=1.0)) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/agent", json={"question": "wait 4.5", "image": picture_url()})
    assert until(lambda: deployed.counters()["cancelled"] > before["cancelled"])


def test_a_dying_generator_is_replaced_by_another(deployed: Deployed) -> None:
    up = {"status": "ok", "generators": 2, "memory": "ok"}
    for question in ("die0 say 7", "die1 say 8"):
        response = deployed.ask(question, learn=False)
        assert response.status_code == 200, response.text
        assert until(lambda: deployed.ask("say 7", learn=False).status_code == 200)
        with deployed.client(key=None) as client:
            assert until(lambda: client.get("/healthz").json() == up)


def test_bad_input_found_behind_the_generator_is_a_400(deployed: Deployed) -> None:
    response = deployed.ask("nested")
    assert (response.status_code, error_of(response)["code"]) == (400, "image_undecodable")


def test_rates_are_counted_by_client_address(deployed: Deployed) -> None:
    """Behind Serve's own proxies, and whatever the client's own X-Forwarded-For says."""
    headers = {"Authorization": f"Bearer {KEY}", "X-Forwarded-For": "9.9.9.9"}
    body = {"question": "say 7", "image": picture_url(), "learn": False}

    def remaining(address: str) -> str:
        with httpx.Client(transport=httpx.HTTPTransport(local_address=address), headers=headers) as client:
            reply = client.post(f"{deployed.url}/v1/agent", json=body)
        return reply.headers["x-ratelimit-remaining-requests"]

    addresses = "127.0.0.2", "127.0.0.2", "127.0.0.3"
    assert [remaining(address) for address in addresses] == ["99999", "99998", "99999"]


# -- learning ------------------------------------------------------------------------------------------------


def test_only_confident_on_policy_answers_become_updates(deployed: Deployed) -> None:
    before = deployed.stats()
    for question, changes in [
        ("say 7,8,7,8", {}),  # a tie
        ("say 7,7,8,9", {}),  # below the gate
        ("say none", {}),
        ("say 7", {"learn": False}),
        ("say 7", {"temperature": 0.3}),
        ("say 7", {"operations": False}),
        ("say 7", {"samples": 2}),
    ]:
        assert deployed.ask(question, **changes).status_code == 200
    assert deployed.ask("say 7,7,7,8").status_code == 200
    assert until(lambda: deployed.stats()["received"] > before["received"])
    time.sleep(0.3)
    assert deployed.stats()["received"] == before["received"] + 1
    with deployed.client() as client:
        status = client.get("/v1/evolution").json()
    assert (status["enabled"], status["policy_version"], status["updates"]) == (True, 0, 0)
    assert status["queue"] == deployed.stats()["queue"] >= 1


def test_votes_become_a_batch_and_a_version(deployed: Deployed) -> None:
    """The learner gets scored groups with advantages and views; afterwards replies carry the new version."""
    before = deployed.stats()
    # As many as the queue holds, of one user each, so that those of other tests are dropped
    for i in range(4):
        deployed.ask("say 7,7,7,8", user=f"voter {i}")
    assert until(lambda: deployed.stats()["received"] == before["received"] + 4)
    assert deployed.stats()["queue"] == 4
    assert deployed.stats()["dropped"] == before["dropped"] + before["queue"]
    ray.get(deployed.evolution.begin.remote(0, {}, 0))
    batch = ray.get(deployed.evolution.next_batch.remote(0, 1, 0), timeout=60)
    assert len(batch.groups) == len(batch.views) == 2
    for group, views in zip(batch.groups, fetch(batch.views), strict=True):
        assert [t.reward for t in group.trajectories] == [1, 1, 1, 0]
        assert sum(t.advantage for t in group.trajectories) == pytest.approx(0, abs=1e-3)
        assert group.trajectories[3].advantage < 0 < group.trajectories[0].advantage
        assert [len(views[t.id]) for t in group.trajectories] == [2, 2, 2, 2]
    version = publish(0.25)
    ray.get(deployed.evolution.step_done.remote(0, version))
    assert until(lambda: deployed.ask("say 7", learn=False).json()["policy_version"] == version)
    with deployed.client() as client:
        status = client.get("/v1/evolution").json()
        assert (status["policy_version"], status["updates"]) == (version, 1)
        client.post("/v1/evolution/rollback", json={})  # as other tests expect it
