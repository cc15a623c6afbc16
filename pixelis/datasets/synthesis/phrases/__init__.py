"""The text of synthesised demonstrations: the YAML files of this folder."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PhraseList(_Schema):
    """Interchangeable texts with the placeholders that they may use."""

    slots: tuple[str, ...] = ()
    texts: tuple[str, ...] = Field(min_length=1)

    def pick(self, rng: np.random.Generator, **slots: object) -> str:
        return choose(self.texts, rng).format(**slots)


class FormPhrases(_Schema):
    """The text of one form of question; ``questions.yaml`` describes the fields."""

    slots: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    questions: tuple[str, ...] | None = Field(None, min_length=1)
    topic: str = Field(min_length=1)
    conclusions: Mapping[str, str] = Field(min_length=1)


class Thoughts(_Schema):
    framings: PhraseList
    places: PhraseList
    doubts: PhraseList
    voices: Mapping[str, PhraseList] = Field(min_length=1)
    aims: Mapping[str, PhraseList] = Field(min_length=1)
    remarks: Mapping[str, PhraseList] = Field(min_length=1)
    conclusions: PhraseList
    terse: Mapping[str, PhraseList] = Field(min_length=1)


class Mistakes(_Schema):
    """The thoughts of demonstrations with deliberate mistakes in ``mistakes.yaml``."""

    misperceptions: PhraseList
    fallacies: Mapping[str, PhraseList] = Field(min_length=1)
    continuations: PhraseList
    recounts: PhraseList
    attempts: PhraseList
    notices: Mapping[str, PhraseList] = Field(min_length=1)


def choose(texts: tuple[str, ...], rng: np.random.Generator) -> str:
    return texts[int(rng.integers(len(texts)))]


@functools.cache
def thoughts() -> Thoughts:
    return Thoughts.model_validate(_read("thoughts"))


@functools.cache
def mistakes() -> Mistakes:
    return Mistakes.model_validate(_read("mistakes"))


@functools.cache
def questions() -> dict[str, dict[str, FormPhrases]]:
    """By task and form."""
    return TypeAdapter(dict[str, dict[str, FormPhrases]]).validate_python(_read("questions"))


def _read(name: str) -> Any:
    return yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"))
