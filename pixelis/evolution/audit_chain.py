"""Reads the audit log: its lines and files, verification of the hash chain, search. ``audit`` writes the log."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pixelis.errors import MissingFile

Event = Literal[
    "start", "stop", "update", "candidate", "canary", "promotion", "rollback", "review", "feedback", "deletion", "pause", "alert",
    "rotation", "retention", "repair",
]  # fmt: skip
"""Kinds of events; the last three are the log's own."""

Result = Literal["success", "failure", "refused", "skipped"]

EVENTS: tuple[str, ...] = get_args(Event)
RESULTS: tuple[str, ...] = get_args(Result)

GENESIS = "0" * 64
"""``previous`` of the first line of a log."""

READ_ERRORS = (OSError, EOFError, zlib.error)
_NAME = re.compile(r"audit-(\d{8})\.jsonl(\.gz)?$")


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One line: ``time`` in seconds since the epoch, ``hash`` SHA-256 of the canonical JSON of all other fields."""

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
        """The line in the file, without its newline."""
        return canonical(asdict(self))


def canonical(value: Mapping[str, Any]) -> bytes:
    """ASCII JSON with sorted keys and no blanks, so that equal content has equal bytes. Raises ValueError, TypeError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest(fields: Mapping[str, Any]) -> str:
    """The hash of all fields of a line but ``hash`` itself."""
    return hashlib.sha256(canonical({key: value for key, value in fields.items() if key != "hash"})).hexdigest()


def parse(line: bytes) -> AuditEvent | None:
    """The event of a line, or None unless the line is canonical JSON of an event. The hash is not checked."""
    try:
        event = AuditEvent(**json.loads(line))
        return event if event.line == line and isinstance(event.details, dict) and isinstance(event.hash, str) else None
    except (ValueError, TypeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class Anchor:
    """The end of the chain, in a file beside the log's folder: ``head`` of the last line, number of ``events`` ever written."""

    head: str
    events: int


def anchor_file(folder: str | Path) -> Path:
    """The file beside the log's folder with its Anchor."""
    path = Path(folder).absolute()
    return path.with_name(f"{path.name}.head")


def read_anchor(folder: str | Path) -> Anchor | None:
    """The anchor of a log; None when there is none. A damaged one anchors nothing that is in the chain."""
    try:
        values = json.loads(anchor_file(folder).read_bytes())
        return Anchor(str(values["head"]), int(values["events"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        return Anchor("damaged", 0)


@dataclass(frozen=True, slots=True)
class Problem:
    """A break of the chain in ``line`` (from 1; 0: the whole file) of ``file``.

    Kinds: changed, removed, inserted, reordered, unreadable, head.
    """

    file: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}{f' line {self.line}' if self.line else ''}: {self.kind}: {self.text}"


@dataclass(slots=True)
class Report:
    """Result of ``verify``: ``head`` is the hash of the last line, ``torn`` if it is incomplete, ``anchored`` with an anchor."""

    files: int = 0
    lines: int = 0
    head: str = GENESIS
    torn: bool = False
    anchored: bool = False
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when the chain is unbroken."""
        return not self.problems


def files(folder: str | Path) -> list[tuple[int, Path]]:
    """Number and path of the log's files, oldest first; the plain file where a crash left both forms."""
    by_number: dict[int, Path] = {}
    for path in sorted(Path(folder).iterdir()):
        if match := _NAME.fullmatch(path.name):
            by_number.setdefault(int(match[1]), path)  # `.jsonl` sorts before `.jsonl.gz`
    return sorted(by_number.items())


def lines_of(path: Path) -> Iterator[bytes]:
    """Whole lines without their newline; an incomplete last line is left out. Raises READ_ERRORS."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line[:-1]


def last_event(path: Path) -> AuditEvent | None:
    """The last event of a file; None when it cannot be read."""
    try:
        last = deque(lines_of(path), maxlen=1)
    except READ_ERRORS:
        return None
    return parse(last[0]) if last else None


def _existing(folder: str | Path) -> list[tuple[int, Path]]:
    path = Path(folder)
    if not path.is_dir() or not (result := files(path)):
        raise MissingFile(f"no audit log in {path}", fix="pass the run.dir of a service, or its folder `audit`")
    return result


def search(
    folder: str | Path,
    event: str | None = None,
    actor: str | None = None,
    since: float | None = None,
    until: float | None = None,
    result: str | None = None,
) -> Iterator[AuditEvent]:
    """Events that meet all conditions, in order; times in seconds since the epoch, inclusive. Hashes are not checked.

    Raises MissingFile when there is no log.
    """
    low, high = -math.inf if since is None else since, math.inf if until is None else until
    for _, path in _existing(folder):
        for entry in map(parse, lines_of(path)):
            if entry is None or not low <= entry.time <= high:
                continue
            if event in (None, entry.event) and actor in (None, entry.actor) and result in (None, entry.result):
                yield entry


def verify(folder: str | Path, head: str | None = None) -> Report:
    """Follow the chain through all files and report each line that breaks it.

    ``head`` is an earlier ``Report.head``, which must be in the chain. So must the anchor, or the end was cut off.
    Raises MissingFile when there is no log.
    """
    anchor = read_anchor(folder)  # before the lines: a running service may append more
    report = Report(anchored=anchor is not None)
    try:
        existing = _existing(folder)
    except MissingFile as error:
        if anchor is None:
            raise
        fix = "restore the folder from a backup"
        raise MissingFile(f"{error.message}, but {anchor.events} events were written to it", fix=fix) from None
    index = _Index(existing)
    chain = _Chain(report, index)
    expected = existing[0][0]
    for number, path in existing:
        if number != expected:
            missing = f"audit-{expected:08d}" + (f" to {number - 1:08d}" if number - 1 > expected else "")
            report.problems.append(Problem(path.name, 0, "removed", f"{missing} before it is missing"))
        expected = number + 1
        report.files += 1
        try:
            for line_number, line in enumerate(lines_of(path), 1):
                report.lines += 1
                chain.follow(path.name, line_number, line)
        except READ_ERRORS as error:
            report.problems.append(Problem(path.name, 0, "unreadable", str(error)))
            chain.trusted = False
    report.head = chain.last
    last = existing[-1][1]
    if last.suffix != ".gz" and last.stat().st_size:
        with open(last, "rb") as file:
            file.seek(-1, os.SEEK_END)
            report.torn = file.read(1) != b"\n"
    if head is not None and head not in index.positions and head != index.origin:
        report.problems.append(Problem(last.name, 0, "head", f"{head} is not in the chain: its end was cut off"))
    if anchor is not None and anchor.head not in index.positions and anchor.head != index.origin:
        text = f"event {anchor.events}, the last one written, is not in the chain: its end was cut off or emptied"
        report.problems.append(Problem(last.name, 0, "head", text))
    return report


class _Index:
    """First pass over all lines.

    ``positions`` are line indices over all files by hash, ``removed`` the last hashes that retention recorded, ``origin`` the
    hash that the first line follows.
    """

    def __init__(self, existing: list[tuple[int, Path]]):
        self.positions: dict[str, int] = {}
        self.removed: set[str] = set()
        self.origin = GENESIS
        count = 0
        for _, path in existing:
            try:
                for line in lines_of(path):
                    event = parse(line)
                    if event is not None:
                        self.positions.setdefault(event.hash, count)
                        self.origin = event.previous if count == 0 else self.origin
                        if event.event == "retention" and isinstance(last_hash := event.details.get("last_hash"), str):
                            self.removed.add(last_hash)
                    count += 1
            except READ_ERRORS:
                continue  # verify reports the file


class _Chain:
    """Second pass: follows the hashes line by line and classifies breaks.

    ``trusted`` is False after a line whose hash is unknown or wrong: the next line's ``previous`` is then not checked.
    """

    def __init__(self, report: Report, index: _Index):
        self.report, self.index = report, index
        self.last = GENESIS
        self.trusted = True
        self.lines: list[tuple[str, int]] = []
        self.reported: set[int] = set()

    def follow(self, file: str, line_number: int, line: bytes) -> None:
        """Check the next line."""
        position = len(self.lines)
        self.lines.append((file, line_number))
        event = parse(line)
        if event is None:
            self._report(position, "unreadable", "not a line that the log wrote")
            self.trusted = False
            return
        original = self.index.positions[event.hash]
        if original != position:
            self._report(position, "inserted", "a copy of {} line {}".format(*self.lines[original]))
            return
        changed = digest(asdict(event)) != event.hash
        if changed:
            self._report(position, "changed", f"its content does not have the hash {event.hash[:12]}…")
        elif self.trusted and event.previous != self.last:
            self._classify(position, event.previous)
        self.last, self.trusted = event.hash, not changed

    def _classify(self, position: int, previous: str) -> None:
        predecessor = self.index.positions.get(previous)
        if position == 0:
            if previous not in self.index.removed:
                self._report(position, "removed", "the lines before it are missing, and no retention recorded that")
        elif predecessor is None:
            self._report(position, "removed", "the line before it was removed or replaced")
        elif predecessor > position:
            self._report(position, "reordered", "it stands before the line that it follows")
        elif not any(i in self.reported for i in range(predecessor + 1, position)):
            for i in range(predecessor + 1, position):
                self._report(i, "inserted", "the next line follows the line before it")

    def _report(self, position: int, kind: str, text: str) -> None:
        self.reported.add(position)
        self.report.problems.append(Problem(*self.lines[position], kind, text))
