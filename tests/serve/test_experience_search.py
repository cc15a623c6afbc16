"""``POST /v1/experiences/search``."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import ray
from gateway_helpers import STORE, error_of, own_client
from PIL import Image
from scripted import Deployed, picture_url

from pixelis.actors.evolution import Evolution
from pixelis.config import Config
from pixelis.serve.agent_types import Backends
from pixelis.serve.keys import KeyFile

pytestmark = pytest.mark.slow

PATH = "/v1/experiences/search"


def stripes(seed: int, format: str = "PNG") -> str:
    """A picture of 4 x 4 random cells."""
    cells = np.random.default_rng(seed).integers(0, 256, (4, 4, 3)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(cells.repeat(24, 0).repeat(24, 1)).save(buffer, format)
    return f"data:image/{format.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


@pytest.fixture(scope="module")
def asked(deployed: Deployed) -> list[str]:
    """Ids of three experiences: say 7, say 8 and say 9, each with its own picture."""
    questions = [f"say {answer} zebra{i}" for i, answer in enumerate("789")]
    replies = [
        deployed.ask(question, image=stripes(i), user="searcher") for i, question in enumerate(questions)
    ]
    return [reply.json()["experience_id"] for reply in replies]


def search(deployed: Deployed, by: str | None = None, **body: Any) -> list[str]:
    with deployed.client(by) if by else deployed.client() as client:
        reply = client.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["partial"] is False
    return [found["experience"]["id"] for found in reply.json()["data"]]


def test_experiences_are_found_by_words_and_by_a_similar_picture(
    deployed: Deployed, asked: list[str]
) -> None:
    assert set(search(deployed, text="Zebra")) == set(asked)
    assert search(deployed, text="9 zebra") == [asked[2]]
    assert search(deployed, text="quagga") == []
    assert search(deployed, image=stripes(1, "JPEG"), k=1) == [asked[1]]
    assert search(deployed, image=stripes(1), text="zebra0") == [asked[0]]
    assert search(deployed, image=stripes(1), user="searcher", k=2)[0] == asked[1]
    assert search(deployed, text="zebra", user="nobody") == []
    with deployed.client() as client:
        (first, *_) = client.post(PATH, json={"text": "say 8 zebra1", "image": stripes(1)}).json()["data"]
    assert first["similarity"] == pytest.approx(1, abs=1e-5)
    assert first["experience"]["verdict"]["answer"] == "8"
    assert all(turn["tokens"] == [] for turn in first["experience"]["trajectory"]["turns"])


def test_a_search_counts_no_retrieval(deployed: Deployed, asked: list[str]) -> None:
    search(deployed, text="zebra")
    shard = ray.get_actor("under-test-memory-0")
    (row,) = [row for _, row in ray.get(shard.list_rows.remote(200, None, None)) if row[0] == asked[0]]
    assert row[3] == 0


def test_a_key_finds_its_own_experiences_alone(deployed: Deployed, asked: list[str], file: KeyFile) -> None:
    shop, bank = (file.create(name, ["ask"]) for name in ("search-shop", "search-bank"))
    reader = file.create("search-reader", ["read"])
    picture = {"image": stripes(0)}
    own = deployed.ask("say 7 okapi", key=shop, user="anna", **picture).json()["experience_id"]
    assert search(deployed, by=shop, text="say") == search(deployed, by=shop, **picture) == [own]
    assert search(deployed, by=shop, text="okapi", user="anna") == [own]
    assert search(deployed, by=shop, text="okapi", user="bob") == []
    assert search(deployed, by=bank, text="okapi") == search(deployed, by=bank, **picture) == []
    assert (
        search(deployed, by=reader, text="okapi")
        == search(deployed, by=reader, text="okapi", key="search-shop")
        == [own]
    )
    with deployed.client(bank) as client:
        refused = client.post(PATH, json={"text": "okapi", "key": "search-shop"})
    assert (refused.status_code, error_of(refused)["code"]) == (403, "missing_scope")


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"text": " "}, 400, "missing_parameter", "text"),
        ({"text": "x" * 501}, 400, "question_too_long", "text"),
        ({"text": "a", "k": 51}, 400, "invalid_value", "k"),
        ({"text": "a", "key": "no name!"}, 400, "invalid_value", "key"),
        ({"image": "file:///etc/passwd"}, 400, "image_scheme", "image"),
        ({"image": "data:image/png;base64,AAAA"}, 400, "image_undecodable", "image"),
        ({"image": picture_url((2000, 1000))}, 400, "image_too_many_pixels", "image"),
    ],
)
def test_bad_searches_are_refused(
    deployed: Deployed, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    with deployed.client() as client:
        reply = client.post(PATH, json=body)
    error = error_of(reply)
    assert (reply.status_code, error["code"], error["param"]) == (status, code, param), reply.text


def test_an_experience_says_that_an_update_was_made_of_it(
    settings: Callable[..., Config], backends: Backends, tmp_path: Path
) -> None:
    config = settings(f"run.dir={tmp_path}")
    generators = [ray.get_actor(name) for name in backends.generators]
    evolution = Evolution.options(name="updating").remote(
        config, generators, ray.get_actor(STORE), memory=backends.memory
    )
    ray.get(evolution.health.remote())

    async def statuses() -> list[str]:
        async with own_client(config, replace(backends, evolution="updating")) as client:
            for i, say in enumerate(("7", "8", "1,2,3,4")):
                body = {"question": f"say {say} tapir", "image": stripes(i)}
                assert (await client.post("/v1/agent", json=body)).status_code == 200
            incarnation = await evolution.begin.remote(0, {"base": 0}, 0)
            assert await evolution.next_batch.remote(0, 1, 0, incarnation) is not None
            await evolution.step_done.remote(0, None, incarnation)
            marks: dict[str, str] = {}
            async with asyncio.timeout(30):
                while list(marks.values()).count("processed") < 2:
                    await asyncio.sleep(0.05)
                    found = [
                        one["experience"]
                        for one in (await client.post(PATH, json={"text": "tapir"})).json()["data"]
                    ]
                    marks = {one["verdict"]["answer"]: one["status"] for one in found}
            return [marks["7"], marks["8"], marks["1"]]

    try:
        # No samples agreed about the third
        assert asyncio.run(statuses()) == ["processed", "processed", "pending"]
    finally:
        ray.kill(evolution)


def test_without_a_memory_nothing_can_be_searched(
    settings: Callable[..., Config], backends: Backends
) -> None:
    async def reply() -> httpx.Response:
        async with own_client(settings("memory.enabled=false"), backends) as client:
            return await client.post(PATH, json={"text": "a"})

    refused = asyncio.run(reply())
    assert (refused.status_code, error_of(refused)["code"]) == (404, "no_memory")
