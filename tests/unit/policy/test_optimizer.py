"""AdamW with bfloat16 moments follows torch's, in half the memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import policy
from tiny_trainer import batch, learner_with, trainer

from pixelis.policy import adamw
from pixelis.policy.adamw import AdamW, round_at_random


@given(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), st.integers(0, 2**32))
def test_rounding_gives_a_neighbour_and_its_mean_is_the_value(value: float, seed: int) -> None:
    generator, exact = torch.Generator().manual_seed(seed), torch.full((4096,), value)
    rounded = round_at_random(exact.clone(), generator).double()
    toward_zero = (exact[:1].view(torch.int32) >> 16 << 16).view(torch.float32)
    away = (toward_zero.view(torch.int32) + (1 << 16)).view(torch.float32)
    spacing = abs(float(away.double() - toward_zero.double()))
    assert set(rounded.tolist()) <= {float(toward_zero), float(away)}
    # Five standard errors, of a spread of half at most
    assert abs(float(rounded.mean()) - value) <= 5 * spacing / 2 / 4096**0.5


def test_it_takes_about_the_steps_of_torch_and_in_chunks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "CHUNK", 1000)
    torch.manual_seed(0)
    start, target = torch.randn(60, 70), torch.randn(60, 70)
    results = []
    for kind in (torch.optim.AdamW, AdamW):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = kind([parameter], lr=0.02, betas=(0.9, 0.99), weight_decay=0.1)
        for _ in range(50):
            optimizer.zero_grad()
            ((parameter - target) ** 2).sum().backward()
            optimizer.step()
        results.append(parameter.detach())
        state = optimizer.state[parameter]
    moved = (results[0] - start).norm()
    assert (results[1] - results[0]).norm() < 0.02 * moved
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "full"), [(0, False), (2, True), pytest.param(3, True, marks=pytest.mark.long)]
)
def test_training_follows_float32_moments_and_resumes_exactly(stage: int, full: bool, tmp_path: Path) -> None:
    losses, batches = {}, [batch(4, seed=s) for s in range(12)]
    for moments in ("float32", "bfloat16"):
        learner = learner_with(zero_stage=stage, moments=moments, lr=1e-3)
        with trainer(learner=learner, policy=policy(full=full)) as trained:
            losses[moments] = []
            for step, samples in enumerate(batches):
                losses[moments].append(trained.update(samples, "sft")["policy/loss"])
                if step == 7:
                    folder = trained.save(tmp_path / moments)
            final = trained.adapter().tensors
    assert np.abs(np.divide(losses["bfloat16"], losses["float32"]) - 1).max() < 0.01
    with trainer(learner=learner, policy=policy(full=full), seed=99) as resumed:
        resumed.restore(folder)
        for samples in batches[8:]:
            resumed.update(samples, "sft")
        assert all(np.array_equal(values, final[name]) for name, values in resumed.adapter().tensors.items())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.long)])
def test_an_offloaded_optimizer_takes_the_same_steps_in_one_pass_and_resumes_exactly(
    stage: int, tmp_path: Path
) -> None:
    results, batches = {}, [batch(4, seed=s) for s in range(6)]
    for file in (None, f"configs/deepspeed/zero{stage}_offload.json"):
        learner = learner_with(zero_stage=stage, deepspeed=file, lr=1e-3)
        with trainer(learner=learner, policy=policy(full=True)) as trained:
            losses = []
            for step, samples in enumerate(batches):
                losses.append(trained.update(samples, "sft")["policy/loss"])
                if step == 3:
                    folder = trained.save(tmp_path / str(file is None))
            results[file] = losses, trained.adapter().tensors
            assert trained.model.zero._adam.defaults["fused"] == (file is not None)
    (plain, _), (offloaded, final) = results.values()
    assert offloaded == pytest.approx(plain, rel=1e-4)
    with trainer(learner=learner, policy=policy(full=True), seed=99) as resumed:
        resumed.restore(folder)
        for samples in batches[4:]:
            resumed.update(samples, "sft")
        assert all(np.array_equal(values, final[name]) for name, values in resumed.adapter().tensors.items())
