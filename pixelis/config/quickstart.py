"""Configuration of the quickstart."""

from __future__ import annotations

from pydantic import PositiveInt

from pixelis.config.base import Section


class QuickstartConfig(Section):
    shift: str = "warm"
    """change of the pictures in the online stream: warm, noise, rotate, invert, ..."""
    stream: PositiveInt = 800
    """number of unlabelled requests in the online stream"""
