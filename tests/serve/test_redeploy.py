"""Gateways change under load: no request fails and the engines stay as they are."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from scripted import KEY, Deployed, picture_url

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

CALLERS = 20
BODY = {"question": "wait 0.2 say 7", "image": picture_url()}


def wait_for_route(url: str, timeout_s: float = 60) -> None:
    """Wait until twenty new connections in a row reach the gateways."""
    deadline, reached = time.monotonic() + timeout_s, 0
    while reached < 20:
        assert time.monotonic() < deadline, "the proxy does not know the route"
        reached = reached + 1 if httpx.get(f"{url}/redeploy/healthz", timeout=10).status_code != 404 else 0


@pytest.fixture
def deploy(deployed: Deployed, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Deploys configs/cluster/serve.yaml as `serve deploy` does, with scripted engines."""

    def apply(**options: Any) -> None:
        file = yaml.safe_load(Path("configs/cluster/serve.yaml").read_text())
        engines, gateways = file["applications"]
        # Serve builds the application in a process of its own
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        environment = {"env_vars": {"PYTHONPATH": path}}
        engines |= {"import_path": "scripted_app:engines", "args": {}, "runtime_env": environment}
        gateways |= {"route_prefix": "/redeploy", "runtime_env": {"env_vars": {"PIXELIS_API_KEY": KEY}}}
        own = {"run.dir": str(tmp_path), "engine.workers": 2, "engine.max_num_seqs": 64, "serve.cache": 0}
        off = {"evolution.enabled": False, "memory.enabled": False}
        gateways["args"] = {"engines": "engines", **own, **off, **options}
        schema = ServeDeploySchema.model_validate({"applications": [engines, gateways]})
        client = _get_global_client()
        client.deploy_apps(schema, _blocking=True)
        wait_for_route(deployed.url)

    yield apply
    for name in ("gateways", "engines"):
        serve.delete(name)


def engines() -> set[int]:
    """Processes of the generators and of the replica that owns them."""
    titles = ("ray::ScriptedGenerator", "ray::ServeReplica:engines:System")
    found = set()
    # The cluster's processes, not those of another one
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found |= {process.pid} if " ".join(process.cmdline()).startswith(titles) else set()
    return found


@dataclass
class Reply:
    """Start (monotonic), duration, status or error, and number of votes of a reply."""

    at: float
    seconds: float
    status: int | str
    votes: int


@contextmanager
def callers(url: str, count: int, replies: list[Reply]) -> Iterator[None]:
    """Callers that each send one request after the other until the end of the block."""
    stop = threading.Event()

    headers = {"Authorization": f"Bearer {KEY}"}

    def call() -> None:
        with httpx.Client(base_url=f"{url}/redeploy", timeout=60, headers=headers) as client:
            while not stop.is_set():
                at, votes = time.monotonic(), 0
                status: int | str
                try:
                    reply = client.post("/v1/agent", json=BODY)
                    status = reply.status_code
                    votes = len(reply.json()["verdict"]["votes"]) if reply.is_success else 0
                except httpx.HTTPError as error:
                    status = type(error).__name__
                replies.append(Reply(at, time.monotonic() - at, status, votes))

    with ThreadPoolExecutor(count) as pool:
        calls = [pool.submit(call) for _ in range(count)]
        try:
            yield
        finally:
            stop.set()
        for done in calls:
            done.result()


def test_a_changed_option_of_the_gateways_fails_no_request_and_leaves_the_engines(
    deployed: Deployed, deploy: Callable[..., None], record_figures: Callable[..., None]
) -> None:
    deploy(**{"serve.samples": 4})
    before, replies = engines(), list[Reply]()
    assert len(before) >= 3
    with callers(deployed.url, CALLERS, replies):
        time.sleep(2)
        started = time.monotonic()
        deploy(**{"serve.samples": 2})
        deployed_s = time.monotonic() - started
        time.sleep(5)
    record_figures(requests=len(replies), slowest_s=max(r.seconds for r in replies), deploy_s=deployed_s)
    failures = Counter((round(reply.at - started), reply.status) for reply in replies if reply.status != 200)
    assert not failures, (deployed_s, failures)  # second after the order to deploy, and status
    assert {reply.votes for reply in replies} == {4, 2}
    assert {reply.votes for reply in replies if reply.at > started + deployed_s + 4} == {2}
    assert engines() == before
