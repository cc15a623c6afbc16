"""Demonstrations of operations beyond the default ones: the answer follows from what they show."""

from __future__ import annotations

import re
import sys
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
from pixelis.datasets.synthesis.tasks.relations import _groups
from pixelis.errors import BadConfig, BadInput, DataFailure
from pixelis.operations import find, read_text
from pixelis.records import Annotations, Demonstration, Question

NANO = str(Path(pixelis.nano.__file__).parent / "base")
EXTRA = ["rotate", "flip", "enhance", "measure", "mark", "compare", "search_clip"]
EXTRA += ["python"] * (sys.platform == "linux")
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
    """Playing gives the observations of the demonstrations: every call was executed as it is written."""
    dialogue, learner = DialogueConfig(max_context=50_000, system="none"), LearnerConfig(row_tokens=50_000)
    config = Config(dialogue=dialogue, learner=learner, toolbox=TOOLBOX)
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
            # Of 255: nothing to see without a change
            assert np.ptp(session.media["img0"][y0:y1, x0:x1].astype(int)) <= 13


@pytest.mark.slow
def test_a_view_that_does_not_show_the_text_makes_no_demonstration(shifted):
    turned = shifted["turned"]
    for quarters in (1, 2, 3):
        meta = {**turned.meta, "turned": (turned.meta["turned"] + 90 * quarters) % 360}
        other = turned.model_copy(update={"meta": meta})
        assert failure_of("impaired_text", other, "turned") == "text_differs"
    for shift in ("mirrored", "dark"):
        notes = shifted[shift].annotations
        lines = [line.model_copy(update={"text": line.text[::-1] + "xq"}) for line in notes.lines]
        wrong = shifted[shift].model_copy(update={"annotations": notes.model_copy(update={"lines": lines})})
        assert failure_of("impaired_text", wrong, shift) == "text_differs"
    plain = turned.model_copy(update={"meta": {**turned.meta, "shift": "mirrored"}})
    assert failure_of("impaired_text", plain, "mirrored") == "text_differs"


def test_only_the_operations_of_the_toolbox_are_used(shifted):
    few = Executor(ToolboxConfig(operations=[*ToolboxConfig().operations, "flip"]), multiple=16)
    assert TASKS["impaired_text"].available(few.operations) == ["mirrored"]
    with pytest.raises(DataFailure) as failure:
        TASKS["impaired_text"].make(shifted["turned"], np.random.default_rng(0), few)
    assert failure.value.code == "unsuitable"
    tasks = {"impaired_text": {"source_datasets": ["text"]}}
    settings = SynthesisConfig.model_validate({"datasources": {"text": {"path": SHIFTED}}, "tasks": tasks})
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


# Measuring, marking, comparing, searching


@pytest.fixture(scope="module")
def board(folder) -> Question:
    """A board with several things that can be named."""
    boards = packaged.read("packaged:shapes?count=30", folder)
    return next(q for q in boards if len(q.annotations.regions) == 6)


def first_of(task: str, question: Question, form: str) -> Demonstration:
    """The first demonstration of several draws that the operations do not contradict."""
    for seed in range(20):
        try:
            return make(task, question, form, seed)
        except DataFailure:
            continue
    raise AssertionError(f"no draw gives {form}")


def trap_of(sample: Demonstration) -> Demonstration:
    return make_negative("trap_perceptual", sample, EXECUTOR.open(sample), np.random.default_rng(0))


def last_data(sample: Demonstration) -> dict:
    return sample.steps[-1].observation.data


def middles(sample: Demonstration, count: int) -> list[np.ndarray]:
    """The annotated middles in pixels of the segmented things, in their order."""
    (width, height), result = (sample.media[0].width, sample.media[0].height), []
    for step in [step for step in sample.steps if step.op == "segment_object_at"]:
        x0, y0, x1, y1 = step.observation.data["objects"][0]["box"]
        found = np.array([(x0 + x1) / 2, (y0 + y1) / 2])
        boxes = [np.array(r.box).reshape(2, 2).mean(0) for r in sample.annotations.regions]
        result.append(min(boxes, key=lambda at: float(np.linalg.norm(at - found))) * (width, height))
    assert len(result) == count
    return result


@pytest.mark.slow
def test_distances_and_angles_are_measured_and_agree_with_the_annotations(board):
    distance, angle = (first_of("measurement", board, form) for form in ("distance", "angle"))
    a, b = middles(distance, 2)
    assert float(distance.final) == pytest.approx(np.linalg.norm(a - b), rel=0.05)
    assert float(distance.final) == round(last_data(distance)["length"])
    a, b, c = middles(angle, 3)
    one, other = (np.arctan2(*(end - c)[::-1]) for end in (a, b))
    turn = np.degrees(abs((one - other + np.pi) % (2 * np.pi) - np.pi))
    assert float(angle.final) == pytest.approx(turn, rel=0.05)
    assert angle.final == f"{last_data(angle)['angle']:.1f}"
    play(distance, angle)
    for sample in (distance, angle):
        assert is_right(sample, sample.final)
        assert is_wrong(sample, str(1.3 * float(sample.final)))
        trap = trap_of(sample)
        measured = trap.steps[-1].observation.data
        assert float(trap.final) == pytest.approx(measured.get("length", measured.get("angle")), abs=0.51)


def test_every_thing_of_a_kind_is_marked_and_counted(board):
    sample = first_of("marked_counting", board, "marked")
    play(sample)
    marks = [mark["box"] for mark in last_data(sample)["boxes"]]
    assert len(marks) == int(sample.final) == int(sample.answers[0])
    notes = sample.annotations.regions
    regions = [r for r in notes if any(np.allclose(r.box, mark, atol=0.002) for mark in marks)]
    assert len(regions) == len(marks)
    assert len({r.label for r in regions}) == 1
    trap = trap_of(sample)
    assert int(trap.final) == len(last_data(trap)["boxes"]) != len(marks)


@pytest.mark.slow
def test_pictures_are_compared_and_the_changed_place_is_named(folder):
    pairs = list(packaged.read("packaged:shapes?pairs=yes&count=8", folder))
    answers = {}
    for question in pairs:
        sample = make("picture_comparison", question, "same")
        boxes = last_data(sample)["boxes"]
        assert sample.final == ("no" if boxes else "yes")
        answers[sample.final] = sample
        if not boxes:
            assert failure_of("picture_comparison", question, "difference") == "unsuitable"
            continue
        place = make("picture_comparison", question, "difference")
        notes = question.annotations.regions
        first, second = ([r for r in notes if r.media == name] for name in ("img0", "img1"))
        (changed,) = [a for a, b in zip(first, second, strict=True) if a.attributes != b.attributes]
        x0, y0, x1, y1 = boxes[0]
        assert changed.box[0] - 0.03 <= x0 < x1 <= changed.box[2] + 0.03
        assert changed.box[1] - 0.03 <= y0 < y1 <= changed.box[3] + 0.03
        assert is_right(place, place.final)
    assert set(answers) == {"yes", "no"}
    play(*answers.values())
    trap = trap_of(answers["no"])
    assert trap.final == "yes"
    assert last_data(trap)["boxes"] == []


@pytest.mark.slow
def test_a_search_finds_the_moment(folder):
    cut, motion = packaged.read("packaged:clips?event=cut,motion&count=2", folder)
    found = make("moment_search", cut, "cut")
    assert float(found.final) == pytest.approx(last_data(found)["moments"][0]["time"], abs=0.01)
    assert float(found.final) == pytest.approx(cut.annotations.events[0].start, rel=0.05)
    moving = make("moment_search", motion, "motion")
    chosen = moving.meta["options"]["ABCD".index(moving.final)]
    low, high = (float(v) for v in chosen.removesuffix(" s").split(" to "))
    assert low - 0.05 <= last_data(moving)["moments"][0]["time"] <= high + 0.05
    play(found, moving)
    for question, span, code in ((cut, (2.4, 2.88), "measure_differs"), (motion, (2.5, 2.8), "not_shown")):
        event = question.annotations.events[0].model_copy(update={"start": span[0], "end": span[1]})
        other = question.model_copy(update={"annotations": Annotations(events=[event])})
        assert failure_of("moment_search", other, question.meta["event"]) == code


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
def test_programs_compute_what_the_pixels_hold(board):
    counted, mean = (first_of("pixel_values", board, form) for form in ("colour_pixels", "channel_mean"))
    picture = EXECUTOR.open(counted).media["img0"]
    rgb = [int(v) for v in re.findall(r"\d+", counted.question)]
    assert counted.final == str(int((picture == rgb).all(-1).sum())) == counted.steps[-1].observation.text
    x0, y0, x1, y1 = mean.steps[-1].arguments["box"]
    channel = ["red", "green", "blue"].index(re.search("red|green|blue", mean.question)[0])
    height, width = picture.shape[:2]
    inside = picture[round(y0 * height) : round(y1 * height), round(x0 * width) : round(x1 * width), channel]
    assert float(mean.final) == pytest.approx(inside.mean(), rel=0.03)
    for sample in (counted, mean):
        assert is_right(sample, sample.final)
        assert is_wrong(sample, str(round(1.4 * float(sample.final))))
    trap = trap_of(mean)
    assert trap.final == trap.steps[-1].observation.text
    play(counted, mean)


class Detector:
    """Stands in for a checkpoint: finds given boxes by the words for them."""

    kind, threshold = "owlv2", 0.2

    def __init__(self, boxes: dict[str, list]):
        self.boxes = boxes

    def detect(self, picture, text):
        boxes = np.array(self.boxes[text], float).reshape(-1, 4)
        return boxes, np.linspace(0.9, 0.5, len(boxes))


def test_what_a_detector_finds_is_counted_only_if_it_is_what_is_annotated(board, monkeypatch):
    more = {"operations": [*TOOLBOX.operations, "find"], "detector": "checkpoint"}
    toolbox = TOOLBOX.model_copy(update=more)
    groups = _groups(Sample(board, np.random.default_rng(0), EXECUTOR, "full", "found_counting", "found"))

    def count(change) -> Demonstration:
        found = {name: change([r.box for r in members]) for name, members in groups.items()}
        monkeypatch.setattr(find, "load", lambda folder: Detector(found))
        return TASKS["found_counting"].make(board, np.random.default_rng(1), Executor(toolbox, multiple=16))

    sample = count(lambda boxes: boxes)
    assert int(sample.final) == len(last_data(sample)["objects"]) == int(sample.answers[0])
    for change in (lambda boxes: boxes[1:], lambda boxes: [*boxes, (0.0, 0.0, 0.04, 0.04)]):
        with pytest.raises(DataFailure) as failure:
            count(change)
        assert failure.value.code == "outline_differs"
