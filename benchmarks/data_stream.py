"""What streaming by Ray Data costs over a plain loop that does the same, and whether memory stays flat.

    python -m benchmarks.data_stream [--quick]

Demonstrations: crops of photographs that ship in packages, each zoomed into once, are decoded, fitted and tokenised by
`demonstration_stream` and by a loop over `Player.play`; one process decodes in either. The cap is Ray's object store, and twenty
times as many bytes of prepared views go through it. Questions: JSON-lines rows by `question_stream` and by `read_questions`.
Memory is the private memory of this process and of all processes of its Ray, and what the object store holds.
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

from benchmarks import operation_sets as sets
from benchmarks.harness import Ratio, Report, arguments, local_ray
from pixelis.config import Config, parse

CAP = 80_000_000
"""Bytes of the object store: Ray's least."""
TIMES = 20
PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket")
SIDE = 448
"""Pixels of a view's side; each demonstration shows two."""
BATCH = 8


def write_demonstrations(folder: Path, count: int) -> str:
    """Rows about ``count`` cuts of photographs, JPEG files of 640 x 480 pixels."""
    rng = np.random.default_rng(0)
    photographs = [Image.fromarray(sets.photo(name)).resize((1280, 960)) for name in PHOTOGRAPHS]
    rows = []
    for i in range(count):
        left, top = (int(v) for v in rng.integers(0, (640, 480)))
        path = folder / f"{i:05d}.jpg"
        photographs[i % len(photographs)].crop((left, top, left + 640, top + 480)).save(path, quality=90)
        zoom = {"think": "Closer.", "op": "zoom_in", "target": "img0", "box": [0.2, 0.2, 0.7, 0.8]}
        turns = [zoom, {"answer": str(i % 10)}]
        rows.append({"id": f"d{i}", "question": "Which digit?", "media": [{"id": "img0", "uri": str(path)}], "turns": turns})
    source = folder / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(source)


def settings(source: str, steps: int) -> Config:
    """The embedded model with pictures as large as a real one sees."""
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
    """Bytes of views of each batch, and the batch dropped, as a learner does it."""
    from pixelis.datasets.demonstration_stream import demonstration_stream, samples_of

    dataset = demonstration_stream(config, store, 0, steps)
    for batch in dataset.iter_batches(batch_size=BATCH, batch_format="numpy"):
        yield sum(view.nbytes for sample in samples_of(batch) for view in sample.views)


def looped(config: Config, store: Path, steps: int) -> Iterator[int]:
    """The same samples by a plain loop."""
    from pixelis.datasets.demonstration_store import DemonstrationStore
    from pixelis.datasets.demonstration_stream import batch_sampler, played
    from pixelis.datasets.demonstrations import Player
    from pixelis.policy.model_path import resolve

    player, rows = Player(config, str(resolve(config.policy.model))), DemonstrationStore(store)
    draw = batch_sampler(config, rows)
    for step in range(steps):
        yield sum(view.nbytes for number in draw.rows(step, None) for view in played(player, rows[number]).views)


def timed(batches: Iterator[int]) -> tuple[float, int]:
    """Seconds and bytes of all batches after the first, with which processes have started and files have been read."""
    next(batches)
    start = time.perf_counter()
    moved = sum(batches)
    return time.perf_counter() - start, moved


class Memory:
    """Samples private memory by process of this program's tree, and the object store, while it is open."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float]] = []
        self.stop = threading.Event()

    def __enter__(self) -> Memory:
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop.set()
        self.thread.join()

    def peaks(self) -> list[str]:
        """MB in the second fifth and in the last fifth of the time: this process, all others together, the object store."""
        n = len(self.rows)
        parts = [self.rows[n // 5 : 2 * n // 5 + 1], self.rows[4 * n // 5 :]]
        return [" -> ".join(f"{max(row[i] for row in part) / 1e6:.0f}" for part in parts) for i in range(3)]

    def _sample(self) -> None:
        import ray
        from ray._private.internal_api import memory_summary

        address = ray.get_runtime_context().gcs_address
        while not self.stop.wait(0.5):
            told = re.search(r"Plasma memory usage (\d+) MiB", memory_summary(address, stats_only=True))
            own, others = private()
            self.rows.append((own, others, float(told[1]) * 2**20 if told else float("nan")))


def private() -> tuple[int, int]:
    """Bytes of private memory of this process and of its descendants together."""
    parents, sizes = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                status = (entry / "status").read_text()
            except OSError:  # it has just ended
                continue
            parents[int(entry.name)] = int(re.search(r"PPid:\s+(\d+)", status)[1])  # type: ignore[index]
            size = re.search(r"RssAnon:\s+(\d+)", status)
            sizes[int(entry.name)] = 1024 * int(size[1]) if size else 0
    me, below = os.getpid(), set()
    while more := {child for child, parent in parents.items() if parent in {me, *below}} - below:
        below |= more
    return sizes[me], sum(sizes[child] for child in below)


def ratio(ours: Callable[[], Iterator[int]], anchor: Callable[[], Iterator[int]], repeats: int) -> tuple[Ratio, float]:
    """Of whole passes in turns, and bytes per second of the anchor."""
    pairs = [(timed(ours()), timed(anchor())) for _ in range(repeats)]
    ratios = sorted(a[0] / b[0] for a, b in pairs)
    middle = statistics.median(ratios)
    shown = Ratio(
        statistics.median(a[0] for a, _ in pairs), statistics.median(b[0] for _, b in pairs), middle, ratios[0], ratios[-1]
    )
    return shown, pairs[0][1][1] / pairs[0][1][0]


def questions(report: Report, folder: Path, count: int, repeats: int) -> None:
    """JSON-lines rows by Ray Data and by a loop."""
    from pixelis.config import DataConfig
    from pixelis.datasets.questions import read_questions
    from pixelis.datasets.stream import question_stream

    path = folder / "questions.jsonl"
    with path.open("w", encoding="utf-8") as out:
        for i in range(count):
            row: dict[str, Any] = {"id": f"q{i}", "question": f"What is number {i}? " + "x" * 400, "answers": [str(i)]}
            out.write(json.dumps(row) + "\n")
    data = DataConfig(train=str(path), shuffle_rows=1000)

    def ours() -> Iterator[int]:
        stream = question_stream(data, 0)
        yield from (len(question.id) for question in itertools.islice(stream, count))
        stream.close()  # type: ignore[attr-defined]

    def anchor() -> Iterator[int]:
        plain = read_questions(data.train, seed=0, shuffle_rows=1000)
        return (len(question.id) for question in itertools.islice(plain, count))

    found, _ = ratio(ours, anchor, repeats)
    report.row(
        "questions: stream / loop, time", found, note=f"{count / found.ours_s:.0f} against {count / found.anchor_s:.0f} /s"
    )


def run(report: Report, quick: bool) -> None:
    """On a Ray of this machine."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        each = 2 * SIDE * SIDE * 3 * BATCH
        steps, long = (8, 16) if quick else (40, 1 + TIMES * CAP // each)
        config = settings(write_demonstrations(folder, 64 if quick else 400), long)
        with local_ray(config):
            from pixelis.datasets.demonstration_stream import fill_store

            fill_store(config, folder / "shelf")
            store = folder / "shelf"
            found, rate = ratio(lambda: streamed(config, store, steps), lambda: looped(config, store, steps), 1 if quick else 5)
            samples = (steps - 1) * BATCH
            report.row(
                "demonstrations: stream / loop, time", found, goal="<= 1.1", note=f"{samples / found.ours_s:.0f} samples/s"
            )
            report.row("demonstrations: decode limit of one process", f"{samples / found.anchor_s:.0f} samples/s")
            report.row("demonstrations: the same in pixels", f"{rate / 1e6:.0f} MB/s")
            with Memory() as memory:
                moved = sum(streamed(config, store, long))
            report.row("memory: bytes streamed / cap", moved / CAP, goal=f">= {TIMES}")
            for what, told in zip(("this process", "Ray's processes", "object store"), memory.peaks(), strict=True):
                report.row(f"memory: {what}, MB early -> late", told, goal="flat")
            questions(report, folder, 2_000 if quick else 30_000, 1 if quick else 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of everything: whether it runs, not how fast")
    given = arguments(parser, quick=True)
    report = Report("Streaming by Ray Data")
    run(report, given.quick)
    report.close()


if __name__ == "__main__":
    main()
