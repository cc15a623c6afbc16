"""How much a shard has acknowledged, in a file beside its database: one that lost something can tell."""

from __future__ import annotations

import json
import os
from pathlib import Path

SIZE = 64
"""Bytes of the file: always as many, so that no write needs space on a full disk."""


class HighWater:
    """The numbers of acknowledged changes and of experiences after them, kept in ``path``."""

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def read(self) -> tuple[int, int]:
        """Zeros for a new file and for a damaged one."""
        try:
            changes, experiences = json.loads(os.pread(self._file, SIZE, 0))
            return int(changes), int(experiences)
        except (ValueError, TypeError):
            return 0, 0

    def write(self, changes: int, experiences: int) -> None:
        """Survives the process; after a power failure the file may be older than the database, which is no loss."""
        os.pwrite(self._file, json.dumps([changes, experiences]).encode().ljust(SIZE), 0)

    def close(self) -> None:
        os.close(self._file)
