"""The policy on one worker of the learner: its model under DeepSpeed, and forward passes without gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pixelis import config
from pixelis.errors import BadConfig
from pixelis.families.features import Features, concatenate
from pixelis.policy.adapters import Adapter, check_adapter, is_vision, without_change
from pixelis.policy.critic import Critic
from pixelis.policy.deepspeed_engine import Shards, ZeroEngine, deepspeed_config, ensure_process_group
from pixelis.policy.distributed import sum_over_workers
from pixelis.policy.forward import FeatureCache
from pixelis.policy.log_probs import PolicyModule, ReferenceStates
from pixelis.policy.lora import add_lora, lora_parameters
from pixelis.policy.model import default_device, load_model, pick_dtype
from pixelis.policy.model_path import fingerprint, resolve
from pixelis.policy.packing import PackedBatch, collate, usable_bins
from pixelis.policy.samples import TrainSample
from pixelis.policy.sequence_parallel import SequenceGroup


class LearnerModel:
    """The policy and its critic on one worker. All methods are collective.

    sequence: the workers that share a packed row; hidden: states of the last forward pass, with a critic.
    """

    def __init__(
        self,
        policy: config.PolicyConfig,
        learner: config.LearnerConfig,
        *,
        seed: int,
        temperature: float,
        adapter: Adapter | None,
        critic: config.CriticConfig | None,
        device: torch.device | str | None,
    ):
        self.policy, self.learner = policy, learner
        if temperature <= 0:
            raise BadConfig(
                "the temperature of the rollouts must be above 0", fix="set rft.sampling.temperature=1.0"
            )
        self.device = torch.device(device) if device is not None else default_device()
        dtype = pick_dtype(policy.dtype, self.device)
        torch.set_num_threads(max(1, int(learner.cpus)))
        ensure_process_group(self.device)
        bfloat16 = policy.full and dtype == torch.bfloat16
        settings = deepspeed_config(learner, bfloat16, self.device)
        divides = settings["zero_optimization"]["stage"] == 3 and dist.get_world_size() > 1
        self.network, self.tokenizer, self.spec = load_model(
            policy, self.device, zero3=settings if divides else None
        )
        self.base_sha256 = fingerprint(resolve(policy.model))
        self.sequence = SequenceGroup.create(learner.sequence_parallel)
        family = self.spec.family
        self.shares_prompts = family.attend_packed(self.network)
        text = family.language(self.network).config
        self.sequence.check(text)
        if policy.gradient_checkpointing:
            self.network.gradient_checkpointing_enable({"use_reentrant": False})
        if policy.full:
            for name, parameter in self.network.named_parameters():
                parameter.requires_grad_(not (policy.freeze_vision_tower and is_vision(name)))
            parameters = {name: p for name, p in self.network.named_parameters() if p.requires_grad}
        else:
            add_lora(self.network, policy.lora, seed)
            parameters = lora_parameters(self.network)
        # Under ZeRO-3 the module holds empty placeholders.
        self.shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}
        if adapter is not None:
            self.check(adapter)
        module = PolicyModule(self.network, self.spec, temperature, learner.zero_stage == 3, self.sequence)
        self.critic: Critic | None = None
        self.hidden: Tensor | None = None
        if critic is not None:
            self.critic = Critic(text.hidden_size, critic, seed, self.device)
            module.observe = functools.partial(setattr, self, "hidden")
        self.zero = ZeroEngine(module, parameters, learner, bfloat16, self.device)
        if adapter is not None:
            self.set(adapter)
        # A frozen vision tower always computes the same features. ZeRO-3 workers must all run it equally
        # often: no cache.
        self.features = FeatureCache() if not policy.trains_vision_tower and self.zero.stage < 3 else None
        self.reference: Shards | None = None
        """The policy from which the KL term measures."""

    def check(self, adapter: Adapter) -> None:
        check_adapter(adapter, self.policy, self.base_sha256, self.shapes)

    def set(self, adapter: Adapter) -> None:
        """Take an adapter's weights. Layers of the vision tower that it lacks get a product of 0."""
        weights = adapter.tensors
        if lacking := self.shapes.keys() - weights.keys():
            own = without_change(self.zero.weights())
            weights = {**weights, **{name: values for name, values in own.items() if name in lacking}}
        self.zero.set_weights(weights)

    def shards_of(self, adapter: Adapter | None) -> Shards:
        """What `zero.using` needs to compute with other weights (None: the base model); the current ones stay."""
        own = self.zero.weights()
        if adapter is not None:
            self.check(adapter)
            self.set(adapter)
        elif self.policy.full:
            raise BadConfig(
                "full-parameter training does not keep the weights of the base model",
                fix="name the base model's folder as rft.teacher.model",
            )
        else:
            self.zero.set_weights(without_change(own))
        shards = self.zero.shards()
        self.zero.set_weights(own)
        return shards

    def empty_batch(self) -> PackedBatch:
        tokens, mask = np.asarray([self.spec.stop] * 2, dtype=np.int64), np.asarray([False, True])
        sample = TrainSample(tokens, mask, np.zeros(2, dtype=np.float32), 0.0, [])
        return self.sequence.part(collate([sample], self.spec), self.spec)

    def collate(self, samples: Sequence[TrainSample]) -> PackedBatch:
        return self.sequence.part(collate(samples, self.spec, self.shares_prompts), self.spec)

    def forward(
        self, batch: PackedBatch, smoothing: float = 0.0, reference: ReferenceStates | None = None
    ) -> tuple[Tensor, ...]:
        return self.zero.engine(batch, self._view_features(batch), smoothing, reference)

    def _view_features(self, batch: PackedBatch) -> Features | None:
        if self.features is None or not batch.views:
            return None
        return concatenate(self.features.get(self.network, self.spec, batch.views, batch.digests))

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        self.network.train(self.policy.lora.dropout == 0)
        try:
            yield
        finally:
            self.network.train()

    @torch.no_grad()
    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """Log-probabilities of each sample's policy tokens, without dropout; empty for an unusable sample."""
        with self._without_dropout():
            return self._per_token(samples, lambda new: new)

    @torch.no_grad()
    def values(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """The critic's value before each policy token; empty for an unusable sample."""
        critic = self.critic
        assert critic is not None
        with self._without_dropout():
            return self._per_token(
                samples, lambda _: critic.values(self.hidden) if self.hidden is not None else _
            )

    def _per_token(
        self, samples: Sequence[TrainSample], read: Callable[[Tensor], Tensor]
    ) -> list[np.ndarray]:
        out: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * len(samples)
        bins = usable_bins(samples, self.spec, self.learner, self.shares_prompts)
        # A ZeRO-3 forward pass gathers parameters, so workers with fewer batches must take part in all
        # passes.
        passes = (
            int(sum_over_workers([float(len(bins))], largest=1)[0]) if self.zero.stage == 3 else len(bins)
        )
        for members in bins:
            batch = self.collate([samples[i] for i in members]).to(self.device)
            new, *_ = self.zero.engine.module(batch, self._view_features(batch))
            sizes = [samples[i].policy_tokens for i in members]
            for i, values in zip(
                members, np.split(read(new).cpu().numpy(), np.cumsum(sizes)[:-1]), strict=True
            ):
                out[i] = values
        for _ in range(len(bins), passes):
            self.zero.engine.module(self.empty_batch().to(self.device), None)
        return out

    def kl_to_reference(self, samples: Sequence[TrainSample]) -> list[float | None]:
        """`token_kl` of each sample, summed; None for an unusable one."""
        return [
            float(values.sum(dtype=np.float64)) if len(values) else None for values in self.token_kl(samples)
        ]

    def token_kl(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """Behaviour - reference log-probability (k1) of each policy token: an unbiased estimate of the KL."""
        if self.reference is None:
            raise BadConfig(
                "there is no reference policy to measure the KL divergence from",
                fix="set rft.loss.kl above 0",
            )
        with self.zero.using(self.reference):
            reference = self.log_probs(samples)
        return [
            s.log_probs[s.mask] - values if len(values) else values
            for s, values in zip(samples, reference, strict=True)
        ]

    def reference_log_probs(self, batches: Sequence[PackedBatch], passes: int) -> list[Tensor]:
        with self._as_reference():
            return [outputs[0] for outputs in self._outputs(batches, passes)[: len(batches)]]

    def reference_states(self, batches: Sequence[PackedBatch], passes: int) -> list[ReferenceStates]:
        """What the full KL divergence needs of each batch, in the host's memory.

        Under ZeRO-3 also for empty batches, as all workers need equally many differentiable results.
        """
        from deepspeed import zero

        trained = [p for p in self.network.lm_head.parameters() if p.requires_grad]
        with self._as_reference():
            with zero.GatheredParameters(trained, enabled=self.zero.stage == 3):
                head = [parameter.detach().clone() for parameter in trained]
            return [
                ReferenceStates(states.cpu(), head)
                for (states,) in self._outputs(batches, passes, states_only=True)
            ]

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        with torch.no_grad(), self._without_dropout(), self.zero.using(self.reference or {}):
            yield

    def _outputs(
        self, batches: Sequence[PackedBatch], passes: int, **options: Any
    ) -> list[tuple[Tensor, ...]]:
        empty = [self.empty_batch()] * (passes - len(batches)) if self.zero.stage == 3 else []
        on_device = (batch.to(self.device) for batch in [*batches, *empty])
        return [self.zero.engine.module(batch, self._view_features(batch), **options) for batch in on_device]

    def behaviour_kl(self, samples: Sequence[TrainSample]) -> float:
        """KL(behaviour policy || current weights) in nats per token, over all workers' usable samples.

        The mean of exp(r) - 1 - r, r = current - behaviour log-probability (k3,
        http://joschu.net/blog/kl-approx.html).
        """
        ratios = [
            new - s.log_probs[s.mask]
            for s, new in zip(samples, self.log_probs(samples), strict=True)
            if len(new)
        ]
        r = np.concatenate(ratios).astype(np.float64) if ratios else np.empty(0)
        with np.errstate(over="ignore"):
            total, tokens = sum_over_workers([float(np.sum(np.expm1(r) - r)), float(len(r))])
        return total / tokens if tokens else 0.0
