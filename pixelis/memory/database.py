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
from typing import Any, NamedTuple

from pixelis.errors import BadInput, InfraFailure
from pixelis.files import DAMAGED, NO_SPACE, disk_failure, disk_failures, has_space
from pixelis.memory.high_water import HighWater
from pixelis.memory.lease import Lease
from pixelis.memory.salvage import Salvage, damaged, salvage
from pixelis.memory.schema import SCHEMA, create, prepare, set_fact

log = logging.getLogger(__name__)

MAX_BATCH = 256
"""Most writes in one commit."""
PROBE_S = 1.0
"""Seconds between attempts to write after the disk refused."""


DURABLE = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON")
"""Settings of a connection that writes; secure_delete overwrites deleted records."""


def connect(path: Path, mode: str = "rwc", **options: Any) -> sqlite3.Connection:
    """Connect to a database that only this process uses; ``mode`` is ``rwc`` or ``ro``."""
    # unix-excl keeps the index of the log in memory: in a mapped file, a disk that becomes read-only would
    # kill the process.
    address = f"{path.absolute().as_uri()}?mode={mode}&vfs=unix-excl"
    return sqlite3.connect(address, uri=True, timeout=30, **options)


Change = Callable[[sqlite3.Connection], Any]
"""Runs in a transaction; its result is returned to the caller after the commit."""


class _Write(NamedTuple):
    change: Change
    done: Future
    applied: Callable[[Any], object] | None


class Database:
    """The file of one shard, whose folder a lease gives to one process at a time.

    ``failure`` is why the disk refused the last write; ``salvaged`` is what opening saved from a damaged
    file.
    """

    def __init__(self, folder: Path, wait_s: float = 10.0, accept_loss: bool = True):
        self.path = folder / "shard.sqlite"
        self.failure: InfraFailure | None = None
        self.salvaged: Salvage | None = None
        self._damage: dict[str, str] = {}
        with contextlib.ExitStack() as stack:
            with disk_failures(folder):
                folder.mkdir(parents=True, exist_ok=True)
                self._lease = Lease(folder, wait_s)
                stack.callback(self._lease.release)
                self._high_water = HighWater(folder / "acknowledged")
                stack.callback(self._high_water.close)
            self._open()
            stack.callback(lambda: self._writer.close())
            self._find_loss(accept_loss)
            self._closing = stack.pop_all()
        self._readers: queue.LifoQueue[sqlite3.Connection] = queue.LifoQueue()
        self._pending: queue.Queue[_Write | None] = queue.Queue()
        self.commits = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run_writer, name="memory-writer", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        fresh = self.path.with_name("salvaged.sqlite")
        if fresh.exists() and not self.path.exists():  # killed between the two renames of _rewrite
            os.replace(fresh, self.path)
        with contextlib.ExitStack() as stack:
            try:
                self._writer = prepare(connect(self.path, check_same_thread=False, isolation_level=None))
                stack.callback(lambda: self._writer.close())
                os.chmod(self.path, 0o600)
                for setting in (*DURABLE, "cache_size=-32000", "journal_size_limit=67108864"):
                    self._writer.execute(f"PRAGMA {setting}")
                (version,) = self._writer.execute("PRAGMA user_version").fetchone()
                if not self._writer.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    create(self._writer)
                elif version != SCHEMA:
                    raise BadInput(
                        f"{self.path} has schema {version}, this version of Pixelis reads {SCHEMA}",
                        code="bad_schema",
                        fix="export it to Parquet with the version that wrote it, and load that into an "
                        "empty memory.dir",
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
        self.salvaged, self._damage = result, {"file": aside.name, "problem": problem}
        self._open()

    def _find_loss(self, accept_loss: bool) -> None:
        """Report what was saved from a damaged file, and what was acknowledged and is in no file any more."""
        row = self._writer.execute("SELECT value FROM facts WHERE name = 'changes'").fetchone()
        (size,) = self._writer.execute("SELECT count(*) FROM experiences").fetchone()
        self.changes = int(row[0]) if row else 0
        changes, experiences = self._high_water.read()
        lost, result = experiences - size, self.salvaged or Salvage(size)
        if changes > self.changes or lost > result.lost:
            result.lost, result.changes = max(result.lost, lost), max(0, changes - self.changes)
            self.salvaged = result
        if self.salvaged is None:
            return
        problem = self._damage.setdefault("problem", "it ends before the last acknowledged change")
        line = {"time": time.time(), **self._damage, **asdict(result)}
        with disk_failures(self.path), open(self.path.with_name("damage.jsonl"), "a") as file:
            file.write(json.dumps(line) + "\n")
        message = (
            f"{self.path} was damaged ({problem}): {size} experiences are intact, {result.lost} lost, "
            f"{len(result.without_vector)} without their vector, {len(result.without_pictures)} without pictures; "
            f"{result.changes} acknowledged changes are lost"
        )
        log.critical("%s; damage.jsonl has the ids, docs/memory.md the repair", message)
        if not accept_loss and (result.lost or result.changes):
            fix = "restore the file from a backup, or continue without them: memory.on_loss=continue"
            raise InfraFailure(message, code=DAMAGED, fix=fix)
        self._high_water.write(self.changes, size)

    def write(self, change: Change, applied: Callable[[Any], object] | None = None) -> Any:
        """Run ``change`` in a transaction and return its result once it is on disk.

        ``applied`` is called with the result after the commit. A change that raises is rolled back and its
        error raised here. Raises InfraFailure when the disk fails.
        """
        if self._closed:
            raise InfraFailure("the memory is closed", code="closed", fix="open it again")
        done: Future = Future()
        self._pending.put(_Write(change, done, applied))
        return done.result()

    def _run_writer(self) -> None:
        probe = "UPDATE facts SET value = value WHERE name = 'name'"
        closing = False
        while not closing:
            try:
                batch = [self._pending.get(timeout=None if self.failure is None else PROBE_S)]
            except queue.Empty:  # a failure of the disk must end without a caller's write
                if self.failure is not None and self.failure.code != DAMAGED:
                    self._commit([_Write(lambda db: db.execute(probe), Future(), None)])
                continue
            while len(batch) < MAX_BATCH and not self._pending.empty():
                batch.append(self._pending.get())
            closing = None in batch
            self._commit([item for item in batch if item is not None])

    def _commit(self, batch: list[_Write]) -> None:
        if not batch:
            return
        outcomes: list[tuple[_Write, Any]] = []
        try:
            self._lease.check()
            self._writer.execute("BEGIN IMMEDIATE")
            for write in batch:
                self._writer.execute("SAVEPOINT change")
                try:
                    outcomes.append((write, write.change(self._writer)))
                except sqlite3.OperationalError:
                    raise
                except Exception as error:
                    self._writer.execute("ROLLBACK TO change")
                    if type(error) is sqlite3.DatabaseError:  # damage; other faults are its subclasses
                        error = self._failed(error)
                    write.done.set_exception(error)
                self._writer.execute("RELEASE change")
            changes = self.changes + len(batch)
            set_fact(self._writer, "changes", str(changes))
            (size,) = self._writer.execute("SELECT count(*) FROM experiences").fetchone()
            self._writer.execute("COMMIT")
            self.commits, self.changes = self.commits + 1, changes
        except (sqlite3.Error, OSError, InfraFailure) as error:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            failure = error if isinstance(error, InfraFailure) else self._failed(error)
            for write in batch:
                if not write.done.done():
                    write.done.set_exception(failure)
            return
        with contextlib.suppress(OSError):  # the changes themselves are on disk
            self._high_water.write(changes, size)
        # Damage lasts, and so does a full disk on which only little fitted.
        lasts = self.failure and (
            self.failure.code == DAMAGED or (self.failure.code == NO_SPACE and not has_space(self.path))
        )
        if self.failure and not lasts:
            log.warning("the memory %s can be written again", self.path)
            self.failure = None
        for write, result in outcomes:
            try:
                if write.applied is not None:
                    write.applied(result)
                write.done.set_result(result)
            except Exception as error:
                write.done.set_exception(error)

    def _failed(self, error: sqlite3.Error | OSError) -> InfraFailure:
        """The error as InfraFailure, which is remembered, and logged when it begins."""
        failure = disk_failure(self.path, error)
        if self.failure is None or self.failure.code != failure.code:
            log.critical("%s", failure)
        self.failure = failure
        return failure

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A connection that reads committed data. Raises InfraFailure for damage."""
        try:
            connection = self._readers.get_nowait()
        except queue.Empty:
            connection = prepare(connect(self.path, "ro", check_same_thread=False))
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
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        """Finish pending writes, close the file and unlock the folder."""
        if self._closed:
            return
        self._closed = True
        self._pending.put(None)
        self._thread.join()
        while not self._pending.empty():
            if (write := self._pending.get()) is not None:
                write.done.set_exception(InfraFailure("the memory is closed", code="closed"))
        while not self._readers.empty():
            self._readers.get().close()
        self._closing.close()
