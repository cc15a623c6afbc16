"""Rollouts on generators that come and go with their nodes. Prints one JSON line for test_elasticity.py.

The generators are time-dilated: each plays SLOTS groups at once, of SECONDS each.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
import yaml
from own_process import free_port
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID
from ray.cluster_utils import Cluster
from scripted import ScriptedGenerator

from pixelis.actors import placement
from pixelis.config import Config, parse
from pixelis.telemetry import events

SLOTS, SECONDS, GROUP = 2, 0.8, 2
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80_000_000}


@ray.remote(max_restarts=-1, max_task_retries=0, max_concurrency=1024)
class TimedGenerator(ScriptedGenerator.__ray_metadata__.modified_class):  # type: ignore[name-defined,misc]
    """Takes SECONDS for a group and plays SLOTS of them at a time."""

    def __init__(self, config: Config, store: str, index: int = 0):
        super().__init__(index)
        self.slots = asyncio.Semaphore(SLOTS)

    async def ready(self) -> None:
        """It has nothing to wait for."""

    async def _play(self, request):  # type: ignore[no-untyped-def]
        async with self.slots:
            await asyncio.sleep(SECONDS)
            return await super()._play(request)


def configuration(folder: str, most: int, **cluster: Any) -> Config:
    """A run of many small batches, in which a generator takes all CPUs of a worker node."""
    rft = {"steps": 10_000, "prompts_per_step": 4, "group_size": GROUP, "max_off_policy_steps": 4}
    return parse(
        {
            "run": {"dir": folder, "name": "elastic"},
            "policy": {"model": "nano"},
            "engine": {"workers": {"min": 1, "max": most}, "cpus": 1.4},
            "learner": {"cpus": 0.1},
            "toolbox": {"cpus": 0.1},
            "rewards": {"cpus": 0.1, "weights": {"accuracy": 1.0}},
            "rft": rft,
            "data": {"train": "cards:"},
            "cluster": {"address": "auto", **cluster},
        }
    )


class Learner:
    """Takes batches without learning from them, and notes when each group was handed out."""

    def __init__(self, coordinator: Any):
        self.coordinator, self.step, self.times, self.numbers = coordinator, 0, list[float](), list[int]()
        ray.get(coordinator.begin.remote(0, {}, 0))

    def able(self) -> int:
        """Generators that get work."""
        return int(ray.get(self.coordinator.progress.remote())["generators/able"])

    def take(self) -> None:
        """One batch."""
        batch = ray.get(self.coordinator.next_batch.remote(0, 1, self.step))
        self.times += [time.monotonic()] * len(batch.groups)
        self.numbers += batch.numbers
        ray.get(self.coordinator.step_done.remote(self.step, 0))
        self.step += 1

    def until(self, condition: Callable[[], bool], timeout_s: float = 60) -> float:
        """Take batches until the condition holds; returns the seconds."""
        started = time.monotonic()
        while not condition():
            if time.monotonic() - started > timeout_s:
                raise TimeoutError(f"{self.able()} generators after {timeout_s:g} s")
            self.take()
        return time.monotonic() - started

    def rate(self, seconds: float) -> float:
        """Groups a second from now on."""
        for _ in range(3):  # groups that were begun before
            self.take()
        first = len(self.times)
        self.until(lambda: self.times[-1] - self.times[first - 1] > seconds, 120)
        return (len(self.times) - first) / (self.times[-1] - self.times[first - 1])


def grow_and_shrink(folder: str) -> dict[str, Any]:
    """One generator, then two, then four as nodes are added, then two as nodes are killed."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80_000_000})
    nodes = [cluster.add_node(**NODE)]
    out: dict[str, Any] = {"joined_s": []}
    ray.init(cluster.address, log_to_driver=False)
    with placement.placed(configuration(folder, 4), job="grow") as actors:
        learner = Learner(actors.coordinator)
        rates = {1: learner.rate(5)}
        for count in (2, 4):
            while len(nodes) < count:
                nodes.append(cluster.add_node(**NODE))
                alive = len(nodes) + 1
                while nodes_alive() < alive:
                    time.sleep(0.05)
                out["joined_s"].append(learner.until(lambda: learner.able() == len(nodes)))
            rates[count] = learner.rate(5)
        for node in (nodes.pop(), nodes.pop()):
            node.kill_raylet()
        learner.until(lambda: learner.able() == 2)
        out["rate_after_the_loss"] = learner.rate(5)
        out["rates"] = rates
        ray.get(actors.coordinator.stop.remote())
    handed = Counter(learner.numbers)
    out["doubled"] = sum(n - 1 for n in handed.values())
    # Groups that were in flight at the end are missing among the last numbers only.
    out["lost"] = len(set(range(max(handed) - 5 * 4 * 2)) - set(handed))
    out["groups"] = len(learner.numbers)
    out["events"] = [row["generators"] for row in events.read(folder, events.JOINED)]
    ray.shutdown()
    cluster.shutdown()
    return out


@contextmanager
def autoscaling_cluster(folder: str) -> Iterator[str]:
    """A head that adds nodes as processes; Ray's AutoscalingCluster would first end every Ray process."""
    address = f"{ray.util.get_node_ip_address()}:{free_port()}"
    node = {"node_config": {}, "min_workers": 0}
    # Not `fake_multinode`, whose default configuration Ray's wheel lacks.
    provider = {"type": "external", "module": PROVIDER}
    provider |= {"gcs_address": address, "head_node_id": FAKE_HEAD_NODE_ID}
    settings: dict[str, Any] = {
        "cluster_name": "elastic",
        "max_workers": 3,
        "idle_timeout_minutes": 0.05,
        "upscaling_speed": 1.0,
        "provider": provider,
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {**node, "resources": {"CPU": 1}, "max_workers": 0},
            "worker": {**node, "resources": {"CPU": 2, "object_store_memory": 80_000_000}, "max_workers": 3},
        },
    }
    defaults = yaml.safe_load((Path(ray.__file__).parent / "autoscaler/local/defaults.yaml").read_text())
    settings = {**defaults, "head_start_ray_commands": [], "worker_start_ray_commands": [], **settings}
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = Path(folder) / "autoscaling.json"
    file.write_text(json.dumps(settings))
    ones = ("RAY_FAKE_CLUSTER", "AUTOSCALER_UPDATE_INTERVAL_S", "RAY_enable_autoscaler_v2")
    environment = dict.fromkeys(ones, "1")
    ids = ("RAY_CLOUD_INSTANCE_ID", "RAY_OVERRIDE_NODE_ID_FOR_TESTING")
    environment |= dict.fromkeys(ids, FAKE_HEAD_NODE_ID)
    program = str(Path(sys.executable).with_name("ray"))  # which PATH may lack
    command = [program, "start", "--head", "--block", f"--port={address.split(':')[1]}", "--num-cpus=1"]
    command += ["--object-store-memory=80000000", "--include-dashboard=false", f"--autoscaling-config={file}"]
    head = psutil.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    try:
        yield address
    finally:
        for process in (*head.children(recursive=True), head):
            with suppress(psutil.Error):
                process.kill()


def autoscale(folder: str) -> dict[str, Any]:
    """Three generators on a cluster that has no room for any of them and adds nodes by itself."""
    with autoscaling_cluster(folder) as address:
        connect(address)
        out: dict[str, Any] = {"nodes_before": nodes_alive()}
        started = time.monotonic()
        with placement.placed(configuration(folder, 3, autoscaling=True), job="auto") as actors:
            learner = Learner(actors.coordinator)
            learner.until(lambda: learner.able() == 3, 120)
            out |= {"nodes": nodes_alive(), "scaled_s": time.monotonic() - started}
            learner.take()
            ray.get(actors.coordinator.stop.remote())
        started = time.monotonic()
        while nodes_alive() > out["nodes_before"] and time.monotonic() - started < 90:
            time.sleep(0.5)
        out |= {"nodes_after": nodes_alive(), "gone_s": time.monotonic() - started}
        ray.shutdown()
    return out


def nodes_alive() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def connect(address: str) -> None:
    """Connect to a cluster as soon as it has started."""
    for _ in range(60):
        with suppress(ConnectionError, ValueError, RuntimeError):
            ray.init(address, log_to_driver=False)
            return
        time.sleep(0.5)
    raise TimeoutError(f"no cluster at {address}")


if __name__ == "__main__":
    placement.Generator = TimedGenerator
    result = {"grow": grow_and_shrink, "autoscale": autoscale}[sys.argv[1]](sys.argv[2])
    print("RESULT " + json.dumps(result))
