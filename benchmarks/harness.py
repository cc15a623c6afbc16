"""One way to measure: A and B in turns in one run, the ratio's median and spread, and the physical floor beside it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pixelis.config import Config

REPEATS = 7
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Ratio:
    """Seconds of ours and of the anchor, measured in turns; ``low`` and ``high`` are the quartiles of the ratio."""

    ours_s: float
    anchor_s: float
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}] "
            f"(ours {1e3 * self.ours_s:.2f} ms, anchor {1e3 * self.anchor_s:.2f} ms)"
        )


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call, by the wall clock unless ``clock`` is another (``time.process_time`` on a busy machine)."""
    start = clock()
    work()
    return clock() - start


def compare(
    ours: Callable[[], object],
    anchor: Callable[[], object],
    repeats: int = REPEATS,
    warm: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Ratio:
    """Time both in turns (ours, anchor, ours, anchor, ...): what disturbs the machine then disturbs both."""
    for _ in range(warm):
        ours()
        anchor()
    pairs = [(seconds(ours, clock), seconds(anchor, clock)) for _ in range(repeats)]
    ratios = [a / b for a, b in pairs]
    low, median, high = statistics.quantiles(ratios, n=4)
    return Ratio(statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs), median, low, high)


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` (0..1) of the values do not exceed."""
    return float(np.quantile(np.asarray(values), share))


def copy_rate() -> float:
    """Bytes per second of one thread's memory copy on this machine: the floor under anything that moves pixels."""
    source = np.ones(1 << 26, np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    return source.nbytes / min(seconds(lambda: np.copyto(target, source)) for _ in range(5))


def machine() -> str:
    """What ran this, for the head of every report."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores, {os.environ.get('OMP_NUM_THREADS', 'all')} thread(s) per process"


def arguments(parser: argparse.ArgumentParser, **smoke: Any) -> argparse.Namespace:
    """Parse the command line. With `--smoke` the values of ``smoke`` are the defaults: it shows that all runs, and no speed.

    The gate runs every benchmark that way, see tests/ray/test_benchmarks.py.
    """
    parser.add_argument("--smoke", action="store_true", help="a run of seconds that shows whether the benchmark works")
    if "--smoke" in sys.argv[1:]:
        parser.set_defaults(**smoke)
    return parser.parse_args()


@contextmanager
def local_ray(config: Config) -> Iterator[None]:
    """A local Ray with the slots and the memory of ``config.cluster`` and a token of its own; one that is connected is shared."""
    connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    with tempfile.TemporaryDirectory() as folder:
        if not connected:
            token = Path(folder) / "token"
            token.write_text(secrets.token_hex(32))
            # Ray reads both when it is imported.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_AUTH_TOKEN_PATH", str(token))
        import ray

        from pixelis.actors.cluster import connect

        connect(config)
        try:
            yield
        finally:
            if not connected:
                ray.shutdown()


class Report:
    """Prints rows as they are measured and ends with one JSON line on standard output."""

    def __init__(self, title: str):
        self.rows: dict[str, object] = {}
        print(f"{title}\n{machine()}, memory copy {copy_rate() / 1e9:.1f} GB/s\n", file=sys.stderr)

    def row(self, name: str, value: object, goal: str = "", note: str = "") -> None:
        """One figure; ``goal`` is what it is held against."""
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        print(f"  {name:46} {shown:>40}  {goal:14} {note}".rstrip(), file=sys.stderr, flush=True)
        self.rows[name] = value.__dict__ if isinstance(value, Ratio) else value

    def close(self) -> None:
        """The JSON line, for a file or another program."""
        print(json.dumps({"machine": machine(), **self.rows}))
