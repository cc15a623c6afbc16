"""Online learning with rewards that need states of the embedder and a model of their own, with real
actors.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import ray
from placed_actors import wait_until
from test_evolution_faults import canary_questions, config, train_to_answer_seven

from pixelis.actors import placement
from pixelis.actors.serving import online
from pixelis.datasets import cards
from pixelis.dialogue.session import SamplingParams
from pixelis.evolution.privacy import clean_png
from pixelis.jobs.serve import backends
from pixelis.serve.agent import Agent, data_url
from pixelis.serve.agent_types import AgentQuery

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.long  # tests/ray/test_update_scoring.py: a Scorer with a state
def test_update_tasks_are_scored_with_states_of_the_embedder(ray_cluster: None, tmp_path: Path) -> None:
    own = [
        "rewards.preset=pixelis",
        "evolution.canary.enabled=false",
        "evolution.review.share=0",
        "evolution.batch=2",
    ]
    settings = config(tmp_path, *own, "engine.workers=1", "memory.enabled=false")
    initial = train_to_answer_seven(settings)
    assert settings.rewards.needs_states
    assert settings.rewards.learns_dynamics
    with (
        placement.placed(settings, learner=False, initial=str(initial), online=True) as actors,
        online(settings, actors) as backend,
    ):
        evolution = backend.evolution
        assert evolution is not None

        async def ask() -> None:
            agent = Agent(settings, backends(actors, backend))
            for seed, question in enumerate(canary_questions()[:6]):
                picture = data_url(clean_png(cards.render(question.media[0].uri)))
                sampling = SamplingParams(1.0, 1.0, 24, seed)
                await agent.answer(AgentQuery(question.question, [picture], 8, sampling, operations=False))
            await agent.drain(60)

        asyncio.run(ask())
        incarnation = ray.get(evolution.begin.remote(0, {"base": 0}, 0))
        wait_until(lambda: ray.get(evolution.stats.remote())["queue"] >= 2)
        assert ray.get(evolution.stats.remote())["unusable"] == 0
        batch = ray.get(evolution.next_batch.remote(0, 1, 0, incarnation), timeout=60)
        trajectories = [t for group in batch.groups for t in group.trajectories]
        assert all(t.reward is not None and t.advantage is not None for t in trajectories)
        assert all("curiosity_dynamics" in t.rewards for t in trajectories)
