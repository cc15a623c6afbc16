"""Progress of a job: a live bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

WINDOW = 20
"""Recent updates that the speed is measured over."""


class Progress:
    """`with Progress("rft", total=40) as p: p.update(done, **metrics)`; a resumed run passes `start`.

    On a stream that is not a terminal, a line is printed at most every `every` seconds.
    """

    def __init__(
        self,
        name: str,
        total: int,
        *,
        start: int = 0,
        enabled: bool = True,
        every: float = 5.0,
        stream: TextIO | None = None,
    ):
        self.name, self.total, self.done, self.every = name, total, start, every
        self._stream = stream or sys.stdout
        self._enabled = enabled
        self._started = time.monotonic()
        # Filled from the first update on: the time before it is spent on loading.
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
            self._task = self._bar.add_task(
                self.name, total=self.total, completed=self.done, left="", metrics=""
            )
            self._bar.start()
        return self

    def update(self, done: int, *, waiting: bool = False, **metrics: float | int | str) -> None:
        """Show that `done` of `total` are finished. waiting: the remaining time is unknown."""
        now = time.monotonic()
        if waiting or done < self.done:
            self._recent.clear()
        elif done != self.done:
            self._recent.append((now, done))
        self.done = done
        self._metrics = "  ".join(
            f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in metrics.items()
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, left=self._left(), metrics=self._metrics)
        elif now - self._last_line >= self.every:
            self._last_line = now
            self._line(self._left())

    @property
    def seconds_left(self) -> float | None:
        """Remaining seconds, estimated from the recent updates; None while there are too few."""
        if len(self._recent) < 2:
            return None
        (first_at, first), (last_at, last) = self._recent[0], self._recent[-1]
        if last - first < max(1, min(WINDOW // 2, self.total // 50)):
            return None
        return max(0.0, (self.total - last) * (last_at - first_at) / (last - first))

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        duration = clock(time.monotonic() - self._started)
        outcome = f"stopped after {duration}" if kind else f"took {duration}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, left=outcome)
            self._bar.stop()
        else:
            self._line(outcome)

    def _left(self) -> str:
        seconds = self.seconds_left
        return "" if seconds is None else f"{clock(seconds)} left"

    def _line(self, note: str) -> None:
        if self._enabled:
            parts = (f"[{self.name}] {self.done}/{self.total}", note, self._metrics)
            print("  ".join(part for part in parts if part), file=self._stream, flush=True)


def stage(name: str, enabled: bool = True) -> None:
    if enabled:
        print(f"[starting] {name}", flush=True)


def clock(seconds: float) -> str:
    """Seconds as `42 s`, `3:05 min` or `2:03 h`."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60}:{rounded % 60:02d} min"
    return f"{rounded // 3600}:{rounded % 3600 // 60:02d} h"


class StepProgress:
    def __init__(self, name: str, enabled: bool = True):
        self.name, self.enabled = name, enabled
        self._step = ""
        self._progress: Progress | None = None

    def __call__(self, step: str, done: int, total: int) -> None:
        if step != self._step or self._progress is None:
            self.close()
            self._step, self._progress = step, Progress(f"{self.name} {step}", total, enabled=self.enabled)
            self._progress.__enter__()
        self._progress.total = total
        self._progress.update(done)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.__exit__(None, None, None)
            self._progress = None
