"""CPU time and memory of the Coordinator with thousands of concurrent episodes.

    python -m benchmarks.coordinator

The Coordinator, with its router and rollout buffer, is the real actor. Generators sleep and then return
groups of episodes with a tool call and tokens; scorers rate them without looking. Goals: at most 1 ms of the
Coordinator's CPU time for a group, and memory that does not grow with the number of groups.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from benchmarks.async_overlap import AlternatingScorer
from benchmarks.harness import Report, parse_args
from pixelis.actors.coordinator import Coordinator
from pixelis.actors.generator_router import RolloutRequest
from pixelis.config import parse
from pixelis.records import Action, Group, ImageView, Observation, Trajectory, Turn

GENERATORS, GROUP = 4, 8
BATCH = 25
"""Questions of a step: small, so that steps are frequent."""


@ray.remote(num_cpus=0, max_concurrency=8192)
class ScriptedGenerator:
    """Takes ``seconds`` for any number of groups; its episodes zoom in once and have ``tokens`` tokens."""

    def __init__(self, seconds: float, tokens: int):
        self.seconds, self.version = seconds, 0
        view = ImageView(id="img0", source_size=(1280, 960), view_size=(640, 480))
        crop = ImageView(
            id="obs1", parent="img0", box=(0.2, 0.2, 0.6, 0.6), source_size=(512, 384), view_size=(512, 384)
        )
        call = Action(op="zoom_in", arguments={"box": (0.2, 0.2, 0.6, 0.6)})
        half, seen = list(range(tokens // 2)), Observation(status="ok", id="obs1", images=[crop])
        self.turns = [
            Turn(role="user", text="question", tokens=list(range(300)), images=["img0"]),
            Turn(role="assistant", text="zoom " * 20, tokens=half, log_probs=[-0.5] * len(half), action=call),
            Turn(role="tool", tokens=list(range(200)), images=["obs1"], observation=seen),
            Turn(role="assistant", text="answer " * 20, tokens=half, log_probs=[-0.5] * len(half)),
        ]
        self.images = [view, crop]

    async def load(self, version: int) -> int:
        self.version = version
        return version

    async def health(self) -> dict[str, Any]:
        return {}

    @ray.method(num_returns=2)
    async def rollout(self, request: RolloutRequest) -> tuple[Any, ...]:
        await asyncio.sleep(self.seconds)
        names = {"question_id": request.question.id, "group_id": request.group_id}
        fields: dict[str, Any] = {
            **names,
            "policy_version": self.version,
            "images": self.images,
            "answer": "7",
        }
        # Each with turns of its own, as pickle stores the same object once.
        trajectories = [Trajectory(**fields, turns=copy.deepcopy(self.turns)) for _ in range(request.samples)]
        group = Group(
            id=request.group_id,
            question=request.question,
            trajectories=trajectories,
            policy_version=self.version,
        )
        return group, {}, *[None] * len(request.question.media)


@dataclass
class Result:
    """Milliseconds of CPU a group, groups a second, and megabytes after a quarter of the time and at its
    end.
    """

    cpu_ms: float
    groups_per_s: float
    early_mb: float
    late_mb: float


def measure(episodes: int, seconds: float, group_s: float, tokens: int) -> Result:
    """Run the Coordinator for ``seconds`` after a warm-up."""
    in_flight = max(1, episodes // (GROUP * BATCH))
    with tempfile.TemporaryDirectory() as folder:
        config = parse(
            {
                "run": {"dir": folder},
                "engine": {"workers": GENERATORS},
                "data": {"train": "cards:"},
                "telemetry": {"rollouts": 0},
                "rft": {
                    "steps": 10**6,
                    "prompts_per_step": BATCH,
                    "group_size": GROUP,
                    "max_off_policy_steps": in_flight - 1,
                },
            }
        )
        generators = [ScriptedGenerator.remote(group_s, tokens) for _ in range(GENERATORS)]
        scorers = [AlternatingScorer.remote()]
        coordinator = Coordinator.options(num_cpus=0).remote(config, generators, scorers)
        ray.get(coordinator.begin.remote(0, {}, 0))
        process = psutil.Process(ray.get(coordinator.__ray_call__.remote(lambda _: os.getpid())))
        step = 0

        def take(until: float) -> int:
            nonlocal step
            groups = 0
            while time.monotonic() < until:
                groups += len(ray.get(coordinator.next_batch.remote(0, 1, step)).groups)
                ray.get(coordinator.step_done.remote(step, 0))
                step += 1
            return groups

        take(time.monotonic() + max(2 * group_s, seconds / 4))
        started, cpu = time.monotonic(), process.cpu_times()
        groups = take(started + seconds / 4)
        early = process.memory_info().rss
        groups += take(started + seconds)
        spent, used = time.monotonic() - started, process.cpu_times()
        late = process.memory_info().rss
        for actor in (coordinator, *generators, *scorers):
            ray.kill(actor)
    cpu_s = used.user + used.system - cpu.user - cpu.system
    return Result(1e3 * cpu_s / groups, groups / spent, early / 1e6, late / 1e6)


def main() -> None:
    """Entry point of `python -m benchmarks.coordinator`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=2000, help="concurrent episodes")
    parser.add_argument("--seconds", type=float, default=40.0, help="duration of the measurement")
    parser.add_argument("--group-seconds", type=float, default=5.0, help="time that a group takes")
    parser.add_argument("--tokens", type=int, default=600, help="policy tokens of an episode")
    args = parse_args(parser, episodes=80, seconds=3.0, group_seconds=0.5)
    report, connected = Report("coordinator"), ray.is_initialized()
    if not connected:
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=200_000_000,
            include_dashboard=False,
            log_to_driver=False,
        )
    result = measure(args.episodes, args.seconds, args.group_seconds, args.tokens)
    note = f"{args.episodes} episodes in flight, {result.groups_per_s:.0f} groups of {GROUP} a second"
    report.row("CPU time of the Coordinator for a group, ms", result.cpu_ms, "<= 1", note)
    report.row(
        "its memory at the end / after a quarter",
        result.late_mb / result.early_mb,
        "<= 1.02",
        f"{result.late_mb:.0f} MB",
    )
    if not connected:
        ray.shutdown()
    report.close()


if __name__ == "__main__":
    main()
