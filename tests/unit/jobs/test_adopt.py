"""`pixelis adopt`: all families pass, and each of eight faults is the first failure of its model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import COLUMNS
from command_line import Command
from torch import nn

from pixelis.families import FAMILIES
from pixelis.families.attention import Segments
from pixelis.families.family import CHATML, ROLES, Chat, Family
from pixelis.families.qwen3_vl import FAMILY as QWEN3_VL
from pixelis.families.qwen3_vl import Qwen3VL
from pixelis.jobs import adopt, tiny_model
from pixelis.policy import lora
from pixelis.policy.forward import FeatureCache


def broken(**methods: Callable[..., Any]) -> Family:
    """Qwen3-VL with other methods."""
    kind = dataclass(frozen=True, kw_only=True)(type("Broken", (Qwen3VL,), methods))
    return kind(**vars(QWEN3_VL))


def leak(self: Family, *args: Any, segments: Segments | None = None, **others: Any) -> torch.Tensor:
    """The samples of a row are one."""
    if segments is not None:
        row = torch.arange(args[2].shape[1])
        others["segments"] = Segments([row[None]], row)
    return Qwen3VL.hidden_states(self, *args, **others)


def double(self: Family, *args: Any) -> list[int]:
    """Image tokens are expanded once more."""
    start, *pads, end = Qwen3VL.image_ids(self, *args)
    return [start, *pads, *pads, end]


LEAKS = broken(hidden_states=leak)
FLAT = broken(positions=Family.positions)
DOUBLES = broken(image_ids=double)
POINTS_IN_PIXELS = replace(QWEN3_VL, coordinates="pixels")
OTHER_CHAT = broken(
    chat=lambda self, tokenizer: Chat(CHATML.openers, dict.fromkeys(ROLES, "<|im_end|>"), CHATML.stop)
)


def mask_nothing(banned: Sequence[int], vocab: int, device: Any = None) -> torch.Tensor:
    return torch.zeros(vocab, device=device)


def without_values(model: nn.Module, *args: Any) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in ADAPTED_LAYERS(model, *args).items() if "v_proj" not in name}


ADAPTED_LAYERS = lora.adapted_layers
FAULTS = {
    "image tokens": DOUBLES,
    "prompt": OTHER_CHAT,
    "coordinates": POINTS_IN_PIXELS,
    "forward pass": FLAT,
    "packing": LEAKS,
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
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_passes(family: str, tmp_path: Path) -> None:
    tiny_model.make(tmp_path / "tiny", family)
    row = adopt.certificate(str(tmp_path / "tiny"))
    assert row["failed"] == []
    assert set(row["parts"].values()) == {"original"}
    reads = FAMILIES[family].reads_images
    unchecked = [check["name"] for check in row["checks"] if check["state"] == "not checked"]
    assert unchecked == ([] if reads else ["image tokens", "coordinates", "vision cache"])


@pytest.mark.slow
@pytest.mark.parametrize("named", FAULTS)
def test_a_fault_is_named_by_its_check(named: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, family = FAULTS[named], None
    if isinstance(fault, Family):
        family = f"{__name__}:" + next(name for name, value in globals().items() if value is fault)
    else:
        monkeypatch.setattr(*fault)
    failed = adopt.certificate(str(model), family)["failed"]
    assert failed
    assert failed[0] == named


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
        "tokenizer": "built",
        "weights": "random",
    }
    assert "calls look at the wrong place" in (tmp_path / "out/certificate.html").read_text()


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
    assert f"| {' | '.join(COLUMNS)} |" in page
