"""What a learner tells of a batch that it learnt from in several steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_trainer import batch, trainer

from pixelis.config import load
from pixelis.datasets.questions import count_questions
from pixelis.errors import BadConfig, BadInput
from pixelis.jobs import rft
from pixelis.policy.samples import LearnerBatch
from pixelis.policy.train_step import combine_metrics, minibatch_indices


def test_counts_of_minibatches_are_summed_and_largest_values_stay() -> None:
    names = (
        "learner/sequences",
        "learner/dropped_bad_view",
        "learner/skipped",
        "policy/ratio_max",
        "policy/loss",
    )
    one, other = (
        dict(zip(names, v, strict=True)) for v in ((8.0, 2.0, 3.0, 1.5, 1.0), (7.0, 1.0, 4.0, 1.1, 2.0))
    )
    combined = combine_metrics([{**one, "policy/kl": 0.5}, other])
    assert combined.pop("policy/kl") == 0.5
    assert combined == pytest.approx(dict(zip(names, (15.0, 3.0, 4.0, 1.5, 1.5), strict=True)))


def test_every_pass_takes_every_sample_once_and_the_first_in_turn() -> None:
    steps = list(minibatch_indices(7, 3, 2, seed=(42, 5)))
    assert steps[:3] == [[0, 3, 6], [1, 4], [2, 5]]
    assert sorted(i for step in steps[3:] for i in step) == list(range(7))
    assert steps[3:] != steps[:3]
    assert steps == list(minibatch_indices(7, 3, 2, seed=(42, 5))), "a resumed run takes the same"
    assert steps != list(minibatch_indices(7, 3, 2, seed=(42, 6)))


def test_ratios_of_all_epochs_are_relative_to_the_weights_before_the_first_step() -> None:
    samples = batch(6)
    with trainer(minibatches=2, epochs=3) as learner, trainer() as by_hand:
        metrics = learner.step(LearnerBatch(4, samples))
        old = by_hand.model.log_probs(samples)
        for indices in minibatch_indices(6, 2, 3, (0, 4)):
            by_hand.update([samples[i] for i in indices], "policy", [old[i] for i in indices])
        assert (learner.step_count, learner.batches, metrics["learner/sequences"]) == (6, 1, 18)
        assert metrics["policy/ratio_max"] > 1
        for name, values in by_hand.adapter().tensors.items():
            np.testing.assert_array_equal(learner.adapter().tensors[name], values)
        learner.step(LearnerBatch(5, samples, "sft"))
        assert learner.step_count == 7, "demonstrations are passed through once"


def test_epochs_count_passes_through_the_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f'{{"id": "q{i}", "question": "What?", "answers": ["7"]}}\n' for i in range(10))
    (tmp_path / "rows.jsonl").write_text(rows)
    overrides = [f"data.train={tmp_path}/rows.jsonl", "rft.prompts_per_step=4", "rft.epochs=2"]
    assert rft.with_steps(load(None, overrides)).rft.steps == 5
    assert "5 steps of 4 from 10 questions" in capsys.readouterr().out
    assert rft.with_steps(load(None, [*overrides, "data.limit=4"])).rft.steps == 2
    assert rft.with_steps(load(None, ["rft.steps=7"])).rft.steps == 7
    with pytest.raises(BadConfig, match="no end"):
        rft.with_steps(load(None, ["rft.epochs=1"]))
    assert count_questions("cards:?split=train", limit=30) == 30


def test_epochs_of_ttrl_count_rows_without_answers(tmp_path: Path) -> None:
    rows = "".join(f'{{"id": "q{i}", "problem": "What?", "images": []}}\n' for i in range(10))
    (tmp_path / "rows.jsonl").write_text(rows)
    overrides = [f"data.train={tmp_path}/rows.jsonl?format=easyr1", "rft.prompts_per_step=4", "rft.epochs=2"]
    assert rft.with_steps(load(None, [*overrides, "rewards.preset=ttrl"])).rft.steps == 5
    with pytest.raises(BadInput, match="answer: is missing"):
        rft.with_steps(load(None, overrides))
