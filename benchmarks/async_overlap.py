"""Generation beside training: seconds of a step against the ideal, the larger of the two alone.

    python -m benchmarks.async_overlap

The Coordinator with its router and buffer and the PolicyStore are the real ones, each in its actor; generators take the time that
they are told for a group, the learner for a step. Goal: <= 1.10 with staleness >= 1; staleness 0 takes the sum of both. With a
long tail one group in a hundred takes eight times the median; new weights wait for it (drain) or do not (keep).
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

from benchmarks.harness import Report, arguments
from pixelis.actors.coordinator import Coordinator
from pixelis.actors.policy_store import PolicyStore
from pixelis.config import parse
from pixelis.policy.adapters import Adapter
from pixelis.records import Group, Question, Trajectory

GENERATORS, QUESTIONS, GROUP = 2, 16, 2
SLOTS = 4
"""Groups that a generator rolls out beside each other; more of them wait."""
LONGER = 1.6
"""Seconds of the longer of the two sides: long beside what Ray takes for a message."""


@ray.remote(num_cpus=0, max_concurrency=256)
class Timed:
    """A generator whose groups take given times; it switches weights when no episode is open (drain) or at once (keep)."""

    def __init__(self, seconds: float, tail: bool, on_update: str):
        self.seconds, self.tail, self.drains, self.version = seconds, tail, on_update == "drain", -1
        self.slots, self.open, self.idle, self.may_open = asyncio.Semaphore(SLOTS), 0, asyncio.Event(), asyncio.Event()
        self.idle.set()
        self.may_open.set()

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
    async def rollout(self, question: Question, group_id: str, n: int, *_: Any) -> tuple[Group, dict]:
        await self.may_open.wait()
        self.open += 1
        self.idle.clear()
        try:
            version = self.version
            async with self.slots:
                await asyncio.sleep(length(question.id, self.seconds, self.tail))
        finally:
            self.open -= 1
            if not self.open:
                self.idle.set()
        made = [Trajectory(question_id=question.id, group_id=group_id, policy_version=version) for _ in range(n)]
        return Group(id=group_id, question=question, trajectories=made, policy_version=version), {}


def length(name: str, mean: float, tail: bool) -> float:
    """Seconds of the group of a question: all alike, or log-normal with p99 = 8 x median and this mean."""
    if not tail:
        return mean
    sigma = np.log(8) / 2.326
    rng = np.random.default_rng(list(name.encode()))
    return float(mean * rng.lognormal(-(sigma**2) / 2, sigma))


@ray.remote(num_cpus=0, max_concurrency=16)
class Half:
    """A scorer: every second rollout is right."""

    async def score(self, group: Group, step: int | None = None, *_: Any, **__: Any) -> Group:
        scored = [
            t.model_copy(update={"reward": float(i % 2), "rewards": {"accuracy": float(i % 2)}})
            for i, t in enumerate(group.trajectories)
        ]
        return group.model_copy(update={"trajectories": scored})

    async def load(self, state: bytes | None) -> None:
        """No state."""

    async def advance(self, step: int) -> Any:
        from pixelis.rewards.grader import Advance

        return Advance()

    async def state(self) -> bytes:
        return b""


@dataclass
class Run:
    """Seconds of each step after the first ones, the largest age of what was learnt from, share of groups that came too late."""

    steps: list[float]
    staleness: float
    stale: float


def run(generate: float, train: float, staleness: int, steps: int, tail: bool = False, on_update: str = "drain") -> Run:
    """``generate`` seconds for a batch when nothing else runs, ``train`` for a step of the learner."""
    share = generate * GENERATORS * SLOTS / QUESTIONS
    adapter = Adapter({"layer.A": np.zeros((4, 64), np.float32), "layer.B": np.zeros((64, 4), np.float32)}, 8, 4, "benchmark")
    with tempfile.TemporaryDirectory() as folder:
        rft = {"steps": steps, "prompts_per_step": QUESTIONS, "group_size": GROUP, "max_off_policy_steps": staleness}
        settings = parse({"policy": {"model": "nano"}, "run": {"dir": folder}, "rft": rft, "telemetry": {"rollouts": 0}})
        store = PolicyStore.remote(folder, None)  # type: ignore[attr-defined]
        generators = [Timed.remote(share, tail, on_update) for _ in range(GENERATORS)]  # type: ignore[attr-defined]
        scorer = Half.remote()  # type: ignore[attr-defined]
        coordinator = Coordinator.options(num_cpus=0).remote(settings, generators, [scorer])  # type: ignore[attr-defined]
        ray.get(coordinator.begin.remote(0, {}, 0))
        ends, oldest, stale = [], 0.0, 0.0
        for step in range(steps):
            batch = ray.get(coordinator.next_batch.remote(0, 1, step))
            oldest = max(oldest, batch.metrics["rollout/staleness"])
            stale += batch.metrics["rollout/stale_groups"]
            time.sleep(train)
            adapter.tensors["layer.A"][0, 0] = step + 1  # as other weights
            done = coordinator.step_done.remote(step, store.publish.remote(adapter, "rft", step + 1))
            if not staleness:  # as batch_sources.RolloutSource does
                ray.get(done)
            ends.append(time.monotonic())
        ray.get(done)  # the store writes into the folder until then
        for actor in (coordinator, scorer, store, *generators):
            ray.kill(actor)
    return Run([b - a for a, b in itertools.pairwise(ends[1:])], oldest, stale / (steps * QUESTIONS))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="steps of each run; the first two are not counted")
    parser.add_argument("--staleness", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--longer", type=float, default=LONGER, help="seconds of the longer of the two")
    given = arguments(parser, steps=3, staleness=[1], longer=0.1)
    longer = given.longer
    report = Report("async_overlap")
    shared = ray.is_initialized()
    if not shared:
        ray.init(address="local", num_cpus=2, object_store_memory=200_000_000, include_dashboard=False, log_to_driver=False)
    mixes = {"1:4": (longer / 4, longer), "1:1": (longer, longer), "4:1": (longer, longer / 4)}
    for name, (generate, train) in list(mixes.items())[: 1 if given.smoke else None]:
        for staleness in given.staleness:
            done = run(generate, train, staleness, given.steps)
            ratio = statistics.median(done.steps) / max(generate, train)
            whole = sum(done.steps) / len(done.steps) / max(generate, train)
            assert done.staleness <= staleness
            ideal = (generate + train) / max(generate, train)
            goal = "<= 1.10" if staleness else f"sum: {ideal:.2f}"
            report.row(f"generate:train {name}, staleness {staleness}", ratio, goal, f"mean {whole:.3f}")
    alone = longer
    for staleness, on_update in [(0, "drain"), *((s, u) for s in given.staleness if s for u in ("drain", "keep"))]:
        done = run(longer, longer, staleness, given.steps, tail=True, on_update=on_update)
        mean = statistics.mean(done.steps)
        if not staleness:  # one after the other: a step takes the longest of its groups, then the training
            alone = max(longer, mean - longer)
        name = f"1:1 and a long tail (p99 = 8 x median), staleness {staleness}, {on_update}"
        late = f"{100 * done.stale:.1f} % of groups too late"
        about = f"{mean / longer:.2f} of the mean work; generation alone {alone:.2f} s; {late}"
        report.row(name, mean / alone, "<= 1.10" if staleness else "", about)
    if not shared:
        ray.shutdown()
    report.close()


if __name__ == "__main__":
    main()
