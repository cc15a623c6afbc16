"""The event log of a run, `events.jsonl`: one JSON object per line, appended by several processes.

Each line is one `write` to a descriptor opened for appending, so lines do not mix. A process that dies may
leave an incomplete line: the next writer starts a new one, and readers skip it.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pixelis.files import replacing

FILE = "events.jsonl"
ALARM = "alarm"
"""Kind of the alarms of a run: `step` and `text`."""
LEARNER_FAILURE = "learner/failure"
"""Kind of the events that a failing learner worker writes."""
NOTICE = "notice"
"""Kind of the messages about lost nodes: `text`, and `waiting` if the run makes no steps until then."""
JOINED = "generator/joined"
LEFT = "generator/left"
STREAMED = "weights/streamed"
"""Kinds of the events of generators: `generator`, its name, and `generators`, their number."""
REPLAYED = "replayed"
"""Kind of a step's event that was lost because the run resumed from an earlier checkpoint."""
BLOCK = 2**16
STAGE = "stage"
"""Kind of the events that name the startup stage of a run."""


class EventLog:
    """Appends events to `run_dir/events.jsonl`. A crash of the process loses none; `close` flushes to the disk."""

    def __init__(self, run_dir: str | Path):
        self.path = Path(run_dir) / FILE
        self._lock = threading.Lock()
        self._descriptor: int | None = None

    def write(self, kind: str, /, **fields: Any) -> None:
        """Append `{"time": unix seconds, "kind": kind, **fields}` as strict JSON, see `plain`."""
        event = {"time": round(time.time(), 3), "kind": kind, **fields}
        line = json.dumps(plain(event), allow_nan=False).encode() + b"\n"
        with self._lock:
            if self._descriptor is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
                size = os.fstat(self._descriptor).st_size
                if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                    os.write(self._descriptor, b"\n")  # end the incomplete line of a process that died
            while line:  # a signal or a full disk may interrupt a write
                line = line[os.write(self._descriptor, line) :]

    def close(self) -> None:
        """Flush to the disk; a later `write` opens the file again."""
        with self._lock:
            if self._descriptor is not None:
                os.fsync(self._descriptor)
                os.close(self._descriptor)
                self._descriptor = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[EventLog], tuple[Path]]:
        return EventLog, (self.path.parent,)


def read(run_dir: str | Path, kind: str | None = None) -> list[dict[str, Any]]:
    """All events of a run, or those of one kind, in order; none without a log."""
    path = Path(run_dir) / FILE
    if not path.is_file():
        return []
    events = []
    with path.open("rb") as lines:
        for line in lines:
            if (event := _event(line)) is not None and (kind is None or event.get("kind") == kind):
                events.append(event)
    return events


class Tail:
    """The events of a run that are written from now on."""

    def __init__(self, run_dir: str | Path):
        self.path = Path(run_dir) / FILE
        self.position = self.path.stat().st_size if self.path.is_file() else 0

    def read(self) -> list[dict[str, Any]]:
        """The complete events since the last call."""
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            file.seek(self.position)
            *lines, incomplete = file.read().split(b"\n")
            self.position = file.tell() - len(incomplete)
        return [event for line in lines if (event := _event(line)) is not None]


def last(run_dir: str | Path, *kinds: str) -> dict[str, Any] | None:
    """The newest event of these kinds, None without one. Reads from the end."""
    path, tail = Path(run_dir) / FILE, b""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        while start:
            size = min(start, max(BLOCK, len(tail)))  # doubles what was read
            start -= size
            file.seek(start)
            tail = file.read(size) + tail
            first, *rest = tail.split(b"\n")  # the first line may be cut off
            for line in reversed(rest if start else [first, *rest]):
                if (event := _event(line)) is not None and event.get("kind") in kinds:
                    return event
    return None


def mark_replayed(run_dir: str | Path, step: int) -> int:
    """Mark steps and evaluations after `step` as `replayed` in place, before a run repeats them; returns their number."""
    path, marked = Path(run_dir) / FILE, 0
    if not path.is_file():
        return 0
    with path.open("r+b") as file:
        position = 0
        for line in iter(file.readline, b""):
            event = _event(line) or {}
            kind = str(event.get("kind", ""))
            if (kind.startswith("step/") or kind == "evaluation") and event.get("step", 0) > step:
                old, new = f'"kind": "{kind}"'.encode(), f'"kind": "{REPLAYED}"'.encode()
                file.seek(position)
                file.write(line.replace(old, new.ljust(len(old)), 1))
                marked += 1
            position += len(line)
            file.seek(position)
    return marked


def drop_steps(path: str | Path, step: int) -> None:
    """Remove the rows of `step` and later ones from a JSON-lines file, before a run repeats them."""
    path = Path(path)
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    rows = [line for line in lines if (_event(line) or {"step": step})["step"] < step]
    if len(rows) < len(lines):
        with replacing(path) as file:
            file.writelines(rows)


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:  # an incomplete line; includes invalid UTF-8
        return None
    return event if isinstance(event, dict) else None


def plain(value: Any) -> Any:
    """The value as strict JSON types; NaN and infinities become texts, values without a JSON form their repr."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "model_dump"):
        return plain(value.model_dump())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return plain(value.tolist())
    return repr(value)


def as_number(value: Any) -> float | None:
    """The value as a finite float; None for texts, lists, booleans, NaN and infinities."""
    if isinstance(value, (bool, str, bytes)) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
