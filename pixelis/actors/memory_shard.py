"""The actor of a memory shard, and how many of them make up a memory."""

from __future__ import annotations

import hashlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from pixelis.actors.cluster import freeze_gc, use_reserved_gpus
from pixelis.config import Config, MemoryConfig
from pixelis.errors import BadConfig, InfraFailure
from pixelis.memory import Entry, Shard
from pixelis.memory.rows import Place, Row
from pixelis.records import Feedback
from pixelis.telemetry.metrics import count, publish

log = logging.getLogger(__name__)

THREADS = 16
"""Concurrent calls of a shard; waiting adds share a commit."""
REOPEN_S = 1.0
PRUNE_S = 3600.0
PUBLISH_S = 10.0


def shard_of(id: str, shards: int) -> int:
    """The number of the shard that stores an experience."""
    return int.from_bytes(hashlib.sha256(id.encode()).digest()[:8], "big") % shards


def folder_of(config: Config) -> Path:
    """The folder of all shards."""
    return Path(config.memory.dir) if config.memory.dir else Path(config.run.dir) / "memory"


@ray.remote(max_restarts=-1, max_concurrency=THREADS)
class MemoryShard:
    """One shard in the folder ``shard-I-of-N``; a restart keeps everything acknowledged. Each call runs in a thread."""

    def __init__(self, config: Config, number: int = 0):
        use_reserved_gpus()
        memory = config.memory
        folder = folder_of(config)
        others = [path.name for path in folder.glob("shard-*-of-*") if not path.name.endswith(f"-of-{memory.shards}")]
        if others:
            raise BadConfig(
                f"the memory in {folder} has another number of shards ({', '.join(sorted(others))})",
                fix="restore memory.shards, or export each old shard (pixelis.memory.Shard(FOLDER, MemoryConfig()).export), "
                "move the folder away and pass the files to Memory.load",
            )
        share = -(-memory.capacity // memory.shards)
        self.shard = _open(folder / f"shard-{number}-of-{memory.shards}", memory, share)
        self.upkeep = ThreadPoolExecutor(1, "memory-upkeep")
        self.tags, self.pruned_at, self.published_at = {"shard": str(number)}, 0.0, 0.0
        self._prune()
        self._publish()
        freeze_gc()

    def _prune(self) -> None:
        if time.monotonic() - self.pruned_at > PRUNE_S or not self.pruned_at:
            self.pruned_at = time.monotonic()
            try:
                self.shard.prune(time.time())
            except InfraFailure as error:  # a disk that refuses: neither a start nor an add may fail because of it
                log.warning("old experiences are not deleted: %s", error)

    def health(self) -> dict[str, Any]:
        """Answers when alive."""
        import os

        return {"pid": os.getpid(), "recovery_s": self.shard.recovery_s}

    def pulse(self) -> tuple[int, str, int]:
        """Number of experiences, why the disk refuses to store (empty if it does not), and number of damaged experiences."""
        return len(self.shard), self.shard.refusal, self.shard.damaged

    def add(self, entries: list[Entry]) -> list[bool]:
        added = self.shard.add(entries)
        count("memory/added", sum(added), self.tags)
        self.upkeep.submit(self._keep_up)  # the caller's reply must not wait: counting reads all experiences
        return added

    def _keep_up(self) -> None:
        """Prune and publish where due."""
        try:
            self._prune()
            self._publish()
        except Exception:
            log.exception("the upkeep of a memory shard failed; it is tried again")

    def _publish(self) -> None:
        """Publish the size, at most every PUBLISH_S seconds."""
        if time.monotonic() - self.published_at > PUBLISH_S or not self.published_at:
            self.published_at = time.monotonic()
            stats = self.shard.stats()
            publish({"memory/experiences": stats["size"], "memory/bytes": stats["bytes"]}, self.tags)

    def search(self, vectors: np.ndarray, k: int, user: str | None = None, text: str = "") -> list[list[tuple[str, float]]]:
        started = time.monotonic()
        near = self.shard.search(vectors, k, user, text)
        count("memory/searches", len(vectors), self.tags)
        count("memory/search_seconds", time.monotonic() - started, self.tags)
        return near

    def find(self, vector: np.ndarray, k: int, user: str | None = None, text: str = "") -> list[tuple[float, Row]]:
        """The ``k`` nearest with their records; some are not among the best of all shards, but one call suffices."""
        (near,) = self.search(vector[None], k, user, text)
        rows = self.shard.rows([id for id, _ in near])
        return [(similarity, row) for (_, similarity), row in zip(near, rows, strict=True) if row is not None]

    def row(self, id: str) -> Row | None:
        return self.shard.row(id)

    def list_rows(self, limit: int, after: Place | None, user: str | None) -> list[tuple[float, Row]]:
        return self.shard.list_rows(limit, after, user)

    def pictures(self, id: str) -> dict[str, bytes]:
        return self.shard.pictures(id)

    def retrieved(self, retrieval: str, ids: list[str]) -> None:
        self.shard.retrieved(retrieval, ids)

    def succeeded(self, retrieval: str, ids: list[str]) -> int:
        return self.shard.succeeded(retrieval, ids)

    def feedback(self, id: str, feedback: Feedback) -> None:
        self.shard.feedback(id, feedback)

    def withdraw(self, versions: list[int]) -> int:
        return self.shard.withdraw(versions)

    def learnt(self, ids: list[str]) -> int:
        return self.shard.learnt(ids)

    def draw(self, n: int, seed: int, status: str | None = None) -> list[tuple[float, str]]:
        return self.shard.draw(n, np.random.default_rng(seed), status)

    def delete(self, ids: list[str]) -> int:
        return self.shard.delete(ids)

    def delete_user(self, user: str) -> list[str]:
        return self.shard.delete_user(user)

    def prune(self, now: float) -> list[str]:
        return self.shard.prune(now)

    def export(self, path: str) -> int:
        return self.shard.export(path)

    def load(self, path: str, number: int, shards: int) -> int:
        """Add the experiences of a file that belong to this shard."""
        return self.shard.load(path, lambda id: shard_of(id, shards) == number)

    def stats(self) -> dict[str, Any]:
        return self.shard.stats()

    def close(self) -> None:
        """Write pending data and release the folder, before the actor is ended on purpose."""
        self.upkeep.shutdown()
        self.shard.close()


def _open(folder: Path, config: MemoryConfig, capacity: int) -> Shard:
    """Open a shard. The first start reports a failure; a restart waits until the disk works, because Ray would not try again."""
    while True:
        try:
            return Shard(folder, config, capacity)
        except InfraFailure as error:
            if not ray.get_runtime_context().was_current_actor_reconstructed:
                raise
            log.critical("the memory shard cannot restart yet: %s", error)
            time.sleep(REOPEN_S)


def place_shards(config: Config, prefix: str) -> tuple[list[str], list[ActorHandle]]:
    """Start all shards with the names ``PREFIX-memory-I``; returns names and handles. They are ready when ``health`` answers."""
    names = [f"{prefix}-memory-{number}" for number in range(config.memory.shards)]
    kind: Any = MemoryShard
    resources = {"num_cpus": config.memory.cpus, "num_gpus": config.memory.gpus}
    actors = [kind.options(name=name, **resources).remote(config, i) for i, name in enumerate(names)]
    return names, actors
