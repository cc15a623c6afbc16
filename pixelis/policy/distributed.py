"""Rank, world size, shares of a batch and sums over the learner's workers. Imports torch only on the first call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from pixelis.errors import InfraFailure


def rank_and_world_size() -> tuple[int, int]:
    dist = _process_group()
    return dist.get_rank(), dist.get_world_size()


def balanced_shares(sizes: Sequence[int], workers: int) -> list[list[int]]:
    """Indices of each worker's items: the largest first, each to the worker with the smallest sum (Graham, 1969)."""
    shares: list[list[int]] = [[] for _ in range(workers)]
    sums = [0] * workers
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        worker = min(range(workers), key=lambda w: (sums[w], len(shares[w]), w))
        shares[worker].append(index)
        sums[worker] += sizes[index]
    return [sorted(share) for share in shares]


def sum_over_workers(values: list[float], largest: int = 0) -> list[float]:
    """Each value summed over all workers; of the first `largest` the maximum."""
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


def broadcast_text(text: str) -> str:
    """The first worker's text, on all workers."""
    if "torch" not in sys.modules:
        return text
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return text
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    content = text.encode()
    size = torch.tensor([len(content)], device=device)
    dist.broadcast(size, 0)
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if dist.get_rank() == 0 and content:
        data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(data, 0)
    return bytes(data.tolist()).decode()


def release_cached_memory() -> None:
    """Return the memory that torch caches between steps to the GPU, for another process on it.

    Ends when all workers have done so: the engine that the first one lets wake shares the GPUs of all.
    """
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    dist = _process_group()
    if dist.get_world_size() > 1:
        dist.barrier()


def _process_group() -> Any:
    import torch.distributed as dist

    if not dist.is_initialized():
        raise InfraFailure("torch.distributed is not initialized in this process")
    return dist
