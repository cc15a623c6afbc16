"""A part of `benchmarks.gpu` while it runs: its figures, goals and helpers."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_models import random_model

ROOT = Path(__file__).parents[1]
MIB = 2**20


class Skip(Exception):
    """The part cannot run here; the message is the reason."""


@dataclass
class Part:
    """A part while it runs. device, smoke, folder, models: of the whole run; figures: name -> value; failures:
    missed goals.
    """

    device: torch.device
    smoke: bool
    folder: Path
    models: Path
    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def figure(self, name: str, value: Any, passed: bool | None = None, goal: str = "") -> None:
        """Record and print a figure. passed: whether it reaches its goal; None without one.

        Goals do not count in a smoke run.
        """
        self.figures[name] = value
        if passed is False and not self.smoke:
            self.failures.append(f"{name} {value} (goal {goal})")
        mark = {None: " ", True: "+", False: "-"}[passed]
        text = f"{value:.4g}" if isinstance(value, float) else value
        print(f"  {mark} {name:58} {text}  {f'goal {goal}' if goal else ''}".rstrip(), flush=True)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Turn an error into a missed goal, so that the rest of the part still runs."""
        try:
            yield
        except Skip:
            raise
        except Exception as error:
            traceback.print_exc(limit=-6)
            self.failures.append(f"{name}: {type(error).__name__}: {error}")

    def timed(self, function: Callable[[], object], repeats: int = 5) -> float:
        """Median seconds of a call, after one warm-up."""
        function()
        seconds = []
        for _ in range(1 if self.smoke else repeats):
            self.synchronize()
            start = time.perf_counter()
            function()
            self.synchronize()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def extra_memory(self, function: Callable[[], object]) -> float | None:
        """MiB that a call allocates on the GPU beyond what was allocated before; None on a CPU."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / MIB

    def model(self, family: str, size: str) -> Path:
        """Folder of a random model; tiny in a smoke run."""
        return random_model(self.models, family, "tiny" if self.smoke else size, self.device)


def job(*arguments: str, timeout: int = 1800) -> str:
    """Run a `pixelis` job as a user would, show what it prints, and return it.

    Raises RuntimeError if it fails.
    """
    command = [sys.executable, "-m", "pixelis.jobs.cli", *arguments]
    lines = []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        limit = threading.Timer(timeout, process.kill)
        limit.start()
        for line in process.stdout or ():
            print(f"    | {line}", end="", flush=True)
            lines.append(line)
        limit.cancel()
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with exit code {process.returncode}: {lines[-1:]}")
    return "".join(lines)
