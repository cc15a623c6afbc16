"""Packed rows against right padding: the share of real tokens in what the learner computes, and the time.

    python -m benchmarks.packing [--clock cpu]

`nano`: multi-turn trajectories with pictures, played from demonstrations of the embedded data, half of which
zoom in. `zipf`: a synthetic mix of texts with P(length) ~ 1/length up to a whole row. Packing computes linear
layers on real tokens only; in attention, samples of similar length share a bucket, padded to the longest of
the bucket. The baseline is transformers' attention on micro-batches in order of arrival, padded right to the
longest of each. It uses the same view features, so only the padding differs.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch

from benchmarks.harness import CLOCKS, Report, compare, parse_args
from pixelis import config
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.questions import read_demonstrations
from pixelis.families.family import ModelSpec
from pixelis.families.features import Features, concatenate
from pixelis.policy.forward import FeatureCache
from pixelis.policy.log_probs import banned_mask, project, token_log_probs
from pixelis.policy.lora import add_lora
from pixelis.policy.model import load_model
from pixelis.policy.model_path import resolve
from pixelis.policy.packing import PackedBatch, collate, pack
from pixelis.policy.samples import TrainSample, from_trajectory

ROWS = config.LearnerConfig().rows
PADDED_ROWS = 8


def nano_traces(settings: config.Config, count: int) -> list[TrainSample]:
    """Return samples from played demonstrations of the embedded data."""
    player = Player(settings, str(resolve("nano")))
    rows = read_demonstrations("cards:?split=train", count, seed=0, direct_share=0.5)
    return [
        from_trajectory(trajectory.model_copy(update={"advantage": 1.0}), views)
        for trajectory, views in map(player.play, rows)
    ]


def zipf_texts(spec: ModelSpec, count: int, longest: int) -> list[TrainSample]:
    """Return random texts; the policy wrote the second half of each."""
    rng = np.random.default_rng(0)
    words = np.setdiff1d(np.arange(7, spec.vocab), [*spec.banned, spec.image_token])
    sizes = np.arange(16, longest + 1)
    samples = []
    for n in rng.choice(sizes, count, p=1 / sizes / (1 / sizes).sum()):
        mask = np.arange(n) >= n // 2
        samples.append(TrainSample(rng.choice(words, n), mask, np.zeros(n, np.float32), 1.0, []))
    return samples


class Learner:
    """The embedded model with adapters; the same parameters run with packed or with stock attention."""

    def __init__(self) -> None:
        policy = config.PolicyConfig(dtype="float32")
        self.model, _, self.spec = load_model(policy, "cpu")
        add_lora(self.model, policy.lora)
        self.banned = banned_mask(self.spec.banned, self.spec.vocab)
        self.text = self.model.model.language_model.config
        self.cache = FeatureCache()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def packed(self, batches: Sequence[PackedBatch]) -> float:
        """Run forward and backward on packed rows; return the negative log-likelihood of all policy
        tokens.
        """
        self.spec.family.attend_packed(self.model)
        total = 0.0
        for batch in batches:
            features = self._view_features(batch)
            log_probs, _ = token_log_probs(self.model, self.spec, batch, features, self.banned)
            total += self._backward(log_probs)
        return total

    def padded(self, batches: Sequence[tuple[PackedBatch, torch.Tensor]]) -> float:
        """Run the same with transformers' attention. batches: each with the lengths of its samples; padded
        here.
        """
        self.text._attn_implementation = "sdpa"
        total = 0.0
        for batch, lengths in batches:
            real = torch.arange(int(lengths.max()))[None] < lengths[:, None]
            tokens = torch.full(real.shape, self.spec.pad)
            tokens[real] = batch.tokens
            positions = torch.zeros(4, *real.shape, dtype=torch.int64)
            positions[:, real] = batch.positions
            mask = torch.zeros_like(real)
            mask[real] = batch.mask
            features = self._view_features(batch)
            rows = features.rows(batch.image_rows) if features is not None else None
            hidden = self.spec.family.hidden_states(
                self.model,
                self.spec,
                tokens,
                positions,
                rows,
                attention_mask=real.long(),
                use_cache=False,
            )
            predecessors = hidden[:, :-1][mask[:, 1:]]
            total += self._backward(project(self.model.lm_head, predecessors, tokens[mask], self.banned)[0])
        return total

    def take_gradient(self) -> torch.Tensor:
        """Return all gradients in one vector and clear them."""
        gradient = torch.cat([p.grad.ravel() for p in self.parameters if p.grad is not None])
        for parameter in self.parameters:
            parameter.grad = None
        return gradient

    def _view_features(self, batch: PackedBatch) -> Features | None:
        if not batch.views:
            return None
        return concatenate(self.cache.get(self.model, self.spec, batch.views, batch.digests))

    def _backward(self, log_probs: torch.Tensor) -> float:
        loss = -log_probs.sum()
        loss.backward()
        return float(loss.detach())


def measure(
    report: Report, name: str, learner: Learner, samples: list[TrainSample], args: argparse.Namespace
) -> None:
    """Report all rows about one mix of lengths."""
    lengths = [len(s.tokens) for s in samples]
    real = sum(lengths)
    report.row(
        f"{name}: lengths",
        f"{min(lengths)} .. {max(lengths)}, mean {real / len(lengths):.0f}",
        "",
        f"{len(samples)} samples",
    )
    for rows, goal in ((1, ""), (ROWS, "<= 1.02")):
        capacity = rows * args.row_tokens
        bins, bound = len(pack(lengths, capacity)), math.ceil(real / capacity)
        report.row(f"{name}: bins of {capacity} / lower bound", bins / bound, goal, f"{bins} / {bound}")
    batches = [collate([samples[i] for i in members], learner.spec) for members in pack(lengths, capacity)]
    report.row(
        f"{name}: real / computed tokens, packed",
        real / sum(len(b.tokens) for b in batches),
        ">= 0.95",
        "linear layers",
    )
    in_buckets = sum(bucket.numel() for batch in batches for bucket in batch.segments.buckets)
    report.row(
        f"{name}: real / computed tokens in attention", real / in_buckets, "", "buckets of similar length"
    )
    groups = [samples[i : i + PADDED_ROWS] for i in range(0, len(samples), PADDED_ROWS)]
    padded = [(collate(g, learner.spec), torch.tensor([len(s.tokens) for s in g])) for g in groups]
    share = real / sum(len(sizes) * int(sizes.max()) for _, sizes in padded)
    report.row(f"{name}: real / computed tokens, right padding", share, "", f"micro-batches of {PADDED_ROWS}")

    losses, gradients = [], []
    single = [(collate([s], learner.spec), torch.tensor([len(s.tokens)])) for s in samples[: args.checked]]
    checked = samples[: len(single)]
    packed = [
        collate([checked[i] for i in m], learner.spec)
        for m in pack([len(s.tokens) for s in checked], capacity)
    ]
    policy_tokens = sum(s.policy_tokens for s in checked)
    for run in (lambda: learner.packed(packed), lambda: learner.padded(single)):
        losses.append(run() / policy_tokens)
        gradients.append(learner.take_gradient())
    loss = abs(losses[0] - losses[1])
    gradient = float((gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max())
    report.row(
        f"{name}: |packed - unpadded| loss per token",
        f"{loss:.1e}",
        "<= 1e-5",
        "transformers, one sample at a time",
    )
    report.row(
        f"{name}: largest gradient difference", f"{gradient:.1e}", "<= 1e-5", "of the largest gradient"
    )
    if not (loss <= 1e-5 and gradient <= 1e-5):
        raise AssertionError(
            f"{name}: packed and unpadded differ by {loss:.1e} in the loss, {gradient:.1e} in the gradient"
        )

    def ours() -> None:
        learner.packed(batches)
        learner.take_gradient()

    def baseline() -> None:
        learner.padded(padded)
        learner.take_gradient()

    ratio = compare(ours, baseline, args.repeats, clock=CLOCKS[args.clock])
    report.row(
        f"{name}: forward and backward, packed / padded", ratio, "", f"padding alone would give {share:.3f}"
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Packed rows against right padding")
    parser.add_argument("--traces", type=int, default=512, help="trajectories of the embedded data")
    parser.add_argument("--texts", type=int, default=128, help="texts of the synthetic mix")
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument(
        "--checked", type=int, default=64, help="samples whose loss and gradient are compared"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="cpu: seconds of this process, for a busy machine",
    )
    args = parse_args(parser, traces=8, texts=6, row_tokens=256, checked=2, repeats=2)
    torch.set_num_threads(1)
    report = Report("Packing against right padding")
    learner = Learner()
    settings = config.load("configs/nano/base.yaml", [])
    measure(report, "nano", learner, nano_traces(settings, args.traces), args)
    measure(report, "zipf", learner, zipf_texts(learner.spec, args.texts, args.row_tokens), args)
    report.close()


if __name__ == "__main__":
    main()
