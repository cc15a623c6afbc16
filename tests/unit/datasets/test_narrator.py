"""Thoughts: varied, repeatable, and silent about what has not been seen yet."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pixelis.datasets import packaged
from pixelis.datasets.synthesis.executor import Executor
from pixelis.datasets.synthesis.tasks import TASKS
from pixelis.records import Demonstration

EXECUTOR = Executor()


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> list[Demonstration]:
    """More than a hundred of the quickest kind."""
    folder = tmp_path_factory.mktemp("media")
    questions = list(packaged.read("packaged:photos?count=10", folder))
    result = []
    for seed in range(12):
        for number, question in enumerate(questions):
            result.append(
                TASKS["detail_perception"].make(question, np.random.default_rng([seed, number]), EXECUTOR)
            )
    return result


@pytest.mark.slow
def test_thoughts_vary(samples):
    texts = [turn.think for sample in samples for turn in sample.turns]
    assert len(samples) == 120
    assert len(set(texts)) / len(texts) > 0.7
    assert Counter(texts).most_common(1)[0][1] <= 0.02 * len(texts)
    pairs = Counter((sample.question, *(turn.think for turn in sample.turns)) for sample in samples)
    assert sum(count - 1 for count in pairs.values()) <= 0.02 * len(samples)
    openings = Counter(text.split()[0] for text in texts)
    assert openings.most_common(1)[0][1] <= 0.3 * len(texts)


@pytest.mark.slow
def test_no_thought_reveals_the_answer_before_the_last_call(samples):
    for sample in samples:
        answer = sample.answers[0]
        if sample.scorer == "mc_letter":
            answer = sample.meta["options"]["ABCD".index(answer)]
        if answer.casefold() in sample.question.partition("\n")[0].casefold():
            continue
        assert not any(answer in step.think for step in sample.steps)  # none before the last look
        assert answer in sample.turns[-1].think
