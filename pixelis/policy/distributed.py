"""Rank, world size and sums over the learner's workers. Imports torch only when called."""

from __future__ import annotations

from typing import Any

from pixelis.errors import InfraFailure


def place() -> tuple[int, int]:
    """(rank of this worker, how many there are). Raises InfraFailure without a process group."""
    dist = _group()
    return dist.get_rank(), dist.get_world_size()


def sum_over_workers(values: list[float], largest: int = 0) -> list[float]:
    """Sum each value over all workers, the first `largest` of them by maximum instead. Raises InfraFailure without a group."""
    dist = _group()
    if dist.get_world_size() == 1:
        return values
    import torch

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if largest:
        dist.all_reduce(tensor[:largest], op=dist.ReduceOp.MAX)
    dist.all_reduce(tensor[largest:])
    return tensor.tolist()


def _group() -> Any:
    import torch.distributed as dist

    if not dist.is_initialized():
        raise InfraFailure("no process group")
    return dist
