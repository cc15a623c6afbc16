"""What a comment asks of the policy, and what becomes of its answer."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pixelis.config import load
from pixelis.dialogue.session import BATCH_PRIORITY
from pixelis.errors import InfraFailure
from pixelis.evolution import privacy
from pixelis.evolution.words import original
from pixelis.records import (
    Experience,
    Group,
    ImageView,
    Media,
    Question,
    StopReason,
    Trajectory,
    Turn,
    UpdateTask,
    Verdict,
)
from pixelis.rewards.vote import TOLD, vote
from pixelis.serve import words
from pixelis.serve.agent_types import AgentQuery, Answer
from pixelis.serve.words import Words

SENT = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
SHOWN, SEEN = SENT[:8, :8], SENT[8:, 8:]
CONFIG = load(None, ["evolution.words=true", "evolution.objective=answer", "evolution.cold_start=0"])


def trajectory(question: Question, id: str, answer: str, prompt: list[int]) -> Trajectory:
    crop = ImageView(id="obs1", parent="img0", view_size=(8, 8))
    turns = [
        Turn(role="user", text=question.question, tokens=prompt, images=["img0"]),
        Turn(role="assistant", tokens=[20], log_probs=[-0.1]),
        Turn(role="tool", tokens=[30], images=["obs1"]),
        Turn(role="assistant", text=answer, tokens=[40], log_probs=[-0.1]),
    ]
    return Trajectory(
        id=id,
        question_id=question.id,
        group_id="g",
        images=[ImageView(id="img0", view_size=(8, 8)), crop],
        turns=turns,
        answer=answer,
        stop_reason=StopReason.ANSWER,
    )


def experience(prompt: list[int]) -> Experience:
    question = Question(
        id="q", question="Which digit?", media=[Media(id="img0", uri="sha256:x")], task="serve"
    )
    return Experience(
        id="exp_1",
        question=question,
        trajectory=trajectory(question, "t", "3", prompt),
        verdict=Verdict(answer="3", confidence=1.0, strategy="majority"),
        policy_version=0,
        created_at=0.0,
    )


class Service:
    """A policy that gives ``answers``, a memory of one experience, and what Evolution was sent."""

    def __init__(self, answers: str, stored: dict[str, np.ndarray]):
        self.answers, self.stored = answers, stored
        self.asked, self.sent = list[AgentQuery](), list[tuple[Any, ...]]()
        self.counts: Counter[str] = Counter()

    async def ask(self, query: AgentQuery) -> Answer:
        self.asked.append(query)
        if not self.answers:
            raise InfraFailure("no generator answered")
        media = [Media(id="img0", uri="sha256:y")]
        question = Question(id="told", question=query.question, history=query.history, media=media)
        group = [trajectory(question, f"t{i}", a, [8, 8, 8]) for i, a in enumerate(self.answers)]
        verdict = vote(group, (), CONFIG.evolution, question, 0.0)
        views = SimpleNamespace(get=self.views)
        whole = Group(id="g", question=question, trajectories=group)
        return Answer(verdict, whole, group[0], views, group)  # type: ignore[arg-type]

    async def views(self) -> dict[str, list[np.ndarray]]:
        return {f"t{i}": [SENT, SEEN] for i in range(len(self.answers))}

    async def pictures(self, id: str) -> dict[str, bytes]:
        return {name: privacy.clean_png(picture) for name, picture in self.stored.items()}

    async def call(self, *arguments: Any) -> bool:
        self.sent.append(arguments)
        return True

    def learn(self, prompt: list[int]) -> Counter[str]:
        service: Any = self
        learner = Words(CONFIG, self.ask, service, self.call, self.counts)
        asyncio.run(learner.learn("task_1", experience(prompt), "No, the red one.", "anna"))
        return self.counts


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are the values themselves."""
    monkeypatch.setattr(words.ray, "put", lambda value: value)


STORED = {"img0": SHOWN, "obs1": SHOWN, original("img0"): SENT}


def test_the_picture_as_it_was_sent_is_shown_again_and_the_votes_become_a_task() -> None:
    service = Service("7777", STORED)
    assert service.learn([1, 2]) == {"words_sent": 1}
    ((query,), ((method, task, held, verdict, question),)) = service.asked, service.sent
    assert (query.question, [e.answer for e in query.history]) == ("No, the red one.\nWhich digit?", ["3"])
    assert (query.learn, query.remember, query.sampling.priority) == (False, False, BATCH_PRIORITY)
    assert base64.b64decode(query.images[0].partition(",")[2]) == privacy.clean_png(SENT)
    assert (method, verdict.reason, question.question) == ("submit", TOLD, "Which digit?")
    assert isinstance(task, UpdateTask)
    assert (task.id, task.pseudo_label, task.user) == ("task_1", "7", "anna")
    assert (task.experience_id, task.experience_ids) == ("", {"exp_1"})
    for moved in task.trajectories:
        assert (moved.token_ids(), moved.transplanted) == ([1, 2, 20, 30, 40], True)
        shown, seen = held.added[moved.id]
        np.testing.assert_array_equal(shown, SHOWN)
        np.testing.assert_array_equal(seen, SEEN)
    assert "red one" not in task.model_dump_json() + question.model_dump_json()


@pytest.mark.parametrize(
    ("answers", "stored", "prompt", "asks"),
    [
        ("7892", STORED, [1], True),
        ("7777", {"img0": SHOWN}, [1], False),
        ("7777", {original("img0"): SENT}, [1], False),
        ("7777", STORED, [], True),
    ],
    ids=["unclear", "not to be learnt from", "without views", "redacted"],
)
def test_nothing_is_sent(answers: str, stored: dict[str, np.ndarray], prompt: list[int], asks: bool) -> None:
    service = Service(answers, stored)
    assert service.learn(prompt) == {"words_unclear": 1}
    assert (len(service.asked), service.sent) == (int(asks), [])


def test_a_failure_is_counted() -> None:
    assert Service("", STORED).learn([1]) == {"words_failed": 1}
