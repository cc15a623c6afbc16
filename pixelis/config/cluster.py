"""Configuration of the Ray cluster."""

from __future__ import annotations

from pydantic import Field

from pixelis.config.base import Section


class ClusterConfig(Section):
    address: str | None = Field(None, description="Ray address; empty: RAY_ADDRESS if set, else a local cluster")
    cpus: float | None = Field(None, description="CPUs of a local cluster; empty: all")
    object_store_bytes: int = Field(1_000_000_000, ge=80_000_000, description="object store of a local cluster")
    dashboard: bool = Field(False, description="start the Ray dashboard with a local cluster")
    autoscaling: bool = Field(False, description="the cluster can grow: wait for nodes instead of failing")
    placement_timeout_s: float = Field(120.0, gt=0, description="seconds to wait for the actors' resources")
