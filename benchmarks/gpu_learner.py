"""Parts of `benchmarks.gpu` that train: rows as RFT makes them, ZeRO stages, offloading, a smaller card."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_models import episodes, groups
from benchmarks.gpu_part import ROOT, Part
from pixelis import config
from pixelis.policy import estimate
from pixelis.policy.architecture import Architecture
from pixelis.policy.train_step import Trainer

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
ROW = 16384
"""Tokens of a row, as long as one group of eight samples."""
CARD_GIB = 22.5
"""What an A10G or an L4 shows of its 24 GB."""


def settings_of(part: Part, family: str, size: str, **policy: Any) -> config.PolicyConfig:
    """A policy with a random model in bfloat16."""
    lora = config.LoraConfig(rank=32, alpha=64)
    return config.PolicyConfig(
        model=str(part.model(family, size)),
        dtype="bfloat16",
        gradient_checkpointing=True,
        lora=lora,
        **policy,
    )


def measured_steps(
    part: Part,
    policy: config.PolicyConfig,
    learner: config.LearnerConfig,
    *,
    shares: bool = True,
    steps: int = 3,
) -> dict[str, float]:
    """Train on new groups in every step; medians over all steps but the first, seconds of each phase, peak
    and estimated bytes.
    """
    gc.collect()  # the model before this one
    on_gpu = part.device.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    trainer = Trainer(policy, learner, total_steps=steps, device=part.device)
    with contextlib.closing(trainer):
        trainer.model.shares_prompts &= shares
        prompt, reply, views = (64, 8, (4096, 4096)) if part.smoke else (3072, 1664, (2_000_000, 400_000))
        count = 1 if part.smoke else 2
        rows = []
        for step in range(steps):
            batch = groups(trainer.model.spec, count, 8, prompt, reply, views, seed=step)
            with phases(part, trainer) as seconds:
                metrics = trainer.update(batch)
            rows.append(metrics | {f"{name} s": value for name, value in seconds.items()})
    result = {name: statistics.median(row.get(name, 0.0) for row in rows[1:]) for name in rows[-1]}
    arch = Architecture(policy, torch.bfloat16)
    result["estimate"] = float(sum(estimate.learner_memory(arch, policy, learner)[0].values()))
    if on_gpu:
        result["peak"] = float(torch.cuda.max_memory_allocated() - before)
    return result


@contextlib.contextmanager
def phases(part: Part, trainer: Trainer) -> Iterator[dict[str, float]]:
    """Seconds of the phases of an update. Forward includes vision."""
    seconds: dict[str, float] = defaultdict(float)
    owners: list[tuple[str, Any, str]] = [
        ("collate", trainer.model, "collate"),
        ("vision", trainer.model.spec.family, "encode_views"),
        ("forward", trainer.rft, "loss"),
        ("backward", trainer.model.zero, "backward"),
        ("optimizer", trainer.model.zero, "apply"),
    ]

    def clocked(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            part.synchronize()
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                part.synchronize()
                seconds[name] += time.perf_counter() - start

        return call

    for name, owner, attribute in owners:
        setattr(owner, attribute, clocked(name, getattr(owner, attribute)))
    try:
        yield seconds
    finally:
        for _, owner, attribute in owners:
            delattr(owner, attribute)


def settings_of_rows(part: Part, **learner: Any) -> config.LearnerConfig:
    """A learner with rows of one group."""
    return config.LearnerConfig(
        row_tokens=512 if part.smoke else ROW,
        rows=1,
        gpus=float(part.device.type == "cuda"),
        lr=1e-5,
        warmup=0.0,
        **{"zero_stage": 0, **learner},
    )


def learner(part: Part) -> None:
    """Training in bfloat16 on rows as RFT makes them, 8 samples with a prompt of 3k: tokens/s, MFU, phases, peak."""
    models = [("3b", False), ("3b", True), ("7b", False)]
    for family, size, full in [(FAMILIES[0], *model) for model in models] + [(FAMILIES[1], "3b", False)]:
        name = f"{family} {size} {'all parameters' if full else 'adapters'}"
        with part.attempt(name):
            policy, settings = settings_of(part, family, size, full=full), settings_of_rows(part)
            figures(part, name, measured_steps(part, policy, settings), has_goal=size == "3b")
    with part.attempt("prompts not shared"):
        m = measured_steps(part, settings_of(part, FAMILIES[0], "3b"), settings_of_rows(part), shares=False)
        figures(part, "qwen2_5_vl 3b adapters, prompts not shared", m, has_goal=False)


def figures(part: Part, name: str, m: dict[str, float], has_goal: bool) -> None:
    """Figures of a model."""
    is_finite = bool(np.isfinite(m["policy/loss"]))
    part.figure(f"{name}: loss is finite", is_finite, is_finite, "yes")
    part.figure(f"{name}: tokens/s", m["learner/tokens_per_s"])
    part.figure(f"{name}: s a step", m["learner/seconds"])
    parts = ("collate", "vision", "forward", "backward", "optimizer")
    part.figure(f"{name}: s of {', '.join(parts)}", ", ".join(f"{m.get(f'{p} s', 0):.3f}" for p in parts))
    if "learner/mfu" in m:
        mfu = m["learner/mfu"]
        part.figure(f"{name}: MFU", mfu, mfu >= 0.35 if has_goal else None, ">= .35" if has_goal else "")
    if "peak" in m:
        ratio = m["peak"] / m["estimate"]
        part.figure(f"{name}: peak GiB", m["peak"] / 2**30)
        part.figure(f"{name}: peak memory / estimate", ratio, abs(ratio - 1) <= 0.1, "within .1")


def zero(part: Part) -> None:
    """ZeRO stages 1 to 3 with one worker, all parameters in bfloat16, and the optimizer on the CPU."""
    policy = settings_of(part, FAMILIES[0], "0.5b", full=True)
    losses = {}
    for stage in (1, 2, 3):
        with part.attempt(f"stage {stage}"):
            m = measured_steps(part, policy, settings_of_rows(part, zero_stage=stage))
            losses[stage] = m["policy/grad_norm"]
            part.figure(f"stage {stage}: s a step", m["learner/seconds"])
            if "peak" in m:
                part.figure(f"stage {stage}: peak memory / estimate", m["peak"] / m["estimate"])
    if len(losses) == 3:
        spread = max(losses.values()) / min(losses.values()) - 1
        part.figure("largest / smallest gradient norm - 1", spread, spread < 0.01, "< .01")
    file = str(ROOT / "configs/deepspeed/zero2_offload.json")
    for threads in (1, 2 if part.smoke else 16):
        with part.attempt(f"offload with {threads} threads"):
            offloads = settings_of_rows(part, zero_stage=2, deepspeed=file, cpus=threads)
            m = measured_steps(part, policy, offloads)
            seconds = f"{m['optimizer s']:.3f} of {m['learner/seconds']:.3f}"
            part.figure(f"offload, {threads} threads: s of the optimizer, of a step", seconds)


def card(part: Part) -> None:
    """The learners of sft_24gb and rft_24gb in the memory of a card of 24 GB, rows and pictures at their limits."""
    if part.device.type == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(CARD_GIB / total)
    try:
        for recipe in ("sft_24gb", "rft_24gb"):
            with part.attempt(recipe):
                card_figures(part, recipe)
    finally:
        if part.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


def card_figures(part: Part, recipe: str) -> None:
    """Figures of one recipe."""
    c = config.load(f"configs/qwen2_5_vl_3b/{recipe}.yaml")
    model = str(part.model(FAMILIES[0], "3b"))
    policy = c.policy.model_copy(update={"model": model, "dtype": "bfloat16"})
    row = 512 if part.smoke else c.learner.row_tokens
    settings = c.learner.model_copy(update={"row_tokens": row, "cpus": 1.0})
    gc.collect()
    if part.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(policy, settings, total_steps=2, device=part.device)
    with contextlib.closing(trainer):
        pixels = 4096 if part.smoke else c.dialogue.input.max_pixels
        batch = episodes(trainer.model.spec, 2, row, pixels)
        for _ in range(2):
            metrics = trainer.update(batch, "sft" if recipe.startswith("sft") else "policy")
    is_finite = bool(np.isfinite(metrics["policy/loss"]))
    part.figure(f"{recipe}: loss is finite", is_finite, is_finite, "yes")
    if part.device.type == "cuda":
        reserved = torch.cuda.max_memory_reserved() / 2**30
        part.figure(f"{recipe}: reserved GiB", reserved, reserved <= CARD_GIB, f"<= {CARD_GIB}")


def gradients(part: Part) -> None:
    """Direction of the first step in bfloat16 against float32."""
    moments = {}
    for dtype in ("float32", "bfloat16"):
        folder = part.model("qwen2_5_vl", "0.5b")
        policy = config.PolicyConfig(
            model=str(folder), dtype=dtype, lora=config.LoraConfig(rank=16, alpha=32)
        )  # type: ignore[arg-type]
        settings = config.LearnerConfig(row_tokens=128 if part.smoke else 2048, rows=1, warmup=0.0)
        trainer = Trainer(policy, settings, total_steps=1, device=part.device)
        trainer.update(
            episodes(trainer.model.spec, 4, settings.row_tokens, 4096 if part.smoke else 200_000), "sft"
        )
        moments[dtype] = np.concatenate(
            [v.ravel() for n, v in trainer.model.zero.moments().items() if n.endswith(".B.exp_avg")]
        )
        trainer.close()
    wide, narrow = moments.values()
    cosine = float(wide @ narrow / (np.linalg.norm(wide) * np.linalg.norm(narrow)))
    part.figure("cosine of gradients, bfloat16 and float32", cosine, cosine > 0.995, "> .995")
