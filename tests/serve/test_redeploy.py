"""`serve deploy` with another option of the gateways, under load: no request fails and the engines stay as they are."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CALLERS = 20
BODY = {"question": "wait 0.2 say 7", "image": picture_url()}


@pytest.fixture
def deploy(deployed: Deployed, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Deploys configs/cluster/serve.yaml as `serve deploy` does, with scripted engines and options of the gateways."""

    def apply(**options: Any) -> None:
        file = yaml.safe_load(Path("configs/cluster/serve.yaml").read_text())
        engines, gateways = file["applications"]
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])  # Serve builds the application in a process of its own
        engines |= {"import_path": "scripted_app:engines", "args": {}, "runtime_env": {"env_vars": {"PYTHONPATH": path}}}
        gateways |= {"route_prefix": "/redeploy", "runtime_env": {"env_vars": {"PIXELIS_API_KEY": KEY}}}
        gateways["args"] = {"engines": "engines", "run.dir": str(tmp_path), "engine.workers": 2, "engine.max_num_seqs": 64}
        gateways["args"] |= {"evolution.enabled": False, "memory.enabled": False, "serve.cache": 0, **options}
        schema = ServeDeploySchema.model_validate({"applications": [engines, gateways]})
        client = _get_global_client()
        client.deploy_apps(schema, _blocking=True)

    yield apply
    for name in ("gateways", "engines"):
        serve.delete(name)


def engines() -> set[int]:
    """Processes of the generators and of the replica that owns them."""
    titles = ("ray::ScriptedGenerator", "ray::ServeReplica:engines:System")
    found = set()
    for process in psutil.Process().children(recursive=True):  # the cluster's processes, not those of another one
        with contextlib.suppress(psutil.Error):
            found |= {process.pid} if " ".join(process.cmdline()).startswith(titles) else set()
    return found


def test_a_changed_option_of_the_gateways_fails_no_request_and_leaves_the_engines(
    deployed: Deployed, deploy: Callable[..., None], record_figures: Callable[..., None]
) -> None:
    deploy(**{"serve.samples": 4})
    before, stop = engines(), threading.Event()
    assert len(before) >= 3
    replies: list[tuple[float, float, int | str, int]] = []

    def call() -> None:
        with httpx.Client(base_url=f"{deployed.url}/redeploy", timeout=60, headers={"Authorization": f"Bearer {KEY}"}) as client:
            while not stop.is_set():
                at = time.monotonic()
                try:
                    reply = client.post("/v1/agent", json=BODY)
                    status, votes = reply.status_code, len(reply.json()["verdict"]["votes"]) if reply.is_success else 0
                except httpx.HTTPError as error:
                    status, votes = type(error).__name__, 0
                replies.append((at, time.monotonic() - at, status, votes))

    with ThreadPoolExecutor(CALLERS) as pool:
        calls = [pool.submit(call) for _ in range(CALLERS)]
        time.sleep(2)
        started = time.monotonic()
        deploy(**{"serve.samples": 2})
        deployed_s = time.monotonic() - started
        time.sleep(5)
        stop.set()
        for done in calls:
            done.result()
    statuses = Counter(status for *_, status, _ in replies)
    record_figures(
        requests=len(replies), failed=len(replies) - statuses[200], slowest_s=max(seconds for _, seconds, *_ in replies)
    )
    record_figures(deploy_s=deployed_s)
    assert set(statuses) == {200}, statuses
    assert {votes for *_, votes in replies} == {4, 2}
    assert {votes for at, *_, votes in replies if at > started + deployed_s + 4} == {2}
    assert engines() == before
