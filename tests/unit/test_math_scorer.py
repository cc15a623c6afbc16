r"""The scorer ``math`` on rows of answer, truth and score: what is the same mathematics, and what only has a number in common."""

from __future__ import annotations

import pytest

from pixelis.config import MathScorerConfig, RewardsConfig
from pixelis.rewards.scorers import Case, math_equal
from pixelis.rewards.services import Services


@pytest.fixture(scope="module")
def services():
    services = Services(RewardsConfig(math=MathScorerConfig(workers=1, timeout_s=20.0)))
    yield services
    services.close()


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        (r"$36 \pi$", r"36\pi", 1.0),
        (r"36\,\pi", r"$36\pi$", 1.0),
        ("36", r"36\pi", 0.0),
        (r"36 \pi \text{ square metres}", r"36\pi", 1.0),
        (r"36 \pi \text{ square metres}", "36", 0.0),
        (r"4\sqrt2", r"4\sqrt{2}", 1.0),
        ("4", r"4\sqrt2", 0.0),
        ("2π", r"2\pi", 1.0),
        ("2π", "2", 0.0),
        ("2500", r"2.5\times10^3", 1.0),
        ("2.5", r"2.5\times10^3", 0.0),
        ("2.5×10^3", "2500", 1.0),
        ("3!", "6", 1.0),
        ("3!", "3", 0.0),
        (r"8\div2", "4", 1.0),
        (r"5\pm1", "5", 0.0),
        ("\u22127x", "-7x", 1.0),
        (r"90^{\circ}", "90", 1.0),
        ("The answer is 7.", "7", 1.0),
        ("wow! it is 7", "7", 1.0),
    ],
)
def test_a_formula_is_more_than_its_first_number(services, answer, truth, score):
    assert math_equal(Case(answer, (truth,)), services) == score
    assert math_equal(Case(truth, (answer,)), services) == score
