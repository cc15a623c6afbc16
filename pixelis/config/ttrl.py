"""Configuration of test-time reinforcement learning: evaluation and early stopping."""

from __future__ import annotations

from pydantic import Field

from pixelis.config.base import Section


class TtrlConfig(Section):
    samples: int = Field(
        16,
        ge=1,
        description="episodes per question in the evaluations before and after, for pass@1 and the majority",
    )
    patience: int = Field(
        0,
        ge=0,
        description="end the run when the mean majority share of this many steps is no higher than that of "
        "as many steps before; "
        "0: never",
    )
    min_gain: float = Field(0.005, ge=0, le=1, description="minimum rise of that share to continue")
