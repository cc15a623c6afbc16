"""Configuration of the distillation of looking: whether a question is answered at once or looked at closer."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from pixelis.config.base import Section


class DistillConfig(Section):
    episodes: int = Field(4, ge=2)
    """episodes of each question with operations, and as many without"""
    hint: str = ""
    """text after the question in episodes without operations, for a policy that is told neither of its operations
    nor of their absence, as the embedded one"""
    holdout: float = Field(0.25, gt=0, lt=1)
    """share of the questions that only choose the threshold, by the tolerance and risk of evolution.canary"""
    keep: PositiveInt = 1
    """demonstrations of a question at most, those of fewest tokens"""
    looks: PositiveInt = 1
    """times as many of a question that is looked at: a greedy policy then answers at once only where more than
    looks / (1 + looks) of the questions like it are, since a guess costs more than a look"""
