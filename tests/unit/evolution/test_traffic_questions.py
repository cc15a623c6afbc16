"""Traffic questions of the canary: confident, diverse, of many users, and what they refuse."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pixelis.config import load
from pixelis.evolution.shares import Source
from pixelis.evolution.traffic_questions import TrafficQuestions, judge_traffic
from pixelis.records import ImageView, Media, Question, Trajectory, UpdateTask

CONFIG = load(None, ["evolution.canary.traffic=8", "evolution.canary.traffic_share=1"]).evolution.canary


def offer(
    questions: TrafficQuestions,
    number: int,
    user: str = "anna",
    group: str = "",
    text: str = "which?",
    confidence: float = 1.0,
    created_at: float = 0.0,
) -> bool:
    image = ImageView(id="img0", source_size=(40, 30), view_size=(8, 6))
    trajectory = Trajectory(id=f"t{number}", question_id="q", group_id="g", images=[image])
    scored = {"pseudo_label": "7", "confidence": confidence, "created_at": created_at}
    ids = {"id": f"task{number}", "question_id": "q", "experience_id": f"exp{number}"}
    task = UpdateTask(trajectories=[trajectory], **ids, **scored)
    question = Question(id="q", question=text, media=[Media(id="img0", uri="sha256:x", width=40, height=30)])
    source = Source(user, group or f"group{number}")
    wanted = questions.wants(task, question, source, 0.25)
    if wanted:
        questions.add(task, question, source, {"img0": np.zeros((15, 20, 3), np.uint8)})
    return wanted


def test_confident_questions_of_several_users_are_held_out_once_each() -> None:
    questions = TrafficQuestions(CONFIG)
    assert not offer(questions, 0, confidence=0.8)
    assert not offer(questions, 0, text="mail [EMAIL_3f9c21]")
    assert offer(questions, 0, group="same")
    assert not offer(questions, 1, user="bob", group="same")
    # A quarter of eight from one user
    assert [offer(questions, 2 + i) for i in range(4)] == [True, False, False, False]
    for number in range(10, 40):
        offer(questions, number, user=f"user{number % 7}")
    assert len(questions.items) == 8
    assert max(Counter(item.source.user for item in questions.items).values()) <= 2
    (first, *_) = questions.items
    expected = (["7"], 20, (15, 20, 3))
    assert (first.question.answers, first.question.media[0].width, first.pictures["img0"].shape) == expected
    assert questions.forget([first.experience_id, "other"]) == 1
    assert len(questions.items) == 7


def test_questions_outlast_a_restart_and_deleted_ones_do_not(tmp_path: Path) -> None:
    questions = TrafficQuestions(CONFIG, tmp_path)
    for number in range(3):
        assert offer(questions, number, user=f"user{number}", text=f"which {number}?")
        questions.save()
    questions.forget(["exp1"])
    questions.save()
    (tmp_path / "damaged.npz").write_bytes(b"PK\x03\x04 not a file of arrays")
    restarted = TrafficQuestions(CONFIG, tmp_path)
    restarted.load(lambda text, picture: f"group of {text} {picture.shape}")
    assert [item.question for item in restarted.items] == [item.question for item in questions.items]
    assert [item.source for item in restarted.items] == [
        Source(f"user{n}", f"group of which {n}? (15, 20, 3)") for n in (0, 2)
    ]
    assert all((item.pictures["img0"] == 0).all() for item in restarted.items)
    assert not offer(restarted, 9, group="group of which 2? (15, 20, 3)")  # near-identical to an earlier one
    restarted.forget(["exp0", "exp2"])
    restarted.save()
    assert not list(tmp_path.iterdir())


def test_old_questions_expire_and_files_are_private(tmp_path: Path) -> None:
    questions = TrafficQuestions(CONFIG, tmp_path)
    offer(questions, 0, user="ann")
    offer(questions, 1, user="bob", created_at=100.0)
    questions.save()
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    restarted = TrafficQuestions(CONFIG, tmp_path)
    restarted.load(lambda text, picture: text)
    assert restarted.expire(50.0) == 1
    restarted.save()
    assert [item.experience_id for item in restarted.items] == ["exp1"]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_share_of_the_tasks_is_held_out() -> None:
    config = CONFIG.model_copy(update={"traffic": 1000, "traffic_share": 0.0625})
    questions = TrafficQuestions(config)
    held = sum(offer(questions, number, user=f"user{number}") for number in range(1000))
    assert 30 <= held <= 100
    assert not TrafficQuestions(config.model_copy(update={"traffic": 0})).items


@pytest.mark.parametrize(("wrong", "fell"), [(0, False), (1, False), (3, False), (8, True), (32, True)])
def test_only_a_significant_fall_refuses(wrong: int, fell: bool) -> None:
    served = {f"q{i}": 1.0 for i in range(32)}
    candidate = {name: float(i >= wrong) for i, name in enumerate(served)}
    assert judge_traffic(candidate, served, CONFIG, 0).fell is fell
