"""What evolution asks of the learner's step: rate and KL weight of a batch, a step too far, the average."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_policy import check_log_probs, policy, random_adapter, stock
from tiny_trainer import batch, learner_with, trainer

from pixelis import config
from pixelis.errors import BadInput
from pixelis.policy.adapters import Adapter
from pixelis.policy.samples import TrainSample
from pixelis.policy.train_step import Trainer


def state_of(learner: Trainer) -> dict[str, np.ndarray]:
    return {**learner.adapter().tensors, **learner.model.zero.moments()}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return set(one) == set(other) and all(np.array_equal(a, other[n]) for n, a in one.items())


def record(learner: Trainer, samples: list[TrainSample]) -> None:
    """Makes the log-probabilities of the learner those of the rollouts."""
    for sample, own in zip(samples, learner.model.log_probs(samples), strict=True):
        sample.log_probs[sample.mask] = own


def test_the_measured_kl_is_that_from_the_recorded_policy():
    samples = batch()
    with trainer() as learner:
        record(learner, samples)
        assert learner.model.behaviour_kl(samples) == pytest.approx(0, abs=1e-12)
        metrics = learner.update(samples, lr=1e-3, kl_limit=1.0)
        pairs = zip(samples, learner.model.log_probs(samples), strict=True)
        r = np.concatenate([new - sample.log_probs[sample.mask] for sample, new in pairs])
        assert metrics["evolve/kl"] == pytest.approx(float(np.mean(np.exp(r) - 1 - r)), rel=1e-4)
        assert metrics["evolve/kl"] > 1e-6
        assert (metrics["policy/lr"], metrics["evolve/skipped"]) == (1e-3, 0)
        samples[0].log_probs = samples[0].log_probs - 1e4  # no likelihood at all once: further than any limit
        assert learner.update(samples, kl_limit=1e9)["evolve/skipped"] == 1


@pytest.mark.parametrize(("stage", "full"), [(0, False), (1, False), (2, False), (1, True)])
def test_a_step_too_far_changes_nothing(stage: int, full: bool):
    samples = batch(3)
    with trainer(learner=learner_with(zero_stage=stage), policy=policy(full=full)) as learner:
        record(learner, samples)
        start = learner.adapter().tensors
        # Before there are moments
        assert learner.update(samples, lr=0.5, kl_limit=0.1)["evolve/skipped"] == 1
        assert same(learner.adapter().tensors, start)
        taken = learner.update(samples, lr=1e-5, kl_limit=0.1)
        assert (taken["evolve/skipped"], taken["learner/skipped"]) == (0, 0)
        before = state_of(learner)
        refused = learner.update(samples, lr=0.5, kl_limit=0.1)
        assert refused["evolve/skipped"] == 1
        assert refused["evolve/kl"] > 0.1
        assert same(state_of(learner), before)
    with trainer(learner=learner_with(zero_stage=stage), policy=policy(full=full)) as other:
        other.update(samples, lr=1e-5)
        assert same(other.adapter().tensors, {n: before[n] for n in start}), "it is as if it had not been"


@pytest.mark.slow
def test_the_weight_of_the_kl_term_may_change_from_step_to_step():
    samples = batch()
    drawn = {}
    for weight in (0.0, 0.01, 10.0):
        with trainer(loss=config.LossConfig(kl=0.01), adapter=random_adapter()) as learner:
            learner.update(samples)
            drawn[weight] = learner.update(samples, kl_weight=weight)["policy/loss"]
            repeated = learner.update(samples)["policy/loss"]
        with trainer(loss=config.LossConfig(kl=0.01), adapter=random_adapter()) as plain:
            plain.update(samples)
            if weight == 0.01:
                assert plain.update(samples)["policy/loss"] == drawn[weight]
                assert plain.update(samples)["policy/loss"] == repeated
    assert drawn[0.0] < drawn[0.01] < drawn[10.0]


def test_the_published_weights_are_the_average_and_a_checkpoint_keeps_it(tmp_path: Path):
    batches = [batch(3, seed=s) for s in range(5)]
    with trainer(ema=0.9, adapter=random_adapter()) as learner, trainer(adapter=random_adapter()) as newest:
        expected = learner.adapter().tensors
        for i, samples in enumerate(batches):
            learner.update(samples)
            newest.update(samples)
            assert same(learner.adapter().tensors, newest.adapter().tensors)
            assert newest.served().sha256() == newest.adapter().sha256()
            new = learner.adapter().tensors
            expected = {n: np.float32(0.9) * a + np.float32(0.1) * new[n] for n, a in expected.items()}
            assert all(np.allclose(a, expected[n], atol=1e-7) for n, a in learner.served().tensors.items())
            if i == 2:
                folder = learner.save(tmp_path)
        served, whole = learner.served(), learner.adapter()
    assert served.sha256() != whole.sha256()
    with trainer(ema=0.9) as resumed:
        resumed.restore(folder)
        for samples in batches[3:]:
            resumed.update(samples)
        assert resumed.served().sha256() == served.sha256()
        assert resumed.adapter().sha256() == whole.sha256()


def test_a_reset_discards_everything_learnt_since():
    start, samples = random_adapter(), batch(3)
    with trainer(ema=0.5, adapter=start) as learner, trainer(ema=0.5, adapter=start) as fresh:
        for _ in range(2):
            learner.update(samples)
        learner.reset_to(start)
        assert learner.served().sha256() == learner.adapter().sha256() == start.sha256()
        learner.update(samples)
        fresh.update(samples)
        assert same(learner.adapter().tensors, fresh.adapter().tensors)
        assert learner.served().sha256() == fresh.served().sha256()
        learner.reset_to(None)
        check_log_probs(stock(), samples, learner.model.log_probs(samples))
        with pytest.raises(BadInput, match="rank"):
            learner.reset_to(Adapter(start.tensors, start.alpha, 2, start.base_sha256))
    with trainer(policy=policy(full=True)) as full, pytest.raises(BadInput, match="base model"):
        full.reset_to(None)
