"""Files for vLLM: model folders with our image settings, adapters as peft writes them, merged weights."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from tiny_policy import FAMILIES, LORA, folder, policy, random_adapter, spec, stock
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from pixelis import config
from pixelis.engines import start_engine
from pixelis.engines.vllm import VllmEngine
from pixelis.engines.vllm_files import Scratch, collapse, link_model
from pixelis.errors import BadInput, MissingDependency
from pixelis.families import FAMILIES as REGISTRY
from pixelis.families.qwen import QwenVL
from pixelis.policy.adapters import Adapter
from pixelis.policy.export import BaseFile, checkpoint_tensors, write_peft
from pixelis.policy.lora import merge_into


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_install():
    with pytest.raises(MissingDependency, match=r"make install-gpu"):
        VllmEngine(folder("qwen3_vl"), policy(), config.EngineConfig(), config.DialogueConfig())
    with pytest.raises(MissingDependency):
        start_engine(config.load(None, ["engine.name=vllm"]), folder("qwen3_vl"))


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_are_those_of_the_embedded_engine(family: str, tmp_path: Path):
    base, model = BaseFile(folder(family), REGISTRY[family]), stock(family)
    plain = random_adapter(family)
    rng = np.random.default_rng(0)
    head = {"lm_head.A": rng.normal(0, 1, (LORA.rank, model.lm_head.in_features)).astype(np.float32)}
    head["lm_head.B"] = rng.normal(0, 1, (model.lm_head.out_features, LORA.rank)).astype(np.float32)
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    adapter = plain if is_tied else dataclasses.replace(plain, tensors={**plain.tensors, **head})
    path = base.write_merged(adapter, tmp_path / "new" / "merged.safetensors", torch.float32)
    merge_into(model, {}, adapter)  # type: ignore[arg-type]
    expected = dict(model.named_parameters())
    changed = {REGISTRY[family].parameter_name(name): tensor for name, tensor in checkpoint_tensors(path)}
    assert set(changed) == {f"{name[:-2]}.weight" for name in adapter.tensors}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in changed.items())
    names = {REGISTRY[family].parameter_name(name) for name, _ in checkpoint_tensors(folder(family))}
    assert set(expected) <= names <= set(model.state_dict())


def test_whole_parameters_are_written_in_the_models_type(tmp_path: Path):
    base = BaseFile(folder("qwen3_vl"), REGISTRY["qwen3_vl"])
    name = "model.language_model.norm.weight"
    value = np.linspace(0, 1, 64, dtype=np.float32)
    adapter = Adapter({name: value}, 1, 1, "", "full")
    ((_, written),) = checkpoint_tensors(
        base.write_merged(adapter, tmp_path / "merged.safetensors", torch.bfloat16)
    )
    assert written.dtype == torch.bfloat16
    assert torch.equal(written, torch.from_numpy(value).bfloat16())
    for bad in ({name: value[:-1]}, {"nowhere": value}, {name: value * np.nan}):
        with pytest.raises(BadInput):
            base.updates(Adapter(bad, 1, 1, "", "full"))


def test_older_checkpoints_have_other_names(tmp_path: Path):
    names = {
        "visual.blocks.0.x": "model.visual.blocks.0.x",
        "model.layers.0.y": "model.language_model.layers.0.y",
        "lm_head.weight": "lm_head.weight",
        "model.embed_tokens.weight": "model.language_model.embed_tokens.weight",
    }
    save_file({name: np.zeros(1, np.float32) for name in names}, tmp_path / "model.safetensors")
    base = BaseFile(tmp_path, REGISTRY["qwen2_5_vl"])
    assert set(base.shapes) == set(names.values())
    adapter = Adapter({names["model.layers.0.y"]: np.zeros(1, np.float32)}, 1, 1, "", "full")
    written = base.write_merged(adapter, tmp_path / "merged" / "m.safetensors", torch.float32)
    ((name, _),) = checkpoint_tensors(written)
    assert name == "model.layers.0.y"


def test_peft_files_hold_the_scale_and_leave_the_adapter_alone(tmp_path: Path):
    adapter = random_adapter()
    kept = {name: array.copy() for name, array in adapter.tensors.items()}
    written = write_peft(adapter, tmp_path / "v1", fold_scale=True)
    arrays = load_file(written / "adapter_model.safetensors")
    settings = json.loads((written / "adapter_config.json").read_text())
    assert settings["lora_alpha"] == settings["r"] == LORA.rank
    assert len(arrays) == len(adapter.tensors)
    for name, array in adapter.tensors.items():
        part = arrays[f"base_model.model.{name[:-2]}.lora_{name[-1]}.weight"]
        assert np.array_equal(part, array * (adapter.scale if name[-1] == "B" else 1))
        assert np.array_equal(array, kept[name])


@pytest.mark.parametrize("family", [family for family in FAMILIES if isinstance(REGISTRY[family], QwenVL)])
def test_a_linked_model_has_our_image_settings(family: str, tmp_path: Path):
    linked = link_model(folder(family), tmp_path / "model", spec(family), 4096)
    settings = json.loads((linked / "preprocessor_config.json").read_text())
    assert settings["size"] == {"shortest_edge": spec(family).multiple ** 2, "longest_edge": 4096}
    expected = (spec(family).patch, list(spec(family).image_mean))
    assert (settings["patch_size"], settings["image_mean"]) == expected
    assert {f.name for f in folder(family).iterdir()} <= {f.name for f in linked.iterdir()}
    film = json.loads((linked / "video_preprocessor_config.json").read_text())
    assert settings["processor_class"] == film["processor_class"] == PROCESSOR_MAPPING_NAMES[family]
    assert film["video_processor_type"] in transformers.__all__


def test_each_picture_becomes_one_pad():
    assert collapse([1, 9, 9, 9, 2, 9, 3], [[9, 9, 9], [9]], [9]) == [1, 9, 2, 9, 3]
    assert collapse([7, 9, 9, 8, 7, 9, 8], [[7, 9, 9, 8], [7, 9, 8]], [5]) == [5, 5]
    assert collapse([1, 2], [], [9]) == [1, 2]
    assert collapse([7, 1, 7, 9, 8], [[7, 9, 8]], [5]) == [7, 1, 5]
    with pytest.raises(BadInput):
        collapse([1, 9], [[7, 9, 8]], [5])


@pytest.mark.slow
@pytest.mark.long
def test_the_folders_of_killed_processes_are_swept_and_living_ones_kept():
    code = "from pixelis.engines.vllm_files import Scratch; import time; own = Scratch()"
    code += "; print(own.path, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        theirs = Path(other.stdout.readline().strip())
        mine = Scratch()
        assert theirs.is_dir()
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    third = Scratch()
    assert not theirs.exists()
    assert mine.path.is_dir()
    for scratch in (mine, third, mine):
        scratch.remove()
    assert not mine.path.exists()
    assert not third.path.exists()
