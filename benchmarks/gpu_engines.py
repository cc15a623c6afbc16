"""Parts of `benchmarks.gpu` with an engine: parity with the learner, versions, and GRPO end to end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.gpu_models import episodes, picture, shown_tokens
from benchmarks.gpu_part import MIB, ROOT, Part, Skip, job
from pixelis import config
from pixelis.dialogue.session import SamplingParams
from pixelis.families import FAMILIES
from pixelis.policy.adapters import Adapter
from pixelis.policy.export import BaseFile
from pixelis.policy.model_path import fingerprint
from pixelis.policy.samples import TrainSample
from pixelis.policy.tensor_parts import FlatTensors
from pixelis.policy.train_step import Trainer

SMALL = [
    "rft.prompts_per_step=2",
    "rft.group_size=2",
    "dialogue.max_turns=1",
    "dialogue.max_turn_tokens=8",
    "rft.steps=4",
]
SMALL += ["dialogue.input.min_pixels=784", "dialogue.input.max_pixels=12544", "dialogue.max_context=8192"]
SMALL += ["engine.gpus=0", "learner.gpus=0", "engine.cpus=.25", "learner.cpus=.25", "learner.row_tokens=8192"]
"""Overrides for a run on a CPU."""
DIALOGUE = config.DialogueConfig(max_context=8192).with_max_pixels(400_000)
"""Limits of an engine for the episodes of these parts."""
ROW = 1024
"""Tokens of the longest of their episodes, rounded up."""


async def generate(engine: Any, batch: list[TrainSample], tokens: int) -> list[TrainSample]:
    """Answer the prompts of episodes; returns episodes with the engine's tokens and log-probabilities."""

    async def one(number: int, sample: TrainSample) -> TrainSample:
        prompt = sample.tokens[: int(np.argmax(sample.mask))].tolist()
        session = await engine.open(str(number))
        completion = await session.generate(
            prompt, sample.views, SamplingParams(1.0, 1.0, tokens, seed=number)
        )
        session.close()
        mask = np.arange(len(prompt) + len(completion.tokens)) >= len(prompt)
        log_probs = np.zeros(len(mask), np.float32)
        log_probs[mask] = completion.log_probs
        return TrainSample(np.asarray([*prompt, *completion.tokens]), mask, log_probs, 0.0, sample.views)

    return list(await asyncio.gather(*(one(i, sample) for i, sample in enumerate(batch))))


def check_engine(part: Part, name: str, engine: Any, trainer: Trainer, runner: asyncio.Runner) -> None:
    """Log-probabilities of an engine against those of the learner's present parameters, and its speed."""
    answered = speed(part, name, engine, 2 if part.smoke else 64, runner)
    mean = difference(trainer, answered)
    part.figure(f"{name}: mean |log-probability - learner's|", mean, mean < 0.05, "< .05")


def speed(part: Part, name: str, engine: Any, count: int, runner: asyncio.Runner) -> list[TrainSample]:
    """Answer `count` episodes with a picture at once; returns them."""
    batch = episodes(engine.spec, count, 64, 4096 if part.smoke else 200_000, seed=count)
    runner.run(generate(engine, batch[:2], 8))
    start = time.perf_counter()
    answered = runner.run(generate(engine, batch, 8 if part.smoke else 256))
    seconds = time.perf_counter() - start
    part.figure(f"{name}: episodes/s", count / seconds)
    part.figure(f"{name}: generated tokens/s", sum(int(s.mask.sum()) for s in answered) / seconds)
    return answered


def difference(trainer: Trainer, answered: list[TrainSample]) -> float:
    """Mean |difference| of an engine's log-probabilities from the learner's."""
    pairs = zip(trainer.model.log_probs(answered), answered, strict=True)
    return float(
        np.concatenate([np.abs(values - sample.log_probs[sample.mask]) for values, sample in pairs]).mean()
    )


def six_turns(part: Part, name: str, engine: Any, runner: asyncio.Runner) -> None:
    """Eight episodes of six turns with a crop each: how much of their prompts an engine finds in its caches."""
    generator = np.random.default_rng(0)
    pixels = (4096, 2048) if part.smoke else (1_000_000, 100_000)
    question, crops = (picture(engine.spec, size, generator) for size in pixels)

    async def episode(number: int) -> None:
        session, view = await engine.open(f"turns-{number}"), question
        for turn in range(6):
            shown = [*shown_tokens(engine.spec, view), 100 + turn]
            await session.generate(shown, [view], SamplingParams(1.0, 1.0, 8, seed=number))
            view = crops
        session.close()

    async def episodes_at_once() -> None:
        await asyncio.gather(*map(episode, range(8)))

    read, reused = engine.tokens_read, engine.tokens_reused
    runner.run(episodes_at_once())
    read, reused = engine.tokens_read - read, engine.tokens_reused - reused
    part.figure(f"{name}: share of prompts from the cache, six turns", reused / max(1, read + reused))


def trl_step(part: Part) -> None:
    """One step of the learner beside that of TRL's GRPOTrainer: same model, tokens and settings."""
    if importlib.util.find_spec("trl") is None:
        raise Skip("needs TRL: pip install trl==1.16.* datasets")
    command = [sys.executable, "-m", "benchmarks.grpo_step", "--only", "lora", "--device", part.device.type]
    command += ["--model", str(part.model("qwen2_5_vl", "3b"))] + ["--smoke"] * part.smoke
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    rows = json.loads(run.stdout.splitlines()[-1])
    for kind in ("uniform", "zipf"):
        ratio = rows[f"lora {kind}: step, ours / TRL"]
        part.figure(
            f"{kind} lengths: s of our step, of TRL's", f"{ratio['ours_s']:.3f}, {ratio['baseline_s']:.3f}"
        )
        part.figure(f"{kind} lengths: ours / TRL's", ratio["median"], ratio["median"] <= 1, "<= 1")


def hf_engine(part: Part) -> None:
    """The embedded engine in bfloat16 against the learner."""
    from pixelis.engines.hf import HfEngine

    folder = part.model("qwen2_5_vl", "0.5b")
    policy = config.PolicyConfig(
        model=str(folder), dtype="bfloat16", lora=config.LoraConfig(rank=16, alpha=32)
    )
    trainer = Trainer(policy, config.LearnerConfig(row_tokens=ROW, rows=1), total_steps=1, device=part.device)
    with contextlib.closing(trainer), asyncio.Runner() as runner:
        engine = HfEngine(folder, policy, config.EngineConfig(max_num_seqs=64))
        check_engine(part, "base", engine, trainer, runner)
        runner.run(engine.aclose())


def free_mib(part: Part) -> float:
    """MiB that are free on the GPU; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] / MIB if part.device.type == "cuda" else 0.0


def vllm_engine(part: Part) -> None:
    """vLLM: log-probabilities against the learner's before and after training, LoRA swaps, sleep and wake."""
    if importlib.util.find_spec("vllm") is None:
        raise Skip("needs vLLM")
    for family, size in (("qwen2_5_vl", "3b"), ("qwen3_vl", "0.5b"))[: 1 if part.smoke else 2]:
        with part.attempt(family):
            vllm_figures(part, family, size)


def vllm_figures(part: Part, family: str, size: str) -> None:
    """Figures of one family."""
    from pixelis.engines.vllm import VllmEngine

    folder, name = part.model(family, size), f"{family} {size}"
    policy = config.PolicyConfig(
        model=str(folder), dtype="bfloat16", lora=config.LoraConfig(rank=32, alpha=64)
    )
    settings = config.EngineConfig(
        name="vllm", gpus=1, colocate=True, gpu_memory_utilization=0.5, max_num_seqs=192
    )
    learner = config.LearnerConfig(row_tokens=ROW, rows=1, lr=1e-3, warmup=0.0)
    trainer = Trainer(policy, learner, total_steps=2, device=part.device)
    with contextlib.closing(trainer), asyncio.Runner() as runner:
        engine = VllmEngine(folder, policy, settings, DIALOGUE)
        try:
            check_engine(part, f"{name}, base", engine, trainer, runner)
            for count in (4,) if part.smoke else (64, 128, 192):
                speed(part, f"{name}, {count} at once", engine, count, runner)
            for _ in range(2):  # the first adapter's B is zero: it would prove nothing
                trainer.update(episodes(trainer.model.spec, 4, 512, 4096 if part.smoke else 200_000), "sft")
            answered = runner.run(generate(engine, episodes(engine.spec, 2, 64, 4096), 8))
            part.figure(f"{name}: mean |difference| before loading", difference(trainer, answered))
            adapter, free, seconds = trainer.adapter(), [], []
            for version in range(1, 21):
                start = time.perf_counter()
                runner.run(engine.load(version, adapter))
                seconds.append(time.perf_counter() - start)
                free.append(free_mib(part))
            part.figure(
                f"{name}: LoRA swap, s", statistics.median(seconds), statistics.median(seconds) < 1, "< 1"
            )
            drift = abs(free[-1] - free[0])
            part.figure(f"{name}: memory after 20 swaps, MiB", drift, drift <= 100, "+- 100")
            check_engine(part, f"{name}, adapter", engine, trainer, runner)
            six_turns(part, name, engine, runner)
            for times in ("first", "second"):
                awake, start = free_mib(part), time.perf_counter()
                runner.run(engine.sleep())
                part.figure(f"{name}: {times} sleep, s", time.perf_counter() - start)
                part.figure(f"{name}: freed by the {times} sleep, GiB", (free_mib(part) - awake) / 1024)
                start = time.perf_counter()
                runner.run(engine.wake())
                part.figure(f"{name}: {times} wake, s", time.perf_counter() - start)
            check_engine(part, f"{name}, awake", engine, trainer, runner)
            runner.run(engine.sleep())
            kill_children()
        finally:
            runner.run(engine.aclose())
        start = time.perf_counter()
        engine = VllmEngine(folder, policy, settings, DIALOGUE)
        part.figure(f"{name}: start after a SIGKILL asleep, s", time.perf_counter() - start)
        try:
            runner.run(engine.load(1, adapter))
            check_engine(part, f"{name}, after a SIGKILL", engine, trainer, runner)
        finally:
            runner.run(engine.aclose())


def kill_children() -> None:
    """SIGKILL to every process that this one has started: those of vLLM's engine."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=30)


def weights(part: Part) -> None:
    """Versions of all parameters: hash, broadcast on this host, and loads by the engine."""
    from pixelis.engines.hf import HfEngine
    from pixelis.policy.weight_stream import StreamPlace, WeightSender, receive, request

    folder = part.model("qwen2_5_vl", "3b")
    base = BaseFile(folder, FAMILIES["qwen2_5_vl"])
    tensors = FlatTensors([(name, "uint16", tuple(shape.shape)) for name, shape in base.shapes.items()])
    for name, values in tensors.items():
        values[...] = base.read(name).bfloat16().view(torch.uint16).numpy()
    version = Adapter(tensors, 1, 1, fingerprint(folder), "full")
    part.figure(
        "bytes / bytes of bfloat16", version.nbytes / (2 * sum(s.numel() for s in base.shapes.values())), None
    )
    part.figure("hash, s", part.timed(version.sha256))
    sender, place = WeightSender("127.0.0.1", "gloo", 120.0), None
    request(sender.address, 1, "certification", 2)
    place = StreamPlace(sender.address, "certification", 1, 2)
    with ThreadPoolExecutor(1) as pool:
        start = time.perf_counter()
        sent = pool.submit(sender.send, 1, version)
        received = receive(place)
        part.figure("broadcast by gloo to one receiver, s", time.perf_counter() - start)
        part.figure("bytes sent", sent.result()["bytes"])
    policy = config.PolicyConfig(model=str(folder), dtype="bfloat16", full=True)
    with asyncio.Runner() as runner:
        if importlib.util.find_spec("vllm") is not None:
            from pixelis.engines.vllm import VllmEngine

            settings = config.EngineConfig(name="vllm", gpus=1, gpu_memory_utilization=0.5, max_num_seqs=64)
            engine: Any = VllmEngine(folder, policy, settings, DIALOGUE)
        else:
            engine = HfEngine(folder, policy, config.EngineConfig(max_num_seqs=64))
        try:
            batch = episodes(engine.spec, 2, 64, 4096)
            before, engine_version = runner.run(generate(engine, batch, 8)), engine.version
            load = part.timed(lambda: runner.run(engine.load(1, received)), 3)
            part.figure(f"load by {type(engine).__name__}, s", load, load < 1.5, "< 1.5")
            runner.run(engine.load(engine_version, None))
            after = runner.run(generate(engine, batch, 8))
            equal = [a.tokens.tolist() for a in before] == [a.tokens.tolist() for a in after]
            part.figure("the base again after unloading", equal, equal, "True")
        finally:
            runner.run(engine.aclose())


def grpo(part: Part) -> None:
    """GRPO end to end with generator and learner on one GPU: where the time of a step goes."""
    has_vllm = part.device.type == "cuda" and importlib.util.find_spec("vllm") is not None
    for size in ("0.5b",) if part.smoke else ("3b", "0.5b"):
        with part.attempt(size):
            grpo_steps(part, size, "vllm" if has_vllm else "hf")


def grpo_steps(part: Part, size: str, engine: str) -> None:
    """Figures of one size. The embedded engine, made for small models, generates shorter turns."""
    run = part.folder / f"grpo-{size}"
    overrides = [
        f"policy.model={part.model('qwen2_5_vl', size)}",
        f"run.dir={run}",
        f"engine.name={engine}",
        "rft.steps=6",
    ]
    overrides += ["data.train=cards:?split=train", "toolbox.operations=[zoom_in]", "rft.evaluate_every=0"]
    # Random models earn no reward; the bonus gives every sample a gradient, so that none is left out.
    overrides += ["rft.loss.entropy=0.001"]
    overrides += [f"dialogue.max_turn_tokens={256 if engine == 'hf' else 512}", "dialogue.max_context=8192"]
    if engine == "hf":
        overrides += ["engine.max_num_seqs=128"]
    overrides += SMALL if part.smoke else []
    job("rft", "configs/qwen2_5_vl_3b/rft_80gb.yaml", *overrides)
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if row.get("kind") == "step/policy"][2:]
    rollout, learn = (
        statistics.fmean(row[name] for row in steps) for name in ("rollout/seconds", "learner/seconds")
    )
    wall = (steps[-1]["time"] - steps[0]["time"]) / max(1, len(steps) - 1)
    idle = max(0.0, 1 - (rollout + learn) / wall)
    part.figure(f"{size} {engine}: s a step", wall)
    part.figure(f"{size} {engine}: generating, learning, s", f"{rollout:.2f}, {learn:.2f}")
    part.figure(f"{size} {engine}: share of neither", idle, idle < 0.15, "< .15")
