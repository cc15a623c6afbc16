"""A process that forks writers of a memory: for each line ``FOLDER FIRST`` on standard input one that adds until it is killed.

A writer prints ``pid N``, then the id of every experience once ``add`` has returned; after its end the line is ``ended``.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from memory_entries import PNG, made

from pixelis.config import MemoryConfig
from pixelis.memory import Entry, Shard


def vector(number: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal(32).astype(np.float32)


def write(folder: str, first: int) -> None:
    """Two threads that add for ever, one by one and in threes."""
    shard = Shard(folder, MemoryConfig(index="hnsw", capacity=10**6))
    os.write(1, f"pid {os.getpid()}\n".encode())

    def add(start: int, together: int) -> None:
        for number in range(start, start + 10**9, 2 * together):
            some = range(number, number + together)
            entries = [Entry(made(n), vector(n), {"img0": PNG + bytes(500)}) for n in some]
            shard.add(entries)
            os.write(1, "".join(f"{e.experience.id}\n" for e in entries).encode())

    threading.Thread(target=add, args=(first, 1), daemon=True).start()
    add(first + 1_000_000, 3)


def main() -> None:
    for line in sys.stdin:
        folder, first = line.split()
        child = os.fork()
        if child == 0:
            write(folder, int(first))
        os.waitpid(child, 0)
        os.write(1, b"ended\n")


if __name__ == "__main__":
    main()
