"""The actor of a memory shard, and how many of them make up a memory."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from pixelis.actors.cluster import freeze_gc, spawn, use_reserved_gpus
from pixelis.config import Config
from pixelis.errors import BadConfig, InfraFailure
from pixelis.memory import Entry, Shard
from pixelis.memory.rows import Row
from pixelis.telemetry.metrics import count, publish

log = logging.getLogger(__name__)

THREADS = 16
"""Concurrent calls of a shard; waiting adds share a commit."""
REOPEN_S = 1.0
PRUNE_S = 3600.0
PUBLISH_S = 10.0


def shard_of(id: str, shards: int) -> int:
    return int.from_bytes(hashlib.sha256(id.encode()).digest()[:8], "big") % shards


def folder_of(config: Config) -> Path:
    return Path(config.memory.dir) if config.memory.dir else Path(config.run.dir) / "memory"


@ray.remote(max_restarts=-1, max_concurrency=THREADS)
class MemoryShard(Shard):
    """A `Shard` in the folder ``shard-I-of-N`` as an actor; a restart keeps everything acknowledged."""

    def __init__(self, config: Config, number: int = 0):
        use_reserved_gpus()
        memory, folder = config.memory, folder_of(config)
        if {*folder.glob("shard-*-of-*")} - {*folder.glob(f"shard-*-of-{memory.shards}")}:
            raise BadConfig(
                f"the memory in {folder} has another number of shards than memory.shards={memory.shards}",
                fix="restore memory.shards, or export each shard and load the files (docs/memory.md)",
            )
        while True:
            try:
                share = -(-memory.capacity // memory.shards)
                super().__init__(folder / f"shard-{number}-of-{memory.shards}", memory, share)
                break
            except InfraFailure as error:
                # The first start reports it; a restart, which Ray would not repeat, waits for the disk.
                if not ray.get_runtime_context().was_current_actor_reconstructed:
                    raise
                log.critical("the memory shard cannot restart yet: %s", error)
                time.sleep(REOPEN_S)
        self.upkeep = ThreadPoolExecutor(1, "memory-upkeep")
        self.tags, self.pruned_at, self.published_at = {"shard": str(number)}, float("-inf"), float("-inf")
        self._keep_up()
        freeze_gc()

    def health(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "recovery_s": self.recovery_s}

    def pulse(self) -> tuple[int, str, int]:
        """Number of experiences, why the disk refuses to store (empty if it does not), and number damaged."""
        return len(self), self.refusal, self.damaged

    def add(self, entries: Sequence[Entry]) -> list[bool]:
        added = super().add(entries)
        count("memory/added", sum(added), self.tags)
        self.upkeep.submit(self._keep_up)  # the caller's reply must not wait: counting reads all experiences
        return added

    def _keep_up(self) -> None:
        """Delete old experiences and publish the size where due; no start and no add may fail."""
        now = time.monotonic()
        try:
            if now - self.pruned_at > PRUNE_S:
                self.pruned_at = now
                self.prune(time.time())
            if now - self.published_at > PUBLISH_S:
                self.published_at = now
                stats = self.stats()
                publish({"memory/experiences": stats["size"], "memory/bytes": stats["bytes"]}, self.tags)
        except Exception:
            log.exception("the upkeep of a memory shard failed; it is tried again")

    def search(
        self, vectors: np.ndarray, k: int, user: str | None = None, text: str = ""
    ) -> list[list[tuple[str, float]]]:
        started = time.monotonic()
        near = super().search(vectors, k, user, text)
        count("memory/searches", len(vectors), self.tags)
        count("memory/search_seconds", time.monotonic() - started, self.tags)
        return near

    def find(
        self, vector: np.ndarray, k: int, user: str | None = None, text: str = ""
    ) -> list[tuple[float, Row]]:
        (near,) = self.search(vector[None], k, user, text)
        rows = self.rows([id for id, _ in near])
        return [(similarity, row) for (_, similarity), row in zip(near, rows, strict=True) if row is not None]

    def close(self) -> None:
        """Write pending data and release the folder, before the actor is ended on purpose."""
        self.upkeep.shutdown()
        super().close()


def place_shards(config: Config, prefix: str) -> tuple[tuple[str, ...], list[ActorHandle]]:
    names = tuple(f"{prefix}-memory-{number}" for number in range(config.memory.shards))
    resources = {"num_cpus": config.memory.cpus, "num_gpus": config.memory.gpus}
    return names, [
        spawn(MemoryShard, config, number, name=name, **resources) for number, name in enumerate(names)
    ]
