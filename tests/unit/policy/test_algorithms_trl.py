"""The losses against TRL's GRPOTrainer, called as it is on its own padded layout.

Runs where TRL is installed (1.16).
"""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from pixelis import config
from pixelis.policy.losses import Spans, Totals, policy_loss, token_weights

pytest.importorskip("trl", reason="TRL is a reference to compare with, not a dependency")
from trl.trainer.grpo_trainer import GRPOTrainer

LENGTHS = [5, 1, 12, 7, 3, 9]
MASK = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]


def trl_loss(
    inputs: dict[str, torch.Tensor], new: torch.Tensor, **settings: object
) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """`GRPOTrainer._compute_loss` with log-probabilities given: all it reads of a trainer are its
    settings.
    """
    arguments = {
        "delta": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "use_bias_correction_kl": False,
    }
    arguments = SimpleNamespace(
        **{k: settings.pop(k, v) for k, v in arguments.items()}, steps_per_generation=1
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
        args=arguments,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.28,
        use_vllm="importance_sampling_ratio" in inputs,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=20,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    trainer.__dict__.update(settings)
    return GRPOTrainer._compute_loss(trainer, None, inputs), trainer._metrics["train"]


def random_batch(seed: int, spread: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(size: float) -> torch.Tensor:
        return size * torch.randn(MASK.shape, generator=generator)

    old = -noise(1.0).abs()
    behaviour, reference = old + noise(0.3), old + noise(0.2)
    advantages = torch.randn(len(LENGTHS), generator=generator)
    return {
        "old": old,
        "new": old + noise(spread),
        "behaviour": behaviour,
        "reference": reference,
        "advantages": advantages,
    }


CASES = {
    "grpo": ({"aggregate": "sequence", "clip_high": 0.28, "kl": 0.04}, {"loss_type": "grpo", "beta": 0.04}),
    "dapo": ({"clip_high": 0.28}, {"loss_type": "dapo"}),
    "dr_grpo": (
        {"aggregate": "constant", "constant_tokens": 20, "clip_high": 0.28},
        {"loss_type": "dr_grpo"},
    ),
    "two_sided": ({"clip_high": 0.28, "dual_clip": 1.5}, {"loss_type": "dapo", "delta": 1.5}),
    "gspo": (
        {"aggregate": "sequence", "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 3e-4,
            "epsilon_high": 4e-4,
        },
    ),
    "cispo": (
        {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.2},
        {"loss_type": "cispo", "epsilon_high": 1.2},
    ),
    "sapo": ({"surrogate": "sapo", "aggregate": "sequence"}, {"loss_type": "sapo"}),
}


@pytest.mark.parametrize(
    "correction", [None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_clip_shares_are_those_of_trl(name: str, correction: str | None):
    keys, theirs = CASES[name]
    batch = random_batch(3, 1e-3 if name == "gspo" else 0.3)
    new = batch["new"].clone().requires_grad_()
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1),
        "prompt_mask": torch.ones(len(LENGTHS), 1),
        "completion_ids": torch.zeros(MASK.shape),
        "completion_mask": MASK.float(),
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old"],
        "ref_per_token_logps": batch["reference"],
        "num_items_in_batch": MASK.sum(),
    }
    if correction:
        # As in GRPOTrainer._generate_and_score_completions.
        difference = (batch["old"] - batch["behaviour"]) * MASK
        weight = torch.exp(
            difference.sum(-1, keepdim=True) if correction.startswith("sequence") else difference
        )
        is_mask = correction.endswith("mask")
        weight = (
            weight.masked_fill((weight > 1.3) | (weight < 0.6), 0.0) if is_mask else weight.clamp(0.6, 1.3)
        )
        inputs["importance_sampling_ratio"] = weight
    expected, metrics = trl_loss(inputs, new, **theirs)
    expected.backward()

    sizes = torch.tensor(LENGTHS)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), sizes)
    level, kind = (correction or "token_none").split("_")
    settings = config.LossConfig(
        **keys, importance=kind, importance_level=level, importance_cap=1.3, importance_floor=0.6
    )
    packed = {k: v[MASK] for k, v in batch.items() if k != "advantages"}
    own = packed["new"].clone().requires_grad_()
    totals = Totals(sum(LENGTHS), len(LENGTHS))
    loss, sums = policy_loss(
        own,
        packed["behaviour"],
        batch["advantages"][sequence],
        token_weights(sequence, sizes, settings.aggregate, totals, settings.constant_tokens),
        settings,
        old=packed["old"],
        reference=packed["reference"] if settings.kl else None,
        spans=Spans(sequence, sizes),
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6)
    assert float((own.grad - new.grad[MASK]).abs().max()) < 1e-6
    assert not new.grad[~MASK].any()
    if settings.surrogate == "clip" and settings.ratio == "token" and not settings.dual_clip:
        assert float(sums["clipped_low"]) / sum(LENGTHS) == pytest.approx(metrics["clip_ratio/low_mean"][0])
        assert float(sums["clipped_high"]) / sum(LENGTHS) == pytest.approx(metrics["clip_ratio/high_mean"][0])
    if settings.kl:
        assert math.isclose(float(sums["kl"]) / sum(LENGTHS), metrics["kl"][0], rel_tol=1e-5)
