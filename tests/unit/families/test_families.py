"""Model families: one registry, and a user's own family in one file."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_policy import folder

from pixelis import config
from pixelis.config import DialogueConfig
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import Completion, SamplingParams
from pixelis.engines.hf import HfEngine
from pixelis.errors import BadConfig
from pixelis.families import FAMILIES
from pixelis.families.features import concatenate
from pixelis.families.spec import load_spec, load_tokenizer
from pixelis.operations import select
from pixelis.policy.log_probs import banned_mask, token_log_probs
from pixelis.policy.model import load_model
from pixelis.policy.packing import collate
from pixelis.policy.samples import TrainSample
from pixelis.records import Question

ROOT = Path(__file__).resolve().parents[3]

TOY = """
from dataclasses import dataclass

from pixelis.families.family import Chat
from pixelis.families.qwen3_vl import Qwen3VL


@dataclass(frozen=True, kw_only=True)
class Toy(Qwen3VL):
    def encode_views(self, model, spec, views):
        return super().encode_views(model, spec, [255 - view for view in views])

    def chat(self, tokenizer):
        return Chat.bracketed("<|turn|>", "<|stop|>")


FAMILY = Toy(architecture="Qwen3VLForConditionalGeneration", vocab=512, coordinates="unit")
"""
"""A family with other chat marks and coordinates, whose pictures are negatives."""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder of the type `toy`, and the module `toy_family` beside it."""
    (tmp_path / "toy_family.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    target = tmp_path / "model"
    shutil.copytree(folder("qwen3_vl"), target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (
            (target / name).read_text().replace("<|im_start|>", "<|turn|>").replace("<|im_end|>", "<|stop|>")
        )
        (target / name).write_text(text)
    settings = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(settings | {"model_type": "toy"}))
    return target


def test_no_other_room_knows_a_family():
    names = rf"\b({'|'.join([*FAMILIES, 'qwen3_5', 'gemma4', 'glm4v', 'internvl'])})\b"
    for file in (ROOT / "pixelis").rglob("*.py"):
        if "families" not in file.parts:
            assert not re.search(names, file.read_text()), file


def test_the_page_shows_the_example():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/families.md").read_text(), re.DOTALL)
    assert blocks == [(ROOT / "docs/examples/own_family.py").read_text()]


def test_the_example_changes_the_scale_of_a_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT))
    model = folder("qwen3_vl")
    assert load_spec(model).coordinates == "thousand"
    assert load_spec(model, family="docs.examples.own_family:FAMILY").coordinates == "pixels"


def test_an_own_family_renders_generates_and_scores_alike(toy: Path):
    with pytest.raises(BadConfig, match="type toy"):
        load_spec(toy)
    settings = config.PolicyConfig(model=str(toy), family="toy_family:FAMILY", dtype="float32")
    model, tokenizer, spec = load_model(settings, "cpu")
    renderer = Renderer(tokenizer, spec, DialogueConfig(), select(["zoom_in"]))
    prompt = "".join(turn.text for turn in renderer.prompt(Question(id="q", question="How many?"), []))
    assert "How many?" in prompt
    tokens = [token for turn in renderer.prompt(Question(id="q", question="?"), []) for token in turn.tokens]
    assert tokenizer.decode(tokens).endswith("<|stop|>\n<|turn|>assistant\n")

    view = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    pads = [spec.image_token] * spec.image_tokens(32, 32)
    prompt_tokens = [*tokens, spec.vision_start, *pads, spec.vision_end]

    async def generate() -> Completion:
        engine = HfEngine(toy, settings, config.EngineConfig())
        sampling = SamplingParams(temperature=1.0, max_tokens=8, seed=3)
        completion = await (await engine.open()).generate(prompt_tokens, [view], sampling)
        await engine.aclose()
        return completion

    completion = asyncio.run(generate())

    mask = np.asarray([False] * len(prompt_tokens) + [True] * len(completion.tokens))
    sample = TrainSample(
        tokens=np.asarray([*prompt_tokens, *completion.tokens]),
        mask=mask,
        log_probs=np.zeros(len(mask), np.float32),
        advantage=0.0,
        views=[view],
    )
    spec.family.attend_packed(model)
    batch = collate([sample, sample], spec)
    with torch.no_grad():
        features = concatenate(spec.family.encode_views(model, spec, batch.views))
        banned = banned_mask(spec.banned, spec.vocab, torch.device("cpu"))
        scored = token_log_probs(model, spec, batch, features, banned)[0]
    expected = torch.tensor(completion.log_probs * 2)
    assert (scored - expected).abs().max() < 1e-4

    plain = load_spec(toy, load_tokenizer(toy), "toy_family:FAMILY").family
    ordinary = super(type(plain), plain).encode_views(model, spec, [view])[0].embeds
    assert not torch.allclose(ordinary, concatenate(plain.encode_views(model, spec, [view])).embeds)


@pytest.mark.parametrize("reference", ["nowhere:FAMILY", "pixelis.families.qwen:math", "word"])
def test_a_wrong_reference_is_refused(reference: str):
    with pytest.raises(BadConfig, match=r"policy\.family"):
        load_spec(folder("qwen3_vl"), family=reference)
