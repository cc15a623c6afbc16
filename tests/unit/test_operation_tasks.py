"""Demonstrations of operations beyond the default ones: the answer follows from what they show, and nothing else is accepted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pixelis.nano
from pixelis.config import Config, DialogueConfig, LearnerConfig, ToolboxConfig
from pixelis.config.synthesis import SynthesisConfig
from pixelis.datasets import packaged
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.synthesis.checking import is_right, is_wrong
from pixelis.datasets.synthesis.executor import Executor
from pixelis.datasets.synthesis.negatives import make_negative
from pixelis.datasets.synthesis.sample import Sample
from pixelis.datasets.synthesis.sample_builder import SampleBuilder
from pixelis.datasets.synthesis.tasks import TASKS
from pixelis.errors import BadConfig, BadInput, DataFailure
from pixelis.operations import read_text
from pixelis.records import Demonstration, Question

NANO = str(Path(pixelis.nano.__file__).parent / "base")
EXTRA = ["rotate", "flip", "enhance"]
TOOLBOX = ToolboxConfig(operations=[*ToolboxConfig().operations, *EXTRA])
EXECUTOR = Executor(TOOLBOX, multiple=16)
SHIFTED = "packaged:text?shift=turned,mirrored,dark&count=6&seed=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("media")


def make(task: str, question: Question, form: str, seed: int = 0) -> Demonstration:
    sample = Sample(question, np.random.default_rng(seed), EXECUTOR, "full", task, form)
    return TASKS[task].forms[form](sample)


def failure_of(task: str, question: Question, form: str) -> str:
    with pytest.raises(DataFailure) as failure:
        make(task, question, form)
    return failure.value.code


def play(*samples: Demonstration) -> None:
    """Playing gives the observations of the demonstrations, so that every call was executed as it is written."""
    config = Config(
        dialogue=DialogueConfig(max_context=50_000, system="none"), learner=LearnerConfig(row_tokens=50_000), toolbox=TOOLBOX
    )
    player = Player(config, NANO)
    for sample in samples:
        trajectory, _ = player.play(sample)
        assert [o.text for o in trajectory.observations] == [step.observation.text for step in sample.steps]
        assert trajectory.answer == sample.final


@pytest.fixture(scope="module")
def shifted(folder) -> dict[str, Question]:
    """A picture of each shift."""
    return {question.meta["shift"]: question for question in packaged.read(SHIFTED, folder)}


def reading(pixels: np.ndarray) -> str:
    lines, _ = read_text.read(np.ascontiguousarray(pixels), (0, 0, pixels.shape[1], pixels.shape[0]))
    return " ".join(line.text for line in lines)


@pytest.mark.slow
def test_impaired_text_is_read_in_the_changed_view(shifted):
    samples = {shift: make("impaired_text", shifted[shift], shift) for shift in packaged.SHIFTS}
    play(*samples.values())
    for shift, sample in samples.items():
        assert is_right(sample, sample.final)
        session = EXECUTOR.open(sample)
        session.replay(sample.turns)
        changed = session.views[-1]
        assert sample.steps[-1].op == {"turned": "rotate", "mirrored": "flip", "dark": "enhance"}[shift]
        assert reading(changed) == sample.final
        if shift == "mirrored":
            assert reading(changed[:, ::-1]) != sample.final
        if shift == "dark":
            box = sample.steps[-1].arguments.get("box") or sample.steps[0].arguments["box"]
            height, width = session.media["img0"].shape[:2]
            x0, y0, x1, y1 = (round(v * side) for v, side in zip(box, (width, height) * 2, strict=True))
            assert np.ptp(session.media["img0"][y0:y1, x0:x1].astype(int)) <= 13  # of 255: nothing to see without a change


def test_a_view_that_does_not_show_the_text_makes_no_demonstration(shifted):
    turned = shifted["turned"]
    for quarters in (1, 2, 3):
        other = turned.model_copy(update={"meta": {**turned.meta, "turned": (turned.meta["turned"] + 90 * quarters) % 360}})
        assert failure_of("impaired_text", other, "turned") == "text_differs"
    for shift in ("mirrored", "dark"):
        notes = shifted[shift].annotations
        lines = [line.model_copy(update={"text": line.text[::-1] + "xq"}) for line in notes.lines]
        wrong = shifted[shift].model_copy(update={"annotations": notes.model_copy(update={"lines": lines})})
        assert failure_of("impaired_text", wrong, shift) == "text_differs"
    plain = turned.model_copy(update={"meta": {**turned.meta, "shift": "mirrored"}})
    assert failure_of("impaired_text", plain, "mirrored") == "text_differs"


def test_a_look_at_another_text_gives_a_wrong_answer(shifted):
    sample = make("impaired_text", shifted["mirrored"], "mirrored")
    trap = make_negative("trap_perceptual", sample, EXECUTOR.open(sample), np.random.default_rng(0))
    assert is_wrong(sample, trap.final)
    assert trap.final in [line.text for line in sample.annotations.lines]


def test_only_the_operations_of_the_toolbox_are_used(shifted):
    few = Executor(ToolboxConfig(operations=[*ToolboxConfig().operations, "flip"]), multiple=16)
    assert TASKS["impaired_text"].available(few.operations) == ["mirrored"]
    with pytest.raises(DataFailure) as failure:
        TASKS["impaired_text"].make(shifted["turned"], np.random.default_rng(0), few)
    assert failure.value.code == "unsuitable"
    settings = SynthesisConfig.model_validate(
        {"datasources": {"text": {"path": SHIFTED}}, "tasks": {"impaired_text": {"source_datasets": ["text"]}}}
    )
    with pytest.raises(BadConfig, match=r"impaired_text needs one of the operations rotate, flip, enhance"):
        SampleBuilder(settings, 1)
    SampleBuilder(settings, 1, TOOLBOX).close()


def test_annotations_of_shifted_pictures_move_with_them(folder):
    plain = list(packaged.read("packaged:text?split=validation&count=3&seed=2", folder))
    for index, shift in enumerate(packaged.SHIFTS):
        path = f"packaged:text?split=validation&count={index + 1}&seed=2&shift={shift}"
        question = list(packaged.read(path, folder))[index]
        before, after = plain[index].annotations.lines[0], question.annotations.lines[0]
        assert after.text == before.text
        assert question.media[0].uri != plain[index].media[0].uri
        x0, y0, x1, y1 = before.box
        if shift == "mirrored":
            assert after.box == pytest.approx((1 - x1, y0, 1 - x0, y1))
        elif question.meta.get("turned") == 90:  # the left edge becomes the top edge
            assert after.box == pytest.approx((1 - y1, x0, 1 - y0, x1))
    with pytest.raises(BadInput, match="unknown shift"):
        list(packaged.read("packaged:text?shift=blurred", folder))
