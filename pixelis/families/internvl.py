"""InternVL3 and 3.5 in transformers' layout (`-HF`): square tiles and a thumbnail, a dense Qwen language model.

A view is resized to whole tiles, so that the pixel budget sets their number. On such a view the model's own
processor (arXiv 2404.16821, section 3.3) chooses the same tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pixelis.errors import BadConfig, BadInput
from pixelis.families.family import CHATML, Chat, Family, Geometry, Marks
from pixelis.families.qwen import head_width, tiny_text, tiny_tower

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from pixelis.families.family import ModelSpec, Views
    from pixelis.families.features import Features

LANGUAGE_MODELS = ("qwen2", "qwen3")
MAX_TILES = 12


@dataclass(frozen=True, kw_only=True)
class InternVL(Family):
    tile: int = 448

    def prepare(self, model: Any) -> None:
        kind = model.config.text_config.model_type
        if kind not in LANGUAGE_MODELS:
            raise BadConfig(
                f"policy.model: an InternVL with a language model of type {kind}",
                fix=f"use one with {' or '.join(LANGUAGE_MODELS)}",
            )

    def chat(self, tokenizer: Any) -> Chat:
        return CHATML._replace(after_image="\n")

    def geometry(self, vision: Mapping[str, Any]) -> Geometry:
        # Published files write squares as pairs
        patch, tile = (
            value if isinstance(value, int) else int(value[0])
            for value in (vision.get("patch_size", self.patch), vision.get("image_size", self.tile))
        )
        return Geometry(self, patch, self.merge, temporal=1, multiple=tile)

    def image_tokens(self, geometry: Geometry, height: int, width: int) -> int:
        rows, columns = self.token_grid(geometry, height, width)
        per_tile = (geometry.multiple // geometry.patch // geometry.merge) ** 2
        tiles = rows * columns // per_tile
        if tiles > MAX_TILES:
            raise BadInput(
                f"a view of {width}x{height} pixels has {tiles} tiles, the model reads at most {MAX_TILES}",
                fix=f"set dialogue's max_pixels to at most {MAX_TILES * geometry.multiple**2}",
            )
        return (tiles + (tiles > 1)) * per_tile

    def encode_views(self, model: Any, spec: ModelSpec, views: Views) -> list[Features]:
        from pixelis.families.features import Features

        tiles = self.pixel_values(spec, views).to(model.device, model.dtype)
        result = model.model.get_image_features(tiles, return_dict=True).pooler_output
        sizes = [spec.image_tokens(*view.shape[:2]) for view in views]
        return [Features(embeds, []) for embeds in result.flatten(0, 1).split(sizes)]

    def pixel_values(self, spec: ModelSpec, views: Views) -> Float[Tensor, "tiles 3 side side"]:
        """The tiles of views row by row, and of a view of several a thumbnail behind them.

        The thumbnail is that of transformers with torchvision, as in vLLM. PIL rounds a few of its pixels otherwise.
        """
        import torch
        from torch.nn.functional import interpolate

        side, tiles = spec.multiple, []
        for view in views:
            pixels = torch.from_numpy(view.copy()).permute(2, 0, 1)
            parts = pixels.unfold(1, side, side).unfold(2, side, side)
            tiles.append(parts.permute(1, 2, 0, 3, 4).reshape(-1, 3, side, side))
            if len(tiles[-1]) > 1:
                tiles.append(interpolate(pixels[None], (side, side), mode="bicubic", antialias=True))
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (spec.image_mean, spec.image_std))
        return (torch.cat(tiles).float() / 255 - mean) / std

    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> dict[str, Any]:
        marks = {
            "start_image_token": self.marks.vision_start,
            "end_image_token": self.marks.vision_end,
            "context_image_token": self.marks.image,
            "video_token": "<video>",
        }
        tokenizer.add_special_tokens({"additional_special_tokens": list(marks.values())})
        tile = self.tile if size["patch"] == self.patch else 8 * size["patch"]
        tokenizer.init_kwargs |= marks  # by these names the model's processor knows them
        text = tiny_text(tokenizer, size) | {"model_type": "qwen3", "head_dim": head_width(size)}
        return {
            "text_config": text,
            "vision_config": tiny_tower(size) | {"image_size": tile},
            "tie_word_embeddings": False,
            "image_token_id": tokenizer.convert_tokens_to_ids(self.marks.image),
            "image_seq_length": (tile // size["patch"] // self.merge) ** 2,
        }

    def vllm_files(self, spec: ModelSpec, max_pixels: int) -> Mapping[str, Any]:
        side = {"height": spec.multiple, "width": spec.multiple}
        values = {"size": side, "image_mean": list(spec.image_mean), "image_std": list(spec.image_std)}
        images = {"image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": True}
        return {
            "preprocessor_config.json": values | images | {"max_patches": MAX_TILES},
            "video_preprocessor_config.json": values | {"video_processor_type": "InternVLVideoProcessor"},
            "processor_config.json": {
                "processor_class": "InternVLProcessor",
                "image_seq_length": spec.image_tokens(spec.multiple, spec.multiple),
            },
        }

    def vllm_image(self, spec: ModelSpec) -> list[int]:
        return [spec.image_token]


FAMILY = InternVL(
    architecture="InternVLForConditionalGeneration",
    key_mapping={
        r"^language_model\.model\.": "model.language_model.",
        r"^language_model\.lm_head\.": "lm_head.",
        r"^vision_tower\.": "model.vision_tower.",
        r"^multi_modal_projector\.": "model.multi_modal_projector.",
    },
    vocab=151936,
    image_mean=(0.485, 0.456, 0.406),
    image_std=(0.229, 0.224, 0.225),
    image_token=151667,
    video_token=None,
    marks=Marks(vision_start="<img>", vision_end="</img>", image="<IMG_CONTEXT>"),
)
