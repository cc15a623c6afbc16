"""What the intake of update tasks keeps of the pictures that it is sent."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from pixelis.actors.canary import Canary
from pixelis.actors.group_views import GroupViews, UpdatePictures
from pixelis.actors.update_intake import UpdateIntake, UpdateScoring
from pixelis.actors.update_queue import UpdateQueue
from pixelis.config import load
from pixelis.evolution.review_queue import ReviewQueue
from pixelis.evolution.traffic_questions import TrafficQuestions
from pixelis.records import ImageView, Media, Question, Trajectory, Turn, UpdateTask, Verdict

pytestmark = pytest.mark.slow


def confident_task() -> UpdateTask:
    """A confident task whose trajectories show a picture, and one of them a crop."""
    turns = [Turn(role="user", tokens=[1]), Turn(role="assistant", tokens=[2], log_probs=[-0.1])]
    images = [ImageView(id=id, source_size=(512, 512), view_size=(64, 64)) for id in ("img0", "obs1")]
    common: dict[str, Any] = {"question_id": "q", "group_id": "g", "turns": turns, "answer": "7"}
    trajectories = [
        Trajectory(id=f"t{i}", images=images[: 2 - i], reward=float(i), **common) for i in range(2)
    ]
    return UpdateTask(
        question_id="q",
        trajectories=trajectories,
        pseudo_label="7",
        confidence=0.95,
        created_at=0.0,
        user="u",
    )


def test_a_question_held_out_for_the_canary_keeps_one_copy_of_its_own_picture(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture itself."""
    config = load(
        None, [f"run.dir={tmp_path}", "evolution.canary.traffic=8", "evolution.canary.traffic_share=1"]
    )
    pictures, counts, traffic = UpdatePictures(), Counter[str](), TrafficQuestions(config.evolution.canary)
    canary = Canary(config, None, pictures)  # type: ignore[arg-type]
    intake = UpdateIntake(
        config,
        UpdateQueue(config, counts),
        SimpleNamespace(canary=canary, withdrawn=set()),  # type: ignore[arg-type]
        traffic,
        ReviewQueue(Path(config.run.dir) / "review.db", config.rewards),
        UpdateScoring(config, None),
        pictures,
    )
    picture = np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8)
    view, crop = picture[::8, ::8], picture[:64, :64]
    sent, original = ray.put({"t0": [view, crop], "t1": [view]}), ray.put(picture)
    question = Question(
        id="q", question="which?", media=[Media(id="img0", uri="data:", width=512, height=512)]
    )
    judged: list[tuple[Question, dict[str, ray.ObjectRef]]] = []

    async def capture(version: int, questions: list) -> dict[str, float | None]:
        judged.extend(questions)
        return {}

    async def run() -> None:
        verdict = Verdict(answer="7", confidence=0.95, strategy="vote")
        assert await intake.submit(update, GroupViews(sent), verdict, question, None, {"img0": original})
        assert counts == {"received": 1, "held_out": 1}
        await canary.judge_traffic(0, traffic.items)

    update = confident_task()
    monkeypatch.setattr(canary, "_judge", capture)
    asyncio.run(run())
    (item,), ((_, references),) = traffic.items, judged
    assert item.pictures.keys() == references.keys() == {"img0"}
    assert np.array_equal(item.pictures["img0"], picture)
    assert np.shares_memory(item.pictures["img0"], ray.get(references["img0"]))
    assert not np.shares_memory(item.pictures["img0"], ray.get(original))
    assert item.question.media[0].width == 512
