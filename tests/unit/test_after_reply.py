"""What follows a reply when something behind is away, and what a replica tells of its searches."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayError

from pixelis.actors.memory import Memory
from pixelis.config import MemoryConfig as Settings
from pixelis.config import load
from pixelis.dialogue.session import SamplingParams
from pixelis.memory.vectors import unit
from pixelis.records import Experience, Feedback, Group, ImageView, Question, Trajectory, Verdict
from pixelis.serve import after_reply
from pixelis.serve.after_reply import AfterReply
from pixelis.serve.agent_types import AgentQuery, Answer
from pixelis.serve.counters import Counters
from pixelis.serve.retrieval import Lookup


class CachedReply:
    """A memory that keeps what it is given."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    async def add(self, entries: list[Any]) -> None:
        self.entries += entries

    async def feedback(self, id: str, feedback: Feedback) -> Experience:
        return after_reply.as_experience(answered(), None)


class Remembering:
    """What Learning needs of a Recall."""

    def __init__(self) -> None:
        self.memory, self.writes = CachedReply(), True


class Silent:
    """An Evolution that takes calls and never answers."""

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *arguments: Any) -> Any:
        return asyncio.get_running_loop().create_future()


def answered(views: Any = None) -> Answer:
    question = Question(id="q", question="which?", task="serve", split="serve")
    winner = Trajectory(
        id="t", question_id="q", group_id="g", images=[ImageView(id="img0", source_size=(4, 4), view_size=(8, 8))]
    )
    return Answer(
        Verdict(answer="7", confidence=1.0, strategy="majority"),
        Group(id="g", question=question, trajectories=[winner]),
        winner,
        views,
    )


def learns(counts: Counter[str]) -> tuple[AfterReply, CachedReply]:
    async def evolution() -> Any:
        return Silent()

    recall: Any = Remembering()
    return AfterReply(load(None, []), recall, evolution, counts), recall.memory


def test_an_answer_whose_pictures_were_lost_is_remembered_without_them() -> None:
    async def talk() -> tuple[CachedReply, Counter[str]]:
        counts = Counter[str]()
        after, memory = learns(counts)
        views = asyncio.get_running_loop().create_future()
        views.set_exception(RayError("the generator is gone"))
        after.later(answered(views), AgentQuery("which?", [], 1, SamplingParams(), learn=False), Lookup(None, None, 0.0))
        await after.drain(10)
        return memory, counts

    memory, counts = asyncio.run(talk())
    assert [(entry.experience.verdict.answer, entry.pictures) for entry in memory.entries] == [("7", {})]
    assert (counts["remembered"], counts["no_pictures"]) == (1, 1)


def test_an_evolution_that_does_not_answer_holds_nothing_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(after_reply, "EVOLUTION_S", 0.05)

    async def talk() -> Counter[str]:
        counts = Counter[str]()
        after, _ = learns(counts)
        for _ in range(2):  # of one experience: neither stands in for the other
            await after.feedback("exp_1", Feedback(correct=True))
        assert len(after.background) == 2
        await after.drain(10)
        assert not after.background
        return counts

    assert asyncio.run(talk())["feedback_told_failed"] == 2


def test_what_breaks_after_a_reply_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(experience: Experience) -> Experience:
        raise ValueError("no such text")

    monkeypatch.setattr(after_reply.privacy, "redact_record", broken)

    async def talk() -> Counter[str]:
        counts = Counter[str]()
        after, memory = learns(counts)
        after.later(answered(), AgentQuery("which?", [], 1, SamplingParams()), Lookup(None, None, 0.0))
        await after.drain(10)
        assert memory.entries == []
        return counts

    assert asyncio.run(talk()) == {"follow_failed": 1}


def test_a_few_searches_are_no_failure_rate() -> None:
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
        told = {
            "cosine": float(vector @ other),
            "euclidean": -float(np.linalg.norm(vector - other)),
            "manhattan": -float(np.abs(vector - other).sum()),
        }[metric]
        found, cosine = Memory(["m"], "nowhere", Settings(metric=metric))._cosine(told), float(vector @ other)
        assert found == pytest.approx(cosine, abs=1e-5) if metric != "manhattan" else -1 <= found <= cosine + 1e-6
