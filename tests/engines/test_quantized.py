"""Quantised weights in vLLM's CPU build: adapters apply to them, and importance weights correct for the
difference.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from running import RunningEngine, start
from safetensors.torch import save_file
from test_parity import GREEDY, run_all, sample_episodes
from tiny_policy import Maker, folder, merged, packed_log_probs, policy, random_adapter, stock

from pixelis.engines import Engine
from pixelis.families import FAMILIES
from pixelis.policy.export import checkpoint_files, checkpoint_tensors

FAMILY = "qwen2_5_vl"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Order of the eight 4-bit numbers in an int32 of AutoAWQ's format."""
GROUP = 32
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


def is_quantized_layer(name: str) -> bool:
    """Whether a parameter is the weight of a linear layer of the language model."""
    inside = name.startswith("model.language_model.layers.") and name.endswith(".weight")
    return inside and name.split(".")[-2] in LAYERS


def write_copy(
    base: Path, out: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, object]
) -> None:
    """A copy of a model folder with other tensors and a `quantization_config`."""
    out.mkdir()
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, out / path.name)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, out / checkpoint_files(base)[0].name
    )
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**settings, "quantization_config": quantization}))


def write_int8(base: Path, out: Path) -> None:
    """A copy in the format of llm-compressor (W8A8): weights rounded to the nearest step of each output
    channel.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint_tensors(base):
        tensors[name] = tensor
        if is_quantized_layer(FAMILIES[FAMILY].parameter_name(name)):
            scale = (tensor.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-9)
            tensors |= {name: (tensor.float() / scale).round().to(torch.int8), f"{name}_scale": scale}
    weights, inputs = (
        {**INT8, "strategy": strategy, "dynamic": strategy == "token"} for strategy in ("channel", "token")
    )
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    method = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
    }
    write_copy(
        base,
        out,
        tensors,
        {**method, "config_groups": {"linear": group}, "ignore": ["lm_head", "re:.*visual.*"]},
    )


def write_awq(base: Path, out: Path) -> None:
    """A copy of a model in AutoAWQ's format, rounded to the nearest step of each group."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint_tensors(base):
        if not is_quantized_layer(FAMILIES[FAMILY].parameter_name(name)):
            tensors[name] = tensor
            continue
        stem, weight = name.removesuffix(".weight"), tensor.float().T.reshape(-1, GROUP, tensor.shape[0])
        low, high = weight.amin(1).clamp(max=0), weight.amax(1).clamp(min=0)
        scale = ((high - low) / 15).clamp(min=1e-6)
        zero = (-low / scale).round().clamp(0, 15)
        steps = (weight / scale[:, None] + zero[:, None]).round().clamp(0, 15).reshape(tensor.shape[1], -1)
        tensors |= {
            f"{stem}.qweight": pack(steps),
            f"{stem}.qzeros": pack(zero),
            f"{stem}.scales": scale.to(torch.bfloat16),
        }
    own = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    write_copy(base, out, tensors, own | {"modules_to_not_convert": ["visual", "lm_head"]})


def pack(values: torch.Tensor) -> torch.Tensor:
    """Eight 4-bit numbers of a row in an int32."""
    parts = values.to(torch.int64).reshape(len(values), -1, 8)[:, :, list(AWQ_ORDER)]
    packed = (parts << (4 * torch.arange(8))).sum(2)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.long) for name in ("awq", "int8")]
)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def running(method: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """vLLM with a quantised copy of the tiny model."""
    copy = tmp_path_factory.mktemp("quantised") / method
    (write_awq if method == "awq" else write_int8)(folder(FAMILY), copy)
    # VLLM's kernels for AWQ lack float32
    settings = policy(FAMILY, dtype="bfloat16" if method == "awq" else "float32")
    yield from start("vllm", folder(FAMILY), settings, FAMILY, quantization=method, model=str(copy))


@pytest.mark.slow
async def test_quantised_rollouts_are_close_to_the_learner_and_importance_weights_show_the_rest(
    running: RunningEngine,
    engine: Engine,
):
    """Before and after an adapter is loaded, which is applied in full precision.

    How close depends on the processor: without VNNI, sums of int8 products saturate in oneDNN. On all of them
    the log-probabilities are much closer to those of the learner's version than to those of the other one.
    `test_export.py` bounds the rounding itself.
    """

    adapter = random_adapter(FAMILY)
    plain, adapted = stock(FAMILY), merged(adapter, FAMILY)
    for version, (learner, other) in enumerate(((plain, adapted), (adapted, plain))):
        if version:
            await engine.load(version, adapter)
        samples = []
        for seed in range(3):
            episodes = sample_episodes(Maker(FAMILY, seed=version + 10 * seed))
            sampling = [dataclasses.replace(GREEDY, temperature=1.0, seed=i) for i in range(len(episodes))]
            samples += await run_all(engine, episodes, sampling)
        values = np.concatenate([sample.log_probs[sample.mask] for sample in samples])
        difference = packed_log_probs(learner, samples, 1.0) - values
        assert 1e-3 < rms(difference) < rms(packed_log_probs(other, samples, 1.0) - values) / 2
        assert abs(np.exp(difference).mean() - 1) < 0.05


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values).mean()))
