"""Qwen2.5 and Qwen3 of text alone train, roll out, and equal transformers' own classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from tiny_policy import random_adapter

from pixelis import config
from pixelis.dialogue.render import Renderer
from pixelis.errors import BadInput
from pixelis.families.spec import load_spec, load_tokenizer
from pixelis.jobs import tiny_model
from pixelis.policy.adapters import load_adapter
from pixelis.policy.architecture import Architecture
from pixelis.policy.export import write_peft
from pixelis.records import ImageView, Question

FAMILIES = ("qwen2", "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_in_peft_has_the_names_of_the_text_model(family: str, tmp_path: Path) -> None:
    adapter = random_adapter(family)
    assert all(name.startswith("model.language_model.layers.") for name in adapter.tensors)
    write_peft(adapter, tmp_path / "adapter", text_only=True)
    exported = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.layers.") for name in exported)
    read = load_adapter(tmp_path / "adapter")
    assert read.tensors.keys() == adapter.tensors.keys()
    assert all(np.array_equal(read.tensors[name], values) for name, values in adapter.tensors.items())


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
