"""Configuration of the questions and demonstrations to read."""

from __future__ import annotations

from pydantic import Field

from pixelis.config.base import Section


class DataConfig(Section):
    train: str = Field(
        "cards:?split=train",
        description="questions to train on: `cards:`, `packaged:NAME`, a data set `NAME:ROOT`, or files of "
        "rows "
        "`PATH?format=NAME&media=FOLDER`",
    )
    evaluate: str = Field("cards:?split=test&seed=7", description="held-out questions")
    demonstrations: str = Field(
        "cards:?split=train", description="demonstrations for sft: `cards:` or a JSON-lines file"
    )
    direct_share: float = Field(
        0.7,
        ge=0,
        le=1,
        description="share of the `cards:` demonstrations that answer without calling an operation",
    )
    limit: int = Field(0, ge=0, description="use only the first N usable questions or demonstrations; 0: all")
    shuffle_rows: int = Field(
        10_000,
        ge=1,
        description="size of the shuffle buffer in questions; a smaller source is shuffled as a whole",
    )
    max_bad_rows: float = Field(
        0,
        ge=0,
        description=(
            "unusable rows that may be skipped, as a number or, below 1, as a share; more are an error"
        ),
    )
    probe_rows: int = Field(
        64, ge=0, description="rows of each source whose media `--dry-run` opens and whose tokens it counts"
    )
