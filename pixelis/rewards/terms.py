"""Reward terms of a group of rollouts, and their weighted sum.

Every term is kept raw under its name; ``reward`` is the weighted sum. A trajectory whose accuracy cannot be known is marked
``unscored`` with the cause and has no reward: a failure is never a 0 that the learner would learn from.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from pixelis.config import Curiosity, Rewards
from pixelis.dialogue.dialects import DIALECTS
from pixelis.records import Group, StopReason, Trajectory
from pixelis.rewards.scorers import SCORERS

log = logging.getLogger(__name__)

BROKEN = (StopReason.ERROR, StopReason.DEADLINE)
"""Episodes that the system, not the policy, ended: excluded from rewards and from the group's statistics."""


def accuracy(trajectory: Trajectory, truths: Sequence[str], scorer: str = "exact") -> float:
    """Score of the answer against the truths, 0..1; 0 when the policy gave no answer. KeyError for an unknown scorer."""
    return float(SCORERS[scorer](trajectory.answer, truths))


def format(trajectory: Trajectory) -> float:
    """1.0 when the episode ended with an answer and every turn of the policy is well-formed in its dialect, else 0.0."""
    dialect = DIALECTS[trajectory.dialect]
    turns = [turn for turn in trajectory.turns if turn.is_policy]
    fine = all(turn.error is None and dialect.well_formed(turn.text) for turn in turns)
    return float(bool(turns) and fine and trajectory.stop_reason is StopReason.ANSWER)


def pixel_reasoning_rate(trajectories: Sequence[Trajectory]) -> float:
    """RaPR: share of the trajectories with at least one operation that executed; 0.0 for none."""
    return sum(t.operations_ok > 0 for t in trajectories) / len(trajectories) if trajectories else 0.0


def curiosity(trajectory: Trajectory, rate: float, settings: Curiosity) -> float:
    """Bonus for looking closer while the group rarely does, minus the cost of many calls.

    alpha * max(H - RaPR, 0) * [n >= 1] + beta * min(N - n, 0), with n the operations of this trajectory that executed and
    RaPR the rate over its group (Pixel-Reasoner, arXiv 2505.15966, the paper's form; defaults H 0.3, N 1, alpha 0.5, beta 0.05).
    """
    calls = trajectory.operations_ok
    bonus = settings.alpha * max(settings.target - rate, 0.0) * (calls >= 1)
    return bonus + settings.beta * min(settings.free_calls - calls, 0)


def score_group(group: Group, settings: Rewards, truths: Sequence[str] | None = None) -> Group:
    """A copy of a complete group with ``rewards``, ``reward`` or ``unscored`` on each trajectory.

    ``truths`` replaces the question's answers (a pseudo-label): then the question's own are not looked at.
    """
    accepted = list(truths if truths is not None else group.question.answers or [])
    whole = [t for t in group.trajectories if t.stop_reason not in BROKEN]
    rate = pixel_reasoning_rate(whole)
    weights = settings.weights.model_dump()
    scored = []
    for trajectory in group.trajectories:
        terms: dict[str, float] = {}
        if trajectory.stop_reason in BROKEN:
            cause: str | None = trajectory.unscored or trajectory.stop_reason.value
        else:
            cause = _measure(trajectory, terms, accepted, group.question.scorer, rate, settings)
        reward = None if cause else sum(weights[name] * value for name, value in terms.items())
        update = {"rewards": terms, "reward": reward, "unscored": cause, "advantage": None}
        scored.append(trajectory.model_copy(update=update))
    return group.model_copy(update={"trajectories": scored})


def _measure(
    trajectory: Trajectory, terms: dict[str, float], truths: list[str], scorer: str, rate: float, settings: Rewards
) -> str | None:
    """Fill in the terms that can be computed; returns the cause when one of them cannot."""
    if trajectory.dialect not in DIALECTS:
        return "unknown_dialect"
    terms["format"] = format(trajectory)
    terms["curiosity"] = curiosity(trajectory, rate, settings.curiosity)
    if not truths:
        return "no_truth"
    if scorer not in SCORERS:
        return "unknown_scorer"
    try:
        value = accuracy(trajectory, truths, scorer)
    except Exception:  # whatever a scorer trips over is a cause to count, not a reward
        log.exception("scorer %s failed on trajectory %s", scorer, trajectory.id)
        return "scorer_failed"
    if not math.isfinite(value):
        return "not_finite"
    terms["accuracy"] = value
    return None
