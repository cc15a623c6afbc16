"""Bytes of pictures stored by the parts of the loop / bytes of the distinct pictures among them.

    python -m benchmarks.one_copy

Every picture is shown several times, as by users who ask different questions about it. Rollouts are groups of
one picture, one after another, whose results are held; the canary judges the same questions repeatedly: of
both, all bytes that are put into the object store count, also those that are freed between. Updates are tasks
that wait in Evolution's queue, after the gateway freed its copy. Memory is PNG files in a shard's database.
The policy's view is smaller than the picture, so it is another picture. The parts show the same pictures:
together, a picture that two parts store counts once as a distinct one. Goal: 1.05 for all parts together.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.harness import Report, local_ray, parse_args
from pixelis.config import Config, load
from pixelis.dialogue.session import SamplingParams
from pixelis.memory import Entry
from pixelis.memory.shard import Shard
from pixelis.records import (
    Experience,
    ImageView,
    Media,
    Question,
    StopReason,
    Trajectory,
    Turn,
    UpdateTask,
    Verdict,
)

SIDE, VIEW = 512, 256
SETTINGS = [
    f"dialogue.input.min_pixels={VIEW**2}",
    f"dialogue.input.max_pixels={VIEW**2}",
    "dialogue.max_context=640",
]
SETTINGS += [
    "dialogue.max_turn_tokens=4",
    "dialogue.max_turns=1",
    "evolution.canary.enabled=false",
    "evolution.per_minute=60000",
]
SETTINGS += ["toolbox.workers=1", "cluster.cpus=4", "cluster.object_store_bytes=300000000"]
SETTLE_S = 2.0
"""Time in which Ray frees what nothing refers to any more."""


def store_bytes() -> tuple[int, int]:
    """Bytes of the objects in the object store, and of all that were ever put into it."""
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    gc.collect()
    time.sleep(SETTLE_S)
    stats = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address)).store_stats
    return int(stats.object_store_bytes_used), int(stats.cumulative_created_bytes)


class Parts:
    """The parts of the loop.

    Each method returns the bytes that it stores, and those of its distinct pictures.
    """

    def __init__(self, config: Config, folder: Path, pictures: int, times: int):
        self.config, self.folder, self.times = config, folder, times
        rng = np.random.default_rng(0)
        self.pictures = [rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8) for _ in range(pictures)]
        self.questions = []
        for number, picture in enumerate(self.pictures):
            path = folder / f"{number}.png"
            Image.fromarray(picture).save(path)
            media = [Media(id="img0", uri=str(path), width=SIDE, height=SIDE)]
            self.questions.append(Question(id=f"q{number}", question="which?", media=media, answers=["7"]))
        self.distinct = pictures * 3 * (SIDE**2 + VIEW**2)
        self.file = folder / "canary.jsonl"
        self.file.write_text(
            "".join(question.model_dump_json() + "\n" for question in self.questions), encoding="utf-8"
        )

    def rollouts(self, generator: Any) -> tuple[int, int]:
        """Groups of each picture, one after another, whose results are held."""
        from pixelis.actors.generator_router import GeneratorRouter, RolloutRequest

        before, held, router = store_bytes()[1], [], GeneratorRouter([generator], follows=True)
        for number in range(self.times):
            for question in self.questions:
                request = RolloutRequest(
                    question, f"{question.id}-{number}", 2, SamplingParams(1.0, 1.0, 4, number)
                )
                held.append(asyncio.run(router.rollout(request)))
        return store_bytes()[1] - before, self.distinct

    def canary(self, generator: Any) -> tuple[int, int]:
        """The questions, judged again and again: all bytes that are put."""
        from pixelis.actors.canary import Canary
        from pixelis.actors.group_views import UpdatePictures

        # So few questions rule nothing out
        own = {"questions": str(self.file), "count": len(self.questions), "risk": 1.0}
        settings = self.config.evolution.canary.model_copy(update=own)
        evolution = self.config.evolution.model_copy(update={"canary": settings})
        before = store_bytes()[1]
        canary = Canary(self.config.model_copy(update={"evolution": evolution}), generator, UpdatePictures())

        async def judge() -> None:
            for _ in range(self.times):
                await canary.judge(0)

        asyncio.run(judge())
        return store_bytes()[1] - before, self.distinct

    def updates(self, evolution: Any) -> tuple[int, int]:
        """Tasks about each picture in the queue."""
        import ray

        from pixelis.actors.group_views import GroupViews

        before = store_bytes()[0]
        for number in range(self.times):
            for question, picture in zip(self.questions, self.pictures, strict=True):
                task = update_task(f"{question.id}-{number}")
                views = GroupViews(ray.put({t.id: [picture] for t in task.trajectories}))
                if not ray.get(evolution.submit.remote(task, views)):
                    raise RuntimeError("Evolution refused a task")
                del views
        return store_bytes()[0] - before, sum(picture.nbytes for picture in self.pictures)

    def memory(self) -> tuple[int, int]:
        """Experiences about each picture in a shard."""
        shard, distinct = Shard(self.folder / "shard", self.config.memory), 0
        for question, picture in zip(self.questions, self.pictures, strict=True):
            file = io.BytesIO()
            Image.fromarray(picture[:VIEW, :VIEW]).save(file, "PNG")
            png, distinct = file.getvalue(), distinct + len(file.getvalue())
            for number in range(self.times):
                task = update_task(f"{question.id}-{number}")
                verdict = Verdict(answer="7", confidence=0.9, strategy="majority")
                trajectory = task.trajectories[0]
                experience = Experience(
                    question=question,
                    trajectory=trajectory,
                    verdict=verdict,
                    policy_version=0,
                    created_at=0.0,
                )
                shard.add([Entry(experience, None, {"img0": png})])
        with shard.database.read() as database:
            (stored,) = database.execute("SELECT sum(length(png)) FROM pictures").fetchone()
        shard.close()
        return int(stored), distinct


def update_task(name: str) -> UpdateTask:
    """A task from which something can be learnt."""
    turns = [Turn(role="user", tokens=[1]), Turn(role="assistant", tokens=[2, 3], log_probs=[-0.1, -0.2])]
    image = ImageView(id="img0", source_size=(SIDE, SIDE), view_size=(SIDE, SIDE))
    trajectories = [
        Trajectory(
            id=f"{name}-{i}",
            question_id=name,
            group_id=name,
            turns=turns,
            images=[image],
            answer="7",
            stop_reason=StopReason.ANSWER,
            reward=float(i),
        )
        for i in range(2)
    ]
    return UpdateTask(
        question_id=name, trajectories=trajectories, pseudo_label="7", confidence=0.9, created_at=time.time()
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=8)
    parser.add_argument("--times", type=int, default=4, help="how often each picture is shown")
    args = parse_args(parser, pictures=2, times=2)
    report = Report("one_copy")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = load(
            "configs/nano/base.yaml",
            [*SETTINGS, f"run.dir={folder}", f"evolution.queue={args.pictures * args.times}"],
        )
        with local_ray(config):
            import ray

            from pixelis.actors.evolution import Evolution
            from pixelis.actors.generator import Generator
            from pixelis.actors.policy_store import PolicyStore

            store: Any = PolicyStore.options(name="one-copy-store").remote(str(folder))  # type: ignore[attr-defined]
            generator: Any = Generator.options(num_cpus=0).remote(config, "one-copy-store")  # type: ignore[attr-defined]
            evolution: Any = Evolution.remote(config, [], "one-copy-store")  # type: ignore[attr-defined]
            parts = Parts(config, folder, args.pictures, args.times)
            try:
                ray.get([generator.ready.remote(), evolution.health.remote(), generator.load.remote(0)])
                results = {
                    "rollouts": parts.rollouts(generator),
                    "canary": parts.canary(generator),
                    "updates": parts.updates(evolution),
                    "memory": parts.memory(),
                }
            finally:
                for actor in (evolution, generator, store):
                    ray.kill(actor)
    for part, (stored, distinct) in results.items():
        report.row(f"{part}: bytes stored / distinct", stored / distinct, "", f"{stored} of {distinct}")
    total, distinct = sum(stored for stored, _ in results.values()), parts.distinct + results["memory"][1]
    report.row("all parts: bytes stored / distinct", total / distinct, "<= 1.05", f"{total} of {distinct}")
    report.close()


if __name__ == "__main__":
    main()
