"""Certification of a GPU machine: correctness, speed and memory of every part that runs on a GPU, with random weights.

    python -m benchmarks.gpu [PART ...] [--list] [--again] [--results FILE]

Each part prints its figures with their goals, and appends one line to benchmarks/results/gpu.jsonl: passed, failed, or skipped
with the reason. A part that has passed on this commit and device is not run again without --again. Needs a checkout, a driver and
torch; parts that need vLLM are skipped without it. `--smoke` runs tiny shapes, also on a CPU, where figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.gpu_models import episodes, picture, random_model
from benchmarks.harness import parse_args
from pixelis import config
from pixelis.dialogue.session import SamplingParams
from pixelis.policy import estimate
from pixelis.policy.architecture import Architecture
from pixelis.policy.forward import encode_views
from pixelis.policy.log_probs import banned_mask, project
from pixelis.policy.model import default_device, load_model
from pixelis.policy.samples import TrainSample
from pixelis.policy.train_step import Trainer

RESULTS = Path(__file__).parent / "results" / "gpu.jsonl"
ROOT = Path(__file__).parents[1]
MIB = 2**20


class Skip(Exception):
    """The part cannot run here; the message is the reason."""


@dataclass
class Part:
    """A part while it runs. device, smoke, folder: of the whole run; figures: name -> value; failures: missed goals."""

    device: torch.device
    smoke: bool
    folder: Path
    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def figure(self, name: str, value: Any, passed: bool | None = None, goal: str = "") -> None:
        """Record and print a figure. passed: whether it reaches its goal; None without one. Goals do not count in a smoke run."""
        self.figures[name] = value
        if passed is False and not self.smoke:
            self.failures.append(f"{name} {value} (goal {goal})")
        mark = {None: " ", True: "+", False: "-"}[passed]
        text = f"{value:.4g}" if isinstance(value, float) else value
        print(f"  {mark} {name:58} {text}  {f'goal {goal}' if goal else ''}".rstrip(), flush=True)

    def timed(self, function: Callable[[], object], repeats: int = 5) -> float:
        """Median seconds of a call, after one warm-up."""
        function()
        seconds = []
        for _ in range(1 if self.smoke else repeats):
            self.synchronize()
            start = time.perf_counter()
            function()
            self.synchronize()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def extra_memory(self, function: Callable[[], object]) -> float | None:
        """MiB that a call allocates on the GPU beyond what was allocated before; None on a CPU."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / MIB

    def model(self, family: str, size: str) -> Path:
        """Folder of a random model; tiny in a smoke run."""
        return random_model(self.folder, family, "tiny" if self.smoke else size, self.device)


def environment(part: Part) -> None:
    """Driver, CUDA, NCCL, shared memory, FAISS."""
    if part.device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        part.figure("GPU", f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        part.figure("driver", subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0])
        part.figure("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
        part.figure("bfloat16", torch.cuda.is_bf16_supported(), torch.cuda.is_bf16_supported(), "yes")
    part.figure("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    shared = shutil.disk_usage("/dev/shm").total / 2**30
    part.figure("/dev/shm, GiB", shared, shared >= 8, ">= 8")
    import faiss

    part.figure("GPUs that FAISS sees", getattr(faiss, "get_num_gpus", lambda: 0)())
    for name in ("flash_attn", "vllm", "trl"):
        part.figure(f"{name} is installed", importlib.util.find_spec(name) is not None)


def learner_step(part: Part, family: str, size: str, full: bool, **policy: Any) -> dict[str, float]:
    """Train some steps on a random model and return the metrics of the last, with the peak memory in bytes."""
    tokens, steps = (128, 2) if part.smoke else (8192, 4)
    settings = config.PolicyConfig(
        model=str(part.model(family, size)),
        dtype="bfloat16",
        full=full,
        gradient_checkpointing=True,
        lora=config.LoraConfig(rank=32, alpha=64),
        **policy,
    )
    gpus = float(part.device.type == "cuda")
    learner = config.LearnerConfig(row_tokens=tokens, rows=1, gpus=gpus, lr=1e-5, warmup=0.0, zero_stage=0)
    trainer = Trainer(settings, learner, total_steps=steps, device=part.device)
    batch = episodes(trainer.spec, 4, tokens, 4096 if part.smoke else 1_000_000)
    metrics: dict[str, float] = {}
    if gpus:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        metrics = trainer.update(batch)
    if gpus:
        metrics["peak_bytes"] = float(torch.cuda.max_memory_allocated())
    arch = Architecture(settings.model, torch.bfloat16)
    metrics["estimated_bytes"] = float(sum(estimate.learner_memory(arch, settings, learner)[0].values()))
    trainer.close()
    return metrics


def learner(part: Part) -> None:
    """Training in bfloat16 of both families: tokens per second, MFU, peak memory against the estimate."""
    for family in ("qwen2_5_vl", "qwen3_vl"):
        for size, full in (("0.5b", True), ("3b", False), ("3b", True)):
            name = f"{family} {size} {'all parameters' if full else 'adapters'}"
            m = learner_step(part, family, size, full)
            part.figure(
                f"{name}: loss is finite", bool(np.isfinite(m["policy/loss"])), bool(np.isfinite(m["policy/loss"])), "yes"
            )
            part.figure(f"{name}: tokens/s", m["learner/tokens_per_s"])
            if "learner/mfu" in m:
                mfu = m["learner/mfu"]
                part.figure(f"{name}: MFU", mfu, mfu >= 0.35 if size == "3b" and full else None, ">= .35" if full else "")
            if "peak_bytes" in m:
                ratio = m["peak_bytes"] / m["estimated_bytes"]
                part.figure(f"{name}: peak memory / estimate", ratio, abs(ratio - 1) <= 0.1, "within .1")


def gradients(part: Part) -> None:
    """Direction of the first step in bfloat16 against float32."""
    moments = {}
    for dtype in ("float32", "bfloat16"):
        folder = part.model("qwen2_5_vl", "0.5b")
        policy = config.PolicyConfig(model=str(folder), dtype=dtype, lora=config.LoraConfig(rank=16, alpha=32))  # type: ignore[arg-type]
        settings = config.LearnerConfig(row_tokens=128 if part.smoke else 2048, rows=1, warmup=0.0)
        trainer = Trainer(policy, settings, total_steps=1, device=part.device)
        trainer.update(episodes(trainer.spec, 4, settings.row_tokens, 4096 if part.smoke else 200_000), "sft")
        moments[dtype] = np.concatenate([v.ravel() for n, v in trainer.zero.moments().items() if n.endswith(".B.exp_avg")])
        trainer.close()
    wide, narrow = moments.values()
    cosine = float(wide @ narrow / (np.linalg.norm(wide) * np.linalg.norm(narrow)))
    part.figure("cosine of gradients, bfloat16 and float32", cosine, cosine > 0.995, "> .995")


def head(part: Part) -> None:
    """LM head: 4096 tokens of 152k words, forward and backward."""
    tokens, vocab, width = (64, 4096, 64) if part.smoke else (4096, 151_936, 2048)
    dtype = torch.bfloat16 if part.device.type == "cuda" else torch.float32
    linear = torch.nn.Linear(width, vocab, bias=False, device=part.device, dtype=dtype).requires_grad_(False)
    hidden = torch.randn(tokens, width, device=part.device, dtype=dtype, requires_grad=True)
    targets, banned = torch.randint(7, vocab, (tokens,), device=part.device), banned_mask((1, 2), vocab, part.device)

    def step() -> None:
        log_probs, _ = project(linear, hidden, targets, banned)
        log_probs.sum().backward()

    seconds, memory = part.timed(step), part.extra_memory(step)
    part.figure("LM head, ms", 1e3 * seconds, seconds < 0.1, "< 100")
    if memory is not None:
        part.figure("LM head, extra MiB", memory, memory < 400, "< 400")


def vision(part: Part) -> None:
    """Vision towers: ten pictures of 2 megapixels and different shapes, against transformers' own attention."""
    for family in ("qwen2_5_vl", "qwen3_vl"):
        vision_tower(part, family)


def vision_tower(part: Part, family: str) -> None:
    """Figures of one family."""
    policy = config.PolicyConfig(model=str(part.model(family, "3b")), dtype="bfloat16")
    model, _, spec = load_model(policy, part.device)
    rng = np.random.default_rng(0)
    count, pixels = (2, 20_000) if part.smoke else (10, 2_000_000)
    views = [picture(spec, pixels, rng) for _ in range(count)]
    with torch.no_grad():
        seconds = part.timed(lambda: encode_views(model, spec, views, one_pass=True)) / count
        ours = encode_views(model, spec, views[:1])[0].embeds.float()
        for module in model.model.visual.modules():
            module.__dict__.pop("forward", None)
        stock = encode_views(model, spec, views[:1])[0].embeds.float()
    difference = float((ours - stock).abs().mean() / stock.abs().mean())
    part.figure(f"{family}: ms a picture", 1e3 * seconds, seconds <= 0.06, "<= 60")
    part.figure(f"{family}: mean relative difference", difference, difference < 0.02, "< .02")


async def generate(engine: Any, batch: list[TrainSample], tokens: int) -> list[TrainSample]:
    """Answer the prompts of episodes; returns episodes with the engine's tokens and log-probabilities."""

    async def one(number: int, sample: TrainSample) -> TrainSample:
        prompt = sample.tokens[: int(np.argmax(sample.mask))].tolist()
        session = await engine.open(str(number))
        completion = await session.generate(prompt, sample.views, SamplingParams(1.0, 1.0, tokens, seed=number))
        session.close()
        mask = np.arange(len(prompt) + len(completion.tokens)) >= len(prompt)
        log_probs = np.zeros(len(mask), np.float32)
        log_probs[mask] = completion.log_probs
        return TrainSample(np.asarray([*prompt, *completion.tokens]), mask, log_probs, 0.0, sample.views)

    return list(await asyncio.gather(*(one(i, sample) for i, sample in enumerate(batch))))


def check_engine(part: Part, engine: Any, policy: config.PolicyConfig, runner: asyncio.Runner) -> None:
    """Log-probabilities of an engine against the learner's, and its speed."""
    count, tokens, pixels = (2, 8, 4096) if part.smoke else (64, 256, 200_000)
    batch = episodes(engine.spec, count, 64, pixels)
    runner.run(generate(engine, batch[:2], 8))
    start = time.perf_counter()
    answered = runner.run(generate(engine, batch, tokens))
    seconds = time.perf_counter() - start
    part.figure("episodes/s", count / seconds)
    part.figure("generated tokens/s", sum(int(s.mask.sum()) for s in answered) / seconds)
    longest = max(len(s.tokens) for s in answered)
    settings = config.LearnerConfig(row_tokens=max(16, longest), rows=1)
    trainer = Trainer(policy, settings, total_steps=1, device=part.device)
    differences = [np.abs(a - s.log_probs[s.mask]) for a, s in zip(trainer.log_probs(answered), answered, strict=True)]
    trainer.close()
    mean = float(np.concatenate(differences).mean())
    part.figure("mean |log-probability - learner's|", mean, mean < 0.05, "< .05")


def hf_engine(part: Part) -> None:
    """The embedded engine in bfloat16 against the learner."""
    from pixelis.engines.hf import HfEngine

    folder = part.model("qwen2_5_vl", "0.5b")
    policy = config.PolicyConfig(model=str(folder), dtype="bfloat16", lora=config.LoraConfig(rank=16, alpha=32))
    with asyncio.Runner() as runner:
        engine = HfEngine(folder, policy, config.EngineConfig(max_num_seqs=64))
        check_engine(part, engine, policy, runner)
        runner.run(engine.aclose())


def vllm_engine(part: Part) -> None:
    """vLLM: log-probabilities against the learner's, LoRA swaps, sleep and wake."""
    if importlib.util.find_spec("vllm") is None or part.device.type != "cuda":
        raise Skip("needs vLLM and a GPU")
    from pixelis.engines.vllm import VllmEngine

    folder = part.model("qwen2_5_vl", "3b")
    policy = config.PolicyConfig(model=str(folder), dtype="bfloat16", lora=config.LoraConfig(rank=32, alpha=64))
    settings = config.EngineConfig(name="vllm", gpus=1, colocate=True, gpu_memory_utilization=0.5, max_num_seqs=64)
    trainer = Trainer(policy, config.LearnerConfig(), total_steps=1, device=part.device)
    adapter = trainer.adapter()
    trainer.close()
    with asyncio.Runner() as runner:
        engine = VllmEngine(folder, policy, settings, config.DialogueConfig(max_context=8192))
        try:
            check_engine(part, engine, policy, runner)
            free, seconds = [], []
            for version in range(1, 21):
                start = time.perf_counter()
                runner.run(engine.load(version, adapter))
                seconds.append(time.perf_counter() - start)
                free.append(torch.cuda.mem_get_info()[0] / MIB)
            part.figure("LoRA swap, s", statistics.median(seconds), statistics.median(seconds) < 1, "< 1")
            drift = abs(free[-1] - free[0])
            part.figure("memory after 20 swaps, MiB", drift, drift <= 100, "+- 100")
            awake = torch.cuda.mem_get_info()[0]
            start = time.perf_counter()
            runner.run(engine.sleep())
            part.figure("sleep, s", time.perf_counter() - start)
            part.figure("freed by sleep, GiB", (torch.cuda.mem_get_info()[0] - awake) / 2**30)
            start = time.perf_counter()
            runner.run(engine.wake())
            part.figure("wake, s", time.perf_counter() - start)
            check_engine(part, engine, policy, runner)
        finally:
            runner.run(engine.aclose())


def job(part: Part, *arguments: str, timeout: int = 1800) -> str:
    """Run a `pixelis` job as a user would and return its output."""
    command = [sys.executable, "-m", "pixelis.jobs.cli", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {result.stderr[-2000:]}")
    return result.stdout


def quickstart(part: Part) -> None:
    """The quickstart with learner and engine on the GPU."""
    if part.smoke:
        raise Skip("tests/ray/test_quickstart.py runs it on the CPU")
    start = time.perf_counter()
    gpus = ("engine.gpus=0.4", "learner.gpus=0.4", "evolution.canary.gpus=0.1")
    output = job(part, "quickstart", f"run.dir={part.folder}/quickstart", "serve.port=8123", *gpus)
    part.figure("minutes", (time.perf_counter() - start) / 60)
    accuracy = {words[0]: float(words[1]) for line in output.splitlines() if len(words := line.split()) > 4 and words[0] in ARMS}
    for arm in ARMS:
        value = accuracy.get(arm, 0.0)
        part.figure(f"accuracy of {arm}", value, value >= ARMS[arm], f">= {ARMS[arm]}")


ARMS = {"direct": 0.0, "sft": 0.0, "rft": 0.8, "evolved": 0.8}
"""Arms of the quickstart with the least accuracy of each."""


def grpo(part: Part) -> None:
    """GRPO end to end with generator and learner on one GPU: where the time of a step goes."""
    if part.device.type != "cuda":
        raise Skip("needs a GPU; tests/chaos and tests/ray run it on the CPU")
    engine = "vllm" if importlib.util.find_spec("vllm") is not None else "hf"
    # Random models earn no reward; the bonus gives every sample a gradient, so that none is left out.
    entropy = "rft.loss.entropy=0.001"
    for size in ("0.5b", "3b"):
        run = part.folder / f"grpo-{size}"
        overrides = [f"policy.model={part.model('qwen2_5_vl', size)}", f"run.dir={run}", f"engine.name={engine}", "rft.steps=6"]
        overrides += ["data.train=cards:?split=train", "rft.evaluate_every=0", entropy]
        job(part, "rft", "configs/qwen2_5_vl_3b/rft_80gb.yaml", *overrides)
        rows = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
        steps = [row for row in rows if row.get("kind") == "step/rft"][2:]
        rollout, learn = (statistics.fmean(row[name] for row in steps) for name in ("rollout/seconds", "learner/seconds"))
        wall = (steps[-1]["time"] - steps[0]["time"]) / max(1, len(steps) - 1)
        idle = max(0.0, 1 - (rollout + learn) / wall)
        part.figure(f"{size} {engine}: s a step", wall)
        part.figure(f"{size} {engine}: generating, learning, s", f"{rollout:.2f}, {learn:.2f}")
        part.figure(f"{size} {engine}: share of neither", idle, idle < 0.15, "< .15")


def memory(part: Part) -> None:
    """FAISS: a million vectors of 1024 numbers."""
    from pixelis.memory.index import Index

    count, width = (2_000, 32) if part.smoke else (1_000_000, 1024)
    rng, index = np.random.default_rng(0), Index(config.MemoryConfig(), width)
    start = time.perf_counter()
    for first in range(0, count, 10_000):
        rows = range(first, min(first + 10_000, count))
        index.add(rows, rng.normal(size=(len(rows), width)).astype(np.float32))
    part.figure("vectors added /s", count / (time.perf_counter() - start))
    queries = rng.normal(size=(64, width)).astype(np.float32)
    part.figure("64 queries, ms", 1e3 * part.timed(lambda: index.search(queries, 5)))


PARTS: dict[str, Callable[[Part], None]] = {
    "environment": environment,
    "learner": learner,
    "gradients": gradients,
    "head": head,
    "vision": vision,
    "hf": hf_engine,
    "quickstart": quickstart,
    "vllm": vllm_engine,
    "grpo": grpo,
    "memory": memory,
}
"""In the order of their value, for machines that are lent for a short time."""


def run_part(name: str, part: Part) -> dict[str, Any]:
    """Run a part; returns its line of the results."""
    print(f"{name}: {PARTS[name].__doc__}", flush=True)
    start, status, reason = time.time(), "passed", ""
    try:
        PARTS[name](part)
    except Skip as skip:
        status, reason = "skipped", str(skip)
    except Exception:  # the other parts are still worth their time
        status, reason = "failed", traceback.format_exc(limit=-6)
    if status == "passed" and part.failures:
        status, reason = "failed", "; ".join(part.failures)
    print(f"  {status} in {time.time() - start:.0f} s{f': {reason}' if reason else ''}\n", flush=True)
    device = torch.cuda.get_device_name(0) if part.device.type == "cuda" else "cpu"
    row = {"part": name, "status": status, "reason": reason, "commit": commit(), "device": device, "time": int(start)}
    return {**row, "seconds": round(time.time() - start, 1), "figures": part.figures}


def commit() -> str:
    """Short hash of the checkout, with a plus sign if it has changes."""
    run: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    head_hash = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **run).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **run).stdout.strip()
    return f"{head_hash}{'+' if changed else ''}"


def passed_before(results: Path, device: torch.device) -> set[str]:
    """Parts that have passed on this commit and device."""
    if not results.is_file():
        return set()
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu"
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {r["part"] for r in rows if (r["status"], r["commit"], r["device"]) == ("passed", commit(), name)}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument("--again", action="store_true", help="also run parts that have passed on this commit and device")
    parser.add_argument("--results", type=Path, help=f"default: {RESULTS.relative_to(ROOT)}")
    args = parse_args(parser)
    if args.list:
        print("\n".join(f"{name:12} {function.__doc__}" for name, function in PARTS.items()))
        return
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]}; parts are {', '.join(PARTS)}")
    device = default_device()
    if device.type != "cuda" and not args.smoke:
        raise SystemExit(
            "benchmarks.gpu: torch sees no GPU\n  fix: `pixelis doctor` says why; --smoke runs tiny shapes on the CPU"
        )
    statuses = []
    with tempfile.TemporaryDirectory() as folder:
        results = args.results or (Path(folder) / "gpu.jsonl" if args.smoke else RESULTS)
        done = set() if args.again else passed_before(results, device)
        base = Part(device, args.smoke, Path(folder))
        for name in args.parts or PARTS:
            if name in done:
                print(f"{name}: has passed on this commit and device (--again runs it)\n")
                continue
            row = run_part(name, dataclasses.replace(base, figures={}, failures=[]))
            statuses.append(row["status"])
            results.parent.mkdir(parents=True, exist_ok=True)
            with results.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")
    print({status: statuses.count(status) for status in sorted(set(statuses))})
    raise SystemExit(1 if "failed" in statuses else 0)


if __name__ == "__main__":
    main()
