"""One optimizer step from a batch of trajectories. SFT, RFT and evolution differ only in the objective."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from pixelis import config
from pixelis.errors import BadInput, DataFailure, InfraFailure
from pixelis.policy import checkpoint
from pixelis.policy.adapters import FILES, Adapter, load_header, read_adapter, to_bfloat16, without_change
from pixelis.policy.distributed import sum_over_workers
from pixelis.policy.flops import FlopCounter, peak_flops
from pixelis.policy.learner_model import LearnerModel
from pixelis.policy.losses import Totals
from pixelis.policy.objectives import MicroBatch, PolicyObjective, SftObjective, Sums
from pixelis.policy.packing import pack_samples
from pixelis.policy.safeguards import StepGuard, moving_average
from pixelis.policy.samples import CAUSES, LearnerBatch, TrainSample, unusable
from pixelis.policy.tensor_parts import Part

STATE_FORMAT = 1
SUMMED = (
    "learner/tokens",
    "learner/sequences",
    "learner/trained_sequences",
    "learner/micro_batches",
    "learner/seconds",
)


@dataclass(frozen=True)
class Selection:
    """A worker's usable samples, those with a gradient and their `old`, and why others are unusable."""

    usable: list[TrainSample]
    active: list[TrainSample]
    old: list[torch.Tensor]
    causes: Counter[str]


@dataclass(frozen=True)
class Counts:
    """Of all workers: most micro-batches of one, usable and trained sequences, policy tokens (SFT: their weights)."""

    micro_batches: int
    sequences: int
    trained: int
    tokens: float


class Trainer:
    """Trains the policy on one worker; its start is the KL term's reference. All methods are collective.

    adapter: initial weights (None: the base model); ema: decay of the published average, 0 publishes the
    current weights; minibatches, epochs: optimizer steps per pass over a batch of rollouts, and passes.
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
        self.policy, self.learner, self.loss = policy, learner, loss or config.LossConfig()
        self.total_steps, self.seed, self.minibatches, self.epochs = total_steps, seed, minibatches, epochs
        self.model = LearnerModel(
            policy, learner, seed=seed, temperature=temperature, adapter=adapter, critic=critic, device=device
        )
        if self.loss.kl > 0:
            self.model.reference = self.model.zero.shards()
        self.sft = SftObjective(self.model, label_smoothing)
        self.rft = PolicyObjective(self.model, self.loss)
        self.ema = ema
        self.average: Mapping[str, np.ndarray] | None = self.model.zero.weights() if ema else None
        self.flops = FlopCounter(self.model.network, self.model.spec.patch)
        self.peak_flops = peak_flops(self.model.device, learner.peak_tflops)
        self.writer = checkpoint.Writer(dist.get_rank(), dist.get_world_size())
        self.batches = self.step_count = self.skipped = self.skipped_in_a_row = 0

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == 0

    def lr(self) -> float:
        return learning_rate(self.learner, self.step_count - self.skipped, self.total_steps)

    def step(self, batch: LearnerBatch) -> dict[str, float]:
        """Train on one batch; ratios are relative to the weights before its first optimizer step."""
        self.batches += 1
        steps, samples = [], batch.samples
        try:
            if batch.kind == "sft" or self.minibatches * self.epochs == 1:
                return self.update(samples, batch.kind, **batch.options)
            old = self.model.log_probs(samples)
            for indices in minibatch_indices(
                len(samples), self.minibatches, self.epochs, (self.seed, batch.step)
            ):
                if sum_over_workers([float(len(indices))])[0]:
                    minibatch = [samples[i] for i in indices]
                    steps.append(
                        self.update(minibatch, batch.kind, [old[i] for i in indices], **batch.options)
                    )
        except DataFailure as error:
            if not batch.optional or error.code != "no_usable_sample":
                raise
            steps.append({"evolve/skipped": 1.0})
        return combine_metrics(steps)

    def update(
        self,
        samples: Sequence[TrainSample],
        kind: Literal["sft", "policy"] = "policy",
        old: Sequence[np.ndarray] | None = None,
        *,
        lr: float | None = None,
        kl_weight: float | None = None,
        kl_limit: float | None = None,
        sampled: Sequence[TrainSample] | None = None,
    ) -> dict[str, float]:
        """One optimizer step on this worker's share of a batch; returns metrics of the whole batch.

        old: `log_probs` of the samples before the first of several steps. kl_limit: a step whose
        `behaviour_kl` on `sampled` (by default the samples) exceeds it is undone. Unusable samples are
        dropped and counted; a step that is not finite is skipped, the third in a row raises InfraFailure.
        Raises DataFailure if no worker has a usable sample.
        """
        started = time.perf_counter()
        model, objective = self.model, self.sft if kind == "sft" else self.rft
        self.rft.kl_weight = self.rft.kl_coefficient if kl_weight is None else kl_weight
        guard = StepGuard(model, kl_limit) if kl_limit is not None else None
        if self.policy.lora.dropout > 0:
            # Seeded per step, so that a resumed run repeats it exactly.
            torch.manual_seed(hash((self.seed, self.step_count, dist.get_rank())) & 0x7FFFFFFF)

        selection = self._select(objective, samples, old)
        row = self.learner.rows * self.learner.row_tokens
        bins = pack_samples(selection.active, model.spec, row, model.shares_prompts)
        counts = self._count(objective, selection, len(bins))
        totals = Totals(counts.tokens or 1.0, counts.sequences)  # all weights of a batch can be 0
        sums, flops = Sums(float), 0.0
        for micro in self._micro_batches(objective, selection, bins, counts.micro_batches):
            loss = objective.loss(micro.to(model.device), totals, sums)
            value = float(loss.detach())
            # An infinite loss can have a finite gradient; NaN makes every worker skip the step.
            model.zero.backward(loss if math.isfinite(value) else loss * float("nan"))
            sums["loss"] += value
            if micro.members:
                flops += self.flops.step(
                    micro.batch, [len(s.tokens) for s in micro.members], model.sequence.size
                )

        rate = self.lr() if lr is None else lr
        norm = model.zero.apply(rate) if counts.micro_batches else 0.0
        if kind == "policy":
            self.rft.apply_critic()
        metrics = self._loss_metrics(objective, sums, counts.trained)
        if kind == "policy" and self.loss.kl:
            metrics["policy/kl_weight"] = self.rft.kl_weight
        if "policy/kl" in metrics and kl_weight is None:
            self.rft.adapt_kl(metrics["policy/kl"])
        if guard is not None:
            metrics |= guard.check(selection.usable if sampled is None else sampled)
        if self.average is not None:
            # Also after an undone step: the average goes on catching up with the weights.
            self.average = moving_average(self.average, model.zero.weights(), self.ema)
        metrics |= {"policy/lr": rate, "policy/grad_norm": norm if norm is not None else float("nan")}
        self._note_skip(norm is None)
        return metrics | self._step_metrics(selection, counts, time.perf_counter() - started, flops)

    def _select(
        self,
        objective: SftObjective | PolicyObjective,
        samples: Sequence[TrainSample],
        old: Sequence[np.ndarray] | None,
    ) -> Selection:
        selection = Selection([], [], [], Counter())
        for index, sample in enumerate(samples):
            cause = unusable(sample, self.model.spec, self.learner.row_tokens)
            if cause is not None:
                selection.causes[cause] += 1
                continue
            selection.usable.append(sample)
            if objective.trains(sample):  # the others only count in the denominators
                selection.active.append(sample)
                if old is not None:
                    selection.old.append(torch.from_numpy(old[index]))
        return selection

    def _count(
        self, objective: SftObjective | PolicyObjective, selection: Selection, micro_batches: int
    ) -> Counts:
        usable, tokens = selection.usable, sum(map(objective.size, selection.usable))
        local = [float(micro_batches), float(len(usable)), float(len(selection.active)), float(tokens)]
        most, sequences, trained, total = self.model.sequence.sum(local, largest=1)
        if not sequences:
            causes = dict(selection.causes)
            raise DataFailure(
                f"no usable sample in the batch: {causes}",
                code="no_usable_sample",
                fix=objective.no_sample_fix,
            )
        return Counts(int(most), int(sequences), int(trained), total)

    def _micro_batches(
        self,
        objective: SftObjective | PolicyObjective,
        selection: Selection,
        bins: Sequence[Sequence[int]],
        most: int,
    ) -> list[MicroBatch]:
        """The packed samples, and empty batches up to `most`: all workers need equally many collectives."""
        rows = [[selection.active[i] for i in members] for members in bins]
        batches = [self.model.collate(row) for row in rows]
        references = objective.references(batches, most)
        result = []
        for i in range(most):
            reference = references[i] if i < len(references) else None
            if i < len(batches):
                old = torch.cat([selection.old[j] for j in bins[i]]) if selection.old else None
                result.append(MicroBatch(batches[i], rows[i], old, reference))
            else:
                result.append(MicroBatch(self.model.empty_batch(), reference=reference))
        return result

    def _loss_metrics(
        self, objective: SftObjective | PolicyObjective, sums: Sums, trained: int
    ) -> dict[str, float]:
        names = objective.metric_names(sums)
        largest = sum(name.endswith("_max") for name in names)
        local = [sums.get(n, 0.0) for n in (*names, "loss", "policy_tokens")]
        *totals, loss, tokens = self.model.sequence.sum(local, largest=largest)
        metrics = {"policy/loss": loss}
        if trained and tokens:
            for index, (name, value) in enumerate(zip(names, totals, strict=True)):
                metrics[f"policy/{name}"] = value if index < largest else value / tokens
        return metrics

    def _note_skip(self, was_skipped: bool) -> None:
        self.step_count += 1
        self.skipped += was_skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if was_skipped else 0
        if self.skipped_in_a_row >= 3:
            message = "loss or gradient was not finite in three steps in a row"
            fix = "resume with a lower learner.lr"
            raise InfraFailure(message, code="non_finite_steps", fix=fix)

    def _step_metrics(
        self, selection: Selection, counts: Counts, seconds: float, flops: float
    ) -> dict[str, float]:
        """seconds, flops: of this worker."""
        size = float(sum(len(sample.tokens) for sample in selection.active))
        tokens, *dropped = self.model.sequence.sum(
            [size, *(float(selection.causes[cause]) for cause in CAUSES)]
        )
        flops_per_s = sum_over_workers([flops])[0] / (seconds * dist.get_world_size())
        metrics = {
            "learner/tokens": tokens,
            "learner/sequences": float(counts.sequences),
            "learner/trained_sequences": float(counts.trained),
            "learner/micro_batches": float(counts.micro_batches),
            "learner/skipped": float(self.skipped),
            "learner/seconds": seconds,
            "learner/tflops_per_s": flops_per_s / 1e12,
            "learner/tokens_per_s": tokens / seconds,
            **{
                f"learner/dropped_{cause}": count
                for cause, count in zip(CAUSES, dropped, strict=True)
                if count
            },
        }
        if self.peak_flops is not None:
            metrics["learner/mfu"] = flops_per_s / self.peak_flops
        return metrics

    def adapter(self) -> Adapter:
        return self._as_adapter(self.model.zero.weights())

    def served(self) -> Adapter:
        """Weights to publish, complete on the first worker: the average, or the current ones."""
        if self.average is not None:
            is_rounded = self.model.zero.bfloat16
            return self._as_adapter(
                {n: to_bfloat16(a) for n, a in self.average.items()} if is_rounded else self.average
            )
        return self._as_adapter(self.model.zero.model_weights()) if self.policy.full else self.adapter()

    def _as_adapter(self, weights: Mapping[str, np.ndarray]) -> Adapter:
        lora = self.policy.lora
        kind: Literal["lora", "full"] = "full" if self.policy.full else "lora"
        return Adapter(weights, lora.alpha, lora.rank, self.model.base_sha256, kind)

    def reset_to(self, adapter: Adapter | None) -> None:
        """Continue from other weights (None: the base model) with a fresh optimizer and average."""
        if adapter is not None:
            self.model.check(adapter)
            self.model.set(adapter)
        elif self.policy.full:
            raise BadInput(
                "full-parameter training does not keep the weights of the base model", code="no_weights"
            )
        else:
            self.model.zero.set_weights(without_change(self.model.zero.weights()))
        self.model.zero.set_moments({})
        self.average = self.model.zero.weights() if self.ema else None
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
        """Write a checkpoint, prune to `learner.keep`, return its folder.

        extra: the caller's state, JSON; name: number of the folder, by default the step; best: number of
        another to keep; wait: False writes in the background, until `writer.wait`.
        """
        zero, reference, critic = self.model.zero, self.model.reference, self.model.critic
        weights, moments = zero.parts()
        # An adapter is small and wanted as one file. Everything else is written in parts, each by the worker
        # that holds it.
        adapter = self._as_adapter({}) if self.policy.full else self.adapter()
        tensors: dict[str, Mapping[str, np.ndarray | Part]] = {
            FILES[adapter.kind]: weights if self.policy.full else adapter.tensors,
            "optimizer": {} if self.learner.save_only_model else moments,
            "reference": zero.parts_of(reference) if reference is not None else {},
            "average": self.average or {},
            "critic": critic.tensors() if critic is not None else {},
        }
        if not self.is_first:
            whole = {"average", "critic", *({FILES[adapter.kind]} if not self.policy.full else ())}
            tensors |= {stem: {} for stem in whole}
        state = {
            "format": STATE_FORMAT,
            "step": self.step_count,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "total_steps": self.total_steps,
            "seed": self.seed,
            "kl_coefficient": self.rft.kl_coefficient,
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
        """Continue exactly where `save` was called; returns its `extra`."""
        tensors, state = checkpoint.read(folder, verify)
        if state.get("format") != STATE_FORMAT:
            raise BadInput(
                f"{folder} has the state format {state.get('format')}, this version reads {STATE_FORMAT}"
            )
        adapter = read_adapter(*load_header(folder, verify=False), lazily=True)
        self.model.check(adapter)
        if self.loss.kl > 0 and "reference" in tensors:
            self.model.zero.set_weights(tensors["reference"])
            self.model.reference = self.model.zero.shards()
        self.model.set(adapter)
        self.model.zero.set_moments(tensors.get("optimizer", {}))
        self.average = dict(tensors.get("average") or self.model.zero.weights()) if self.ema else None
        self.step_count, self.skipped = int(state["step"]), int(state["skipped"])
        self.skipped_in_a_row = int(state["skipped_in_a_row"])
        if self.loss.kl_target:
            self.rft.kl_coefficient = float(state.get("kl_coefficient", self.loss.kl))
        if self.model.critic is not None and "critic" in tensors:
            self.model.critic.load(tensors["critic"])
        return dict(state["extra"])

    def close(self) -> None:
        self.model.zero.close()


def learning_rate(learner: config.LearnerConfig, step: int, total: int) -> float:
    """Linear warm-up over a share of the steps, then constant, or a cosine or a line to min_lr_ratio."""
    warm = math.ceil(learner.warmup * total)
    if step < warm:
        return learner.lr * (step + 1) / warm
    if learner.schedule == "constant":
        return learner.lr
    progress = min(1.0, (step - warm) / max(1, total - warm))
    left = 1 - progress if learner.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return learner.lr * (learner.min_lr_ratio + (1 - learner.min_lr_ratio) * left)


def minibatch_indices(
    samples: int, minibatches: int, epochs: int, seed: Sequence[int]
) -> Iterator[list[int]]:
    """Indices of the samples of each optimizer step. The first pass keeps their order; later ones shuffle."""
    for epoch in range(epochs):
        order = (
            list(range(samples))
            if not epoch
            else np.random.default_rng([*seed, epoch]).permutation(samples).tolist()
        )
        for minibatch in range(minibatches):
            yield order[minibatch::minibatches]


def combine_metrics(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics over several optimizer steps: sums of counts, maxima, means of the rest."""
    out = {}
    for name in {name: None for metrics in steps for name in metrics}:
        values = [metrics[name] for metrics in steps if name in metrics]
        if name in SUMMED or name.startswith("learner/dropped_"):
            out[name] = sum(values)
        elif name.endswith("_max") or name == "learner/skipped":
            out[name] = max(values)
        else:
            out[name] = sum(values) / len(values)
    return out
