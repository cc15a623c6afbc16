"""The record of truth of one shard: an SQLite file. What was acknowledged is on disk.

WAL mode with ``synchronous=FULL``: a commit returns when its frames are synced, and readers never wait for a writer. All writes
go through one thread that commits whatever waits together, so that many callers share one sync.
"""

from __future__ import annotations

import fcntl
import os
import queue
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pixelis.errors import BadInput, InfraFailure

SCHEMA = 1
MOST_TOGETHER = 256
"""Writes that share one commit at most."""

TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE experiences (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, created_at REAL NOT NULL, user TEXT, status TEXT NOT NULL,
  priority REAL NOT NULL, retrievals INTEGER NOT NULL, successes INTEGER NOT NULL, feedback TEXT NOT NULL, record TEXT NOT NULL);
CREATE INDEX by_time ON experiences (created_at);
CREATE INDEX by_user ON experiences (user, created_at);
CREATE INDEX by_priority ON experiences (priority, seq);
CREATE TABLE vectors (seq INTEGER PRIMARY KEY REFERENCES experiences ON DELETE CASCADE, vector BLOB NOT NULL);
CREATE TABLE pictures (
  seq INTEGER NOT NULL REFERENCES experiences ON DELETE CASCADE, name TEXT NOT NULL, png BLOB NOT NULL,
  PRIMARY KEY (seq, name)) WITHOUT ROWID;
CREATE TABLE retrievals (
  seq INTEGER NOT NULL REFERENCES experiences ON DELETE CASCADE, retrieval TEXT NOT NULL, succeeded INTEGER NOT NULL,
  told_at REAL NOT NULL, PRIMARY KEY (seq, retrieval)) WITHOUT ROWID;
CREATE INDEX retrievals_by_time ON retrievals (told_at);
"""
"""``seq`` grows and is never given twice (AUTOINCREMENT), so an index may name rows by it over deletions and restarts."""

Change = Callable[[sqlite3.Connection], Any]
"""Work in a transaction; what it returns goes to the caller after the commit."""


class Database:
    """One shard's file, opened by one process at a time (a lock in its folder)."""

    def __init__(self, folder: Path, wait_s: float = 10.0):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "shard.sqlite"
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._own(wait_s)
            self._open()
        except BaseException:
            os.close(self._lock)
            raise
        self._readers: queue.LifoQueue[sqlite3.Connection] = queue.LifoQueue()
        self._waiting: queue.Queue[tuple[Change, Future, Callable[[Any], None] | None] | None] = queue.Queue()
        self.commits = 0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="memory-writer", daemon=True)
        self._thread.start()

    def _own(self, wait_s: float) -> None:
        give_up = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise InfraFailure(
                        f"another process keeps the memory in {self.path.parent}",
                        code="locked",
                        fix="end the service that uses this memory.dir, or give this one another",
                    ) from None
                time.sleep(0.05)

    def _open(self) -> None:
        try:
            self._writer = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None, timeout=30)
            os.chmod(self.path, 0o600)
            # A deleted record is overwritten, not only unlinked.
            settings = ["journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON"]
            for setting in (*settings, "cache_size=-32000", "journal_size_limit=67108864"):
                self._writer.execute(f"PRAGMA {setting}")
            (version,) = self._writer.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._writer.executescript(f"BEGIN IMMEDIATE; {TABLES} PRAGMA user_version={SCHEMA}; COMMIT;")
                self._writer.execute("INSERT INTO facts VALUES ('name', ?)", (uuid.uuid4().hex,))
            elif version != SCHEMA:
                raise BadInput(
                    f"{self.path} has schema {version}, this version of Pixelis reads {SCHEMA}",
                    code="bad_schema",
                    fix="export it to Parquet with the version that wrote it, and load that into an empty memory.dir",
                )
        except sqlite3.DatabaseError as error:
            raise InfraFailure(
                f"the memory {self.path} cannot be opened: {error}",
                code="bad_database",
                fix="free disk space, or move the file away and load the last Parquet export",
            ) from error

    def write(self, change: Change, applied: Callable[[Any], None] | None = None) -> Any:
        """Run ``change`` in a transaction and return its result once that is on the disk.

        Callers at the same time share a commit. ``applied`` sees the result after the commit and before the caller does.
        A change that raises leaves nothing behind and passes its error on. InfraFailure when the disk refuses.
        """
        if self._closed:
            raise InfraFailure("the memory is closed", code="closed", fix="open it again")
        done: Future = Future()
        self._waiting.put((change, done, applied))
        return done.result()

    def _work(self) -> None:
        ending = False
        while not ending:
            together = [self._waiting.get()]
            while len(together) < MOST_TOGETHER:
                try:
                    together.append(self._waiting.get_nowait())
                except queue.Empty:
                    break
            ending = None in together
            self._commit([item for item in together if item is not None])

    def _commit(self, together: list[tuple[Change, Future, Callable[[Any], None] | None]]) -> None:
        if not together:
            return
        outcomes: list[tuple[Future, Any, Callable[[Any], None] | None]] = []
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            for change, done, applied in together:
                self._writer.execute("SAVEPOINT one")
                try:
                    outcomes.append((done, change(self._writer), applied))
                except sqlite3.OperationalError:
                    raise
                except Exception as error:
                    self._writer.execute("ROLLBACK TO one")
                    done.set_exception(error)
                self._writer.execute("RELEASE one")
            self._writer.execute("COMMIT")
            self.commits += 1
        except Exception as error:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            failure = InfraFailure(
                f"the memory could not write to {self.path}: {error}",
                code="disk",
                fix="look at free space and rights of memory.dir",
            )
            for _, done, _ in together:
                if not done.done():
                    done.set_exception(failure)
            return
        for done, result, applied in outcomes:
            try:
                if applied is not None:
                    applied(result)
                done.set_result(result)
            except Exception as error:
                done.set_exception(error)

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A connection that sees what was committed; it waits for no writer."""
        try:
            connection = self._readers.get_nowait()
        except queue.Empty:
            connection = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, check_same_thread=False, timeout=30)
        try:
            yield connection
        finally:
            self._readers.put(connection)

    def fact(self, name: str) -> str | None:
        """A fact about the shard, such as its name."""
        with self.read() as rows:
            row = rows.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return row[0] if row else None

    def forget(self) -> None:
        """Empty the log, so that what was deleted is in no file any more."""

        def truncate() -> None:
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")

        # After the commit and in the writer's thread; inside a transaction SQLite would refuse.
        self.write(lambda _: None, lambda _: truncate())

    def nbytes(self) -> int:
        """Bytes of the file and its log."""
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        """Write what waits and let go of the file."""
        if self._closed:
            return
        self._closed = True
        self._waiting.put(None)
        self._thread.join()
        while not self._waiting.empty():
            late = self._waiting.get_nowait()
            if late is not None:
                late[1].set_exception(InfraFailure("the memory is closed", code="closed", fix="open it again"))
        while not self._readers.empty():
            self._readers.get_nowait().close()
        self._writer.close()
        os.close(self._lock)
