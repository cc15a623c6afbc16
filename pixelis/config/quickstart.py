"""Configuration of the quickstart."""

from __future__ import annotations

from pydantic import Field

from pixelis.config.base import Section


class QuickstartConfig(Section):
    sft_lr: float = Field(2e-3, gt=0, description="learning rate of the SFT stage")
    rft_lr: float = Field(1e-3, gt=0, description="learning rate of the RFT stage")
    shift: str = Field("warm", description="how the online stream's pictures differ: warm, noise, rotate, invert, ...")
    stream: int = Field(800, ge=1, description="unlabelled requests in the online stream")
    shift_questions: int = Field(500, ge=1, description="held-out questions of the shifted kind, before and after")
