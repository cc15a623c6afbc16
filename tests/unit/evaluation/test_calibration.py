"""Confidence as a probability: fitted to answers that are right as often as a curve says."""

from __future__ import annotations

import numpy as np
import pytest

from pixelis.config.evolution import EvolutionConfig, VotingConfig
from pixelis.errors import BadInput
from pixelis.evaluation.calibration import calibration_error, fit
from pixelis.evolution.gate import gate
from pixelis.records import Question, StopReason, Trajectory, Turn
from pixelis.rewards.vote import INSUFFICIENT, probability, vote


def answers(n: int, curve: tuple[float, float]) -> tuple[list[float], list[bool]]:
    rng = np.random.default_rng(0)
    confidences = rng.uniform(0, 1, n)
    return confidences.tolist(), [bool(rng.uniform() < probability(c, curve)) for c in confidences]


def sample(answer: str) -> Trajectory:
    turns = [Turn(role="user", tokens=[1]), Turn(role="assistant", text=answer, tokens=[2], log_probs=[0.0])]
    ids = {"id": answer, "question_id": "q", "group_id": "g"}
    return Trajectory(**ids, turns=turns, answer=answer, stop_reason=StopReason.ANSWER, policy_version=0)


def test_the_curve_is_found_again_and_makes_confidence_a_probability() -> None:
    confidences, right = answers(4000, (8.0, -3.0))
    curve, unseen = fit(confidences, right)
    assert curve == pytest.approx((8.0, -3.0), abs=0.6)
    assert unseen < 0.03
    assert calibration_error(confidences, right) > 0.1
    assert calibration_error([probability(c, curve) for c in confidences], right) < 0.03


@pytest.mark.parametrize(
    ("confidences", "right"),
    [
        pytest.param([0.5] * 20, [True, False] * 10, id="too few answers"),
        pytest.param([0.5, 0.9] * 50, [True] * 100, id="none wrong"),
        pytest.param([0.1, 0.9] * 50, [True, False] * 50, id="more confidence, more often wrong"),
    ],
)
def test_answers_that_show_no_curve_are_refused(confidences: list[float], right: list[bool]) -> None:
    with pytest.raises(BadInput, match="confiden"):
        fit(confidences, right)


def test_the_vote_reports_the_probability_and_the_gate_compares_it() -> None:
    question, samples = Question(id="q", question="which digit?"), [sample(a) for a in ("7", "7", "7", "8")]
    plain = EvolutionConfig(gate=0.9)
    calibrated = plain.model_copy(update={"vote": VotingConfig(calibration=(8.0, -3.0))})
    before, after = (vote(samples, [], config, question, 0.0) for config in (plain, calibrated))
    assert (before.answer, before.confidence, gate(before, plain)) == ("7", 0.75, False)
    assert (after.answer, after.votes) == (before.answer, before.votes)
    assert after.confidence == pytest.approx(1 / (1 + np.exp(-3)))
    assert gate(after, calibrated)
    alone = vote(samples[:1], [], calibrated, question, 0.0)
    assert (alone.confidence, alone.reason) == (0.5, INSUFFICIENT)
