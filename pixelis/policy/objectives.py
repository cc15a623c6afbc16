"""What an optimizer step minimises: the loss of demonstrations (SFT) or of rollouts (RFT, evolution)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pixelis import config
from pixelis.policy.learner_model import LearnerModel
from pixelis.policy.log_probs import ReferenceStates
from pixelis.policy.losses import Spans, Totals, metric_names, policy_loss, sft_loss, token_weights
from pixelis.policy.packing import PackedBatch
from pixelis.policy.samples import TrainSample

KL_HORIZON = 10.0
"""Steps in which an adapted KL weight changes by a fifth at most."""


@dataclass(frozen=True)
class MicroBatch:
    """A packed batch and its samples; none for the empty batch of a worker that has fewer than the others.

    old: log-probabilities before the first step on the batch; reference: of the KL term.
    """

    batch: PackedBatch
    members: Sequence[TrainSample] = ()
    old: Float[Tensor, " tokens"] | None = None
    reference: Float[Tensor, " tokens"] | ReferenceStates | None = None

    def to(self, device: torch.device) -> MicroBatch:
        old = self.old.to(device) if self.old is not None else None
        reference = self.reference.to(device) if self.reference is not None else None
        return MicroBatch(self.batch.to(device), self.members, old, reference)

    def of_tokens(self, name: str) -> Float[Tensor, " tokens"]:
        """A field of the samples with one value per policy token, concatenated."""
        values = np.concatenate([getattr(sample, name) for sample in self.members])
        return torch.from_numpy(values).to(self.batch.tokens.device)


Sums = defaultdict[str, float]
"""Metrics of this worker, summed over tokens; those named `*_max` are maxima."""


def _add_outputs(sums: Sums, new: Tensor, entropy: Tensor) -> None:
    sums["policy_tokens"] += len(new)
    sums["entropy"] += float(entropy.sum())
    sums["nll"] -= float(new.detach().sum())


class SftObjective:
    """Weighted negative log-likelihood of the demonstrated tokens, with label smoothing."""

    no_sample_fix = (
        "no_policy_tokens: no turn of these demonstrations has `learn: true`, so there is nothing to imitate"
    )

    def __init__(self, model: LearnerModel, smoothing: float):
        self.model, self.smoothing = model, smoothing

    def size(self, sample: TrainSample) -> float:
        return sample.weight

    def trains(self, sample: TrainSample) -> bool:
        return True

    def references(self, batches: Sequence[PackedBatch], passes: int) -> Sequence[Tensor | ReferenceStates]:
        return ()

    def loss(self, micro: MicroBatch, totals: Totals, sums: Sums) -> Tensor:
        batch, is_real = micro.batch, bool(micro.members)
        new, entropy = self.model.forward(batch, self.smoothing)
        weights = float(is_real) * token_weights(
            batch.sequence[batch.mask], batch.policy_tokens, "token", totals
        )
        if is_real:
            _add_outputs(sums, new, entropy)
        return sft_loss(new, weights * batch.weights[batch.mask])

    def metric_names(self, measured: Iterable[str]) -> list[str]:
        return ["entropy", "nll"]


class PolicyObjective:
    """Policy gradient on rollouts, with a KL term to the starting policy, an entropy bonus and PPO's critic.

    kl_coefficient: weight of the KL term, adapted for `rft.loss.kl_target`; kl_weight: that of this step.
    """

    no_sample_fix = (
        "no_policy_tokens: no turn fitted dialogue.max_context; the episodes are in rollouts.jsonl of the run"
    )

    def __init__(self, model: LearnerModel, settings: config.LossConfig):
        self.model, self.settings = model, settings
        self.kl_weight = self.kl_coefficient = settings.kl

    @property
    def has_kl_term(self) -> bool:
        """Whether the loss itself, rather than the reward, has the KL term."""
        return self.model.reference is not None and self.settings.kl_in == "loss"

    def size(self, sample: TrainSample) -> float:
        return sample.policy_tokens

    def trains(self, sample: TrainSample) -> bool:
        """Whether a sample has a gradient. An advantage of 0 has none of its own."""
        others = self.settings.entropy != 0 or self.has_kl_term or self.model.critic is not None
        return others or sample.advantage != 0 or sample.token_advantages is not None

    def references(self, batches: Sequence[PackedBatch], passes: int) -> Sequence[Tensor | ReferenceStates]:
        """What the KL term needs, by batch."""
        if not self.has_kl_term:
            return ()
        if self.settings.kl_estimator == "full":
            return self.model.reference_states(batches, passes)
        return self.model.reference_log_probs(batches, passes)

    def loss(self, micro: MicroBatch, totals: Totals, sums: Sums) -> Tensor:
        """Loss of a micro-batch, with gradient. Adds the gradient of the critic's own loss."""
        batch, members, settings, reference = micro.batch, micro.members, self.settings, micro.reference
        states = reference if isinstance(reference, ReferenceStates) else None
        new, entropy, *divergence = self.model.forward(batch, reference=states)
        sequence = batch.sequence[batch.mask]
        weights = token_weights(
            sequence, batch.policy_tokens, settings.aggregate, totals, settings.constant_tokens
        )
        per_token = any(sample.token_advantages is not None for sample in members)
        loss, metrics = policy_loss(
            new,
            batch.behaviour[batch.mask],
            micro.of_tokens("token_advantages") if per_token else batch.advantages[sequence],
            float(bool(members)) * weights,
            settings if self.kl_weight == settings.kl else settings.model_copy(update={"kl": self.kl_weight}),
            old=micro.old,
            reference=reference if isinstance(reference, Tensor) else None,
            divergence=divergence[0] if divergence else None,
            entropy=entropy,
            spans=Spans(sequence, batch.policy_tokens),
        )
        if not members:
            sums.update({name: sums[name] for name in metrics})  # all workers report a user's metrics
            return loss
        _add_outputs(sums, new, entropy)
        values = torch.stack(list(metrics.values())).tolist() if metrics else []
        for name, value in zip(metrics, values, strict=True):
            sums[name] = max(sums[name], value) if name.endswith("_max") else sums[name] + value
        if self.model.critic is not None and self.model.hidden is not None:
            returns, before = micro.of_tokens("returns"), micro.of_tokens("values")
            size = torch.full_like(returns, 1.0 / totals.tokens)
            for name, value in self.model.critic.backward(self.model.hidden, returns, before, size).items():
                sums[name] += value
        return loss

    def metric_names(self, measured: Iterable[str]) -> list[str]:
        """Names of the metrics, maxima first, with those of a user-defined surrogate among `measured`."""
        names = [*metric_names(self.settings, self.has_kl_term), "entropy", "nll"]
        if self.model.critic is not None:
            names += ["critic_loss", "critic_clipped"]
        own = sorted({*measured} - {*names, "loss", "policy_tokens"})
        return [n for n in own if n.endswith("_max")] + names + [n for n in own if not n.endswith("_max")]

    def apply_critic(self) -> None:
        if self.model.critic is not None:
            self.model.critic.apply()

    def adapt_kl(self, divergence: float) -> None:
        """Adapt the KL weight to a step's divergence, for `rft.loss.kl_target` (arXiv 1909.08593, 2.2)."""
        target = self.settings.kl_target
        if target and math.isfinite(divergence):
            self.kl_coefficient *= 1 + min(max(divergence / target - 1, -0.2), 0.2) / KL_HORIZON
