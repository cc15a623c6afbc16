"""Reads the facts of a model folder: its family, image geometry and special tokens."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pixelis.config.references import load_reference
from pixelis.errors import BadConfig, BadInput, MissingFile
from pixelis.families import FAMILIES, GENERIC
from pixelis.families.family import Family, ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPEAKABLE = frozenset(
    f"<{slash}{tag}>"
    for tag in ("think", "tool_call", "grounding", "answer", "tool_response")
    for slash in ("", "/")
)
"""Tags that the policy may write, even if the tokenizer marks them as special."""


def load_spec(
    folder: str | Path, tokenizer: PreTrainedTokenizerBase | None = None, family: str | None = None
) -> ModelSpec:
    """Read a Hugging Face model folder. family: `policy.family`.

    MissingFile without config.json, BadConfig for another architecture, BadInput for another model's
    tokenizer.
    """
    # Plain JSON: the configuration classes of transformers import torch, which takes longer than the rest
    folder, raw = Path(folder), model_config(folder, family)
    name = family or raw["model_type"]
    own, tokenizer = find_family(name).of_folder(folder), tokenizer or load_tokenizer(folder)
    vision, text = raw.get("vision_config") or {}, raw.get("text_config") or raw
    images = _read_json(folder / "preprocessor_config.json") or {}
    image_token = raw.get("image_token_id", own.image_token)
    video_token = raw.get("video_token_id", own.video_token or image_token)
    # A text model's config.json does not name them, and its vocabulary may be smaller
    if not own.reads_images:
        image_token, video_token = (token_id(tokenizer, t) for t in (own.marks.image, own.marks.video))
    vocab = int(text.get("vocab_size", own.vocab))
    chat = own.chat(tokenizer)
    stop = token_id(tokenizer, chat.stop)
    named = {"image_token_id": own.marks.image, "video_token_id": own.marks.video}
    _check_tokens(tokenizer, vocab, {key: (raw[key], mark) for key, mark in named.items() if key in raw})
    banned = {
        int(index)
        for index, token in tokenizer.added_tokens_decoder.items()
        if (token.special or token.content.startswith("<|")) and token.content not in SPEAKABLE
    }
    banned |= {image_token, video_token, *range(max(tokenizer.get_vocab().values()) + 1, vocab)}
    return ModelSpec(
        **vars(own.geometry(vision)),
        family_name=name,
        image_mean=tuple(images.get("image_mean") or own.image_mean),
        image_std=tuple(images.get("image_std") or own.image_std),
        image_token=image_token,
        video_token=video_token,
        vision_start=token_id(tokenizer, own.marks.vision_start),
        vision_end=token_id(tokenizer, own.marks.vision_end),
        chat=chat,
        stop=stop,
        pad=token_id(tokenizer, tokenizer.pad_token or own.marks.pad),
        coordinates=own.coordinates,
        vocab=vocab,
        banned=tuple(sorted(banned - {stop})),
        embedded=bool(raw.get("pixelis_nano")) or folder.resolve().parts[-3:-1] == ("pixelis", "nano"),
    )


@functools.cache
def find_family(name: str) -> Family:
    """The family of a `model_type`, or of a reference `package.module:NAME`. Raises BadConfig."""
    if name in FAMILIES:
        return FAMILIES[name]
    is_generic = name == GENERIC or _is_of_transformers(name)
    family = load_reference("pixelis.families.generic:FAMILY" if is_generic else name, "policy.family")
    if not isinstance(family, Family):
        raise BadConfig(f"policy.family: {name} is no Family", fix="see docs/families.md")
    return family


def model_family(folder: str | Path, family: str | None = None) -> Family:
    """The family of a model folder. family: `policy.family`. Raises MissingFile, BadConfig."""
    return find_family(family or model_config(folder)["model_type"]).of_folder(Path(folder))


def _is_of_transformers(model_type: object) -> bool:
    """Whether transformers has a vision-language model of this type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def model_config(folder: str | Path, family: str | None = None) -> dict[str, Any]:
    """A folder's config.json; MissingFile without it, BadConfig for an architecture without a family."""
    raw = _read_json(Path(folder) / "config.json")
    if raw is None:
        raise MissingFile(
            f"no config.json in {folder}",
            fix=f"use a Hugging Face model of type {', '.join(sorted(FAMILIES))}",
        )
    model_type = raw.get("model_type")
    if family is None and model_type not in FAMILIES and not _is_of_transformers(model_type):
        raise BadConfig(
            f"policy.model: {Path(folder).name} is a model of type {model_type}",
            fix=f"use one of {', '.join(sorted(FAMILIES))}, a vision-language model of transformers, or name "
            "your own in policy.family (docs/families.md)",
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


def _check_tokens(
    tokenizer: PreTrainedTokenizerBase, vocab: int, placeholders: dict[str, tuple[int, str]]
) -> None:
    """BadInput unless ids fit the vocabulary of config.json, and placeholder ids are those of the tokenizer."""
    fix = "use the tokenizer and the config.json of one model"
    for key, (number, token) in placeholders.items():
        if (actual := tokenizer.get_vocab().get(token, number)) != number:
            raise BadInput(
                f"config.json has {key} {number}, but {token} is {actual} in the tokenizer",
                code="bad_tokenizer",
                fix=fix,
            )
    largest = max(*(number for number, _ in placeholders.values()), *tokenizer.get_vocab().values())
    if largest >= vocab:
        message = f"config.json has vocab_size {vocab}, but the tokenizer has ids up to {largest}"
        raise BadInput(message, code="bad_tokenizer", fix=fix)


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, OSError) as error:
        raise BadInput(f"{path} is not JSON: {error}") from None
