"""The text of synthesised demonstrations: the YAML files of this folder, validated when they are loaded."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PhraseList(_Schema):
    """Interchangeable texts with the placeholders that they may use."""

    slots: tuple[str, ...] = ()
    texts: tuple[str, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _known_placeholders(self) -> PhraseList:
        for text in self.texts:
            _check_placeholders(text, self.slots)
        return self

    def pick(self, rng: np.random.Generator, **slots: object) -> str:
        """One of the texts with its placeholders filled in."""
        return choose(self.texts, rng).format(**slots)


class FormPhrases(_Schema):
    """The text of one form of question; ``questions.yaml`` describes the fields."""

    slots: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    questions: tuple[str, ...] | None = Field(None, min_length=1)
    topic: str = Field(min_length=1)
    conclusions: Mapping[str, str] = Field(min_length=1)

    @model_validator(mode="after")
    def _known_placeholders(self) -> FormPhrases:
        for question in self.questions or ():
            if missing := set(self.slots) - _check_placeholders(question, self.slots):
                raise ValueError(f"{question!r} lacks the placeholder {min(missing)}")
        _check_placeholders(self.topic, self.slots)
        for conclusion in self.conclusions.values():
            _check_placeholders(conclusion, self.slots + self.results)
        return self


class Thoughts(_Schema):
    """The parts of thoughts in ``thoughts.yaml``."""

    framings: PhraseList
    places: PhraseList
    doubts: PhraseList
    voices: Mapping[str, PhraseList] = Field(min_length=1)
    aims: Mapping[str, PhraseList] = Field(min_length=1)
    remarks: Mapping[str, PhraseList] = Field(min_length=1)
    conclusions: PhraseList
    terse: Mapping[str, PhraseList] = Field(min_length=1)

    @model_validator(mode="after")
    def _same_aims(self) -> Thoughts:
        if self.terse.keys() != self.aims.keys():
            raise ValueError(f"aims and terse differ in {', '.join(sorted(self.terse.keys() ^ self.aims.keys()))}")
        return self


class Mistakes(_Schema):
    """The thoughts of demonstrations with deliberate mistakes in ``mistakes.yaml``."""

    misperceptions: PhraseList
    fallacies: Mapping[str, PhraseList] = Field(min_length=1)
    continuations: PhraseList
    recounts: PhraseList
    attempts: PhraseList
    notices: Mapping[str, PhraseList] = Field(min_length=1)


def choose(texts: tuple[str, ...], rng: np.random.Generator) -> str:
    """One of the texts."""
    return texts[int(rng.integers(len(texts)))]


def placeholders(text: str) -> set[str]:
    """The names of the placeholders in a text."""
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}


def _check_placeholders(text: str, slots: tuple[str, ...]) -> set[str]:
    names = placeholders(text)
    if unknown := names - set(slots):
        raise ValueError(f"{text!r} has the unknown placeholder {min(unknown)!r}; known are {', '.join(slots) or 'none'}")
    return names


@functools.cache
def thoughts() -> Thoughts:
    """The phrases of ``thoughts.yaml``."""
    return Thoughts.model_validate(_read("thoughts"))


@functools.cache
def mistakes() -> Mistakes:
    """The phrases of ``mistakes.yaml``."""
    return Mistakes.model_validate(_read("mistakes"))


@functools.cache
def questions() -> dict[str, dict[str, FormPhrases]]:
    """The phrases of ``questions.yaml`` by task and form."""
    return TypeAdapter(dict[str, dict[str, FormPhrases]]).validate_python(_read("questions"))


def _read(name: str) -> Any:
    return yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"))
