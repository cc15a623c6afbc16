"""Published figures of another system, which an evaluation compares itself with."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from pixelis.config.base import Section
from pixelis.config.load import validated
from pixelis.errors import BadConfig, MissingFile

Percent = Annotated[int | float, Field(ge=0, le=100)]


class PublishedFigure(Section):
    name: str
    """the evaluation in words"""
    set: str | None = None
    """name of the evaluated set; None: the only one"""
    category: str | None = None
    """category of its questions; None: all"""
    metric: Annotated[str, StringConstraints(pattern=r"^(accuracy|(avg|pass|maj)@[1-9]\d*)$")] = "accuracy"
    """accuracy, or avg@k, pass@k or maj@k with the k of evaluate.samples"""
    base: Percent | None = None
    """figure of the model before training"""
    published: Percent
    source: str
    """where the figure was published"""
    scores: str | None = None
    """their scores by question, to compare in pairs: a scores-NAME.jsonl, as evaluate.answers writes it, beside
    this file"""

    @model_validator(mode="after")
    def _possible(self) -> PublishedFigure:
        if self.category is not None and self.metric != "accuracy":
            raise ValueError(f"a category has an accuracy, not {self.metric}")
        if self.scores is not None and (self.category or self.metric.startswith(("pass", "maj"))):
            raise ValueError("scores are compared in pairs over a whole set: accuracy or avg@k")
        return self


class PublishedFigures(Section):
    model: str
    """model that was trained"""
    figures: list[PublishedFigure] = Field(min_length=1)


def read(path: str | Path) -> PublishedFigures:
    """Read a TOML file of figures, with absolute paths of their scores. MissingFile; BadConfig for wrong content."""
    path = Path(path)
    if not path.is_file():
        raise MissingFile(
            f"evaluate.published={path} is no file", fix="name a TOML file of published figures"
        )
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path} is not TOML: {error}") from None
    published = validated(PublishedFigures, values, fix=f"correct {path}; docs/reproduce.md has an example")
    figures = [
        figure.model_copy(update={"scores": str(path.parent / figure.scores)}) if figure.scores else figure
        for figure in published.figures
    ]
    return published.model_copy(update={"figures": figures})
