"""Qwen2.5 and Qwen3 of text alone train, roll out, and equal transformers' own classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from peft import PeftModel
from safetensors.torch import load_file
from tiny_policy import Maker, check_log_probs, folder
from tiny_trainer import trainer
from transformers import AutoModelForCausalLM

from pixelis import config
from pixelis.dialogue.render import Renderer
from pixelis.errors import BadInput
from pixelis.families.spec import load_spec, load_tokenizer
from pixelis.jobs import tiny_model
from pixelis.policy.adapters import load_adapter
from pixelis.policy.architecture import Architecture
from pixelis.policy.export import write_merged_model, write_peft
from pixelis.policy.samples import TrainSample
from pixelis.records import ImageView, Question

FAMILIES = ("qwen2", "qwen3")


def sample(maker: Maker, advantage: float = 1.0) -> TrainSample:
    """An episode of two turns without pictures."""
    stop = [maker.spec.stop]
    pieces = [maker.text(5), maker.text(4) + stop, maker.text(3), maker.text(2) + stop]
    mask = np.concatenate([np.full(len(piece), i % 2 == 1) for i, piece in enumerate(pieces)])
    tokens = np.asarray([token for piece in pieces for token in piece])
    log_probs = np.where(mask, -6.0, 0.0).astype(np.float32)
    return TrainSample(tokens=tokens, mask=mask, log_probs=log_probs, advantage=advantage, views=[])


@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_transformers_and_its_exports_load_there(family: str, tmp_path: Path) -> None:
    maker = Maker(family)
    samples = [sample(maker, advantage) for advantage in (1.0, -0.5, 0.25, 0.0)]
    base = folder(family)
    own = AutoModelForCausalLM.from_pretrained(base)
    with trainer(family) as learner:
        check_log_probs(own, samples, learner.model.log_probs(samples))
        losses = [learner.update(samples, "sft")["policy/loss"] for _ in range(4)]
        assert losses == sorted(losses, reverse=True)
        assert np.isfinite(learner.update(samples)["policy/grad_norm"])
        adapter, expected = learner.adapter(), learner.model.log_probs(samples)
    assert all(name.startswith("model.language_model.layers.") for name in adapter.tensors)
    write_peft(adapter, tmp_path / "adapter", text_only=True)
    read = load_adapter(tmp_path / "adapter")  # names without `language_model`
    assert read.tensors.keys() == adapter.tensors.keys()
    assert all(np.array_equal(read.tensors[name], values) for name, values in adapter.tensors.items())
    write_merged_model(adapter, base, tmp_path / "merged")
    assert set(load_file(tmp_path / "merged/model.safetensors")) == set(load_file(base / "model.safetensors"))
    for model in (
        PeftModel.from_pretrained(own, tmp_path / "adapter").base_model.model,
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
    ):
        check_log_probs(model, samples, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_are_refused_with_the_way_out(family: str, tmp_path: Path) -> None:
    tiny_model.make(tmp_path / "tiny", family)
    tokenizer = load_tokenizer(tmp_path / "tiny")
    spec = load_spec(tmp_path / "tiny", tokenizer)
    assert not spec.reads_images
    r = Renderer(tokenizer, spec, config.DialogueConfig(dialect="plain"), [])
    assert r.prompt(Question(id="q", question="3 + 4?"), [])[-1].tokens
    with pytest.raises(BadInput, match="reads text alone"):
        r.prompt(Question(id="q", question="What?"), [ImageView(id="img0", view_size=(56, 56))])
    arch = Architecture(config.PolicyConfig(model=str(tmp_path / "tiny")))
    assert (arch.vision, arch.vision_parameters, arch.model_type) == (None, 0, family)
