"""One GRPO step of the learner against TRL's `GRPOTrainer`: same model, tokens, old log-probabilities,
advantages and settings.

`python -m benchmarks.grpo_step` needs TRL, which is not a dependency of Pixelis: `pip install trl==1.16.*
datasets`.

Prints one JSON line per part. TRL runs its own code (`training_step`, clipping, AdamW) on a prepared batch;
only its generation is replaced by fixed completions, padded as TRL pads them. Pixelis runs `Trainer.update`.
Both run without gradient checkpointing, in fp32 with one thread, or on a GPU (`--device cuda`) in bfloat16.
Loss and gradients of both are compared before timing. On a CPU, TRL projects every position through the LM head
(on GPUs with Triton only the completions); Pixelis projects only the tokens that the policy wrote.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch
import transformers

from benchmarks.harness import CLOCKS, Report, compare, parse_args, time_call
from pixelis import config
from pixelis.dialogue.session import SamplingParams
from pixelis.engines.hf import HfEngine
from pixelis.errors import MissingDependency
from pixelis.nano.architecture import build, save
from pixelis.nano.tokenizer import build_tokenizer
from pixelis.policy.samples import TrainSample
from pixelis.policy.train_step import Trainer

GROUP = 8
PARTS = ("full", "lora", "whole")
GOALS = {"uniform": 0.7, "zipf": 0.25}
LR = 1e-6
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
TOLERANCES = {"cpu": 1e-5, "cuda": 0.05}
"""Of the differences of loss and gradients."""
SIZES = {
    "hidden": 256,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "feedforward": 704,
    "vision_hidden": 32,
    "vision_layers": 1,
}
LORA = config.LoraConfig(
    rank=16, alpha=32, targets=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
)


@dataclass(frozen=True)
class Rollouts:
    """The common input of both learners: one entry per rollout. old: log-probabilities of the completion's
    tokens.
    """

    prompts: list[np.ndarray]
    completions: list[np.ndarray]
    old: list[np.ndarray]
    advantages: np.ndarray

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt with its completion."""
        return [len(p) + len(c) for p, c in zip(self.prompts, self.completions, strict=True)]

    def samples(self) -> list[TrainSample]:
        """Return the input of the Pixelis learner."""
        samples = []
        for prompt, completion, old, advantage in zip(
            self.prompts, self.completions, self.old, self.advantages, strict=True
        ):
            mask = np.arange(len(prompt) + len(completion)) >= len(prompt)
            log_probs = np.zeros(len(mask), np.float32)
            log_probs[mask] = old
            samples.append(
                TrainSample(np.concatenate([prompt, completion]), mask, log_probs, float(advantage), [])
            )
        return samples

    def padded(self, pad: int) -> dict[str, torch.Tensor]:
        """Return what TRL's `_generate_and_score_completions` returns: prompts padded left, completions
        padded right.
        """
        from trl.trainer.utils import pad as stack

        def rows(values: list[np.ndarray], filler: float, side: str) -> torch.Tensor:
            return stack([torch.from_numpy(v) for v in values], padding_value=filler, padding_side=side)

        completion_mask = rows([np.ones_like(c) for c in self.completions], 0, "right")
        return {
            "prompt_ids": rows(self.prompts, pad, "left"),
            "prompt_mask": rows([np.ones_like(p) for p in self.prompts], 0, "left"),
            "completion_ids": rows(self.completions, pad, "right"),
            "completion_mask": completion_mask,
            "old_per_token_logps": rows(self.old, 0.0, "right"),
            "advantages": torch.from_numpy(self.advantages),
            "num_items_in_batch": completion_mask.sum(),
        }


def make_model(folder: Path, vocab: int) -> None:
    """Save a randomly initialised Qwen2.5-VL in a folder that both sides load."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([f"<word{i}>" for i in range(vocab - len(tokenizer))])
    save(build(tokenizer, "qwen2_5_vl", seed=0, **SIZES), tokenizer, folder)


def completion_lengths(kind: str, count: int, longest: int, rng: np.random.Generator) -> np.ndarray:
    """Return lengths. `uniform`: all a quarter of the longest.

    `zipf`: P(n) ~ 1/n; the longest occurs at least once.
    """
    if kind == "uniform":
        return np.full(count, longest // 4)
    sizes = np.arange(longest // 32, longest + 1)
    lengths = rng.choice(sizes, count, p=1 / sizes / (1 / sizes).sum())
    lengths[rng.integers(count)] = longest
    return lengths


def random_rollouts(
    kind: str, groups: int, longest: int, words: np.ndarray, rng: np.random.Generator
) -> Rollouts:
    """Return random prompts, completions and rewards, as group-normalised advantages; old log-probabilities
    are 0.
    """
    lengths = completion_lengths(kind, groups * GROUP, longest, rng)
    sizes = np.full(groups, 48) if kind == "uniform" else rng.integers(24, 72, groups)
    prompts = [prompt for n in sizes for prompt in [rng.choice(words, n)] * GROUP]
    rewards = rng.normal(size=(groups, GROUP))
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    completions = [rng.choice(words, n) for n in lengths]
    return Rollouts(
        prompts,
        completions,
        [np.zeros(n, np.float32) for n in lengths],
        advantages.ravel().astype(np.float32),
    )


class TrlLearner:
    """TRL's `GRPOTrainer`, which trains on a prepared batch."""

    def __init__(
        self,
        folder: Path,
        prompts: list[str],
        micro: int,
        lora: config.LoraConfig | None,
        max_tokens: int,
        device: str,
    ):
        from datasets import Dataset
        from peft import LoraConfig
        from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
        from trl import GRPOConfig, GRPOTrainer

        self.steps = len(prompts) // micro
        arguments = GRPOConfig(
            output_dir=tempfile.mkdtemp(prefix="pixelis-trl-"),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=self.steps,
            num_generations=GROUP,
            max_completion_length=max_tokens,
            loss_type="dapo",
            epsilon=0.2,
            beta=0.0,
            temperature=1.0,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta2=0.99,
            weight_decay=0.0,
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            bf16=device == "cuda",
            use_cpu=device == "cpu",
            report_to="none",
            disable_tqdm=True,
        )
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder, dtype=DTYPES[device], attn_implementation="sdpa"
        )
        peft_config = None
        if lora is not None:
            pattern = rf".*language_model.*\.({'|'.join(lora.targets)})"
            peft_config = LoraConfig(
                r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=pattern, bias="none"
            )
        self.rows = [{"prompt": p} for p in prompts]
        self.trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: (
                np.random.default_rng(0).normal(size=len(completions)).tolist()
            ),
            args=arguments,
            train_dataset=Dataset.from_list(self.rows),
            processing_class=AutoTokenizer.from_pretrained(folder),
            peft_config=peft_config,
        )
        self.trainer.create_optimizer()
        self.model, self.trainer.optimizer = self.trainer.accelerator.prepare(
            self.trainer.model, self.trainer.optimizer
        )
        self.trainer.model_wrapped = self.model
        self.trainer.current_gradient_accumulation_steps = self.steps
        self.model.train()

    def use_batch(self, batch: dict[str, torch.Tensor]) -> None:
        """Train on this batch instead of generating."""
        batch = {name: values.to(self.trainer.accelerator.device) for name, values in batch.items()}
        self.trainer._generate_and_score_completions = lambda _: dict(batch)

    def backward(self) -> float:
        """Run all micro-batches of the batch; return the loss."""
        return sum(float(self.trainer.training_step(self.model, self.rows, None)) for _ in range(self.steps))

    def step(self) -> None:
        """Run backward passes, clipping and the optimizer step, as transformers'
        `Trainer._inner_training_loop` does.
        """
        self.backward()
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), self.trainer.args.max_grad_norm)
        self.trainer.optimizer.step()
        self.model.zero_grad()

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trainable parameters by the names that Pixelis gives them."""
        parameters = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                name = name.removeprefix("base_model.model.")
                parameters[
                    name.replace(".lora_A.default.weight", ".A").replace(".lora_B.default.weight", ".B")
                ] = parameter
        return parameters


def make_trainer(folder: Path, lora: config.LoraConfig | None, longest: int, device: str) -> Trainer:
    """Return the Pixelis learner with TRL's settings."""
    policy = config.PolicyConfig(
        model=str(folder),
        dtype="bfloat16" if device == "cuda" else "float32",
        full=lora is None,
        gradient_checkpointing=False,
        lora=lora or LORA,
    )
    learner = config.LearnerConfig(lr=LR, warmup=0.0, row_tokens=max(1024, longest), zero_stage=0)
    loss = config.LossConfig(aggregate="token", clip_low=0.2, clip_high=0.2, importance="none")
    trainer = Trainer(policy, learner, loss, total_steps=10**6, device=device)
    # TRL has no banned ids. The zeroed mask is still added, so the work stays the same.
    trainer.model.zero.engine.module.banned.zero_()
    return trainer


def gradients(
    trainer: Trainer, samples: list[TrainSample], old: list[np.ndarray]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Train one step of Pixelis; return its loss and its gradients before clipping."""
    gradients: dict[str, torch.Tensor] = {}
    apply = trainer.model.zero.apply

    def record_and_apply(lr: float) -> float | None:
        gradients.update(
            {n: p.grad.clone() for n, p in trainer.model.zero.parameters.items() if p.grad is not None}
        )
        return apply(lr)

    trainer.model.zero.apply = record_and_apply  # type: ignore[method-assign]
    loss = trainer.update(samples, "policy", old)["policy/loss"]
    trainer.model.zero.apply = apply  # type: ignore[method-assign]
    return loss, gradients


def differences(trainer: Trainer, trl: TrlLearner, rollouts: Rollouts) -> tuple[float, float]:
    """Return the difference of the losses and the largest difference of the gradients, relative to the
    largest gradient.

    A missing gradient counts as zeros: Pixelis passes a blank view through a trained vision tower, so that
    all workers take part in the same reductions; TRL skips the tower in a batch without pictures.
    """
    with torch.no_grad():
        trl_parameters = trl.parameters()
        for name, value in trainer.model.zero.weights().items():
            trl_parameters[name].copy_(torch.from_numpy(value))
    trl_loss = trl.backward()
    loss, ours = gradients(trainer, rollouts.samples(), rollouts.old)
    theirs = {n: p.grad for n, p in trl_parameters.items() if p.grad is not None}
    zero = torch.zeros(())
    largest = max(
        float((theirs.get(n, zero) - ours.get(n, zero)).abs().max()) for n in theirs.keys() | ours.keys()
    )
    trl.model.zero_grad()
    return abs(loss - trl_loss), largest / max(float(g.abs().max()) for g in theirs.values())


def flops(trainer: Trainer, rollouts: Rollouts, lora: bool) -> float:
    """Return the FLOPs (2 x multiply-adds) of forward and backward on unpadded tokens, with causal attention.

    The LM head counts for completion tokens only. A prompt counts in each of its rollouts, although one pass
    per group is enough. Backward costs twice the forward, or once where weights are frozen; the adapters' own
    work is left out.
    """
    model: Any = trainer.model.network
    linear = [m for m in model.model.language_model.modules() if isinstance(m, torch.nn.Linear)]
    body = sum(m.weight.numel() for m in linear if min(m.weight.shape) > LORA.rank)
    head = model.lm_head.weight.numel()
    text = model.config.text_config
    width, layers = text.hidden_size, text.num_hidden_layers
    written = sum(map(len, rollouts.completions))
    dense = 2 * (body * sum(rollouts.lengths) + head * written)
    attention = sum(2 * width * n * n * layers for n in rollouts.lengths)
    return dense * (2 if lora else 3) + 3 * attention


def gemm_rate(clock: str, device: str) -> float:
    """Return the FLOP per second of one large matrix product on this machine."""
    rows, width = (2048, 768) if device == "cpu" else (16384, 4096)
    a, b = (torch.randn(n, width, device=device, dtype=DTYPES[device]) for n in (rows, width))
    product = finished(partial(torch.mm, a, b), device)
    product()
    return 2 * rows * width * width / min(time_call(product, CLOCKS[clock]) for _ in range(20))


def finished(work: Callable[[], object], device: str) -> Callable[[], None]:
    """The work until the GPU has done it."""

    def call() -> None:
        work()
        if device == "cuda":
            torch.cuda.synchronize()

    return call


def learner_rows(
    report: Report, folder: Path, args: argparse.Namespace, lora: config.LoraConfig | None
) -> None:
    """Report the learner's step with uniform and Zipf lengths."""
    name = "lora" if lora else "full"
    count = args.groups * GROUP
    trl = TrlLearner(
        folder,
        [f"<word{i}>" for i in range(args.groups) for _ in range(GROUP)],
        args.micro,
        lora,
        1,
        args.device,
    )
    trainer, tolerance = make_trainer(folder, lora, args.longest + 128, args.device), TOLERANCES[args.device]
    spec = trainer.model.spec
    words = np.setdiff1d(np.arange(300, args.vocab), [*spec.banned, spec.image_token])
    for kind in args.lengths:
        rng = np.random.default_rng(args.seed)
        rollouts = random_rollouts(kind, args.groups, args.longest, words, rng)
        old = [
            (p + rng.normal(0, 0.15, len(p))).astype(np.float32)
            for p in trainer.model.log_probs(rollouts.samples())
        ]
        rollouts = replace(rollouts, old=old)
        batch = rollouts.padded(trl.trainer.processing_class.pad_token_id)
        trl.use_batch(batch)
        loss, gradient = differences(trainer, trl, rollouts)
        real = sum(rollouts.lengths)
        computed = count * (batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1])
        report.row(f"{name} {kind}: |loss difference|", f"{loss:.1e}", f"<= {tolerance}")
        report.row(
            f"{name} {kind}: largest gradient difference",
            f"{gradient:.1e}",
            f"<= {tolerance}",
            "of the largest gradient",
        )
        if not (loss <= tolerance and gradient <= tolerance):
            raise AssertionError(f"{name} {kind}: loss differs by {loss:.1e}, gradients by {gradient:.1e}")
        samples = rollouts.samples()
        steps = partial(trainer.update, samples, "policy", old), trl.step
        ratio = compare(
            *(finished(step, args.device) for step in steps), args.repeats, clock=CLOCKS[args.clock]
        )
        report.row(f"{name} {kind}: step, ours / TRL", ratio, f"<= {GOALS[kind]}")
        work = flops(trainer, rollouts, lora is not None)
        floor = work / gemm_rate(args.clock, args.device)
        note = f"{real} tokens, TRL computes {computed}; ours is {ratio.ours_s / floor:.2f}x the floor"
        report.row(f"{name} {kind}: floor (FLOPs / GEMM rate), ms", 1e3 * floor, "", note)
    trainer.close()


async def step(
    engine: HfEngine, trainer: Trainer, prompts: list[list[int]], rng: np.random.Generator, max_tokens: int
) -> None:
    """Run one whole Pixelis step: publish, generate, score, train."""
    await engine.load(engine.version + 1, trainer.adapter())
    sampling = SamplingParams(temperature=1.0, top_p=1.0, max_tokens=max_tokens, seed=engine.version)

    async def rollout(number: int) -> TrainSample:
        session = await engine.open(str(number // GROUP))
        prompt = prompts[number]
        completion = await session.generate(prompt, [], sampling)
        session.close()
        mask = np.arange(len(prompt) + len(completion.tokens)) >= len(prompt)
        log_probs = np.zeros(len(mask), np.float32)
        log_probs[mask] = completion.log_probs
        return TrainSample(
            np.asarray([*prompt, *completion.tokens]), mask, log_probs, float(rng.normal()), []
        )

    trainer.update(await asyncio.gather(*(rollout(i) for i in range(len(prompts)))))


def whole_row(report: Report, folder: Path, args: argparse.Namespace) -> None:
    """Report generation (transformers' `generate` in TRL, the embedded engine in Pixelis) and the step
    together.
    """
    texts = [
        "".join(f"<word{100 * i + j}>" for j in range(48)) for i in range(args.groups) for _ in range(GROUP)
    ]
    max_tokens = args.longest // 4
    trl = TrlLearner(folder, texts, args.micro, None, max_tokens, "cpu")
    trainer = make_trainer(folder, None, args.longest + 128, "cpu")
    prompts = [trl.trainer.processing_class(t)["input_ids"] for t in texts]
    engine = HfEngine(folder, trainer.policy, config.EngineConfig(max_num_seqs=len(texts), threads=1))
    rng = np.random.default_rng(args.seed)
    with asyncio.Runner() as runner:

        def ours() -> None:
            runner.run(step(engine, trainer, prompts, rng, max_tokens))

        ratio = compare(ours, trl.step, args.repeats, clock=CLOCKS[args.clock])
        runner.run(engine.aclose())
    report.row(
        "full uniform: generation and step, ours / TRL",
        ratio,
        "<= 1.0",
        f"{len(texts)} x up to {max_tokens} tokens",
    )
    trainer.close()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="GRPO step of Pixelis against trl.GRPOTrainer")
    parser.add_argument("--groups", type=int, default=4, help="prompts in a batch, 8 completions each")
    parser.add_argument("--longest", type=int, default=384, help="tokens of the longest completion")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--micro", type=int, default=8, help="TRL's per_device_train_batch_size")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="cpu: seconds of this process, for a busy machine",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lengths", nargs="+", choices=list(GOALS), default=list(GOALS))
    parser.add_argument("--only", choices=PARTS, help="one part of the table; `whole` runs on the CPU")
    parser.add_argument("--device", choices=list(DTYPES), default="cpu")
    parser.add_argument("--model", type=Path, help="folder of a Qwen2.5-VL; by default a random small one")
    args = parse_args(parser, groups=1, longest=64, vocab=1024, repeats=2)
    try:
        import trl
    except ImportError:
        raise MissingDependency(
            "this compares with TRL, which is not installed", fix="pip install trl==1.16.* datasets"
        ) from None
    if args.only is None:
        # The Pixelis learner initialises torch.distributed, for which TRL would wrap its model: run each part
        # in its own process.
        for part in PARTS:
            subprocess.run(
                [sys.executable, "-m", "benchmarks.grpo_step", *sys.argv[1:], "--only", part], check=True
            )
        return
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    report = Report(f"GRPO step against TRL {trl.__version__}")
    with tempfile.TemporaryDirectory(prefix="pixelis-grpo-") as scratch:
        folder = args.model or Path(scratch)
        if args.model is None:
            make_model(folder, args.vocab)
        report.row("GEMM, GFLOP/s", gemm_rate(args.clock, args.device) / 1e9)
        if args.only == "whole":
            whole_row(report, folder, args)
        else:
            learner_rows(report, folder, args, LORA if args.only == "lora" else None)
    report.close()


if __name__ == "__main__":
    main()
