"""On-policy distillation: its gradient against independent ones, and teachers that score inside a learner."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import Maker, check_log_probs, folder, merged, policy, random_adapter, stock
from tiny_trainer import SMALL, batch, learner_with, trainer

from pixelis import config
from pixelis.errors import BadConfig
from pixelis.families.spec import load_tokenizer
from pixelis.policy.losses import policy_loss
from pixelis.policy.samples import TrainSample
from pixelis.policy.teacher_model import TeacherModel
from pixelis.policy.token_advantages import add_teacher_advantages

number = st.floats(-4, 4, width=32)
distributions = st.integers(2, 7).flatmap(
    lambda n: st.tuples(*[st.lists(number, min_size=n, max_size=n)] * 2)
)


def sum_alone(values: list[float], largest: int = 0) -> list[float]:
    return values


def one_of_each(log_probs: np.ndarray) -> TrainSample:
    """A sample whose policy tokens are all tokens of a vocabulary, with these log-probabilities."""
    n = len(log_probs)
    mask = np.asarray([False, *[True] * n])
    return TrainSample(np.arange(n + 1), mask, np.append(0, log_probs).astype(np.float32), 0.0, [])


@given(distributions, st.floats(0.1, 3))
def test_the_expected_gradient_is_that_of_the_reverse_kl(pair: tuple, weight: float) -> None:
    logits = torch.tensor(pair[0], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor(pair[1], dtype=torch.float64), -1)
    student = torch.log_softmax(logits, -1)
    expected = torch.autograd.grad(weight * (student.exp() * (student - teacher)).sum(), logits)[0]

    student = torch.log_softmax(logits, -1)
    p = student.detach()
    sample = one_of_each(p.numpy())
    metrics = add_teacher_advantages([sample], [teacher.numpy()], weight, sum_alone)
    # Each token as often as the policy samples it
    advantages = torch.from_numpy(sample.token_advantages).double()
    loss, _ = policy_loss(student, p, advantages, p.exp(), config.LossConfig())
    gradient = torch.autograd.grad(loss, logits)[0]
    assert gradient.numpy() == pytest.approx(expected.numpy(), abs=5e-6)
    assert metrics["teacher/kl"] == pytest.approx(float((p - teacher).mean()), abs=1e-5)


@given(distributions, st.integers(0, 2**31))
def test_the_gradient_on_sampled_tokens_is_the_score_function_form(pair: tuple, seed: int) -> None:
    n, rng = len(pair[0]), np.random.default_rng(seed)
    logits = torch.tensor(pair[0], dtype=torch.float64).repeat(5, 1).requires_grad_()
    teacher = torch.log_softmax(torch.tensor(pair[1], dtype=torch.float64), -1)
    tokens = torch.from_numpy(rng.integers(0, n, 5))
    reward = np.float32(rng.normal())

    chosen = torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]
    cost = chosen.detach() - teacher[tokens] - float(reward)
    expected = torch.autograd.grad((cost * chosen).mean(), logits)[0]

    new = torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]
    sample = one_of_each(new.detach().numpy())
    sample.advantage = float(reward)
    add_teacher_advantages([sample], [teacher[tokens].numpy()], 1.0, sum_alone)
    advantages = torch.from_numpy(sample.token_advantages).double()
    weights = torch.full((5,), 0.2, dtype=torch.float64)
    loss, _ = policy_loss(new, new.detach(), advantages, weights, config.LossConfig())
    assert torch.autograd.grad(loss, logits)[0].numpy() == pytest.approx(expected.numpy(), abs=1e-6)


def test_a_sample_without_a_teacher_keeps_its_advantage_and_others_add_to_token_advantages() -> None:
    alone, both = one_of_each(np.full(3, -1.0)), one_of_each(np.full(2, -1.0))
    alone.advantage, both.token_advantages = 0.5, np.asarray([1.0, -1.0], np.float32)
    metrics = add_teacher_advantages([alone, both], [None, np.asarray([-2.0, -0.5])], 2.0, sum_alone)
    assert alone.token_advantages.tolist() == [0.5] * 3
    assert both.token_advantages.tolist() == [-1.0, 0.0]
    assert metrics["teacher/kl"] == pytest.approx(0.25)
    assert metrics["advantage/max"] == pytest.approx(0.5)
    assert metrics["advantage/min"] == pytest.approx(-1.0)


def of_one_prompt(count: int) -> list[TrainSample]:
    maker = Maker(seed=4)
    view = maker.view()
    first = maker.sample(turns=1, view=view)
    start = int(first.mask.argmax())
    samples = []
    for _ in range(count):
        own = maker.sample(turns=1, view=view, advantage=0.0)
        own.tokens[:start] = first.tokens[:start]
        samples.append(own)
    return samples


@pytest.mark.parametrize("learner", [SMALL, learner_with()], ids=["short-rows", "shared-prompts"])
def test_a_teacher_of_the_same_base_scores_in_the_learner_as_its_own_model_would(
    learner: config.LearnerConfig,
) -> None:
    teacher = random_adapter(seed=2)
    samples = [*batch(4), *of_one_prompt(4)]
    with trainer(adapter=random_adapter(seed=1), learner=learner) as student:
        before = student.adapter().sha256()
        shards, base = (student.model.shards_of(adapter) for adapter in (teacher, None))
        assert student.adapter().sha256() == before
        with student.model.zero.using(shards):
            check_log_probs(merged(teacher), samples, student.model.log_probs(samples))
        with student.model.zero.using(base):
            check_log_probs(merged(random_adapter(size=0.0)), samples, student.model.log_probs(samples))
        assert student.adapter().sha256() == before


def test_another_model_scores_as_its_own_forward_and_a_foreign_one_is_refused(tmp_path: Path) -> None:
    samples = [*batch(4), *of_one_prompt(4)]
    same = TeacherModel(policy(), SMALL, str(folder("qwen3_vl")), 1.0, "cpu")
    check_log_probs(stock(), samples, same.log_probs(samples))
    long = batch(1)[0]
    long.tokens = np.tile(long.tokens, 20)
    assert [len(values) for values in same.log_probs([long])] == [0]
    other = shutil.copytree(folder("qwen3_vl"), tmp_path / "other")
    tokenizer = load_tokenizer(other)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(BadConfig, match="another vocabulary"):
        TeacherModel(policy(), SMALL, str(other), 1.0, "cpu")


def test_a_student_approaches_its_teacher_without_any_reward() -> None:
    # Fresh samples of the student itself are the Ray test's: here its probabilities weigh fixed ones.
    samples = of_one_prompt(6)
    with trainer(learner=learner_with(lr=1e-3)) as student:
        shards = student.model.shards_of(random_adapter(seed=2, size=0.3))
        distances = []
        for _ in range(12):
            own = student.model.log_probs(samples)
            with student.model.zero.using(shards):
                scores = student.model.log_probs(samples)
            for sample, log_probs in zip(samples, own, strict=True):
                sample.log_probs[sample.mask], sample.token_advantages = log_probs, None
            add_teacher_advantages(samples, scores, 1.0, student.model.sequence.sum)
            distances.append(float(np.mean(np.abs(np.concatenate(own) - np.concatenate(scores)))))
            assert student.update(samples)["learner/trained_sequences"] == 6
    assert distances[-1] < 0.7 * distances[0]
