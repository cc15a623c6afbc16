"""Cost of streaming by Ray Data over a plain loop that does the same work, and memory use over time.

    python -m benchmarks.data_stream [--quick]

Demonstrations: crops of photographs that ship in packages, each with one zoom, are decoded, resized and
tokenised by `demonstration_stream` and by a loop over `Player.play`; one process decodes in both. Twenty
times the bytes of Ray's object store pass through it as prepared views. Questions: JSON-lines rows are read
by `question_stream` and by `read_questions`. Memory is the private memory of this process, of all Ray
processes, and the content of the object store.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
from PIL import Image

from benchmarks import operation_datasets as sets
from benchmarks.harness import Ratio, Report, local_ray, parse_args
from pixelis.config import Config, parse

CAP = 80_000_000
"""Bytes of the object store: the minimum that Ray accepts."""
TIMES = 20
"""Bytes streamed, in units of the cap."""
PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket")
SIDE = 448
"""Pixels of a view's side. A demonstration has two views."""
BATCH = 8


def write_demonstrations(folder: Path, count: int) -> str:
    """Write ``count`` crops of photographs as 640 x 480 JPEG files; return the path of the rows about
    them.
    """
    rng = np.random.default_rng(0)
    photographs = [Image.fromarray(sets.photo(name)).resize((1280, 960)) for name in PHOTOGRAPHS]
    rows = []
    for i in range(count):
        left, top = (int(v) for v in rng.integers(0, (640, 480)))
        path = folder / f"{i:05d}.jpg"
        photographs[i % len(photographs)].crop((left, top, left + 640, top + 480)).save(path, quality=90)
        zoom = {"think": "Closer.", "op": "zoom_in", "target": "img0", "box": [0.2, 0.2, 0.7, 0.8]}
        turns = [zoom, {"answer": str(i % 10)}]
        rows.append(
            {
                "id": f"d{i}",
                "question": "Which digit?",
                "media": [{"id": "img0", "uri": str(path)}],
                "turns": turns,
            }
        )
    source = folder / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(source)


def make_config(source: str, steps: int) -> Config:
    """Return a configuration of the embedded model with views as large as those of a full-size model."""
    pixels = {"min_pixels": SIDE * SIDE, "max_pixels": SIDE * SIDE}
    return parse(
        {
            "dialogue": {"input": pixels, "crop": pixels, "max_context": 4096},
            "learner": {"row_tokens": 4096},
            "data": {"demonstrations": source, "train": source},
            "sft": {"steps": steps, "batch": BATCH},
            "cluster": {"cpus": 4, "object_store_bytes": CAP},
        }
    )


def streamed(config: Config, store: Path, steps: int) -> Iterator[int]:
    """Yield the bytes of the views of each batch from Ray Data; batches are not kept, as in a learner."""
    from pixelis.datasets.demonstration_stream import demonstration_stream, samples_of

    dataset = demonstration_stream(config, store, 0, steps)
    for batch in dataset.iter_batches(batch_size=BATCH, batch_format="numpy"):
        yield sum(view.nbytes for sample in samples_of(batch) for view in sample.views)


def looped(config: Config, store: Path, steps: int) -> Iterator[int]:
    """Yield the same from a plain loop over the same samples."""
    from pixelis.datasets.demonstration_store import DemonstrationStore
    from pixelis.datasets.demonstration_stream import batch_sampler, train_sample
    from pixelis.datasets.demonstrations import Player
    from pixelis.policy.model_path import resolve

    player, rows = Player(config, str(resolve(config.policy.model))), DemonstrationStore(store)
    draw = batch_sampler(config, rows)
    for step in range(steps):
        yield sum(
            view.nbytes
            for number in draw.rows(step, None)
            for view in train_sample(player, rows[number]).views
        )


def timed(batches: Iterator[int]) -> tuple[float, int]:
    """Return the seconds and bytes of all batches but the first, which includes the start of processes."""
    next(batches)
    start = time.perf_counter()
    size = sum(batches)
    return time.perf_counter() - start, size


class MemorySampler:
    """Context manager that samples the memory of this process, of its descendants, and of the object
    store.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float]] = []
        self.stop = threading.Event()

    def __enter__(self) -> MemorySampler:
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop.set()
        self.thread.join()

    def peaks(self) -> list[str]:
        """Return the peak MB in the second and the last fifth of the time: this process, its descendants,
        object store.
        """
        n = len(self.rows)
        parts = [self.rows[n // 5 : 2 * n // 5 + 1], self.rows[4 * n // 5 :]]
        return [" -> ".join(f"{max(row[i] for row in part) / 1e6:.0f}" for part in parts) for i in range(3)]

    def _sample(self) -> None:
        import ray
        from ray._private.internal_api import memory_summary

        address = ray.get_runtime_context().gcs_address
        while not self.stop.wait(0.5):
            usage = re.search(r"Plasma memory usage (\d+) MiB", memory_summary(address, stats_only=True))
            own, descendants = private_memory()
            self.rows.append((own, descendants, float(usage[1]) * 2**20 if usage else float("nan")))


def private_memory() -> tuple[int, int]:
    """Return the bytes of private memory of this process, and of its descendants together."""
    parents, sizes = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                status = (entry / "status").read_text()
            except OSError:  # the process has ended
                continue
            parents[int(entry.name)] = int(re.search(r"PPid:\s+(\d+)", status)[1])  # type: ignore[index]
            size = re.search(r"RssAnon:\s+(\d+)", status)
            sizes[int(entry.name)] = 1024 * int(size[1]) if size else 0
    own = os.getpid()
    descendants: set[int] = set()
    while (
        children := {child for child, parent in parents.items() if parent in {own, *descendants}}
        - descendants
    ):
        descendants |= children
    return sizes[own], sum(sizes[pid] for pid in descendants)


def compare_passes(
    ours: Callable[[], Iterator[int]], baseline: Callable[[], Iterator[int]], repeats: int
) -> tuple[Ratio, float]:
    """Time whole passes alternately; return the ratio with its range, and the bytes per second of the
    baseline.
    """
    pairs = [(timed(ours()), timed(baseline())) for _ in range(repeats)]
    ratios = sorted(a[0] / b[0] for a, b in pairs)
    ours_s, baseline_s = statistics.median(a[0] for a, _ in pairs), statistics.median(b[0] for _, b in pairs)
    baseline_seconds, baseline_bytes = pairs[0][1]
    return Ratio(
        ours_s, baseline_s, statistics.median(ratios), ratios[0], ratios[-1]
    ), baseline_bytes / baseline_seconds


def question_rows(report: Report, folder: Path, count: int, repeats: int) -> None:
    """Report JSON-lines rows read by Ray Data against a loop."""
    from pixelis.config import DataConfig
    from pixelis.datasets.questions import read_questions
    from pixelis.datasets.stream import question_stream

    path = folder / "questions.jsonl"
    with path.open("w", encoding="utf-8") as out:
        for i in range(count):
            row: dict[str, Any] = {
                "id": f"q{i}",
                "question": f"What is number {i}? " + "x" * 400,
                "answers": [str(i)],
            }
            out.write(json.dumps(row) + "\n")
    data = DataConfig(train=str(path), shuffle_rows=1000)

    def ours() -> Iterator[int]:
        stream = question_stream(data, 0)
        yield from (len(question.id) for question in itertools.islice(stream, count))
        stream.close()  # type: ignore[attr-defined]

    def baseline() -> Iterator[int]:
        plain = read_questions(data.train, seed=0, shuffle_rows=1000)
        return (len(question.id) for question in itertools.islice(plain, count))

    ratio, _ = compare_passes(ours, baseline, repeats)
    note = f"{count / ratio.ours_s:.0f} against {count / ratio.baseline_s:.0f} /s"
    report.row("questions: stream / loop, time", ratio, note=note)


def run(report: Report, quick: bool) -> None:
    """Measure on a local Ray."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batch_bytes = 2 * SIDE * SIDE * 3 * BATCH
        steps, memory_steps = (8, 16) if quick else (40, 1 + TIMES * CAP // batch_bytes)
        config = make_config(write_demonstrations(folder, 64 if quick else 400), memory_steps)
        with local_ray(config):
            from pixelis.datasets.demonstration_stream import fill_store

            store = folder / "demonstrations"
            fill_store(config, store)
            ratio, rate = compare_passes(
                lambda: streamed(config, store, steps),
                lambda: looped(config, store, steps),
                1 if quick else 5,
            )
            samples = (steps - 1) * BATCH
            note = f"{samples / ratio.ours_s:.0f} samples/s"
            report.row("demonstrations: stream / loop, time", ratio, goal="<= 1.1", note=note)
            report.row(
                "demonstrations: decode limit of one process", f"{samples / ratio.baseline_s:.0f} samples/s"
            )
            report.row("demonstrations: the same in pixels", f"{rate / 1e6:.0f} MB/s")
            with MemorySampler() as sampler:
                size = sum(streamed(config, store, memory_steps))
            report.row("memory: bytes streamed / cap", size / CAP, goal=f">= {TIMES}")
            for owner, peaks in zip(
                ("this process", "Ray's processes", "object store"), sampler.peaks(), strict=True
            ):
                report.row(f"memory: {owner}, MB early -> late", peaks, goal="flat")
            question_rows(report, folder, 2_000 if quick else 30_000, 1 if quick else 3)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small run that shows whether it works, not how fast"
    )
    args = parse_args(parser, quick=True)
    report = Report("Streaming by Ray Data")
    run(report, args.quick)
    report.close()


if __name__ == "__main__":
    main()
