"""Golden demonstrations: answers follow from annotations, contradictions are dropped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pixelis.nano
from pixelis.config import Config, DialogueConfig
from pixelis.datasets import packaged
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.synthesis import naming
from pixelis.datasets.synthesis.executor import Executor
from pixelis.datasets.synthesis.sample import Sample
from pixelis.datasets.synthesis.tasks import TASKS, details, text, video
from pixelis.errors import DataFailure
from pixelis.operations import masks
from pixelis.records import Annotations, Demonstration, Event, Line, Question, Region, Relation
from pixelis.rewards import scorers

NANO = str(Path(pixelis.nano.__file__).parent / "base")
SHAPES = ("detail_perception", "attributes", "geometric_comparison", "counting", "relations", "follow_up")
CLIPS = ("frame_selection", "spatio_temporal_tracking")
SOURCES = {"shapes": SHAPES, "text": ("targeted_ocr",), "clips": CLIPS, "coins": ("pointing",)}
COUNTS = {"geometric_comparison": 4, "frame_selection": 2, "spatio_temporal_tracking": 1, "targeted_ocr": 3}
EXECUTOR = Executor(multiple=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("media")


def make(
    name: str, task: str, folder: Path, count: int, style: str = "full", seed: int = 0
) -> list[Demonstration]:
    samples, causes = [], []
    for number, question in enumerate(packaged.read(f"packaged:{name}?count={count}", folder)):
        try:
            samples.append(TASKS[task].make(question, np.random.default_rng([seed, number]), EXECUTOR, style))
        except DataFailure as failure:
            causes.append(failure.code)
    assert set(causes) <= {"unsuitable", *(f"{k}_differs" for k in ("outline", "measure", "text", "track"))}
    return samples


@pytest.fixture(scope="module")
def samples(folder) -> dict[str, list[Demonstration]]:
    return {
        task: make(name, task, folder, COUNTS.get(task, 3))
        for name, tasks in SOURCES.items()
        for task in tasks
    }


@pytest.mark.slow
# Others: test_operation_tasks
@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if not task.operations])
def test_demonstrations_are_complete_and_right(task, samples):
    assert samples[task]
    for sample in samples[task]:
        assert sample.task == task
        assert sample.kind == "golden"
        assert sample.final is not None
        assert sample.provenance.method.startswith(f"{task}/")
        assert sample.id.startswith("cota_")
        assert len(sample.steps) >= 1
        assert all(step.think and step.observation.status == "ok" for step in sample.steps)
        case = scorers.case_of(sample, sample.final, sample.answers)
        assert scorers.find_scorer(sample.scorer)(case, None) == 1.0  # the answer is right by its own scorer
        if sample.scorer == "mc_letter":
            options = sample.meta["options"]
            assert len(options) >= 2
            listed = [f"\n{letter}. {text}" for letter, text in zip("ABCD", options, strict=False)]
            assert all(line in sample.question for line in listed)


def test_answers_of_comparisons_follow_from_the_masks(samples):
    checked = 0
    for sample in samples["geometric_comparison"]:
        form = sample.provenance.method.partition("/")[2]
        names = naming.describe(sample.annotations.regions)
        areas = {names[r.id]: masks.decode(r.mask).area for r in sample.annotations.regions if r.id in names}
        text = sample.question.partition("\n")[0].casefold()
        named = [name for name in areas if name in text]
        pair = [name for name in named if not any(name != other and name in other for other in named)]
        if form in ("larger", "smaller") and len(pair) == 2:
            assert answer_of(sample) == (max if form == "larger" else min)(pair, key=areas.get)
            checked += 1
    assert checked


def answer_of(sample: Demonstration) -> str:
    """The right answer, or the text of the right option."""
    options = sample.meta.get("options")
    return options["ABCD".index(sample.answers[0])] if options else sample.answers[0]


@pytest.mark.parametrize("level", packaged.LEVELS)
def test_terse_digits_fit_the_embedded_model(level, folder):
    player = Player(Config(dialogue=DialogueConfig(max_context=512)), NANO)
    samples = [
        TASKS["detail_perception"].make(question, np.random.default_rng(number), EXECUTOR, "terse")
        for number, question in enumerate(packaged.read(f"packaged:digits?count=8&level={level}", folder))
    ]
    for sample in samples:
        assert sample.level == level
        trajectory, views = player.play(sample)
        assert len(trajectory.token_ids()) < 260
        assert len(views) <= 3
        turns = [turn for turn in trajectory.turns if turn.is_policy]
        assert max(len(turn.tokens) for turn in turns) <= 32
        assert len(turns) == {"simple": 1, "medium": 2, "hard": 3}[level]
        for step in sample.steps:
            assert all(math.isclose(v * 50, round(v * 50), abs_tol=1e-6) for v in step.arguments["box"])
        by_colour = {r.attributes["color"]: r.attributes["digit"] for r in sample.annotations.regions}
        question_of_line = [digit for colour, digit in by_colour.items() if colour in sample.question]
        assert sample.answers == [max(question_of_line)]


# What contradicts the picture, or says nothing


@pytest.fixture(scope="module")
def shapes(folder) -> Question:
    boards = packaged.read("packaged:shapes?count=20", folder)
    return next(question for question in boards if len(question.annotations.regions) >= 4)


def clip_of_one_thing(folder) -> Question:
    clips = packaged.read("packaged:clips?count=9", folder)
    return next(q for q in clips if len({r.track for r in q.annotations.regions}) == 1)


def with_notes(question: Question, **notes) -> Question:
    return question.model_copy(update={"annotations": Annotations(**notes)})


def with_regions(question: Question, change: Callable[[int, Region], dict]) -> Question:
    """The question with changed fields of its regions."""
    regions = enumerate(question.annotations.regions)
    return with_notes(question, regions=[r.model_copy(update=change(n, r)) for n, r in regions])


def causes(task: str, question: Question, tries: int = 12) -> Counter:
    counts: Counter = Counter()
    for seed in range(tries):
        try:
            TASKS[task].make(question, np.random.default_rng(seed), EXECUTOR)
            counts["ok"] += 1
        except DataFailure as failure:
            counts[failure.code] += 1
    return counts


def test_wrong_boxes_are_contradicted(shapes):
    def moved(number: int, region: Region) -> dict:
        a, b, c, d = region.box
        x, y = (0.02 if a > 0.4 else 0.6), (0.02 if b > 0.4 else 0.6)
        return {"box": (x, y, x + c - a, y + d - b), "mask": None}

    assert causes("counting", with_regions(shapes, moved))["ok"] <= 1


def test_wrong_text_is_contradicted(folder):
    question = list(packaged.read("packaged:text?count=2", folder))[1]
    lines = [line.model_copy(update={"text": line.text[::-1] + "xq"}) for line in question.annotations.lines]
    assert causes("targeted_ocr", with_notes(question, lines=lines), 3) == {"text_differs": 3}


def test_a_wrong_colour_is_contradicted(shapes):
    other = {"red": "blue", "brown": "blue", "blue": "yellow"}

    def recoloured(number: int, region: Region) -> dict:
        colour = other.get(region.attributes["color"], "red")
        return {"attributes": {"color": colour}, "label": f"{region.label}{number}"}

    question = with_regions(shapes, recoloured)
    for seed in range(4):
        with pytest.raises(DataFailure) as failure:
            details.colour(sample_of(question, "attributes", "colour", seed))
        assert failure.value.code == "measure_differs"


@pytest.mark.long
def test_a_wrong_track_is_contradicted(folder):
    question = clip_of_one_thing(folder)
    late = question.annotations.regions[0].frame + 4
    away = with_regions(question, lambda n, r: {"box": (0.0, 0.0, 0.07, 0.1)} if r.frame >= late else {})
    assert causes("spatio_temporal_tracking", away, 1)["ok"] == 0


@pytest.mark.parametrize("task", TASKS)
def test_nothing_annotated_is_unsuitable(task, shapes):
    for notes in (None, Annotations()):
        assert causes(task, shapes.model_copy(update={"annotations": notes}), 1) == {"unsuitable": 1}


def test_annotations_of_other_sources_are_enough(shapes, folder):
    """Boxes without masks or attributes, relations, events of free text."""
    boxes = [
        Region(id=r.id, label=f"{r.attributes['color']} thing {n}", box=r.box)
        for n, r in enumerate(shapes.annotations.regions)
    ]
    relations = [Relation(subject=boxes[0].id, predicate="drawn beside", object=boxes[1].id)]
    plain = with_notes(shapes, regions=boxes, relations=relations)
    for task in ("geometric_comparison", "counting", "relations", "attributes"):
        assert causes(task, plain, 5)["ok"] >= 3
    clip = next(packaged.read("packaged:clips?count=1", folder))
    waves, opens = Event(text="somebody waves", start=0.2, end=0.9), Event(text="a door", start=1.5, end=2.4)
    assert causes("frame_selection", with_notes(clip, events=[waves, opens]), 8)["ok"] >= 7
    picture = list(packaged.read("packaged:text?count=2", folder))[1]
    line = next(line for line in picture.annotations.lines if line.level == "line")
    own = {"question": "What does the sign say?", "answers": [line.text], "scorer": "anls"}
    question = with_notes(picture, lines=[line, Line(text="never asked")]).model_copy(update=own)
    made = [TASKS["targeted_ocr"].make(question, np.random.default_rng(s), EXECUTOR) for s in range(8)]
    assert "What does the sign say?" in {sample.question for sample in made}


def test_things_of_partly_annotated_labels_are_described_by_position(shapes):
    partial = with_regions(shapes, lambda n, r: {"label": "a thing", "attributes": {}})
    partial = partial.model_copy(update={"meta": {"not_exhaustive": ["a thing"]}})
    assert causes("counting", partial, 2) == {"unsuitable": 2}
    for seed in range(3):
        sample = TASKS["attributes"].make(partial, np.random.default_rng(seed), EXECUTOR)
        assert "the thing in the " in sample.question


def test_without_an_annotated_colour_that_of_the_pixels_counts(shapes):
    colours_by_id = {r.id: r.attributes["color"] for r in shapes.annotations.regions}
    bare = with_regions(shapes, lambda n, r: {"label": f"shape {r.id}", "attributes": {}})
    for seed in range(4):
        sample = details.detail_colour(sample_of(bare, "detail_perception", "detail_colour", seed))
        named = next(c for name, c in colours_by_id.items() if f"shape {name}" in sample.question)
        # Names of get_properties
        assert answer_of(sample) == {"gray": "grey", "teal": "cyan", "brown": "red"}.get(named, named)


def test_names_pick_out_one_thing():
    """Captions say "a cup" and "the cup"; "the red cup" may be red, or labelled so."""
    boxes = [(0.02, 0.4, 0.12, 0.5), (0.3, 0.42, 0.4, 0.52), (0.8, 0.4, 0.9, 0.5)]

    def named(*labels: str, **colours: str) -> set[str]:
        regions = [
            Region(id=f"r{i}", label=label, box=boxes[i], attributes={"color": colours.get(f"r{i}", False)})
            for i, label in enumerate(labels)
        ]
        return set(naming.describe(regions).values())

    assert named("a cup", "the cup", "dog") == {"the leftmost cup", "the rightmost cup", "the dog"}
    assert named("cup", "red cup", "cup", r0="red", r2="blue") == {"the blue cup"}


def sample_of(question: Question, task: str, form: str = "", seed: int = 0) -> Sample:
    return Sample(question, np.random.default_rng(seed), EXECUTOR, "full", task, form)


def test_unsuitable_text_still_counts_as_text_of_the_picture(folder):
    """A long line at the top is the topmost text, and what shares a ninth of the picture is not alone."""
    question = next(iter(packaged.read("packaged:text?count=1", folder)))
    lines = [
        Line(text="x " * 60, box=(0.1, 0.02, 0.9, 0.06)),
        Line(text="EXIT", box=(0.4, 0.1, 0.6, 0.2)),
        Line(text="Total", box=(0.4, 0.7, 0.6, 0.8)),
    ]
    sample = sample_of(with_notes(question, lines=lines), "targeted_ocr")
    assert [line.text for line, _, _ in text._isolated(sample)] == ["Total"]
    # By its upper edge the tall one is the topmost, by its middle the other: nobody could tell.
    unclear = [Line(text="EXIT", box=(0.4, 0.1, 0.6, 0.9)), Line(text="OPEN", box=(0.4, 0.14, 0.6, 0.2))]
    for shown in (lines, unclear):
        sample = sample_of(with_notes(question, lines=shown), "targeted_ocr")
        sample.pick = lambda options: options[0]  # the topmost
        with pytest.raises(DataFailure) as failure:
            text.extreme(sample)
        assert failure.value.code == "unsuitable"


def test_the_question_about_a_shortened_track_names_its_frames(folder, monkeypatch):
    question = clip_of_one_thing(folder)
    (whole,) = video.tracks_of(sample_of(question, ""))
    assert not whole.shortened
    sample = sample_of(question, "spatio_temporal_tracking", form="ends")
    video._ask(sample, whole, what=whole.what)
    assert "Follow" not in sample.text.partition("?")[2]
    monkeypatch.setattr(video, "MAX_FRAMES", 12)
    (part,) = video.tracks_of(sample_of(question, ""))
    video._ask(sample, part, what=part.what)
    assert part.frames[-1] < whole.frames[-1]
    first, last = part.frames[0], part.frames[-1]
    assert sample.text.endswith(f" Follow {part.what} from frame {first} to frame {last} only.")
