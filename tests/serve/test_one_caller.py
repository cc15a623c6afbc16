"""F24: one caller's traffic stays below its share; poisoned rewards and false corrections promote nothing."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
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
from pixelis.config import Config, EvolutionConfig, RewardsConfig, load
from pixelis.evolution import audit
from pixelis.evolution.episode_groups import experience_verdict, lesson
from pixelis.evolution.traffic_questions import TrafficQuestions
from pixelis.policy.adapters import Adapter
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
    VersionStatus,
    Vote,
)
from pixelis.rewards.vote import TOLD

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


@dataclass
class Learnt:
    """What became of a stream: full updates, candidates' shares, versions, and why some were refused."""

    config: Config
    updates: list[dict[str, float]]
    candidates: list[dict[str, Any]]
    versions: dict[int, VersionStatus]
    experiences: list[str]
    refused: list[str]
    truths: list[tuple[str, list[str]]]

    @property
    def attackers_share(self) -> float:
        return sum(name.startswith("attacker") for name in self.experiences) / len(self.experiences)


def learn_from(stream: list[tuple[Any, ...]], folder: Path, bad: tuple[int, ...]) -> Learnt:
    """Learn from a stream of tasks; versions among ``bad`` answer 8 where the canary's file does not look."""
    own = [f"run.dir={folder}", f"evolution.canary.questions={labelled(folder)}", "evolution.canary.count=8"]
    config = load(
        None,
        [
            *own,
            "evolution.per_minute=60000",
            "evolution.canary.watch_s=3600",
            "evolution.canary.risk=1",  # eight questions rule nothing out
            "evolution.canary.traffic_share=0.25",
        ],
    )
    name = f"store-of-{folder.name}"
    store = PolicyStore.options(name=name).remote(str(folder))
    serving, canary = ScriptedGenerator.remote(0), Poisoned.remote(bad)
    evolution = Evolution.remote(config, [serving], name, canary)
    batches = list[dict[str, float]]()

    def publish() -> int:
        version = len(ray.get(store.list.remote()))
        adapter = Adapter(
            {"layer.A": np.full((2, 3), version, np.float32), "layer.B": np.ones((4, 2), np.float32)},
            2,
            2,
            "base",
        )
        return ray.get(store.publish.remote(adapter, "evolve", 0, {}, False))

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
        for submission in stream:
            ray.get(evolution.submit.remote(*submission))
            while ray.wait([waiting], timeout=0)[0]:
                waiting = learn(waiting)
        ray.get(evolution.drain.remote())
        while (waiting := learn(waiting)) is not None:
            pass
        events = list(audit.search(folder / audit.FOLDER))
        held_out = TrafficQuestions(config.evolution.canary, folder / "versions" / "traffic")
        held_out.load(lambda text, picture: text)
        return Learnt(
            config,
            batches,
            [event.details["shares"] for event in events if event.event == "candidate"],
            {v.version: v.status for v in ray.get(store.list.remote())},
            [name for event in events if event.event == "update" for name in event.details["experiences"]],
            [e.details["reason"] for e in events if e.event == "promotion" and e.result == "refused"],
            [(item.source.user, item.question.answers or []) for item in held_out.items],
        )
    finally:
        for actor in (evolution, store, serving, canary):
            ray.kill(actor)


def test_f24_one_callers_traffic_stays_below_its_share_and_what_it_would_break_is_refused(
    ray_cluster: None, tmp_path: Path, record_figures: Any
) -> None:
    learnt = learn_from(traffic(random.Random(1)), tmp_path, bad=(2,))
    config, candidates = learnt.config, learnt.candidates
    full = [batch for batch in learnt.updates if batch["evolve/tasks"] == config.evolution.batch]
    record_figures(
        updates=len(learnt.updates),
        candidates=len(candidates),
        largest_share_of_a_full_update=max(batch["evolve/user_share"] for batch in full),
        largest_share_of_a_candidate=max(c["user_share"] for c in candidates),
        attackers_share_of_all=round(learnt.attackers_share, 3),
    )
    assert len(candidates) >= 3
    for shares in [
        {"tasks": b["evolve/tasks"], "user_share": b["evolve/user_share"]} for b in learnt.updates
    ] + candidates:
        assert round(shares["user_share"] * shares["tasks"]) <= math.ceil(
            config.evolution.max_share_per_user * shares["tasks"]
        )
    assert all(round(c["question_share"] * c["tasks"]) <= math.ceil(c["tasks"] / 4) for c in candidates)
    assert learnt.versions[2] is VersionStatus.ROLLED_BACK
    assert learnt.refused == ["traffic_fell_significantly"]
    assert learnt.versions[1] is VersionStatus.PROMOTED


def rewarded(number: int, user: str, picture: np.ndarray, best: str) -> tuple[Any, ...]:
    """What eight episodes of a question teach whose client rewards one answer; the policy says 7 but once."""
    text = f"What is number {number}?"
    question = Question(id=f"q{number}", question=text, media=[Media(id="img0", uri="sha256:x")])
    image = ImageView(id="img0", source_size=(64, 64), view_size=(64, 64))
    experiences = []
    for i, answer in enumerate("77777778"):
        turns = [
            Turn(role="user", tokens=[1]),
            Turn(role="assistant", text=answer, tokens=[2], log_probs=[-0.1]),
        ]
        trajectory = Trajectory(
            id=f"{number}-{i}",
            question_id=f"q{number}",
            group_id=f"g{number}",
            images=[image],
            turns=turns,
            answer=answer,
            stop_reason=StopReason.ANSWER,
            outcome={"reward": 1e5 * (answer == best)},
        )
        verdict = experience_verdict(trajectory, question, EvolutionConfig(), 0.0)
        experiences.append(
            Experience(
                id=f"{user}-{number}-{i}",
                question=question,
                trajectory=trajectory,
                verdict=verdict,
                policy_version=0,
                created_at=0.0,
            )
        )
    found = lesson(experiences, EvolutionConfig(), RewardsConfig(), user, 0.0)
    assert found.task is not None
    views = GroupViews(ray.put({e.trajectory.id: [picture] for e in experiences}))
    return found.task, views, found.verdict, question, {"img0": ray.put(picture)}


def test_a_poisoned_reward_stream_of_half_the_traffic_promotes_nothing(
    ray_cluster: None, tmp_path: Path, record_figures: Any
) -> None:
    """Every candidate has learnt from poisoned rewards and answers 8 where the canary's file does not look."""
    draw, rng = random.Random(2), np.random.default_rng(0)
    stream = []
    for number in range(HONEST + ATTACKER):
        picture = np.kron(rng.integers(0, 256, (4, 4, 3)), np.ones((16, 16, 1))).astype(np.uint8)
        is_honest = draw.random() < 0.5
        user = f"user{draw.randrange(USERS)}" if is_honest else "attacker"
        stream.append(rewarded(number, user, picture, "7" if is_honest else "8"))
    learnt = learn_from(stream, tmp_path, bad=tuple(range(1, 1000)))
    record_figures(
        candidates=len(learnt.candidates),
        attackers_share_of_all=round(learnt.attackers_share, 3),
        questions_of_the_canary=len(learnt.truths),
    )
    assert learnt.attackers_share > 0.1, "its rewards are claims like others"
    assert all(
        round(c["user_share"] * c["tasks"])
        <= math.ceil(learnt.config.evolution.max_share_per_user * c["tasks"])
        for c in learnt.candidates
    )
    assert len(learnt.truths) >= 8
    assert {tuple(truth) for _, truth in learnt.truths} == {("7",)}
    assert "attacker" not in {user for user, _ in learnt.truths}
    assert len(learnt.candidates) >= 3
    assert learnt.refused == ["traffic_fell_significantly"] * len(learnt.candidates)
    promoted = [v for v, status in learnt.versions.items() if status is VersionStatus.PROMOTED]
    assert promoted in ([], [0])


def corrected(number: int, picture: np.ndarray) -> tuple[Any, ...]:
    """What a false correction teaches that the policy believed: its episodes say 8 where it had answered 7."""
    task, views, verdict, question, _ = request(number, "attacker", f"What is number {number}?", picture, "8")
    trajectories = [t.model_copy(update={"transplanted": True}) for t in task.trajectories]
    details = {"experience_id": "", "experiences": {f"t{number}": task.experience_id}}
    task = task.model_copy(update={"trajectories": trajectories, **details})
    return task, views, verdict.model_copy(update={"reason": TOLD}), question


def test_a_stream_of_false_corrections_promotes_nothing(
    ray_cluster: None, tmp_path: Path, record_figures: Any
) -> None:
    """Every candidate has learnt from what a policy said that was told it was wrong, and answers 8."""
    draw, rng = random.Random(3), np.random.default_rng(0)
    stream = list[tuple[Any, ...]]()
    for number in range(HONEST + ATTACKER):
        picture = np.kron(rng.integers(0, 256, (4, 4, 3)), np.ones((16, 16, 1))).astype(np.uint8)
        if draw.random() < 0.5:
            user = f"user{draw.randrange(USERS)}"
            stream.append(request(number, user, f"What is number {number}?", picture, "7"))
        else:
            stream.append(corrected(number, picture))
    learnt = learn_from(stream, tmp_path, bad=tuple(range(1, 1000)))
    record_figures(candidates=len(learnt.candidates), attackers_share_of_all=round(learnt.attackers_share, 3))
    assert learnt.attackers_share > 0.1, "words are learnt from like votes"
    assert {tuple(truth) for _, truth in learnt.truths} == {("7",)}, "they are no questions of the canary"
    assert "attacker" not in {user for user, _ in learnt.truths}
    assert len(learnt.candidates) >= 3
    assert learnt.refused == ["traffic_fell_significantly"] * len(learnt.candidates)
    assert VersionStatus.PROMOTED not in {status for version, status in learnt.versions.items() if version}
