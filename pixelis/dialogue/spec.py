"""Model facts for the dialogue: image geometry, special tokens, coordinate scale."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pixelis.errors import BadConfig, BadInput, MissingFile
from pixelis.records import Coordinates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HALF = (0.5, 0.5, 0.5)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class Family(NamedTuple):
    """Defaults of an architecture, for values that its configuration files may omit."""

    coordinates: Coordinates
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    patch: int
    vocab: int
    merge: int = 2
    temporal: int = 2
    image_token: int = 151655
    video_token: int = 151656


FAMILIES = {
    "qwen2_vl": Family("thousand", CLIP_MEAN, CLIP_STD, patch=14, vocab=152064),
    "qwen2": Family("thousand", HALF, HALF, patch=14, vocab=151936),
    "qwen3": Family("thousand", HALF, HALF, patch=14, vocab=151936),
    "qwen3_vl": Family("thousand", HALF, HALF, patch=16, vocab=151936),
    "qwen3_vl_moe": Family("thousand", HALF, HALF, patch=16, vocab=151936),
    "qwen2_5_vl": Family("pixels", CLIP_MEAN, CLIP_STD, patch=14, vocab=152064),
}

TEXT_FAMILIES = frozenset(("qwen2", "qwen3"))
"""Families without a vision tower: questions with pictures are refused."""

SUPPORTED = "the folder of a Hugging Face Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen2.5 or Qwen3 model"

SPEAKABLE = frozenset(
    f"<{slash}{tag}>"
    for tag in ("think", "tool_call", "grounding", "answer", "tool_response")
    for slash in ("", "/")
)
"""Tags that the policy may write, even if the tokenizer marks them as special."""


@dataclass(frozen=True)
class ModelSpec:
    """Facts about one model folder. Token fields are ids; ``vocab`` is the width of the logits.

    ``banned`` ids must never be sampled: special tokens except ``stop``, and logits without a token.
    """

    family: str
    patch: int
    merge: int
    temporal: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    image_token: int
    video_token: int
    vision_start: int
    vision_end: int
    stop: int
    pad: int
    coordinates: Coordinates
    vocab: int
    banned: tuple[int, ...] = ()
    embedded: bool = False

    @property
    def reads_images(self) -> bool:
        """False for a model of text alone."""
        return self.family not in TEXT_FAMILIES

    @property
    def multiple(self) -> int:
        """Sides of a view are multiples of this many pixels."""
        return self.patch * self.merge

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Patch grid of a view: frames, rows, columns."""
        if height < 1 or width < 1 or height % self.multiple or width % self.multiple:
            raise BadInput(
                f"a view of {width}x{height} pixels: the sides must be multiples of {self.multiple}",
                fix="resize it with fit()",
            )
        return 1, height // self.patch, width // self.patch

    def image_tokens(self, view_height: int, view_width: int) -> int:
        """Image tokens of a view of this size in pixels."""
        frames, rows, columns = self.grid(view_height, view_width)
        return frames * rows * columns // self.merge**2

    @classmethod
    def load(cls, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> ModelSpec:
        """Read a Hugging Face model folder.

        MissingFile without config.json, BadConfig for another architecture, BadInput for another model's
        tokenizer.
        """
        # Plain JSON: the configuration classes of transformers import torch, which takes longer than the rest
        folder, raw = Path(folder), model_config(folder)
        name = raw["model_type"]
        family, tokenizer = FAMILIES[name], tokenizer or load_tokenizer(folder)
        vision, text = raw.get("vision_config") or {}, raw.get("text_config") or raw
        images = _read_json(folder / "preprocessor_config.json") or {}
        image_token = raw.get("image_token_id", family.image_token)
        video_token = raw.get("video_token_id", family.video_token)
        # A text model's config.json does not name them, and its vocabulary may be smaller
        if name in TEXT_FAMILIES:
            image_token, video_token = (token_id(tokenizer, f"<|{kind}_pad|>") for kind in ("image", "video"))
        vocab = int(text.get("vocab_size", family.vocab))
        stop = token_id(tokenizer, "<|im_end|>")
        _check_tokens(
            tokenizer, vocab, {key: raw[key] for key in ("image_token_id", "video_token_id") if key in raw}
        )
        banned = {
            int(index)
            for index, token in tokenizer.added_tokens_decoder.items()
            if (token.special or token.content.startswith("<|")) and token.content not in SPEAKABLE
        }
        banned |= {image_token, video_token, *range(max(tokenizer.get_vocab().values()) + 1, vocab)}
        return cls(
            family=name,
            patch=int(vision.get("patch_size", family.patch)),
            merge=int(vision.get("spatial_merge_size", family.merge)),
            temporal=int(vision.get("temporal_patch_size", family.temporal)),
            image_mean=tuple(images.get("image_mean") or family.image_mean),
            image_std=tuple(images.get("image_std") or family.image_std),
            image_token=image_token,
            video_token=video_token,
            vision_start=token_id(tokenizer, "<|vision_start|>"),
            vision_end=token_id(tokenizer, "<|vision_end|>"),
            stop=stop,
            pad=token_id(tokenizer, tokenizer.pad_token or "<|endoftext|>"),
            coordinates=family.coordinates,
            vocab=vocab,
            banned=tuple(sorted(banned - {stop})),
            embedded=bool(raw.get("pixelis_nano"))
            or folder.resolve().parts[-3:] == ("pixelis", "nano", "base"),
        )


def model_config(folder: str | Path) -> dict[str, Any]:
    """A folder's config.json; MissingFile without it, BadConfig for an unsupported architecture."""
    raw = _read_json(Path(folder) / "config.json")
    if raw is None:
        raise MissingFile(
            f"no config.json in {folder}",
            fix=f"use {SUPPORTED}",
        )
    if (family := raw.get("model_type")) not in FAMILIES:
        raise BadConfig(
            f"policy.model: {Path(folder).name} is a model of type {family}",
            fix=f"use {SUPPORTED}",
        )
    return raw


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, offline."""
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        # The file is complete; AutoTokenizer would import torch and all model configurations.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    if not (folder / "vocab.json").is_file():
        raise MissingFile(
            f"no tokenizer in {folder}",
            fix="copy tokenizer.json and tokenizer_config.json of the model there",
        )
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def token_id(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Id of a required token. Raises BadInput if the tokenizer lacks it."""
    token = tokenizer.get_vocab().get(text)
    if token is None:
        raise BadInput(
            f"the tokenizer has no token {text}", fix="use the tokenizer that belongs to the model"
        )
    return int(token)


def is_control(text: str, special: bool) -> bool:
    """True for tokens that structure a conversation: marked special, ``<|...|>`` or ``<tag>``."""
    return special or (text.startswith("<") and text.endswith(">"))


def _check_tokens(tokenizer: PreTrainedTokenizerBase, vocab: int, placeholders: dict[str, int]) -> None:
    """BadInput unless ids fit the vocabulary of config.json, and placeholder ids are equal."""
    fix = "use the tokenizer and the config.json of one model"
    for key, number in placeholders.items():
        token = f"<|{key.partition('_')[0]}_pad|>"
        if (actual := tokenizer.get_vocab().get(token, number)) != number:
            raise BadInput(
                f"config.json has {key} {number}, but {token} is {actual} in the tokenizer",
                code="bad_tokenizer",
                fix=fix,
            )
    largest = max(*placeholders.values(), *tokenizer.get_vocab().values())
    if largest >= vocab:
        message = f"config.json has vocab_size {vocab}, but the tokenizer has ids up to {largest}"
        raise BadInput(message, code="bad_tokenizer", fix=fix)


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BadInput(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path} contains {type(value).__name__}, not an object")
    return value
