"""A training run of thousands of steps whose memory, objects and open files must stay flat; a part of
`benchmarks.soak`.
"""

from __future__ import annotations

import argparse
import re
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import ray

from benchmarks import process_tree
from benchmarks.harness import Report, local_ray
from pixelis.actors import placement
from pixelis.config import Config, absolute, load
from pixelis.jobs import rft
from pixelis.jobs.driver import run_folder
from pixelis.telemetry import events

WARM_UP = 0.1
"""Share of the steps after which memory counts: caches fill and allocators settle before."""
SETTINGS = [
    "policy.model=nano",
    "rft.prompts_per_step=2",
    "rft.group_size=2",
    "dialogue.max_turn_tokens=8",
    "dialogue.max_turns=1",
]
# A policy without SFT never answers, so the reward is for short replies.
SETTINGS += [
    "rewards.weights.length=1.0",
    "learner.lr=1e-5",
    "learner.checkpoint_every=50",
    "telemetry.progress=false",
]
SETTINGS += ["cluster.cpus=4", "cluster.object_store_bytes=200000000", "engine.workers=1"]


def objects() -> int:
    """Number of objects in the object stores of the cluster."""
    from ray._private.internal_api import memory_summary

    text = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    match = re.search(r"Plasma memory usage [^,]*, (\d+) objects", text)
    if match is None:
        raise ValueError(f"no number of objects in Ray's summary: {text}")
    return int(match[1])


def run(args: argparse.Namespace, report: Report) -> list[str]:
    """Run the part; returns the promises that were broken."""
    folder = Path(args.dir).absolute() / "training"
    settings = [*SETTINGS, f"rft.steps={args.steps}", f"run.dir={folder}", "run.resume=false", *args.override]
    config = absolute(load("configs/nano/base.yaml", settings))
    samples: list[tuple[int, dict[str, process_tree.Usage], int]] = []
    with local_ray(config):
        start = time.monotonic()
        _train(config, samples, args.sample_s)
        seconds = time.monotonic() - start
    rows = events.read(folder, "step/policy")
    report.row("training: steps", len(rows), str(args.steps), f"{seconds / max(1, len(rows)):.2f} s a step")
    report.row(
        "training: steps that trained", sum(row.get("learner/trained_sequences", 0) > 0 for row in rows)
    )
    warm = [(usage, count) for step, usage, count in samples if args.smoke or step >= WARM_UP * args.steps]
    broken = [f"{len(rows)} of {args.steps} steps"] if len(rows) != args.steps else []
    if len(warm) < 6:
        return broken
    usages = [usage for usage, _ in warm]
    third = len(warm) // 3
    stored = [
        statistics.median(count for _, count in part) for part in (warm[third : 2 * third], warm[-third:])
    ]
    memory = process_tree.growth(usages, lambda u: u.bytes)
    files = process_tree.growth(usages, lambda u: u.files)
    report.row("training: private memory, last third / second", memory, "<= 1.02", f"{len(warm)} samples")
    report.row("training: open files, last third / second", files, "<= 1.01")
    report.row(
        "training: objects, median of the second third, of the last", f"{stored[0]:g}, {stored[1]:g}", "flat"
    )
    for line in process_tree.table(usages):
        name = line.pop("role")
        report.row(f"training: {name}", str(line))
    if not args.smoke:
        broken += ["memory grows"] if memory > 1.02 else []
        broken += ["open files grow"] if files > 1.01 else []
        broken += ["objects grow"] if stored[1] > 1.1 * stored[0] + 2 else []
    return broken


def _train(
    config: Config, samples: list[tuple[int, dict[str, process_tree.Usage], int]], sample_s: float
) -> None:
    """Run the job; record its step, processes and objects every ``sample_s`` seconds."""
    done, me = threading.Event(), psutil.Process()

    def watch() -> None:
        while not done.wait(sample_s):
            row: dict[str, Any] | None = events.last(Path(config.run.dir), "step/policy")
            usage = process_tree.usage([me, *me.children(recursive=True)])
            samples.append((int(row["step"]) if row else 0, usage, objects()))

    with run_folder(config, config.data.train), placement.placed(config) as actors:
        watcher = threading.Thread(target=watch, name="soak", daemon=True)
        watcher.start()
        try:
            rft.run(config, actors)
        finally:
            done.set()
            watcher.join(30)
