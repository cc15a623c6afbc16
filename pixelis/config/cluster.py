"""Configuration of the Ray cluster."""

from __future__ import annotations

from pydantic import Field

from pixelis.config.base import Section


class ClusterConfig(Section):
    address: str | None = Field(None, description="address of the Ray cluster; unset: RAY_ADDRESS, or a new local cluster")
    cpus: float | None = Field(None, description="CPUs of a local cluster; unset: all")
    object_store_bytes: int = Field(1_000_000_000, ge=80_000_000, description="size of the object store of a local cluster")
    dashboard: bool = Field(False, description="start the Ray dashboard with a local cluster")
    autoscaling: bool = Field(False, description="the cluster can add nodes: wait for them instead of failing")
    placement_timeout_s: float = Field(120.0, gt=0, description="seconds to wait for the resources of the actors")
