"""The record of truth of one shard: an SQLite file in WAL mode with ``synchronous=FULL``.

One thread commits all pending writes together, so that concurrent callers share one sync; readers never wait
for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pixelis.errors import BadInput, InfraFailure
from pixelis.files import DAMAGED, NO_SPACE, disk_failure, disk_failures, has_space
from pixelis.memory.lease import Lease
from pixelis.memory.salvage import Salvage, damaged, salvage
from pixelis.memory.schema import SCHEMA, create, prepare

log = logging.getLogger(__name__)

MAX_BATCH = 256
"""Most writes in one commit."""
PROBE_S = 1.0
"""Seconds between attempts to write after the disk refused."""


def connect(path: Path, mode: str = "rwc", **options: Any) -> sqlite3.Connection:
    """Connect to a database that only this process uses. mode: ``rwc`` to create and change it, ``ro`` to
    read.
    """
    # unix-excl keeps the index of the log in memory: in a mapped file, a disk that becomes read-only would
    # kill the process.
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}&vfs=unix-excl", uri=True, timeout=30, **options
    )


Change = Callable[[sqlite3.Connection], Any]
"""Runs in a transaction; its result is returned to the caller after the commit."""


class Database:
    """The file of one shard. A lease of its folder admits one process at a time."""

    def __init__(self, folder: Path, wait_s: float = 10.0):
        self.path = folder / "shard.sqlite"
        self.failure: InfraFailure | None = None
        """Why the disk refused the last write; None if it did not. Reset when a later write succeeds."""
        self.salvaged: Salvage | None = None
        """What opening saved from a damaged file; None if it was intact."""
        with disk_failures(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lease = Lease(folder, wait_s)
        try:
            self._open()
        except BaseException:
            self._lease.release()
            raise
        self._readers: queue.LifoQueue[sqlite3.Connection] = queue.LifoQueue()
        self._pending: queue.Queue[tuple[Change, Future, Callable[[Any], object] | None] | None] = (
            queue.Queue()
        )
        self.commits = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run_writer, name="memory-writer", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        fresh = self.path.with_name("salvaged.sqlite")
        if fresh.exists() and not self.path.exists():  # killed between the two renames of _salvage
            os.replace(fresh, self.path)
        with contextlib.ExitStack() as stack:
            try:
                self._writer = prepare(connect(self.path, check_same_thread=False, isolation_level=None))
                stack.callback(lambda: self._writer.close())
                os.chmod(self.path, 0o600)
                # secure_delete overwrites deleted records.
                settings = ["journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON"]
                for setting in (*settings, "cache_size=-32000", "journal_size_limit=67108864"):
                    self._writer.execute(f"PRAGMA {setting}")
                (version,) = self._writer.execute("PRAGMA user_version").fetchone()
                if not self._writer.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    create(self._writer)
                elif version != SCHEMA:
                    raise BadInput(
                        f"{self.path} has schema {version}, this version of Pixelis reads {SCHEMA}",
                        code="bad_schema",
                        fix=(
                            "export it to Parquet with the version that wrote it, and load that into an "
                            "empty memory.dir"
                        ),
                    )
                elif problem := damaged(self._writer):
                    self._rewrite(fresh, problem)
            except (sqlite3.DatabaseError, OSError) as error:
                failure = disk_failure(self.path, error)
                if failure.code == DAMAGED:
                    failure.fix = (
                        "move the file away, start again and load the last Parquet export (docs/memory.md)"
                    )
                raise failure from error
            stack.pop_all()

    def _rewrite(self, fresh: Path, problem: str) -> None:
        """Replace the damaged file by its intact records; it stays beside them until the next deletion."""
        try:
            fresh.unlink(missing_ok=True)
            with contextlib.closing(prepare(connect(fresh, isolation_level=None))) as target:
                os.chmod(fresh, 0o600)
                create(target)
                target.execute("BEGIN")
                result = salvage(self._writer, target)
                target.execute("COMMIT")
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        self._writer.close()
        aside = self.path.with_name(f"damaged-{time.time_ns()}.sqlite")
        os.replace(self.path, aside)
        for suffix in ("-wal", "-shm"):
            if (log_file := self.path.with_name(self.path.name + suffix)).exists():
                os.replace(log_file, aside.with_name(aside.name + suffix))
        os.replace(fresh, self.path)
        self.salvaged = result
        with open(self.path.with_name("damage.jsonl"), "a", encoding="utf-8") as file:
            file.write(
                json.dumps({"time": time.time(), "file": aside.name, "problem": problem, **asdict(result)})
                + "\n"
            )
        log.critical(
            "%s was damaged (%s): %d experiences are intact, %d lost, %d without their vector and %d "
            "without pictures. "
            "Their ids are in damage.jsonl; docs/memory.md tells how to repair them from an export",
            self.path,
            problem,
            *(result.experiences, result.lost),
            *(len(result.without_vector), len(result.without_pictures)),
        )
        self._open()

    def write(self, change: Change, applied: Callable[[Any], object] | None = None) -> Any:
        """Run ``change`` in a transaction and return its result once it is on disk.

        Concurrent callers share a commit. ``applied`` is called with the result after the commit and before
        this method returns. A change that raises is rolled back and its error raised here. Raises
        InfraFailure when the disk fails.
        """
        if self._closed:
            raise InfraFailure("the memory is closed", code="closed", fix="open it again")
        done: Future = Future()
        self._pending.put((change, done, applied))
        return done.result()

    def _run_writer(self) -> None:
        closing = False
        while not closing:
            try:
                batch = [self._pending.get(timeout=None if self.failure is None else PROBE_S)]
            except queue.Empty:  # write after a failure of the disk, so that it ends without a caller's write
                if self.failure is not None and self.failure.code != DAMAGED:
                    self._commit(
                        [
                            (
                                lambda db: db.execute("UPDATE facts SET value = value WHERE name = 'name'"),
                                Future(),
                                None,
                            )
                        ]
                    )
                continue
            while len(batch) < MAX_BATCH:
                try:
                    batch.append(self._pending.get_nowait())
                except queue.Empty:
                    break
            closing = None in batch
            self._commit([item for item in batch if item is not None])

    def _commit(self, batch: list[tuple[Change, Future, Callable[[Any], object] | None]]) -> None:
        if not batch:
            return
        outcomes: list[tuple[Future, Any, Callable[[Any], object] | None]] = []
        try:
            self._lease.check()
            self._writer.execute("BEGIN IMMEDIATE")
            for change, done, applied in batch:
                self._writer.execute("SAVEPOINT change")
                try:
                    outcomes.append((done, change(self._writer), applied))
                except sqlite3.OperationalError:
                    raise
                except Exception as error:
                    self._writer.execute("ROLLBACK TO change")
                    # Damaged
                    done.set_exception(self._failed(error) if type(error) is sqlite3.DatabaseError else error)
                self._writer.execute("RELEASE change")
            self._writer.execute("COMMIT")
            self.commits += 1
        except Exception as error:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            failure = self._failed(error)
            for _, done, _ in batch:
                if not done.done():
                    done.set_exception(failure)
            return
        # Damage lasts, and so does a full disk on which only little fitted.
        lasts = self.failure and (
            self.failure.code == DAMAGED or (self.failure.code == NO_SPACE and not has_space(self.path))
        )
        if self.failure and not lasts:
            log.warning("the memory %s can be written again", self.path)
            self.failure = None
        for done, result, applied in outcomes:
            try:
                if applied is not None:
                    applied(result)
                done.set_result(result)
            except Exception as error:
                done.set_exception(error)

    def _failed(self, error: Exception) -> InfraFailure:
        """The error of a commit as InfraFailure; one of the disk is remembered, and logged when it begins."""
        if isinstance(error, InfraFailure):
            return error
        if not isinstance(error, sqlite3.Error | OSError):
            return InfraFailure(
                f"writing to {self.path} failed: {error}", code="write_failed", fix="see the log of the shard"
            )
        failure = disk_failure(self.path, error)
        if self.failure is None or self.failure.code != failure.code:
            log.critical("%s", failure)
        self.failure = failure
        return failure

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A connection that reads committed data without waiting for the writer.

        Raises InfraFailure for damage.
        """
        try:
            connection = self._readers.get_nowait()
        except queue.Empty:
            connection = connect(self.path, "ro", check_same_thread=False)
            prepare(connection)
        try:
            yield connection
        except sqlite3.DatabaseError as error:
            raise disk_failure(self.path, error) from error
        finally:
            self._readers.put(connection)

    @property
    def refusal(self) -> str:
        """The code of ``failure``, ``locked`` after another process took the folder over, or empty."""
        if self._lease.lost:
            return "locked"
        return self.failure.code if self.failure is not None else ""

    def forget(self) -> None:
        """Truncate the log, so that no file contains deleted data."""
        # After a commit: SQLite refuses it inside a transaction.
        self.write(lambda _: None, lambda _: self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)"))

    def nbytes(self) -> int:
        """Bytes of the file and its log."""
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        """Finish pending writes and close the file."""
        if self._closed:
            return
        self._closed = True
        self._pending.put(None)
        self._thread.join()
        while not self._pending.empty():
            item = self._pending.get_nowait()
            if item is not None:
                item[1].set_exception(
                    InfraFailure("the memory is closed", code="closed", fix="open it again")
                )
        while not self._readers.empty():
            self._readers.get_nowait().close()
        self._writer.close()
        self._lease.release()
