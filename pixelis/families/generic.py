"""Any vision-language model of transformers, with its own processor, chat template and forward pass.

Samples are padded at the right instead of packed, and do not share prompts: right, but slower than a family
with a file of its own. Every view is one sample of the processor, as in a prompt with a single image.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pixelis.errors import BadConfig, BadInput, MissingDependency, MissingFile, install_extra
from pixelis.families.family import Chat, Family, Geometry, Marks, ModelSpec

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor

    from pixelis.families.family import Hidden, Positions, Tokens, Views
    from pixelis.families.features import Features

CACHED_LAYERS = {"full_attention", "sliding_attention"}
"""Layers whose cache is keys and values."""
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
EXPANSIONS = 4096
"""Sizes of views whose tokens are kept."""
OWN_FAMILY = "write a family of your own (docs/families.md)"
Turns = Sequence[tuple[str, ...]]
"""Role and parts of the content of each turn."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Generic(Family):
    """Facts of a model are read by `of_folder`. folder: the model's."""

    folder: str = field(default="", compare=False)

    def of_folder(self, folder: Path) -> Generic:
        path = os.fspath(folder.resolve())
        config, processor = _config(path), _processor(path)
        tokenizer = processor.tokenizer
        image = getattr(config, "image_token_id", None) or processor.image_token_id
        video = getattr(config, "video_token_id", None) or image
        image_mark, video_mark = tokenizer.convert_ids_to_tokens([image, video])
        patch = getattr(getattr(config, "vision_config", None), "patch_size", None)
        return replace(
            self,
            folder=path,
            vocab=config.get_text_config().vocab_size,
            patch=patch if isinstance(patch, int) else self.patch,
            # Idefics' and LFM2's name
            merge=int(getattr(config, "scale_factor", getattr(config, "downsample_factor", 1))),
            image_token=image,
            video_token=video,
            marks=Marks(tokenizer.pad_token, image_mark, image_mark, image_mark, video_mark),
        )

    def model_class(self) -> Any:
        from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(_config(self.folder))]

    def prepare(self, model: Any) -> None:
        """Log the note, and check the forward pass."""
        log.warning("models of type %s %s", model.config.model_type, self.note)
        # ZeRO-3 gathers the weights only later
        if hasattr(next(model.parameters()), "ds_id"):
            return
        import numpy as np
        import torch

        from pixelis.families import GENERIC
        from pixelis.families.attention import Segments
        from pixelis.families.features import concatenate
        from pixelis.families.spec import load_spec

        spec = load_spec(self.folder, family=GENERIC)
        view = np.random.default_rng(0).integers(0, 256, (96, 160, 3), dtype=np.uint8)
        inputs = _process(self.folder, [view], "Describe it.").to(model.device, model.dtype)
        tokens = inputs["input_ids"]
        row = torch.arange(tokens.shape[1], device=model.device)
        try:
            with torch.no_grad():
                expected = model(**inputs).logits.float()
                features = concatenate(self.encode_views(model, spec, [view]))
                states = self.hidden_states(
                    model,
                    spec,
                    tokens,
                    row[None, None],
                    features,
                    segments=Segments([row[None]], row, [], row),
                )
                error = (model.lm_head(states).float() - expected).norm() / expected.norm()
        except (AttributeError, TypeError) as cause:
            message = f"models of type {model.config.model_type} have other parts than most: {cause}"
            raise BadConfig(message, fix=OWN_FAMILY) from cause
        if not error < torch.finfo(model.dtype).eps ** 0.5:
            raise BadConfig(
                f"models of type {model.config.model_type} compute more than embeddings, decoder and LM head: "
                f"without it their logits are off by {float(error):.1%}",
                fix=OWN_FAMILY,
            )

    def language(self, model: Any) -> Any:
        return model.get_decoder()

    def geometry(self, vision: Mapping[str, Any]) -> Geometry:
        return Geometry(self, self.patch, self.merge, temporal=1, multiple=1)

    def chat(self, tokenizer: Any) -> Chat:
        tokenizer.chat_template = tokenizer.chat_template or _processor(self.folder).chat_template
        if tokenizer.chat_template is None:
            raise MissingFile(
                f"no chat template in {self.folder}", fix="copy chat_template.jinja of the model there"
            )
        chat = cut_template(tokenizer)
        whole, *parts = (
            tokenizer.encode(text, add_special_tokens=False) for text in (f"{chat.stop}Two", chat.stop, "Two")
        )
        if whole != [*itertools.chain(*parts)]:
            raise BadInput(
                "the tokenizer adds a space before each text, so that turns would differ from the chat template's",
                code="bad_tokenizer",
                fix=OWN_FAMILY,
            )
        placeholder, after_image = _placeholder(self.folder)
        before_image, before_text = (
            _render(tokenizer, [("user", *parts)]).partition(parts[0] or placeholder)[0]
            for parts in (("", "@"), ("@",))
        )
        # SmolVLM's differs by a space
        opener = before_image.removeprefix(before_text.removesuffix(chat.openers["user"]))
        return chat._replace(openers={**chat.openers, "image": opener}, after_image=after_image)

    def token_grid(self, geometry: Geometry, height: int, width: int) -> tuple[int, int]:
        return 1, self.image_tokens(geometry, height, width)

    def image_tokens(self, geometry: Geometry, height: int, width: int) -> int:
        return _expansion(self.folder, height, width).count(self.image_token)

    def image_ids(self, spec: ModelSpec, height: int, width: int) -> list[int]:
        return list(_expansion(self.folder, height, width))

    def attend_packed(self, model: Any) -> bool:
        return False

    def attend_cached(self, model: Any) -> None:
        language = self.language(model)
        if others := sorted(set(_layer_types(language.config)) - CACHED_LAYERS):
            raise BadConfig(
                f"engine.name=hf keeps keys and values, but a model of type {model.config.model_type} has layers "
                f"of type {', '.join(others)}",
                fix=OWN_FAMILY,
            )
        language.set_attn_implementation("sdpa")

    def parameter_name(self, name: str) -> str:
        from transformers.core_model_loading import rename_source_key

        renamings, prefix, parameters = _renamings(self.folder, self.model_class())
        return rename_source_key(name, renamings, [], prefix, parameters)[0]

    def encode_views(self, model: Any, spec: ModelSpec, views: Views) -> list[Features]:
        """All in one pass: processors pad views of few tiles, and models drop the padding."""
        import torch

        from pixelis.families.features import Features

        accepted = inspect.signature(model.model.get_image_features).parameters
        inputs = _process(self.folder, views).to(model.device, model.dtype)
        parts = {name: value for name, value in inputs.items() if name in accepted}
        result = model.model.get_image_features(**parts, return_dict=True).pooler_output
        rows = result if isinstance(result, torch.Tensor) else torch.cat(tuple(result))
        rows = rows.reshape(-1, rows.shape[-1])
        sizes = [self.image_tokens(spec, *view.shape[:2]) for view in views]
        if len(rows) != sum(sizes):
            raise BadInput(f"{len(rows)} features for {sum(sizes)} image tokens", fix=OWN_FAMILY)
        return [Features(part, []) for part in rows.split(sizes)]

    def hidden_states(
        self,
        model: Any,
        spec: ModelSpec,
        tokens: Tokens,
        positions: Positions,
        features: Features | None,
        **attention: Any,
    ) -> Hidden:
        """In a packed row the last token of a shorter sample is repeated behind it, where causal layers do not see it."""
        import torch

        language = self.language(model)
        if "sequence" in attention:
            raise BadConfig(
                "learner.sequence_parallel needs a model family of its own",
                fix="set it to 1, or " + OWN_FAMILY,
            )
        if (segments := attention.get("segments")) is not None:
            parts, embeds = [], self.embed(model, spec, tokens, features)
            for bucket in segments.buckets:
                places = torch.arange(bucket.shape[1], device=bucket.device)[None]
                output = language(inputs_embeds=embeds[0][bucket], position_ids=places, use_cache=False)
                parts.append(output.last_hidden_state.flatten(0, 1))
            return torch.cat(parts)[segments.inverse][None]
        masks = _masks(language.config, attention["attention_mask"], attention["past_key_values"].valid)
        inputs = attention | {"attention_mask": masks, "position_ids": positions[-1]}
        return super().hidden_states(model, spec, tokens, positions, features, **inputs)

    def vllm_files(self, spec: ModelSpec, max_pixels: int) -> Mapping[str, Any]:
        """The model's own: vLLM processes views as the learner does, and compares each prompt with its tokens."""
        paths = (Path(self.folder, name) for name in PROCESSOR_FILES)
        return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()}

    def vllm_image(self, spec: ModelSpec) -> list[int]:
        tokenizer, text = _processor(self.folder).tokenizer, _placeholder(self.folder)[0]
        return list(tokenizer.encode(text, add_special_tokens=False))


FAMILY = Generic(
    vocab=0, note="run as generic: samples are padded instead of packed, and do not share prompts"
)


def cut_template(tokenizer: Any) -> Chat:
    """The chat format of a tokenizer's template.

    Raises BadInput for a template that does not write a conversation as turns between marks.
    """
    _, first, reply, second = turns = [
        (role, f"@{role}{place}@") for place, role in enumerate(("system", "user", "assistant", "user"))
    ]
    before, user_end = _gaps(tokenizer, [first])
    user_end, opener = _divide(_gaps(tokenizer, [first], True)[1], user_end)
    # The final turn may lack the line break behind it
    last, between = _gaps(tokenizer, [first, reply])[2], _gaps(tokenizer, [first, reply, second])[2]
    end, user = _divide(between, _common(last, between))
    gaps = _gaps(tokenizer, turns, True)
    start, system_end, earlier = gaps[:3]
    # The template may write a system turn by itself
    head, bos = before.removesuffix(user), tokenizer.bos_token or ""
    prefix = head if start.startswith(head) else bos if start.startswith(bos) else ""
    openers = {
        "system": start.removeprefix(prefix),
        "user": user,
        "assistant": earlier.removeprefix(user_end),
    }
    closers = {"system": system_end.removesuffix(user), "user": user_end, "assistant": end}
    stops = [token for token in tokenizer.get_added_vocab() if end.startswith(token)]
    ends, starts = ([marks[role] for role, _ in turns] for marks in (closers, openers))
    is_divided = gaps == [end + start for end, start in zip([prefix, *ends], [*starts, opener], strict=True)]
    is_alike = before.endswith(user) and openers["assistant"].split() == opener.split()
    if not (stops and is_divided and is_alike):
        raise BadInput(
            "the chat template does not write a conversation as turns of system, user and assistant, the last "
            "closed by a special token",
            code="bad_template",
            fix=OWN_FAMILY,
        )
    return Chat(openers | {"policy": opener}, closers, max(stops, key=len), prefix)


def _gaps(tokenizer: Any, turns: Turns, assistant_next: bool = False) -> list[str]:
    """What the chat template writes before, between and behind the texts of turns."""
    gaps, rest = list[str](), _render(tokenizer, turns, assistant_next)
    for _, said in turns:
        gap, _, rest = rest.partition(said)
        gaps.append(gap)
    return [*gaps, rest]


def _divide(marks: str, closer: str) -> tuple[str, str]:
    """The closer and opener between two turns; white space between them belongs to the closer."""
    opener = marks.removeprefix(closer).lstrip()
    return marks.removesuffix(opener), opener


def _common(one: str, other: str) -> str:
    """The longest common beginning of two texts."""
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(character for character, _ in equal)


def _render(tokenizer: Any, turns: Turns, assistant_next: bool = False) -> str:
    """A conversation by the chat template. An empty text stands for an image."""
    import jinja2

    messages = [
        {
            "role": role,
            "content": [{"type": "text", "text": part} if part else {"type": "image"} for part in parts],
        }
        for role, *parts in turns
    ]
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=assistant_next)
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise BadInput(f"the chat template fails: {error}", code="bad_template", fix=OWN_FAMILY) from None


@functools.cache
def _placeholder(folder: str) -> tuple[str, str]:
    """What the chat template writes for an image between two texts, and white space behind it."""
    tokenizer = _processor(folder).tokenizer
    plain, shown = (_render(tokenizer, [("user", "@1@", *image, "@2@")]) for image in ((), ("",)))
    start = len(_common(plain, shown))
    written = shown[start : start + len(shown) - len(plain)]
    return written.rstrip(), written[len(written.rstrip()) :]


@functools.cache
def _config(folder: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except ValueError as error:
        raise BadConfig(f"transformers has no model for {folder}: {error}", fix=OWN_FAMILY) from error


@functools.cache
def _processor(folder: str) -> Any:
    """The model's processor, with its image processor and tokenizer: frames of clips are images.

    Video processors would need torchvision. Raises MissingDependency, MissingFile.
    """
    import transformers

    from pixelis.families.spec import load_tokenizer

    tokenizer = load_tokenizer(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    names = (
        json.loads(path.read_text(encoding="utf-8")).get("processor_class")
        for file in (*PROCESSOR_FILES, "tokenizer_config.json")
        if (path := Path(folder, file)).is_file()
    )
    try:
        image_processor = transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        kind = getattr(transformers, next(filter(None, names), ""), None)
        kind = kind or transformers.PROCESSOR_MAPPING[type(_config(folder))]
        settings, _ = kind.get_processor_dict(folder, local_files_only=True)
        parts = {"image_processor": image_processor, "tokenizer": tokenizer}
        without_video: Any = type(
            kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None}
        )
        processor = without_video.from_args_and_dict(
            [parts.get(name) for name in kind.get_attributes()], settings
        )
    except ImportError as error:
        raise MissingDependency(
            f"the processor of {folder} needs a package: {str(error).strip()}",
            fix=f"{install_extra('generic')}, or torchvision in the same build (CPU or CUDA) as torch",
        ) from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise MissingFile(
            f"no complete processor in {folder}: {error}",
            fix="copy preprocessor_config.json and processor_config.json there",
        ) from error
    tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    return processor


def _process(folder: str, views: Views, text: str = "") -> Any:
    """The model's inputs for a batch with one view and a text behind it in each sample."""
    from PIL import Image

    return _processor(folder)(
        images=[[Image.fromarray(view)] for view in views],
        text=[_placeholder(folder)[0] + text] * len(views),
        add_special_tokens=False,
        padding=True,
        return_tensors="pt",
    )


@functools.lru_cache(EXPANSIONS)
def _expansion(folder: str, height: int, width: int) -> tuple[int, ...]:
    """Tokens of a view, which depend on its size alone."""
    import numpy as np

    return tuple(_process(folder, [np.zeros((height, width, 3), np.uint8)])["input_ids"][0].tolist())


@functools.cache
def _renamings(folder: str, kind: Any) -> tuple[Any, ...]:
    """What `rename_source_key` of transformers needs to rename a checkpoint's parameters."""
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    with torch.device("meta"):
        model = kind._from_config(_config(folder))
    renamings = [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)]
    return renamings, model.base_model_prefix, model.state_dict()


def _layer_types(config: Any) -> Sequence[str]:
    sliding = getattr(config, "sliding_window", None) is not None
    default = "sliding_attention" if sliding else "full_attention"
    return getattr(config, "layer_types", None) or [default]


def _masks(
    config: Any, mask: Bool[Tensor, "rows 1 new columns"], valid: Bool[Tensor, "rows columns"]
) -> Tensor | Mapping[str, Tensor]:
    """The engine's mask, for models with sliding windows one for each type of layer. valid: columns with a token."""
    from pixelis.families.attention import within_window

    if "sliding_attention" not in _layer_types(config):
        return mask
    near = within_window(mask, valid, config.sliding_window)
    masks = {"full_attention": mask, "sliding_attention": near}
    return masks if getattr(config, "layer_types", None) else near
