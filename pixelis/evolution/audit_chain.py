"""What an audit log is made of: its lines, its files, the check of its chain, the search in it. ``audit`` writes it."""

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
"""``previous`` of the first line of all."""

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
        """The line as it stands in the file, without its end."""
        return canonical(asdict(self))


def canonical(value: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys and no blanks, in ASCII: one spelling for one content. Raises ValueError, TypeError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest(fields: Mapping[str, Any]) -> str:
    """The hash of a line's fields (all but ``hash``), ``previous`` among them."""
    return hashlib.sha256(canonical({key: value for key, value in fields.items() if key != "hash"})).hexdigest()


def parse(line: bytes) -> AuditEvent | None:
    """The event of a line, or None when it is not spelled as this log spells. Its hash is not checked."""
    try:
        event = AuditEvent(**json.loads(line))
        return event if event.line == line and isinstance(event.details, dict) and isinstance(event.hash, str) else None
    except (ValueError, TypeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong in ``line`` (from 1; 0: the whole file) of ``file``.

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
    """What ``verify`` found. ``head`` is the hash of the last line; ``torn``: the last line is incomplete."""

    files: int = 0
    lines: int = 0
    head: str = GENESIS
    torn: bool = False
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when nothing in the chain is wrong."""
        return not self.problems


def files(folder: str | Path) -> list[tuple[int, Path]]:
    """Files of the log, oldest first; the plain one where a crash left both forms."""
    found: dict[int, Path] = {}
    for path in sorted(Path(folder).iterdir()):
        if match := _NAME.fullmatch(path.name):
            found.setdefault(int(match[1]), path)  # `.jsonl` sorts before `.jsonl.gz`
    return sorted(found.items())


def lines_of(path: Path) -> Iterator[bytes]:
    """Lines without their ends; an incomplete last one is left out, as in ``_cut``. Raises OSError, EOFError, zlib.error."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line[:-1]


def last_event(path: Path) -> AuditEvent | None:
    try:
        last = deque(lines_of(path), maxlen=1)
    except (OSError, EOFError, zlib.error):
        return None
    return parse(last[0]) if last else None


def _existing(folder: str | Path) -> list[tuple[int, Path]]:
    path = Path(folder)
    if not path.is_dir() or not (result := files(path)):
        raise MissingFile(f"no audit log in {path}", fix="give the folder of a run that served, or its folder `audit`")
    return result


def search(
    folder: str | Path,
    event: str | None = None,
    actor: str | None = None,
    since: float | None = None,
    until: float | None = None,
    result: str | None = None,
) -> Iterator[AuditEvent]:
    """Events in order that meet all conditions; times in seconds since the epoch, both ends included. Checks no hash.

    Raises MissingFile when there is no log.
    """
    low, high = -math.inf if since is None else since, math.inf if until is None else until
    for _, path in _existing(folder):
        for found in map(parse, lines_of(path)):
            if found is None or not low <= found.time <= high:
                continue
            if event in (None, found.event) and actor in (None, found.actor) and result in (None, found.result):
                yield found


def verify(folder: str | Path, head: str | None = None) -> Report:
    """Follow the chain through all files and name each line that breaks it.

    ``head``: a hash that must be in the chain, noted when it was its end; without it, lines cut off at the end of the
    log are not seen. Raises MissingFile when there is no log.
    """
    report = Report()
    known = _existing(folder)
    places, removed, first = _survey(known)
    chain = _Chain(report, places, removed)
    expected_number = known[0][0]
    for number, path in known:
        if number != expected_number:
            missing = f"audit-{expected_number:08d}" + (f" to {number - 1:08d}" if number - 1 > expected_number else "")
            report.problems.append(Problem(path.name, 0, "removed", f"{missing} before it is missing"))
        expected_number = number + 1
        report.files += 1
        try:
            for number_of_line, line in enumerate(lines_of(path), 1):
                report.lines += 1
                chain.follow(path.name, number_of_line, line)
        except (OSError, EOFError, zlib.error) as error:
            report.problems.append(Problem(path.name, 0, "unreadable", str(error)))
            chain.lost()
    report.head = chain.last or GENESIS
    last = known[-1][1]
    if last.suffix != ".gz" and last.stat().st_size:
        with open(last, "rb") as file:
            file.seek(-1, os.SEEK_END)
            report.torn = file.read(1) != b"\n"
    if head is not None and head not in places and head != first:
        report.problems.append(Problem(last.name, 0, "head", f"{head} is not in the chain: its end was cut off"))
    return report


def _survey(known: list[tuple[int, Path]]) -> tuple[dict[str, int], set[str], str]:
    """Place of each hash (counted over all files), hashes at which retention cut, and what the first line follows."""
    places: dict[str, int] = {}
    removed: set[str] = set()
    first, count = GENESIS, 0
    for _, path in known:
        try:
            for line in lines_of(path):
                event = parse(line)
                if event is not None:
                    places.setdefault(event.hash, count)
                    first = event.previous if count == 0 else first
                    if event.event == "retention" and isinstance(cut := event.details.get("last_hash"), str):
                        removed.add(cut)
                count += 1
        except (OSError, EOFError, zlib.error):
            continue  # named by verify
    return places, removed, first


class _Chain:
    """Follows the hashes line by line and says what kind of break a break is."""

    def __init__(self, report: Report, places: dict[str, int], removed: set[str]):
        self.report, self.places, self.removed = report, places, removed
        self.last: str | None = GENESIS
        self.trusted = True
        self.seen: list[tuple[str, int]] = []
        self.blamed: set[int] = set()

    def lost(self) -> None:
        """Nothing is known of what the next line should follow."""
        self.trusted = False

    def follow(self, file: str, line_number: int, line: bytes) -> None:
        """Check the next line."""
        place = len(self.seen)
        self.seen.append((file, line_number))
        event = parse(line)
        if event is None:
            self._blame(place, "unreadable", "no line that the log wrote")
            self.lost()
            return
        if self.places[event.hash] != place:
            where = self.seen[self.places[event.hash]]
            self._blame(place, "inserted", f"a copy of {where[0]} line {where[1]}")
            return
        changed = digest(asdict(event)) != event.hash
        if changed:
            self._blame(place, "changed", f"its content does not have the hash {event.hash[:12]}…")
        elif self.trusted and event.previous != self.last:
            self._break(place, event)
        self.last, self.trusted = event.hash, not changed

    def _break(self, place: int, event: AuditEvent) -> None:
        before = self.places.get(event.previous)
        if place == 0:
            if event.previous not in self.removed:
                self._blame(place, "removed", "what stood before it is missing, and no retention recorded that")
        elif before is None:
            self._blame(place, "removed", "the line before it was removed or replaced")
        elif before > place:
            self._blame(place, "reordered", "it stands before the line that it follows")
        elif not any(i in self.blamed for i in range(before + 1, place)):
            for i in range(before + 1, place):
                self._blame(i, "inserted", "the next line follows the one before it")

    def _blame(self, place: int, kind: str, text: str) -> None:
        file, line = self.seen[place]
        self.blamed.add(place)
        self.report.problems.append(Problem(file, line, kind, text))
