"""Progress of a driver: a live bar with the time left on a terminal, plain lines in a log file or a Ray job."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

WINDOW = 20
"""Updates over which the speed is measured, so that a slow first step does not spoil the estimate for long."""


class Progress:
    """`with Progress("rft", total=40) as p: p.update(done, **metrics)`.

    `done` counts from 0 to `total`; a resumed run passes `start`. `metrics` are shown as they come, names like
    `reward/accuracy` too (`**{"reward/accuracy": 0.4}`). When the stream is no terminal, at most one line every `every` seconds
    is printed. `enabled=False` prints nothing.
    """

    def __init__(
        self, name: str, total: int, *, start: int = 0, enabled: bool = True, every: float = 5.0, stream: TextIO | None = None
    ):
        self.name, self.total, self.done, self.every = name, total, start, every
        self._stream = stream or sys.stdout
        self._enabled = enabled
        self._began = time.monotonic()
        # Not from the start on: until the first step is done, time goes into loading.
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._last_line = float("-inf")
        self._metrics = ""
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        if self._enabled and self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}"),
                TextColumn("{task.fields[metrics]}", markup=False),
            )
            self._bar = Bar(*columns, console=Console(file=self._stream), refresh_per_second=4)
            self._task = self._bar.add_task(self.name, total=self.total, completed=self.done, left="", metrics="")
            self._bar.start()
        return self

    def update(self, done: int, **metrics: float | int | str) -> None:
        """Say that `done` of `total` is finished, with the latest metrics."""
        now = time.monotonic()
        if done != self.done:
            self._recent.append((now, done))
        self.done = done
        self._metrics = "  ".join(f"{key} {_short(value)}" for key, value in metrics.items())
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, left=self._left(), metrics=self._metrics)
        elif now - self._last_line >= self.every:
            self._last_line = now
            self._line(self._left())

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end from the last updates; None before there are two."""
        if len(self._recent) < 2:
            return None
        (first_at, first), (last_at, last) = self._recent[0], self._recent[-1]
        if last <= first:
            return None
        return max(0.0, (self.total - last) * (last_at - first_at) / (last - first))

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        took = clock(time.monotonic() - self._began)
        end = f"stopped after {took}" if kind else f"took {took}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, left=end)
            self._bar.stop()
        else:
            self._line(end)

    def _left(self) -> str:
        seconds = self.seconds_left
        return "" if seconds is None else f"{clock(seconds)} left"

    def _line(self, note: str) -> None:
        if self._enabled:
            parts = (f"[{self.name}] {self.done}/{self.total}", note, self._metrics)
            print("  ".join(part for part in parts if part), file=self._stream, flush=True)


def stage(name: str, enabled: bool = True) -> None:
    """Say on standard output what a starting job is doing, before there is progress to show."""
    if enabled:
        print(f"[starting] {name}", flush=True)


def clock(seconds: float) -> str:
    """Seconds as a person reads them: `42 s`, `3:05 min`, `2:03 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def _short(value: float | int | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class Steps:
    """Shows one step after the other: called with a step's name, how many are done and how many there are."""

    def __init__(self, name: str, enabled: bool = True):
        self.name, self.enabled = name, enabled
        self._step = ""
        self._shown: Progress | None = None

    def __call__(self, step: str, done: int, total: int) -> None:
        if step != self._step or self._shown is None:
            self.close()
            self._step, self._shown = step, Progress(f"{self.name} {step}", total, enabled=self.enabled)
            self._shown.__enter__()
        self._shown.total = total
        self._shown.update(done)

    def close(self) -> None:
        """End the line of the last step."""
        if self._shown is not None:
            self._shown.__exit__(None, None, None)
            self._shown = None
