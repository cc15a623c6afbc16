"""`pixelis export`: transformers and PEFT give the learner's log-probabilities; mistakes are explained."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors import safe_open
from tiny_policy import (
    check_log_probs,
    folder,
    merged,
    packed_log_probs,
    policy,
    random_adapter,
    stock,
)
from tiny_trainer import batch

from pixelis.config import EngineConfig, load
from pixelis.engines.vllm_files import quantized_copy
from pixelis.errors import BadConfig, PixelisError
from pixelis.families.spec import load_spec
from pixelis.jobs import export as job
from pixelis.policy.adapters import Adapter, save_adapter
from pixelis.policy.model import load_model
from pixelis.policy.model_path import fingerprint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one checkpoint of an adapter on Qwen3-VL."""
    run = tmp_path / "run"
    save_adapter(random_adapter(), run / "checkpoints" / "step_00000003")
    (run / "config.yaml").write_text(yaml.safe_dump({"policy": {"model": str(folder("qwen3_vl"))}}))
    return run


def test_peft_and_transformers_give_the_learners_log_probabilities_of_mixed_ranks(tmp_path: Path) -> None:
    """`pixelis adopt` checks the export of equal ranks for all families."""
    adapter, samples, base = random_adapter(mixed=True), batch(4), str(folder("qwen3_vl"))
    sizes = [sample.policy_tokens for sample in samples]
    expected = np.split(packed_log_probs(merged(adapter), samples), np.cumsum(sizes)[:-1])
    save_adapter(adapter, tmp_path / "step_00000001")
    job.export(tmp_path / "step_00000001", tmp_path / "adapter", merge=False, model=base)
    check_log_probs(PeftModel.from_pretrained(stock(), tmp_path / "adapter"), samples, expected)
    job.export(tmp_path / "step_00000001", tmp_path / "merged", merge=True, model=base)
    exported = load_model(policy(model=str(tmp_path / "merged")), "cpu")[0]
    check_log_probs(exported, samples, expected)
    assert {p.name for p in (tmp_path / "merged").iterdir()} == {p.name for p in Path(base).iterdir()}
    job.export(tmp_path / "step_00000001", tmp_path / "half", merge=True, model=base, dtype="bfloat16")
    with safe_open(next((tmp_path / "half").glob("*.safetensors")), framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118 (no mapping)
    assert "float32" not in (tmp_path / "half" / "config.json").read_text()


def test_a_policy_of_all_parameters_is_merged_only(tmp_path: Path) -> None:
    tensors = {name: (p.detach() + 0.01).numpy() for name, p in stock().named_parameters()}
    step, base = tmp_path / "step_00000001", str(folder("qwen3_vl"))
    save_adapter(Adapter(tensors, 1, 1, fingerprint(folder("qwen3_vl")), "full"), step)
    with pytest.raises(job.BadInput, match="no adapter"):
        job.export(step, tmp_path / "adapter", merge=False, model=base)
    job.export(step, tmp_path / "merged", merge=True, model=base)
    exported = load_model(policy(model=str(tmp_path / "merged")), "cpu")[0]
    for name, parameter in exported.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), tensors[name])


def test_a_run_exports_its_last_checkpoint_with_its_own_base_model(run: Path, tmp_path: Path) -> None:
    text = job.export(run, tmp_path / "out", merge=False, dry_run=True)
    assert "step_00000003" in text
    assert not (tmp_path / "out").exists()
    job.export(run, tmp_path / "out", merge=False)
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(folder("qwen3_vl"))


def test_mistakes_are_explained_and_leave_nothing_behind(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "empty").mkdir()
    for source, values, words in (
        (run, {"out": tmp_path / "there"}, "exists"),
        (tmp_path / "nowhere", {}, "no checkpoint in"),
        (tmp_path / "empty", {}, "no adapter in"),
        (run, {"model": str(folder("qwen2_5_vl"))}, "another base model"),
        (run, {"model": "nowhere"}, "no model in"),
    ):
        with pytest.raises(PixelisError, match=words):
            job.export(source, **{"out": tmp_path / "out", "merge": False, **values})  # type: ignore[arg-type]

    def fill_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("pixelis.policy.export.save_file", fill_disk)
        with pytest.raises(job.InfraFailure, match="No space left"):
            job.export(run, tmp_path / "out", merge=False)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 0))
    with pytest.raises(job.InfraFailure, match="GB"):
        job.export(run, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_quantised_generation_needs_what_belongs_to_it(tmp_path: Path) -> None:
    copy = tmp_path / "int8"
    shutil.copytree(folder("qwen3_vl"), copy)
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps({**settings, "quantization_config": {"quant_method": "compressed-tensors"}})
    )
    for overrides, message in (
        (["engine.name=vllm", "engine.quantization=int8"], "llm-compressor"),
        (["engine.quantization=fp8"], "needs engine.name=vllm"),
        (["engine.name=vllm", f"engine.model={copy}"], "engine.model="),
        (
            ["engine.name=vllm", "engine.quantization=fp8", "engine.adapters=merge"],
            "applies adapters at runtime",
        ),
    ):
        with pytest.raises(BadConfig, match=message):
            load(None, overrides)
    engine = EngineConfig(name="vllm", quantization="int8", model=str(copy))
    own, other = (load_spec(folder(family)) for family in ("qwen3_vl", "qwen2_5_vl"))
    assert quantized_copy(folder("qwen3_vl"), engine, own, False) == copy
    with pytest.raises(BadConfig, match="no copy of"):
        quantized_copy(folder("qwen2_5_vl"), engine, other, False)
    with pytest.raises(BadConfig, match="has the quantisation compressed-tensors"):
        quantized_copy(folder("qwen3_vl"), engine.model_copy(update={"quantization": "awq"}), own, False)
    with pytest.raises(BadConfig, match="needs a GPU"):
        quantized_copy(folder("qwen3_vl"), EngineConfig(name="vllm", quantization="fp8"), own, False)
