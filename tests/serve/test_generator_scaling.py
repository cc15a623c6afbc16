"""Generators of a service scale with the load and back, without a failed request."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import ray
from gateway_helpers import until
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError
from scripted import Deployed, ScriptedGenerator, picture_url

from pixelis.actors import generator_scaler
from pixelis.actors.generator_scaler import GeneratorScaler, Scaling
from pixelis.config import load
from pixelis.serve import app
from pixelis.serve.agent_types import Backends
from pixelis.serve.gateway import live_replicas
from pixelis.telemetry import events

MOST, CALLERS = 3, 24
BODY = {"question": "wait 2 say 7", "image": picture_url()}
"""Long enough that few requests a second, as a slow machine makes them, keep all generators busy."""


def test_a_peak_adds_a_generator_and_a_lull_removes_it() -> None:
    scaling = Scaling(1, 4, 5.0, 60.0)
    assert [scaling.wanted(1, 1.0, t) for t in (0, 4, 5, 6)] == [1, 1, 2, 1]
    scaling, loads = Scaling(1, 4, 5.0, 60.0), ((0, 1.0), (4, 0.1), (5, 1.0), (9, 1.0), (10, 1.0))
    assert [scaling.wanted(1, busy, t) for t, busy in loads] == [1, 1, 1, 1, 2]
    assert [scaling.wanted(2, 0.4, t) for t in (20, 79, 80)] == [2, 2, 1]
    # One generator would be nearly as busy as now
    assert [scaling.wanted(2, 0.9, t) for t in (100, 200)] == [2, 2]


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ([2, "late", "late", 1, 0], 5),
        (["late", ActorUnavailableError("restarts", b"1" * 16), 0], 3),
        ([2, ActorDiedError()], 2),
    ],
)
def test_a_retiring_generator_that_does_not_answer_is_not_taken_for_idle(
    answers: list[Any], asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Generator:
        """Answers health checks in turn with a number of episodes, late, or with an error."""

        def __init__(self) -> None:
            self.asked, self.health = 0, SimpleNamespace(remote=self.answer)

        async def answer(self) -> dict[str, int]:
            answer, self.asked = answers[self.asked], self.asked + 1
            if answer == "late":
                await asyncio.sleep(60)
            if isinstance(answer, Exception):
                raise answer
            return {"sessions": answer}

    monkeypatch.setattr(generator_scaler, "POLL_S", 0.001)
    overrides = [f"run.dir={tmp_path}", "engine.health_timeout_s=0.01", "engine.max_workers=2"]
    config = load(None, [*overrides, "engine.workers=1", "serve.timeout_s=30"])
    scaler = GeneratorScaler.__ray_metadata__.modified_class(config, "s", ["s-generator-0"], "store")
    generator, killed = Generator(), list[Any]()
    monkeypatch.setattr(generator_scaler.ray, "kill", killed.append)
    scaler.handles["s-generator-1"] = generator
    asyncio.run(scaler._retire("s-generator-1"))
    assert generator.asked == asked
    assert killed == ([] if isinstance(answers[-1], ActorDiedError) else [generator])


@ray.remote(num_cpus=0)
class Follower:
    """Stands in for Evolution: records the generators that it gets."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def use_generators(self, names: list[str]) -> None:
        if not self.seen or self.seen[-1] != names:
            self.seen.append(names)

    def history(self) -> list[list[str]]:
        return self.seen


def start(config: Any, store: str, index: int, name: str) -> tuple[Any, Any]:
    """As `placement.start_generator`, with a scripted generator."""
    from pixelis.actors.reservations import reserve

    return ScriptedGenerator.options(name=name).remote(index), reserve([{"CPU": 0.01}], name=name)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.long
def test_generators_scale_with_the_load_and_back(
    deployed: Deployed, tmp_path: Path, record_figures: Callable[..., None]
) -> None:
    overrides = ["engine.workers=1", f"engine.max_workers={MOST}", "engine.max_num_seqs=8", "serve.samples=2"]
    overrides += ["serve.cache=0", "serve.upscale_delay_s=1.5", "serve.downscale_delay_s=3"]
    overrides += ["serve.max_queue=64", "serve.replicas=1", "evolution.enabled=false", "memory.enabled=false"]
    config = load(None, [*overrides, f"run.dir={tmp_path}"])
    first = ScriptedGenerator.options(name="scaled-generator-0").remote(0)
    follower = Follower.options(name="scaled-evolution").remote()
    # Its process imports this file.
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    scaler = GeneratorScaler.options(
        name="scaled-scaler", runtime_env={"env_vars": {"PYTHONPATH": paths}}
    ).remote(config, "scaled", ["scaled-generator-0"], "store", "scaled-evolution", start)
    ray.get([first.ready.remote(), follower.history.remote(), scaler.generators.remote()])
    backends = Backends(("scaled-generator-0",), ray.get_runtime_context().namespace, scaler="scaled-scaler")
    serve.run(app.build(config, backends, None), name="scaled", route_prefix="/scaled")
    statuses, until_s = Counter[int](), [time.monotonic() + 90]

    def call() -> None:
        with httpx.Client(base_url=f"{deployed.url}/scaled", timeout=30) as client:
            while time.monotonic() < until_s[0]:
                statuses[client.post("/v1/agent", json=BODY).status_code] += 1

    def count() -> int:
        return len(ray.get(scaler.generators.remote()))

    def named() -> int:
        return sum(name.startswith("scaled-generator-") for name in ray.util.list_named_actors())

    def answers() -> bool:
        return httpx.post(f"{deployed.url}/scaled/v1/agent", json=BODY, timeout=30).status_code == 200

    threads = [threading.Thread(target=call) for _ in range(CALLERS)]
    try:
        # Serve's proxy may know the route of an application a moment later than `serve.run` returns.
        assert until(answers, 30)
        started = time.monotonic()
        for thread in threads:
            thread.start()
        assert until(lambda: count() == MOST, 60)
        grown_s = time.monotonic() - started
        actors = [ray.get_actor(f"scaled-generator-{i}") for i in range(MOST)]

        def all_work() -> bool:
            return all(row.get("rollouts", 0) > 0 for row in ray.get([a.counters.remote() for a in actors]))

        assert until(all_work, 30), "a generator of the list gets no work"
        until_s[0] = 0
        for thread in threads:
            thread.join(60)
        at = time.monotonic()
        assert until(lambda: count() == 1, 60)
        shrunk_s = time.monotonic() - at
        assert until(lambda: named() == 1, 60)
        assert [len(names) for names in ray.get(follower.history.remote())] == [1, 2, 3, 2, 1]
        assert answers()  # the one that stays admits no more than it can decode
    finally:
        until_s[0] = 0
        serve.delete("scaled")
        ray.get(scaler.stop.remote())
        for actor in (scaler, first, follower):
            ray.kill(actor)
    assert set(statuses) == {200}, statuses
    assert [row["generators"] for row in events.read(tmp_path, events.JOINED)] == [2, 3]
    assert [row["generators"] for row in events.read(tmp_path, events.LEFT)] == [2, 1]
    record_figures(grown_s=grown_s, shrunk_s=shrunk_s, requests=sum(statuses.values()))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.long
def test_a_gateway_knows_how_many_share_the_generators(deployed: Deployed) -> None:
    @serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0})
    class Counted:
        async def count(self) -> int:
            return await asyncio.to_thread(live_replicas)

    try:
        handle = serve.run(Counted.bind(), name="counted", route_prefix=None)
        assert until(lambda: handle.count.remote().result() == 2)
        serve.run(Counted.options(num_replicas=1).bind(), name="counted", route_prefix=None)
        assert until(lambda: handle.count.remote().result() == 1)
    finally:
        serve.delete("counted")
