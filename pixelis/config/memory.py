"""Configuration of the experience memory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pixelis.config.base import Section


class HnswConfig(Section):
    M: int = Field(32, ge=2, description="links of a node in the graph")
    ef_construction: int = Field(200, ge=1, description="candidates considered while building")
    ef_search: int = Field(100, ge=1, description="candidates considered while searching")


class IvfConfig(Section):
    nlist: int = Field(100, ge=1, description="inverted lists")
    nprobe: int = Field(10, ge=1, description="lists that a search looks into")


class MemoryConfig(Section):
    enabled: bool = Field(True, description="keep served experiences")
    dir: str | None = Field(None, description="folder of the shards; none: run.dir/memory")
    shards: int = Field(1, ge=1, description="shard actors; experiences are spread by the hash of their id")
    cpus: float = Field(0.1, ge=0, description="CPUs that each shard reserves")
    capacity: int = Field(10_000, ge=1, description="experiences kept in all shards together")
    evict: Literal["fifo", "priority"] = Field(
        "fifo", description="what makes room when full: the oldest, or the lowest priority"
    )
    retention_days: float = Field(90.0, gt=0, description="age at which an experience is pruned")
    pictures: bool = Field(True, description="keep what the policy saw (PNG without metadata) beside the record")
    index: Literal["flat", "hnsw", "ivf"] = Field("flat", description="FAISS index: exact, graph, or inverted lists")
    metric: Literal["cosine", "euclidean", "manhattan"] = Field("cosine", description="how vectors are compared")
    visual: float = Field(0.7, ge=0, le=1, description="weight of the picture in an experience's vector")
    text: float = Field(0.3, ge=0, le=1, description="weight of the question in an experience's vector")
    hnsw: HnswConfig = HnswConfig()
    ivf: IvfConfig = IvfConfig()
    timeout_s: float = Field(0.2, gt=0, description="seconds a shard has for a search; a later one makes the result partial")

    @model_validator(mode="after")
    def _weighted(self) -> MemoryConfig:
        if self.visual + self.text <= 0:
            raise ValueError("memory.visual and memory.text are both 0: a vector would be nothing")
        return self
