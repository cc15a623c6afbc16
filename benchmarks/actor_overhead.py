"""Overhead of the Generator actor: the same multi-turn episodes through the actor and in one process.

    python -m benchmarks.actor_overhead

Both sides run 256 episodes at once with the same model, sampling and operations, alternately. The single
process holds the engine and the agent loop and calls operations directly. The actor adds its mailbox, a
toolbox process, and the transfer of views through the object store. Goal: at most 5 % where a turn takes 50
ms or more, and at most 200 us added to a turn.

All processes run at the same priority: Ray's workers have a niceness of 15 by default, so on a busy machine
the actor would wait while the single process does not. The CPU time of a turn is that of the actor and its
toolbox.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.harness import LocalTools, Ratio, Report, parse_args
from pixelis.actors.cluster import freeze_gc, lower_priority
from pixelis.actors.generator import Generator
from pixelis.actors.generator_router import RolloutRequest
from pixelis.actors.policy_store import PolicyStore
from pixelis.config import Config, load
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.media import open_media
from pixelis.datasets.questions import read_questions
from pixelis.dialogue.agent import Episode, Limits, run_episode
from pixelis.dialogue.augmentation import AugmentedSession, alternate
from pixelis.dialogue.session import SamplingParams
from pixelis.operations.media import first_look
from pixelis.policy.model_path import resolve
from pixelis.records import Group, Question, Trajectory

GROUP = 8


class LocalGenerator:
    """The engine and the agent loop in this process. ``augmentations`` are those of a `RolloutRequest`."""

    def __init__(self, config: Config, adapter: Any):
        from pixelis.engines.hf import HfEngine

        self.config, self.augmentations = config, list[str]()
        model = resolve(config.policy.model)
        self.engine = HfEngine(model, config.policy, config.engine, seed=config.run.seed)
        self.player = Player(config, str(model))
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.engine.load(1, adapter))

    def run(self, questions: list[Question], sampling: SamplingParams, samples: int = GROUP) -> list[Episode]:
        """Run the episodes of all groups at once."""
        return self.loop.run_until_complete(self._all(questions, sampling, samples))

    async def _all(self, questions: list[Question], sampling: SamplingParams, samples: int) -> list[Episode]:
        groups = await asyncio.gather(*(self._group(question, sampling, samples) for question in questions))
        return [episode for group in groups for episode in group]

    async def _group(self, question: Question, sampling: SamplingParams, samples: int) -> list[Episode]:
        d = self.config.dialogue
        names = alternate(self.augmentations, samples)
        opened = [await self.engine.open(question.id) for _ in names]
        sessions = [
            s if name is None else AugmentedSession(s, name) for s, name in zip(opened, names, strict=True)
        ]
        media = {item.id: open_media(item, self.config.toolbox) for item in question.media}
        images, views = first_look(media, d, self.engine.spec.multiple)
        limits, tools = Limits.of(d), LocalTools(self.player, media)
        episodes = await asyncio.gather(
            *(
                run_episode(
                    session,
                    self.player.renderer,
                    question,
                    images,
                    views,
                    tools,
                    limits,
                    SamplingParams(
                        sampling.temperature, sampling.top_p, d.max_turn_tokens, sampling.seed + i
                    ),
                    group_id=question.id,
                    policy_version=1,
                )
                for i, session in enumerate(sessions)
            )
        )
        for episode, name in zip(episodes, names, strict=True):
            episode.trajectory.augmentation = name
        return episodes


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU seconds that these processes have used so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


def policy_turns(trajectories: list[Any]) -> int:
    """Count the turns that the policy wrote."""
    return sum(turn.role == "assistant" for t in trajectories for turn in t.turns)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapter", required=True, help="checkpoint of `sft` whose policy calls operations")
    parser.add_argument("--episodes", type=int, default=256, help="episodes at once, in groups of 8")
    parser.add_argument("--repeats", type=int, default=5)
    args = parse_args(parser, episodes=8, repeats=1)
    report = Report("actor_overhead")
    with tempfile.TemporaryDirectory() as folder:
        config = load("configs/nano/rft.yaml", [f"policy.adapter={args.adapter}", f"run.dir={folder}"])
        # With a cache the actor's toolbox would skip work that the single process does.
        config = config.model_copy(update={"toolbox": config.toolbox.model_copy(update={"cache_bytes": 0})})
        connected = ray.is_initialized()
        if not connected:
            os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - spelt so by Ray
            ray.init(
                address="local",
                num_cpus=4,
                object_store_memory=300_000_000,
                include_dashboard=False,
                log_to_driver=False,
            )
        store: Any = PolicyStore.options(name="store").remote(folder, args.adapter)  # type: ignore[attr-defined]
        adapter = ray.get(ray.get(store.get.remote(0))[0])
        actor: Any = Generator.options(num_cpus=0).remote(config, "store")  # type: ignore[attr-defined]
        ray.get(actor.ready.remote())
        local = LocalGenerator(config, adapter)
        if not connected:  # as the actor does
            lower_priority(config)
            freeze_gc()
        health = ray.get(actor.health.remote())
        pids = [health["pid"], *health["toolbox"]["pids"]]
        source = read_questions(config.data.train, seed=3)

        def by_actor(questions: list[Question], sampling: SamplingParams) -> list[Trajectory]:
            requests = [RolloutRequest(q, q.id, GROUP, sampling) for q in questions]
            refs = [actor.rollout.options(num_returns=2 + len(r.question.media)).remote(r) for r in requests]
            groups: list[Group] = ray.get([group for group, *_ in refs])
            return [t for g in groups for t in g.trajectories]

        def in_process(questions: list[Question], sampling: SamplingParams) -> list[Trajectory]:
            return [e.trajectory for e in local.run(questions, sampling)]

        for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
            sampling = SamplingParams(temperature, 1.0, config.dialogue.max_turn_tokens, 0)
            pairs = []
            for number in range(args.repeats + 1):
                questions = [next(source) for _ in range(args.episodes // GROUP)]
                times = {}
                for side, call, processes in (
                    ("actor", by_actor, pids),
                    ("local", in_process, [os.getpid()]),
                ):
                    start, cpu_start = time.perf_counter(), cpu_seconds(processes)
                    trajectories = call(questions, sampling)
                    wall = time.perf_counter() - start
                    times[side] = (wall, policy_turns(trajectories), cpu_seconds(processes) - cpu_start)
                if number:  # the first one is the warm-up
                    pairs.append(times)
            per_turn = {
                side: np.array([p[side][0] / p[side][1] for p in pairs]) for side in ("actor", "local")
            }
            ratio = per_turn["actor"] / per_turn["local"]
            low, median, high = np.quantile(ratio, [0.25, 0.5, 0.75])
            wave = float(np.median(per_turn["local"])) * args.episodes
            report.row(
                f"{name}: seconds of a turn, actor / one process",
                Ratio(
                    float(np.median(per_turn["actor"])),
                    float(np.median(per_turn["local"])),
                    median,
                    low,
                    high,
                ),
                "<= 1.05",
                (
                    f"{pairs[0]['local'][1]} turns of {args.episodes} episodes, {1e3 * wave:.0f} ms for a "
                    "turn "
                    "of all"
                ),
            )
            added = 1e6 * (per_turn["actor"] - per_turn["local"])
            report.row(
                f"{name}: added us a turn", float(np.median(added)), "<= 200", f"minimum {added.min():.0f}"
            )
            cpu = {
                side: float(np.median([p[side][2] / p[side][1] for p in pairs])) * 1e6
                for side in ("actor", "local")
            }
            note = f"actor and toolbox {cpu['actor']:.0f}, one process {cpu['local']:.0f}"
            report.row(f"{name}: added CPU us a turn", cpu["actor"] - cpu["local"], "", note)
        if not connected:
            ray.shutdown()
    report.close()


if __name__ == "__main__":
    main()
