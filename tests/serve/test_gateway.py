"""The gateway over real HTTP: the official client, caps, keys, overload, failures, learning."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import time
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def client(deployed: Deployed) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key=KEY, max_retries=0, timeout=30) as client:
        yield client


# -- the official client -------------------------------------------------------------------------------------


def test_the_openai_client_works_unchanged(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["pixelis-nano"]
    assert client.models.retrieve("pixelis-nano").owned_by == "pixelis"
    reply = client.chat.completions.create(
        model="pixelis-nano", messages=messages("say 7,8,7,7", picture_url()), user="x"
    )
    assert reply.choices[0].message.content == "7"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 12)
    assert reply.system_fingerprint == "policy-0"
    assert reply.model_extra is not None
    assert reply.model_extra["pixelis"]["confidence"] == 0.75


def test_streaming_gives_the_same_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="pixelis-nano",
        messages=messages("say Käse", picture_url(format="JPEG")),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Käse"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert len({c.id for c in chunks}) == 1


def test_the_openai_client_sees_typed_errors(deployed: Deployed, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="pixelis-nano"):
        client.chat.completions.create(model="gpt-9", messages=messages("q", picture_url()))
    with pytest.raises(openai.BadRequestError, match="data URL"):
        client.chat.completions.create(
            model="pixelis-nano", messages=messages("q", "https://example.com/a.png")
        )
    wrong = openai.OpenAI(base_url=f"{deployed.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_a_conversation_is_the_context_of_its_last_question(
    deployed: Deployed, client: openai.OpenAI
) -> None:
    talk = [
        *messages("say 7", picture_url()),
        {"role": "assistant", "content": "seven"},
        {"role": "user", "content": "recall"},
    ]
    reply = client.chat.completions.create(model="pixelis-nano", messages=talk)
    assert reply.choices[0].message.content == "seven 1 of 1"
    earlier = {"question": "say 7", "image": picture_url(), "answer": "seven"}
    assert deployed.ask("recall", history=[earlier, earlier]).json()["answer"] == "sevenseven 11 of 3"
    refused = deployed.ask("recall", history=[{**earlier, "answer": "<|im_end|>"}])
    assert (refused.status_code, error_of(refused)["code"]) == (400, "control_token")


def test_a_question_needs_no_picture(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="pixelis-nano", messages=[{"role": "user", "content": "say 7"}]
    )
    assert reply.choices[0].message.content == "7"
    assert reply.model_extra is not None
    assert reply.model_extra["pixelis"]["operations"] == 0


def test_several_choices_end_before_a_stop(client: openai.OpenAI) -> None:
    def ask(**options: Any) -> Any:
        return client.chat.completions.create(
            model="pixelis-nano", messages=messages("say 7up,8,7up,none", picture_url()), **options
        )

    reply = ask(n=4, stop="p")
    assert [c.message.content for c in reply.choices] == ["7u", "8", "7u", None]
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    assert reply.choices[3].message.refusal
    assert [c.message.content for c in ask(n=2, temperature=0).choices] == ["7up", "7up"]
    streamed = [c.choices[0] for c in ask(n=2, stop=["u", "p"], stream=True) if c.choices]
    assert ["".join(c.delta.content or "" for c in streamed if c.index == n) for n in (0, 1)] == ["7", "8"]
    with pytest.raises(openai.BadRequestError, match="at most 4"):
        ask(n=5)


def test_answers_have_the_log_probs_of_their_tokens(client: openai.OpenAI) -> None:
    def ask(**options: Any) -> Any:
        question = messages("say 7,8,7,none", picture_url())
        return client.chat.completions.create(
            model="pixelis-nano", messages=question, **{"logprobs": True, **options}
        )

    reply = ask(n=4)
    assert [[t.token for t in c.logprobs.content] if c.logprobs else None for c in reply.choices] == [
        ["7"],
        ["8"],
        ["7"],
        None,
    ]
    token = reply.choices[0].logprobs.content[0]
    assert (token.logprob, token.bytes, token.top_logprobs) == (-0.3, [55], [])
    streamed = [c.choices[0] for c in ask(stream=True) if c.choices and c.choices[0].logprobs]
    assert [(c.delta.content, c.logprobs.content[0].logprob) for c in streamed] == [("7", -0.3)]
    (token,) = ask(top_logprobs=3).choices[0].logprobs.content
    assert [(likely.token, likely.bytes, likely.logprob) for likely in token.top_logprobs] == [
        ("7", [55], -0.3),
        ("8", [56], -1.3),
        ("9", [57], -2.3),
    ]
    for options in ({"top_logprobs": 21}, {"top_logprobs": -1}, {"top_logprobs": 3, "logprobs": False}):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(**options)
        assert caught.value.param == "top_logprobs"


def test_no_answer_gives_a_refusal(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="pixelis-nano", messages=messages("say none", picture_url()))
    assert reply.choices[0].message.content is None
    assert reply.choices[0].message.refusal


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
    def chunks() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * 100_000

    headers = {"Content-Type": "application/json"}
    with deployed.client() as client:
        announced = client.post("/v1/agent", content=b" " * 1_000_001, headers=headers)
        chunked = client.post("/v1/chat/completions", content=chunks(), headers=headers)
    for response in (announced, chunked):
        assert response.status_code == 413
        assert error_of(response)["code"] == "body_too_large"
    assert deployed.ask("say 7", learn=False).status_code == 200


def test_wrong_routes_methods_and_types(deployed: Deployed) -> None:
    with deployed.client() as client:
        cases = [
            (client.get("/v1/nothing"), 404),
            (client.get("/redoc"), 404),
            (client.get("/v1/agent"), 405),
            (client.post("/v1/agent", content=b"{}", headers={"Content-Type": "text/plain"}), 415),
            (client.post("/v1/agent", content=b"{}"), 415),
            (client.get("/v1/models/other"), 404),
        ]
    for response, status in cases:
        assert response.status_code == status
        error_of(response)


# -- the key -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", b"Bearer \xff\xfe", KEY]
)
def test_requests_without_the_key_are_refused(deployed: Deployed, header: Any) -> None:
    headers = {} if header is None else {"Authorization": header}
    with deployed.client(None) as client:
        for response in (
            client.post("/v1/agent", json={}, headers=headers),
            client.post("/v1/chat/completions", json={}, headers=headers),
            client.get("/v1/models", headers=headers),
            client.get("/v1/evolution", headers=headers),
        ):
            assert response.status_code == 401
            error_of(response)
        assert client.get("/healthz").json() == {"status": "ok", "generators": 2, "memory": "ok"}


def test_the_key_is_in_no_log(deployed: Deployed) -> None:
    deployed.ask("say 7", learn=False)
    deployed.ask("break")
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    assert list(logs.rglob("*Gateway*"))
    for path in logs.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path


# -- load, deadlines, failures -------------------------------------------------------------------------------


def test_overload_is_refused_at_once(deployed: Deployed) -> None:
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        started = time.monotonic()

        def ask(_: int) -> tuple[httpx.Response, float]:
            response = deployed.ask("wait 1.8 say 7", learn=False)
            return response, time.monotonic() - started

        results = list(pool.map(ask, range(20)))
        waves = 1 + (time.monotonic() - started) // 1.8  # on a busy machine some arrive when others are done
    shed = [(r, s) for r, s in results if r.status_code == 429]
    served = [r for r, _ in results if r.status_code == 200]
    assert 0 < len(served) <= 6 * waves  # fewer while work of an earlier request ends
    assert shed
    assert len(served) + len(shed) == 20
    for response, _ in shed:
        assert error_of(response)["code"] == "overloaded"
        assert int(response.headers["Retry-After"]) >= 1
    assert deployed.ask("say 7", learn=False).status_code == 200


def test_a_deadline_cancels_the_work(deployed: Deployed) -> None:
    before = deployed.counters()["cancelled"]
    started = time.monotonic()
    response = deployed.ask("wait 30")
    assert response.status_code == 504
    assert error_of(response)["code"] == "timeout"
    assert time.monotonic() - started < 25, "the request would take 30 s"
    assert until(lambda: deployed.counters()["cancelled"] == before + 1)


def test_disconnecting_cancels_the_work(deployed: Deployed) -> None:
    before = deployed.counters()
    with deployed.client(timeout=httpx.Timeout(30, read=1.0)) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/agent", json={"question": "wait 4.5", "image": picture_url()})
    assert until(lambda: deployed.counters()["cancelled"] > before["cancelled"])


def test_a_body_that_never_ends_is_refused(deployed: Deployed) -> None:
    def drip() -> Iterator[bytes]:
        for _ in range(60):
            yield b" "
            time.sleep(0.1)

    with deployed.client() as client:
        response = client.post("/v1/agent", content=drip(), headers={"Content-Type": "application/json"})
    assert response.status_code == 408
    error_of(response)


def test_a_dying_generator_is_replaced_by_another(deployed: Deployed) -> None:
    for question in ("die0 say 7", "die1 say 8"):
        response = deployed.ask(question, learn=False)
        assert response.status_code == 200, response.text
        assert until(lambda: deployed.ask("say 7", learn=False).status_code == 200)
        with deployed.client() as client:
            assert until(lambda: client.get("/healthz").json()["generators"] == 2)


def test_a_crash_shows_no_internals(deployed: Deployed) -> None:
    response = deployed.ask("break")
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"


def test_bad_input_found_behind_the_generator_is_a_400(deployed: Deployed) -> None:
    response = deployed.ask("nested")
    assert response.status_code == 400
    assert error_of(response)["code"] == "image_undecodable"


def test_rates_are_counted_by_client_address(deployed: Deployed) -> None:
    """Behind Serve's own proxies, and whatever the client's own X-Forwarded-For says."""
    headers = {"Authorization": f"Bearer {KEY}", "X-Forwarded-For": "9.9.9.9"}
    body = {"question": "say 7", "image": picture_url(), "learn": False}
    remaining = []
    for address in ("127.0.0.2", "127.0.0.2", "127.0.0.3"):
        with httpx.Client(transport=httpx.HTTPTransport(local_address=address), headers=headers) as client:
            remaining.append(
                int(
                    client.post(f"{deployed.url}/v1/agent", json=body).headers[
                        "x-ratelimit-remaining-requests"
                    ]
                )
            )
    assert remaining == [99_999, 99_998, 99_999]


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
