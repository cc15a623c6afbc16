"""Phrases of synthesised demonstrations: every one renders with its placeholders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from pydantic import BaseModel

from pixelis.datasets.synthesis.executor import Executor
from pixelis.datasets.synthesis.phrases import PhraseList, mistakes, questions, thoughts
from pixelis.datasets.synthesis.sample import Sample
from pixelis.datasets.synthesis.tasks import TASKS
from pixelis.records import Question

NUMBERS = {"x", "y", "time", "ratio", "dividend", "divisor", "near", "far"}
NUMBERS |= {"number", "bound", "pixels", "start", "frame"}


def values(slots) -> dict[str, object]:
    return {slot: 0.25 if slot in NUMBERS else f"<{slot}>" for slot in slots}


def phrase_lists(model: BaseModel) -> Iterator[PhraseList]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        yield from value.values() if isinstance(value, Mapping) else [value]


@pytest.mark.parametrize("phrases", [*phrase_lists(thoughts()), *phrase_lists(mistakes())])
def test_phrases_render_with_their_placeholders(phrases: PhraseList) -> None:
    rendered = {phrases.pick(np.random.default_rng(seed), **values(phrases.slots)) for seed in range(99)}
    assert len(rendered) == len(phrases.texts) == len(set(phrases.texts))
    for slot in phrases.slots:
        assert any(f"{{{slot}" in text for text in phrases.texts)
    assert not any("{" in text or "  " in text for text in rendered)


FORMS = [(task, form) for task, forms in questions().items() for form in forms]


@pytest.mark.parametrize(("task", "form"), FORMS)
def test_questions_and_conclusions_render_with_their_placeholders(task: str, form: str) -> None:
    phrases = questions()[task][form]
    texts = set()
    assert all(f"{{{slot}" in question for question in phrases.questions or () for slot in phrases.slots)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        sample = Sample(Question(id="q", question=""), rng, Executor(), "full", task, form)
        sample.ask(**values(phrases.slots))
        texts.add(sample.text)
        for conclusion in phrases.conclusions.values():
            assert "{" not in conclusion.format(**values(phrases.slots + phrases.results))
        assert "{" not in sample.topic
    assert len(texts) == len(set(phrases.questions or [""]))
    assert all(text[:1] == text[:1].upper() and "{" not in text for text in texts)
    assert len(phrases.questions or range(5)) >= 5


def test_every_form_has_phrases() -> None:
    for task in TASKS.values():
        assert set(task.forms) <= set(questions()[task.name])
    assert set(questions()) == set(TASKS)
    ways = "recrop recrop_again oversized frames object thing refused"
    assert set(mistakes().notices) == set(ways.split())
