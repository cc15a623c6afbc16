"""A memory shard in the folder of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_entries import Opened

from pixelis.config import MemoryConfig
from pixelis.memory import Shard


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Opens the shard in ``tmp_path``, again if it is open: ``opened(capacity=5, evict="priority")``."""
    shards: list[Shard] = []

    def open(capacity: int | None = None, **config: object) -> Shard:
        for shard in shards:
            shard.close()
        shards.append(Shard(tmp_path, MemoryConfig(**config), capacity))  # type: ignore[arg-type]
        return shards[-1]

    yield open
    for shard in shards:
        shard.close()


@pytest.fixture
def shard(opened: Opened) -> Shard:
    return opened()
