"""Configuration of the quickstart."""

from __future__ import annotations

from pydantic import PositiveInt

from pixelis.config.base import Section


class QuickstartConfig(Section):
    traffic: str = "cards:?split=validation&seed=9&shift=warm"
    """source of the questions of the online stream, whose pictures have changed"""
    held_out: str = "cards:?split=test&seed=8&shift=warm"
    """source of labelled questions about other changed pictures, asked before and after"""
    stream: PositiveInt = 800
    """number of unlabelled requests in the online stream"""
