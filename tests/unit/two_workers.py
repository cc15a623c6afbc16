"""A worker of tests/unit/policy/test_two_workers.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import tiny_policy
import torch
import torch.distributed as dist
from tiny_policy import LORA, policy

from pixelis import config
from pixelis.policy import objectives
from pixelis.policy.deepspeed_engine import deepspeed_config
from pixelis.policy.distributed import release_cached_memory
from pixelis.policy.model import load_model
from pixelis.policy.samples import TrainSample
from pixelis.policy.train_step import Trainer

LEARNER = config.LearnerConfig(lr=3e-3, warmup=0.0, row_tokens=128, rows=1, keep=2)


@dataclass(frozen=True)
class Case:
    """One training run. chunk_values: logits that pass the LM head at once; long: marks its tests."""

    stage: int
    full: bool = False
    steps: int = 1
    kl: float = 0.0
    head: bool = False
    chunk_values: int | None = None
    family: str = "qwen3_vl"
    sequence_parallel: int = 1
    dtype: str = "float32"
    kl_estimator: str = "k3"
    frozen_tower: bool = False
    quantization: str = "none"
    long: bool = False

    @property
    def length(self) -> str:
        """The launch that runs the case: `short`, `long` or, with bitsandbytes, `nf4`."""
        return "nf4" if self.quantization == "nf4" else "long" if self.long else "short"

    def trainer(self, stage: int | None = None) -> Trainer:
        """The trainer of a worker; with `stage`, of one that is alone."""
        lora = LORA.model_copy(update={"targets": [*LORA.targets, "lm_head"]}) if self.head else LORA
        workers = {"sequence_parallel": self.sequence_parallel} if stage is None else {}
        learner = LEARNER.model_copy(update={"zero_stage": self.stage if stage is None else stage, **workers})
        if learner.zero_stage == 3:
            learner = learner.model_copy(update={"deepspeed": str(DIVIDE_ALL)})
        loss = config.LossConfig(kl=self.kl, kl_estimator=self.kl_estimator)
        settings = policy(
            self.family,
            full=self.full,
            lora=lora,
            dtype=self.dtype,
            freeze_vision_tower=self.frozen_tower,
            quantization=self.quantization,
        )
        trainer = Trainer(settings, learner, loss, total_steps=4, device="cpu")
        if self.chunk_values is not None:
            trainer.model.zero.engine.module.chunk_values = self.chunk_values
        return trainer

    def run(self, trainer: Trainer, samples: list[TrainSample]) -> list[dict[str, float]]:
        return [trainer.update(samples) for _ in range(self.steps)]


DIVIDE_ALL = Path(__file__).with_name("divide_all.json")
"""DeepSpeed's settings under which every parameter is divided.

By default it keeps all of a tiny model's on every worker.
"""
OLDER = "qwen2_5_vl"
CASES = {
    "adapters, stage 0": Case(0, steps=3, long=True),
    "adapters, stage 2": Case(2, steps=2),
    "adapters on a 4-bit base, stage 2": Case(2, steps=2, quantization="nf4"),
    "all parameters, stage 2": Case(2, full=True, long=True),
    "all parameters, stage 3": Case(3, full=True, long=True),
    "all parameters, stage 3, chunks of the head": Case(3, full=True, chunk_values=2000, long=True),
    "adapters, stage 3, chunks of a frozen head": Case(
        3, chunk_values=2000, steps=2, family=OLDER, long=True
    ),
    "adapters, stage 3, chunks of an adapted head": Case(3, head=True, chunk_values=2000, steps=2, long=True),
    "adapters, stage 3, bfloat16 model": Case(3, steps=2, dtype="bfloat16", long=True),
    "adapters, stage 1, KL": Case(1, steps=3, kl=0.5, long=True),
    "adapters, stage 3, KL": Case(3, steps=3, kl=0.5, long=True),
    "adapters, stage 0, sequence parallel": Case(0, steps=2, kl=0.5, sequence_parallel=2),
    "adapters, stage 2, sequence parallel": Case(2, steps=2, family=OLDER, sequence_parallel=2, long=True),
    "all parameters, stage 3, sequence parallel": Case(3, full=True, chunk_values=2000, sequence_parallel=2),
    "all parameters, stage 1, sequence parallel": Case(
        1, full=True, family=OLDER, sequence_parallel=2, long=True
    ),
    "adapters, stage 3, full KL": Case(3, steps=2, kl=0.5, kl_estimator="full", head=True, chunk_values=2000),
    "adapters, stage 0, sequence parallel, full KL": Case(
        0, steps=2, kl=0.5, kl_estimator="full", sequence_parallel=2, long=True
    ),
    "all parameters, stage 3, full KL": Case(
        3, full=True, steps=2, kl=0.5, kl_estimator="full", chunk_values=2000, long=True
    ),
    "all parameters but the tower's, stage 1": Case(1, full=True, steps=2, frozen_tower=True, long=True),
    "all parameters but the tower's, stage 3": Case(3, full=True, steps=2, frozen_tower=True, long=True),
    "all parameters, stage 3, recurrent states": Case(3, full=True, steps=2, family="qwen3_5", long=True),
    "adapters, stage 3, recurrent states": Case(3, steps=2, family="qwen3_5", long=True),
    "all parameters, stage 3, KL": Case(3, full=True, steps=3, kl=0.5, chunk_values=2000, long=True),
}
"""Every case is compared with one worker under stage 0."""
SAVED = "adapters, stage 2"
"""Case whose checkpoint the test resumes."""


def samples_of(family: str) -> list[TrainSample]:
    """Seven samples, the last one of text alone."""
    from tiny_trainer import batch

    *pictures, last = batch(7, family)
    keep = last.tokens != tiny_policy.spec(family).image_token
    arrays = (array[keep] for array in (last.tokens, last.mask, last.log_probs))
    return [*pictures, TrainSample(*arrays, last.advantage, [], id=last.id)]


def divided(family: str) -> dict[str, Any]:
    """This worker's share of the parameters of a model divided on reading, and whether it is the model."""
    from deepspeed import zero

    settings = policy(family, dtype="bfloat16")
    zero3 = deepspeed_config(LEARNER.model_copy(update={"zero_stage": 3}), False, torch.device("cpu"))
    whole, parts = load_model(settings, "cpu")[0], load_model(settings, "cpu", zero3=zero3)[0]
    same = True
    for one, part in zip(whole.parameters(), parts.parameters(), strict=True):
        with zero.GatheredParameters([part]):
            same &= one.dtype == part.dtype and torch.equal(one, part)
    buffers = all(torch.equal(a, b) for a, b in zip(whole.buffers(), parts.buffers(), strict=True))
    parameters: list[Any] = list(parts.parameters())
    share = sum(p.ds_tensor.numel() for p in parameters) / sum(p.ds_numel for p in parameters)
    return {"share": share, "weights": same, "buffers": buffers}


def launch(script: str, world: int, out: Path, *arguments: str) -> None:
    """Run a script of this folder as `world` workers and wait for them."""
    folders = json.dumps({family: str(tiny_policy.folder(family)) for family in tiny_policy.FAMILIES})
    here, root = Path(__file__).parent, Path(__file__).parents[2]
    workers = []
    for rank in range(world):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        paths = (str(root), str(here), os.environ.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [sys.executable, str(here / script), str(out), folders, *arguments]
        workers.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        outputs = [worker.communicate(timeout=840)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [w.returncode for w in workers] == [0] * world, "\n".join(s[-2500:] for s in outputs)


def metrics(out: Path) -> dict[str, list[dict[str, float]]]:
    """Metrics of each step by case, which both workers report equally."""
    first, second = (json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2))
    for name, steps in first.items():
        for one, other in zip(steps, second[name], strict=True):
            names = [name for name in one if "second" not in name and "_per_s" not in name]
            assert [one[name] for name in names] == [other[name] for name in names]
    return first


def main(out: str, folders: dict[str, str], length: str) -> None:
    """Train the cases of this length on this worker."""
    rank = int(os.environ["RANK"])
    place = {"init_method": f"file://{out}/rendezvous", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", timeout=timedelta(seconds=120), **place)
    tiny_policy.folder = lambda family: Path(folders[family])
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        if case.length != length:
            continue
        samples = samples_of(case.family)
        trainer = case.trainer()
        share = samples if case.sequence_parallel == 2 else samples[:6] if rank == 0 else samples[6:]
        results[name] = case.run(trainer, share)
        if case.sequence_parallel > 1:
            moments = trainer.model.zero.moments()
            if rank == 0:
                np.savez(Path(out, f"{name}.npz"), **moments)
        if name == SAVED:
            trainer.save(out, {"rank": rank})
        trainer.close()
        Path(out, f"rank{rank}.json").write_text(json.dumps(results))
    if length != "short":
        return
    Path(out, f"divided{rank}.json").write_text(json.dumps({family: divided(family) for family in folders}))
    healthy = objectives.policy_loss
    for stage in (0, 1):
        trainer = Case(stage).trainer()
        if rank == 0:
            objectives.policy_loss = lambda *a, **k: (healthy(*a, **k)[0] * float("inf"), {})
        skipped = [trainer.update(samples_of("qwen3_vl")[rank::2])["learner/skipped"]]
        objectives.policy_loss = healthy
        skipped.append(trainer.update(samples_of("qwen3_vl")[rank::2])["learner/skipped"])
        trainer.close()
        Path(out, f"skipped{rank}_stage{stage}.json").write_text(json.dumps(skipped))
    time.sleep(0.5 * rank)
    times = [time.time()]
    release_cached_memory()
    Path(out, f"released{rank}.json").write_text(json.dumps([*times, time.time()]))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
