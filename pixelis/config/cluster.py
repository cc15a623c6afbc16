"""Configuration of the Ray cluster."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt

from pixelis.config.base import Section


class NodesConfig(Section):
    count: PositiveInt = 1
    """number of machines"""
    cpus: float | None = Field(None, gt=0)
    """CPUs of a machine; unset: of this one"""
    gpus: float | None = Field(None, ge=0)
    """GPUs of a machine; unset: of this one"""
    gpu_gib: float | None = Field(None, gt=0)
    """memory of a GPU in GiB; unset: of this machine's, or 80 without one"""


class ClusterConfig(Section):
    address: str | None = None
    """address of the Ray cluster; unset: RAY_ADDRESS, or a new local cluster"""
    cpus: float | None = None
    """CPUs of a local cluster; unset: all"""
    object_store_bytes: int | None = Field(None, ge=80_000_000)
    """size of the object store of a local cluster; unset: estimated from the versions and views that a job
    keeps in it, from 1 GB to 80 % of /dev/shm"""
    dashboard: bool = False
    """start the Ray dashboard with a local cluster"""
    autoscaling: bool = False
    """the cluster can add nodes: wait for them instead of failing"""
    nodes: NodesConfig = NodesConfig()
    """machines that `--dry-run` checks the job against"""
    placement_timeout_s: PositiveFloat = 120.0
    """seconds to wait for the resources of the actors"""
