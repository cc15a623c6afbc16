"""Publishing weights: bytes of an adapter against the formula and against all weights, and copies held by
readers.

    python -m benchmarks.weight_bytes

Goals: bytes within 1 % of width * sum(rank * (in + out)) over the adapted layers, one object for all readers,
and at 7B at least 20 times fewer bytes than all weights.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.harness import Report, compare, local_ray, parse_args, time_call
from pixelis import config
from pixelis.actors.policy_store import PolicyStore
from pixelis.policy.adapters import Adapter, adapter_bytes, save_tensors
from pixelis.policy.lora import adapted_layers
from pixelis.policy.model import load_model

READERS = 4
WIDTH = 4
"""Bytes of a published value: adapters are published in float32, regardless of the model's dtype."""
QWEN_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
"""The language model of Qwen2.5-VL-7B-Instruct."""


def seven_billion() -> torch.nn.Module:
    """Return Qwen2.5-VL-7B on the meta device: shapes without values."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
    }
    model_config = Qwen2_5_VLConfig(text_config=QWEN_7B, vision_config=vision)
    with torch.device("meta"):
        return Qwen2_5_VLForConditionalGeneration(model_config)


def random_adapter(shapes: dict[str, tuple[int, int]], rank: int) -> Adapter:
    """Return a random adapter of this rank, as the learner publishes it. shapes: layer -> (out, in)."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, (out_features, in_features) in shapes.items():
        tensors[f"{name}.A"] = rng.standard_normal((rank, in_features), np.float32)
        tensors[f"{name}.B"] = rng.standard_normal((out_features, rank), np.float32)
    return Adapter(tensors, 2 * rank, rank, "benchmark")


@ray.remote(num_cpus=0)
class Reader:
    """Reads a version as a generator does."""

    def __init__(self, store: Any):
        self.store = store

    def read(self, version: int) -> tuple[str, int, bool]:
        """Return the object's id, its bytes, and whether they are in shared memory and not in a private
        copy.
        """
        (ref,) = ray.get(self.store.get.remote(version))
        adapter = ray.get(ref)
        if adapter is None:
            return ref.hex(), 0, True
        return ref.hex(), adapter.nbytes, not any(a.flags.writeable for a in adapter.tensors.values())


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--adapters",
        nargs="+",
        default=["7B:16", "7B:64", "nano:32"],
        help="MODEL:RANK; the first is published",
    )
    args = parse_args(parser, adapters=["nano:32"])
    report = Report("weight_bytes")
    targets = config.LoraConfig().targets
    adapters = {}
    for name, rank in (
        (name, int(rank)) for name, _, rank in (shape.partition(":") for shape in args.adapters)
    ):
        model = seven_billion() if name == "7B" else load_model(config.PolicyConfig(model=name), "cpu")[0]
        shapes = {n: (m.out_features, m.in_features) for n, m in adapted_layers(model, targets).items()}
        formula = adapter_bytes(shapes, rank, WIDTH)
        weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        if name == "7B":
            weight_bytes //= 2  # the meta model is float32, a server holds bfloat16
        adapter = random_adapter(shapes, rank)
        row = f"{name} rank {rank}"
        note = f"{len(shapes)} layers, all weights {weight_bytes / 1e6:.1f} MB"
        report.row(f"{row}: adapter MB", adapter.nbytes / 1e6, note=note)
        with tempfile.TemporaryDirectory() as folder:
            save_tensors(adapter, Path(folder))
            on_disk = sum(f.stat().st_size for f in Path(folder).iterdir())
        report.row(f"{row}: bytes / formula", adapter.nbytes / formula, "1.00 +- 1 %")
        report.row(
            f"{row}: bytes on disk / formula", on_disk / formula, "1.00 +- 1 %" if name == "7B" else ""
        )
        report.row(
            f"{row}: all weights / adapter",
            weight_bytes / adapter.nbytes,
            ">= 20" if (name, rank) == ("7B", 16) else "",
        )
        adapters[row] = adapter

    published, adapter = next(iter(adapters.items()))
    with (
        local_ray(config.load(None, ["cluster.cpus=4", "cluster.object_store_bytes=1500000000"])),
        tempfile.TemporaryDirectory() as run,
    ):
        store: Any = PolicyStore.remote(run, None, 2)  # type: ignore[attr-defined]
        readers = [Reader.remote(store) for _ in range(READERS)]  # type: ignore[attr-defined]
        ray.get([r.read.remote(0) for r in readers])
        seconds = time_call(lambda: ray.get(store.publish.remote(adapter, "rft", 1)))
        results = ray.get([r.read.remote(1) for r in readers])
        report.row(f"publish of {published}: seconds", seconds, note="hashed, written, flushed to disk, put")
        report.row("objects read by 4 readers", len({object_id for object_id, _, _ in results}), "1")
        report.row("readers that hold no copy", sum(shared for _, _, shared in results), str(READERS))
        ratio = compare(
            lambda: ray.get([r.read.remote(1) for r in readers]),
            lambda: ray.get(readers[0].read.remote(1)),
            repeats=5,
        )
        report.row("4 readers at once / 1 reader", ratio)
    report.close()


if __name__ == "__main__":
    main()
