"""PPO's advantages of tokens against their definitions; the critic in a learner: its loss, its resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import policy, random_adapter
from tiny_trainer import LEARNER, batch, learner_with, trainer

from pixelis import config
from pixelis.errors import BadConfig
from pixelis.policy.critic import Critic
from pixelis.policy.samples import TrainSample
from pixelis.policy.token_advantages import assign_token_advantages, token_returns, whitened
from pixelis.policy.train_step import Trainer

PPO = config.RftConfig(algorithm="ppo")
number = st.floats(-3, 3, width=32)
rows = st.integers(1, 12).flatmap(lambda n: st.tuples(*[st.lists(number, min_size=n, max_size=n)] * 2))


@given(rows, number, st.floats(0.5, 1), st.floats(0, 1))
def test_gae_is_the_weighted_sum_of_the_errors_that_follow(
    row: tuple, reward: float, gamma: float, lam: float
) -> None:
    penalties, values = (np.asarray(part, np.float32) for part in row)
    n = len(values)
    rewards = [-float(p) for p in penalties]
    rewards[-1] += reward
    following = [*map(float, values[1:]), 0.0]
    deltas = [rewards[t] + gamma * following[t] - float(values[t]) for t in range(n)]
    expected = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]
    advantages, returns = token_returns(reward, penalties, values, gamma, lam)
    assert advantages == pytest.approx(expected, abs=1e-6)
    assert returns == pytest.approx(advantages + values, abs=1e-9)


def test_tokens_are_whitened_over_all_workers() -> None:
    everything = [np.asarray([1.0, 2.0, 4.0]), np.asarray([0.0, -3.0])]
    flat = np.concatenate(everything)
    whole = np.concatenate(whitened(everything, 0.0, list))
    assert whole == pytest.approx((flat - flat.mean()) / flat.std(ddof=1))
    assert all(not row.any() for row in whitened([np.full(3, 0.7)], 1e-8, list))
    assert whitened([], 1e-8, list) == []


def test_the_value_loss_is_the_clipped_one() -> None:
    critic = Critic(8, config.CriticConfig(), seed=0, device=torch.device("cpu"))
    hidden, returns, old = torch.randn(6, 8), torch.linspace(-1, 1, 6), torch.linspace(0.5, -0.5, 6)
    for parameter in critic.head.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    v = critic.head(hidden)[:, 0]
    expected = sum(
        0.5
        * max((v[i] - returns[i]) ** 2, (old[i] + torch.clamp(v[i] - old[i], -0.2, 0.2) - returns[i]) ** 2)
        for i in range(6)
    )
    gradients = torch.autograd.grad(expected / 6, list(critic.head.parameters()))
    sums = critic.backward(hidden.requires_grad_(), returns, old, torch.full((6,), 1 / 6))
    assert sums["critic_loss"] == pytest.approx(expected.item(), rel=1e-5)
    for parameter, gradient in zip(critic.head.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert hidden.grad is None, "the policy's states are not trained by the critic"


def prepared(
    learner: Trainer, samples: list[TrainSample], settings: config.RftConfig = PPO
) -> dict[str, float]:
    rewards = [float(i % 2) for i in range(len(samples))]
    return assign_token_advantages(learner, samples, rewards, settings.advantage)


def test_a_token_of_reinforce_pp_pays_for_the_divergence_from_it_on() -> None:
    settings = config.RftConfig.model_validate({"algorithm": "reinforce_pp", "advantage": {"scale": "none"}})
    assert settings.by_token
    samples = batch(4)
    with trainer(loss=settings.loss, adapter=random_adapter()) as learner:
        divergences = learner.model.token_kl(samples)
        metrics = prepared(learner, samples, settings)
        for index, (sample, kl) in enumerate(zip(samples, divergences, strict=True)):
            expected = index % 2 - 0.01 * np.cumsum(kl[::-1], dtype=np.float64)[::-1]
            assert sample.token_advantages == pytest.approx(expected, abs=1e-5)
        assert metrics["policy/kl_in_reward"] == pytest.approx(np.concatenate(divergences).mean(), abs=1e-5)
        assert learner.update(samples)["learner/trained_sequences"] == 4


def test_equal_token_advantages_train_as_those_of_the_trajectory() -> None:
    losses = []
    for by_token in (False, True):
        samples = batch(4)
        if by_token:
            for sample in samples:
                sample.token_advantages = np.full(sample.policy_tokens, sample.advantage, np.float32)
        with trainer() as learner:
            losses.append([learner.update(samples)["policy/loss"], learner.adapter().sha256()])
    assert losses[0] == losses[1]


def test_a_critic_learns_the_returns_and_is_no_part_of_the_policy() -> None:
    critic = config.CriticConfig(lr=1e-2, clip=10.0)
    loss = PPO.loss.model_copy(update={"kl": 0.0})
    with trainer(loss=loss, critic=critic, learner=learner_with(lr=1e-9)) as learner:
        history = []
        for _ in range(30):
            samples = batch(6)
            metrics = prepared(learner, samples) | learner.update(samples)
            history.append((metrics["policy/critic_loss"], metrics["critic/explained_variance"]))
        assert history[-1][0] < 0.2 * history[0][0]
        assert history[-1][1] > 0.5 > history[0][1]
        assert not any("head" in name for name in learner.adapter().tensors)


def test_ppo_resumes_exactly_and_steps_the_same_however_its_batch_is_packed(tmp_path: Path) -> None:
    loss, critic = PPO.loss, PPO.critic

    def step(learner: Trainer) -> dict[str, float]:
        samples = batch(5)
        return prepared(learner, samples) | learner.update(samples)

    with trainer(loss=loss, critic=critic) as learner:
        unsplit = step(learner)
        learner.save(tmp_path)
        expected = step(learner), learner.model.critic.tensors()  # type: ignore[union-attr]
    (folder,) = (tmp_path / "checkpoints").iterdir()
    with trainer(loss=loss, critic=critic) as resumed:
        resumed.restore(folder)
        repeated = step(resumed), resumed.model.critic.tensors()  # type: ignore[union-attr]
    assert {k: v for k, v in repeated[0].items() if k.startswith(("policy", "critic"))} == {
        k: v for k, v in expected[0].items() if k.startswith(("policy", "critic"))
    }
    assert all(np.array_equal(repeated[1][name], expected[1][name]) for name in expected[1])
    with trainer(loss=loss, critic=critic, learner=learner_with(row_tokens=96, rows=1)) as small:
        split = step(small)
    assert split["learner/micro_batches"] > unsplit["learner/micro_batches"]
    for key in ("policy/loss", "policy/critic_loss", "policy/grad_norm", "critic/value"):
        assert split[key] == pytest.approx(unsplit[key], rel=1e-3, abs=1e-5), key


def test_the_kl_weight_follows_its_target_and_is_resumed(tmp_path: Path) -> None:
    loss = config.LossConfig(kl=0.1, kl_target=1e-9)
    with trainer(loss=loss, adapter=random_adapter()) as learner:
        learner.model.reference = Trainer(
            policy(), LEARNER, loss, total_steps=1, device="cpu"
        ).model.reference
        learner.update(batch())
        assert learner.update(batch())["policy/kl_weight"] == pytest.approx(0.1 * 1.02)
        assert learner.rft.kl_coefficient == pytest.approx(0.1 * 1.02**2)
        learner.rft.adapt_kl(0.0)
        assert learner.rft.kl_coefficient == pytest.approx(0.1 * 1.02**2 * 0.98)
        learner.save(tmp_path)
        (folder,) = (tmp_path / "checkpoints").iterdir()
    with trainer(loss=loss, adapter=random_adapter()) as resumed:
        resumed.restore(folder)
        assert resumed.rft.kl_coefficient == pytest.approx(0.1 * 1.02**2 * 0.98)
    with pytest.raises(BadConfig, match="must start above 0"):
        config.load(None, ["rft.loss.kl_target=0.1"])
