"""The interface of a model family. The defaults are those that Qwen's models share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pixelis.errors import BadInput
from pixelis.families.quick_imports import quick_imports
from pixelis.files import write_json
from pixelis.records import Coordinates

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float, Int, UInt8
    from torch import Tensor

    from pixelis.families.features import Features

    Ids = Int[np.ndarray, " tokens"]
    Sizes = Sequence[tuple[int, int]]
    Places = tuple[Int[np.ndarray, "3 tokens"], int]
    Views = Sequence[UInt8[np.ndarray, "h w 3"]]
    Tokens = Int[Tensor, "rows length"]
    Positions = Int[Tensor, "axes rows length"]
    Hidden = Float[Tensor, "rows length hidden"]

HALF = (0.5, 0.5, 0.5)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
ROLES = ("system", "user", "assistant")


class Chat(NamedTuple):
    """The chat format: `prefix`, then each turn's opener, content and closer, by role.

    openers: beside those of the roles, if they differ, `image`: the user's before an image, and `policy`: the
    assistant's before the policy's own turns; stop: the token that ends the policy's turns, with which the
    assistant's closer begins; after_image: text between an image and what follows.
    """

    openers: Mapping[str, str]
    closers: Mapping[str, str]
    stop: str
    prefix: str = ""
    after_image: str = ""

    @classmethod
    def bracketed(cls, start: str, end: str, prefix: str = "", assistant: str = "assistant") -> Chat:
        """A turn is `start`, its role, a line break, its content, `end` and a line break.

        assistant: that role's name in the format.
        """
        names = {role: role for role in ROLES} | {"assistant": assistant}
        openers = {role: f"{start}{name}\n" for role, name in names.items()}
        return cls(openers, dict.fromkeys(ROLES, f"{end}\n"), end, prefix)


CHATML = Chat.bracketed("<|im_start|>", "<|im_end|>")


class Marks(NamedTuple):
    """Special tokens beside those of the chat format."""

    pad: str = "<|endoftext|>"
    vision_start: str = "<|vision_start|>"
    vision_end: str = "<|vision_end|>"
    image: str = "<|image_pad|>"
    video: str = "<|video_pad|>"


QWEN_MARKS = Marks()


@dataclass(frozen=True, kw_only=True)
class Family:
    """What distinguishes the models of a family. Facts that a model's own files state take precedence.

    `patch`, `merge`, `temporal`: pixels of a patch's side, patches of an image token's side, frames of a patch.
    """

    architecture: str = ""
    """Class of transformers."""
    vocab: int
    patch: int = 14
    merge: int = 2
    temporal: int = 2
    coordinates: Coordinates = "thousand"
    image_mean: tuple[float, ...] = HALF
    image_std: tuple[float, ...] = HALF
    image_token: int = 151655
    video_token: int | None = 151656
    """None: that of images."""
    marks: Marks = QWEN_MARKS
    reads_images: bool = True
    """False for models of text alone: questions with pictures are refused."""
    note: str = ""
    """What models of the family do that a user should know."""
    stacked: Mapping[str, int] = field(default_factory=dict)
    """Stacked experts below `mlp.` -> dimension of the hidden size in transformers' layout."""
    published_transposed: bool = False
    """Whether the published files, as vLLM reads them, hold stacked experts the other way round."""
    key_mapping: Mapping[str, str] = field(default_factory=dict)
    """Patterns of names in checkpoints -> names in the model."""

    def of_folder(self, folder: Path) -> Family:
        """The family with what it needs of a model's folder."""
        return self

    def model_class(self) -> Any:
        """`architecture`, or a class of ours with its interface."""
        import transformers

        with quick_imports():
            return getattr(transformers, self.architecture)

    def prepare(self, model: Any) -> None:
        """Adjust a loaded model, without changing what it computes."""

    def language(self, model: Any) -> Any:
        """The language model in a model."""
        return model.model.language_model

    def geometry(self, vision: Mapping[str, Any]) -> Geometry:
        """How views are divided. vision: `vision_config` of config.json, empty for a text model."""
        patch, merge = vision.get("patch_size", self.patch), vision.get("spatial_merge_size", self.merge)
        temporal = vision.get("temporal_patch_size", self.temporal)
        return Geometry(self, patch, merge, temporal, multiple=patch * merge)

    def chat(self, tokenizer: Any) -> Chat:
        """The chat format of a model."""
        return CHATML

    def token_grid(self, geometry: Geometry, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of a view's image tokens, without those of a thumbnail. BadInput as `Geometry.grid`."""
        _, rows, columns = geometry.grid(height, width)
        return rows // geometry.merge, columns // geometry.merge

    def image_tokens(self, geometry: Geometry, height: int, width: int) -> int:
        """Image tokens of a view of this size in pixels. Raises BadInput for a size that views cannot have."""
        rows, columns = self.token_grid(geometry, height, width)
        return rows * columns

    def image_ids(self, spec: ModelSpec, height: int, width: int) -> list[int]:
        """The tokens that stand for a view in a turn; features replace its image tokens."""
        return [spec.vision_start, *[spec.image_token] * spec.image_tokens(height, width), spec.vision_end]

    def positions(self, spec: ModelSpec, tokens: Ids, sizes: Sizes, start: int = 0) -> Places:
        """Positions of a sample or its next piece on the axes of M-RoPE, and the next free position.

        sizes: height and width in pixels of each view; start: the free position after the previous piece.
        Raises BadInput if image tokens and views disagree. Without M-RoPE all axes are equal.
        """
        import numpy as np

        expected = sum(spec.image_tokens(*size) for size in sizes)
        if (pads := int((tokens == spec.image_token).sum())) != expected:
            raise BadInput(f"{len(sizes)} images need {expected} image tokens, the sample has {pads}")
        return np.broadcast_to(np.arange(start, start + len(tokens)), (3, len(tokens))), start + len(tokens)

    def attend_packed(self, model: Any) -> bool:
        """Prepare a model for the learner's packed rows; returns whether samples can share prompts.

        They cannot with flash attention.
        """
        from pixelis.families.attention import PACKED

        text = self.language(model).config
        if text._attn_implementation == "sdpa":
            text._attn_implementation = PACKED
        return bool(text._attn_implementation == PACKED)

    def attend_cached(self, model: Any) -> None:
        """Prepare a model for the engine, which passes boolean 4-D masks and its own cache."""
        from pixelis.families.attention import CACHED

        self.language(model).config._attn_implementation = CACHED

    def parameter_name(self, name: str) -> str:
        """The name of a parameter in transformers from that in a checkpoint, by `key_mapping`."""
        for pattern, own in self.key_mapping.items():
            name = re.sub(pattern, own, name)
        return name

    def encode_views(self, model: Any, spec: ModelSpec, views: Views) -> list[Features]:
        """Features of each view, in order, by one pass of the vision tower.

        ZeRO-3 needs equally many passes on all workers, and a GPU takes as long for a small view alone as for many.
        """
        raise NotImplementedError

    def embed(self, model: Any, spec: ModelSpec, tokens: Tokens, features: Features | None) -> Hidden:
        """Embeddings of tokens, those of image tokens replaced by `features`."""
        embeds: Tensor = self.language(model).get_input_embeddings()(tokens)
        if features is None:
            return embeds
        is_image = (tokens == spec.image_token).unsqueeze(-1)
        return embeds.masked_scatter(is_image, features.embeds.to(embeds.dtype))

    def hidden_states(
        self,
        model: Any,
        spec: ModelSpec,
        tokens: Tokens,
        positions: Positions,
        features: Features | None,
        **attention: Any,
    ) -> Hidden:
        """Hidden states of the last layer.

        positions: 3 M-RoPE axes, optionally preceded by text positions; features: of all image tokens, in
        row-major order; attention: `segments` of a packed row, or the engine's mask and cache.
        """
        language_model = self.language(model)
        # Flash attention derives the samples from the restarting positions and takes no such argument
        if "flash" in language_model.config._attn_implementation:
            attention.pop("segments", None)
        inputs = {"position_ids": positions[-1], **attention}
        embeds = self.embed(model, spec, tokens, features)
        states: Tensor = language_model(inputs_embeds=embeds, **inputs).last_hidden_state
        return states

    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> dict[str, Any]:
        """The configuration of a small model (sizes: `pixelis.nano.architecture.SIZES`)."""
        raise BadInput(f"{type(self).__name__} has no small model", fix="use a family of docs/models.md")

    def vllm_files(self, spec: ModelSpec, max_pixels: int) -> Mapping[str, Any] | None:
        """Name -> content of the settings of an image processor that leaves views as they are, for vLLM.

        Views have at most `max_pixels` pixels. None for a family whose log-probabilities in vLLM no test compares
        with the learner's.
        """
        return None

    def vllm_image(self, spec: ModelSpec) -> list[int]:
        """The tokens for a view in a prompt for vLLM, which expands them to `image_ids`."""
        return [spec.vision_start, spec.image_token, spec.vision_end]

    def save_processor(self, spec: ModelSpec, folder: Path, max_pixels: int) -> None:
        """Write the settings of an image processor, as `vllm_files`, to the folder of a small model."""
        for name, settings in (self.vllm_files(spec, max_pixels) or {}).items():
            write_json(folder / name, settings)


@dataclass(frozen=True)
class Geometry:
    """How a model divides views, whose sides are multiples of `multiple` pixels; the rest as in `Family`."""

    family: Family
    patch: int
    merge: int
    temporal: int
    multiple: int

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Patch grid of a view: frames, rows, columns."""
        if height < 1 or width < 1 or height % self.multiple or width % self.multiple:
            raise BadInput(
                f"a view of {width}x{height} pixels: the sides must be multiples of {self.multiple}",
                fix="resize it with fit()",
            )
        return 1, height // self.patch, width // self.patch

    def image_tokens(self, height: int, width: int) -> int:
        """Image tokens of a view of this size in pixels."""
        return self.family.image_tokens(self, height, width)


@dataclass(frozen=True)
class ModelSpec(Geometry):
    """Facts about one model folder. Token fields are ids; ``vocab`` is the width of the logits.

    ``banned`` ids must never be sampled: special tokens except ``stop``, and logits without a token.
    """

    family_name: str
    """`model_type` of config.json, or the reference of policy.family."""
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    image_token: int
    video_token: int
    vision_start: int
    vision_end: int
    chat: Chat
    stop: int
    pad: int
    coordinates: Coordinates
    vocab: int
    banned: tuple[int, ...] = ()
    embedded: bool = False

    @property
    def reads_images(self) -> bool:
        """False for a model of text alone."""
        return self.family.reads_images
