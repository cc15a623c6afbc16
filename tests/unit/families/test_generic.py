"""`generic`: models of transformers without a family of their own, on learner, engine and in exports."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from generic_models import MODELS, folder
from PIL import Image

from pixelis import config
from pixelis.config import DialogueConfig
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import SamplingParams
from pixelis.engines.hf import HfEngine
from pixelis.errors import BadConfig, BadInput
from pixelis.families.family import ModelSpec
from pixelis.families.features import concatenate
from pixelis.families.generic import _placeholder, _processor
from pixelis.families.spec import load_spec, load_tokenizer
from pixelis.operations import select
from pixelis.policy.adapters import Adapter, load_adapter
from pixelis.policy.export import write_merged_model, write_peft
from pixelis.policy.log_probs import banned_mask, token_log_probs
from pixelis.policy.lora import add_lora, adapted_layers
from pixelis.policy.model import load_model
from pixelis.policy.model_path import fingerprint
from pixelis.policy.packing import collate
from pixelis.policy.samples import TrainSample
from pixelis.records import Question

KINDS = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(
            kind == "smolvlm" and importlib.util.find_spec("num2words") is None, reason="needs num2words"
        ),
    )
    for kind in MODELS
]
LORA = config.LoraConfig(rank=4, alpha=8)


def policy(kind: str, **values: object) -> config.PolicyConfig:
    return config.PolicyConfig(**{"model": str(folder(kind)), "lora": LORA, "dtype": "float32", **values})


def views(seed: int, *sizes: tuple[int, int]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 255, (*size, 3), dtype=np.uint8) for size in sizes]


def sample(spec: ModelSpec, seed: int, *sizes: tuple[int, int], tail: int = 6) -> TrainSample:
    """A turn of the policy after each view of these sizes, or after text alone."""
    rng = np.random.default_rng(seed)
    allowed = [token for token in range(spec.vocab) if token not in spec.banned]
    tokens, mask = [int(t) for t in rng.choice(allowed, 3)], [False] * 3
    pictures = views(seed, *sizes)
    for view in pictures or [None]:
        seen = [] if view is None else spec.family.image_ids(spec, *view.shape[:2])
        said = [*(int(t) for t in rng.choice(allowed, tail)), spec.stop]
        tokens, mask = [*tokens, *seen, *said], mask + [False] * len(seen) + [True] * len(said)
    return TrainSample(np.asarray(tokens), np.asarray(mask), np.zeros(len(mask), np.float32), 1.0, pictures)


def scores(model: torch.nn.Module, spec: ModelSpec, samples: list[TrainSample]) -> torch.Tensor:
    batch = collate(samples, spec)
    features = concatenate(spec.family.encode_views(model, spec, batch.views)) if batch.views else None
    return token_log_probs(model, spec, batch, features, banned_mask(spec.banned, spec.vocab))[0]


def own_scores(model: torch.nn.Module, kind: str, spec: ModelSpec, s: TrainSample) -> torch.Tensor:
    """By the model's own forward pass, with the pixel values of its own processor."""
    inputs = {}
    if s.views:
        images = [[Image.fromarray(view)] for view in s.views]
        text = [_placeholder(str(folder(kind)))] * len(images)
        inputs = dict(
            _processor(str(folder(kind)))(images=images, text=text, padding=True, return_tensors="pt")
        )
        if inputs["pixel_values"].dim() == 5 and kind != "llava_onevision":  # several images of one sample
            real = [tile for tiles in inputs["pixel_values"] for tile in tiles if tile.abs().sum() > 0]
            inputs["pixel_values"] = torch.stack(real)[None]
        inputs = {name: inputs[name] for name in ("pixel_values", "image_sizes") if name in inputs}
    tokens = torch.from_numpy(s.tokens)[None]
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs).logits[0]
    logits = logits.index_fill(1, torch.tensor(spec.banned), float("-inf"))
    chosen = torch.log_softmax(logits, -1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    return chosen[torch.from_numpy(s.mask[1:])]


@pytest.mark.parametrize("kind", KINDS)
def test_the_learner_computes_what_transformers_does(kind: str, caplog: pytest.LogCaptureFixture):
    model, _, spec = load_model(policy(kind), "cpu")
    assert "padded instead of packed" in caplog.text
    assert spec.family.attend_packed(model) is False
    samples = [
        sample(spec, 0, (40, 96), (64, 64)),
        sample(spec, 1),
        sample(spec, 2, (50, 30), tail=40),
        sample(spec, 3, (7, 9)),
    ]
    with torch.no_grad():
        scored = scores(model, spec, samples)
        expected = torch.cat([own_scores(model, kind, spec, s) for s in samples])
    assert (scored - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_generates_what_the_learner_scores(kind: str):
    model, tokenizer, spec = load_model(policy(kind), "cpu")
    pieces = [token for token in range(300, 330) if token not in spec.banned]
    pictures = views(4, (40, 96), (30, 60))
    seen = [spec.family.image_ids(spec, *view.shape[:2]) for view in pictures]
    prompts = [
        [([*pieces[:5], *seen[0]], pictures[:1]), (pieces[5:9], []), (seen[1], pictures[1:])],
        [(pieces[:2], []), (pieces[2:12], [])],
        [([*seen[1], *pieces[20:]], pictures[1:])],
    ]

    async def episode(engine: HfEngine, seed: int, turns: list) -> TrainSample:
        session, tokens, mask, log_probs, shown = await engine.open(), [], [], [], []
        for prompt, new in turns:
            sampling = SamplingParams(temperature=1.0, max_tokens=9, seed=seed)
            completion = await session.generate(prompt, new, sampling)
            tokens += [*prompt, *completion.tokens]
            mask += [False] * len(prompt) + [True] * len(completion.tokens)
            log_probs += [0.0] * len(prompt) + list(completion.log_probs)
            shown += new
        return TrainSample(
            np.asarray(tokens), np.asarray(mask), np.asarray(log_probs, np.float32), 1.0, shown
        )

    async def episodes() -> list[TrainSample]:
        engine = HfEngine(folder(kind), policy(kind), config.EngineConfig())
        done = await asyncio.gather(*(episode(engine, seed, turns) for seed, turns in enumerate(prompts)))
        await engine.aclose()
        return done

    samples = asyncio.run(episodes())
    with torch.no_grad():
        scored = scores(model, spec, samples)
    expected = torch.cat([torch.from_numpy(s.log_probs[s.mask]) for s in samples])
    assert not set(np.concatenate([s.tokens[s.mask] for s in samples]).tolist()) & set(spec.banned)
    assert (scored - expected).abs().max() < 1e-4
