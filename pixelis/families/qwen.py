"""What the vision-language models of Qwen share, and parts of small configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pixelis.families.family import Family

if TYPE_CHECKING:
    from pixelis.families.family import Hidden, Ids, ModelSpec, Places, Positions, Sizes, Tokens, Views
    from pixelis.families.features import Features

OLDER_NAMES = {
    r"^visual\.": "model.visual.",
    r"^model\.(?!visual\.|language_model\.)": "model.language_model.",
}


@dataclass(frozen=True, kw_only=True)
class QwenVL(Family):
    """A vision tower over patches, whose output is merged to image tokens, and rotary positions on three axes.

    `vllm_processors`: classes of the processor and the video processor.
    """

    key_mapping: Mapping[str, str] = field(default_factory=OLDER_NAMES.copy)
    vllm_processors: tuple[str, str] = ("Qwen3VLProcessor", "Qwen3VLVideoProcessor")

    def prepare(self, model: Any) -> None:
        from pixelis.families.vision import batch_windows

        batch_windows(model)

    def positions(self, spec: ModelSpec, tokens: Ids, sizes: Sizes, start: int = 0) -> Places:
        from pixelis.families.positions import mrope_positions

        grids = [spec.grid(*size) for size in sizes]
        return mrope_positions(tokens, grids, spec.image_token, spec.merge, start)

    def hidden_states(
        self,
        model: Any,
        spec: ModelSpec,
        tokens: Tokens,
        positions: Positions,
        features: Features | None,
        **attention: Any,
    ) -> Hidden:
        if features is not None and features.deepstack:
            attention["visual_pos_masks"] = tokens == spec.image_token
            attention["deepstack_visual_embeds"] = features.deepstack
        attention["position_ids"] = positions
        return super().hidden_states(model, spec, tokens, positions, features, **attention)

    def encode_views(self, model: Any, spec: ModelSpec, views: Views) -> list[Features]:
        from torch import Tensor

        from pixelis.families.features import Features
        from pixelis.families.vision import patchify

        parameter = next(model.model.visual.parameters())
        sizes, colours = (spec.patch, spec.merge, spec.temporal), (spec.image_mean, spec.image_std)
        pixels, grid = patchify(views, *sizes, *colours, parameter.device)
        result = model.model.get_image_features(pixels.to(parameter.dtype), grid, return_dict=True)
        layers = getattr(result, "deepstack_features", None) or []
        # Transformers 5.17 divides only the output of the last layer
        if layers and isinstance(layers[0], Tensor):
            layers = [layer.split([len(output) for output in result.pooler_output]) for layer in layers]
        outputs = enumerate(result.pooler_output)
        return [Features(embeds, [layer[i] for layer in layers]) for i, embeds in outputs]

    def vllm_files(self, spec: ModelSpec, max_pixels: int) -> Mapping[str, Any]:
        processor, video = self.vllm_processors
        settings = {
            "processor_class": processor,
            "patch_size": spec.patch,
            "merge_size": spec.merge,
            "temporal_patch_size": spec.temporal,
            "image_mean": list(spec.image_mean),
            "image_std": list(spec.image_std),
            "size": {"shortest_edge": spec.multiple**2, "longest_edge": max_pixels},
        }
        return {
            "preprocessor_config.json": settings | {"image_processor_type": "Qwen2VLImageProcessor"},
            "video_preprocessor_config.json": settings | {"video_processor_type": video},
        }

    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> dict[str, Any]:
        ids, half = tokenizer.convert_tokens_to_ids, head_width(size) // 2
        text, side = tiny_text(tokenizer, size), half // 3
        text["rope_parameters"]["mrope_section"] = [half - 2 * side, side, side]
        vision = {
            "depth": size["vision_layers"],
            "hidden_size": size["vision_hidden"],
            "intermediate_size": size["vision_feedforward"],
            "num_heads": size["vision_heads"],
            "patch_size": size["patch"],
            "spatial_merge_size": size["merge"],
            "temporal_patch_size": 2,
            "out_hidden_size": size["hidden"],
            "initializer_range": 0.06,
        }
        names = ("image", "video", "vision_start", "vision_end")
        marks = {f"{name}_token_id": ids(getattr(self.marks, name)) for name in names}
        return {"text_config": text, "vision_config": vision, "tie_word_embeddings": False, **marks}


def tiny_text(tokenizer: Any, size: Mapping[str, int]) -> dict[str, Any]:
    """The language model's part of a small configuration."""
    ids = tokenizer.convert_tokens_to_ids
    return {
        "vocab_size": math.ceil(len(tokenizer) / 64) * 64,
        "hidden_size": size["hidden"],
        "intermediate_size": size["feedforward"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"],
        "max_position_embeddings": size["positions"],
        "initializer_range": 0.06,
        "bos_token_id": None,
        "eos_token_id": ids("<|im_end|>"),
        "pad_token_id": ids("<|endoftext|>"),
        # With tied embeddings vLLM's CPU build would keep a stale copy of lm_head after a weight update.
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    }


def tiny_tower(size: Mapping[str, int]) -> dict[str, Any]:
    """The vision tower's part of a small configuration, by the names of models that are not Qwen's."""
    return {
        "hidden_size": size["vision_hidden"],
        "intermediate_size": size["vision_feedforward"],
        "num_hidden_layers": size["vision_layers"],
        "num_attention_heads": size["vision_heads"],
        "patch_size": size["patch"],
        "initializer_range": 0.06,
    }


def head_width(size: Mapping[str, int]) -> int:
    """Width of an attention head, an even number."""
    return size["hidden"] // size["heads"] // 2 * 2
