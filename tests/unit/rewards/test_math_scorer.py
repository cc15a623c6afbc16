r"""The scorer ``math`` on rows of answer, truth and score: what is the same mathematics."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pixelis.config import RewardsConfig
from pixelis.rewards.mathematics import equal
from pixelis.rewards.notation import clean
from pixelis.rewards.scorers import Case, math_equal
from pixelis.rewards.services import Services


@pytest.fixture(scope="module")
def services():
    services = Services(RewardsConfig(timeout_s=20.0))
    yield services
    services.close()


ROWS = [
    # A formula is more than its first number
    (r"$36 \pi$", r"36\pi", 1.0),
    ("36", r"36\pi", 0.0),
    (r"36 \pi \text{ square metres}", r"36\pi", 1.0),
    (r"36 \pi \text{ square metres}", "36", 0.0),
    (r"4\sqrt2", r"4\sqrt{2}", 1.0),
    ("4", r"4\sqrt2", 0.0),
    ("2π", r"2\pi", 1.0),
    ("2500", r"2.5\times10^3", 1.0),
    ("2.5×10^3", "2500", 1.0),
    ("3!", "6", 1.0),
    (r"8\div2", "4", 1.0),
    (r"5\pm1", "5", 0.0),
    ("\u22127x", "-7x", 1.0),
    (r"90^{\circ}", "90", 1.0),
    ("The answer is 7.", "7", 1.0),
    # Equal numbers with other words are not equal
    ("$5 million", "$5 billion", 0.0),
    ("5,200,000", "5.2 million", 1.0),
    ("5.2 million people", "5.2 million", 1.0),
    ("5.2 million people", "5.2 billion people", 0.0),
    ("5 joules", "5 kilojoules", 0.0),
    ("5 m long", "5 min long", 0.0),
    ("3 mph", "3 miles per hour", 1.0),
    ("10:30 am", "10:30 pm", 0.0),
    ("2019-2020", "2020-2021", 0.0),
    ("2024-01-02", "2024-02-01", 0.0),
    ("at least 7", "at most 7", 0.0),
    ("1,000th", "1", 0.0),
    ("C12", "12C", 0.0),
    ("283m", "283 apples", 0.0),
    ("none of the 7", "7", 0.0),
    ("minus 7", "-7", 1.0),
    ("not 7", "7", 0.0),
    ("5 January 2020", "7 March 2020", 0.0),
    ("1 hour 30 minutes", "30 minutes", 0.0),
    ("52 degrees north", "52 degrees south", 0.0),
    ("3 red cubes", "3 blue cubes", 0.0),
    ("3 red cubes", "3", 1.0),
    ("There are 3 red cubes.", "3 cubes", 1.0),
    ("about 5 minutes", "5 minutes", 1.0),
    ("7 because I counted them", "7", 1.0),
    (r"3 \text{ cm}", "3 centimetres", 1.0),
    # Separators and signs of numbers
    ("10080", r"10,\!080", 1.0),
    (r"\$10{,}000", "10000", 1.0),
    ("3000000", r"3,\!000,\!000", 1.0),
    (r"10{,}\!080 \text{ cm}", "10,080 cm", 1.0),
    (r"5\,cm", "5 cm", 1.0),
    (r"1,\,2", "1, 2", 1.0),
    (r"1{,}00", "100", 0.0),
    ("- 5", "-5", 1.0),
    ("- 1/2", "\u22120.5", 1.0),
    ("1, - 2", "1, -2", 1.0),
    ("- 5", "5", 0.0),
    # A list is more than its last number
    ("2 > x > 1", "1 < x < 2", 1.0),
    ("3 > 1 > 2", "1 > 2 > 3", 0.0),
    ("y = -x/2 + 3/4", "2x + 4y - 3 = 0", 1.0),
    ("-x > -1", "x < 1", 1.0),
    ("x=4", "3, 4", 0.0),
    (r"\sqrt{16}", "3, 4", 0.0),
    ("x=3, x=4", "3, 4", 1.0),
    (r"\{3,4\}", "3, 4", 1.0),
    (r"\sqrt{4}, 3", "2, 3", 1.0),
    ("1/3, 2/3", r"\frac{2}{3}", 0.0),
    ("(3, 4)", "3, 4", 1.0),
    ("(4, 3)", "3, 4", 0.0),
    ("[0, 2)", "[0, 2]", 0.0),
    ("-2, 1", "1, -2", 1.0),
    (r"\sqrt{2}, 1", r"1, \sqrt{2}", 1.0),
    ("1, 1, 2", "1, 2, 2", 0.0),
    ("3, 4 cm", "4 cm, 3 cm", 1.0),
    ("3 cm, 4 cm", "3 m, 4 m", 0.0),
    ("5 feet, 6 inches", "5, 6", 0.0),
    ("1, 2, and 3", "1, 2, 3", 1.0),
    ("7 and 2", "1, 2", 0.0),
    # Formulas that a process compares
    (r"\boxed{12}", "12", 1.0),
    (r"\sqrt{2}", "1.41421356", 1.0),
    ("words, many words", "5", 0.0),
    ("7" * 50, "5", 0.0),
]


@pytest.mark.parametrize(("answer", "truth", "score"), ROWS)
def test_the_same_mathematics_scores_in_both_directions(services, answer, truth, score):
    assert math_equal(Case(answer, (truth,)), services) == score
    assert math_equal(Case(truth, (answer,)), services) == score


@pytest.mark.parametrize("answer", ["", r"\frac{1}{"])
def test_what_is_no_formula_is_wrong(services, answer):
    assert math_equal(Case(answer, ("17", "5")), services) == 0.0


LISTS = st.lists(st.sampled_from(["1", "-2", "0.5", "1/2", "7"]), min_size=1, max_size=4)


@given(LISTS, st.randoms(use_true_random=False))
def test_a_list_without_brackets_is_equal_in_any_order(numbers, random):
    shuffled = list(numbers)
    random.shuffle(shuffled)
    assert math_equal(Case(", ".join(shuffled), (" and ".join(numbers),)), Services(RewardsConfig())) == 1.0


PIECES = st.sampled_from(
    [
        "7", "30", "5.2", "million", "hour", "not", "at least", "red", "x", "-", "/", "am", "=", ",", "(",
        ")", ":",
    ]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=6).map(" ".join) | st.text(max_size=12)


@settings(deadline=None)
@given(TEXTS, TEXTS)
def test_equality_is_symmetric_and_every_text_equals_itself(a, b):
    def same_text(x: str, y: str) -> bool:
        return x == y

    assert equal(a, b, same_text) == equal(b, a, same_text)
    assert equal(a, a, same_text) == bool(clean(a))
    assert clean(clean(a)) == clean(a)
