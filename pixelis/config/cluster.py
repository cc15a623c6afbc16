"""Configuration of the Ray cluster."""

from __future__ import annotations

from pydantic import Field

from pixelis.config.base import Section


class NodesConfig(Section):
    count: int = Field(1, ge=1, description="number of machines")
    cpus: float | None = Field(None, gt=0, description="CPUs of a machine; unset: of this one")
    gpus: float | None = Field(None, ge=0, description="GPUs of a machine; unset: of this one")
    gpu_gib: float | None = Field(
        None, gt=0, description="memory of a GPU in GiB; unset: of this machine's, or 80 without one"
    )


class ClusterConfig(Section):
    address: str | None = Field(
        None, description="address of the Ray cluster; unset: RAY_ADDRESS, or a new local cluster"
    )
    cpus: float | None = Field(None, description="CPUs of a local cluster; unset: all")
    object_store_bytes: int | None = Field(
        None,
        ge=80_000_000,
        description="size of the object store of a local cluster; unset: estimated from the versions and "
        "views that a job keeps "
        "in it, from 1 GB to 80 % of /dev/shm",
    )
    dashboard: bool = Field(False, description="start the Ray dashboard with a local cluster")
    autoscaling: bool = Field(
        False, description="the cluster can add nodes: wait for them instead of failing"
    )
    nodes: NodesConfig = Field(NodesConfig(), description="machines that `--dry-run` checks the job against")
    placement_timeout_s: float = Field(
        120.0, gt=0, description="seconds to wait for the resources of the actors"
    )
