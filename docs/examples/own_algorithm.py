"""An own algorithm: MaxRL's advantage with TOPR's surrogate.

pixelis rft configs/nano/rft.yaml rft.algorithm=docs.examples.own_algorithm:ALGORITHM --dry-run
"""

from __future__ import annotations

import math

import torch

from pixelis import config


def max_rl(rewards: list[float], settings: config.AdvantageConfig) -> list[float]:
    """(r - mean) / mean: the rarer a success, the larger its advantage (MaxRL, arXiv 2602.02710).

    For rewards of 0 and above.
    """
    mean = math.fsum(rewards) / len(rewards)
    return [(r - mean) / mean if mean > 0 else 0.0 for r in rewards]


def topr(
    ratio: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, settings: config.LossConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weight 1 for good rollouts, the ratio cut to 0..1 for bad ones (TOPR, arXiv 2503.14286, here for each
    token).
    """
    ratio, bad = ratio.detach(), advantages < 0
    weight = torch.where(bad, ratio.clamp(max=1.0), 1.0)
    return weight * advantages * log_probs, {"tapered": (bad & (ratio < 1.0)).sum()}


ALGORITHM = config.Algorithm(
    settings={
        "advantage": {"scale": "none"},
        # The ratio is to the policy that sampled, so that no importance weight remains beside it.
        "loss": {"proximal": "behaviour", "aggregate": "token", "kl": 0.0},
    },
    advantage=max_rl,
    surrogate=topr,
)
