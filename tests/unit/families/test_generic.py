"""`generic`: models of transformers without a family of their own, on learner, engine and in exports."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from generic_models import CONVOLUTIONS, LORA, MODELS, check_engine, folder, policy, save, scores, views
from peft import PeftModel
from PIL import Image
from tiny_trainer import learner_with, trainer

from pixelis import config
from pixelis.config import DialogueConfig
from pixelis.dialogue.render import Renderer
from pixelis.engines.hf import HfEngine
from pixelis.errors import BadConfig, BadInput
from pixelis.families.family import ModelSpec
from pixelis.families.features import concatenate
from pixelis.families.generic import _placeholder, _processor
from pixelis.families.spec import load_spec, load_tokenizer
from pixelis.jobs.tiny_model import make
from pixelis.operations import select
from pixelis.policy.adapters import Adapter, is_vision, load_adapter
from pixelis.policy.export import write_merged_model, write_peft
from pixelis.policy.lora import adapted_layers, add_lora, lora_parameters
from pixelis.policy.model import load_model
from pixelis.policy.model_path import fingerprint
from pixelis.policy.samples import TrainSample
from pixelis.records import Exchange, ImageView, Question

KINDS = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(
            kind == "smolvlm" and importlib.util.find_spec("num2words") is None, reason="needs num2words"
        ),
    )
    for kind in MODELS
]


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


def own_scores(model: torch.nn.Module, kind: str, spec: ModelSpec, s: TrainSample) -> torch.Tensor:
    """By the model's own forward pass, with the pixel values of its own processor."""
    inputs = {}
    if s.views:
        images = [[Image.fromarray(view)] for view in s.views]
        text = [_placeholder(str(folder(kind)))[0]] * len(images)
        inputs = dict(
            _processor(str(folder(kind)))(images=images, text=text, padding=True, return_tensors="pt")
        )
        if kind in ("smolvlm", "idefics3"):  # several images of one sample
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
    engine = HfEngine(folder(kind), policy(kind), config.EngineConfig())
    assert check_engine(engine, kind) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_those_of_the_chat_template(kind: str):
    spec, tokenizer = load_spec(folder(kind)), load_tokenizer(folder(kind))
    renderer = Renderer(tokenizer, spec, DialogueConfig(system="none"), select(["zoom_in"]))
    history = [Exchange(question="How many?", answer="Two.")]
    view = ImageView(id="img0", view_size=(96, 40), source_size=(96, 40))
    question = Question(id="q", question="Which colour?", history=history)
    rendered = [token for turn in renderer.prompt(question, [view]) for token in turn.tokens]
    said = [("user", "How many?"), ("assistant", "<answer>Two.</answer>"), ("user", "Which colour?")]
    messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in said]
    messages[2]["content"].insert(0, {"type": "image"})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    images = [[Image.fromarray(views(0, (40, 96))[0])]]
    expected = _processor(str(folder(kind)))(images=images, text=[text], add_special_tokens=False)[
        "input_ids"
    ][0]
    assert rendered == expected


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_trained_exported_and_read(kind: str, tmp_path: Path):
    lora = config.LoraConfig(rank=4, alpha=8, vision_tower=True)
    model, _, spec = load_model(policy(kind), "cpu")
    expected = adapted_layers(model, lora.targets, True)
    assert any("q_proj" in name for name in expected)
    assert any(map(is_vision, expected))
    samples = [sample(spec, 5, (40, 96), (64, 64)), sample(spec, 6)]
    add_lora(model, lora)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(len(name)))
    trained = scores(model, spec, samples)
    trained.sum().backward()
    # The last layer of a vision tower is not always read
    lacking = {
        n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())
    }
    assert all(is_vision(name) and "layers.1" in name for name in lacking)
    tensors = {name: p.detach().numpy() for name, p in lora_parameters(model).items()}
    adapter = Adapter(tensors, lora.alpha, lora.rank, fingerprint(folder(kind)))

    merged = write_merged_model(adapter, folder(kind), tmp_path / "merged")
    stock = transformers.AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32)
    with torch.no_grad():
        again = torch.cat([own_scores(stock, kind, spec, s) for s in samples])
    assert (again - trained.detach()).abs().max() < 1e-4

    read = load_adapter(write_peft(adapter, tmp_path / "peft"))
    assert read.tensors.keys() == adapter.tensors.keys()
    plain = transformers.AutoModelForImageTextToText.from_pretrained(folder(kind), dtype=torch.float32)
    peft = PeftModel.from_pretrained(plain, tmp_path / "peft")
    with torch.no_grad():
        again = torch.cat([own_scores(peft, kind, spec, s) for s in samples])
    assert (again - trained.detach()).abs().max() < 1e-4


@pytest.mark.parametrize("full", [False, True])
def test_the_trainer_learns(full: bool):
    settings = policy("idefics3", full=full, lora=LORA.model_copy(update={"vision_tower": True}))
    with trainer(policy=settings, learner=learner_with(lr=1e-3)) as learner:
        samples = [sample(learner.model.spec, 10, (40, 96), (64, 64)), sample(learner.model.spec, 11)]
        before = learner.model.log_probs(samples)
        losses = [learner.update(samples, "sft")["policy/loss"] for _ in range(4)]
        assert losses == sorted(losses, reverse=True)
        for s, values in zip(samples, before, strict=True):
            s.log_probs[s.mask] = values
        metrics = learner.update(samples, "rft")
        assert metrics["policy/grad_norm"] > 0
        trained = learner.adapter()
    with trainer(policy=settings, adapter=trained) as resumed:
        assert resumed.adapter().sha256() == trained.sha256()


def test_what_neither_way_serves_is_refused():
    """Layers without keys and values train, but the embedded engine cannot continue their cache."""
    root = save(*CONVOLUTIONS())
    settings = config.PolicyConfig(model=str(root), dtype="float32")
    model, _, spec = load_model(settings, "cpu")
    samples = [sample(spec, 7, (40, 96)), sample(spec, 8)]
    with torch.no_grad():
        together = scores(model, spec, samples)
        alone = torch.cat([scores(model, spec, [s]) for s in samples])
    assert (together - alone).abs().max() < 1e-5
    with pytest.raises(BadConfig, match="layers of type conv"):
        HfEngine(root, settings, config.EngineConfig())


def test_a_forward_pass_with_more_parts_is_refused(tmp_path: Path):
    """Qwen3-VL places images on three axes, and feeds their features to several layers."""
    make(tmp_path, "qwen3_vl")
    with pytest.raises(BadConfig, match="off by"):
        load_model(config.PolicyConfig(model=str(tmp_path), family="generic", dtype="float32"), "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_views_of_several_sizes_have_the_features_of_each(kind: str):
    model, _, spec = load_model(policy(kind), "cpu")
    pictures = views(9, (40, 96), (64, 64), (1, 1), (7, 90))
    with torch.no_grad():
        together = spec.family.encode_views(model, spec, pictures)
        alone = [spec.family.encode_views(model, spec, [view])[0] for view in pictures]
    assert [len(f.embeds) for f in together] == [spec.image_tokens(*view.shape[:2]) for view in pictures]
    assert (concatenate(together).embeds - concatenate(alone).embeds).abs().max() < 1e-5


SAID = (
    "{% macro said(m) %}{% for part in m.content %}{{ part.text if part.text else '<image>' }}{% endfor %}"
    "{% endmacro %}"
)
INSTRUCTIONS = SAID + (
    "{{ '<|endoftext|>' }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ '<|video_pad|>' + said(m) + '<|image_pad|>' }}{% elif m.role == 'user' %}"
    "{{ '<|vision_start|>' + said(m) + '<|vision_end|>' }}"
    "{% else %}{{ said(m) + '<|im_end|>' }}{% endif %}{% endfor %}"
)
"""As Mistral's: nothing stands before an answer, and a token before the first turn."""
DEFAULT_SYSTEM = SAID + (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + said(m) + '<|im_end|>' }}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"
)
"""As Qwen's, with a system turn by itself, and no line break behind the last turn."""


@pytest.mark.parametrize("template", [INSTRUCTIONS, DEFAULT_SYSTEM])
def test_other_templates_are_cut(template: str):
    tokenizer = load_tokenizer(folder("llava_onevision"))
    tokenizer.chat_template, tokenizer.bos_token = template, "<|endoftext|>"
    chat = load_spec(folder("llava_onevision"), tokenizer).chat
    assert chat.stop == "<|im_end|>"
    said = [("system", "Obey."), ("user", "How many?"), ("assistant", "Two."), ("user", "Which?")]
    messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in said]
    for place in (0, 1):  # without a system turn, the template may write its own
        expected = tokenizer.apply_chat_template(messages[place:], tokenize=False, add_generation_prompt=True)
        text = "".join(chat.openers[role] + content + chat.closers[role] for role, content in said[place:])
        own = "<|im_start|>system\nBe brief.<|im_end|>\n" if place and template == DEFAULT_SYSTEM else ""
        assert chat.prefix + own + text + chat.openers["policy"] == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content[0].text }}{% endfor %}",
        "{% for m in messages %}{{ m.role + ': ' + m.content[0].text + ' ' }}{% endfor %}",
        "{{ raise_exception('no system role') }}",
    ],
)
def test_a_template_without_turns_is_refused(template: str):
    tokenizer = load_tokenizer(folder("llava_onevision"))
    tokenizer.chat_template = template
    with pytest.raises(BadInput, match="chat template") as caught:
        load_spec(folder("llava_onevision"), tokenizer)
    assert caught.value.code == "bad_template"
    assert "docs/families.md" in str(caught.value.fix)
