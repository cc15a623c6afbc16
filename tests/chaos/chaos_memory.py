"""For each line ``FOLDER FIRST``, fork a writer that adds to a shard until it is killed.

It prints ``pid N`` and the id of every acknowledged experience; the parent prints ``ended`` after its end.
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
    """Add forever from two threads, one entry and three entries at a time."""
    shard = Shard(folder, MemoryConfig(capacity=10**6))
    os.write(1, f"pid {os.getpid()}\n".encode())

    def add(start: int, size: int) -> None:
        for number in range(start, start + 10**9, 2 * size):
            entries = [
                Entry(made(n), vector(n), {"img0": PNG + bytes(500)}) for n in range(number, number + size)
            ]
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
