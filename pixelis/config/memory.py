"""Configuration of the experience memory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pixelis.config.base import Section


class MemoryConfig(Section):
    enabled: bool = Field(True, description="store the experiences of served requests")
    dir: str | None = Field(None, description="folder of the shards; unset: run.dir/memory")
    shards: int = Field(
        1, ge=1, description="number of shard actors; experiences are distributed by the hash of their id"
    )
    cpus: float = Field(0.1, ge=0, description="CPUs that each shard reserves")
    gpus: float = Field(
        0, ge=0, description="GPUs that each shard reserves, for faiss-gpu; 0: it searches on the CPU"
    )
    capacity: int = Field(10_000, ge=1, description="maximum number of experiences in all shards together")
    evict: Literal["fifo", "priority"] = Field(
        "fifo",
        description=(
            "experience to evict from a full memory: the oldest (fifo) or the one with the lowest priority"
        ),
    )
    retention_days: float = Field(90.0, gt=0, description="age in days at which an experience is deleted")
    pictures: bool = Field(
        True, description="store the views of the policy (PNG without metadata) with each experience"
    )
    index: Literal["flat", "hnsw", "ivf"] = Field(
        "flat",
        description="FAISS index: exact search (flat), or a graph (hnsw) or inverted lists (ivf) that a "
        "shard with over 100,000 "
        "vectors builds when it opens",
    )
    metric: Literal["cosine", "euclidean", "manhattan"] = Field(
        "cosine", description="distance between vectors"
    )
    visual: float = Field(
        0.7,
        ge=0,
        le=1,
        description="weight of the picture in the vector of an experience; the question has the rest",
    )
    timeout_s: float = Field(
        0.2,
        gt=0,
        description="timeout in seconds of a search in a shard; without a slow shard the result is partial",
    )
    write_timeout_s: float = Field(
        2.0,
        gt=0,
        description=(
            "seconds that a reply waits for its experience to be on disk; without it the reply has no id"
        ),
    )

    @property
    def text(self) -> float:
        """Weight of the question in the vector of an experience."""
        return round(1 - self.visual, 6)
