"""The audit log: what the evolving service did and on whose word, as a chain of hashes that shows every later change.

A folder of JSON lines, ``audit-00000001.jsonl`` and on; closed files are compressed. Each line holds the hash of the line before
it, over files too: a new file begins with a line ``rotation``. What retention removes is recorded in the chain before it goes. A
chain cannot show that its own end was cut off: note ``Report.head`` elsewhere and give it to ``verify``.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pixelis.config import AuditConfig
from pixelis.errors import BadInput, InfraFailure
from pixelis.evolution.audit_chain import (
    EVENTS,
    GENESIS,
    RESULTS,
    AuditEvent,
    Problem,
    Report,
    canonical,
    digest,
    files,
    last_event,
    lines_of,
    parse,
    search,
    verify,
)
from pixelis.records import new_id

__all__ = ["EVENTS", "FOLDER", "GENESIS", "RESULTS", "AuditEvent", "AuditLog", "Problem", "Report", "search", "verify"]

log = logging.getLogger(__name__)

FOLDER = "audit"
"""Name of the log's folder in a run."""

KEPT = 200
TAIL = 2**18
LOCK = "lock"
LOCK_WAIT_S = 5.0
TORN_KEPT = 2000
DAY_S = 86400.0


class AuditLog:
    """The writer. One at a time for a folder, any number of threads; an event is on disk when ``write`` returns.

    Reopening after a crash cuts an incomplete last line and records that. Raises BadInput ``audit_in_use`` when another
    writer holds the folder, ``audit_broken`` when the last line cannot be continued.
    """

    def __init__(self, folder: str | Path, config: AuditConfig, lock_wait_s: float = LOCK_WAIT_S):
        self.folder, self.config = Path(folder), config
        self.folder.mkdir(parents=True, exist_ok=True)
        self._mutex = threading.RLock()
        self._recent: deque[AuditEvent] = deque(maxlen=KEPT)
        self._packing: threading.Thread | None = None
        self._file: BinaryIO | None = None
        self._number, self._size, self.lines = 0, 0, 0
        self.path, self.head = self.folder, GENESIS
        self._lock = _claim(self.folder / LOCK, lock_wait_s)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    # -- writing ----------------------------------------------------------------------------------------------------

    def write(
        self, event: str, actor: str, action: str, result: str = "success", details: Mapping[str, Any] | None = None
    ) -> AuditEvent:
        """Append one event and return it when it is on disk.

        Raises BadInput for an unknown event or result and for details that JSON cannot take; InfraFailure ``audit_write``
        when the disk refuses, in which case nothing was appended.
        """
        if event not in EVENTS or result not in RESULTS:
            known = EVENTS if event not in EVENTS else RESULTS
            raise BadInput(f"no audit event {event}/{result}", code="unknown_event", fix=f"one of {', '.join(known)}")
        with self._mutex:
            if self._file is None:
                raise InfraFailure("the audit log is closed", code="audit_closed", fix="open it again")
            written = self._append(event, actor, action, result, dict(details or {}))
            if self._size >= self.config.rotate_bytes:
                self._rotate()
            return written

    def _append(self, event: str, actor: str, action: str, result: str, details: dict[str, Any]) -> AuditEvent:
        assert self._file is not None
        values: dict[str, Any] = {
            "id": new_id("audit"),
            "time": time.time(),
            "event": event,
            "actor": actor,
            "action": action,
            "result": result,
            "details": details,
            "previous": self.head,
        }
        try:
            values["details"] = json.loads(canonical({"": details}))[""]  # what a reader will see: tuples are lists
            written = AuditEvent(**values, hash=digest(values))
        except (ValueError, TypeError) as error:
            raise BadInput(f"audit details that JSON cannot take: {error}", fix="plain finite values only") from None
        data = written.line + b"\n"
        try:
            self._file.seek(self._size)  # not the end: a write that failed before may have left a piece there
            self._file.truncate()
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise InfraFailure(
                f"{self.path} takes no event: {error}", code="audit_write", fix="free space on its disk"
            ) from error
        self._size += len(data)
        self.lines += 1
        self.head = written.hash
        self._recent.append(written)
        return written

    def _rotate(self) -> None:
        """Begin the next file, whose first line holds on to the last hash; compress and prune closed ones aside."""
        before = (self._file, self.path, self._number, self._size, self.lines)
        try:
            self._begin(self._number + 1)
            self._append("rotation", "audit", "rotate", "success", {"closed": before[1].name, "lines": before[4]})
        except (OSError, InfraFailure) as error:  # the event itself is on disk: go on in the old file
            log.warning("the audit log cannot begin another file: %s", error)
            self._file, self.path, self._number, self._size, self.lines = before
            return
        assert before[0] is not None
        before[0].close()
        self._retain(time.time())
        if self._packing is not None:
            self._packing.join()
        self._packing = threading.Thread(target=self._pack, args=(self._number,), name="audit-pack", daemon=True)
        self._packing.start()

    def _begin(self, number: int) -> None:
        self._number, self._size, self.lines = number, 0, 0
        self.path = self.folder / f"audit-{number:08d}.jsonl"
        self._file = open(self.path, "r+b" if self.path.exists() else "w+b")  # noqa: SIM115
        _sync(self.folder)

    def _pack(self, before: int) -> None:
        """Compress closed files. The plain one goes when the compressed one is on disk; a crash between repeats it."""
        for number, path in files(self.folder):
            if number >= before or path.suffix == ".gz":
                continue
            target = path.with_name(path.name + ".gz")
            aside = target.with_name(f".{target.name}.aside")
            try:
                with open(path, "rb") as source, open(aside, "wb") as raw:
                    with gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as packed:
                        while block := source.read(2**20):
                            packed.write(block)
                    raw.flush()
                    os.fsync(raw.fileno())
                os.replace(aside, target)
                os.utime(target, (path.stat().st_mtime,) * 2)
                path.unlink()
                _sync(self.folder)
            except OSError as error:  # it stays readable as it is, and is tried again at the next opening
                log.warning("%s is not compressed: %s", path, error)

    def prune(self, now: float | None = None) -> list[str]:
        """Remove closed files older than ``retention_days`` and record it; their names."""
        with self._mutex:
            return self._retain(time.time() if now is None else now)

    def _retain(self, now: float) -> list[str]:
        limit = now - self.config.retention_days * DAY_S
        gone: list[Path] = []
        last_hash = ""
        for number, path in files(self.folder):
            try:
                end = None if number >= self._number or path.stat().st_mtime > limit else last_event(path)
            except FileNotFoundError:  # just closed, and packed since it was listed: not old
                end = None
            if end is None:
                break
            gone.append(path)
            last_hash = end.hash
        if gone:
            names = [path.name for path in gone]
            self._append("retention", "audit", "remove", "success", {"files": names, "last_hash": last_hash})
            for path in gone:
                path.unlink(missing_ok=True)
                path.with_name(path.name.removesuffix(".gz")).unlink(missing_ok=True)
            _sync(self.folder)
        return [path.name for path in gone]

    # -- opening and closing ----------------------------------------------------------------------------------------

    def _open(self) -> None:
        known = files(self.folder)
        if not known:
            self._begin(1)
            return
        number, path = known[-1]
        torn, new_file = b"", path.suffix == ".gz"
        earlier = known[:-1]
        if new_file:
            earlier = known
            self._begin(number + 1)
        else:
            self._begin(number)
            torn = self._cut()
        for event in self._tail(earlier):
            self._recent.append(event)
            self.head = event.hash
        if not self._size and earlier:
            closed = earlier[-1][1].name.removesuffix(".gz")
            self._append("rotation", "audit", "rotate", "success", {"closed": closed})
        if torn:
            text = torn[:TORN_KEPT].decode("utf-8", "replace")
            self._append("repair", "audit", "cut", "success", {"file": path.name, "bytes": len(torn), "text": text})
        self._retain(time.time())
        self._pack(self._number)

    def _cut(self) -> bytes:
        """Cut what follows the last end of line in the current file: a line that a crash tore apart was never acknowledged."""
        assert self._file is not None
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        self._size, self.lines = whole, data.count(b"\n")
        if whole < len(data):
            self._file.truncate(whole)
            self._file.flush()
            os.fsync(self._file.fileno())
        return data[whole:]

    def _tail(self, earlier: list[tuple[int, Path]]) -> list[AuditEvent]:
        """The last events of the current file, or of the one before while the current one is empty."""
        assert self._file is not None
        if self._size:
            start = max(0, self._size - TAIL)
            self._file.seek(start)
            lines = self._file.read(self._size - start).splitlines()
            path = self.path
        elif earlier:
            path = earlier[-1][1]
            lines = list(deque(lines_of(path), maxlen=KEPT))
        else:
            return []
        events = [event for event in map(parse, lines) if event is not None]
        if not lines or not events or events[-1].line != lines[-1]:
            raise BadInput(
                f"the last line of {path} is no audit event, the chain cannot go on",
                code="audit_broken",
                fix=f"pixelis audit {self.folder} says what is wrong; move the folder away to begin another",
            )
        return events

    def recent(self, n: int = 50) -> list[AuditEvent]:
        """The last ``n`` events, newest first; at most KEPT."""
        with self._mutex:
            return list(self._recent)[::-1][: max(0, n)]

    def close(self) -> None:
        """Wait for compression, close the file and let another writer in."""
        with self._mutex:
            if self._packing is not None:
                self._packing.join()
                self._packing = None
            if self._file is not None:
                self._file.close()
                self._file = None
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def __enter__(self) -> AuditLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _claim(path: Path, wait_s: float) -> BinaryIO | None:
    """The lock of a folder, which the kernel frees when its holder dies."""
    lock = open(path, "a+b")  # noqa: SIM115
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                lock.seek(0)
                holder = lock.read(100).decode("ascii", "replace")
                lock.close()
                raise BadInput(
                    f"the audit log {path.parent} is being written by process {holder or '?'}",
                    code="audit_in_use",
                    fix="end that process, or use another run.dir",
                ) from None
            time.sleep(0.02)
    lock.truncate(0)
    lock.write(str(os.getpid()).encode())
    lock.flush()
    return lock


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
