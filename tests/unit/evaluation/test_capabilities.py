"""Scores of a policy's calls against the calls that its questions need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pixelis.errors import BadInput
from pixelis.evaluation.capabilities import capabilities
from pixelis.evaluation.tracking import TrackingScores
from pixelis.operations.masks import Mask
from pixelis.records import Action, Group, ImageView, Observation, Question, StopReason, Trajectory, Turn
from pixelis.rewards.scorers import box_iou

BOX = (0.4, 0.4, 0.6, 0.6)
TRACK = {0: (0.0, 0.0, 0.2, 0.2), 1: (0.1, 0.0, 0.3, 0.2), 2: (0.2, 0.0, 0.4, 0.2)}


def square(left: int, top: int, side: int) -> dict:
    return Mask.of(np.ones((side, side), bool), left, top, 100, 100).encode()


def episode(
    *calls: tuple[str, dict, dict, list[ImageView]],
    expected: Sequence[dict] = (),
    question: Question | None = None,
    answer: str | None = "1",
    accuracy: float = 1.0,
    ok: bool = True,
) -> Group:
    """One episode with these calls, each an operation, its arguments, its data and its views."""
    question = question or Question(id="q7", question="?", answers=["1"], meta={"expected_calls": expected})
    images, turns = [ImageView(id="img0")], list[Turn]()
    for op, arguments, data, views in calls:
        images += views
        observation = Observation(status="ok" if ok else "error", data=data, images=views)
        turns.append(Turn(role="assistant", action=Action(op=op, arguments=arguments)))
        turns.append(Turn(role="tool", observation=observation))
    ids = {"question_id": question.id, "group_id": question.id}
    stop = StopReason.LENGTH if answer is None else StopReason.ANSWER
    made = {"images": images, "turns": turns, "answer": answer, "stop_reason": stop}
    trajectory = Trajectory(**ids, **made, rewards={"accuracy": accuracy})
    return Group(id=question.id, question=question, trajectories=[trajectory])


def zoom(*box: float, parent: str = "img0", name: str = "obs1", frame: int | None = None) -> tuple:
    return "zoom_in", {}, {}, [ImageView(id=name, parent=parent, box=box, frame=frame)]


def segment(mask: dict, root: str = "img0") -> tuple:
    record = {"id": "a", "root": root, "frame": None, "box": BOX, "mask": mask}
    return "segment_object_at", {}, {"objects": [record]}, []


def read(*lines: str) -> tuple:
    return "read_text", {}, {"lines": [{"text": line} for line in lines]}, []


def track(boxes: dict) -> tuple:
    entry = {"id": "t", "root": "vid0", "frames": list(boxes), "boxes": list(boxes.values())}
    return "track_object", {}, {"tracks": [entry]}, []


def scores(op: str, *calls: tuple, **truth: object) -> dict:
    return capabilities([episode(*calls, expected=[{"op": op, **truth}])])["operations"][op]


def score(op: str, *calls: tuple, **truth: object) -> float:
    return scores(op, *calls, **truth)["mean"]


@pytest.mark.parametrize(
    ("box", "shown"),
    [
        ((0.3, 0.3, 0.7, 0.7), 1.0),
        ((0.45, 0.3, 0.7, 0.7), 0.0),
        ((0.0, 0.0, 1.0, 1.0), 0.0),
        ((0.7, 0.7, 0.9, 0.9), 0.0),
    ],
    ids=["around it", "cut off", "far too wide", "elsewhere"],
)
def test_a_zoom_shows_a_thing_whole_and_large(box, shown):
    assert score("zoom_in", zoom(*box), box=BOX) == shown


def test_a_zoom_into_a_zoom_and_into_a_frame_is_traced_to_the_picture():
    wide, near = zoom(0.2, 0.2, 0.8, 0.8), zoom(0.3, 0.3, 0.7, 0.7, parent="obs1", name="obs2")
    assert score("zoom_in", wide, near, box=BOX) == 1.0
    frame = "select_frames", {}, {}, [ImageView(id="obs1", parent="vid0", frame=3)]
    inside = zoom(0.35, 0.35, 0.65, 0.65, parent="obs1", name="obs2")
    assert score("zoom_in", frame, inside, box=BOX, media="vid0", frame=3) == 1.0
    assert score("zoom_in", frame, inside, box=BOX, media="vid0", frame=2) == 0.0


def test_the_best_outline_counts_if_it_is_in_the_right_picture():
    truth = {"box": BOX, "mask": square(40, 40, 20)}
    assert score("segment_object_at", segment(square(0, 0, 9)), segment(square(40, 40, 20)), **truth) == 1.0
    assert score("segment_object_at", segment(square(40, 50, 20)), **truth) == pytest.approx(200 / 600)
    assert score("segment_object_at", segment(square(40, 40, 20), root="img1"), **truth) == 0.0


def test_a_boundary_agrees_up_to_a_share_of_the_diagonal():
    truth = {"box": BOX, "mask": square(40, 40, 20)}
    beside, off = (
        scores("segment_object_at", segment(square(40, 40 + shift, 20)), **truth)["boundary_f1"]
        for shift in (1, 5)
    )
    assert beside == 1.0
    assert 0.2 < off < 0.7
    assert scores("segment_object_at", **truth)["boundary_f1"] == 0.0
    assert "boundary_f1" not in scores("segment_object_at", segment(square(40, 40, 20)), box=BOX)


def test_properties_count_for_the_right_object_only():
    truth, measure = {"box": BOX, "mask": square(40, 40, 20)}, ("get_properties", {"object": "a"}, {}, [])
    assert score("get_properties", segment(square(42, 42, 20)), measure, **truth) == 1.0
    assert score("get_properties", segment(square(0, 0, 20)), measure, **truth) == 0.0
    assert score("get_properties", measure, **truth) == 0.0


def test_the_best_line_that_was_read_counts():
    assert score("read_text", read("Museum", "Harbour"), text="Harbour") == 1.0
    assert score("read_text", read("Harbour", "Museum"), text="Harbour Museum") == 1.0
    assert score("read_text", read("Harb0ur"), text="Harbour") == pytest.approx(6 / 7)
    part = scores("read_text", read("x"), text="y")
    assert (part["mean"], part["cer"], part["wer"]) == (0.0, 1.0, 1.0)
    assert scores("read_text", read("Main Str", "x"), text="Main St")["wer"] == 0.5


def test_selected_frames_and_tracks():
    views = [ImageView(id=f"obs1.{n}", parent="vid0", frame=n) for n in (1, 2, 7, 8)]
    chosen = score("select_frames", ("select_frames", {}, {}, views), media="vid0", frames=[1, 2])
    assert chosen == pytest.approx(2 / 3)
    part = scores("track_object", track({0: TRACK[0], 1: TRACK[1]}), media="vid0", track=TRACK)
    assert (part["mean"], part["mota"]) == pytest.approx((2 / 3, 2 / 3))
    assert part["idf1"] == pytest.approx(4 / 5)
    none = scores("track_object", media="vid0", track=TRACK)
    assert (none["mean"], none["hota"], none["idf1"], none["mota"]) == (0, 0, 0, 0)


def test_order_and_unnecessary_calls():
    expected = [{"op": "select_frames"}, {"op": "zoom_in"}]
    frames = ("select_frames", {}, {}, [])

    def choice(*calls: tuple, ok: bool = True) -> tuple:
        result = capabilities([episode(*calls, expected=expected, ok=ok)])
        return result["order"]["mean"], result["unnecessary"], result["calls"]

    look = ("zoom_in", {}, {}, [])
    assert choice(frames, look) == (1, 0, 2)
    assert choice(look, frames) == (0, 1, 2)
    assert choice(frames, read("x"), look) == (1, 1, 3)
    assert choice() == (0, 0, 0)
    assert choice(frames, look, ok=False) == (0, 2, 2)


def test_an_expected_call_that_its_answer_does_not_depend_on_is_unnecessary():
    group = episode(zoom(*BOX), read("4"), expected=[{"op": "zoom_in"}, {"op": "read_text"}])
    for observation, real in zip(group.trajectories[0].observations, (-2.0, -0.1), strict=True):
        observation.answer_log_probs = {"real": real, "blank": -2.1, "elsewhere": -2.3}
    bars = [
        {},
        {"read_text": 0.5},
        {"read_text": 9.0},
        {"zoom_in": 9.0},
    ]  # what the zoom shows is read by the next call
    assert [capabilities([group], bar)["unnecessary"] for bar in bars] == [0, 0, 1, 0]


def test_questions_without_expected_calls_have_no_scores_and_wrong_ones_name_the_question():
    assert capabilities([episode(zoom(*BOX), expected=[])]) == {}
    with pytest.raises(BadInput, match=r"q7: meta\.expected_calls: 0\.box"):
        capabilities([episode(expected=[{"op": "zoom_in", "box": [1, 2]}])])


def strip(left: float) -> tuple[float, float, float, float]:
    """Boxes of width 1 at ``left``: their overlap is that of two intervals."""
    return (left, 0.0, left + 1, 1.0)


def test_a_pair_of_the_frame_before_stays_though_new_pairs_are_better():
    a, b, one, two = strip(0), strip(0.315), strip(0.29), strip(-0.025)
    expected = [0.55, 0.95, 0.95, 0.49]
    assert [round(box_iou(*pair), 2) for pair in ((a, one), (a, two), (b, one), (b, two))] == expected
    scores = TrackingScores()
    scores.add([{0: a, 1: a}, {1: b}], [{0: a, 1: one}, {1: two}])
    assert scores.mota == pytest.approx(1 - 2 / 3)  # a miss and a false box, no switch


def test_a_perfect_track_scores_1_and_a_switch_of_identities_costs():
    other = {n: (x0, y0 + 0.5, x1, y1 + 0.5) for n, (x0, y0, x1, y1) in TRACK.items()}
    scores, switched = TrackingScores(), TrackingScores()
    scores.add([TRACK, other], [other, TRACK])
    assert (scores.hota, scores.idf1, scores.mota) == pytest.approx((1, 1, 1))
    swap = [{0: TRACK[0], 1: other[1], 2: other[2]}, {0: other[0], 1: TRACK[1], 2: TRACK[2]}]
    switched.add([TRACK, other], swap)
    assert switched.mota == pytest.approx(1 - 2 / 6)
    assert (switched.switches, switched.motp) == (2, 1)
    assert switched.idf1 == pytest.approx(4 / 6)
    assert switched.hota < 0.8
