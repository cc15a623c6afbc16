"""Gemma 4: both structures of the released sizes, their prompts, pictures, and layers with a sliding window."""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_policy import LORA, TINY, Maker, stock_pixels
from tiny_trainer import LEARNER
from tokenizers import Tokenizer, decoders, models, normalizers
from torch.nn.utils import get_total_norm as norm
from transformers import Gemma4Config, PreTrainedTokenizerFast
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from pixelis import config
from pixelis.config import DialogueConfig, PolicyConfig
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import SamplingParams
from pixelis.engines.hf import HfEngine
from pixelis.errors import BadConfig
from pixelis.families import FAMILIES
from pixelis.families.attention import PACKED
from pixelis.families.features import concatenate
from pixelis.families.spec import load_spec, load_tokenizer
from pixelis.nano.architecture import SIZES
from pixelis.nano.tokenizer import build_tokenizer
from pixelis.policy.architecture import Architecture
from pixelis.policy.export import write_merged_model
from pixelis.policy.log_probs import banned_mask, project, token_log_probs
from pixelis.policy.lora import add_lora, lora_parameters
from pixelis.policy.model import load_model
from pixelis.policy.packing import collate, segment
from pixelis.policy.samples import TrainSample
from pixelis.policy.sequence_parallel import SequenceGroup
from pixelis.policy.train_step import Trainer
from pixelis.records import ImageView, Question

FAMILY = FAMILIES["gemma4"]
LARGE = {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
STRUCTURES: dict[str, dict[str, Any]] = {"E2B": {}, "31B": LARGE, "26B-A4B": LARGE | EXPERTS}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|turn>' + ('model' if message['role'] == 'assistant' else "
    "message['role']) + '\n' }}{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}{{ '<|image|>' if item['type'] == 'image' else item['text'] | trim }}"
    "{% endfor %}{% endif %}{{ '<turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}%s{% endif %}"
)
"""The part of google/gemma-4-E2B-it's template (revision 8995379) for text and pictures. %s: that of larger models."""
NO_THOUGHT = r"{{ '<|channel>thought\n<channel|>' }}"


@functools.cache
def folder(structure: str) -> Path:
    """A tiny random model with a released model's structure, and position embeddings that are not all 1."""
    root, tokenizer = Path(tempfile.mkdtemp(prefix=f"pixelis-{structure}-")), build_tokenizer()
    tiny = Gemma4Config(**FAMILY.tiny(tokenizer, SIZES | TINY))
    text = tiny.text_config.to_dict() | STRUCTURES[structure]
    if STRUCTURES[structure]:
        del text["per_layer_config"]
        text["global_head_dim"] = 64
    settings = Gemma4Config(**tiny.to_dict() | {"text_config": text})
    torch.manual_seed(5)
    model = FAMILY.model_class()._from_config(settings, dtype=torch.float32)
    with torch.no_grad():
        model.model.vision_tower.patch_embedder.position_embedding_table.normal_(std=0.5)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if "q_norm" in name:  # attention has no other scale, and a sharp one multiplies rounding errors
                parameter.mul_(0.2)
    model.save_pretrained(root)
    tokenizer.save_pretrained(root)
    return root


def policy(structure: str, **values: Any) -> PolicyConfig:
    return PolicyConfig(model=str(folder(structure)), dtype="float32", lora=LORA, **values)


def maker(structure: str, seed: int = 0) -> Maker:
    own = Maker("gemma4", seed)
    own.spec = load_spec(folder(structure))
    return own


def episode(own: Maker) -> TrainSample:
    """Two turns, whose pictures have more tokens than the window of 16 and are the last that turns see."""
    views = [own.view(120, 144), own.view(48, 120)]
    tokens, mask = own.text(9), [False] * 9
    for view in views:
        seen, said = own.image(view), own.text(5)
        tokens, mask = tokens + seen + said, mask + [False] * len(seen) + [True] * len(said)
    log_probs = np.zeros(len(mask), np.float32)
    return TrainSample(np.asarray(tokens), np.asarray(mask), log_probs, 1.0, views)


def reference(structure: str, sample: TrainSample, model: Any = None) -> torch.Tensor:
    """Log-probabilities by transformers' own forward pass, of a model that nothing here has prepared."""
    spec = load_spec(folder(structure))
    if model is None:
        model = FAMILY.model_class().from_pretrained(folder(structure), dtype=torch.float32).eval()
    ids = torch.from_numpy(sample.tokens)[None]
    types = (ids == spec.image_token).int()
    logits = model(input_ids=ids, mm_token_type_ids=types, **stock_pixels(spec, sample.views)).logits[0]
    logits = logits + banned_mask(spec.banned, spec.vocab)
    chosen = torch.log_softmax(logits, -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return chosen[torch.from_numpy(sample.mask[1:])]


def scored(model: Any, structure: str, samples: list[TrainSample], share: bool = False) -> torch.Tensor:
    spec = load_spec(folder(structure))
    FAMILY.attend_packed(model)
    batch = collate(samples, spec, share)
    features = concatenate(FAMILY.encode_views(model, spec, batch.views))
    return token_log_probs(model, spec, batch, features, banned_mask(spec.banned, spec.vocab))[0]


@pytest.mark.parametrize("shape", [(24, 24), (48, 120), (72, 24), (120, 144)])
def test_patches_are_those_of_the_models_processor(shape: tuple[int, int]):
    own = maker("E2B")
    view = own.view(*shape)
    expected = stock_pixels(own.spec, [view])
    pixels, places = FAMILY.patches(own.spec, [view])
    count = pixels.shape[1]
    assert own.spec.image_tokens(*shape) == count // 9
    assert torch.equal(places, expected["image_position_ids"][:, :count])
    assert (pixels - expected["pixel_values"][:, :count]).abs().max() < 1e-6
    assert (expected["image_position_ids"][:, count:] == -1).all()


def test_a_view_of_the_size_that_the_models_processor_chooses_stays_as_it_is():
    spec = FAMILY.geometry({"patch_size": 16, "pooling_kernel_size": 3})
    view = np.random.default_rng(0).integers(0, 255, (576, 1104, 3), dtype=np.uint8)
    theirs = Gemma4ImageProcessorPil()([view], return_tensors="pt")
    assert theirs["num_soft_tokens_per_image"].tolist() == [spec.image_tokens(576, 1104)] == [276]
    pixels, _ = FAMILY.patches(spec, [view])  # type: ignore[arg-type]
    assert (theirs["pixel_values"][:, : pixels.shape[1]] - pixels).abs().max() < 1e-6


def test_views_of_one_pass_have_the_features_of_single_ones():
    model, _, spec = load_model(policy("E2B"), "cpu")
    own = maker("E2B")
    views = [own.view(24, 24), own.view(120, 144), own.view(48, 24)]
    with torch.no_grad():
        single = [FAMILY.encode_views(model, spec, [view])[0] for view in views]
        together = FAMILY.encode_views(model, spec, views)
    for one, other in zip(single, together, strict=True):
        assert torch.allclose(one.embeds, other.embeds, atol=1e-5)


@pytest.mark.parametrize("larger", [False, True])
def test_a_prompt_is_that_of_the_chat_template(larger: bool):
    tokenizer = load_tokenizer(folder("E2B"))
    tokenizer.bos_token = "<bos>"
    tokenizer.chat_template = CHAT_TEMPLATE.replace("%s", NO_THOUGHT if larger else "")
    own = load_spec(folder("E2B"), tokenizer)
    renderer = Renderer(tokenizer, own, DialogueConfig(dialect="plain", system="row"), [])
    question = Question(id="q", question="Which digit?", meta={"system": "Be brief."})
    system, user = renderer.prompt(question, [ImageView(id="img0", view_size=(48, 24))])
    content = [{"type": "image"}, {"type": "text", "text": user.text}]
    chat = [{"role": "system", "content": system.text}, {"role": "user", "content": content}]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    assert text.endswith("<channel|>") == larger
    text = text.replace("<|image|>", "<|image><|image|><|image|><image|>")
    assert system.tokens + user.tokens == tokenizer.encode(text, add_special_tokens=False)
    assert own.stop == tokenizer.convert_tokens_to_ids("<turn|>")
    assert {own.image_token, own.video_token, own.vision_start, own.vision_end} < set(own.banned)


def test_streamed_text_of_its_vocabulary_has_spaces_and_whole_characters():
    """Gemma's vocabulary writes spaces as U+2581, and characters without a token as bytes."""
    words = ["<pad>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "é", "▁a", "a", "b"]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [("▁", "a")], byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": ["<bos>", "<|turn>", "<turn|>"]})
    renderer = Renderer(fast, load_spec(folder("E2B")), DialogueConfig(dialect="plain"), [])
    tokens = fast.encode("a é ab\n日<turn|>", add_special_tokens=False)
    assert b"".join(renderer.pieces(tokens)).decode() == fast.decode(tokens) == "a é ab\n日<turn|>"


@pytest.mark.parametrize(
    "structure", [pytest.param(name, marks=pytest.mark.long if name != "E2B" else ()) for name in STRUCTURES]
)
def test_packed_samples_have_the_log_probs_and_gradients_of_transformers(structure: str):
    """Of adapters, with shared prompts and gradient checkpointing as without."""
    own = maker(structure)
    prompt, *others = (episode(own) for _ in range(3))
    tokens = prompt.tokens.copy()
    tokens[-5:] = own.text(5)
    twin = TrainSample(tokens, prompt.mask, prompt.log_probs, 1.0, prompt.views)
    samples = [prompt, twin, *others]
    results = []
    for kind in ("transformers", "packed", "shared", "checkpointed"):
        if kind == "transformers":
            model = FAMILY.model_class().from_pretrained(folder(structure), dtype=torch.float32)
        else:
            model = load_model(policy(structure), "cpu")[0]
        add_lora(model, LORA, 1)
        with torch.no_grad():
            for name, parameter in lora_parameters(model).items():
                if name.endswith(".B"):
                    parameter.copy_(
                        torch.from_numpy(np.random.default_rng(3).normal(0, 0.05, parameter.shape))
                    )
        if kind == "transformers":
            values = torch.cat([reference(structure, sample, model) for sample in samples])
        else:
            if kind == "checkpointed":
                model.train().gradient_checkpointing_enable({"use_reentrant": False})
            values = scored(model, structure, samples, share=kind == "shared")
        (values * torch.linspace(-1, 1, len(values))).sum().backward()
        results.append((values.detach(), [p.grad for p in lora_parameters(model).values()]))
    (expected, gradients), *rest = results
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    for values, found in rest:
        assert (values - expected).abs().max() < 1e-5
        differences = [one - other for one, other in zip(found, gradients, strict=True)]
        assert norm(differences) < 1e-5 * norm(gradients)


@pytest.mark.parametrize(
    "structure", [pytest.param(name, marks=pytest.mark.long if name != "E2B" else ()) for name in STRUCTURES]
)
def test_turns_of_the_engine_have_the_log_probs_of_transformers(structure: str):
    own, samples = maker(structure, 1), list[TrainSample]()

    async def play(engine: HfEngine, number: int) -> None:
        views = [own.view(120, 144), own.view(48, 24 * (1 + number))]
        turns = [
            (own.text(2 + 11 * number) + own.image(views[0]), views[:1]),
            (own.image(views[1]), views[1:]),
        ]
        turns.append((own.text(20), []))
        session = await engine.open()
        tokens, mask, log_probs = list[int](), list[bool](), list[float]()
        for seen, shown in turns:
            said = await session.generate(seen, shown, SamplingParams(1.0, 1.0, 5 + number, seed=number))
            tokens += [*seen, *said.tokens]
            mask += [False] * len(seen) + [True] * len(said.tokens)
            log_probs += [0.0] * len(seen) + said.log_probs
        session.close()
        values = np.asarray(log_probs, np.float32)
        samples.append(TrainSample(np.asarray(tokens), np.asarray(mask), values, 0.0, views))

    async def body() -> None:
        engine = HfEngine(folder(structure), policy(structure), config.EngineConfig())
        await asyncio.gather(*(play(engine, number) for number in range(3)))
        await engine.aclose()

    asyncio.run(body())
    with torch.no_grad():
        for sample in samples:
            expected = reference(structure, sample).numpy()
            assert np.abs(expected - sample.log_probs[sample.mask]).max() < 1e-4


def test_a_capped_head_has_the_same_gradients_frozen_and_trained():
    head = load_model(policy("E2B"), "cpu")[0].lm_head
    hidden = 3 * torch.randn(7, head.in_features)
    targets, banned = torch.arange(7), torch.zeros(head.out_features)
    results = []
    for trained in (False, True):
        head.requires_grad_(trained)
        states = hidden.clone().requires_grad_(True)
        values, entropy = project(head, states, targets, banned, 0.7)[:2]
        (values * torch.linspace(-1, 1, 7)).sum().backward()
        results.append((values.detach(), entropy.detach(), states.grad))
    logits = 5 * torch.tanh(hidden @ head.weight.T / 5) / 0.7
    expected = torch.log_softmax(logits, -1)[torch.arange(7), targets]
    assert (results[0][0] - expected).abs().max() < 1e-5
    assert (logits.abs() > 3).any(), "the cap matters"
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() < 1e-5


@pytest.mark.parametrize("structure", ["E2B", "26B-A4B"])
@pytest.mark.parametrize("full", [False, True])
def test_what_is_trained_loads_in_transformers(structure: str, full: bool, tmp_path: Path):
    own = maker(structure)
    samples = [episode(own), episode(own)]
    settings = policy(structure, full=full)
    trainer = Trainer(policy=settings, learner=LEARNER, total_steps=10, device="cpu")
    losses = [trainer.update(samples, "sft")["policy/loss"] for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    expected, adapter = trainer.model.log_probs(samples), trainer.adapter()
    trainer.close()
    write_merged_model(adapter, folder(structure), tmp_path / "merged")
    original, merged = (
        load_file(at / "model.safetensors") for at in (folder(structure), tmp_path / "merged")
    )
    assert original.keys() == merged.keys()
    exported = FAMILY.model_class().from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        for sample, values in zip(samples, expected, strict=True):
            assert np.abs(reference(structure, sample, exported).numpy() - values).max() < 1e-4


def test_what_gemma_cannot_is_refused_by_name():
    model = load_model(policy("E2B"), "cpu")[0]
    with pytest.raises(BadConfig, match="sliding_attention"):
        SequenceGroup(2, 0, None).check(model.model.language_model.config)
    model.model.language_model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(BadConfig) as error:
        FAMILY.attend_packed(model)
    assert "sdpa" in str(error.value.fix)


@pytest.mark.parametrize(("structure", "number"), [("E2B", 3), ("31B", 1), ("26B-A4B", 0)])
def test_the_activations_of_a_layer_are_those_that_it_saves(structure: str, number: int):
    inner = load_model(policy(structure).model_copy(update={"dtype": "bfloat16"}), "cpu")[
        0
    ].model.language_model
    text, tokens, kind = inner.config, 256, inner.config.layer_types[number]
    inner.config._attn_implementation = PACKED
    hidden, inputs = (
        torch.randn(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        for width in (text.hidden_size, max(1, text.hidden_size_per_layer_input))
    )
    keys = torch.randn(1, 1, tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    rotary = inner.rotary_emb(hidden, torch.arange(tokens)[None], kind)
    parameters = {p.untyped_storage().data_ptr() for p in inner.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        inner.layers[number](
            hidden.clone(),
            inputs,
            shared_kv_states={kind: (keys, keys)},
            position_embeddings=rotary,
            segments=segment([tokens // 2] * 2),
        )
    estimated = Architecture(policy(structure)).layer_bytes(tokens)[number]
    assert estimated == pytest.approx(sum(storage.nbytes() for storage in saved.values()), rel=0.25)


SMALL = {"num_attention_heads": 8, "sliding_window": 512}
BIG = LARGE | {"sliding_window": 1024}
RELEASED: dict[str, tuple[dict[str, Any], float, int]] = {
    "E2B": (
        SMALL
        | {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_key_value_heads": 1}
        | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True}
        | {"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7},
        4.80e9,
        12 * 256 + 3 * 512,
    ),
    "E4B": (
        SMALL
        | {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "num_key_value_heads": 2}
        | {"num_kv_shared_layers": 18},
        7.63e9,
        2 * (20 * 256 + 4 * 512),
    ),
    "26B-A4B": (
        BIG
        | {"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "num_global_key_value_heads": 2, "enable_moe_block": True}
        | {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
        25.8e9,
        25 * 8 * 256 + 5 * 2 * 512,
    ),
    "31B": (
        BIG
        | {
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
        }
        | {"num_key_value_heads": 16, "num_global_key_value_heads": 4},
        31.3e9,
        50 * 16 * 256 + 10 * 4 * 512,
    ),
}
"""The text configuration of the released models, their parameters without audio, widths of a token's keys."""


@pytest.mark.parametrize("name", RELEASED)
def test_the_sizes_of_the_released_models_are_known(name: str, tmp_path: Path):
    text, parameters, keys = RELEASED[name]
    large = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "head_dim": 72}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "standardize": True}
    vision = {} if name.startswith("E") else large | heads
    Gemma4Config(text_config=text, vision_config=vision).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gemma4"
    arch = Architecture(PolicyConfig(model=str(tmp_path)))
    assert arch.parameters == pytest.approx(parameters, rel=0.005)
    assert arch.kv_token_bytes == 2 * 2 * keys
    assert [arch.image_tokens(n * 48**2) for n in (0, 1, 280)] == [0, 1, 280]
    assert arch.vision_block_bytes(1000) > 0
