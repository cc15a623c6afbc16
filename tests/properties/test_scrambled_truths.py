"""Labels never leak: with scrambled truths every reader, reward, verdict, update task and weight is bitwise the same."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pixelis import config
from pixelis.config import RewardsConfig
from pixelis.datasets.labels import Labels
from pixelis.datasets.questions import read_questions
from pixelis.evolution.updates import make_task
from pixelis.evolution.vote import vote
from pixelis.policy.advantages import assign_advantages
from pixelis.records import Group, Question, StopReason, Trajectory, Turn
from pixelis.rewards.equality import Equality
from pixelis.rewards.services import Services
from pixelis.rewards.terms import score_group

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

TRUTHS = ["A", "B", "(B)", "42", "7", "cat", r"\boxed{7}", "5 cm", "", "change_size(1, small)"]
TEXT = "Which?\nA. cat\nB. 7"
ROWS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "question": lambda t, i: {"id": f"q{i}", "question": TEXT, "answers": [t], "task": "t", "meta": {"difficulty": t}},
    "pixel_reasoner": lambda t, i: {"qid": f"v-{i}", "question": TEXT, "answer": [t], "image": ["a.png"], "is_video": False},
    "reason_rft": lambda t, i: {"id": i, "image": "a.png", "problem": TEXT, "solution": f"<answer>{t}</answer>", "answer": t},
    "ttrl": lambda t, i: {"prompt": "How many?", "answer": t, "source": "AIME", "id": i},
    "ttrl_parquet": lambda t, i: verl(t, i, "How many?"),
    "deepeyes": lambda t, i: {**verl(t, i, "<image>" + TEXT), "images": ["a.png"], "env_name": "visual_toolbox_v2"},
    "mini_o3": lambda t, i: {
        "images": ["a.png"],
        "doc_id": i,
        "problem": "<image>\n" + TEXT,
        "solution": t,
        "data_source": "visual_probe_train",
    },
    "r1v": lambda t, i: {"image": "a.png", "problem": "How many?", "solution": f"<answer> {t} </answer>"},
    "r1v_evaluation": lambda t, i: {"image_path": "a.png", "question": "How many?", "ground_truth": t},
    "easyr1": lambda t, i: {"problem": "<image>" + TEXT, "answer": t, "images": ["a.png"]},
}


def verl(truth: str, i: int, text: str) -> dict[str, Any]:
    model = {"style": "rule", "ground_truth": truth}
    extra = {"split": "train", "index": i, "answer": truth}
    return {"data_source": "AIME-TTT", "prompt": [{"role": "user", "content": text}], "reward_model": model, "extra_info": extra}


def read(folder: Path, format: str, truths: list[str]) -> tuple[list[str], dict[str, Labels]]:
    """The questions as JSON, and the labels that were cut off."""
    path, labels = folder / "rows.jsonl", dict[str, Labels]()
    path.write_text("".join(json.dumps(ROWS[format](truth, i)) + "\n" for i, truth in enumerate(truths)))
    questions = read_questions(f"{path}?format={format}", seed=3, epochs=1, on_labels=labels.__setitem__)
    return [question.model_dump_json() for question in questions], labels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    return folder


@pytest.mark.parametrize("format", ROWS)
def test_what_a_reader_returns_does_not_depend_on_the_truths(folder: Path, format: str) -> None:
    rng = random.Random(format)
    sets = [[rng.choice(TRUTHS) for _ in range(3)] for _ in range(100)]
    first, _ = read(folder, format, ["7", "A", "cat"])
    assert len(first) == 3
    assert all(json.loads(question)["answers"] is None for question in first)
    assert all(read(folder, format, truths)[0] == first for truths in sets)
    _, labels = read(folder, format, ["7", "A", "cat"])
    assert sorted(label.answers[0] for label in labels.values()) == ["7", "A", "cat"]


def test_rows_of_ttrl_need_no_answer_where_no_reward_uses_one(folder: Path) -> None:
    path = folder / "bare.jsonl"
    path.write_text(json.dumps({"prompt": "How many?", "source": "AIME", "id": 4}) + "\n")
    (question,) = read_questions(str(path), epochs=1, on_labels=lambda *_: pytest.fail("there is no label"))
    assert (question.id, question.answers, question.scorer) == ("AIME-4", None, "math")


def test_an_annotated_set_compares_answers_the_same_whatever_they_are(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "a.png")
    results = []
    for truths in ([3, "red"], ["blue", 4], [7, 8]):
        rows = [
            {"question_index": i, "image_filename": "a.png", "question": "What?", "answer": truth}
            for i, truth in enumerate(truths)
        ]
        (tmp_path / "superCLEVR_questions_30k.json").write_text(json.dumps({"questions": rows}))
        labels: dict[str, Labels] = {}
        source = f"superclevr:{tmp_path}"
        results.append([q.model_dump_json() for q in read_questions(source, epochs=1, on_labels=labels.__setitem__)])
        assert [label.answers for label in labels.values()] == [[str(truth)] for truth in truths]
    assert results[0] == results[1] == results[2]
    assert len(results[0]) == 2


def test_the_card_world_keeps_its_truths_to_itself() -> None:
    labels: dict[str, Labels] = {}
    open_ = list(read_questions("cards:?split=train&seed=1", epochs=1, limit=20))
    blind = list(read_questions("cards:?split=train&seed=1", epochs=1, limit=20, on_labels=labels.__setitem__))
    assert [q.question for q in open_] == [q.question for q in blind]
    assert [labels[q.id].answers for q in open_] == [q.answers for q in open_]
    assert all(q.answers is None and q.annotations is None for q in blind)


# -- from the file to the gradient ----------------------------------------------------------------------------------

TTRL = RewardsConfig(preset="ttrl")
ANSWERS = [["A", "cat", "(B)", "A", "7"], ["7", "7.0", "B", "8", None], ["1/2", "0.5", "3", "3", "A. cat"]]


def rollouts(question: Question, answers: list[str | None]) -> Group:
    episodes = [
        Trajectory(
            id=f"{question.id}-{i}",
            question_id=question.id,
            group_id=question.id,
            turns=[
                Turn(role="user", text="?", tokens=[1]),
                Turn(role="assistant", text=f"<answer>{answer}</answer>", tokens=[2, 3 + i], log_probs=[-0.1, -0.2]),
            ],
            answer=answer,
            stop_reason=StopReason.ANSWER if answer is not None else StopReason.LENGTH,
        )
        for i, answer in enumerate(answers)
    ]
    return Group(id=question.id, question=question, trajectories=episodes)


def learnt(folder: Path, format: str, truths: list[str], services: Services) -> tuple[list[Group], list[str]]:
    """Scored groups with advantages, and update tasks as JSON, from a file of rows."""
    questions = [Question.model_validate_json(text) for text in read(folder, format, truths)[0]]
    groups = [rollouts(q, a) for q, a in zip(questions, ANSWERS, strict=True)]
    scored = [score_group(group, TTRL, services=services) for group in groups]
    assign_advantages(scored, config.RftConfig(algorithm="ttrl").advantage)
    evolution, tasks = config.EvolutionConfig(gate=0.0), []
    for group in groups:
        same = Equality(group.question, group.question.scorer, services)
        task = make_task(
            group, vote(group.trajectories, [], evolution, group.question, 0.0, same), evolution, RewardsConfig(), 0.0
        )
        tasks.append("" if task is None else task.model_copy(update={"id": ""}).model_dump_json())
    return scored, tasks


@pytest.fixture(scope="module")
def services():
    services = Services(TTRL)
    yield services
    services.close()


@pytest.mark.parametrize(
    ("format", "sets"), [("reason_rft", 100), ("pixel_reasoner", 100), pytest.param("ttrl", 15, marks=pytest.mark.slow)]
)
def test_update_tasks_and_advantages_are_bitwise_the_same(folder: Path, services: Services, format: str, sets: int) -> None:
    rng = random.Random(7)
    first = learnt(folder, format, ["7", "A", "42"], services)
    assert any(t.advantage for group in first[0] for t in group.trajectories)
    assert any(first[1])
    expected = [group.model_dump_json() for group in first[0]]
    for _ in range(sets):
        groups, tasks = learnt(folder, format, [rng.choice(TRUTHS) for _ in range(3)], services)
        assert [group.model_dump_json() for group in groups] == expected
        assert tasks == first[1]


@pytest.mark.slow
def test_the_weights_are_bitwise_the_same(folder: Path, services: Services) -> None:
    from tiny_policy import Maker, policy

    from pixelis.policy.train_step import Trainer

    def trained(truths: list[str]) -> dict[str, np.ndarray]:
        maker, samples = Maker(seed=4), []
        for group in learnt(folder, "reason_rft", truths, services)[0]:
            for trajectory in group.trajectories:
                sample = maker.sample(advantage=0.0)
                sample.advantage = trajectory.advantage or 0.0
                samples.append(sample)
        learner = config.LearnerConfig(lr=3e-3, warmup=0.0, row_tokens=512, rows=2)
        trainer = Trainer(policy(), learner, config.RftConfig(algorithm="ttrl").loss, total_steps=1, device="cpu")
        try:
            trainer.update(samples)
            return trainer.adapter().tensors
        finally:
            trainer.close()

    first, *others = [trained(truths) for truths in (["7", "A", "42"], ["A", "B", "A"], ["42", "", "cat"])]
    assert any(np.any(tensor) for name, tensor in first.items() if name.endswith(".B"))
    assert all(np.array_equal(first[name], other[name]) for other in others for name in first)
