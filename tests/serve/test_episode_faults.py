"""Kills of the gateway, the generators and the agents while episodes are rewarded."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from gateway_helpers import until
from ray import serve
from ray.actor import ActorHandle
from scripted import Deployed, ScriptedGenerator

from pixelis.actors.episode_outcomes import experience_id
from pixelis.actors.episode_service import EpisodeService
from pixelis.actors.evolution import Evolution
from pixelis.actors.memory import Memory
from pixelis.actors.memory_shard import place_shards
from pixelis.actors.policy_store import PolicyStore
from pixelis.config import Config, load
from pixelis.serve import app
from pixelis.serve.agent_types import Backends

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]

KILLS, AGENTS = 20, 2
PAUSE_S = 2.0
"""Between kills: a killed process has started again, and episodes are in progress."""


class Service:
    """Two gateway replicas and two generators, and actors that are not killed."""

    def __init__(self, config: Config, deployed: Deployed):
        self.name = name = f"rewards-{uuid.uuid4().hex[:8]}"
        self.url = f"{deployed.url}/{name}"
        names = tuple(f"{name}-{i}" for i in range(2))
        self.generators = [ScriptedGenerator.options(name=n).remote(i) for i, n in enumerate(names)]
        self.store = PolicyStore.options(name=f"{name}-store").remote(config.run.dir)
        memory, shards = place_shards(config, name)
        self.evolution = Evolution.options(name=f"{name}-evolution").remote(
            config, names, f"{name}-store", memory=memory
        )
        self.episodes = EpisodeService.options(name=f"{name}-episodes").remote(
            config, names, None, f"{name}-evolution", memory
        )
        self.actors = [*self.generators, self.store, self.evolution, self.episodes, *shards]
        ray.get([a.health.remote() for a in (*self.generators, self.evolution, self.episodes, *shards)])
        namespace = ray.get_runtime_context().namespace
        self.memory = Memory(memory, namespace, config.memory)
        backends = Backends(names, namespace, f"{name}-evolution", memory, episodes=f"{name}-episodes")
        serve.run(app.build(config, backends, None), name=name, route_prefix=f"/{name}")

    def kill_gateway(self) -> None:
        title = f"ray::ServeReplica:{self.name}:Gateway"
        running = (p for p in psutil.process_iter(["cmdline"]) if title in " ".join(p.info["cmdline"] or []))
        next(running).kill()

    def kill_generator(self, number: int) -> None:
        os.kill(ask(self.generators[number], lambda self: os.getpid()), signal.SIGKILL)

    def end(self) -> None:
        serve.delete(self.name)
        for actor in self.actors:
            ray.kill(actor)


def ask(actor: ActorHandle, question: Callable[[Any], Any]) -> Any:
    """What an actor says of itself, asked again while it restarts."""
    for _ in range(100):
        try:
            return ray.get(actor.__ray_call__.remote(question), timeout=60)
        except ray.exceptions.ActorUnavailableError:
            time.sleep(0.2)
    raise AssertionError("the actor does not come back")


@pytest.fixture
def service(deployed: Deployed, tmp_path: Path) -> Iterator[Service]:
    overrides = ["serve.replicas=2", "serve.max_queue=16", "serve.timeout_s=20", "serve.per_minute=100000"]
    overrides += ["engine.workers=2", "engine.max_num_seqs=8", "memory.cpus=0", "memory.shards=2"]
    overrides += ["memory.write_timeout_s=10", "evolution.queue=100000", "evolution.cold_start=0"]
    overrides += ["evolution.canary.enabled=false", f"run.dir={tmp_path}"]
    service = Service(load(None, overrides), deployed)
    yield service
    service.end()


class Agents:
    """Processes that play episodes; one that is killed is followed by another."""

    def __init__(self, url: str, folder: Path):
        self.url, self.folder = url, folder
        self.numbers = itertools.count()
        self.running = [self._start() for _ in range(AGENTS)]

    def _start(self) -> subprocess.Popen[bytes]:
        script = Path(__file__).with_name("rewarding_agent.py")
        with (self.folder / f"agent-{next(self.numbers)}.jsonl").open("wb") as out:
            return subprocess.Popen([sys.executable, str(script), self.url], stdout=out)

    def kill(self, number: int) -> None:
        self.running[number].kill()
        self.running[number].wait()
        self.running[number] = self._start()

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()

    def said(self) -> list[dict[str, Any]]:
        """All complete lines."""
        texts = [file.read_text().rpartition("\n")[0] for file in self.folder.glob("agent-*.jsonl")]
        return [json.loads(line) for text in texts for line in text.splitlines()]


def test_twenty_kills_lose_no_rewarded_episode_and_count_none_twice(
    service: Service, tmp_path: Path, record_figures: Callable[..., None]
) -> None:
    agents = Agents(service.url, tmp_path)

    def rewarded() -> dict[str, dict[str, Any]]:
        return {row["episode"]: row for row in agents.said() if "episode" in row}

    try:
        for number in range(KILLS):
            before = len(rewarded())
            assert until(lambda n=before: len(rewarded()) > n, 60), agents.said()[-5:]
            time.sleep(PAUSE_S)
            turn, victim = divmod(number, 3)
            kills = (service.kill_gateway, service.kill_generator, agents.kill)
            kills[victim](*([turn % 2] if victim else []))
    finally:
        agents.end()
    acknowledged = rewarded()
    # The episodes of killed agents expire
    assert until(lambda: not ray.get(service.episodes.health.remote())["groups"], 60)
    entries = asyncio.run(gather(service.memory, [experience_id(id) for id in acknowledged]))
    lost = [id for id, e in zip(acknowledged, entries, strict=True) if e is None]
    groups = defaultdict(set)
    for row in acknowledged.values():
        groups[row["group"]].add(experience_id(row["episode"]))
    pairs = [ids for ids in groups.values() if len(ids) == 2]
    until(lambda: ray.get(service.evolution.stats.remote())["received"] >= len(pairs))
    tasks = ask(service.evolution, lambda self: [item.task for item in self.queue.items])
    counted = Counter(id for task in tasks for id in task.experience_ids)
    failures = Counter(
        str(row.get("status", row.get("error"))) for row in agents.said() if "episode" not in row
    )
    record_figures(
        kills=KILLS, rewarded=len(acknowledged), tasks=len(tasks), lost=len(lost), failures=dict(failures)
    )
    assert not lost
    for row, entry in zip(acknowledged.values(), entries, strict=True):
        assert entry.trajectory.outcome == {"reward": float(row["reward"])}
    assert len(pairs) >= KILLS / 2
    assert max(counted.values()) == 1
    taught = [task.experience_ids for task in tasks]
    assert all(any(ids <= one for one in taught) for ids in pairs)
    stats = ray.get(service.evolution.stats.remote())
    assert stats["received"] == len(tasks)


async def gather(memory: Memory, ids: list[str]) -> list[Any]:
    return list(await asyncio.gather(*(memory.get(id) for id in ids)))
