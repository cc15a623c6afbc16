"""Fixtures: one deployed gateway on real Ray Serve, Evolution and memory, with scripted generators."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import openai
import pytest
import ray
from browser_helpers import Opened, chromium, views
from gateway_helpers import STORE
from playwright.sync_api import Browser
from scripted import KEY, Deployed, ScriptedEmbedder, ScriptedGenerator, free_port

from pixelis.actors.evolution import Evolution
from pixelis.actors.memory_shard import place_shards
from pixelis.actors.policy_store import PolicyStore
from pixelis.config import Config, load
from pixelis.serve import app
from pixelis.serve.agent_types import Backends
from pixelis.serve.keys import KeyFile, key_file

GENERATORS = ("scripted-0", "scripted-1")
EVOLUTION, EMBEDDER = "evolution-under-test", "embedder-under-test"


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    """The configuration of the deployed service, with further overrides."""
    limits = ["engine.workers=2", "engine.max_num_seqs=8", "serve.samples=4", "serve.replicas=1"]
    limits += ["serve.max_queue=2", "serve.timeout_s=5", "serve.max_body_bytes=1000000"]
    limits += ["serve.max_question_chars=500", "toolbox.max_image_pixels=1000000", "dialogue.max_images=3"]
    limits += ["serve.per_minute=100000", "memory.cpus=0", "memory.write_timeout_s=4"]
    own = ["evolution.batch=2", "evolution.queue=4", "evolution.cold_start=0", "evolution.per_minute=6000"]
    own += ["evolution.canary.enabled=false"]
    own += ["evolution.max_share_per_question=1"]  # tests ask the same question again
    own += ["evolution.neighbours.k=0"]  # earlier tests' experiences must not vote
    own += ["telemetry.traces=file", "telemetry.logs=true"]
    own += [f"serve.port={free_port()}", f"run.dir={tmp_path_factory.mktemp('served')}"]
    return lambda *more: load(None, [*limits, *own, *more])


@pytest.fixture(scope="session")
def backends(ray_cluster: None, settings: Callable[..., Config]) -> Iterator[Backends]:
    """Two scripted generators, a scripted embedder, Evolution and a memory shard."""
    config = settings()
    generators = [ScriptedGenerator.options(name=name).remote(i) for i, name in enumerate(GENERATORS)]
    store = PolicyStore.options(name=STORE).remote(config.run.dir)
    embedder = ScriptedEmbedder.options(name=EMBEDDER).remote()
    names, shards = place_shards(config, "under-test")
    evolution = Evolution.options(name=EVOLUTION).remote(config, generators, store, memory=names)
    ray.get([actor.health.remote() for actor in [*generators, evolution, *shards]])
    yield Backends(GENERATORS, ray.get_runtime_context().namespace, EVOLUTION, tuple(names), EMBEDDER)
    for actor in [*generators, embedder, evolution, store, *shards]:
        ray.kill(actor)


@pytest.fixture(scope="session")
def deployed(backends: Backends, settings: Callable[..., Config]) -> Iterator[Deployed]:
    """Two generators of 8 sequences, 4 samples a request: 4 requests run, 2 wait, the next is refused after
    at most 5 s.
    """
    config = settings()
    previous = os.environ.get("PIXELIS_API_KEY")
    os.environ["PIXELIS_API_KEY"] = KEY
    try:
        url = app.start(config, backends)
    finally:
        os.environ.pop("PIXELIS_API_KEY")
        if previous is not None:
            os.environ["PIXELIS_API_KEY"] = previous
    generators = [ray.get_actor(name) for name in GENERATORS]
    yield Deployed(config, url, generators, ray.get_actor(EVOLUTION))
    app.stop()


@pytest.fixture(scope="session")
def client(deployed: Deployed) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the deployed service."""
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key=KEY, max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def file(deployed: Deployed) -> Iterator[KeyFile]:
    """The keys of the deployed service, which are gone after the test: other gateways of its run would require
    one.
    """
    file = KeyFile(key_file(deployed.config))
    yield file
    file.path.unlink(missing_ok=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of pages come last: they share a browser, whose event loop would conflict with tests that run
    their own.
    """
    items.sort(key=lambda item: "browser" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def opened(browser: Browser, deployed: Deployed) -> Iterator[Opened]:
    """Opens views of the deployed service's page."""
    with views(browser, deployed.url) as opened:
        yield opened
