"""What a comment asks of the policy, and what becomes of its answer."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pixelis.config import Config, load
from pixelis.dialogue.session import BATCH_PRIORITY
from pixelis.errors import InfraFailure
from pixelis.evolution import privacy
from pixelis.evolution.words import original
from pixelis.records import (
    Experience,
    Feedback,
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
from pixelis.serve.after_reply import AfterReply
from pixelis.serve.agent_types import AgentQuery, Answer

SENT = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
SHOWN = SENT[:8, :8]
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
        whole = Group(id="g", question=question, trajectories=group)
        return Answer(verdict, whole, group[0], "views of the group", group)  # type: ignore[arg-type]

    async def pictures(self, id: str) -> dict[str, bytes]:
        return {name: privacy.clean_png(picture) for name, picture in self.stored.items()}

    async def feedback(self, id: str, feedback: Feedback) -> Experience:
        return experience(self.prompt)

    async def evolution(self) -> Any:
        def remote(method: str, *arguments: Any) -> Any:
            async def call() -> bool:
                self.sent.append((method, *arguments))
                return True

            return call()

        return SimpleNamespace(
            submit=SimpleNamespace(remote=partial(remote, "submit")),
            feedback=SimpleNamespace(remote=partial(remote, "feedback")),
        )

    def learn(
        self, prompt: list[int], comments: Sequence[str] = ("No, the red one.",), config: Config = CONFIG
    ) -> Counter[str]:
        """Comment on the experience; the outcomes."""
        self.prompt = prompt

        async def scenario() -> None:
            retrieval: Any = SimpleNamespace(memory=self, writes=True)
            after = AfterReply(config, retrieval, self.evolution, self.counts, self.ask)
            for comment in comments:
                await after.feedback("exp_1", Feedback(comment=comment, created_at=1.0), voter="anna")
            await after.drain(10)
            assert not after.tasks

        asyncio.run(scenario())
        self.sent = [call for call in self.sent if call[0] == "submit"]
        return Counter({name: n for name, n in self.counts.items() if name.startswith("words")})


STORED = {"img0": SHOWN, "obs1": SHOWN, original("img0"): SENT}


def test_the_picture_as_it_was_sent_is_shown_again_and_the_votes_become_a_task() -> None:
    service = Service("7777", STORED)
    assert service.learn([1, 2]) == {"words_sent": 1}
    ((query,), ((_, task, views, verdict, question),)) = service.asked, service.sent
    assert (query.question, [e.answer for e in query.history]) == ("No, the red one.\nWhich digit?", ["3"])
    assert (query.learn, query.remember, query.sampling.priority) == (False, False, BATCH_PRIORITY)
    assert base64.b64decode(query.images[0].partition(",")[2]) == privacy.clean_png(SENT)
    assert (views, verdict.reason, question.question) == ("views of the group", TOLD, "Which digit?")
    assert isinstance(task, UpdateTask)
    assert (task.pseudo_label, task.user) == ("7", "anna")
    assert (task.experience_id, task.experience_ids) == ("", {"exp_1"})
    for moved in task.trajectories:
        assert (moved.token_ids(), moved.transplanted) == ([1, 2, 20, 30, 40], True)
    assert "red one" not in task.model_dump_json() + question.model_dump_json()


@pytest.mark.parametrize(
    ("answers", "stored", "prompt", "asks"),
    [
        ("7892", STORED, [1], True),
        ("7777", {"img0": SHOWN}, [1], False),
        ("7777", STORED, [], True),
    ],
    ids=["unclear", "not to be learnt from", "redacted"],
)
def test_nothing_is_sent(answers: str, stored: dict[str, np.ndarray], prompt: list[int], asks: bool) -> None:
    service = Service(answers, stored)
    assert service.learn(prompt) == {"words_unclear": 1}
    assert (len(service.asked), service.sent) == (int(asks), [])


def test_a_failure_is_counted() -> None:
    assert Service("", STORED).learn([1]) == {"words_sent_failed": 1}


def test_a_repeated_comment_is_asked_once_and_a_blank_one_never() -> None:
    service = Service("7777", STORED)
    assert service.learn([1], ["No, the red one.", " ", "No, the red one. "]) == {"words_sent": 1}
    assert len(service.asked) == 1


def test_a_comment_is_left_out_while_there_is_too_much_work() -> None:
    service = Service("7777", STORED)
    full = CONFIG.evolution.model_copy(update={"queue": 1})
    assert not service.learn([1], config=CONFIG.model_copy(update={"evolution": full}))
    assert (service.counts["follow_skipped"], service.counts["feedback"], service.asked) == (1, 1, [])
