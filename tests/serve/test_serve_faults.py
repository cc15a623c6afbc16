"""Faults of a service under load."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import ray
from gateway_helpers import until
from ray import serve
from scripted import Deployed, ScriptedGenerator, picture_url

from pixelis.actors.memory_shard import MemoryShard
from pixelis.config import load
from pixelis.errors import BadConfig
from pixelis.jobs.serve import application
from pixelis.serve import app
from pixelis.serve.agent_types import Backends

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FULL = os.environ.get("PIXELIS_CHAOS") == "full"
LOAD_S, RATE = (60.0, 50) if FULL else (10.0, 4)
BODY = {"question": "say 7", "image": picture_url()}


@pytest.fixture(scope="module")
def service(deployed: Deployed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Two gateway replicas, two generators and two memory shards beside the application of the other tests; a
    client of it.
    """
    folder = tmp_path_factory.mktemp("faults")
    overrides = ["serve.replicas=2", "serve.max_queue=16", "serve.samples=1", "serve.timeout_s=20"]
    overrides += ["serve.cache=0", "engine.workers=2", "engine.max_num_seqs=8", "memory.shards=2"]
    overrides += ["evolution.enabled=false", f"run.dir={folder}"]
    config = load(None, overrides)
    generators = {f"faults-{i}": ScriptedGenerator.options(name=f"faults-{i}").remote(i) for i in range(2)}
    shards = {
        f"faults-shard-{i}": MemoryShard.options(name=f"faults-shard-{i}").remote(config, i) for i in range(2)
    }
    ray.get([actor.health.remote() for actor in [*generators.values(), *shards.values()]])
    backends = Backends(tuple(generators), ray.get_runtime_context().namespace, memory=tuple(shards))
    serve.run(app.build(config, backends, None), name="faults", route_prefix="/faults")
    limits = httpx.Limits(max_connections=128, max_keepalive_connections=128)
    with httpx.Client(base_url=f"{deployed.url}/faults", timeout=30, limits=limits) as client:
        yield client
    serve.delete("faults")
    for actor in [*generators.values(), *shards.values()]:
        ray.kill(actor)


def kill(title: str) -> int:
    """Send SIGKILL to the first process with that title; returns its pid."""
    victim = next(p for p in psutil.process_iter(["cmdline"]) if title in " ".join(p.info["cmdline"] or []))
    victim.kill()
    return victim.pid


def test_f11_killing_a_replica_a_generator_and_a_shard_under_load_loses_no_answer(
    service: httpx.Client, record_figures: Callable[..., None]
) -> None:
    answers: list[tuple[float, float, bool]] = []
    failures: Counter[int | str] = Counter()
    started = time.monotonic()

    def ask() -> None:
        at, ok, wait = time.monotonic(), False, 0.0
        for _ in range(3):
            time.sleep(wait)
            try:
                reply = service.post("/v1/agent", json=BODY)
                ok, wait = reply.status_code == 200, float(reply.headers.get("Retry-After", 1.0))
                failures[reply.status_code] += not ok
            except httpx.HTTPError as error:
                ok, wait = False, 1.0
                failures[type(error).__name__] += 1
            if ok:
                break
        answers.append((at - started, time.monotonic() - at, ok))

    deaths = []
    with ThreadPoolExecutor(64) as pool:
        titles = ["ray::ServeReplica:faults:Gateway", "ray::ScriptedGenerator", "ray::MemoryShard"]
        for number in range(int(LOAD_S * RATE)):
            pool.submit(ask)
            time.sleep(max(0.0, started + (number + 1) / RATE - time.monotonic()))
            if titles and time.monotonic() - started > LOAD_S * (4 - len(titles)) / 5:
                kill(titles.pop(0))
                deaths.append(time.monotonic() - started)
    share = np.mean([ok for *_, ok in answers])
    during = [s for at, s, _ in answers if any(0 <= at - death < 2 for death in deaths)]
    steady = [s for at, s, _ in answers if at < deaths[0]]
    record_figures(
        requests=len(answers), answered=float(share), p99_failover_s=float(np.quantile(during, 0.99))
    )
    record_figures(p99_steady_s=float(np.quantile(steady, 0.99)), failures_before_a_retry=dict(+failures))
    assert len(deaths) == 3
    assert share >= 0.99, dict(+failures)


def test_f12_requests_above_capacity_are_refused_at_once_and_the_others_answered(
    service: httpx.Client, record_figures: Callable[..., None]
) -> None:
    # So that also the requests of a slow machine are above capacity
    slow = {**BODY, "question": "wait 2 say 7"}

    def ask(_: int) -> tuple[float, httpx.Response]:
        at = time.monotonic()
        reply = service.post("/v1/agent", json=slow)
        return time.monotonic() - at, reply

    with ThreadPoolExecutor(128) as pool:
        replies = list(pool.map(ask, range(192)))
    accepted = [seconds for seconds, reply in replies if reply.status_code == 200]
    refused = [(seconds, reply) for seconds, reply in replies if reply.status_code in (429, 503)]
    record_figures(taken=len(accepted), refused=len(refused), taken_p99_s=float(np.quantile(accepted, 0.99)))
    record_figures(refused_p50_s=float(np.median([seconds for seconds, _ in refused])))
    assert len(accepted) + len(refused) == len(replies)
    assert len(refused) > len(accepted) > 0
    assert all(int(reply.headers["Retry-After"]) >= 1 for _, reply in refused)
    assert threading.active_count() < 200


@pytest.mark.long
def test_a_killed_proxy_is_replaced(service: httpx.Client, record_figures: Callable[..., None]) -> None:
    def answers() -> bool:
        try:
            return service.post("/v1/agent", json=BODY).status_code == 200
        except httpx.HTTPError:
            return False

    assert until(answers)
    kill("ray::ProxyActor")
    killed = time.monotonic()
    assert until(answers, 120)
    record_figures(back_after_s=time.monotonic() - killed)


def test_serve_run_builds_the_application_and_requires_a_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PIXELIS_API_KEY", raising=False)
    with pytest.raises(BadConfig, match="PIXELIS_API_KEY"):
        application({"run.dir": str(tmp_path)})
    monkeypatch.setenv("PIXELIS_API_KEY", "long and random")
    arguments = {"config": "configs/nano/serve.yaml", "serve.max_replicas": "3", "run.dir": str(tmp_path)}
    built = application(arguments)._bound_deployment
    assert built.name == "Gateway"
    assert built._deployment_config.autoscaling_config.max_replicas == 3
