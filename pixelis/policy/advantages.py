"""Advantages of the rollouts of one question, relative to each other (GRPO, arXiv 2402.03300)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pixelis.errors import DataFailure

if TYPE_CHECKING:
    from pixelis import config


def group_advantages(rewards: Sequence[float | None], settings: config.Advantage) -> list[float | None]:
    """(r - mean) / (std + eps) over the scored rollouts of one group; `settings` can switch off the mean or the divisor.

    rewards: one per rollout, None for an unscored one, which gets None and does not count. With fewer than `min_group` scored
    rollouts every entry is None: the group is not used. std is the sample's (n - 1), as in TRL and verl. When the scored rewards
    are equal up to rounding, the advantages are exactly 0. Raises DataFailure for a reward that is not finite: it must have been
    counted as unscored before.
    """
    scored = [r for r in rewards if r is not None]
    bad = [r for r in scored if not math.isfinite(r)]
    if bad:
        raise DataFailure(f"a reward of {bad[0]} reached the advantages", code="non_finite_reward")
    if len(scored) < settings.min_group:
        return [None] * len(rewards)
    mean = math.fsum(scored) / len(scored)
    spread = max(scored) - min(scored)
    # (n * 0.1) / n is not 0.1: without this, rounding noise divided by eps would look like a signal.
    equal = spread <= 1e-9 * max(1.0, abs(mean))
    center = mean if settings.baseline == "mean" else 0.0
    divisor = 1.0
    if settings.scale == "std":
        divisor = math.sqrt(math.fsum((r - mean) ** 2 for r in scored) / (len(scored) - 1)) + settings.eps
    if equal and settings.baseline == "mean":
        return [None if r is None else 0.0 for r in rewards]
    return [None if r is None else (r - center) / divisor for r in rewards]
