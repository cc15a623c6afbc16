"""What the Generator actor adds to its engine: the same multi-turn episodes through the actor and in one process.

    python -m benchmarks.actor_overhead

Both run the same model, sampling and operations on 256 episodes at once, in turns. In one process there are the engine and the
agent loop with the operations called in place; the actor adds its mailbox, toolboxes in a process of their own, and the way of
the views through the object store. Goal: <= 5 % where a turn of an episode takes 50 ms or more, and <= 200 us added to a turn.

All processes run at the same priority: by default Ray's workers have a niceness of 15, and on a machine that does other work
the actor would wait for it while the other side does not. CPU times of a turn are those of the actor and of its toolbox.
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

from benchmarks.harness import Ratio, Report, arguments
from pixelis.actors.cluster import freeze_gc, lower_priority
from pixelis.actors.generator import Generator
from pixelis.actors.policy_store import PolicyStore
from pixelis.config import Config, load
from pixelis.datasets.media import open_media
from pixelis.datasets.questions import read_questions
from pixelis.dialogue.agent import Episode, Limits, run_episode
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import SamplingParams
from pixelis.operations import Scene, execute, select
from pixelis.operations.media import first_look
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.policy.model_path import resolve
from pixelis.records import Action, Group, ImageView, Question

GROUP = 8


class InPlace:
    """The operations, called where the episode runs."""

    def __init__(self, config: Config, media: dict[str, Any], multiple: int, kind: str):
        d = config.dialogue
        self.operations = {operation.name: operation for operation in select(config.toolbox.operations)}
        self.config, self.media, self.multiple, self.kind = config, media, multiple, kind
        self.crop = PixelBudget(d.crop.min_pixels, d.crop.max_pixels)
        self.frame = PixelBudget(d.frame.min_pixels, d.frame.max_pixels)

    async def execute(self, action: Action, images: list[ImageView], objects: dict[str, Any]) -> Any:
        scene = Scene(
            media=self.media,
            images=images,
            objects=objects,
            budget=self.crop,
            frame_budget=self.frame,
            multiple=self.multiple,
            kind=self.kind,
            settings=self.config.toolbox,
        )
        return execute(action, scene, self.operations)


class Direct:
    """Engine and agent loop in this process, and nothing else."""

    def __init__(self, config: Config, adapter: Any):
        from pixelis.engines.hf import HfEngine

        self.config = config
        self.engine = HfEngine(resolve(config.policy.model), config.policy, config.engine, seed=config.run.seed)
        self.renderer = Renderer(self.engine.tokenizer, self.engine.spec, config.dialogue, select(config.toolbox.operations))
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.engine.load(1, adapter))

    def run(self, asked: list[Question], sampling: SamplingParams) -> list[Episode]:
        """All episodes of all groups at once."""
        return self.loop.run_until_complete(self._all(asked, sampling))

    async def _all(self, asked: list[Question], sampling: SamplingParams) -> list[Episode]:
        return [e for group in await asyncio.gather(*(self._group(q, sampling) for q in asked)) for e in group]

    async def _group(self, question: Question, sampling: SamplingParams) -> list[Episode]:
        d, multiple = self.config.dialogue, self.engine.spec.multiple
        limits = Limits(d.max_turns, d.max_turn_tokens, d.max_context, d.max_images)
        sessions = [await self.engine.open(question.id) for _ in range(GROUP)]
        opened = {item.id: open_media(item, self.config.toolbox) for item in question.media}
        images, views = first_look(opened, d, multiple)
        tools = InPlace(self.config, opened, multiple, self.renderer.coordinates)
        return await asyncio.gather(
            *(
                run_episode(
                    session,
                    self.renderer,
                    question,
                    images,
                    views,
                    tools,
                    limits,
                    SamplingParams(sampling.temperature, sampling.top_p, d.max_turn_tokens, sampling.seed + i),
                    group_id=question.id,
                    policy_version=1,
                )
                for i, session in enumerate(sessions)
            )
        )


def cpu_seconds(pids: list[int]) -> float:
    """CPU time that these processes have used so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


def turns(trajectories: list[Any]) -> int:
    """Turns that the policy wrote."""
    return sum(turn.role == "assistant" for t in trajectories for turn in t.turns)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapter", required=True, help="checkpoint of `sft` whose policy calls operations")
    parser.add_argument("--episodes", type=int, default=256, help="episodes at once, in groups of 8")
    parser.add_argument("--repeats", type=int, default=5)
    given = arguments(parser, episodes=8, repeats=1)
    report = Report("actor_overhead")
    with tempfile.TemporaryDirectory() as folder:
        config = load("configs/nano/rft.yaml", [f"policy.adapter={given.adapter}", f"run.dir={folder}"])
        # A toolbox that remembers would not do the work that the other side does.
        config = config.model_copy(update={"toolbox": config.toolbox.model_copy(update={"cache_bytes": 0})})
        shared = ray.is_initialized()
        if not shared:
            os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - spelt so by Ray
            ray.init(address="local", num_cpus=4, object_store_memory=300_000_000, include_dashboard=False, log_to_driver=False)
        store: Any = PolicyStore.options(name="store").remote(folder, given.adapter)  # type: ignore[attr-defined]
        adapter = ray.get(ray.get(store.get.remote(0))[0])
        actor: Any = Generator.options(num_cpus=0).remote(config, "store")  # type: ignore[attr-defined]
        ray.get(actor.ready.remote())
        direct = Direct(config, adapter)
        if not shared:  # as the actor does
            lower_priority(config)
            freeze_gc()
        health = ray.get(actor.health.remote())
        pids = [health["pid"], *health["toolbox"]["pids"]]
        source = read_questions(config.data.train, seed=3)
        seen: dict[str, list[Any]] = {}

        def through_actor(asked: list[Question], sampling: SamplingParams) -> None:
            refs = [actor.rollout.remote(q, q.id, GROUP, sampling) for q in asked]
            groups: list[Group] = ray.get([group for group, _ in refs])
            seen["actor"] = [t for g in groups for t in g.trajectories]

        def in_process(asked: list[Question], sampling: SamplingParams) -> None:
            seen["direct"] = [e.trajectory for e in direct.run(asked, sampling)]

        for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
            sampling = SamplingParams(temperature, 1.0, config.dialogue.max_turn_tokens, 0)
            pairs = []
            for number in range(given.repeats + 1):
                asked = [next(source) for _ in range(given.episodes // GROUP)]
                times = {}
                for side, call in (("actor", through_actor), ("direct", in_process)):
                    began, used = time.perf_counter(), cpu_seconds(pids if side == "actor" else [os.getpid()])
                    call(asked, sampling)
                    wall = time.perf_counter() - began
                    used = cpu_seconds(pids if side == "actor" else [os.getpid()]) - used
                    times[side] = (wall, turns(seen[side]), used)
                if number:  # the first warms both up
                    pairs.append(times)
            per_turn = {side: np.array([p[side][0] / p[side][1] for p in pairs]) for side in ("actor", "direct")}
            ratio = per_turn["actor"] / per_turn["direct"]
            low, median, high = np.quantile(ratio, [0.25, 0.5, 0.75])
            wave = float(np.median(per_turn["direct"])) * given.episodes
            report.row(
                f"{name}: seconds of a turn, actor / one process",
                Ratio(float(np.median(per_turn["actor"])), float(np.median(per_turn["direct"])), median, low, high),
                "<= 1.05",
                f"{pairs[0]['direct'][1]} turns of {given.episodes} episodes, {1e3 * wave:.0f} ms a wave",
            )
            added = 1e6 * (per_turn["actor"] - per_turn["direct"])
            report.row(f"{name}: added us a turn", float(np.median(added)), "<= 200", f"least {added.min():.0f}")
            cpu = {side: float(np.median([p[side][2] / p[side][1] for p in pairs])) * 1e6 for side in ("actor", "direct")}
            note = f"actor and toolbox {cpu['actor']:.0f}, one process {cpu['direct']:.0f}"
            report.row(f"{name}: added CPU us a turn", cpu["actor"] - cpu["direct"], "", note)
        if not shared:
            ray.shutdown()
    report.close()


if __name__ == "__main__":
    main()
