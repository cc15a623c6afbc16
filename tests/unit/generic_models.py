"""Tiny random models of transformers' own classes, without a family of their own, shared by the tests of `generic`.

Original are the classes of model, configuration, processor and image processor, and the chat templates. Sizes,
weights and the words of the tokenizer are not.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken

from pixelis.config import LoraConfig, PolicyConfig
from pixelis.dialogue.session import SamplingParams
from pixelis.engines import Engine
from pixelis.families.family import ModelSpec
from pixelis.families.features import concatenate
from pixelis.nano.tokenizer import build_tokenizer
from pixelis.policy.adapters import Adapter
from pixelis.policy.log_probs import banned_mask, token_log_probs
from pixelis.policy.lora import BaseWeights, adapted_layers, merge_into
from pixelis.policy.model import load_model
from pixelis.policy.model_path import fingerprint
from pixelis.policy.packing import collate
from pixelis.policy.samples import TrainSample

SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% elif line['type'] == 'video' %}{{ '<video>' }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""`DEFAULT_CHAT_TEMPLATE` of transformers/models/smolvlm/processing_smolvlm.py (huggingface/transformers)."""
LLAVA_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}"
    "{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] }}{% endgeneration %}{% endfor %}{% endif %}{{'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""`chat_template` of convert_llava_onevision_weights_to_hf.py (huggingface/transformers)."""
LORA = LoraConfig(rank=4, alpha=8)
TILE, PATCH = 32, 8
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": TILE,
    "patch_size": PATCH,
}


def tokenizer_with(*marks: str) -> transformers.PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(
        [AddedToken(mark, normalized=False, special=True) for mark in marks], special_tokens=True
    )
    return tokenizer


def _idefics3(kind: str, prefix: str) -> tuple[Any, ...]:
    """Tiles with row and column tokens and a small global view, pixel shuffle, Llama."""
    rows = (f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
    marks = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *rows)
    tokenizer = tokenizer_with(*marks)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.eos_token = "<end_of_utterance>"
    text = TEXT | {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    config = getattr(transformers, f"{prefix}Config")(
        text_config=text,
        vision_config=VISION | {"model_type": f"{kind}_vision" if kind == "smolvlm" else kind},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    images = getattr(transformers, f"{prefix}ImageProcessorPil")(
        size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE}
    )
    settings = {"image_seq_len": (TILE // PATCH // 2) ** 2}
    return config, tokenizer, images, SMOLVLM_TEMPLATE, settings


def _llava_onevision() -> tuple[Any, ...]:
    """Tiles of the best resolution with line breaks as a learnt vector, Qwen2."""
    tokenizer = tokenizer_with("<image>", "<video>")
    image, video = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
    pinpoints = [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE]]
    config = transformers.LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2", "vocab_size": len(tokenizer), "pad_token_id": 0},
        vision_config=VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=image,
        video_token_index=video,
        image_grid_pinpoints=pinpoints,
        tie_word_embeddings=False,
    )
    images = transformers.LlavaOnevisionImageProcessorPil(
        size={"height": TILE, "width": TILE}, image_grid_pinpoints=pinpoints
    )
    settings = {"num_image_tokens": (TILE // PATCH) ** 2, "vision_feature_select_strategy": "full"}
    return config, tokenizer, images, LLAVA_TEMPLATE, settings


def _llava(**text: object) -> tuple[Any, ...]:
    """A fixed number of tokens an image, and a language model of choice."""
    tokenizer = tokenizer_with("<image>")
    config = transformers.LlavaConfig(
        text_config=TEXT | {"vocab_size": len(tokenizer), "pad_token_id": 0} | text,
        vision_config=VISION | {"model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": TILE}, crop_size={"height": TILE, "width": TILE}
    )
    settings = {
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    return config, tokenizer, images, LLAVA_TEMPLATE, settings


def _llava_next() -> tuple[Any, ...]:
    """Tiles of the best resolution, cut to the view, and a small global view."""
    config, tokenizer, _, template, settings = _llava(model_type="mistral", sliding_window=None)
    pinpoints = [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE]]
    config = transformers.LlavaNextConfig(
        text_config=config.text_config,
        vision_config=config.vision_config,
        image_token_index=config.image_token_id,
        image_grid_pinpoints=pinpoints,
        tie_word_embeddings=False,
    )
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": TILE},
        crop_size={"height": TILE, "width": TILE},
        image_grid_pinpoints=pinpoints,
    )
    return config, tokenizer, images, template, settings


def _aya_vision() -> tuple[Any, ...]:
    """Tiles with marks of plain text between them, pixel shuffle, Cohere's parallel layers."""
    tokenizer = tokenizer_with("<image>", "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>")
    config = transformers.AyaVisionConfig(
        text_config=TEXT
        | {"model_type": "cohere2", "vocab_size": len(tokenizer), "pad_token_id": 0, "sliding_window": 8}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        vision_config=VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
        downsample_factor=2,
        tie_word_embeddings=False,
    )
    images = transformers.GotOcr2ImageProcessorPil(
        size={"height": TILE, "width": TILE}, crop_to_patches=True, max_patches=4
    )
    settings = {"patch_size": PATCH, "img_size": TILE, "downsample_factor": 2}
    return config, tokenizer, images, LLAVA_TEMPLATE, settings


_WINDOW = {"sliding_window": 7}
MODELS = {
    "smolvlm": functools.partial(_idefics3, "smolvlm", "SmolVLM"),
    "idefics3": functools.partial(_idefics3, "idefics3", "Idefics3"),
    "llava_onevision": _llava_onevision,
    "llava_next": _llava_next,
    "aya_vision": _aya_vision,
    "llava_windows": functools.partial(_llava, model_type="mistral", **_WINDOW),
    "llava_some_windows": functools.partial(
        _llava, model_type="qwen2", use_sliding_window=True, max_window_layers=1, **_WINDOW
    ),
}
CONVOLUTIONS = functools.partial(_llava, model_type="lfm2", layer_types=["conv", "full_attention"])
"""LLaVA with a language model whose cache is more than keys and values."""


@functools.cache
def folder(kind: str) -> Path:
    """A model folder on disk, with the layout of `save_pretrained`."""
    return save(*MODELS[kind]())


def save(config: Any, tokenizer: Any, images: Any, template: str, settings: dict[str, Any]) -> Path:
    root = Path(tempfile.mkdtemp(prefix=f"pixelis-{config.model_type}-"))
    atexit.register(shutil.rmtree, root, True)
    torch.manual_seed(5)
    model = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]._from_config(config)
    model.save_pretrained(root)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(root)
    images.save_pretrained(root)
    name = f"{type(config).__name__.removesuffix('Config')}Processor"
    (root / "processor_config.json").write_text(json.dumps({"processor_class": name, **settings}))
    return root


def policy(kind: str, **values: object) -> PolicyConfig:
    return PolicyConfig(**{"model": str(folder(kind)), "lora": LORA, "dtype": "float32", **values})


def views(seed: int, *sizes: tuple[int, int]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 255, (*size, 3), dtype=np.uint8) for size in sizes]


def scores(model: torch.nn.Module, spec: ModelSpec, samples: list[TrainSample]) -> torch.Tensor:
    batch = collate(samples, spec)
    features = concatenate(spec.family.encode_views(model, spec, batch.views)) if batch.views else None
    return token_log_probs(model, spec, batch, features, banned_mask(spec.banned, spec.vocab))[0]


def check_engine(engine: Engine[Any], kind: str) -> float:
    """Largest difference of log-probabilities between an engine, which is closed, and the learner.

    Of several turns with text and pictures, by the base model and an adapter.
    """
    model, _, spec = load_model(policy(kind), "cpu")
    pieces = [token for token in range(300, 330) if token not in spec.banned]
    pictures = views(4, (40, 96), (30, 60))
    seen = [spec.family.image_ids(spec, *view.shape[:2]) for view in pictures]
    conversations = [
        [([*pieces[:5], *seen[0]], pictures[:1]), (pieces[5:9], []), (seen[1], pictures[1:])],
        [(pieces[:2], []), (pieces[2:12], [])],
        [([*seen[1], *pieces[20:], *seen[0]], pictures[::-1])],
    ]
    rng, tensors = np.random.default_rng(0), {}
    for name, layer in adapted_layers(model, LORA.targets).items():
        tensors[f"{name}.A"] = rng.normal(0, 0.08, (LORA.rank, layer.in_features)).astype(np.float32)
        tensors[f"{name}.B"] = rng.normal(0, 0.08, (layer.out_features, LORA.rank)).astype(np.float32)
    adapter = Adapter(tensors, LORA.alpha, LORA.rank, fingerprint(folder(kind)))

    async def episode(seed: int, turns: list[Any]) -> TrainSample:
        session, tokens, mask, log_probs, shown = await engine.open(), [], [], [], []
        for prompt, new in turns:
            sampling = SamplingParams(temperature=1.0, max_tokens=9, seed=seed)
            completion = await session.generate(prompt, new, sampling)
            tokens += [*prompt, *completion.tokens]
            mask += [False] * len(prompt) + [True] * len(completion.tokens)
            log_probs += [0.0] * len(prompt) + list(completion.log_probs)
            shown += new
        session.close()
        return TrainSample(
            np.asarray(tokens), np.asarray(mask), np.asarray(log_probs, np.float32), 1.0, shown
        )

    async def episodes() -> list[list[TrainSample]]:
        try:
            base = await asyncio.gather(*(episode(i, turns) for i, turns in enumerate(conversations)))
            await engine.load(1, adapter)
            adapted = await asyncio.gather(*(episode(i, turns) for i, turns in enumerate(conversations)))
        finally:
            await engine.aclose()
        return [base, adapted]

    difference = 0.0
    for samples, weights in zip(asyncio.run(episodes()), (None, adapter), strict=True):
        merge_into(model, BaseWeights(), weights)
        with torch.no_grad():
            scored = scores(model, spec, samples)
        expected = torch.cat([torch.from_numpy(s.log_probs[s.mask]) for s in samples])
        assert not set(np.concatenate([s.tokens[s.mask] for s in samples]).tolist()) & set(spec.banned)
        difference = max(difference, float((scored - expected).abs().max()))
    return difference
