"""Labels never leak: with scrambled truths every reward, verdict and weight is bitwise the same."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_rows import demonstration_rows, question_rows
from official_sets import SETS
from PIL import Image

from pixelis import config
from pixelis.config import RewardsConfig
from pixelis.datasets.labels import Labels
from pixelis.datasets.questions import read_questions
from pixelis.evolution.updates import make_task
from pixelis.policy.advantages import assign_advantages
from pixelis.records import Group, Question, StopReason, Trajectory, Turn
from pixelis.rewards.equality import Equality
from pixelis.rewards.grader import Grader
from pixelis.rewards.services import Services
from pixelis.rewards.terms import score_group
from pixelis.rewards.vote import vote

TRUTHS = ["A", "B", "(B)", "42", "7", "cat", r"\boxed{7}", "5 cm", "", "change_size(1, small)"]
QUESTIONS, DEMONSTRATIONS = (list(rows("7", 0)) for rows in (question_rows, demonstration_rows))


def read(folder: Path, format: str, truths: list[str]) -> tuple[list[str], dict[str, Labels]]:
    """The questions as JSON, and the labels that were cut off."""
    rows = question_rows if format in QUESTIONS else demonstration_rows
    path, labels = folder / "rows.jsonl", dict[str, Labels]()
    path.write_text("".join(json.dumps(rows(truth, i)[format]) + "\n" for i, truth in enumerate(truths)))
    questions = read_questions(f"{path}?format={format}", seed=3, epochs=1, on_labels=labels.__setitem__)
    return [question.model_dump_json() for question in questions], labels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    return folder


@pytest.mark.parametrize("format", [*QUESTIONS, *DEMONSTRATIONS])
def test_what_a_reader_returns_does_not_depend_on_the_truths(folder: Path, format: str) -> None:
    """Chats and chains of thought are read as questions, too, whose answer is the last turn's."""
    rng = random.Random(format)
    full = TRUTHS if format in QUESTIONS else [truth for truth in TRUTHS if truth]
    first, labels = read(folder, format, ["7", "A", "cat"])
    assert len(first) == 3
    assert sorted(label.answers[0] for label in labels.values()) == ["7", "A", "cat"]
    assert all(json.loads(question)["answers"] is None for question in first)
    assert all("turns" not in json.loads(question) for question in first)
    for _ in range(100):
        assert read(folder, format, [rng.choice(full) for _ in range(3)])[0] == first


@pytest.mark.parametrize("name", [name for name, official in SETS.items() if official.truths])
def test_an_annotated_set_compares_answers_the_same_whatever_they_are(tmp_path: Path, name: str) -> None:
    results, found = [], []
    for truth in SETS[name].truths:
        labels: dict[str, Labels] = {}
        source = SETS[name].write(tmp_path, truth)
        questions = read_questions(source, epochs=1, max_bad_rows=9, on_labels=labels.__setitem__)
        results.append([question.model_dump_json() for question in questions])
        found.append(next(iter(labels.values())).answers)
    assert results[0] == results[1]
    assert all(json.loads(question)["answers"] is None for question in results[0])
    assert found[0] != found[1]


def test_the_card_world_keeps_its_truths_to_itself() -> None:
    labels: dict[str, Labels] = {}
    open_ = list(read_questions("cards:?split=train&seed=1", epochs=1, limit=20))
    hidden = {"on_labels": labels.__setitem__}
    blind = list(read_questions("cards:?split=train&seed=1", epochs=1, limit=20, **hidden))
    assert [q.question for q in open_] == [q.question for q in blind]
    assert [labels[q.id].answers for q in open_] == [q.answers for q in open_]
    assert all(q.answers is None and q.annotations is None for q in blind)


# -- from the file to the gradient ---------------------------------------------------------------------------

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
                Turn(
                    role="assistant",
                    text=f"<answer>{answer}</answer>",
                    tokens=[2, 3 + i],
                    log_probs=[-0.1, -0.2],
                ),
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
            group,
            vote(group.trajectories, [], evolution, group.question, 0.0, same),
            evolution,
            RewardsConfig(),
            0.0,
        )
        tasks.append("" if task is None else task.model_copy(update={"id": ""}).model_dump_json())
    return scored, tasks


@pytest.fixture(scope="module")
def services():
    services = Services(TTRL)
    yield services
    services.close()


@pytest.mark.parametrize(
    ("format", "sets"),
    [("reason_rft", 100), ("pixel_reasoner", 100), pytest.param("ttrl", 15, marks=pytest.mark.slow)],
)
def test_update_tasks_and_advantages_are_bitwise_the_same(
    folder: Path, services: Services, format: str, sets: int
) -> None:
    rng = random.Random(7)
    first = learnt(folder, format, ["7", "A", "42"], services)
    assert any(t.advantage for group in first[0] for t in group.trajectories)
    assert any(first[1])
    expected = [group.model_dump_json() for group in first[0]]
    for _ in range(sets):
        groups, tasks = learnt(folder, format, [rng.choice(TRUTHS) for _ in range(3)], services)
        assert [group.model_dump_json() for group in groups] == expected
        assert tasks == first[1]


CURRICULA: dict[str, dict[str, Any]] = {
    "none": {},
    "steps without accuracy": {"kind": "steps", "steps": [(0, 0, 0, 0), (1, 0, 0.5, 0.2), (2, 0, 0.1, 0.4)]},
    "steps with accuracy": {"kind": "steps", "steps": [(0, 0, 0, 0), (1, 0.5, 0.5, 0)]},
    "trigger": {
        "kind": "trigger",
        "trigger": [(0, 0, 0), (0, 0.5, 0), (0, 0.5, 0.5)],
        **{"window": 1, "check_every": 1, "min_samples": 1},
    },
}


@pytest.mark.slow  # imports torch
@pytest.mark.parametrize("name", CURRICULA)
def test_a_curriculum_that_is_called_unlabelled_learns_nothing_from_truths(name: str) -> None:
    """Even where truths are at hand, for metrics: rewards, phases and the state after three steps."""
    settings = RewardsConfig(preset="ttrl", curriculum=config.CurriculumConfig(**CURRICULA[name]))

    def scored(truth: str) -> list[Any]:
        grader, rng, result = Grader(settings), np.random.default_rng(5), list[Any]()
        try:
            for step in range(3):
                question = Question(id=f"q{step}", question="How many?", answers=[truth], scorer="math")
                group = rollouts(question, ["7", "7", "7", "7", "8"])
                states = {t.id: rng.normal(size=(t.policy_turns + 1, 4)).tolist() for t in group.trajectories}
                for t in grader.score(group, step, states).trajectories:
                    result.append((t.reward, t.weighted, t.unscored))
                result += [grader.advance(step).boundary, dict(grader.curriculum.mixture)]
            tensors = {} if grader.dynamics is None else grader.dynamics.tensors()
            return [*result, {name: tensor.tolist() for name, tensor in tensors.items()}]
        finally:
            grader.close()

    assert (scored("7") == scored("9")) is not bool(settings.labelled)
    assert bool(settings.labelled) is (name in ("steps with accuracy", "trigger"))


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
        trainer = Trainer(
            policy(), learner, config.RftConfig(algorithm="ttrl").loss, total_steps=1, device="cpu"
        )
        try:
            trainer.update(samples)
            return trainer.adapter().tensors
        finally:
            trainer.close()

    first, *others = [trained(truths) for truths in (["7", "A", "42"], ["A", "B", "A"], ["42", "", "cat"])]
    assert any(np.any(tensor) for name, tensor in first.items() if name.endswith(".B"))
    assert all(np.array_equal(first[name], other[name]) for other in others for name in first)
