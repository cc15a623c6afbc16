"""Configuration of the questions and demonstrations to read."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from pixelis.config.base import Section, Share


class DataConfig(Section):
    train: str = "cards:?split=train"
    """questions to train on: `cards:`, `packaged:NAME`, a data set `NAME:ROOT`, or files of rows
    `PATH?format=NAME&media=FOLDER`"""
    evaluate: str = "cards:?split=test&seed=7"
    """held-out questions"""
    demonstrations: str = "cards:?split=train"
    """demonstrations for sft: `cards:` or a JSON-lines file"""
    direct_share: Share = 0.7
    """share of the `cards:` demonstrations that answer without calling an operation"""
    limit: NonNegativeInt = 0
    """use only the first N usable questions or demonstrations; 0: all"""
    shuffle_rows: PositiveInt = 10_000
    """size of the shuffle buffer in questions; a smaller source is shuffled as a whole"""
    max_bad_rows: NonNegativeFloat = 0
    """unusable rows that may be skipped, as a number or, below 1, as a share; more are an error"""
    probe_rows: NonNegativeInt = 64
    """rows of each source whose media `--dry-run` opens and whose tokens it counts"""
