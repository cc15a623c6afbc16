"""Rank, world size and sums over the learner's workers. Imports torch only on the first call."""

from __future__ import annotations

from typing import Any

from pixelis.errors import InfraFailure


def rank_and_world_size() -> tuple[int, int]:
    """Rank of this worker and number of workers. Raises InfraFailure without a process group."""
    dist = _process_group()
    return dist.get_rank(), dist.get_world_size()


def sum_over_workers(values: list[float], largest: int = 0) -> list[float]:
    """Each value summed over all workers; of the first `largest` values the maximum. Raises InfraFailure without a group."""
    dist = _process_group()
    if dist.get_world_size() == 1:
        return values
    import torch

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if largest:
        dist.all_reduce(tensor[:largest], op=dist.ReduceOp.MAX)
    dist.all_reduce(tensor[largest:])
    return tensor.tolist()


def _process_group() -> Any:
    import torch.distributed as dist

    if not dist.is_initialized():
        raise InfraFailure("torch.distributed is not initialized in this process")
    return dist
