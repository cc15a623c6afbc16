"""Folders of models without weights: the embedded one's, and one with the layout of Qwen2.5-VL."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pixelis.config import DialogueConfig
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import Completion, SamplingParams, TokenCallback
from pixelis.families.spec import load_spec, load_tokenizer
from pixelis.nano.tokenizer import build_tokenizer
from pixelis.operations import select
from pixelis.records import ImageView

_NAMES = ["endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end"]
_NAMES += ["quad_start", "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"]
QWEN_SPECIAL = [f"<|{name}|>" for name in _NAMES]
QWEN_PLAIN = ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|repo_name|>")


@functools.cache
def nano_folder() -> Path:
    """Return a folder with the embedded model's tokenizer and configuration."""
    folder = Path(tempfile.mkdtemp(prefix="pixelis-nano-"))
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    vision = {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision |= {"num_position_embeddings": 64}
    config = {
        "model_type": "qwen3_vl",
        "pixelis_nano": True,
        "text_config": {"model_type": "qwen3_vl_text", "vocab_size": -(-len(tokenizer) // 64) * 64},
        "vision_config": {"model_type": "qwen3_vl", **vision},
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def large_folder() -> Path:
    """A folder like Qwen2.5-VL's: text settings on top, byte-level BPE, no <think> and <answer> tokens."""
    folder = Path(tempfile.mkdtemp(prefix="pixelis-large-"))
    tokenizer = Tokenizer(models.BPE())
    split = Regex(r"'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(split, "isolated"), bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    text = (
        'user assistant <answer> </answer> <think> {"name":"zoom_in","arguments":{"bbox_2d":[1,2,3,4]}} '
        "which digit is in "
    )
    tokenizer.train_from_iterator([text] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in QWEN_SPECIAL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in QWEN_PLAIN])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.save_pretrained(folder)
    config = {
        "model_type": "qwen2_5_vl",
        "vocab_size": len(fast) + 7,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 1},
        "image_token_id": fast.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": fast.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": fast.convert_tokens_to_ids("<|vision_start|>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def renderer(name: str) -> Renderer:
    """The renderer of ``nano`` or ``large`` with zoom_in only; all schemas would fill a short context."""
    folder = {"nano": nano_folder, "large": large_folder}[name]()
    tokenizer = load_tokenizer(folder)
    return Renderer(tokenizer, load_spec(folder, tokenizer), DialogueConfig(), select(["zoom_in"]))


def image_view(name: str, image: str = "img0", tiles: tuple[int, int] = (4, 4)) -> ImageView:
    """Return a view of ``tiles`` = (columns, rows) image tokens of the model."""
    step = renderer(name).spec.multiple
    return ImageView(id=image, source_size=(1000, 800), view_size=(tiles[0] * step, tiles[1] * step))


def pixels(view: ImageView) -> np.ndarray:
    """Return black pixels of the size of a view."""
    return np.zeros((view.view_size[1], view.view_size[0], 3), np.uint8)


@dataclass
class ScriptedSession:
    """An engine session with scripted replies. A stop token is appended to texts, but not to token lists."""

    renderer: Renderer
    lines: Sequence[str | list[int] | Completion | BaseException]
    calls: list[tuple[list[int], int, SamplingParams]] = field(default_factory=list)
    """Tokens, number of views and sampling parameters of each `generate`."""
    closed: int = 0
    kept: int = 0

    async def generate(
        self,
        tokens: Sequence[int],
        views: Sequence[np.ndarray],
        sampling: SamplingParams,
        on_tokens: TokenCallback | None = None,
    ) -> Completion:
        self.calls.append((list(tokens), len(views), sampling))
        line = self.lines[len(self.calls) - 1]
        if isinstance(line, BaseException):
            raise line
        if isinstance(line, Completion):
            return line
        if isinstance(line, str):
            line = [*self.renderer.tokenizer.encode(line, add_special_tokens=False), self.renderer.spec.stop]
        cut = line[: sampling.max_tokens]
        return Completion(cut, [-0.5] * len(cut), "stop" if len(cut) == len(line) else "length")

    def keep(self) -> None:
        self.kept += 1

    def close(self) -> None:
        self.closed += 1
