"""Scorers against their contracts: what is right, partly right, wrong, and what cannot be scored."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelis.errors import DataFailure
from pixelis.records import Question
from pixelis.rewards import scorers
from pixelis.rewards.scorers import (
    SCORERS,
    Case,
    anls,
    box_iou,
    case_of,
    cer,
    exact,
    find_scorer,
    func_seq,
    letter,
    numeric_band,
    read_box,
)

ABC = ("a red car", "a dog", "Cat")


class RecordingServices:
    """Services that only count; the slow scorers have tests of their own."""

    def __init__(self, verdict: float = 0.0):
        self.statuses: list[str] = []
        self.calls: list[str] = []
        self.verdict = verdict

    def note(self, status: str) -> None:
        self.statuses.append(status)

    def math(self, answer, truths):
        self.calls.append("math")
        if self.verdict < 0:
            raise DataFailure("slow", code="timeout")
        return self.verdict

    def judge(self, question, truths, answer):
        self.calls.append("judge")
        return max(self.verdict, 0.0)


@pytest.mark.parametrize(
    ("answer", "truths", "score"),
    [
        (" Seven\n Dwarfs ", ["seven dwarfs"], 1.0),
        ("STRASSE", ["Straße"], 1.0),
        ("cafe\u0301", ["café"], 1.0),
        ("1", ["7", "1"], 1.0),
        ("17", ["7"], 0.0),
        ("", ["7"], 0.0),
        (None, ["None"], 0.0),
    ],
)
def test_exact(answer, truths, score):
    assert exact(answer, truths) == score


@pytest.mark.parametrize(
    ("text", "options", "choice"),
    [
        (" b ", (), "B"),
        ("(c)", (), "C"),
        ("B: because", (), "B"),
        ("(B) a dog", (), "B"),
        ("  CAT ", ABC, "C"),
        ("<answer>A</answer> no, <answer>C</answer>", (), "C"),
        (r"\boxed{\text{x}} then \boxed{(D)}", (), "D"),
        ("I compared (A) with (B)", (), "B"),
        ("the answer is D", (), "D"),
        ("E", ABC, None),
        ("the answer is D", ABC, None),
        ("A cat", (), None),
        ("", (), None),
        ("42", (), None),
    ],
)
def test_letter(text, options, choice):
    assert letter(text, options) == choice


def test_mc_letter():
    services, scorer = RecordingServices(), SCORERS["mc_letter"]
    assert scorer(Case("(B)", ("a dog",), options=ABC), services) == 1.0
    assert scorer(Case("A", ("B",)), services) == scorer(Case(None, ("B",)), services) == 0.0
    assert services.statuses == []
    assert scorer(Case("no idea at all", ("B",)), services) == 0.0
    assert services.statuses == ["parse_fail"]
    with pytest.raises(DataFailure) as caught:
        scorer(Case("B", ("a zebra",), options=ABC), services)
    assert caught.value.code == "truth_unparsable"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("Which?\nA. a dog\n(B) a cat\nC) a red car  ", ("a dog", "a cat", "a red car")),
        ("How many?", ()),
        ("Which animal?\nA. dog B. cat C. bird", ()),
        ("Which picture?\nA.\nB.\nC.\nD.", ()),
        ("E. coli is shown.\r\nWhich part?\r\nA. wall\r\nB. flagellum", ("wall", "flagellum")),
        ("J. Smith drew this map.\nWhich is right?", ()),
        ("A: Look at this.\nB: Yes.\nWhat comes next?\nA. x\nB. y\nC. z", ("x", "y", "z")),
        ("Which?\n" + "\n".join(f"{chr(65 + i)}. {i}" for i in range(10)), tuple("0123456789")),
    ],
)
def test_options_are_the_lines_a_b_and_so_on_in_order(text, options):
    case = case_of(Question(id="q", question=text), "C", ["C"])
    assert case.options == options
    assert options or SCORERS["mc_letter"](case, RecordingServices()) == 1.0
    named = Question(id="q", question=text, meta={"options": {"A": "one", "B": "two"}})
    assert case_of(named, "x", ["y"]).options == ("one", "two")


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("105", "100", 1.0),
        ("112.5", "100", 0.5),
        ("87.5", "100", 0.5),
        ("110", "100", 0.5 * (math.cos(math.pi / 3) + 1)),
        ("120", "100", 0.0),
        ("-100", "100", 0.0),
        ("0.05", "0", 1.0),
        ("0.125", "0", 0.5),
        ("0.3", "0", 0.0),
        ("1,000", "1000", 1.0),
        ("$12.50", "12.5", 1.0),
        ("50%", "50 %", 1.0),
        ("blue", "Blue", 1.0),
        ("blue", "12", 0.0),
        ("nan", "12", 0.0),
        ("12 apples", "12", 0.0),
        (None, "12", 0.0),
    ],
)
def test_numeric_band(answer, truth, score):
    assert numeric_band(answer, [truth]) == pytest.approx(score)
    assert numeric_band(answer, ["1e9", truth]) == pytest.approx(score)


def test_count():
    services, scorer = RecordingServices(), SCORERS["count"]
    expected = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert [scorer(Case(a, ("7",)), services) for a in ("7", "7.0", "+7", "8", "7.2", None)] == expected
    assert services.statuses == []
    assert scorer(Case("seven", ("7",)), services) == 1.0
    assert scorer(Case("many", ("7",)), services) == 0.0
    assert services.statuses == ["parse_fail"]
    with pytest.raises(DataFailure):
        scorer(Case("7", ("many",)), services)


TRUTH = "change_size(1, small) change_color(2, 'red')"


@pytest.mark.parametrize(
    ("answer", "score", "seen"),
    [
        (TRUTH, 1.0, 1.0),
        ("change_color(2, red); change_size(1,small)", 1.0, 1.0),
        ("change_size(1, small)", 0.5, 0.5),
        ("change_size(1, large) change_color(2, red)", 0.75, 0.75),
        ("change_size(3, small) change_color(2, red)", 0.75, 0.75),
        ("change_size(3, large) change_color(2, red)", 0.625, 0.625),
        ("change_shape(1, small)", 0.0, 0.0),
        (f"{TRUTH} change_size(1, small) change_size(1, small)", 0.5, 1.0),
        (f"{TRUTH} change_shape(4, cube) change_shape(5, cube)", 0.5, 0.5),
        ("nothing", 0.0, 0.0),
        (None, 0.0, 0.0),
    ],
)
def test_func_seq(answer, score, seen):
    assert func_seq(answer, [TRUTH]) == pytest.approx(score)
    assert func_seq(answer, [TRUTH], unique=False) == pytest.approx(seen)


def test_func_seq_variants():
    answer = "change_size(3, large) change_color(2, blue) change_shape(1, cube)"
    truth = "change_size(1, small) change_color(2, red) change_shape(1, cube)"
    services, case = RecordingServices(), Case(answer, (truth,))
    assert SCORERS["func_seq"](case, services) == pytest.approx((1 + 0.5 + 0.25) / 3)
    assert SCORERS["func_seq_full"](case, services) == pytest.approx(1 / 3)
    assert SCORERS["func_seq_penalty"](case, services) == pytest.approx((1 - 0.25 - 0.5) / 3)
    worst = Case("change_size(3, large)", ("change_size(1, small)",))
    assert SCORERS["func_seq_penalty"](worst, services) == scorers.LOWEST["func_seq_penalty"] == -0.5
    with pytest.raises(DataFailure):
        func_seq(TRUTH, ["no triples"])


@pytest.mark.parametrize(
    ("answer", "score"), [("Seven", 1.0), ("seve", 0.5 * 8 / 9), ("xyz", 0.0), ("", 0.0), (None, 0.0)]
)
def test_partial(answer, score):
    assert SCORERS["partial"](Case(answer, ("one", "seven")), RecordingServices()) == pytest.approx(score)


@pytest.mark.parametrize(
    ("scorer", "answer", "truths", "score"),
    [
        (anls, " HELLO\n", ["hello"], 1.0),
        (anls, "hellp", ["x", "hello", "help"], 0.8),
        (anls, "help", ["hello"], 0.6),
        (anls, "hat", ["hello"], 0.0),
        (anls, "ab", ["a"], 0.5),
        (anls, None, ["hello"], 0.0),
        (cer, "STOP", ["STOP"], 1.0),
        (cer, "ST0P", ["STOP"], 0.75),
        (cer, "stop", ["STOP"], 0.0),
        (cer, "x" * 20, ["STOP"], 0.0),
        (cer, None, [""], 0.0),
    ],
)
def test_edit_distances(scorer, answer, truths, score):
    assert scorer(answer, truths) == pytest.approx(score)


def test_iou():
    services, scorer = RecordingServices(), SCORERS["iou"]
    assert scorer(Case("[0, 0, 2, 2]", ("[1, 1, 3, 3]",)), services) == pytest.approx(1 / 7)
    assert scorer(Case("[0, 0, 2, 2]", ("[5, 5, 6, 6]", "[0,0,2,2]")), services) == 1.0
    assert services.statuses == []
    nonsense = ("here", "[1, 2, 3]", "[3, 3, 1, 1]", "[0, 0, NaN, 1]", "[0, 0, true, 1]", "[" * 100_000)
    assert [scorer(Case(text, ("[0, 0, 1, 1]",)), services) for text in nonsense] == [0.0] * 6
    assert services.statuses == ["parse_fail"] * 6
    with pytest.raises(DataFailure):
        scorer(Case("[0, 0, 1, 1]", ("the door",)), services)


def test_a_box_is_read_from_a_reply_that_names_one():
    services, truth = RecordingServices(), ("[10, 20, 30, 40]",)
    one = (
        '{"bbox_2d": [10, 20, 30, 40], "label": "cup"}',
        "```json\n[[10.0, 20, 30, 40]]\n```",
        "at [10,20,30,40].",
    )
    assert [SCORERS["iou"](Case(text, truth), services) for text in one] == [1.0] * 3
    # Naming many boxes is no way to hit one, and long replies are read in linear time
    several = ("[10, 20, 30, 40] or [0, 0, 5, 5]", "[" * 10**6, "[10," * 10**6, "[" + " " * 10**6)
    assert [SCORERS["iou_50"](Case(text, truth), services) for text in several] == [0.0] * 4
    assert services.statuses == ["parse_fail"] * 4


@pytest.mark.parametrize(("answer", "score"), [("[0, 0, 10, 5]", 1.0), ("[0, 0, 10, 4.9]", 0.0), (None, 0.0)])
def test_half_an_overlap_is_right(answer, score):
    assert SCORERS["iou_50"](Case(answer, ("[0, 0, 10, 10]",)), RecordingServices()) == score


edges = st.integers(0, 1000)
boxes = st.tuples(edges, edges, st.integers(1, 500), st.integers(1, 500)).map(
    lambda box: (box[0], box[1], box[0] + box[2], box[1] + box[3])
)


@given(boxes, boxes, st.integers(-1000, 1000), st.integers(1, 9))
def test_iou_is_a_similarity(a, b, shift, factor):
    value = box_iou(a, b)
    assert 0.0 <= value <= 1.0
    assert value == box_iou(b, a)
    assert box_iou(a, a) == 1.0
    assert (value == 1.0) == (a == b)
    changed = ([side * factor + shift for side in box] for box in (a, b))
    assert box_iou(*changed) == pytest.approx(value)
    assert read_box(str(list(a))) == a


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        # By hand: the share of 0.5, 0.45, ... 0.05 that |answer - truth| / truth does not exceed
        ("4", "4", 1.0),
        ("3.1 meters", "4", 0.6),
        ("9", "10", 0.8),
        ("2", "4", 0.1),
        ("1.9", "4", 0.0),
        ("-4", "4", 0.0),
        ("1e400", "4", 0.0),
        ("many", "4", 0.0),
        (None, "4", 0.0),
    ],
)
def test_mean_relative_accuracy(answer, truth, score):
    scorer = SCORERS["mean_relative_accuracy"]
    assert scorer(Case(answer, (truth,)), RecordingServices()) == pytest.approx(score)
    for unreadable in ("far", "0"):
        with pytest.raises(DataFailure):
            scorer(Case("4", (unreadable,)), RecordingServices())


def test_math_is_called_only_for_different_text():
    services = RecordingServices(verdict=1.0)
    # Equal text, quantities, and text beside a number need no process
    rows = [(" 1/2", 1.0), (None, 0.0), ("  ", 0.0), ("0.5", 1.0), ("4", 0.0), ("x", 0.0)]
    assert [SCORERS["math"](Case(answer, ("1/2",)), services) for answer, _ in rows] == [s for _, s in rows]
    assert services.calls == []
    assert SCORERS["math"](Case("x+1", ("1+x",)), services) == 1.0
    assert services.calls == ["math"]


def test_the_judge_is_called_only_after_the_rules():
    services, scorer = RecordingServices(verdict=1.0), SCORERS["judge"]
    assert scorer(Case("Red", ("red",)), services) == 1.0
    assert scorer(Case("B", ("a dog",), options=ABC), services) == 1.0
    assert scorer(Case("A", ("a dog",), options=ABC), services) == 0.0
    assert scorer(Case(None, ("red",)), services) == scorer(Case(" ", ("red",)), services) == 0.0
    assert services.calls == []
    assert scorer(Case("crimson", ("red",)), services) == 1.0
    assert services.calls == ["judge"]


def test_math_with_a_judge_behind():
    services = RecordingServices(verdict=1.0)
    assert SCORERS["math_judge"](Case("x+1", ("y+1",)), services) == 1.0
    assert services.calls == ["math"]
    services = RecordingServices(verdict=-1.0)
    assert SCORERS["math_judge"](Case("x+1", ("y+1",)), services) == 0.0
    assert (services.calls, services.statuses) == (["math", "judge"], ["math_timeout"])


@given(
    st.sampled_from(sorted(set(SCORERS) - scorers.SLOW)),
    st.text(max_size=60),
    st.text(min_size=1, max_size=30),
)
def test_any_answer_gives_a_score_in_range_or_a_data_failure(name, answer, truth):
    try:
        score = find_scorer(name)(Case(answer, (truth,)), RecordingServices())
    except DataFailure:
        return
    assert isinstance(score, float)
    assert scorers.LOWEST.get(name, 0.0) <= score <= 1.0
