"""Work after a reply when an actor does not answer, and the health metrics of a replica."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayError

from pixelis.actors import after_episode
from pixelis.actors.group_views import GroupViews
from pixelis.actors.memory import Memory
from pixelis.config import MemoryConfig as Settings
from pixelis.config import load
from pixelis.dialogue.session import SamplingParams
from pixelis.records import Experience, Feedback, Group, ImageView, Question, Trajectory, Verdict
from pixelis.records.vectors import unit
from pixelis.serve import after_reply
from pixelis.serve.after_reply import AfterReply
from pixelis.serve.agent_types import AgentQuery, Answer
from pixelis.serve.counters import Counters
from pixelis.serve.retrieval import Lookup


class RecordingMemory:
    """A memory that records the entries it receives."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    async def add(self, entries: list[Any]) -> None:
        self.entries += entries

    async def feedback(self, id: str, feedback: Feedback) -> Experience:
        return after_reply.as_experience(id, some_answer(), AgentQuery("which?", [], 1, SamplingParams()))


class SilentEvolution:
    """An Evolution actor that never answers."""

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *arguments: Any) -> Any:
        return asyncio.get_running_loop().create_future()


def some_answer(views: Any = None, confidence: float = 1.0) -> Answer:
    question = Question(id="q", question="which?", task="serve", split="serve")
    images = [ImageView(id="img0", source_size=(4, 4), view_size=(8, 8))]
    winner = Trajectory(id="t", question_id="q", group_id="g", images=images)
    verdict = Verdict(answer="7", confidence=confidence, strategy="majority")
    return Answer(verdict, Group(id="g", question=question, trajectories=[winner]), winner, views)


def after_reply_of(*overrides: str) -> tuple[AfterReply, RecordingMemory]:
    async def evolution() -> Any:
        return SilentEvolution()

    memory = RecordingMemory()
    retrieval: Any = SimpleNamespace(memory=memory, writes=True)
    return AfterReply(load(None, list(overrides)), retrieval, evolution, Counter(), SilentEvolution()), memory


async def remember(after: AfterReply, answer: Answer, **options: Any) -> None:
    query = AgentQuery("which?", [], 1, SamplingParams(), **options)
    await after.remember(answer, query, Lookup(None, None, 0.0))


def test_an_answer_whose_pictures_are_lost_is_stored_without_them() -> None:
    after, memory = after_reply_of()

    async def run() -> None:
        views = asyncio.get_running_loop().create_future()
        views.set_exception(RayError("the generator is gone"))
        answer = some_answer(GroupViews(views))
        await remember(after, answer, learn=False)
        assert (answer.remembered, answer.experience_id) == ("yes", memory.entries[0].experience.id)
        await after.drain(10)

    asyncio.run(run())
    assert [(entry.experience.verdict.answer, entry.pictures) for entry in memory.entries] == [("7", {})]
    assert (after.counts["remembered"], after.counts["no_pictures"]) == (1, 1)


def test_calls_to_an_evolution_that_does_not_answer_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(after_episode, "EVOLUTION_TIMEOUT_S", 0.05)
    after, _ = after_reply_of()

    async def run() -> None:
        for _ in range(2):  # of one experience: neither stands in for the other
            await after.feedback("exp_1", Feedback(correct=True))
        assert len(after.tasks) == 2
        await after.drain(10)
        assert not after.tasks

    asyncio.run(run())
    assert after.counts["feedback_sent_failed"] == 2


def test_an_answer_that_is_skipped_for_a_full_queue_is_not_counted_as_one_that_evolution_skips() -> None:
    after, _ = after_reply_of("evolution.queue=1")

    async def run() -> None:
        answers = [some_answer() for _ in range(2)]
        for answer in answers:
            await remember(after, answer, remember="later", learn=False)
        assert [answer.remembered for answer in answers] == ["later", "queue full"]
        for task in after.tasks.values():
            task.cancel()

    asyncio.run(run())
    assert after.counts["follow_skipped"] == 1
    assert "skipped" not in after.counts, "in GET /v1/evolution it would hide Evolution's"


def test_votes_below_the_gate_are_counted_until_one_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(after_episode, "EVOLUTION_TIMEOUT_S", 0.05)
    after, _ = after_reply_of()

    async def run() -> None:
        for confidence, gated in ((0.1, 1), (0.1, 2), (1.0, 0)):
            await remember(after, some_answer(confidence=confidence), remember=False)
            await after.drain(10)
            assert after.evolution is not None
            assert after.gated_in_a_row == gated

    asyncio.run(run())


def test_few_searches_give_no_failure_rate() -> None:
    counters = Counters("r1", dict)
    assert counters.health() == {}
    counters.answered(0.5, True, True)
    for _ in range(8):
        counters.answered(0.1, True, False)
    assert counters.health() == {"p99_latency": 0.5}
    counters.answered(0.1, True, False)
    counters.answered(0.1, False, False)
    assert counters.health()["faiss_failure_rate"] == pytest.approx(0.1)


@pytest.mark.parametrize("metric", ["cosine", "euclidean", "manhattan"])
def test_a_neighbours_similarity_is_a_cosine_whatever_the_metric(metric: Any) -> None:
    rng = np.random.default_rng(3)
    vector = unit(rng.normal(size=64))
    for distance in (0.0, 0.01, 0.1, 2.0):
        other = unit(vector + distance * unit(rng.normal(size=64)))
        similarity = {
            "cosine": float(vector @ other),
            "euclidean": -float(np.linalg.norm(vector - other)),
            "manhattan": -float(np.abs(vector - other).sum()),
        }[metric]
        estimate = Memory(["m"], "nowhere", Settings(metric=metric))._cosine(similarity)
        cosine = float(vector @ other)
        assert (
            estimate == pytest.approx(cosine, abs=1e-5)
            if metric != "manhattan"
            else -1 <= estimate <= cosine + 1e-6
        )
