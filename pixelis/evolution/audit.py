"""The writer of the audit log: who changed the served policy and why, as a chain of hashes that makes later edits visible.

The log is a folder of JSON lines files, ``audit-00000001.jsonl`` and so on; closed files are compressed. Each line holds the
hash of the line before it, also across files: a new file begins with a ``rotation`` event. Retention records what it removes
before it does. The chain alone cannot show that its end was cut off: a file beside the folder anchors the last hash. Against
somebody who can write both, store ``Report.head`` elsewhere and pass it to ``verify``.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pixelis.config import AuditConfig
from pixelis.errors import BadInput, InfraFailure
from pixelis.evolution.audit_chain import (
    EVENTS,
    GENESIS,
    RESULTS,
    Anchor,
    AuditEvent,
    Problem,
    Report,
    anchor_file,
    canonical,
    digest,
    files,
    last_event,
    lines_of,
    parse,
    read_anchor,
    search,
    verify,
)
from pixelis.files import sync
from pixelis.records import new_id

__all__ = [
    "EVENTS",
    "FOLDER",
    "GENESIS",
    "RESULTS",
    "AuditEvent",
    "AuditLog",
    "Problem",
    "Report",
    "anchor_file",
    "search",
    "verify",
]

log = logging.getLogger(__name__)

FOLDER = "audit"
"""Name of the log's folder in a run."""

RECENT = 200
TAIL_BYTES = 2**18
LOCK = "lock"
LOCK_WAIT_S = 5.0
MAX_TORN_CHARS = 2000
DAY_S = 86400.0


@dataclass(slots=True)
class _LogFile:
    """The file that events are appended to; ``size`` in bytes of whole lines."""

    number: int
    path: Path
    handle: BinaryIO
    size: int = 0
    lines: int = 0

    @classmethod
    def open(cls, folder: Path, number: int) -> _LogFile:
        path = folder / f"audit-{number:08d}.jsonl"
        file = cls(number, path, open(path, "r+b" if path.exists() else "w+b"))  # noqa: SIM115
        sync(folder)
        return file

    def append(self, data: bytes) -> None:
        """Write at ``size``, not at the end: a failed write may have left a fragment there. On disk on return."""
        self.handle.seek(self.size)
        self.handle.truncate()
        self.handle.write(data)
        self.handle.flush()
        os.fsync(self.handle.fileno())
        self.size += len(data)
        self.lines += 1

    def cut_torn_line(self) -> bytes:
        """Remove an incomplete last line, which a crash left and which was never acknowledged; returns its bytes."""
        data = self.handle.read()
        self.size, self.lines = data.rfind(b"\n") + 1, data.count(b"\n")
        if self.size < len(data):
            self.handle.truncate(self.size)
            self.handle.flush()
            os.fsync(self.handle.fileno())
        return data[self.size :]


class AuditLog:
    """One writer per folder, usable from any number of threads; an event is on disk when ``write`` returns.

    Opening the log after a crash cuts an incomplete last line and records a ``repair``. Raises BadInput ``audit_in_use`` when
    another writer holds the folder, ``audit_broken`` when the chain cannot be continued from the last line.
    """

    def __init__(self, folder: str | Path, config: AuditConfig, lock_wait_s: float = LOCK_WAIT_S):
        self.folder, self.config = Path(folder), config
        self.folder.mkdir(parents=True, exist_ok=True)
        self._mutex = threading.RLock()
        self._recent: deque[AuditEvent] = deque(maxlen=RECENT)
        self._compression: threading.Thread | None = None
        self._file: _LogFile | None = None
        self._head, self._events = GENESIS, 0
        self._lock: BinaryIO | None = _lock(self.folder / LOCK, lock_wait_s)
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

        Raises BadInput for an unknown event or result and for details that are no JSON; InfraFailure ``audit_write`` when the
        disk refuses, in which case nothing was appended.
        """
        if event not in EVENTS or result not in RESULTS:
            valid = EVENTS if event not in EVENTS else RESULTS
            raise BadInput(f"no audit event {event}/{result}", code="unknown_event", fix=f"one of {', '.join(valid)}")
        with self._mutex:
            if self._file is None:
                raise InfraFailure("the audit log is closed", code="audit_closed", fix="open it again")
            written = self._append(event, actor, action, dict(details or {}), result)
            if self._file.size >= self.config.rotate_bytes:
                self._rotate()
            return written

    def _append(self, event: str, actor: str, action: str, details: dict[str, Any], result: str = "success") -> AuditEvent:
        assert self._file is not None
        values: dict[str, Any] = {
            "id": new_id("audit"),
            "time": time.time(),
            "event": event,
            "actor": actor,
            "action": action,
            "result": result,
            "details": details,
            "previous": self._head,
        }
        try:
            values["details"] = json.loads(canonical(details))  # as a reader sees them: tuples become lists
            written = AuditEvent(**values, hash=digest(values))
        except (ValueError, TypeError) as error:
            raise BadInput(f"audit details that JSON cannot take: {error}", fix="plain finite values only") from None
        try:
            self._file.append(written.line + b"\n")
        except OSError as error:
            raise InfraFailure(
                f"cannot append an event to {self._file.path}: {error}", code="audit_write", fix="free space on its disk"
            ) from error
        self._head, self._events = written.hash, self._events + 1
        self._recent.append(written)
        self._write_anchor()
        return written

    def _rotate(self) -> None:
        """Begin the next file; remove expired files and compress closed ones in the background."""
        closed = self._file
        assert closed is not None
        try:
            self._file = _LogFile.open(self.folder, closed.number + 1)
            self._append("rotation", "audit", "rotate", {"closed": closed.path.name, "lines": closed.lines})
        except (OSError, InfraFailure) as error:  # the event itself is on disk: continue in the old file
            log.warning("the audit log cannot begin another file: %s", error)
            self._file = closed
            return
        closed.handle.close()
        self.prune()
        if self._compression is not None:
            self._compression.join()
        self._compression = threading.Thread(target=self._compress, args=(self._file.number,), name="audit-gzip", daemon=True)
        self._compression.start()

    def _compress(self, before: int) -> None:
        """Compress the files numbered below ``before``. A plain file is removed once its compressed form is on disk."""
        for number, path in files(self.folder):
            if number >= before or path.suffix == ".gz":
                continue
            target = path.with_name(path.name + ".gz")
            temporary = target.with_name(f".{target.name}.aside")
            try:
                with open(path, "rb") as source, open(temporary, "wb") as raw:
                    with gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as compressed:
                        shutil.copyfileobj(source, compressed)
                    raw.flush()
                    os.fsync(raw.fileno())
                os.replace(temporary, target)
                os.utime(target, (path.stat().st_mtime,) * 2)
                path.unlink()
                sync(self.folder)
            except OSError as error:  # the plain file stays readable; the next opening tries again
                log.warning("cannot compress %s: %s", path, error)

    def prune(self, now: float | None = None) -> list[str]:
        """Remove closed files older than ``retention_days``, record the removal, and return their names."""
        limit = (time.time() if now is None else now) - self.config.retention_days * DAY_S
        with self._mutex:
            assert self._file is not None
            expired: list[Path] = []
            last_hash = ""
            for number, path in files(self.folder):
                try:
                    last = None if number >= self._file.number or path.stat().st_mtime > limit else last_event(path)
                except FileNotFoundError:  # compressed since the listing, hence recently closed
                    last = None
                if last is None:
                    break
                expired.append(path)
                last_hash = last.hash
            names = [path.name for path in expired]
            if expired:
                self._append("retention", "audit", "remove", {"files": names, "last_hash": last_hash})
                for path in expired:
                    path.unlink(missing_ok=True)
                    path.with_name(path.name.removesuffix(".gz")).unlink(missing_ok=True)
                sync(self.folder)
            return names

    # -- opening and closing ----------------------------------------------------------------------------------------

    def _open(self) -> None:
        existing = files(self.folder)
        number, last = existing[-1] if existing else (0, None)
        torn = b""
        if last is None or last.suffix == ".gz":
            self._file = _LogFile.open(self.folder, number + 1)
            closed = last
        else:
            self._file = _LogFile.open(self.folder, number)
            torn = self._file.cut_torn_line()
            closed = existing[-2][1] if len(existing) > 1 else None
        for event in self._last_events(closed):
            self._recent.append(event)
            self._head = event.hash
        missing = self._check_anchor(existing)
        if not self._file.size and closed is not None:
            self._append("rotation", "audit", "rotate", {"closed": closed.name.removesuffix(".gz")})
        if missing is not None:
            self._append("repair", "audit", "missing_end", {"head": missing.head, "events": missing.events})
        if torn:
            text = torn[:MAX_TORN_CHARS].decode("utf-8", "replace")
            self._append("repair", "audit", "cut", {"file": self._file.path.name, "bytes": len(torn), "text": text})
        self.prune()
        self._compress(self._file.number)

    def _check_anchor(self, existing: list[tuple[int, Path]]) -> Anchor | None:
        """Count the events so far; returns the anchor if it is not in the chain, whose end was then cut off.

        The next line then follows the lost one, so that the gap stays visible.
        """
        anchor = read_anchor(self.folder)
        if anchor is None:
            self._events = sum(1 for _, path in existing for _ in lines_of(path))
            return None
        self._events = anchor.events
        if self._head == anchor.head:
            return None
        hashes = [event.hash for _, path in existing for event in map(parse, lines_of(path)) if event is not None]
        if anchor.head in hashes:  # a crash before the anchor was written
            self._events += len(hashes) - 1 - hashes.index(anchor.head)
            self._write_anchor()
            return None
        log.error("the end of the audit log %s was cut off: %d events were written to it", self.folder, anchor.events)
        self._head = anchor.head
        return anchor

    def _write_anchor(self) -> None:
        """Replace the anchor. A failure is logged: the event itself is on disk, and the next event tries again."""
        path = anchor_file(self.folder)
        aside = path.with_name(f".{path.name}.aside")
        try:
            with open(aside, "w", encoding="ascii") as file:
                json.dump({"head": self._head, "events": self._events}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
            sync(path.parent)
        except OSError as error:
            log.warning("cannot write %s: %s", path, error)

    def _last_events(self, closed: Path | None) -> list[AuditEvent]:
        """The last events of the current file, or of the last closed one while the current one is empty."""
        file = self._file
        assert file is not None
        if file.size:
            path = file.path
            file.handle.seek(max(0, file.size - TAIL_BYTES))
            lines = file.handle.read(min(file.size, TAIL_BYTES)).splitlines()
        elif closed is not None:
            path = closed
            lines = list(deque(lines_of(path), maxlen=RECENT))
        else:
            return []
        events = [event for event in map(parse, lines) if event is not None]
        if not lines or not events or events[-1].line != lines[-1]:
            raise BadInput(
                f"the last line of {path} is no audit event, the chain cannot be continued",
                code="audit_broken",
                fix=f"pixelis audit {self.folder} names the broken lines; move the folder away to begin another log",
            )
        return events

    def recent(self, n: int = 50) -> list[AuditEvent]:
        """The last ``n`` events, newest first; at most RECENT."""
        with self._mutex:
            return list(self._recent)[::-1][: max(0, n)]

    def close(self) -> None:
        """Wait for compression, close the file and release the folder."""
        with self._mutex:
            if self._compression is not None:
                self._compression.join()
            if self._file is not None:
                self._file.handle.close()
            if self._lock is not None:
                self._lock.close()
            self._compression = self._file = self._lock = None

    def __enter__(self) -> AuditLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lock(path: Path, wait_s: float) -> BinaryIO:
    """The locked lock file of a folder; the kernel releases the lock when the process dies."""
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
                    f"process {holder or '?'} is writing the audit log {path.parent}",
                    code="audit_in_use",
                    fix="end that process, or use another run.dir",
                ) from None
            time.sleep(0.02)
    lock.truncate(0)
    lock.write(str(os.getpid()).encode())
    lock.flush()
    return lock
