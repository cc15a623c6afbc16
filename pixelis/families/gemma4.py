"""Gemma 4 (E2B, E4B, 26B-A4B, 31B): variable numbers of image tokens, sliding windows, shared keys and values.

Views are not resized to a fixed number of tokens as by the model's own processor, which accepts any number.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pixelis.errors import BadConfig
from pixelis.families.family import Chat, Family, Geometry, Marks
from pixelis.families.qwen import head_width, tiny_text, tiny_tower
from pixelis.files import write_json

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from pixelis.families.family import Hidden, ModelSpec, Positions, Tokens, Views
    from pixelis.families.features import Features

NO_THOUGHT = "<|channel>thought\n<channel|>"
"""With thinking off, the larger models' chat template begins the reply with an empty thought."""


class Gemma4(Family):
    def prepare(self, model: Any) -> None:
        from pixelis.families.capped_head import cap_head

        cap_head(model)
        # Nothing here hears
        model.model.audio_tower = model.model.embed_audio = None

    def geometry(self, vision: Mapping[str, Any]) -> Geometry:
        patch, merge = vision.get("patch_size", self.patch), vision.get("pooling_kernel_size", self.merge)
        return Geometry(self, patch, merge, temporal=1, multiple=patch * merge)

    def chat(self, tokenizer: Any) -> Chat:
        chat = Chat.bracketed("<|turn>", "<turn|>", prefix="<bos>", assistant="model")
        if NO_THOUGHT.replace("\n", r"\n") in (tokenizer.chat_template or ""):
            openers = dict(chat.openers)
            openers["assistant"] += NO_THOUGHT
            chat = chat._replace(openers=openers)
        return chat

    def attend_packed(self, model: Any) -> bool:
        if not super().attend_packed(model):
            raise BadConfig("Gemma 4 has attention heads 512 wide", fix="set policy.attention=sdpa")
        return True

    def encode_views(self, model: Any, spec: ModelSpec, views: Views) -> list[Features]:
        from pixelis.families.features import Features

        pixels, places = (values.to(model.device) for values in self.patches(spec, views))
        result = model.model.get_image_features(pixels, places, return_dict=True).pooler_output
        return [Features(embeds, []) for embeds in result]

    def patches(
        self, spec: ModelSpec, views: Views
    ) -> tuple[Float[Tensor, "views patches values"], Int[Tensor, "views patches 2"]]:
        """Patches row by row, of 0 to 1, and their columns and rows; padded to the largest view with 0 and -1."""
        import numpy as np
        import torch
        from torch.nn.utils.rnn import pad_sequence

        side, pixels, places = spec.patch, [], []
        for view in views:
            _, rows, columns = spec.grid(*view.shape[:2])
            parts = view.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(rows * columns, -1)
            pixels.append(torch.from_numpy(parts).float() / 255)
            grid = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1)
            places.append(torch.from_numpy(grid.reshape(-1, 2)))
        return pad_sequence(pixels, True), pad_sequence(places, True, padding_value=-1)

    def hidden_states(
        self,
        model: Any,
        spec: ModelSpec,
        tokens: Tokens,
        positions: Positions,
        features: Features | None,
        **attention: Any,
    ) -> Hidden:
        language_model = self.language(model)
        text, is_image = language_model.config, tokens == spec.image_token
        images = _numbered(is_image) if text.use_bidirectional_attention == "vision" else None
        if (segments := attention.get("segments")) is not None:
            masks = [_window(text.sliding_window, bucket, images) for bucket in segments.buckets]
            attention |= {
                "window_masks": masks,
                "attention_mask": {"full_attention": None, "sliding_attention": None},
            }
        else:
            full = attention["attention_mask"]
            sliding = _cached_window(text.sliding_window, full, attention["past_key_values"], images)
            attention["attention_mask"] = {"full_attention": full, "sliding_attention": sliding}
        if text.hidden_size_per_layer_input:
            plain = tokens.masked_fill(is_image, text.pad_token_id)
            attention["per_layer_inputs"] = language_model.get_per_layer_inputs(plain, None)
        return super().hidden_states(model, spec, tokens, positions, features, **attention)

    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> dict[str, Any]:
        """Structured as E2B: the upper half of the layers shares keys and values of the lower."""
        marks = ["<bos>", "<|turn>", "<turn|>", *self.marks[1:]]
        tokenizer.add_special_tokens({"additional_special_tokens": marks})
        ids = tokenizer.convert_tokens_to_ids
        text = tiny_text(tokenizer, size)
        text |= {
            "eos_token_id": ids("<turn|>"),
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": None,
            "num_hidden_layers": 2 * size["layers"],
            "layer_types": ["sliding_attention", "full_attention"] * size["layers"],
            "num_kv_shared_layers": size["layers"],
            "sliding_window": 16,
            "head_dim": head_width(size),
            "global_head_dim": 2 * head_width(size),
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": text["vocab_size"],
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        }
        vision = tiny_tower(size) | {
            "num_key_value_heads": size["vision_heads"],
            "head_dim": size["vision_hidden"] // size["vision_heads"],
            "position_embedding_size": 256,
            "use_clipped_linears": True,
        }
        return {
            "text_config": text,
            "vision_config": vision,
            "image_token_id": ids(self.marks.image),
            "video_token_id": ids(self.marks.video),
        }

    def save_processor(self, spec: ModelSpec, folder: Path, max_pixels: int) -> None:
        settings = {"patch_size": spec.patch, "pooling_kernel_size": spec.merge}
        kind = {"image_processor_type": "Gemma4ImageProcessor"}
        write_json(folder / "preprocessor_config.json", settings | kind)


def _numbered(is_image: Bool[Tensor, "rows length"]) -> Int[Tensor, "rows length"]:
    """The number of the image of each token in its row; -1 for text, which separates images."""
    # No row begins with an image token
    starts = is_image & ~is_image.roll(1, dims=1)
    return starts.cumsum(1).masked_fill(~is_image, 0) - 1


def _same_image(images: Int[Tensor, "rows length"]) -> Bool[Tensor, "rows 1 length length"]:
    rows = images[:, None, :, None]
    return (rows == images[:, None, None, :]) & (rows >= 0)


def _window(
    window: int, bucket: Int[Tensor, "samples length"], images: Int[Tensor, "1 row"] | None
) -> Bool[Tensor, "samples 1 length length"] | None:
    """Mask of a bucket's layers with a sliding window. None: causal.

    A token sees the last `window` tokens, and with `images` all of its own image.
    """
    import torch

    from pixelis.families.attention import within_window

    length = bucket.shape[1]
    if length <= window and images is None:
        return None
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=bucket.device).tril()
    if images is not None:
        mask = mask | _same_image(images[0][bucket])
    return within_window(mask, torch.ones_like(bucket[:1]), window)


def _cached_window(
    window: int,
    mask: Bool[Tensor, "rows 1 new columns"],
    cache: Any,
    images: Int[Tensor, "rows new"] | None,
) -> Bool[Tensor, "rows 1 new columns"]:
    """As `_window`, of new tokens at the end of a cache, whose rows have gaps where others were longer."""
    from pixelis.families.attention import within_window

    if images is not None and (new := mask.shape[2]) > 1:
        mask = mask.clone()
        mask[..., -new:] |= _same_image(images)
    return within_window(mask, cache.valid, window)


FAMILY = Gemma4(
    architecture="Gemma4ForConditionalGeneration",
    vocab=262144,
    patch=16,
    merge=3,
    image_token=258880,
    video_token=258884,
    marks=Marks("<pad>", "<|image>", "<image|>", "<|image|>", "<|video|>"),
)
