"""What becomes of an update task while its experience is deleted or called wrong."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pixelis.actors import group_views
from pixelis.actors.update_intake import UpdateIntake, UpdateScoring
from pixelis.actors.update_queue import UpdateQueue
from pixelis.config import load
from pixelis.evolution.gate import WINDOW
from pixelis.evolution.review_queue import ReviewQueue
from pixelis.evolution.traffic_questions import TrafficQuestions
from pixelis.records import Feedback, ImageView, Media, Question, Trajectory, Turn, UpdateTask, Verdict
from pixelis.rewards.vote import TOLD

PICTURE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
VERDICT = Verdict(answer="7", confidence=0.95, strategy="majority")


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are the values themselves."""
    monkeypatch.setattr(group_views.ray, "put", lambda value: value)
    monkeypatch.setattr(group_views, "_values", lambda refs: _Themselves())


class _Themselves:
    def __getitem__(self, value: Any) -> Any:
        return value


def on_loop(test: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


def task(number: int = 1) -> UpdateTask:
    turns = [Turn(role="user", tokens=[1]), Turn(role="assistant", tokens=[2], log_probs=[-0.1])]
    ids = {"question_id": f"q{number}", "group_id": f"g{number}"}
    common: dict[str, Any] = {**ids, "turns": turns, "answer": "7"}
    trajectories = [
        Trajectory(id=f"t{i}", images=[ImageView(id="img0")], reward=float(i), **common) for i in range(2)
    ]
    return UpdateTask(
        id=f"task_{number}",
        question_id=f"q{number}",
        trajectories=trajectories,
        pseudo_label="7",
        confidence=0.95,
        created_at=0.0,
        user="ann",
        experience_id=f"exp_{number}",
    )


class Views:
    """The views of a task, which arrive when ``here`` is set."""

    def __init__(self, is_here: bool = True):
        self.here = asyncio.Event()
        if is_here:
            self.here.set()

    async def get(self) -> dict[str, list[np.ndarray]]:
        await self.here.wait()
        return {"t0": [PICTURE], "t1": [PICTURE]}


def new_intake(folder: Path, *settings: str) -> UpdateIntake:
    config = load(None, [f"run.dir={folder}", *settings])
    promotion: Any = SimpleNamespace(canary=SimpleNamespace(keep=lambda *_: None), withdrawn=set())
    traffic = TrafficQuestions(config.evolution.canary, folder / "versions" / "traffic")
    reviews = ReviewQueue(folder / "review.db", config.rewards)
    parts = (promotion, traffic, reviews, UpdateScoring(config, None), group_views.UpdatePictures())
    return UpdateIntake(config, UpdateQueue(config, Counter()), *parts)


async def submit(
    intake: UpdateIntake, number: int = 1, views: Views | None = None, original: Any = None
) -> bool:
    question = Question(id=f"q{number}", question="which digit?", media=[Media(id="img0", uri="sha256:x")])
    if original is None:
        original = asyncio.get_running_loop().create_future()
        original.set_result(PICTURE)
    return await intake.submit(task(number), views or Views(), VERDICT, question, None, {"img0": original})  # type: ignore[arg-type]


HOLDS_OUT = "evolution.canary.traffic_share=1"
LEARNS = "evolution.canary.traffic=0"


@pytest.mark.parametrize("deleted", [True, False])
@on_loop
async def test_an_experience_deleted_or_called_wrong_on_the_way_is_no_question_of_the_canary(
    tmp_path: Path, deleted: bool
) -> None:
    intake, original = new_intake(tmp_path, HOLDS_OUT), asyncio.get_running_loop().create_future()
    submitting = asyncio.create_task(submit(intake, original=original))
    while not intake.counts["received"]:
        await asyncio.sleep(0.01)
    if deleted:
        await intake.forget(["exp_1"])
    else:
        await intake.disown("exp_1", Feedback(correct=False))
    original.set_result(PICTURE)
    assert not await submitting
    assert not intake.traffic.items
    assert not list(tmp_path.glob("versions/traffic/*"))
    assert not len(intake.queue)


@pytest.mark.parametrize("memory", ["memory.pictures=false", "memory.enabled=false", ""])
@on_loop
async def test_a_memory_without_pictures_lets_none_be_stored_for_the_canary(
    tmp_path: Path, memory: str
) -> None:
    intake = new_intake(tmp_path, HOLDS_OUT, *([memory] if memory else []))
    assert await submit(intake)
    assert (len(intake.traffic.items), len(intake.queue)) == ((0, 1) if memory else (1, 0))


@pytest.mark.parametrize(
    ("feedback", "learnt"),
    [(Feedback(correct=False), False), (Feedback(answer="8"), False), (Feedback(answer="7"), True)],
)
@on_loop
async def test_feedback_that_is_faster_than_the_task_disowns_it(
    tmp_path: Path, feedback: Feedback, learnt: bool
) -> None:
    intake, views = new_intake(tmp_path, LEARNS), Views(False)
    submitting = asyncio.create_task(submit(intake, views=views))
    await asyncio.sleep(0)
    await intake.disown("exp_1", feedback)
    await intake.disown("exp_1", Feedback(comment="a comment alone takes nothing back"))
    views.here.set()
    assert (await submitting, len(intake.queue)) == (learnt, int(learnt))
    assert intake.counts["disowned"] == int(not learnt)


@on_loop
async def test_a_disputed_review_is_approved_by_a_person_alone_and_counts_with_its_copies(
    tmp_path: Path,
) -> None:
    intake = new_intake(tmp_path, LEARNS, "evolution.review.share=1")
    for number in (1, 2):
        assert await submit(intake, number)
    await intake.disown("exp_1", Feedback(correct=False))
    assert intake.reviews.due(1e12, 1.0) == ["task_2"]
    for name in ("task_1", "task_2"):
        assert intake.reviews.decide(name, "approved", "ann") is not None
        assert await intake.approve(name)
    groups = {item.question for item in intake.queue.items}
    assert len(groups) == 1, "two requests of one question"
    assert not groups & {"q1", "q2"}


@on_loop
async def test_a_user_with_many_experiences_is_forgotten_whole(tmp_path: Path) -> None:
    intake = new_intake(tmp_path, LEARNS)
    await intake.forget(["exp_1", *(f"older_{i}" for i in range(5000))])
    assert not await submit(intake)


@on_loop
async def test_a_task_that_is_sent_twice_counts_once(tmp_path: Path) -> None:
    intake = new_intake(tmp_path, LEARNS)
    assert [await submit(intake) for _ in range(2)] == [True, False]
    assert (len(intake.queue), intake.counts["repeated"]) == (1, 1)


@on_loop
async def test_what_a_told_policy_says_is_no_sign_that_the_user_is_answered_clearly(tmp_path: Path) -> None:
    """Otherwise a user's comments would let its unclear votes be learnt from."""
    intake, question = new_intake(tmp_path, LEARNS), Question(id="q", question="which digit?")
    told = VERDICT.model_copy(update={"reason": TOLD})
    for number in range(WINDOW):
        assert await intake.submit(task(number), Views(), told, question, None)  # type: ignore[arg-type]
    assert "ann" not in intake.clear.recent
