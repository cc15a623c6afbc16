"""Qwen3.5: packed rows and shared prompts are exact, gradients included, and a policy learns from its rollouts."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
import torch
from tiny_policy import Maker, folder, policy, spec, stock, stock_log_probs
from tiny_trainer import learner_with, trainer

from pixelis import config
from pixelis.dialogue.session import SamplingParams
from pixelis.engines.hf import HfEngine
from pixelis.errors import BadConfig
from pixelis.families.features import concatenate
from pixelis.policy.advantages import batch_advantages
from pixelis.policy.architecture import Architecture
from pixelis.policy.log_probs import banned_mask, token_log_probs
from pixelis.policy.lora import add_lora
from pixelis.policy.packing import collate
from pixelis.policy.samples import TrainSample
from pixelis.policy.sequence_parallel import SequenceGroup


def samples_of(maker: Maker) -> list[TrainSample]:
    """Two groups of rollouts, one with a prompt shorter than the convolution, and a single episode."""
    group = [maker.sample(turns=1 + i % 3) for i in range(4)]
    start = int(group[0].mask.argmax())
    for sample in group:
        sample.tokens[:start], sample.views[0] = group[0].tokens[:start], group[0].views[0]
    for length in (5, 9, 2):
        answer = [*maker.text(length), maker.spec.stop]
        tokens = np.asarray([7, 8, *answer])
        group.append(
            TrainSample(tokens, np.arange(len(tokens)) > 1, np.zeros(len(tokens), np.float32), 1.0, [])
        )
    return [*group, maker.sample()]


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_loss_and_gradient_of_packed_samples_are_those_of_transformers_one_by_one(family: str, lora: bool):
    samples, s = samples_of(Maker(family)), spec(family)
    model = stock(family)
    if lora:
        add_lora(model, config.LoraConfig(rank=2), seed=1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
    tokens = sum(sample.policy_tokens for sample in samples)

    def gradient(log_probs: torch.Tensor) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        loss = -log_probs.sum() / tokens
        loss.backward()
        trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert any("linear_attn" in name for name in trained)
        return float(loss.detach()), torch.cat([g.flatten() for g in trained.values()])

    loss, expected = gradient(torch.cat([stock_log_probs(model, sample) for sample in samples]))
    s.family.attend_packed(model)
    lengths = []
    for share in (False, True):
        batch = collate(samples, s, share)
        lengths.append(len(batch.tokens))
        features = concatenate(s.family.encode_views(model, s, batch.views))
        log_probs = token_log_probs(model, s, batch, features, banned_mask(s.banned, s.vocab))[0]
        packed, found = gradient(log_probs)
        assert abs(packed - loss) < 1e-5
        assert (found - expected).norm() < 1e-5 * expected.norm()
    assert lengths[1] < lengths[0], "prompts are held once"


@pytest.mark.slow
@pytest.mark.long
def test_a_policy_learns_from_its_rollouts_to_tell_dark_pictures_from_bright_ones():
    """SFT teaches two answers without regard to the picture; the reward says which belongs to it."""
    maker, family, rate = Maker("qwen3_5"), "qwen3_5", []
    prompt, words = maker.text(3), maker.text(2)
    settings = policy(family, full=True)

    def question(bright: bool) -> tuple[list[int], np.ndarray]:
        view = maker.rng.integers(0, 64, (32, 32, 3), dtype=np.uint8) + np.uint8(191 * bright)
        return [*prompt, *maker.image(view), *prompt], view

    def sample(tokens: list[int], view: np.ndarray, answer: list[int], log_probs: list[float]) -> TrainSample:
        mask = np.arange(len(tokens) + len(answer)) >= len(tokens)
        values = np.asarray([0.0] * len(tokens) + log_probs, np.float32)
        return TrainSample(np.asarray([*tokens, *answer]), mask, values, 0.0, [view])

    async def body() -> None:
        engine = HfEngine(folder(family), settings, config.EngineConfig(max_num_seqs=64))
        with trainer(family, policy=settings, learner=learner_with(lr=6e-3), total_steps=60) as learner:
            for _ in range(20):
                answers = [[word, maker.spec.stop] for word in words]
                learner.update([sample(*question(b), a, [0.0] * 2) for b in (0, 1) for a in answers], "sft")
            for step in range(40):
                await engine.load(step, learner.adapter())
                samples, rewards = [], []
                for bright in (False, True):
                    tokens, view = question(bright)
                    sessions = [await engine.open(prefix_key=str(bright)) for _ in range(32)]
                    sampling = SamplingParams(max_tokens=2, seed=step)
                    said = await asyncio.gather(*(s.generate(tokens, [view], sampling) for s in sessions))
                    rewards.append([float(answer.tokens[0] == words[bright]) for answer in said])
                    samples += [sample(tokens, view, answer.tokens, answer.log_probs) for answer in said]
                    for session in sessions:
                        session.close()
                advantages = batch_advantages(rewards, config.AdvantageConfig())
                for each, advantage in zip(samples, itertools.chain(*advantages), strict=True):
                    each.advantage = advantage or 0.0
                rate.append(float(np.mean(rewards)))
                if rate[-1] == 1:  # no group has an advantage
                    break
                assert learner.update(samples)["policy/drift"] < 1e-4, "learner and engine agree"
        await engine.aclose()

    asyncio.run(body())
    assert np.mean(rate[:3]) < 0.7
    assert rate[-1] == 1


def test_workers_cannot_divide_a_row_with_states():
    text = Architecture(policy("qwen3_5")).text
    with pytest.raises(BadConfig, match="linear_attention"):
        SequenceGroup(2, 0, None).check(text)
