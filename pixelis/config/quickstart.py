"""Configuration of the quickstart."""

from __future__ import annotations

from pydantic import Field

from pixelis.config.base import Section


class QuickstartConfig(Section):
    shift: str = Field(
        "warm", description="change of the pictures in the online stream: warm, noise, rotate, invert, ..."
    )
    stream: int = Field(800, ge=1, description="number of unlabelled requests in the online stream")
    shift_questions: int = Field(
        500, ge=1, description="held-out questions with changed pictures, evaluated before and after"
    )
