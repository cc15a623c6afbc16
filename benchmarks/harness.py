"""Shared measurement code: alternating timings of two implementations, ratios with quartiles, and reports."""

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
    from pixelis.datasets.demonstrations import Player
    from pixelis.records import Action, ImageView

REPEATS = 7
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Ratio:
    """Median seconds of Pixelis and of a baseline, with the median ratio and its quartiles ``low`` and
    ``high``.
    """

    ours_s: float
    baseline_s: float
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}] "
            f"(ours {1e3 * self.ours_s:.2f} ms, baseline {1e3 * self.baseline_s:.2f} ms)"
        )


def time_call(function: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one call. Pass ``time.process_time`` as ``clock`` on a busy machine."""
    start = clock()
    function()
    return clock() - start


def compare(
    ours: Callable[[], object],
    baseline: Callable[[], object],
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> Ratio:
    """Time both alternately, after one warm-up call of each, so that other load on the machine affects
    both.
    """
    ours()
    baseline()
    pairs = [(time_call(ours, clock), time_call(baseline, clock)) for _ in range(repeats)]
    ratios = [a / b for a, b in pairs]
    low, median, high = statistics.quantiles(ratios, n=4)
    return Ratio(
        statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs), median, low, high
    )


def percentile(values: list[float], share: float) -> float:
    """Return the quantile ``share`` (0..1) of the values."""
    return float(np.quantile(np.asarray(values), share))


def copy_rate() -> float:
    """Return the bytes per second that one thread copies in memory: the lower bound for moving pixels."""
    source = np.ones(1 << 26, np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    return source.nbytes / min(time_call(lambda: np.copyto(target, source)) for _ in range(5))


def machine() -> str:
    """Describe the processor, its cores and the thread limit, for the head of a report."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next(
                (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name
            )
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores, {os.environ.get('OMP_NUM_THREADS', 'all')} thread(s) per process"


def parse_args(parser: argparse.ArgumentParser, **smoke: Any) -> argparse.Namespace:
    """Parse the command line. With `--smoke`, the values of ``smoke`` become the defaults.

    tests/ray/test_benchmarks.py runs every benchmark with `--smoke`.
    """
    parser.add_argument(
        "--smoke", action="store_true", help="check in seconds that the benchmark works; figures mean nothing"
    )
    if "--smoke" in sys.argv[1:]:
        parser.set_defaults(**smoke)
    return parser.parse_args()


def keep_arguments(folder: Path, args: argparse.Namespace, *selecting: str) -> None:
    """Keep the arguments in ``folder``, whose finished parts are not repeated; end the process if it has
    parts of others.

    selecting: names of arguments that only select which parts to run.
    """
    values = {
        name: str(value.absolute()) if isinstance(value, Path) else value
        for name, value in vars(args).items()
    }
    for name in ("dir", "smoke", *selecting):
        del values[name]
    path = folder / "arguments.json"
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    changed = [
        f"{name} was {earlier[name]}, is {value}"
        for name, value in values.items()
        if earlier.get(name, value) != value
    ]
    if changed:
        message = f"{folder} has results of other arguments: {'; '.join(changed)}"
        raise SystemExit(f"{message}\n  fix: choose another --dir, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values), encoding="utf-8")


@contextmanager
def local_ray(config: Config) -> Iterator[None]:
    """Start a local Ray by ``config.cluster`` with its own token and stop it afterwards; reuse a connected
    Ray.
    """
    connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    with tempfile.TemporaryDirectory() as folder:
        if not connected:
            token = Path(folder) / "token"
            token.write_text(secrets.token_hex(32))
            # Set before Ray is imported, which reads them.
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


class LocalTools:
    """Tools of one question's media that run operations in this process; see `dialogue.agent.Tools`."""

    def __init__(self, player: Player, media: dict[str, Any]):
        self.player, self.media = player, media

    async def execute(
        self, action: Action, images: list[ImageView], objects: dict[str, dict[str, Any]]
    ) -> Any:
        """Execute one action of the policy."""
        from pixelis.operations import execute

        return execute(
            action, self.player.scene(self.media, objects, images), self.player.renderer.operations
        )


class Report:
    """Prints rows to stderr as they are measured and all of them as one JSON line to stdout at the end."""

    def __init__(self, title: str):
        self.rows: dict[str, object] = {}
        print(f"{title}\n{machine()}, memory copy {copy_rate() / 1e9:.1f} GB/s\n", file=sys.stderr)

    def row(self, name: str, value: object, goal: str = "", note: str = "") -> None:
        """Print and record one figure, with its goal and a remark."""
        text = f"{value:.3f}" if isinstance(value, float) else str(value)
        print(f"  {name:46} {text:>40}  {goal:14} {note}".rstrip(), file=sys.stderr, flush=True)
        self.rows[name] = value.__dict__ if isinstance(value, Ratio) else value

    def close(self) -> None:
        """Print the JSON line."""
        print(json.dumps({"machine": machine(), **self.rows}))
