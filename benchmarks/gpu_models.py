"""Random models in the shapes of public ones, and episodes for them, for `benchmarks.gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from pixelis.families import FAMILIES
from pixelis.families.family import ModelSpec
from pixelis.nano.architecture import build, save
from pixelis.nano.tokenizer import build_tokenizer
from pixelis.policy.samples import TrainSample

_TEXT = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
TEXT = {
    "tiny": dict(zip(_TEXT, (128, 256, 2, 2, 1), strict=True)),
    "0.5b": dict(zip(_TEXT, (896, 4864, 24, 14, 2), strict=True)),
    "3b": dict(zip(_TEXT, (2048, 11008, 36, 16, 2), strict=True)),
    "7b": dict(zip(_TEXT, (3584, 18944, 28, 28, 4), strict=True)),
}
"""Language models of Qwen2.5, by their size."""
VISION: dict[str, dict[str, Any]] = {
    "tiny": {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2},
    "qwen2_5_vl": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
    "qwen3_vl": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16},
}
VOCABULARY = {"tiny": 4096, "0.5b": 151936, "3b": 151936, "7b": 152064}
PATCH = {"qwen2_5_vl": 14, "qwen3_vl": 16}


def random_model(folder: Path, family: str, size: str, device: torch.device) -> Path:
    """Write a model folder of a family with random bfloat16 weights, initialised on `device`; reuses an
    existing one.
    """
    target = folder / f"{family}-{size}"
    if (target / "config.json").is_file():
        return target
    tokenizer = build_tokenizer()
    small = build(tokenizer, family, patch=PATCH[family], positions=32768)  # type: ignore[arg-type]
    config = small.config
    del config.pixelis_nano
    text, vision = config.text_config, config.vision_config
    for name, value in {**TEXT[size], "vocab_size": VOCABULARY[size], "initializer_range": 0.02}.items():
        setattr(text, name, value)
    head = text.hidden_size // text.num_attention_heads
    if hasattr(text, "head_dim"):
        text.head_dim = head
    side = head // 2 // 3
    text.rope_parameters = {
        **text.rope_parameters,
        "rope_theta": 1e6,
        "mrope_section": [head // 2 - 2 * side, side, side],
    }
    text.layer_types = ["full_attention"] * text.num_hidden_layers
    shape = VISION["tiny" if size == "tiny" else family]
    for name, value in {**shape, "out_hidden_size": text.hidden_size, "initializer_range": 0.02}.items():
        setattr(vision, name, value)
    if family == "qwen2_5_vl":
        step = max(1, vision.depth // 4)
        vision.fullatt_block_indexes = list(range(step - 1, vision.depth, step))
    else:
        vision.num_position_embeddings = 2304
    config.save_pretrained(target)
    with torch.device(device):
        model = (
            FAMILIES[family]
            .model_class()
            ._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        )
    model.generation_config.eos_token_id = text.eos_token_id
    save(model, tokenizer, target)
    return target


def episodes(spec: ModelSpec, count: int, tokens: int, pixels: int, seed: int = 0) -> list[TrainSample]:
    """Random episodes of `tokens` tokens with a picture of about `pixels` pixels; the policy wrote the second
    half.
    """
    rng = np.random.default_rng(seed)
    words = _words(spec)
    out = []
    for _ in range(count):
        view = picture(spec, pixels, rng)
        prompt = [*rng.choice(words, 8), *shown_tokens(spec, view)]
        length = max(tokens, 2 * len(prompt))
        ids = np.asarray([*prompt, *rng.choice(words, length - len(prompt))], np.int64)
        mask = np.arange(length) >= length - length // 2
        out.append(_sample(ids, mask, [view], rng))
    return out


def groups(
    spec: ModelSpec, count: int, size: int, prompt: int, reply: int, pixels: tuple[int, int], seed: int = 0
) -> list[TrainSample]:
    """Random episodes as RFT makes them: `size` of a group share a prompt of `prompt` tokens with a picture,
    and each adds `reply` tokens, of which a crop takes some. pixels: of picture and crop.
    """
    rng = np.random.default_rng(seed)
    words = _words(spec)
    out = []
    for _ in range(count):
        view = picture(spec, pixels[0], rng)
        shown = shown_tokens(spec, view)
        shared = [*shown, *rng.choice(words, max(8, prompt - len(shown)))]
        for _ in range(size):
            crop = picture(spec, pixels[1], rng)
            observed = shown_tokens(spec, crop)
            call = max(4, (reply - len(observed)) // 2)
            turns = (call, len(observed), max(4, reply - len(observed) - call))
            ids = [*shared, *rng.choice(words, turns[0]), *observed, *rng.choice(words, turns[2])]
            mask = np.repeat([False, True, False, True], [len(shared), *turns])
            out.append(_sample(np.asarray(ids, np.int64), mask, [view, crop], rng))
    return out


def _words(spec: ModelSpec) -> np.ndarray:
    return np.setdiff1d(np.arange(7, min(spec.vocab, 4000)), [*spec.banned, spec.image_token])


def shown_tokens(spec: ModelSpec, view: np.ndarray) -> list[int]:
    """Tokens of a view in a prompt."""
    pads = [spec.image_token] * spec.image_tokens(*view.shape[:2])
    return [spec.vision_start, *pads, spec.vision_end]


def _sample(
    ids: np.ndarray, mask: np.ndarray, views: list[np.ndarray], rng: np.random.Generator
) -> TrainSample:
    log_probs = np.where(mask, -8.0, 0.0).astype(np.float32)
    return TrainSample(ids, mask, log_probs, float(rng.normal()), views)


def picture(spec: ModelSpec, pixels: int, rng: np.random.Generator) -> np.ndarray:
    """A random picture of about `pixels` pixels and a random aspect ratio, its sides multiples of the model's
    tile.
    """
    aspect = float(rng.uniform(0.5, 2.0))
    height, width = (
        max(1, round(side / spec.multiple)) for side in ((pixels * aspect) ** 0.5, (pixels / aspect) ** 0.5)
    )
    view = rng.integers(0, 255, (height * spec.multiple, width * spec.multiple, 3), dtype=np.uint8)
    view.flags.writeable = False  # as those of rollouts, whose digests are kept
    return view
