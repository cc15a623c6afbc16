"""Self-corrections: the mistaken call is real, differs from the right one and stays out of the loss."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from clips import encode, footage
from hypothesis import given
from hypothesis import strategies as st

from pixelis.config import Config
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.questions import read_demonstrations
from pixelis.datasets.synthesis.checking import is_right
from pixelis.datasets.synthesis.corrections import MAX_IOU, WAYS, make_correction
from pixelis.datasets.synthesis.executor import Executor, Session
from pixelis.datasets.synthesis.geometry import covered, near_miss, oversized
from pixelis.errors import DataFailure
from pixelis.policy.model_path import resolve
from pixelis.records import Annotations, Demonstration, Media, Question, Region, Step
from pixelis.rewards.scorers import box_iou

EXECUTOR = Executor()
sides = st.floats(0.03, 0.9)
starts = st.floats(0, 1)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[float, float, float, float]:
    width, height = draw(sides), draw(sides)
    x, y = draw(starts) * (1 - width), draw(starts) * (1 - height)
    return x, y, x + width, y + height


@given(boxes(), st.integers(0, 2**32 - 1), st.floats(0.05, 0.6))
def test_a_near_miss_does_not_show_the_middle(
    box: tuple[float, float, float, float], seed: int, most: float
) -> None:
    for make in (near_miss, oversized):
        try:
            result_box = make(box, np.random.default_rng(seed), most)
        except DataFailure as failure:
            assert failure.code == "no_room"  # noqa: PT017
            continue
        assert box_iou(result_box, box) <= most + 1e-9
        assert all(0 <= v <= 1 for v in result_box)
        assert result_box[0] < result_box[2]
        assert result_box[1] < result_box[3]
        x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
        assert (result_box[0] <= x <= result_box[2] and result_box[1] <= y <= result_box[3]) == (
            make is oversized
        )
        if make is oversized:
            assert covered(box, result_box) > 0.99


@pytest.fixture(scope="module")
def session() -> Session:
    """A zoom and text read in one picture, on the way to the right answer."""
    row = read_demonstrations("cards:?split=train", 1, 5, 0.0)[0]
    regions = [
        Region(id="a", label="card", box=(0.28, 0.32, 0.38, 0.42)),
        Region(id="b", label="apple", box=(0.6, 0.6, 0.7, 0.7)),
    ]
    session = EXECUTOR.open(row.model_copy(update={"annotations": Annotations(regions=regions)}))
    session.call("The frame is there.", "zoom_in", box=(0.28, 0.32, 0.38, 0.42))
    session.call("I read it in obs1.", "read_text", box=(0.28, 0.32, 0.38, 0.42))
    session.answer("It says seven.", "7")
    return session


@pytest.fixture(scope="module")
def golden(session: Session) -> Demonstration:
    return session.demonstration()


def said(turns: list[Step]) -> list[tuple]:
    return [(turn.op, turn.arguments, turn.answer) for turn in turns]


def check(correction: Demonstration, golden: Demonstration, way: str) -> None:
    """What every self-correction promises."""
    assert correction.kind == "self_correction"
    assert is_right(correction, correction.final)
    assert correction.final == golden.final
    record = correction.provenance.injected
    assert record["way"] == way
    mistaken = [i for i, turn in enumerate(correction.turns) if not turn.learn]
    assert mistaken == [d["turn"] for d in record["distractors"]]
    right = correction.turns[record["corrected_turn"]]
    for number in mistaken:
        wrong = correction.turns[number]
        assert (wrong.op, wrong.target, wrong.arguments) != (right.op, right.target, right.arguments)
        assert (wrong.observation.status == "error") == (way == "repaired_call")
        if "box" in wrong.arguments and "box" in right.arguments and way != "repaired_call":
            assert box_iou(wrong.arguments["box"], right.arguments["box"]) <= MAX_IOU + 1e-3
    learnt = [turn for turn in correction.turns if turn.learn]
    assert said(learnt) == said(golden.turns)
    before = next(turn.think or "" for turn in golden.turns if turn.op == right.op)
    after = re.sub(r"obs\d", "obs1", str(right.think))
    assert after.endswith(" " + before)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "reselect_frames"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_corrections_of_a_picture(golden: Demonstration, session: Session, way: str, seed: int) -> None:
    correction = make_correction(golden, session, np.random.default_rng(seed), [way])
    check(correction, golden, way)
    assert len([t for t in correction.turns if not t.learn]) == (2 if way == "recrop_twice" else 1)
    if way == "wrong_object":
        assert "apple" in str(correction.turns[correction.provenance.injected["corrected_turn"]].think)  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_the_object_of_a_later_step_is_never_the_wrong_object(session: Session, seed: int) -> None:
    """Two cards are counted and an apple lies farther off: the mistake is never the other card."""
    cards = [(0.28, 0.32, 0.38, 0.42), (0.45, 0.32, 0.55, 0.42)]
    regions = [Region(id=f"c{i}", label="card", box=box) for i, box in enumerate(cards)]
    regions.append(Region(id="b", label="apple", box=(0.8, 0.8, 0.9, 0.9)))
    update = {"annotations": Annotations(regions=regions), "answers": ["2"]}
    counting = EXECUTOR.open(session.question.model_copy(update=update))
    for box in cards:
        counting.call("One more.", "segment_object_at", box=box)
    counting.answer("Two.", "2")
    rng = np.random.default_rng(seed)
    correction = make_correction(counting.demonstration(), counting, rng, ["wrong_object"])
    (mistake,) = [turn for turn in correction.turns if not turn.learn]
    assert all(box_iou(mistake.arguments["box"], box) == 0 for box in cards)
    assert correction.provenance.injected["distractors"][0]["wrong"] == "it is another object, apple"


def test_a_correction_may_select_other_frames_first(tmp_path: Path) -> None:
    path = tmp_path / "bikes.mp4"
    path.write_bytes(encode(footage(count=30)))
    media = [Media(id="vid0", uri=str(path), kind="video")]
    question = Question(id="v", question="?", media=media, answers=["yes"])
    session = EXECUTOR.open(question)
    session.call("Early.", "select_frames", frames=[0, 1])
    session.answer("Yes.", "yes")
    golden = session.demonstration()
    correction = make_correction(golden, session, np.random.default_rng(0), ["reselect_frames"])
    check(correction, golden, "reselect_frames")


def test_the_seed_decides_which_way_is_chosen(golden: Demonstration, session: Session) -> None:
    correction = [make_correction(golden, session, np.random.default_rng(seed)) for seed in (*range(12), 0)]
    assert len({m.provenance.injected["way"] for m in correction if m.provenance}) >= 4
    assert correction[0].model_dump_json() == correction[-1].model_dump_json()


def test_a_player_plays_corrections_with_the_mistake_out_of_the_loss(
    golden: Demonstration, session: Session
) -> None:
    config = Config.model_validate({"dialogue": {"max_context": 2048}, "learner": {"row_tokens": 2048}})
    player = Player(config, str(resolve("nano")))
    for way in WAYS:
        if way == "reselect_frames":
            continue
        correction = make_correction(golden, session, np.random.default_rng(1), [way])
        trajectory, _ = player.play(correction)
        policy = [turn for turn in trajectory.turns if turn.is_policy]
        assert [turn.learn for turn in policy] == [turn.learn for turn in correction.turns]
        statuses = [turn.observation.status for turn in correction.turns if turn.observation]
        assert [o.status for o in trajectory.observations] == statuses


def test_a_demonstration_without_calls_has_no_correction(golden: Demonstration) -> None:
    direct = golden.model_copy(update={"turns": golden.turns[-1:]})
    with pytest.raises(DataFailure) as error:
        make_correction(direct, EXECUTOR.open(direct), np.random.default_rng(0))
    assert error.value.code == "no_distractor"
