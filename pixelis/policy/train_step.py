"""Updates the policy: one optimizer step from a batch of trajectories. SFT, RFT and evolution differ only in the loss."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from pixelis import config
from pixelis.errors import BadInput, DataFailure, InfraFailure
from pixelis.policy import checkpoint
from pixelis.policy.adapters import FILES, Adapter, load_header, moving_average, read_adapter, to_bfloat16, without_change
from pixelis.policy.distributed import sum_over_workers
from pixelis.policy.flops import FlopCounter, peak_flops
from pixelis.policy.learner_model import LearnerModel
from pixelis.policy.log_probs import ReferenceStates
from pixelis.policy.losses import Spans, Totals, metric_names, policy_loss, sft_loss, token_weights
from pixelis.policy.minibatches import combine_metrics, minibatch_indices
from pixelis.policy.packing import PackedBatch, pack_samples
from pixelis.policy.samples import CAUSES, LearnerBatch, TrainSample, unusable
from pixelis.policy.tensor_parts import Part

Kind = Literal["sft", "policy"]
KL_HORIZON = 10.0
"""Steps in which an adapted KL weight changes by a fifth at most."""
STATE_FORMAT = 1


class Trainer(LearnerModel):
    """The policy in training on one worker. With several workers, all of them must call each method together.

    policy, learner, loss: from the configuration; total_steps: length of the learning-rate schedule; temperature: of the
    rollouts; adapter: initial weights (None: the base model); label_smoothing: of the SFT loss; ema: decay of the published
    weight average, 0 publishes the current weights; minibatches, epochs: optimizer steps per pass over a batch of rollouts, and
    passes; critic: of PPO. The starting policy is the reference of the KL term. Raises BadConfig, MissingFile and BadInput before
    allocating the optimizer.
    """

    def __init__(
        self,
        policy: config.PolicyConfig,
        learner: config.LearnerConfig,
        loss: config.LossConfig | None = None,
        *,
        total_steps: int,
        seed: int = 0,
        temperature: float = 1.0,
        adapter: Adapter | None = None,
        label_smoothing: float = 0.0,
        ema: float = 0.0,
        minibatches: int = 1,
        epochs: int = 1,
        critic: config.CriticConfig | None = None,
        device: torch.device | str | None = None,
    ):
        self.label_smoothing, self.ema, self.minibatches, self.epochs = label_smoothing, ema, minibatches, epochs
        self.loss, self.total_steps = loss or config.LossConfig(), total_steps
        super().__init__(policy, learner, seed=seed, temperature=temperature, adapter=adapter, critic=critic, device=device)
        self.flops, self.peak_flops = FlopCounter(self.model, self.spec.patch), peak_flops(self.device, learner.peak_tflops)
        self.reference = self.zero.shards() if self.loss.kl > 0 else None
        self.average = self.zero.weights() if ema else None
        self.kl_weight = self.kl_coefficient = self.loss.kl
        self.writer = checkpoint.Writer(dist.get_rank(), dist.get_world_size())
        self.batches = self.step_count = self.skipped = self.skipped_in_a_row = 0

    def lr(self) -> float:
        """Learning rate of the next step. Skipped steps do not advance the schedule."""
        return learning_rate(self.learner, self.step_count - self.skipped, self.total_steps)

    def step(self, batch: LearnerBatch) -> dict[str, float]:
        """Train on one batch; returns metrics of all its optimizer steps. Ratios are relative to the weights before the first.

        Raises as `update` does, except for an optional batch without a usable sample.
        """
        self.batches += 1
        steps, samples = [], batch.samples
        try:
            if batch.kind == "sft" or self.minibatches * self.epochs == 1:
                return self.update(samples, batch.kind, **batch.options)
            old = self.log_probs(samples)
            for indices in minibatch_indices(len(samples), self.minibatches, self.epochs, (self.seed, batch.step)):
                if sum_over_workers([float(len(indices))])[0]:
                    minibatch = [samples[i] for i in indices]
                    steps.append(self.update(minibatch, batch.kind, [old[i] for i in indices], **batch.options))
        except DataFailure as error:
            if not batch.optional or error.code != "no_usable_sample":
                raise
            steps.append({"evolve/skipped": 1.0})
        return combine_metrics(steps)

    def update(
        self,
        samples: Sequence[TrainSample],
        kind: Kind = "policy",
        old: Sequence[np.ndarray] | None = None,
        *,
        lr: float | None = None,
        kl_weight: float | None = None,
        kl_limit: float | None = None,
        sampled: Sequence[TrainSample] | None = None,
    ) -> dict[str, float]:
        """One optimizer step on this worker's share of a batch; returns metrics of the whole batch, equal on all workers.

        old: `log_probs` of the samples before the first of several steps on a batch of rollouts, the denominator of the ratio
        (None: the only step). lr, kl_weight: override the schedule and `loss.kl`. kl_limit: the largest KL from the behaviour
        policy to the updated one (`behaviour_kl`); a step beyond it is undone bit for bit, moments included, and `evolve/skipped`
        is 1. sampled: what the behaviour policy generated, if the samples are something else.

        Unusable samples are dropped and counted by cause (`learner/dropped_CAUSE`). Trajectories with an advantage of exactly 0
        count in the denominators but are not computed unless a KL term or an entropy bonus gives them a gradient. A step whose
        loss or gradient is not finite is skipped; the third in a row raises InfraFailure. Raises DataFailure if no worker has a
        usable sample.
        """
        started = time.perf_counter()
        rate = self.lr() if lr is None else lr
        self.kl_weight = self.kl_coefficient if kl_weight is None else kl_weight
        before_step = (self.zero.weights(), self.zero.moments()) if kl_limit is not None else None
        if self.policy.lora.dropout > 0:
            # Seeded per step, so that a resumed run repeats it exactly.
            torch.manual_seed(hash((self.seed, self.step_count, dist.get_rank())) & 0x7FFFFFFF)
        usable, active, before, causes = self._select(samples, kind, old)
        bins = pack_samples(active, self.spec, self.learner.rows * self.learner.row_tokens, self.shares_prompts)
        micro_batches, sequences, trained, tokens = self._counts(kind, bins, usable, active, causes)
        old_log_probs = [torch.cat([before[i] for i in members]).to(self.device) for members in bins] if before else []
        totals = Totals(tokens or 1.0, sequences)  # all weights of a batch can be 0
        rows = [[active[i] for i in members] for members in bins]
        batches = [self._collate(row) for row in rows]
        references = self._references(kind, batches, micro_batches)
        sums, flops = defaultdict[str, float](float), 0.0
        # Workers with fewer micro-batches add empty ones, so that all take part in the same collectives.
        for i in range(micro_batches):
            is_real = i < len(batches)
            micro, members = (batches[i], rows[i]) if is_real else (self._empty_batch(), [])
            reference, earlier = references[i] if i < len(references) else None, old_log_probs[i] if is_real and before else None
            self._backward(micro.to(self.device), kind, totals, reference, earlier, members, sums)
            if is_real:
                flops += self.flops.step(micro, [len(sample.tokens) for sample in members], self.sequence.size)
        norm = self.zero.apply(rate) if micro_batches else 0.0
        if self.critic is not None and kind == "policy":
            self.critic.apply()
        metrics = self._metrics(kind, sums, trained)
        if kind == "policy" and self.loss.kl:
            metrics["policy/kl_weight"] = self.kl_weight
        if "policy/kl" in metrics and kl_weight is None:
            self.adapt_kl(metrics["policy/kl"])
        if before_step is not None and kl_limit is not None:
            metrics |= self._guard(usable if sampled is None else sampled, kl_limit, *before_step)
        if self.average is not None:
            # Also after an undone step: the average goes on catching up with the weights.
            self.average = moving_average(self.average, self.zero.weights(), self.ema)
        dropped = self.sequence.sum([float(causes[cause]) for cause in CAUSES])
        metrics |= {
            "policy/lr": rate,
            "policy/grad_norm": norm if norm is not None else float("nan"),
            "learner/tokens": float(self.sequence.sum([float(sum(len(s.tokens) for s in active))])[0]),
            "learner/sequences": float(sequences),
            "learner/trained_sequences": float(trained),
            "learner/micro_batches": float(micro_batches),
            **{f"learner/dropped_{cause}": count for cause, count in zip(CAUSES, dropped, strict=True) if count},
        }
        self._count(norm is None)
        metrics["learner/skipped"] = float(self.skipped)
        return metrics | self._speed(time.perf_counter() - started, metrics["learner/tokens"], flops)

    def _references(
        self, kind: Kind, batches: Sequence[PackedBatch], micro_batches: int
    ) -> Sequence[torch.Tensor | ReferenceStates]:
        """What the KL term of each batch needs of the reference policy; empty without such a term."""
        if kind != "policy" or not self._kl_in_loss:
            return []
        measure = self.reference_states if self.loss.kl_estimator == "full" else self.reference_log_probs
        return measure(batches, micro_batches)

    def _counts(
        self,
        kind: Kind,
        bins: Sequence[Sequence[int]],
        usable: Sequence[TrainSample],
        active: Sequence[TrainSample],
        causes: Mapping[str, int],
    ) -> tuple[int, int, int, float]:
        """Most micro-batches of a worker; usable samples, active ones, and policy tokens (SFT: weights) of all workers.

        Raises DataFailure if no worker has a usable sample.
        """
        size = sum(s.weight if kind == "sft" else s.policy_tokens for s in usable)
        counts = [float(len(bins)), float(len(usable)), float(len(active)), float(size)]
        micro_batches, sequences, trained, tokens = self.sequence.sum(counts, largest=1)
        if not sequences:
            fix = "no_policy_tokens: no turn fitted dialogue.max_context; the episodes are in rollouts.jsonl of the run"
            if kind == "sft":
                fix = "no_policy_tokens: no turn of these demonstrations has `learn: true`, so there is nothing to imitate"
            raise DataFailure(f"no usable sample in the batch: {dict(causes)}", code="no_usable_sample", fix=fix)
        return int(micro_batches), int(sequences), int(trained), tokens

    def _speed(self, seconds: float, tokens: float, flops: float) -> dict[str, float]:
        """Metrics of a step's duration; flops: operations of this worker."""
        flops_per_s = sum_over_workers([flops])[0] / (seconds * dist.get_world_size())
        times = {"learner/seconds": seconds, "learner/tflops_per_s": flops_per_s / 1e12}
        times["learner/tokens_per_s"] = tokens / seconds
        if self.peak_flops is not None:
            times["learner/mfu"] = flops_per_s / self.peak_flops
        return times

    def _select(
        self, samples: Sequence[TrainSample], kind: Kind, old: Sequence[np.ndarray] | None
    ) -> tuple[list[TrainSample], list[TrainSample], list[torch.Tensor], Counter[str]]:
        """Usable samples, those with a gradient, their old log-probabilities (if given), and causes of unusable samples."""
        usable, active, before, causes = [], [], [], Counter[str]()
        needs_advantage = kind == "policy" and self.loss.entropy == 0 and not self._kl_in_loss and self.critic is None
        for index, sample in enumerate(samples):
            cause = unusable(sample, self.spec, self.learner.row_tokens)
            if cause is not None:
                causes[cause] += 1
                continue
            usable.append(sample)
            if sample.advantage != 0 or sample.token_advantages is not None or not needs_advantage:
                active.append(sample)
                if old is not None:
                    before.append(torch.from_numpy(old[index]))
        return usable, active, before, causes

    def _guard(
        self, samples: Sequence[TrainSample], limit: float, weights: Mapping[str, np.ndarray], moments: Mapping[str, np.ndarray]
    ) -> dict[str, float]:
        """Undo the step if its KL exceeds `limit`, which can only be measured after the step."""
        divergence = self.behaviour_kl(samples)
        is_beyond = not divergence <= limit
        if is_beyond:
            self.zero.set_weights(weights)
            self.zero.set_moments(moments)
        return {"evolve/kl": divergence, "evolve/skipped": float(is_beyond)}

    def _backward(
        self,
        batch: PackedBatch,
        kind: Kind,
        totals: Totals,
        reference: torch.Tensor | ReferenceStates | None,
        old: torch.Tensor | None,
        members: Sequence[TrainSample],
        sums: defaultdict[str, float],
    ) -> None:
        """Add the gradient of a micro-batch. members: its samples; none for the empty one of a worker that has fewer."""
        weight = float(bool(members))
        states = reference.to(self.device) if isinstance(reference, ReferenceStates) else None
        smoothing = self.label_smoothing if kind == "sft" else 0.0
        new, entropy, *divergence = self.zero.engine(batch, self._view_features(batch), smoothing, states)
        sequence = batch.sequence[batch.mask]
        loss_metrics: dict[str, torch.Tensor] = {}
        aggregate = self.loss.aggregate if kind == "policy" else "token"
        weights = weight * token_weights(sequence, batch.policy_tokens, aggregate, totals, self.loss.constant_tokens)
        if kind == "sft":
            loss = sft_loss(new, weights * batch.weights[batch.mask])
        else:
            loss, loss_metrics = policy_loss(
                new,
                batch.behaviour[batch.mask],
                self._advantages(batch, members, sequence),
                weights,
                self.loss if self.kl_weight == self.loss.kl else self.loss.model_copy(update={"kl": self.kl_weight}),
                old=old,
                reference=reference if isinstance(reference, torch.Tensor) else None,
                divergence=divergence[0] if divergence else None,
                entropy=entropy,
                spans=Spans(sequence, batch.policy_tokens),
            )
        value = float(loss.detach())
        if not math.isfinite(value):
            # An infinite loss can have a finite gradient; NaN makes every worker skip the step.
            loss = loss * float("nan")
        self.zero.backward(loss)
        sums["loss"] += value
        if self.critic is not None and kind == "policy" and members and self.hidden is not None:
            returns, values = (self._of_tokens(members, name) for name in ("returns", "values"))
            size = torch.full_like(returns, 1.0 / totals.tokens)
            for name, value in self.critic.backward(self.hidden, returns, values, size).items():
                sums[name] += value
        if weight:
            sums["policy_tokens"] += len(new)
            sums["entropy"] += float(entropy.sum())
            sums["nll"] -= float(new.detach().sum())
            if loss_metrics:
                for name, value in zip(loss_metrics, torch.stack(list(loss_metrics.values())).tolist(), strict=True):
                    sums[name] = max(sums[name], value) if name.endswith("_max") else sums[name] + value
        else:
            sums.update({name: sums[name] for name in loss_metrics})  # metrics of a user's surrogate exist on every worker

    def _metrics(self, kind: Kind, sums: Mapping[str, float], trained: int) -> dict[str, float]:
        names = ["entropy", "nll"]
        if kind == "policy":
            names = metric_names(self.loss, self._kl_in_loss) + names
            names += ["critic_loss", "critic_clipped"] if self.critic is not None else []
            own = sorted(sums.keys() - {*names, "loss", "policy_tokens"})
            names = [n for n in own if n.endswith("_max")] + names + [n for n in own if not n.endswith("_max")]
        largest = sum(name.endswith("_max") for name in names)
        local = [sums.get(n, 0.0) for n in (*names, "loss", "policy_tokens")]
        *totals, loss, tokens = self.sequence.sum(local, largest=largest)
        metrics = {"policy/loss": loss}
        if trained and tokens:
            for index, (name, value) in enumerate(zip(names, totals, strict=True)):
                metrics[f"policy/{name}"] = value if index < largest else value / tokens
        return metrics

    def _count(self, was_skipped: bool) -> None:
        self.step_count += 1
        if not was_skipped:
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= 3:
            message, fix = "loss or gradient was not finite in three steps in a row", "resume with a lower learner.lr"
            raise InfraFailure(message, code="non_finite_steps", fix=fix)

    def _advantages(self, batch: PackedBatch, members: Sequence[TrainSample], sequence: torch.Tensor) -> torch.Tensor:
        """Advantage of each policy token of a micro-batch."""
        if not any(sample.token_advantages is not None for sample in members):
            return batch.advantages[sequence]
        return self._of_tokens(members, "token_advantages")

    def _of_tokens(self, members: Sequence[TrainSample], name: str) -> torch.Tensor:
        """Concatenation of a field of the samples with a value for each policy token."""
        rows = [getattr(sample, name) for sample in members]
        if any(row is None for row in rows):
            raise ValueError(f"samples without {name} in a batch whose other samples have them")
        return torch.from_numpy(np.concatenate(rows)).to(self.device)

    def adapt_kl(self, divergence: float) -> None:
        """Adapt the KL weight to the divergence of a step, if `rft.loss.kl_target` is set (arXiv 1909.08593, section 2.2)."""
        target = self.loss.kl_target
        if target and math.isfinite(divergence):
            self.kl_coefficient *= 1 + min(max(divergence / target - 1, -0.2), 0.2) / KL_HORIZON

    @property
    def _kl_in_loss(self) -> bool:
        return self.reference is not None and self.loss.kl_in == "loss"

    def _if_first(self, tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return tensors if self.is_first else {}

    def adapter(self) -> Adapter:
        """Copy of the current weights."""
        return self._as_adapter(self.zero.weights())

    def served(self) -> Adapter:
        """Weights to publish, complete on the first worker: the average, or the current weights without one.

        All parameters (`policy.full`) are of the model's type, since the engines would round them to it.
        """
        if self.average is not None:
            is_rounded = self.zero.bfloat16
            return self._as_adapter({n: to_bfloat16(a) for n, a in self.average.items()} if is_rounded else self.average)
        return self._as_adapter(self.zero.model_weights()) if self.policy.full else self.adapter()

    def _as_adapter(self, weights: Mapping[str, np.ndarray]) -> Adapter:
        lora = self.policy.lora
        kind: Literal["lora", "full"] = "full" if self.policy.full else "lora"
        return Adapter(weights, lora.alpha, lora.rank, self.base_sha256, kind)

    def reset_to(self, adapter: Adapter | None) -> None:
        """Continue from other weights with a fresh optimizer and average. None: the base model.

        Raises BadInput for an adapter that does not fit, and for None in full-parameter training.
        """
        self._check_adapter(adapter, self.zero.parameters)
        if adapter is not None:
            self._set(adapter)
        elif self.policy.full:
            raise BadInput("full-parameter training does not keep the weights of the base model", code="no_weights")
        else:
            self.zero.set_weights(without_change(self.zero.weights()))
        self.zero.set_moments({})
        self.average = self.zero.weights() if self.ema else None
        self.skipped_in_a_row = 0

    def save(
        self,
        run_dir: str | Path,
        extra: Mapping[str, Any] | None = None,
        name: int | None = None,
        lineage: Mapping[str, Any] | None = None,
        best: int | None = None,
        wait: bool = True,
    ) -> Path:
        """Write a checkpoint, prune to `learner.keep`, return its folder. extra: the caller's state, JSON.

        name: number in the folder's name instead of the optimizer step. lineage: origin of the checkpoint, from
        `telemetry.lineage.of_checkpoint`. best: number of a further checkpoint to keep. wait: return when it is complete;
        otherwise it is written in the background, until `writer.wait`.
        """
        weights, moments = self.zero.parts()
        # An adapter is small and wanted as one file. Everything else is written in parts, each by the worker that holds it.
        adapter = self._as_adapter({}) if self.policy.full else self.adapter()
        tensors: dict[str, Mapping[str, np.ndarray | Part]] = {
            FILES[adapter.kind]: weights if self.policy.full else self._if_first(adapter.tensors),
            "optimizer": {} if self.learner.save_only_model else moments,
            "reference": self.zero.parts_of(self.reference) if self.reference is not None else {},
            "average": self._if_first(self.average or {}),
            "critic": self._if_first(self.critic.tensors() if self.critic is not None else {}),
        }
        state = {
            "format": STATE_FORMAT,
            "step": self.step_count,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "total_steps": self.total_steps,
            "seed": self.seed,
            "kl_coefficient": self.kl_coefficient,
            "extra": dict(extra or {}),
        }
        texts = {"state": state, **({"lineage": lineage} if lineage else {})}
        step = self.step_count if name is None else name
        headers = {FILES[adapter.kind]: adapter.metadata()}
        folder = self.writer.start(run_dir, step, tensors, texts, headers, self.learner.keep, best)
        if wait:
            self.writer.wait()
            dist.barrier()
        return folder

    def restore(self, folder: str | Path, verify: bool = True) -> dict[str, Any]:
        """Continue exactly where `save` was called; returns its `extra`. verify: compare the checksums.

        Reads one parameter at a time. Raises MissingFile, and BadInput for other formats and damaged files.
        """
        tensors, state = checkpoint.read(folder, verify)
        if state.get("format") != STATE_FORMAT:
            raise BadInput(f"{folder} has the state format {state.get('format')}, this version reads {STATE_FORMAT}")
        adapter = read_adapter(*load_header(folder, verify=False), lazily=True)
        self._check_adapter(adapter, self.zero.parameters)
        if self.loss.kl > 0 and "reference" in tensors:
            self.zero.set_weights(tensors["reference"])
            self.reference = self.zero.shards()
        self._set(adapter)
        self.zero.set_moments(tensors.get("optimizer", {}))
        self.average = dict(tensors.get("average") or self.zero.weights()) if self.ema else None
        self.step_count, self.skipped = int(state["step"]), int(state["skipped"])
        self.skipped_in_a_row = int(state["skipped_in_a_row"])
        if self.loss.kl_target:
            self.kl_coefficient = float(state.get("kl_coefficient", self.loss.kl))
        if self.critic is not None and "critic" in tensors:
            self.critic.load(tensors["critic"])
        return dict(state["extra"])

    def close(self) -> None:
        """Free the engine and its memory."""
        self.zero.close()


def learning_rate(learner: config.LearnerConfig, step: int, total: int) -> float:
    """Linear warm-up over a share of the steps, then constant or a cosine to 0. step counts from 0."""
    warm = math.ceil(learner.warmup * total)
    if step < warm:
        return learner.lr * (step + 1) / warm
    if learner.schedule == "constant":
        return learner.lr
    progress = min(1.0, (step - warm) / max(1, total - warm))
    return learner.lr * 0.5 * (1 + math.cos(math.pi * progress))
