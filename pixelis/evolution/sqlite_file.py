"""One durable SQLite file of a process, with arrays stored once by content hash."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pixelis.errors import InfraFailure
from pixelis.memory.database import DURABLE, connect

BLOBS = "CREATE TABLE IF NOT EXISTS blobs (hash TEXT PRIMARY KEY, shape TEXT NOT NULL, data BLOB NOT NULL);"
DELETE_UNUSED_BLOBS = "DELETE FROM blobs WHERE hash NOT IN (SELECT hash FROM parts)"
Blobs = dict[str, tuple[str, bytes]]
"""Hash -> shape ("png", or sides separated by commas) and content, compressed unless it is a PNG."""


class SqliteFile:
    """The file ``path`` with ``tables``, of which ``parts`` refers to blobs by ``hash``.

    Thread-safe; methods raise InfraFailure ``code``.
    """

    def __init__(self, path: str | Path, tables: str, code: str):
        self.path, self.code, self.lock = Path(path), code, threading.RLock()
        with self._failures():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_CREAT, 0o600))
            self.store = connect(self.path, check_same_thread=False)
            self.store.row_factory = sqlite3.Row
            for pragma in DURABLE:
                self.store.execute(f"PRAGMA {pragma}")
            self.store.executescript(BLOBS + tables + "PRAGMA user_version=1;")

    def close(self) -> None:
        with self.lock:
            self.store.close()

    def _rows(self, sql: str, values: tuple = ()) -> list[sqlite3.Row]:
        with self._failures(), self.lock:
            return self.store.execute(sql, values).fetchall()

    def _put(self, blobs: Blobs) -> None:
        """Store the blobs that are new; only in a transaction."""
        rows = [(key, *blob) for key, blob in blobs.items()]
        self.store.executemany("INSERT OR IGNORE INTO blobs VALUES (?,?,?)", rows)

    def _truncate_wal(self) -> None:
        """Nothing that was removed stays in the files."""
        self._rows("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._failures(), self.lock, self.store:
            self.store.execute("BEGIN IMMEDIATE")
            yield

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise InfraFailure(
                f"{self.path} failed: {error}",
                code=self.code,
                fix="check the disk and its free space; move a damaged file away",
            ) from error


def add_png(blobs: Blobs, png: bytes) -> str:
    return _add(blobs, "png", png, png)


def add_array(blobs: Blobs, array: np.ndarray) -> str:
    """Add a uint8 array, and return its hash."""
    content = array.tobytes()
    return _add(blobs, ",".join(map(str, array.shape)), content, zlib.compress(content, 1))


def _add(blobs: Blobs, shape: str, content: bytes, data: bytes) -> str:
    key = hashlib.sha256(shape.encode() + b"\0" + content).hexdigest()
    blobs.setdefault(key, (shape, data))
    return key


def array_of(row: sqlite3.Row) -> np.ndarray:
    """The array in the ``shape`` and ``data`` of a blob."""
    sides = [int(side) for side in row["shape"].split(",")]
    return np.frombuffer(zlib.decompress(row["data"]), np.uint8).reshape(sides).copy()
