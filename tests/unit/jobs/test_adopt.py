"""`pixelis adopt`: all families pass, and each of eight faults is the first failure of its model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import generic_models
import pytest
import torch
from certificates import COLUMNS
from command_line import Command
from torch import nn

from pixelis.families import FAMILIES
from pixelis.families.attention import Segments
from pixelis.families.family import CHATML, ROLES, Family
from pixelis.families.qwen3_5 import FAMILY as QWEN3_5
from pixelis.families.qwen3_vl import FAMILY as QWEN3_VL
from pixelis.jobs import adopt, tiny_model
from pixelis.policy import lora
from pixelis.policy.forward import FeatureCache
from pixelis.policy.packing import segment


def broken(family: Family, **methods: Callable[..., Any]) -> Family:
    """The family with other methods."""
    kind = dataclass(frozen=True, kw_only=True)(type("Broken", (type(family),), methods))
    return kind(**vars(family))


def leak(self: Family, *args: Any, segments: Segments | None = None, **others: Any) -> torch.Tensor:
    """The samples of a row are one: attention and recurrent states go on from one to the next."""
    if segments is not None:
        others["segments"] = segment([args[2].shape[1]])
    return super(type(self), self).hidden_states(*args, **others)


def leak_state(self: Family, *args: Any, segments: Segments | None = None, **others: Any) -> torch.Tensor:
    """Attention is right, but recurrent states and convolutions do not restart."""
    if segments is not None:
        whole = segment([args[2].shape[1]])
        others["segments"] = replace(segments, runs=whole.runs, run_inverse=whole.run_inverse)
    return super(type(self), self).hidden_states(*args, **others)


def double(self: Family, *args: Any) -> list[int]:
    """Image tokens are expanded once more."""
    start, *pads, end = super(type(self), self).image_ids(*args)
    return [start, *pads, *pads, end]


LEAKS = broken(QWEN3_VL, hidden_states=leak)
LEAKS_STATES = broken(QWEN3_5, hidden_states=leak_state)
FLAT = broken(QWEN3_VL, positions=Family.positions)
DOUBLES = broken(QWEN3_VL, image_ids=double)
POINTS_IN_PIXELS = replace(QWEN3_VL, coordinates="pixels")
OTHER_CHAT = broken(
    QWEN3_VL,
    chat=lambda self, tokenizer: CHATML._replace(closers=dict.fromkeys(ROLES, "<|im_end|>")),
)


def mask_nothing(banned: Sequence[int], vocab: int, device: Any = None) -> torch.Tensor:
    return torch.zeros(vocab, device=device)


def without_values(model: nn.Module, *args: Any) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in ADAPTED_LAYERS(model, *args).items() if "v_proj" not in name}


OFTEN = ("qwen2", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
"""Families that are certified by every run of the tests; the tests of tests/unit/families read the others."""
ADAPTED_LAYERS = lora.adapted_layers
FAULTS = {
    "image tokens": "DOUBLES",
    "prompt": "OTHER_CHAT",
    "coordinates": "POINTS_IN_PIXELS",
    "forward pass": "FLAT",
    "packing": "LEAKS",
    "LoRA gradients": (lora, "adapted_layers", without_values),
    "banned tokens": ("pixelis.engines.decoding.banned_mask", mask_nothing),
    "vision cache": (FeatureCache, "clear", lambda self: None),
}
"""The check that must name it -> a broken family, or a broken part of the product."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adopt") / "tiny"
    tiny_model.make(folder, "qwen3_vl")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.long if name not in OFTEN else ()) for name in FAMILIES]
)
def test_a_family_passes(family: str, tmp_path: Path) -> None:
    tiny_model.make(tmp_path / "tiny", family)
    row = adopt.certificate(str(tmp_path / "tiny"))
    assert row["failed"] == []
    assert set(row["parts"].values()) == {"original"}
    unchecked = {check["name"] for check in row["checks"] if check["state"] == "not checked"}
    pictures = set() if FAMILIES[family].reads_images else {"image tokens", "coordinates", "vision cache"}
    # The small models of families with another format than ChatML have no template
    assert unchecked - {"prompt"} == pictures


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["llava_onevision", *(pytest.param(k, marks=pytest.mark.long) for k in ("llava_next", "aya_vision"))],
)
def test_a_model_without_a_family_passes(kind: str, tmp_path: Path) -> None:
    """From its folder without weights."""
    shutil.copytree(
        generic_models.folder(kind), tmp_path / kind, ignore=shutil.ignore_patterns("*.safetensors")
    )
    row = adopt.certificate(str(tmp_path / kind))
    assert row["failed"] == []
    assert (row["family"], row["parts"]["configuration"]) == ("generic", "original, made small")


@pytest.mark.slow
@pytest.mark.parametrize(
    "named",
    [
        pytest.param(name, marks=pytest.mark.long if name not in ("prompt", "packing") else ())
        for name in FAULTS
    ],
)
def test_a_fault_is_named_by_its_check(named: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[named]
    if isinstance(fault, str):
        failed = adopt.certificate(str(model), f"{__name__}:{fault}")["failed"]
    else:
        monkeypatch.setattr(*fault)
        failed = adopt.certificate(str(model))["failed"]
    assert failed[:1] == [named]


@pytest.mark.slow
def test_a_recurrent_state_that_leaks_is_named(tmp_path: Path) -> None:
    tiny_model.make(tmp_path / "tiny", "qwen3_5")
    row = adopt.certificate(str(tmp_path / "tiny"), f"{__name__}:LEAKS_STATES")
    assert row["failed"][0] == "packing"


@pytest.mark.slow
def test_the_command_says_what_a_failure_means(tmp_path: Path, model: Path, pixelis: Command) -> None:
    """From config.json alone, with a scale that the family does not state."""
    folder = tmp_path / "settings"
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    code, text, _ = pixelis("adopt", str(folder), "--coordinates", "pixels", "--out", str(tmp_path / "out"))
    assert code == 1
    assert "failed: coordinates: calls look at the wrong place" in text
    row = json.loads((tmp_path / "out/certificate.json").read_text())
    assert row["failed"] == ["coordinates"]
    assert row["parts"] == {
        "configuration": "the family's small one",
        **{"tokenizer": "built", "chat template": "built", "weights": "random"},
    }
    assert "calls look at the wrong place" in (tmp_path / "out/certificate.html").read_text()


def test_a_folder_without_its_image_processor_is_told_which_file_it_lacks(
    tmp_path: Path, model: Path, pixelis: Command
) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model/preprocessor_config.json").unlink()
    code, _, errors = pixelis("adopt", str(tmp_path / "model"), "--out", str(tmp_path / "out"))
    assert code == 1
    assert "preprocessor_config.json" in errors


def test_a_small_model_has_the_structure_of_the_large_one() -> None:
    rope = {"rope_type": "default", "mrope_section": [24, 20, 20]}
    text = {"num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    kinds = {"layer_types": ["linear", "linear", "full"] * 20, "rope_parameters": rope, "num_experts": 128}
    vision = {
        "depth": 27,
        "num_heads": 16,
        "hidden_size": 1152,
        "deepstack_visual_indexes": [8, 16],
        "patch_size": 16,
    }
    large = {
        "text_config": {"hidden_size": 4096, **text, **kinds},
        "vision_config": vision,
        "image_token_id": 7,
    }
    small = adopt.shrink(large)
    assert small == {
        "text_config": {
            **{"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
            **{"layer_types": ["linear", "linear", "full"], "rope_parameters": rope},
            **{"num_experts": 4, "hidden_size": 256},
        },
        "vision_config": {
            **{
                "depth": 2,
                "num_heads": 2,
                "hidden_size": 144,
                "deepstack_visual_indexes": [0],
                "patch_size": 16,
            }
        },
        "image_token_id": 7,
    }


def test_the_page_of_models_has_the_table_of_certificates() -> None:
    page = (Path(__file__).parents[3] / "docs/models.md").read_text(encoding="utf-8")
    assert f"|{'|'.join(COLUMNS)}|" in page
    assert all(f"|`{family}`|`{family}`|" in page for family in FAMILIES)
