"""Configuration of test-time reinforcement learning: evaluation and early stopping."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from pixelis.config.base import Section, Share


class TtrlConfig(Section):
    samples: PositiveInt = 16
    """episodes per question in the evaluations before and after, for pass@1 and the majority"""
    patience: NonNegativeInt = 0
    """end the run when the mean majority share of this many steps is no higher than that of as many steps
    before; 0: never"""
    min_gain: Share = 0.005
    """minimum rise of that share to continue"""
