"""The audit log: who changed the served policy and why, as a chain of hashes that reveals later edits.

Each JSON line holds the hash of the line before it, also across files. A file beside the folder anchors the
last hash, because a chain cannot show that its end was cut off.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import math
import os
import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

import filelock

from pixelis.config import AuditConfig
from pixelis.errors import BadInput, InfraFailure, MissingFile
from pixelis.files import sync, write_json
from pixelis.records import new_id

log = logging.getLogger(__name__)

Event = Literal[
    "start", "stop", "update", "candidate", "canary", "promotion", "rollback", "review", "feedback", "deletion", "pause", "alert",
    "retention", "repair",
]  # fmt: skip
"""Kinds of events; the last two are the log's own."""
Result = Literal["success", "failure", "refused", "skipped"]
EVENTS: tuple[str, ...] = get_args(Event)
RESULTS: tuple[str, ...] = get_args(Result)

FOLDER = "audit"
"""Name of the log's folder in a run."""
GENESIS = "0" * 64
"""``previous`` of the first line of a log."""
RECENT = 200
LOCK_WAIT_S = 5.0
MAX_TORN_CHARS = 2000
DAY_S = 86400.0
_NAME = re.compile(r"audit-(\d{8})\.jsonl(\.gz)?")


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One line. ``hash`` is the SHA-256 of the canonical JSON of all other fields."""

    id: str
    time: float
    event: str
    actor: str
    action: str
    result: str
    details: dict[str, Any]
    previous: str
    hash: str

    @property
    def line(self) -> bytes:
        return canonical(asdict(self))


def canonical(value: Mapping[str, Any]) -> bytes:
    """ASCII JSON with sorted keys and no blanks, so that equal content has equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest(fields: Mapping[str, Any]) -> str:
    content = {key: value for key, value in fields.items() if key != "hash"}
    return hashlib.sha256(canonical(content)).hexdigest()


def parse(line: bytes) -> AuditEvent | None:
    """The event of a line, None unless it is canonical JSON of one. Its hash is not checked."""
    try:
        event = AuditEvent(**json.loads(line))
        typed = isinstance(event.details, dict) and isinstance(event.hash, str)
        return event if typed and event.line == line else None
    except (ValueError, TypeError, RecursionError):
        return None


# -- writing


class AuditLog:
    """The one writer of a folder; thread-safe. Raises BadInput ``audit_in_use`` and ``audit_broken``."""

    def __init__(self, folder: str | Path, config: AuditConfig, lock_wait_s: float = LOCK_WAIT_S):
        self.folder, self.config = Path(folder), config
        self.folder.mkdir(parents=True, exist_ok=True)
        self._mutex = threading.RLock()
        self._recent: deque[AuditEvent] = deque(maxlen=RECENT)
        self._head, self._events = GENESIS, 0
        self._file: BinaryIO | None = None
        self._lock = filelock.FileLock(self.folder / "lock", mode=0o600, thread_local=False)
        try:
            self._lock.acquire(timeout=lock_wait_s)
        except filelock.Timeout:
            raise BadInput(
                f"the audit log {self.folder} is in use by another process",
                code="audit_in_use",
                fix="stop the other service, or use another run.dir",
            ) from None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def write(
        self,
        event: str,
        actor: str,
        action: str,
        result: str = "success",
        details: Mapping[str, Any] | None = None,
    ) -> AuditEvent:
        """Append one event, which is on disk on return. Raises InfraFailure ``audit_write``."""
        with self._mutex:
            if self._file is None:
                raise InfraFailure("the audit log is closed", code="audit_closed", fix="open it again")
            try:
                if self._size >= self.config.rotate_bytes:
                    self._begin_file(self._number + 1)
                    self.prune()
                return self._append(event, actor, action, dict(details or {}), result)
            except OSError as error:
                message = f"cannot append an event to {self._path}: {error}"
                raise InfraFailure(message, code="audit_write", fix="free space on its disk") from error

    def _append(
        self, event: str, actor: str, action: str, details: dict[str, Any], result: str = "success"
    ) -> AuditEvent:
        assert self._file is not None
        values: dict[str, Any] = {
            "id": new_id("audit"),
            "time": time.time(),
            "event": event,
            "actor": actor,
            "action": action,
            "result": result,
            "details": json.loads(canonical(details)),  # as a reader sees them: tuples become lists
            "previous": self._head,
        }
        written = AuditEvent(**values, hash=digest(values))
        line = written.line + b"\n"
        self._file.seek(self._size)  # not at the end: a failed write may have left a fragment there
        self._file.truncate()
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._size += len(line)
        self._head, self._events = written.hash, self._events + 1
        self._recent.append(written)
        anchor = anchor_file(self.folder)
        try:
            write_json(anchor, {"head": self._head, "events": self._events})
        except OSError as error:  # the event itself is on disk, and the next one tries again
            log.warning("cannot write %s: %s", anchor, error)
        return written

    def _begin_file(self, number: int) -> None:
        path = self.folder / f"audit-{number:08d}.jsonl"
        file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
        sync(self.folder)
        if self._file is not None:
            self._file.close()
        self._file, self._path, self._number, self._size = file, path, number, 0

    def _open(self) -> None:
        """Continue the last file. An incomplete last line was never acknowledged and is cut off."""
        existing = files(self.folder)
        number, path = existing[-1] if existing else (1, None)
        self._begin_file(number + 1 if path is not None and path.suffix == ".gz" else number)
        assert self._file is not None
        content = self._file.read()
        self._size = content.rfind(b"\n") + 1
        torn = content[self._size :]
        for _, path in reversed(existing):  # the last file is empty if its writer was killed at once
            if lines := list(deque(lines_of(path), maxlen=RECENT)):
                last = parse(lines[-1])
                if last is None:
                    raise BadInput(
                        f"the last line of {path} is no audit event, so the chain cannot be continued",
                        code="audit_broken",
                        fix=f"see `pixelis audit {self.folder}`; move the folder away to begin another log",
                    )
                self._recent.extend(filter(None, map(parse, lines)))
                self._head = last.hash
                break
        self._check_anchor([path for _, path in existing])
        if torn:
            text = torn[:MAX_TORN_CHARS].decode("utf-8", "replace")
            details = {"file": self._path.name, "bytes": len(torn), "text": text}
            self._append("repair", "audit", "cut", details)
        self.prune()

    def _check_anchor(self, paths: list[Path]) -> None:
        """Count the events so far. If the anchor is not in the chain, record that the end was cut off."""
        anchor = read_anchor(self.folder)
        if anchor is not None and anchor.head == self._head:
            self._events = anchor.events
            return
        hashes = [event.hash for path in paths for event in map(parse, lines_of(path)) if event is not None]
        if anchor is None:
            self._events = len(hashes)
        elif anchor.head in hashes:  # a crash before the anchor was written
            self._events = anchor.events + len(hashes) - 1 - hashes.index(anchor.head)
        else:
            log.error("the end of the audit log %s was cut off", self.folder)
            # The next line follows the lost one, so that the gap stays visible.
            self._head, self._events = anchor.head, anchor.events
            self._append("repair", "audit", "missing_end", anchor._asdict())

    def prune(self) -> list[str]:
        """Remove closed files older than ``retention_days``, after recording it; returns their names."""
        limit = time.time() - self.config.retention_days * DAY_S
        with self._mutex:
            expired: list[Path] = []
            last_hash = ""
            for number, path in files(self.folder):
                if number >= self._number or path.stat().st_mtime > limit:
                    break
                last = deque(lines_of(path), maxlen=1)
                if not last or (event := parse(last[0])) is None:
                    break
                expired.append(path)
                last_hash = event.hash
            names = [path.name for path in expired]
            if expired:
                self._append("retention", "audit", "remove", {"files": names, "last_hash": last_hash})
                for path in expired:
                    path.unlink()
                sync(self.folder)
            return names

    def recent(self, n: int = 50) -> list[AuditEvent]:
        """The last ``n`` events, newest first; at most RECENT."""
        with self._mutex:
            return list(self._recent)[::-1][:n]

    def close(self) -> None:
        with self._mutex:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._lock.release()

    def __enter__(self) -> AuditLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- reading


class Anchor(NamedTuple):
    """The end of the chain: the hash of its last line, and the number of events ever written."""

    head: str
    events: int


def anchor_file(folder: str | Path) -> Path:
    path = Path(folder).absolute()
    return path.with_name(f"{path.name}.head")


def read_anchor(folder: str | Path) -> Anchor | None:
    """The anchor of a log, if any. A damaged one anchors nothing that is in the chain."""
    try:
        values = json.loads(anchor_file(folder).read_bytes())
        return Anchor(str(values["head"]), int(values["events"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        return Anchor("damaged", 0)


def files(folder: str | Path) -> list[tuple[int, Path]]:
    """Number and path of the log's files, oldest first. Version 0.1.0 compressed closed ones."""
    by_number: dict[int, Path] = {}
    for path in sorted(Path(folder).iterdir()):
        if match := _NAME.fullmatch(path.name):
            # `.jsonl` sorts before `.jsonl.gz`: a crash may have left both
            by_number.setdefault(int(match[1]), path)
    return sorted(by_number.items())


def lines_of(path: Path) -> Iterator[bytes]:
    """Whole lines without their newline; an incomplete last line is left out."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line[:-1]


def existing_files(folder: str | Path) -> list[Path]:
    """The log's files, oldest first. Raises MissingFile without a log."""
    path = Path(folder)
    result = files(path) if path.is_dir() else []
    if not result:
        anchor = read_anchor(path)
        written = f", but {anchor.events} events were written to it" if anchor is not None else ""
        raise MissingFile(
            f"no audit log in {path}{written}",
            fix="pass the run.dir of a service, or restore the folder from a backup",
        )
    return [path for _, path in result]


def search(
    folder: str | Path,
    event: str | None = None,
    actor: str | None = None,
    since: float | None = None,
    until: float | None = None,
    result: str | None = None,
) -> Iterator[AuditEvent]:
    """Events that meet all conditions, in order; times in seconds since the epoch, inclusive.

    Hashes are not checked. Raises MissingFile without a log.
    """
    low, high = -math.inf if since is None else since, math.inf if until is None else until
    wanted = [
        (name, value) for name, value in (("event", event), ("actor", actor), ("result", result)) if value
    ]
    for path in existing_files(folder):
        for entry in filter(None, map(parse, lines_of(path))):
            if low <= entry.time <= high and all(getattr(entry, name) == value for name, value in wanted):
                yield entry


@dataclass(frozen=True, slots=True)
class Problem:
    """A break of the chain in ``line`` (from 1; 0: the whole file) of ``file``."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}{f' line {self.line}' if self.line else ''}: {self.text}"


@dataclass(slots=True)
class Report:
    """Result of ``verify``: ``head`` is the last line's hash; ``torn``: that line is incomplete."""

    files: int = 0
    lines: int = 0
    head: str = GENESIS
    torn: bool = False
    anchored: bool = False
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(folder: str | Path, head: str | None = None) -> Report:
    """Follow the chain through all files and report each line that breaks it.

    The anchor and ``head``, an earlier ``Report.head``, must be in the chain. Raises MissingFile.
    """
    anchor = read_anchor(folder)  # before the lines: a running service may append more
    paths = existing_files(folder)
    report = Report(files=len(paths), anchored=anchor is not None)
    first: AuditEvent | None = None
    expected: str | None = None
    hashes, retired = {GENESIS}, {GENESIS}
    for path in paths:
        try:
            for number, line in enumerate(lines_of(path), 1):
                event = parse(line)
                report.lines += 1
                first = event if report.lines == 1 else first
                problem = _problem(event, expected)
                if problem:
                    report.problems.append(Problem(path.name, number, problem))
                if event is None:
                    expected = None
                    continue
                if not problem and event.event == "retention":
                    retired.add(str(event.details.get("last_hash")))
                expected = report.head = event.hash
                hashes.add(event.hash)
        except (OSError, EOFError, zlib.error) as error:
            report.problems.append(Problem(path.name, 0, f"unreadable: {error}"))
            expected = None
    if first is not None:
        hashes.add(first.previous)  # of an expired file
        if first.previous not in retired:
            text = "removed: the lines before it are missing, and no retention recorded that"
            report.problems.insert(0, Problem(paths[0].name, 1, text))
    last = paths[-1]
    report.torn = last.suffix == ".jsonl" and last.read_bytes()[-1:] not in (b"", b"\n")
    if head is not None and head not in hashes:
        report.problems.append(
            Problem(last.name, 0, f"head: {head} is not in the chain: its end was cut off")
        )
    if anchor is not None and anchor.head not in hashes:
        text = f"head: event {anchor.events}, the last one written, is not in the chain: its end was cut off"
        report.problems.append(Problem(last.name, 0, text))
    return report


def _problem(event: AuditEvent | None, expected: str | None) -> str:
    """How a line breaks the chain, "" if it does not; ``expected`` None accepts any line before it."""
    if event is None:
        return "unreadable: not a line that the log wrote"
    if digest(asdict(event)) != event.hash:
        return "changed: its content does not have its hash"
    if expected not in (None, event.previous):
        return "broken: it does not follow the line before it, so lines were removed, inserted or moved here"
    return ""
