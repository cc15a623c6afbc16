"""Cases of test_ray_faults.py on their own cluster: own_cluster.py store|memory FOLDER; one JSON line."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from memory_entries import entries

from pixelis.actors import placement
from pixelis.actors.cluster import connect
from pixelis.actors.memory import Memory
from pixelis.actors.memory_shard import place_shards
from pixelis.config import Config, absolute, load
from pixelis.jobs import rft
from pixelis.jobs.driver import run_folder
from pixelis.telemetry import events

RUN = ["policy.model=nano", "rft.prompts_per_step=4", "rft.group_size=2", "dialogue.max_turn_tokens=16"]
RUN += ["rewards.weights.length=1.0", "learner.lr=3e-4", "learner.checkpoint_every=1000"]
STORE_BYTES = 80_000_000
STEPS = 20
PRESSURE = range(3, 8)
"""Steps during which the object store is full."""


def configuration(folder: str, *more: str) -> Config:
    cluster = ["cluster.cpus=4", f"cluster.object_store_bytes={STORE_BYTES}", "telemetry.progress=false"]
    return absolute(load(None, [*RUN, *cluster, f"run.dir={folder}", *more]))


@ray.remote(num_cpus=0)
class Hog:
    """Fills the object store with objects that it refers to."""

    def __init__(self) -> None:
        self.refs: list[ray.ObjectRef] = []

    def fill(self, count: int) -> int:
        """Hold ``count`` objects of 10 MB; returns how many."""
        self.refs += [ray.put(np.full(10_000_000, number, np.uint8)) for number in range(count)]
        return len(self.refs)

    def check_and_release(self) -> bool:
        """Whether each object still has its content; releases all."""
        intact = all(int(ray.get(ref)[0]) == i for i, ref in enumerate(self.refs))
        self.refs.clear()
        return intact


def store(folder: str) -> dict[str, Any]:
    """A run whose object store another actor fills to three times its size for a while."""
    from ray._private.internal_api import memory_summary

    config = configuration(folder, f"rft.steps={STEPS}")
    connect(config)
    hog, out = Hog.remote(), {"spilled": 0, "intact": False}

    def pressure() -> bool:
        row = events.last(Path(folder), "step/policy")
        step = row["step"] if row else 0
        if step >= PRESSURE.start and "held" not in out:
            out["held"] = ray.get(hog.fill.remote(3 * STORE_BYTES // 10_000_000))
            address = ray.get_runtime_context().gcs_address
            out["spilled"] = "Spilled" in memory_summary(address, stats_only=True)
            out["held_at"] = step
        elif "held" in out and step >= out["held_at"] + len(PRESSURE) and "released_at" not in out:
            out["intact"], out["released_at"] = ray.get(hog.check_and_release.remote()), step
        return False

    with run_folder(config, config.data.train), placement.placed(config) as actors:
        actors_before = ray.get([g.health.remote() for g in actors.generators])
        rft.run(config, actors, should_stop=pressure)
        after = ray.get([g.health.remote() for g in actors.generators])
        out["restarted"] = [a["pid"] != b["pid"] for a, b in zip(actors_before, after, strict=True)]
    rows = events.read(folder, "step/policy")
    out |= {"steps": [row["step"] for row in rows], "failures": len(events.read(folder, "learner/failure"))}
    out["trained"] = sum(row["learner/trained_sequences"] > 0 for row in rows)
    times = {row["step"]: row["time"] for row in rows}
    low, high = out["held_at"], out["released_at"]
    out["step_s"] = {
        "before": (times[low] - times[1]) / (low - 1),
        "under_pressure": (times[high] - times[low]) / (high - low),
        "after": (times[STEPS] - times[STEPS - 5]) / 5,
    }
    return out


def memory(folder: str) -> dict[str, Any]:
    """Adds to a memory while calls of actors fail before or after they have had their effect."""
    config = configuration(folder, "memory.shards=2", "memory.cpus=0", "run.name=rpc")
    connect(config)
    names, shards = place_shards(config, "rpc")
    added = entries(40, 16)

    async def add() -> dict[str, Any]:
        client = Memory(names, "pixelis", config.memory)
        results = await asyncio.gather(*(client.add([entry]) for entry in added))
        stored = await asyncio.gather(*(client.get(entry.experience.id) for entry in added))
        ids = [experience.id for experience in await client.list(1000)]
        await client.drain()
        readable = sum(e is not None for e in stored)
        return {"acknowledged": len(results), "readable": readable, "listed": len(ids), "ids": len(set(ids))}

    out = asyncio.run(add())
    for shard in shards:
        ray.kill(shard)
    return out


if __name__ == "__main__":
    result = {"store": store, "memory": memory}[sys.argv[1]](sys.argv[2])
    print("RESULT " + json.dumps(result), flush=True)
    ray.shutdown()
