"""Overlap of generation and training: seconds of a step against the longer of the two.

    python -m benchmarks.async_overlap

The Coordinator, with its router and rollout buffer, and the PolicyStore are the real actors. Generators sleep
for a set time per group, the learner for a set time per step. Goal: at most 1.10 with a staleness of 1 or
more; a staleness of 0 takes their sum. In a long tail, one group in a hundred takes eight times the median; a
weight update waits for running groups (`drain`) or does not (`keep`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from benchmarks.harness import Report, parse_args
from pixelis.actors.coordinator import Coordinator
from pixelis.actors.generator_router import RolloutRequest
from pixelis.actors.policy_store import PolicyStore
from pixelis.config import parse
from pixelis.policy.adapters import Adapter
from pixelis.records import Group, Trajectory

GENERATORS, QUESTIONS, GROUP = 2, 16, 2
SLOTS = 4
"""Groups that a generator rolls out concurrently."""
LONGER = 1.6
"""Seconds of the longer of generation and training; far above the latency of a Ray message."""


@ray.remote(num_cpus=0, max_concurrency=256)
class TimedGenerator:
    """A generator that sleeps instead of generating.

    It loads weights when no group runs (drain) or at once (keep).
    """

    def __init__(self, seconds: float, long_tail: bool, on_update: str):
        self.seconds, self.long_tail, self.drains, self.version = seconds, long_tail, on_update == "drain", -1
        self.slots = asyncio.Semaphore(SLOTS)
        self.open = 0
        self.idle = asyncio.Event()
        self.may_open = asyncio.Event()
        self.idle.set()
        self.may_open.set()

    async def health(self) -> dict[str, Any]:
        return {}

    async def load(self, version: int) -> int:
        if version != self.version:
            self.may_open.clear()
            try:
                if self.drains:
                    await self.idle.wait()
                self.version = version
            finally:
                self.may_open.set()
        return self.version

    @ray.method(num_returns=2)
    async def rollout(self, request: RolloutRequest) -> tuple[Any, ...]:
        question, group_id = request.question, request.group_id
        await self.may_open.wait()
        self.open += 1
        self.idle.clear()
        try:
            version = self.version
            async with self.slots:
                await asyncio.sleep(group_seconds(question.id, self.seconds, self.long_tail))
        finally:
            self.open -= 1
            if not self.open:
                self.idle.set()
        trajectories = [
            Trajectory(question_id=question.id, group_id=group_id, policy_version=version)
            for _ in range(request.samples)
        ]
        group = Group(id=group_id, question=question, trajectories=trajectories, policy_version=version)
        return group, {}, *[None] * len(question.media)


def group_seconds(question_id: str, mean: float, long_tail: bool) -> float:
    """Return ``mean``, or with a long tail a log-normal sample with this mean and p99 = 8 x median."""
    if not long_tail:
        return mean
    sigma = np.log(8) / 2.326
    rng = np.random.default_rng(list(question_id.encode()))
    return float(mean * rng.lognormal(-(sigma**2) / 2, sigma))


@ray.remote(num_cpus=0, max_concurrency=16)
class AlternatingScorer:
    """A scorer that rates every second rollout as correct."""

    async def score(self, group: Group, step: int | None = None, *_: Any, **__: Any) -> Group:
        scored = [
            t.model_copy(update={"reward": float(i % 2), "rewards": {"accuracy": float(i % 2)}})
            for i, t in enumerate(group.trajectories)
        ]
        return group.model_copy(update={"trajectories": scored})

    async def load(self, state: bytes | None) -> None:
        """Do nothing: this scorer has no state."""

    async def advance(self, step: int, is_last: bool = False) -> Any:
        from pixelis.rewards.grader import Advance

        return Advance()

    async def state(self) -> bytes:
        return b""


@dataclass
class Result:
    """Seconds of each step after the warm-up, the largest staleness of a batch, and the share of groups
    dropped as too old.
    """

    steps: list[float]
    staleness: float
    dropped: float


def run(
    generate: float,
    train: float,
    staleness: int,
    steps: int,
    long_tail: bool = False,
    on_update: str = "drain",
) -> Result:
    """Train with ``generate`` seconds for a batch of rollouts and ``train`` seconds for a step of the
    learner.
    """
    seconds = generate * GENERATORS * SLOTS / QUESTIONS
    adapter = Adapter(
        {"layer.A": np.zeros((4, 64), np.float32), "layer.B": np.zeros((64, 4), np.float32)},
        8,
        4,
        "benchmark",
    )
    with tempfile.TemporaryDirectory() as folder:
        rft = {
            "steps": steps,
            "prompts_per_step": QUESTIONS,
            "group_size": GROUP,
            "max_off_policy_steps": staleness,
        }
        config = parse(
            {"policy": {"model": "nano"}, "run": {"dir": folder}, "rft": rft, "telemetry": {"rollouts": 0}}
        )
        store = PolicyStore.remote(folder, None)  # type: ignore[attr-defined]
        generators = [TimedGenerator.remote(seconds, long_tail, on_update) for _ in range(GENERATORS)]  # type: ignore[attr-defined]
        scorer = AlternatingScorer.remote()  # type: ignore[attr-defined]
        coordinator = Coordinator.options(num_cpus=0).remote(config, generators, [scorer])  # type: ignore[attr-defined]
        ray.get(coordinator.begin.remote(0, {}, 0))
        ends, oldest, dropped = [], 0.0, 0.0
        for step in range(steps):
            batch = ray.get(coordinator.next_batch.remote(0, 1, step))
            oldest = max(oldest, batch.metrics["rollout/staleness"])
            dropped += batch.metrics["rollout/stale_groups"]
            time.sleep(train)
            adapter.tensors["layer.A"][0, 0] = step + 1  # the store publishes only changed weights
            published = coordinator.step_done.remote(step, store.publish.remote(adapter, "rft", step + 1))
            if not staleness:  # as batch_sources.RolloutSource does
                ray.get(published)
            ends.append(time.monotonic())
        ray.get(published)  # the store writes into the folder until then
        for actor in (coordinator, scorer, store, *generators):
            ray.kill(actor)
    return Result([b - a for a, b in itertools.pairwise(ends[1:])], oldest, dropped / (steps * QUESTIONS))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=10, help="steps of each run; the first two are not counted"
    )
    parser.add_argument("--staleness", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument(
        "--longer", type=float, default=LONGER, help="seconds of the longer of generation and training"
    )
    args = parse_args(parser, steps=3, staleness=[1], longer=0.1)
    longer = args.longer
    report = Report("async_overlap")
    connected = ray.is_initialized()
    if not connected:
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=200_000_000,
            include_dashboard=False,
            log_to_driver=False,
        )
    mixes = {"1:4": (longer / 4, longer), "1:1": (longer, longer), "4:1": (longer, longer / 4)}
    for name, (generate, train) in list(mixes.items())[: 1 if args.smoke else None]:
        for staleness in args.staleness:
            result = run(generate, train, staleness, args.steps)
            ratio = statistics.median(result.steps) / max(generate, train)
            mean = statistics.mean(result.steps) / max(generate, train)
            assert result.staleness <= staleness
            goal = "<= 1.10" if staleness else f"sum: {(generate + train) / max(generate, train):.2f}"
            report.row(f"generate:train {name}, staleness {staleness}", ratio, goal, f"mean {mean:.3f}")
    generation = longer
    cases = [(0, "drain"), *((s, u) for s in args.staleness if s for u in ("drain", "keep"))]
    for staleness, on_update in cases[-1:] if args.smoke else cases:
        result = run(longer, longer, staleness, args.steps, long_tail=True, on_update=on_update)
        mean = statistics.mean(result.steps)
        if not staleness:  # without overlap a step is its slowest group, then the training
            generation = max(longer, mean - longer)
        name = f"1:1 and a long tail (p99 = 8 x median), staleness {staleness}, {on_update}"
        dropped = f"{100 * result.dropped:.1f} % of groups dropped as too old"
        note = f"{mean / longer:.2f} of the mean work; generation alone {generation:.2f} s; {dropped}"
        report.row(name, mean / generation, "<= 1.10" if staleness else "", note)
    if not connected:
        ray.shutdown()
    report.close()


if __name__ == "__main__":
    main()
