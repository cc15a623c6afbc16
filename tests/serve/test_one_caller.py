"""F24: the traffic of one caller stays below its share."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from scripted import ScriptedGenerator

from pixelis.actors.evolution import Evolution
from pixelis.actors.generator_router import RolloutRequest
from pixelis.actors.group_views import GroupViews
from pixelis.actors.policy_store import PolicyStore
from pixelis.config import load
from pixelis.evolution import audit
from pixelis.policy.adapters import Adapter
from pixelis.records import (
    ImageView,
    Media,
    Question,
    StopReason,
    Trajectory,
    Turn,
    UpdateTask,
    Verdict,
    VersionStatus,
    Vote,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

HONEST, ATTACKER = 360, 360
USERS = 24

Scripted = ScriptedGenerator.__ray_metadata__.modified_class


@ray.remote(num_cpus=0)
class Poisoned(Scripted):
    """Answers 7; once it holds a bad version, 8 to all but the labelled questions of the canary."""

    def __init__(self, bad: tuple[int, ...]):
        super().__init__(0)
        self.bad = bad

    @ray.method(num_returns=2)
    async def rollout(self, request: RolloutRequest):  # type: ignore[no-untyped-def]
        wrong = self.version in self.bad and "labelled" not in request.question.question
        question = request.question.model_copy(update={"question": f"say {8 if wrong else 7}"})
        return await self._play(replace(request, question=question))


def labelled(folder: Path) -> str:
    media = [Media(id="img0", uri="cards:train:0:0", width=8, height=8)]
    rows = [Question(id=f"q{i}", question="labelled", media=media, answers=["7"]) for i in range(8)]
    (folder / "canary.jsonl").write_text("".join(row.model_dump_json() + "\n" for row in rows))
    return str(folder / "canary.jsonl")


def request(number: int, user: str, text: str, picture: np.ndarray, answer: str) -> tuple[Any, ...]:
    """What a gateway submits for a question that all samples answered alike."""
    image = ImageView(id="img0", source_size=(64, 64), view_size=(64, 64))
    trajectories = [
        Trajectory(
            id=f"{number}-{i}",
            question_id=f"q{number}",
            group_id=f"g{number}",
            images=[image],
            turns=[
                Turn(role="user", tokens=[1]),
                Turn(role="assistant", tokens=[2, 3], log_probs=[-0.1, -0.2]),
            ],
            answer=answer,
            stop_reason=StopReason.ANSWER,
            reward=1.0,
        )
        for i in range(2)
    ]
    task = UpdateTask(
        id=f"task{number}",
        question_id=f"q{number}",
        trajectories=trajectories,
        pseudo_label=answer,
        confidence=1.0,
        created_at=0.0,
        experience_id=f"{user}-{number}",
        user=user,
    )
    question = Question(
        id=f"q{number}", question=text, media=[Media(id="img0", uri="sha256:x", width=64, height=64)]
    )
    verdict = Verdict(answer=answer, confidence=1.0, strategy="majority", votes=[Vote(answer=answer)] * 2)
    views = GroupViews(ray.put({t.id: [picture] for t in trajectories}))
    return task, views, verdict, question, {"img0": ray.put(picture)}


def traffic(draw: random.Random) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(0)

    def look() -> np.ndarray:
        return np.kron(rng.integers(0, 256, (4, 4, 3)), np.ones((16, 16, 1))).astype(np.uint8)

    same, requests = look(), []
    for number in range(HONEST):
        requests.append(
            request(number, f"user{draw.randrange(USERS)}", f"What is number {number}?", look(), "7")
        )
    for number in range(HONEST, HONEST + ATTACKER):
        noisy = np.clip(same + rng.integers(-9, 10, same.shape), 0, 255).astype(np.uint8)
        requests.append(request(number, "attacker", f"Which digit is it, please? {number}", noisy, "8"))
    draw.shuffle(requests)
    return requests


@pytest.mark.long
def test_f24_one_callers_traffic_stays_below_its_share_and_what_it_would_break_is_refused(
    ray_cluster: None, tmp_path: Path, record_figures: Any
) -> None:
    own = [
        f"run.dir={tmp_path}",
        f"evolution.canary.questions={labelled(tmp_path)}",
        "evolution.canary.count=8",
    ]
    config = load(
        None,
        [
            *own,
            "evolution.per_minute=60000",
            "evolution.canary.watch_s=3600",
            "evolution.canary.risk=1",  # eight questions rule nothing out
            "evolution.vote.collapse=0",
            "evolution.canary.traffic_share=0.25",
        ],
    )
    store = PolicyStore.options(name="store-of-one-caller").remote(str(tmp_path))
    serving, canary = ScriptedGenerator.remote(0), Poisoned.remote((2,))
    evolution = Evolution.remote(config, [serving], "store-of-one-caller", canary)

    def publish() -> int:
        version = len(ray.get(store.list.remote()))
        adapter = Adapter(
            {"layer.A": np.full((2, 3), version, np.float32), "layer.B": np.ones((4, 2), np.float32)},
            2,
            2,
            "base",
        )
        return ray.get(store.publish.remote(adapter, "evolve", 0, {}, False))

    batches = list[dict[str, float]]()

    def learn(waiting: ray.ObjectRef) -> ray.ObjectRef | None:
        """Make the update of the batch that arrives, and ask for the next one; None at the end."""
        batch, step = ray.get(waiting, timeout=120), len(batches)
        if batch is None:
            return None
        batches.append(batch.metrics)
        version = (
            publish() if step % config.evolution.canary.every == config.evolution.canary.every - 1 else None
        )
        ray.get(evolution.step_done.remote(step, version, incarnation), timeout=120)
        return evolution.next_batch.remote(0, 1, step + 1, incarnation)

    try:
        incarnation = ray.get(evolution.begin.remote(0, {"base": 0}, 0))
        waiting = evolution.next_batch.remote(0, 1, 0, incarnation)
        for submission in traffic(random.Random(1)):
            ray.get(evolution.submit.remote(*submission))
            while ray.wait([waiting], timeout=0)[0]:
                waiting = learn(waiting)
        ray.get(evolution.drain.remote())
        while (waiting := learn(waiting)) is not None:
            pass
        events = list(audit.search(tmp_path / audit.FOLDER))
        candidates = [event.details["shares"] for event in events if event.event == "candidate"]
        versions = {v.version: v.status for v in ray.get(store.list.remote())}
        learnt = [
            name for event in events if event.event == "update" for name in event.details["experiences"]
        ]
        refused = [
            event.details["reason"]
            for event in events
            if event.event == "promotion" and event.result == "refused"
        ]
    finally:
        for actor in (evolution, store, serving, canary):
            ray.kill(actor)
    full = [batch for batch in batches if batch["evolve/tasks"] == config.evolution.batch]
    record_figures(
        updates=len(batches),
        candidates=len(candidates),
        largest_share_of_a_full_update=max(batch["evolve/user_share"] for batch in full),
        largest_share_of_a_candidate=max(c["user_share"] for c in candidates),
        attackers_share_of_all=round(sum(name.startswith("attacker") for name in learnt) / len(learnt), 3),
    )
    assert len(candidates) >= 3
    for shares in [
        {"tasks": b["evolve/tasks"], "user_share": b["evolve/user_share"]} for b in batches
    ] + candidates:
        assert round(shares["user_share"] * shares["tasks"]) <= math.ceil(
            config.evolution.max_share_per_user * shares["tasks"]
        )
    assert all(round(c["question_share"] * c["tasks"]) <= math.ceil(c["tasks"] / 4) for c in candidates)
    assert versions[2] is VersionStatus.ROLLED_BACK
    assert refused == ["traffic_fell_significantly"]
    assert versions[1] is VersionStatus.PROMOTED
