"""Rewards with a state learn from the tasks of an update, in a real Scorer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import ray

from pixelis.actors.scorer import Scorer
from pixelis.actors.update_intake import UpdateScoring
from pixelis.config import load
from pixelis.records import Question, StopReason, Trajectory, UpdateTask

pytestmark = pytest.mark.slow


def test_rewards_learn_from_an_update_when_it_is_applied_and_only_once(
    ray_cluster: None, tmp_path: Path
) -> None:
    config = load(
        None, [f"run.dir={tmp_path}", "rewards.weights.length=1", "rewards.normalise.terms=[length]"]
    )
    kind, name = Scorer, f"scorer-{tmp_path.name}"
    scorer = kind.options(name=name, num_cpus=0).remote(config, 0)
    scoring = UpdateScoring(config, (name, name))  # no states, so that the second is not called
    trajectories = [
        Trajectory(id=f"t{i}", question_id="q", group_id="g", answer="7", stop_reason=StopReason.ANSWER)
        for i in range(3)
    ]
    task = UpdateTask(
        question_id="q", trajectories=trajectories, pseudo_label="7", confidence=1.0, created_at=0.0
    )
    question = Question(id="q", question="How many?")

    def state() -> bytes:
        return ray.get(scorer.state.remote())

    try:
        initial = state()
        scored = asyncio.run(scoring.score(task, {}, question, step=0))
        assert all(t.reward is not None for t in scored.trajectories)
        assert state() == initial  # the update may still fail
        asyncio.run(scoring.advance(0))
        learnt = state()
        assert learnt != initial
        asyncio.run(scoring.advance(0))
        assert state() == learnt
    finally:
        ray.kill(scorer)
    asyncio.run(scoring.advance(2))  # a lost Scorer does not end the update
