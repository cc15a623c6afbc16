"""Adapters of other libraries in `policy.adapter`: PEFT's log-probabilities, names of all versions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import job_of
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_policy import LORA, check_log_probs, folder, merged, policy, random_adapter, stock, stock_log_probs
from tiny_trainer import batch, trainer

from pixelis.config import load
from pixelis.errors import BadInput, MissingFile
from pixelis.jobs import export as job
from pixelis.policy.adapters import load_adapter, save_adapter

QV = r".*language_model.*(q_proj|v_proj)"
OTHER_RANKS = {r".*\.1\.self_attn\.q_proj": 6, r"language_model.layers.0.self_attn.(q|v)_proj": 2}
PATTERNS = {"rank_pattern": OTHER_RANKS, "alpha_pattern": dict.fromkeys(OTHER_RANKS, 5)}


def saved(family: str, path: Path, **settings: Any) -> PeftModel:
    """A random adapter as PEFT saves it, and its model."""
    torch.manual_seed(5)
    values = {"r": 4, "lora_alpha": 8, "target_modules": QV, "init_lora_weights": False, **settings}
    model = get_peft_model(stock(family), LoraConfig(**values))
    model.save_pretrained(path)
    return model.eval()


def edit(
    path: Path,
    rename: Callable[[str], str] = str,
    extra: dict[str, torch.Tensor] | None = None,
    **settings: Any,
) -> None:
    """Rename the tensors of a saved adapter, add some, and change its settings."""
    weights, about = path / "adapter_model.safetensors", path / "adapter_config.json"
    tensors = {rename(name): tensor for name, tensor in load_file(weights).items()}
    save_file({**tensors, **(extra or {})}, weights, metadata={"format": "pt"})
    about.write_text(json.dumps({**json.loads(about.read_text()), **settings}))


def check_merged(family: str, path: Path, expected: PeftModel) -> None:
    """What the engine computes with the adapter is what PEFT computes."""
    sample, *_ = batch(2, family)
    models = (merged(load_adapter(path), family), expected.base_model.model, stock(family))
    with torch.no_grad():
        ours, theirs, bare = (stock_log_probs(model, sample) for model in models)
    assert (ours - theirs).abs().max() < 1e-5
    assert (theirs - bare).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen2_vl"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_modules": ["q_proj", "down_proj"], "lora_alpha": 3},
        PATTERNS,
        {"use_rslora": True},
        {"use_rslora": True, "lora_alpha": 0.5, **PATTERNS},
        {"target_modules": "all-linear"},
    ],
    ids=["regex", "list", "patterns", "rslora", "rslora_patterns", "all"],
)
def test_an_adapter_of_peft_gives_its_log_probabilities(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    check_merged(family, tmp_path, saved(family, tmp_path, **settings))


NAMES: dict[str, Callable[[str], str]] = {
    "below_4_52": lambda name: name.replace("model.model.language_model.", "model.model.").replace(
        "model.model.v", "model.v"
    ),
    "language_model_first": lambda name: name.replace("model.language_model.", "language_model.model."),
    "default": lambda name: name.replace("_A.", "_A.default.").replace("_B.", "_B.default."),
    "bare": lambda name: name.removeprefix("base_model.model."),
}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("names", NAMES)
def test_names_of_other_versions_are_read(family: str, names: str, tmp_path: Path) -> None:
    model = saved(
        family, tmp_path, target_modules=r".*(q_proj|lm_head|visual.*(qkv|fc1|up_proj))", **PATTERNS
    )
    before = set(load_file(tmp_path / "adapter_model.safetensors"))
    edit(tmp_path, NAMES[names])
    assert before - load_file(tmp_path / "adapter_model.safetensors").keys()
    check_merged(family, tmp_path, model)


def test_bfloat16_is_read(tmp_path: Path) -> None:
    saved("qwen3_vl", tmp_path)
    exact = load_adapter(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    rounded = load_adapter(tmp_path)
    for name, values in exact.tensors.items():
        assert rounded.tensors[name] == pytest.approx(values, rel=2**-8)


def test_training_continues_from_it_in_more_layers_too(tmp_path: Path) -> None:
    model = saved("qwen3_vl", tmp_path, use_rslora=True)
    samples = batch(3)
    with trainer(adapter=load_adapter(tmp_path)) as learner:  # with adapters on seven kinds of layers
        check_log_probs(model.base_model.model, samples, learner.model.log_probs(samples), 1e-5)
        assert learner.update(samples)["policy/grad_norm"] > 0
    fewer = policy(lora=LORA.model_copy(update={"targets": ["q_proj"]}))
    with pytest.raises(BadInput) as error, trainer(policy=fewer, adapter=load_adapter(tmp_path)):
        pass
    assert "policy.lora.targets='[q_proj, v_proj]'" in str(error.value.fix)


@pytest.mark.parametrize("mixed", [False, True])
def test_our_own_export_is_read(mixed: bool, tmp_path: Path) -> None:
    adapter = random_adapter(mixed=mixed)
    save_adapter(adapter, tmp_path / "step_00000001")
    job.export(tmp_path / "step_00000001", tmp_path / "out", merge=False, model=str(folder("qwen3_vl")))
    loaded = load_adapter(tmp_path / "out")
    assert loaded.scale == adapter.scale
    assert loaded.tensors.keys() == adapter.tensors.keys()
    assert all((loaded.tensors[name] == values).all() for name, values in adapter.tensors.items())
    if mixed:
        ranks = tmp_path / "ranks.json"
        skipped = sorted(random_adapter().ranks.keys() - adapter.ranks.keys())
        file = {"layer_ranks": adapter.ranks, "analysis_metadata": {"skipped": skipped}}
        ranks.write_text(json.dumps(file))
        own = policy(lora=LORA.model_copy(update={"ranks": str(ranks)}))
        with trainer(policy=own, adapter=loaded) as learner:
            assert learner.adapter().ranks == adapter.ranks
    job.export(tmp_path / "out", tmp_path / "merged", merge=True, model=str(folder("qwen3_vl")))
    assert (tmp_path / "merged" / "config.json").is_file()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"target_modules": ["embed_tokens"]}, r"embed_tokens"),
    ],
)
def test_what_is_more_than_lora_is_refused_by_name(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    saved("qwen2_5_vl", tmp_path, **settings)
    with pytest.raises(BadInput, match=words) as error:
        load_adapter(tmp_path)
    assert "merge" in str(error.value.fix)


LAYER = "base_model.model.model.layers.0"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        # as DeepSpeed's ZeRO-3 leaves tensors that are not gathered
        ({"extra": {f"{LAYER}.mlp.up_proj.lora_A.weight": torch.zeros(0)}}, r"up_proj.*shape \[0\]"),
        ({"extra": {f"{LAYER}.self_attn.q_proj.lora_A.ref.weight": torch.zeros(4, 64)}}, "several adapters"),
        ({"peft_type": "IA3"}, "of the type IA3"),
        ({"r": "four"}, "cannot be read"),
    ],
)
def test_other_methods_and_strange_values_are_refused_by_name(
    tmp_path: Path, damage: dict[str, Any], words: str
) -> None:
    saved("qwen3_vl", tmp_path)
    edit(tmp_path, **damage)
    with pytest.raises(BadInput, match=words):
        load_adapter(tmp_path)


def test_files_that_are_damaged_or_no_safetensors_are_refused(tmp_path: Path) -> None:
    saved("qwen3_vl", tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"\x40")
    with pytest.raises(BadInput, match="damaged"):
        load_adapter(tmp_path)
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(BadInput, match=r"adapter_model\.bin, a pickle"):
        load_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").unlink()
    with pytest.raises(MissingFile, match=r"no adapter_model\.safetensors"):
        load_adapter(tmp_path)


def test_a_dry_run_says_what_training_with_it_needs(tmp_path: Path) -> None:
    saved("qwen2_5_vl", tmp_path, target_modules=r".*(q_proj|visual.*gate_proj)")

    def check(job: str, family: str, *more: str) -> None:
        values = [f"policy.model={folder(family)}", f"policy.adapter={tmp_path}", *more]
        inputs = {key: (path, read) for key, path, read in job_of(job).inputs(load(None, values))}
        path, read = inputs["policy.adapter"]
        read(path)

    fits = ["policy.lora.rank=4", "policy.lora.alpha=8", "policy.lora.vision_tower=true"]
    check("rft", "qwen2_5_vl", *fits)
    check("evaluate", "qwen2_5_vl")
    with pytest.raises(BadInput, match=r"rank=4 policy\.lora\.alpha=8"):
        check("sft", "qwen2_5_vl", *fits[2:])
    with pytest.raises(BadInput, match="gate_proj") as error:
        check("rft", "qwen2_5_vl", *fits[:2])
    assert "policy.lora.vision_tower=true" in str(error.value.fix)
    with pytest.raises(BadInput, match=r"no layer model\.visual\..*gate_proj"):
        check("evaluate", "qwen3_vl")
