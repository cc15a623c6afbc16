"""Configuration of the experience memory."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from pixelis.config.base import Section, Share


class MemoryConfig(Section):
    enabled: bool = True
    """store the experiences of served requests"""
    dir: str | None = None
    """folder of the shards; unset: run.dir/memory"""
    shards: PositiveInt = 1
    """number of shard actors; experiences are distributed by the hash of their id"""
    cpus: NonNegativeFloat = 0.1
    """CPUs that each shard reserves"""
    gpus: NonNegativeFloat = 0
    """GPUs that each shard reserves, for faiss-gpu; 0: it searches on the CPU"""
    capacity: PositiveInt = 10_000
    """maximum number of experiences in all shards together"""
    evict: Literal["fifo", "priority"] = "fifo"
    """experience to evict from a full memory: the oldest (fifo) or the one with the lowest priority"""
    retention_days: PositiveFloat = 90.0
    """age in days at which an experience is deleted"""
    on_loss: Literal["continue", "refuse"] = "continue"
    """where a shard finds less on its disk than it has acknowledged: continue and say how much, or refuse to
    start"""
    pictures: bool = True
    """store the views of the policy (PNG without metadata) with each experience"""
    index: Literal["flat", "hnsw", "ivf"] = "flat"
    """FAISS index: exact search (flat), or a graph (hnsw) or inverted lists (ivf) that a shard with over
    100,000 vectors builds when it opens"""
    metric: Literal["cosine", "euclidean", "manhattan"] = "cosine"
    """distance between vectors"""
    visual: Share = 0.7
    """weight of the picture in the vector of an experience; the question has the rest"""
    timeout_s: PositiveFloat = 0.2
    """timeout in seconds of a search in a shard; without a slow shard the result is partial"""
    write_timeout_s: PositiveFloat = 2.0
    """seconds that a reply waits for its experience to be on disk; without it the reply has no id"""

    @property
    def text(self) -> float:
        """Weight of the question in the vector of an experience."""
        return round(1 - self.visual, 6)
