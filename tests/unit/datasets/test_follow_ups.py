"""Follow-up questions: the earlier exchange is executed and right, and survives playing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pixelis.nano
from pixelis.config import Config, DialogueConfig, LearnerConfig
from pixelis.datasets import packaged
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.synthesis import geometry
from pixelis.datasets.synthesis.checking import is_right, is_wrong
from pixelis.datasets.synthesis.executor import Executor
from pixelis.datasets.synthesis.negatives import make_negative
from pixelis.datasets.synthesis.phrases import questions
from pixelis.datasets.synthesis.sample import Sample
from pixelis.datasets.synthesis.tasks import TASKS
from pixelis.errors import DataFailure
from pixelis.nano.tokenizer import build_tokenizer
from pixelis.records import Demonstration, Question

NANO = str(Path(pixelis.nano.__file__).parent / "base")
EXECUTOR = Executor(multiple=16)
FOLLOW_UP = TASKS["follow_up"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("media")


def make(source: str, folder: Path, style: str = "full") -> list[Demonstration]:
    result, causes = [], set()
    for number, question in enumerate(packaged.read(f"packaged:{source}", folder)):
        try:
            result.append(FOLLOW_UP.make(question, np.random.default_rng([5, number]), EXECUTOR, style))
        except DataFailure as failure:
            causes.add(failure.code)
    assert causes <= {"unsuitable", "measure_differs", "outline_differs", "text_differs"}
    return result


@pytest.fixture(scope="module")
def samples(folder) -> list[Demonstration]:
    return [
        *make("shapes?count=4", folder),
        *make("text?count=3", folder),
        *make("digits?count=6&level=medium", folder),
    ]


@pytest.mark.slow
def test_the_earlier_exchange_and_the_answer_are_right(samples):
    forms = {sample.provenance.method.partition("/")[2] for sample in samples}
    assert forms >= {"another_digit", "text_beside", "thing_beside"}
    for sample in samples:
        assert sample.task == "follow_up"
        (earlier,) = sample.history
        assert earlier.media == ["img0"]
        assert earlier.question != sample.question
        assert is_right(sample, sample.final)
        notes = sample.annotations
        values = [region.label for region in notes.regions] + [line.text for line in notes.lines]
        values += [str(v) for region in notes.regions for v in region.attributes.values()]
        assert earlier.answer in values or earlier.answer.isdigit()
        assert sample.steps
        assert all(step.observation.status == "ok" for step in sample.steps)


@pytest.mark.slow
def test_playing_a_conversation_shows_its_history_and_the_same_observations(samples):
    dialogue = DialogueConfig(max_context=50_000, system="none")
    config = Config(dialogue=dialogue, learner=LearnerConfig(row_tokens=50_000))
    player = Player(config, NANO)
    for sample in samples[:3]:
        trajectory, _ = player.play(sample)
        first, second = [turn.text for turn in trajectory.turns if turn.role == "user"]
        assert sample.history[0].question in first
        assert sample.history[0].answer in first
        assert sample.question in second
        assert [o.text for o in trajectory.observations] == [step.observation.text for step in sample.steps]
        assert trajectory.answer == sample.final


@pytest.mark.slow
def test_mistakes_keep_the_conversation(samples):
    sample = next(sample for sample in samples if sample.provenance.method.endswith("another_digit"))
    for kind in ("outcome_negative", "trap_logical", "trap_perceptual"):
        wrong = make_negative(kind, sample, EXECUTOR.open(sample), np.random.default_rng(1))
        assert wrong.history == sample.history
        assert is_wrong(sample, wrong.final)


def sample_of(question: Question, seed: int) -> Sample:
    return Sample(question, np.random.default_rng(seed), EXECUTOR, "full", "follow_up", "colour_beside")


def test_terse_follow_ups_are_in_the_words_of_the_embedded_model(folder):
    tokenizer = build_tokenizer()
    texts = [text.format(colour="red") for text in questions()["follow_up"]["another_digit"].questions]
    for sample in make("digits?count=8&level=medium", folder, "terse"):
        if sample.provenance.method.endswith("another_digit"):
            texts += [sample.question, *(str(turn.think) for turn in sample.steps)]
    assert len(texts) > len(questions()["follow_up"]["another_digit"].questions)
    for text in texts:
        pieces = [tokenizer.decode([i]) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
        letters = {piece.strip() for piece in pieces if len(piece.strip()) == 1 and piece.strip().isalpha()}
        assert letters <= {"a", "I"}


boxes = st.tuples(*[st.integers(0, 80)] * 2, *[st.integers(5, 20)] * 2).map(
    lambda v: (v[0] / 100, v[1] / 100, (v[0] + v[2]) / 100, (v[1] + v[3]) / 100)
)


@given(boxes, st.lists(boxes, max_size=6))
def test_neighbours_are_unambiguous_and_change_sides_in_a_mirror(box, others):
    found = geometry.neighbours(box, others, 640, 480)
    for side, index in found.items():
        edges = {"left": others[index][2] <= box[0], "right": others[index][0] >= box[2]}
        edges |= {"up": others[index][3] <= box[1], "down": others[index][1] >= box[3]}
        assert edges[side]
    mirrored = [(1 - x1, y0, 1 - x0, y1) for x0, y0, x1, y1 in (box, *others)]
    opposite = {"left": "right", "right": "left", "up": "up", "down": "down"}
    # Rounding may decide a tie or a touching edge otherwise.
    near = [abs(a - b) < 1e-9 for o in others for a in (o[0], o[2]) for b in (box[0], box[2])]
    if not any(near):
        again = geometry.neighbours(mirrored[0], mirrored[1:], 640, 480)
        mirrored_back = {opposite[side]: others[index] for side, index in again.items()}
        assert mirrored_back == {side: others[index] for side, index in found.items()}


def test_of_two_things_at_one_side_neither_is_next_unless_it_is_clearly_nearer():
    middle, right, farther = (0.4, 0.4, 0.5, 0.5), (0.6, 0.4, 0.7, 0.5), (0.9, 0.4, 1.0, 0.5)
    diagonal = (0.6, 0.5, 0.7, 0.6)
    assert geometry.neighbours(middle, [farther, right], 100, 100) == {"right": 1}
    assert geometry.neighbours(middle, [right, diagonal], 100, 100) == {}
    assert geometry.neighbours(middle, [], 100, 100) == {}


def test_no_follow_up_where_things_may_be_missing_from_the_annotations(folder):
    boards = packaged.read("packaged:shapes?count=30", folder)
    question = next(board for board in boards if len(board.annotations.regions) == 9)
    partial = question.model_copy(update={"meta": {"dropped": 3}})
    with pytest.raises(DataFailure) as failure:
        TASKS["follow_up"].forms["colour_beside"](sample_of(partial, 0))
    assert failure.value.code == "unsuitable"
