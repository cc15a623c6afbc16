"""The routes of feedback, experiences, evolution, review and metrics; rates, cache and read-only mode."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import ray
from gateway_helpers import STORE, error_of, messages, own_client, publish, until
from PIL import Image
from placed_actors import wait_until
from scripted import KEY, Deployed, picture_url

from pixelis.actors.evolution import Evolution
from pixelis.actors.policy_store import PolicyStore
from pixelis.config import Config
from pixelis.errors import BadConfig
from pixelis.serve import app
from pixelis.serve.agent_types import Backends

pytestmark = pytest.mark.slow


# -- feedback and experiences --------------------------------------------------------------------------------


def test_an_answer_is_stored_gets_feedback_and_is_deleted(deployed: Deployed) -> None:
    answer = deployed.ask("say 7 and write to anna@example.com", user="anna").json()
    name = answer["experience_id"]
    with deployed.client() as client:
        feedback = {
            "experience_id": name,
            "correct": False,
            "answer": "8",
            "comment": "it is an eight, says bob@example.com",
        }
        reply = client.post("/v1/feedback", json=feedback)
        assert (reply.status_code, reply.json()["count"]) == (200, 1), reply.text
        shown = client.get(f"/v1/experiences/{name}").json()
        experience = shown["experience"]
        assert "example.com" not in str(shown)
        assert experience["user"] not in (None, "anna")
        assert experience["trajectory"]["answer"] == "7"
        assert experience["feedback"][0]["answer"] == "8"
        assert all(turn["tokens"] == [] for turn in experience["trajectory"]["turns"])
        crop = np.asarray(
            Image.open(io.BytesIO(base64.b64decode(shown["pictures"]["obs1"].partition(",")[2])))
        )
        assert (crop == 200).all()
        listed = client.get("/v1/experiences", params={"user": "anna", "limit": 1}).json()
        assert [e["id"] for e in listed["data"]] == [name]
        assert client.get("/v1/experiences", params={"user": "ann"}).json()["data"] == []
        assert client.delete(f"/v1/experiences/{name}").json() == {
            "object": "deleted",
            "deleted": 1,
            "ids": [name],
        }
        for reply in (client.get(f"/v1/experiences/{name}"), client.delete(f"/v1/experiences/{name}")):
            assert (reply.status_code, error_of(reply)["code"]) == (404, "not_found")
        assert client.post("/v1/feedback", json=feedback).status_code == 404
        events = client.get("/v1/evolution").json()["audit"]
        assert {"feedback", "deletion"} <= {event["event"] for event in events}


def test_all_experiences_of_a_user_are_listed_in_pages_and_deleted(deployed: Deployed) -> None:
    names = [deployed.ask("say 7", user="carla").json()["experience_id"] for _ in range(3)]
    other = deployed.ask("say 7", user="dora").json()["experience_id"]
    with deployed.client() as client:
        assert until(lambda: len(client.get("/v1/experiences", params={"user": "carla"}).json()["data"]) == 3)
        first = client.get("/v1/experiences", params={"user": "carla", "limit": 2}).json()
        assert [e["id"] for e in first["data"]] == [names[2], names[1]]
        rest = client.get(
            "/v1/experiences", params={"user": "carla", "limit": 2, "before": first["next_before"]}
        ).json()
        assert ([e["id"] for e in rest["data"]], rest["next_before"]) == ([names[0]], None)
        assert sorted(client.delete("/v1/experiences", params={"user": "carla"}).json()["ids"]) == sorted(
            names
        )
        assert client.delete("/v1/experiences", params={"user": "carla"}).json()["deleted"] == 0
        assert until(lambda: client.get(f"/v1/experiences/{other}").status_code == 200)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/feedback", {"experience_id": "exp_1"}, 400),
        ("POST", "/v1/feedback", {"experience_id": "exp_1", "comment": "  "}, 400),
        ("POST", "/v1/feedback", {"experience_id": "exp_1", "correct": True}, 404),
        ("POST", "/v1/feedback", {"experience_id": "../x", "correct": True}, 400),
        ("POST", "/v1/feedback", {"experience_id": "exp_1", "correct": "yes"}, 400),
        ("POST", "/v1/feedback", {"experience_id": "exp_1", "answer": "a\x00"}, 400),
        ("POST", "/v1/feedback", {"experience_id": "exp_1", "answer": "x" * 1001}, 400),
        ("POST", "/v1/feedback", {"experience_id": "exp_1", "correct": True, "reward": 1}, 400),
        ("GET", "/v1/experiences?limit=0", None, 400),
        ("GET", "/v1/experiences?limit=9999", None, 400),
        ("GET", "/v1/experiences?limit=nan", None, 400),
        ("GET", "/v1/experiences?before=nan", None, 400),
        ("GET", "/v1/experiences?before=yesterday", None, 400),
        ("GET", "/v1/experiences?user=%00", None, 400),
        ("GET", "/v1/experiences/exp_unknown", None, 404),
        ("GET", "/v1/experiences/..%2f..%2fetc", None, 404),
        ("GET", "/v1/experiences/" + "x" * 500, None, 404),
        ("DELETE", "/v1/experiences", None, 400),
        ("DELETE", "/v1/experiences/exp_unknown", None, 404),
        ("GET", "/v1/review?state=maybe", None, 400),
        ("GET", "/v1/review/task_unknown", None, 404),
        ("POST", "/v1/review/task_unknown", {"decision": "approve"}, 404),
        ("POST", "/v1/review/task_unknown", {"decision": "perhaps"}, 400),
        ("POST", "/v1/review/task_unknown", {"decision": "reject", "answer": "7"}, 400),
        ("POST", "/v1/evolution/promote", {}, 400),
        ("POST", "/v1/evolution/promote", {"version": -1}, 400),
        ("POST", "/v1/evolution/promote", {"version": "1"}, 400),
        ("POST", "/v1/evolution/promote", {"version": 99}, 404),
        ("POST", "/v1/evolution/promote", {"version": 0}, 409),
        ("POST", "/v1/evolution/rollback", {"version": 99}, 404),
        ("POST", "/v1/evolution/rollback", {}, 409),
        ("POST", "/v1/evolution/rollback", {"force": True}, 400),
        ("POST", "/v1/evolution/pause", {"version": 3}, 400),
        ("POST", "/v1/evolution/erase", {}, 404),
    ],
)
def test_bad_orders_are_refused(deployed: Deployed, method: str, path: str, body: Any, status: int) -> None:
    with deployed.client() as client:
        response = client.request(method, path, json=body)
    assert response.status_code == status, response.text
    error_of(response)


# -- evolution -----------------------------------------------------------------------------------------------


def test_evolution_is_paused_promoted_and_rolled_back(deployed: Deployed) -> None:
    with deployed.client() as client:

        def order(name: str, **body: Any) -> dict[str, Any]:
            response = client.post(f"/v1/evolution/{name}", json=body)
            assert response.status_code == 200, response.text
            return response.json()

        assert order("pause")["status"]["paused"] is True
        assert order("resume")["status"]["paused"] is False
        before = client.get("/v1/evolution").json()["policy_version"]
        version = publish(0.5)
        order("promote", version=version, force=True)
        assert deployed.ask("say 7", learn=False).json()["policy_version"] == version
        status = client.get("/v1/evolution").json()
        assert status["policy_version"] == version
        assert {v["version"]: v["status"] for v in status["versions"]}[version] == "promoted"
        order("rollback")
        assert until(lambda: deployed.ask("say 7", learn=False).json()["policy_version"] == before)
        actions = [(event["event"], event["actor"]) for event in client.get("/v1/evolution").json()["audit"]]
        assert {event for event, _ in actions} >= {"pause", "promotion", "rollback"}
        assert any(actor.startswith("key ") and KEY not in actor for _, actor in actions)


def test_metrics_count_requests(deployed: Deployed) -> None:
    deployed.ask("say 7", learn=False)
    with deployed.client() as client:
        text = client.get("/metrics").text
    for name in (
        "pixelis_requests_total",
        "pixelis_request_seconds_bucket",
        "pixelis_inside",
        "pixelis_shed_total",
    ):
        assert name in text
    assert 'route="/v1/agent",status="200"' in text
    assert "pixelis_policy_version" in text
    assert KEY not in text


# -- the same routes under other configurations, in this process ---------------------------------------------


async def call_app(
    config: Config, backends: Backends, *calls: Callable[[httpx.AsyncClient], Any], host: str = "localhost"
) -> list:
    """Replies of ``calls``, one after another, from a gateway without a key in this process."""
    async with own_client(config, backends, host) as client:
        return [await call(client) for call in calls]


def ask(question: str = "say 7", **more: Any) -> Callable[[httpx.AsyncClient], Any]:
    body = {"question": question, "image": picture_url(), "learn": False, **more}
    return lambda client: client.post("/v1/agent", json=body)


def test_the_official_client_reads_the_rate_limits(
    settings: Callable[..., Config], backends: Backends
) -> None:
    async def official(client: httpx.AsyncClient) -> None:
        sdk = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=client
        )
        asked = {"model": "pixelis-nano", "messages": messages("say 7", picture_url())}
        raw = await sdk.chat.completions.with_raw_response.create(**asked)
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as caught:
            await sdk.chat.completions.create(**asked)
        assert caught.value.code == "rate_limit_exceeded"
        assert int(caught.value.response.headers["retry-after"]) > 0

    asyncio.run(call_app(settings("serve.per_minute=1"), backends, official))


def test_answers_are_stored_before_a_replica_stops(
    settings: Callable[..., Config], backends: Backends
) -> None:
    (reply,) = asyncio.run(call_app(settings(), backends, ask("say 7,7,7,8", learn=True)))
    row = ray.get(ray.get_actor(backends.memory[0]).row.remote(reply.json()["experience_id"]))
    assert row is not None


def test_read_only_answers_and_writes_nothing(
    settings: Callable[..., Config], backends: Backends, deployed: Deployed
) -> None:
    config = settings("serve.read_only=true")
    before, memory = deployed.stats(), ray.get(ray.get_actor(backends.memory[0]).stats.remote())
    calls = [
        lambda c: c.post("/v1/agent", json={"question": "say 7,7,7,8", "image": picture_url()}),
        lambda c: c.post("/v1/feedback", json={"experience_id": "exp_1", "correct": True}),
        lambda c: c.delete("/v1/experiences/exp_1"),
        lambda c: c.delete("/v1/experiences", params={"user": "anna"}),
        lambda c: c.post("/v1/evolution/pause", json={}),
        lambda c: c.post("/v1/evolution/promote", json={"version": 1}),
        lambda c: c.post("/v1/review/a", json={"decision": "approve"}),
        lambda c: c.get("/v1/evolution"),
    ]
    first, *orders, status = asyncio.run(call_app(config, backends, *calls))
    assert (first.status_code, first.json()["answer"], first.json()["experience_id"]) == (200, "7", None)
    for reply in orders:
        assert (reply.status_code, error_of(reply)["code"]) == (403, "read_only")
    assert status.json()["read_only"] is True
    after = deployed.stats()
    assert after["received"] == before["received"]
    now = ray.get(ray.get_actor(backends.memory[0]).stats.remote())
    assert now["size"] == memory["size"]


def test_an_update_is_reviewed(settings: Callable[..., Config], backends: Backends, tmp_path: Path) -> None:
    config = settings("evolution.review.share=1", f"run.dir={tmp_path}")
    generators = [ray.get_actor(name) for name in backends.generators]
    evolution = Evolution.options(name="reviewing").remote(
        config, generators, ray.get_actor(STORE), memory=backends.memory
    )
    ray.get(evolution.health.remote())  # its start must not count against the gateway's timeouts
    shown: dict[str, Any] = {}

    async def waiting(client: httpx.AsyncClient, count: int) -> list[dict[str, Any]]:
        for _ in range(100):
            data = (await client.get("/v1/review")).json()["data"]
            if len(data) == count:
                return data
            await asyncio.sleep(0.05)
        raise AssertionError(f"{len(data)} updates wait for review, not {count}")

    async def decided(client: httpx.AsyncClient) -> None:
        reply = (await ask("say 7,7,7,8", learn=True)(client)).json()
        (review,) = await waiting(client, 1)
        path = f"/v1/review/{review['id']}"
        shown.update((await client.get(path)).json())
        order = {"decision": "approve", "answer": "8", "comment": "an eight", "reviewer": "bob"}
        first = await client.post(path, json=order)
        assert (first.status_code, first.json()["result"]["queued"]) == (200, True), first.text
        second = await client.post(path, json={"decision": "reject"})
        assert (second.status_code, error_of(second)["code"]) == (409, "already_decided")
        assert await waiting(client, 0) == []
        (approved,) = (await client.get("/v1/review", params={"state": "approved"})).json()["data"]
        assert (approved["id"], approved["reviewer"], approved["answer"]) == (review["id"], "bob", "8")
        for _ in range(100):
            experience = (await client.get(f"/v1/experiences/{reply['experience_id']}")).json()["experience"]
            if experience["feedback"]:
                break
            await asyncio.sleep(0.05)
        assert experience["feedback"][0]["answer"] == "8", (
            "the memory knows, so that a 7 neither votes nor is rehearsed"
        )

    async def deleted(client: httpx.AsyncClient) -> None:
        reply = (await ask("say 7,7,7,8", learn=True)(client)).json()
        await waiting(client, 1)
        assert (await client.delete(f"/v1/experiences/{reply['experience_id']}")).status_code == 200
        assert await waiting(client, 0) == []

    try:
        asyncio.run(call_app(config, dataclasses.replace(backends, evolution="reviewing"), decided, deleted))
    finally:
        ray.kill(evolution)
    assert shown["object"] == "review"
    assert shown["pictures"]
    assert all(url.startswith("data:image/png;base64,") for url in shown["pictures"].values())


def test_the_status_says_what_candidates_have_learnt_from(deployed: Deployed) -> None:
    shares = {"tasks": 16, "users": 3, "user": "0a1b", "user_share": 0.25, "question_share": 0.125}
    ray.get(
        deployed.evolution.audit.remote(
            "candidate", "learner", "publish", "success", {"version": 77, "shares": shares}
        )
    )
    with deployed.client() as client:
        status = client.get("/v1/evolution").json()
    (learnt,) = [entry for entry in status["learnt"] if entry["version"] == 77]
    assert {name: learnt[name] for name in shares} == shares
    assert len(status["audit"]) <= 20


def test_repeated_requests_use_the_cache(
    settings: Callable[..., Config], backends: Backends, deployed: Deployed
) -> None:
    rollouts = deployed.counters()["rollouts"]
    body = {"model": "pixelis-nano", "seed": 3, "messages": None}
    parts = [{"type": "text", "text": "say 7"}, {"type": "image_url", "image_url": {"url": picture_url()}}]
    body["messages"] = [{"role": "user", "content": parts}]
    replies = asyncio.run(
        call_app(
            settings(),
            backends,
            ask(seed=1),
            ask(seed=1),
            ask(seed=2),
            ask(seed=1, user="anna"),
            ask(seed=1, cache=False),
            ask(temperature=0),
            ask(temperature=0),
            ask(),
            ask(),
            ask(cache=True),
            ask(cache=True),
            lambda c: c.post("/v1/chat/completions", json=body),
            lambda c: c.post("/v1/chat/completions", json=body),
            lambda c: c.post("/v1/chat/completions", json=body | {"stream": True}),
        )
    )
    *agents, chat, repeated, stream = [
        r.json() if "json" in r.headers["content-type"] else r.text for r in replies
    ]
    hits = [False, True, False, False, False, False, True, False, False, False, True]
    assert [r["cached"] for r in agents] == hits
    assert (agents[1]["answer"], agents[1]["experience_id"]) == (
        agents[0]["answer"],
        agents[0]["experience_id"],
    )
    assert agents[1]["id"] != agents[0]["id"]
    assert (chat["pixelis"]["cached"], repeated["pixelis"]["cached"], repeated["id"] == chat["id"]) == (
        False,
        True,
        False,
    )
    assert stream.endswith("data: [DONE]\n\n")
    assert '"cached":true' in stream
    assert deployed.counters()["rollouts"] == rollouts + hits.count(False) + 1


def test_a_cached_reply_is_not_returned_for_another_version_or_after_deletion(
    settings: Callable[..., Config], backends: Backends, deployed: Deployed
) -> None:
    asked: list[Any] = []

    async def kept(client: httpx.AsyncClient) -> bool:
        reply = (await ask("say 7,7,7,8", seed=9, learn=True)(client)).json()
        asked.append(reply)
        return reply["cached"]

    async def promote(client: httpx.AsyncClient) -> None:
        asked.append(
            (await client.post("/v1/evolution/promote", json={"version": publish(0.7), "force": True})).json()
        )

    async def roll_back(client: httpx.AsyncClient) -> None:
        await client.post("/v1/evolution/rollback", json={})

    async def delete(client: httpx.AsyncClient) -> None:
        assert (await client.delete(f"/v1/experiences/{asked[-1]['experience_id']}")).status_code == 200

    async def delete_elsewhere(client: httpx.AsyncClient) -> None:
        assert await ray.get_actor(backends.memory[0]).delete.remote([asked[-1]["experience_id"]])

    calls = [
        kept,
        kept,
        promote,
        kept,
        kept,
        roll_back,
        kept,
        kept,
        delete,
        kept,
        kept,
        delete_elsewhere,
        kept,
    ]
    cached = asyncio.run(call_app(settings(), backends, *calls))
    assert cached == [False, True, None, False, True, None, False, True, None, False, True, None, False]


def test_a_second_service_on_a_cluster_is_refused(deployed: Deployed) -> None:
    other = PolicyStore.options(name="demo-serve-0a1b2c-store").remote(f"{deployed.config.run.dir}/other")
    try:
        ray.get(other.list.remote())
        with pytest.raises(BadConfig, match=r"service of run 'demo' runs on this cluster"):
            app.require_no_other("mine-serve-ffffff")
        app.require_no_other("demo-serve-0a1b2c")
    finally:
        ray.kill(other)
    wait_until(lambda: "demo-serve-0a1b2c-store" not in str(ray.util.list_named_actors(all_namespaces=True)))
    app.require_no_other("mine-serve-ffffff")  # the route of a service that died is taken over
