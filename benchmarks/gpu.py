"""Certification of a GPU machine: correctness, speed and memory of every part that runs on a GPU, with random
weights.

    python -m benchmarks.gpu [PART ...] [--list] [--again] [--results FILE] [--models FOLDER]

Each part prints its figures with their goals, and appends one line to benchmarks/results/gpu.jsonl: passed,
failed, or skipped with the reason. A part that has passed on this commit and device is not run again without
--again. Needs a checkout, a driver and torch; parts that need vLLM are skipped without it. `--smoke` runs
tiny shapes, also on a CPU, where figures mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.gpu_engines import grpo, hf_engine, trl_step, vllm_engine, weights
from benchmarks.gpu_learner import FAMILIES, card, gradients, learner, zero
from benchmarks.gpu_models import picture
from benchmarks.gpu_part import ROOT, Part, Skip, job
from benchmarks.harness import parse_args
from pixelis import config
from pixelis.families import FAMILIES as MODEL_FAMILIES
from pixelis.nano.architecture import NANO, build, save
from pixelis.nano.tokenizer import build_tokenizer
from pixelis.policy.log_probs import banned_mask, project
from pixelis.policy.model import default_device, load_model

RESULTS = Path(__file__).parent / "results" / "gpu.jsonl"


def environment(part: Part) -> None:
    """Driver, CUDA, NCCL, shared memory, FAISS."""
    if part.device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        part.figure(
            "GPU",
            f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB",
        )
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        part.figure(
            "driver", subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        )
        part.figure("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
        part.figure("bfloat16", torch.cuda.is_bf16_supported(), torch.cuda.is_bf16_supported(), "yes")
    part.figure("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    shared = shutil.disk_usage("/dev/shm").total / 2**30
    part.figure("/dev/shm, GiB", shared, shared >= 8, ">= 8")
    import faiss

    part.figure("GPUs that FAISS sees", getattr(faiss, "get_num_gpus", lambda: 0)())
    for name in ("flash_attn", "vllm", "trl"):
        part.figure(f"{name} is installed", importlib.util.find_spec(name) is not None)


def head(part: Part) -> None:
    """LM head: 4096 tokens of 152k words, forward and backward."""
    tokens, vocab, width = (64, 4096, 64) if part.smoke else (4096, 151_936, 2048)
    dtype = torch.bfloat16 if part.device.type == "cuda" else torch.float32
    linear = torch.nn.Linear(width, vocab, bias=False, device=part.device, dtype=dtype).requires_grad_(False)
    hidden = torch.randn(tokens, width, device=part.device, dtype=dtype, requires_grad=True)
    targets = torch.randint(7, vocab, (tokens,), device=part.device)
    banned = banned_mask((1, 2), vocab, part.device)

    def step() -> None:
        log_probs, _ = project(linear, hidden, targets, banned)
        log_probs.sum().backward()

    seconds, memory = part.timed(step), part.extra_memory(step)
    part.figure("LM head, ms", 1e3 * seconds, seconds < 0.1, "< 100")
    if memory is not None:
        part.figure("LM head, extra MiB", memory, memory < 400, "< 400")


def vision(part: Part) -> None:
    """Vision towers: ten pictures of 2 megapixels and different shapes, against transformers' own layers and
    float32.
    """
    for family in FAMILIES:
        with part.attempt(family):
            vision_tower(part, family)


def vision_tower(part: Part, family: str) -> None:
    """Figures of one family."""
    folder = str(part.model(family, "3b"))
    model, _, spec = load_model(config.PolicyConfig(model=folder, dtype="bfloat16"), part.device)
    exact, *_ = load_model(config.PolicyConfig(model=folder, dtype="float32"), part.device)
    rng = np.random.default_rng(0)
    count, pixels = (2, 20_000) if part.smoke else (10, 2_000_000)
    views = [picture(spec, pixels, rng) for _ in range(count)]

    def error() -> float:
        reference, own = (
            spec.family.encode_views(m, spec, views[:1])[0].embeds.float() for m in (exact, model)
        )
        return float((own - reference).abs().mean() / reference.abs().mean())

    with torch.no_grad():
        seconds = part.timed(lambda: spec.family.encode_views(model, spec, views)) / count
        ours = error()
        for module in model.model.visual.modules():
            module.__dict__.pop("forward", None)
        stock_seconds = part.timed(lambda: spec.family.encode_views(model, spec, views[:1]), 2)
        stock = error()
    part.figure(f"{family}: ms a picture", 1e3 * seconds, seconds <= 0.06, "<= 60")
    part.figure(f"{family}: transformers' own layers, ms a picture", 1e3 * stock_seconds)
    part.figure(f"{family}: mean relative error to float32", ours)
    part.figure(f"{family}: error / transformers' error", ours / stock, ours <= 1.1 * stock, "<= 1.1")


def families(part: Part) -> None:
    """`pixelis adopt` of a small random model of each family: engine and learner against the model's own code."""

    def adopt(name: str) -> None:
        save(build(build_tokenizer(), name), build_tokenizer(), folder := part.folder / name)
        job("adopt", str(folder), "--out", f"{folder}-certificate")

    with ThreadPoolExecutor(1 if part.smoke else 4) as pool:
        # Those of the Qwens, whose chat format the tokenizer of random models has
        names = [NANO] if part.smoke else [name for name in MODEL_FAMILIES if name.startswith("qwen")]
        runs = {name: pool.submit(adopt, name) for name in names}
        for name, run in runs.items():
            with part.attempt(name):
                run.result()
                part.figure(f"{name} is certified", True, True, "yes")


def quickstart(part: Part) -> None:
    """The quickstart with learner and engine on the GPU."""
    if part.smoke:
        raise Skip("tests/ray/test_quickstart.py runs it on the CPU")
    start = time.perf_counter()
    gpus = ("engine.gpus=0.3", "learner.gpus=0.3", "evolution.canary.gpus=0.1")  # and 0.3 for the embedder
    output = job("quickstart", f"run.dir={part.folder}/quickstart", "serve.port=8123", *gpus)
    part.figure("minutes", (time.perf_counter() - start) / 60)
    accuracy = {
        words[0]: float(words[1])
        for line in output.splitlines()
        if len(words := line.split()) > 4 and words[0] in ARMS
    }
    for arm in ARMS:
        value = accuracy.get(arm, 0.0)
        part.figure(f"accuracy of {arm}", value, value >= ARMS[arm], f">= {ARMS[arm]}")


ARMS = {"direct": 0.0, "sft": 0.0, "rft": 0.8, "evolved": 0.8}
"""Arms of the quickstart with the least accuracy of each."""


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
    "zero": zero,
    "card": card,
    "gradients": gradients,
    "families": families,
    "head": head,
    "vision": vision,
    "hf": hf_engine,
    "quickstart": quickstart,
    "vllm": vllm_engine,
    "weights": weights,
    "grpo": grpo,
    "trl": trl_step,
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
    row = {
        "part": name,
        "status": status,
        "reason": reason,
        "commit": commit(),
        "device": device,
        "time": int(start),
    }
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument(
        "--again", action="store_true", help="also run parts that have passed on this commit and device"
    )
    parser.add_argument("--results", type=Path, help=f"default: {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--models", type=Path, help="keep the random models here, for the next run")
    args = parse_args(parser)
    if args.list:
        print("\n".join(f"{name:12} {function.__doc__}" for name, function in PARTS.items()))
        return
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]}; parts are {', '.join(PARTS)}")
    device = default_device()
    if device.type != "cuda" and not args.smoke:
        raise SystemExit(
            "benchmarks.gpu: torch sees no GPU\n  fix: `pixelis doctor` says why; --smoke runs tiny "
            "shapes "
            "on the CPU"
        )
    statuses = []
    with tempfile.TemporaryDirectory() as folder:
        results = args.results or (Path(folder) / "gpu.jsonl" if args.smoke else RESULTS)
        done = set() if args.again else passed_before(results, device)
        base = Part(device, args.smoke, Path(folder), args.models or Path(folder))
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
