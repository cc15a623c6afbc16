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
    name = deployed.ask("say 7 and write to anna@example.com", user="anna").json()["experience_id"]
    feedback = {"experience_id": name, "correct": False, "answer": "8", "comment": "says bob@example.com"}
    with deployed.client() as client:
        reply = client.post("/v1/feedback", json=feedback)
        assert (reply.status_code, reply.json()["count"]) == (200, 1), reply.text
        shown = client.get(f"/v1/experiences/{name}").json()
        experience = shown["experience"]
        assert "example.com" not in str(shown)
        assert experience["user"] not in (None, "anna")
        assert experience["trajectory"]["answer"] == "7"
        assert experience["feedback"][0]["answer"] == "8"
        assert all(turn["tokens"] == [] for turn in experience["trajectory"]["turns"])
        crop = Image.open(io.BytesIO(base64.b64decode(shown["pictures"]["obs1"].partition(",")[2])))
        assert (np.asarray(crop) == 200).all()
        listed = client.get("/v1/experiences", params={"user": "anna", "limit": 1}).json()
        assert [e["id"] for e in listed["data"]] == [name]
        assert client.get("/v1/experiences", params={"user": "ann"}).json()["data"] == []
        deleted = client.delete(f"/v1/experiences/{name}").json()
        assert deleted == {"object": "deleted", "deleted": 1, "ids": [name]}
        for reply in (client.get(f"/v1/experiences/{name}"), client.delete(f"/v1/experiences/{name}")):
            assert (reply.status_code, error_of(reply)["code"]) == (404, "not_found")
        assert client.post("/v1/feedback", json=feedback).status_code == 404
        events = client.get("/v1/evolution").json()["audit"]
        assert {"feedback", "deletion"} <= {event["event"] for event in events}


def test_all_experiences_of_a_user_are_listed_in_pages_and_deleted(deployed: Deployed) -> None:
    names = [deployed.ask("say 7", user="carla").json()["experience_id"] for _ in range(3)]
    other = deployed.ask("say 7", user="dora").json()["experience_id"]
    carla = {"user": "carla"}
    with deployed.client() as client:
        first = client.get("/v1/experiences", params={**carla, "limit": 2}).json()
        assert [e["id"] for e in first["data"]] == [names[2], names[1]]
        after = {**carla, "limit": 2, "before": first["next_before"]}
        rest = client.get("/v1/experiences", params=after).json()
        assert ([e["id"] for e in rest["data"]], rest["next_before"]) == ([names[0]], None)
        deleted = client.delete("/v1/experiences", params=carla).json()
        assert sorted(deleted["ids"]) == sorted(names)
        assert client.delete("/v1/experiences", params=carla).json()["deleted"] == 0
        assert client.get(f"/v1/experiences/{other}").status_code == 200


REFUSED = [
    ("POST", "/v1/feedback", {"experience_id": "exp_1", "correct": True}, 404),
    ("GET", "/v1/experiences?before=nan", None, 400),
    ("GET", "/v1/experiences?before=yesterday", None, 400),
    ("GET", "/v1/experiences/exp_unknown", None, 404),
    ("GET", "/v1/experiences/..%2f..%2fetc", None, 404),
    ("DELETE", "/v1/experiences", None, 400),
    ("DELETE", "/v1/experiences/exp_unknown", None, 404),
    ("GET", "/v1/review/task_unknown", None, 404),
    ("POST", "/v1/review/task_unknown", {"decision": "approve"}, 404),
    ("POST", "/v1/evolution/promote", {"version": 99}, 404),
    ("POST", "/v1/evolution/promote", {"version": 0}, 409),
    ("POST", "/v1/evolution/rollback", {"version": 99}, 404),
    ("POST", "/v1/evolution/rollback", {}, 409),
]
"""Orders whose bodies are valid; test_protocol has the others."""


def test_bad_orders_are_refused(deployed: Deployed) -> None:
    with deployed.client() as client:
        for method, path, body, status in REFUSED:
            response = client.request(method, path, json=body)
            assert response.status_code == status, response.text
            error_of(response)


# -- evolution -----------------------------------------------------------------------------------------------


def test_evolution_is_paused_promoted_and_rolled_back(deployed: Deployed) -> None:
    with deployed.client() as client:

        def status() -> dict[str, Any]:
            return client.get("/v1/evolution").json()

        def order(name: str, **body: Any) -> dict[str, Any]:
            response = client.post(f"/v1/evolution/{name}", json=body)
            assert response.status_code == 200, response.text
            return response.json()

        assert order("pause")["status"]["paused"] is True
        assert order("resume")["status"]["paused"] is False
        before, version = status()["policy_version"], publish(0.5)
        order("promote", version=version, force=True)
        assert deployed.ask("say 7", learn=False).json()["policy_version"] == version
        assert status()["policy_version"] == version
        assert {v["version"]: v["status"] for v in status()["versions"]}[version] == "promoted"
        order("rollback")
        assert until(lambda: deployed.ask("say 7", learn=False).json()["policy_version"] == before)
        assert {event["event"] for event in status()["audit"]} >= {"pause", "promotion", "rollback"}
        actors = [event["actor"] for event in status()["audit"]]
        assert any(actor.startswith("key ") and KEY not in actor for actor in actors)


def test_metrics_count_requests(deployed: Deployed) -> None:
    deployed.ask("say 7", learn=False)
    with deployed.client() as client:
        text = client.get("/metrics").text
    for name in ("requests_total", "request_seconds_bucket", "inside", "shed_total", "policy_version"):
        assert f"pixelis_{name}" in text
    assert 'route="/v1/agent",status="200"' in text
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
    async def official(http: httpx.AsyncClient) -> None:
        sdk = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http
        )
        asked: Any = {"model": "pixelis-nano", "messages": messages("say 7", picture_url())}
        raw = await sdk.chat.completions.with_raw_response.create(**asked)
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as caught:
            await sdk.chat.completions.create(**asked)
        assert caught.value.code == "rate_limit_exceeded"
        assert int(caught.value.response.headers["retry-after"]) > 0

    asyncio.run(call_app(settings("serve.per_minute=1"), backends, official))


def test_read_only_answers_and_writes_nothing(
    settings: Callable[..., Config], backends: Backends, deployed: Deployed
) -> None:
    def written() -> tuple[int, int]:
        memory = ray.get(ray.get_actor(backends.memory[0]).stats.remote())
        return deployed.stats()["received"], memory["size"]

    before = written()
    first, *orders, status = asyncio.run(
        call_app(
            settings("serve.read_only=true"),
            backends,
            ask("say 7,7,7,8", learn=True),
            lambda c: c.post("/v1/feedback", json={"experience_id": "exp_1", "correct": True}),
            lambda c: c.delete("/v1/experiences/exp_1"),
            lambda c: c.delete("/v1/experiences", params={"user": "anna"}),
            lambda c: c.post("/v1/evolution/pause", json={}),
            lambda c: c.post("/v1/review/a", json={"decision": "approve"}),
            lambda c: c.get("/v1/evolution"),
        )
    )
    assert (first.status_code, first.json()["answer"], first.json()["experience_id"]) == (200, "7", None)
    for reply in orders:
        assert (reply.status_code, error_of(reply)["code"]) == (403, "read_only")
    assert status.json()["read_only"] is True
    assert written() == before


def test_pictures_of_one_request_are_capped_together(
    settings: Callable[..., Config], backends: Backends
) -> None:
    config = settings(
        "toolbox.max_image_pixels=50000000", "dialogue.max_images=8", "serve.max_body_bytes=2000000"
    )
    buffer = io.BytesIO()
    Image.new("RGB", (7000, 7000)).save(buffer, "PNG")  # 95 kB
    huge = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    (reply,) = asyncio.run(call_app(config, backends, ask(image=[huge] * 8)))
    assert (reply.status_code, error_of(reply)["code"]) == (400, "image_too_many_pixels")
    assert "392000000 pixels" in error_of(reply)["message"]


def test_an_update_is_reviewed(settings: Callable[..., Config], backends: Backends, tmp_path: Path) -> None:
    config = settings("evolution.review.share=1", f"run.dir={tmp_path}")
    generators = [ray.get_actor(name) for name in backends.generators]
    evolution = Evolution.options(name="reviewing").remote(
        config, generators, ray.get_actor(STORE), memory=backends.memory
    )
    ray.get(evolution.health.remote())  # its start must not count against the gateway's timeouts

    async def waiting(client: httpx.AsyncClient, count: int) -> list[dict[str, Any]]:
        async with asyncio.timeout(10):
            while len(data := (await client.get("/v1/review")).json()["data"]) != count:
                await asyncio.sleep(0.05)
        return data

    async def decided(client: httpx.AsyncClient) -> None:
        id = (await ask("say 7,7,7,8", learn=True)(client)).json()["experience_id"]
        (review,) = await waiting(client, 1)
        path = f"/v1/review/{review['id']}"
        shown = (await client.get(path)).json()
        assert shown["object"] == "review"
        assert {url.partition(",")[0] for url in shown["pictures"].values()} == {"data:image/png;base64"}
        order = {"decision": "approve", "answer": "8", "comment": "an eight", "reviewer": "bob"}
        first = await client.post(path, json=order)
        assert (first.status_code, first.json()["result"]["queued"]) == (200, True), first.text
        second = await client.post(path, json={"decision": "reject"})
        assert (second.status_code, error_of(second)["code"]) == (409, "already_decided")
        assert await waiting(client, 0) == []
        (approved,) = (await client.get("/v1/review", params={"state": "approved"})).json()["data"]
        assert (approved["id"], approved["reviewer"], approved["answer"]) == (review["id"], "bob", "8")
        async with asyncio.timeout(10):  # the memory knows, so that a 7 neither votes nor is rehearsed
            while not (said := (await client.get(f"/v1/experiences/{id}")).json()["experience"]["feedback"]):
                await asyncio.sleep(0.05)
        assert said[0]["answer"] == "8"

    async def deleted(client: httpx.AsyncClient) -> None:
        id = (await ask("say 7,7,7,8", learn=True)(client)).json()["experience_id"]
        await waiting(client, 1)
        assert (await client.delete(f"/v1/experiences/{id}")).status_code == 200
        assert await waiting(client, 0) == []

    try:
        asyncio.run(call_app(config, dataclasses.replace(backends, evolution="reviewing"), decided, deleted))
    finally:
        ray.kill(evolution)


def test_the_status_says_what_candidates_have_learnt_from(deployed: Deployed) -> None:
    shares = {"tasks": 16, "users": 3, "user": "0a1b", "user_share": 0.25, "question_share": 0.125}
    details = {"version": 77, "shares": shares}
    ray.get(deployed.evolution.audit.remote("candidate", "learner", "publish", "success", details))
    with deployed.client() as client:
        status = client.get("/v1/evolution").json()
    (learnt,) = [entry for entry in status["learnt"] if entry["version"] == 77]
    assert {name: learnt[name] for name in shares} == shares
    assert len(status["audit"]) <= 20


def test_repeated_requests_use_the_cache(
    settings: Callable[..., Config], backends: Backends, deployed: Deployed
) -> None:
    requests: list[tuple[dict[str, Any], bool]] = [
        ({"seed": 1}, False),
        ({"seed": 1}, True),
        ({"seed": 2}, False),
        ({"seed": 1, "user": "anna"}, False),
        ({"seed": 1, "cache": False}, False),
        ({"temperature": 0}, False),
        ({"temperature": 0}, True),
        ({}, False),
        ({}, False),
        ({"cache": True}, False),
        ({"cache": True}, True),
    ]
    asked = {"model": "pixelis-nano", "seed": 3, "messages": messages("say 7", picture_url())}
    chats = [
        lambda c, more=more: c.post("/v1/chat/completions", json=asked | more)
        for more in ({}, {}, {"stream": True})
    ]
    rollouts = deployed.counters()["rollouts"]
    calls = [ask(**options) for options, _ in requests]
    *replies, chat, repeated, stream = asyncio.run(call_app(settings(), backends, *calls, *chats))
    agents, chat, repeated = [reply.json() for reply in replies], chat.json(), repeated.json()
    assert [agent["cached"] for agent in agents] == [cached for _, cached in requests]
    for field in ("answer", "experience_id"):
        assert agents[1][field] == agents[0][field]
    assert agents[1]["id"] != agents[0]["id"]
    assert [reply["pixelis"]["cached"] for reply in (chat, repeated)] == [False, True]
    assert repeated["id"] != chat["id"]
    assert stream.text.endswith("data: [DONE]\n\n")
    assert '"cached":true' in stream.text
    assert deployed.counters()["rollouts"] == rollouts + 9


def test_a_cached_reply_is_not_returned_for_another_version_or_after_deletion(
    settings: Callable[..., Config], backends: Backends
) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        async def kept(cached: bool) -> str:
            reply = (await ask("say 7,7,7,8", seed=9, learn=True)(client)).json()
            assert reply["cached"] is cached
            return reply["experience_id"]

        await kept(False)
        await kept(True)
        await client.post("/v1/evolution/promote", json={"version": publish(0.7), "force": True})
        await kept(False)
        await kept(True)
        await client.post("/v1/evolution/rollback", json={})
        await kept(False)
        id = await kept(True)
        assert (await client.delete(f"/v1/experiences/{id}")).status_code == 200
        await kept(False)
        id = await kept(True)
        assert await ray.get_actor(backends.memory[0]).delete.remote([id]), "through another gateway"
        await kept(False)

    asyncio.run(call_app(settings(), backends, scenario))


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
