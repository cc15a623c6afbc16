"""What vLLM is given: the model folder, arguments for adapters, tokens of prompts.

vLLM reads the model from a folder of links with our image processor settings, so that views of `fit` are not
resized again.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import filelock
import numpy as np
from jaxtyping import UInt8
from PIL import Image

from pixelis.errors import BadConfig, BadInput
from pixelis.families.family import ModelSpec
from pixelis.families.spec import load_spec, model_config
from pixelis.files import locked
from pixelis.operations.pixel_budget import PixelBudget, fitted_size
from pixelis.policy.adapters import is_vision
from pixelis.policy.architecture import Architecture
from pixelis.policy.model_path import resolve
from pixelis.policy.ranks import MAX_LORAS, largest_rank, layer_type, served_rank

if TYPE_CHECKING:
    from pixelis.config import DialogueConfig, EngineConfig, PolicyConfig

PREFIX = "pixelis-vllm-"
LARGEST_SIDE = 10**5
OWNER = "PIXELIS_VLLM_OWNER"
"""Environment variable of vLLM's processes with the id of the process that started them."""
_PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
log = logging.getLogger(__name__)


class Scratch:
    """A folder in shared memory, or else in the temporary folder, for the lifetime of this process.

    It holds a lock beside the folder. Folders of killed processes, whose locks are free, are removed here.
    """

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        parent = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
        for lock in parent.glob(f"{PREFIX}*.lock"):
            # OSError: another user's
            with contextlib.suppress(filelock.Timeout, OSError), locked(lock, wait=False):
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink()
        self.path = parent / f"{PREFIX}{uuid4().hex}"
        self._lock = self.path.with_suffix(".lock")
        self._held = contextlib.ExitStack()
        self._held.enter_context(locked(self._lock))
        self.path.mkdir(mode=0o700)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.unlink(missing_ok=True)
        self._held.close()


def processor_files(spec: ModelSpec, max_pixels: int) -> Mapping[str, Any]:
    """Settings files of vLLM's image processor for views of at most max_pixels pixels; none for a text model.

    Raises BadConfig for a vision model whose log-probabilities no test compares with the learner's.
    """
    if not spec.reads_images:
        return {}
    if (files := spec.family.vllm_files(spec, max_pixels)) is None:
        message = f"the engine vllm is not certified for models of type {spec.family_name}"
        raise BadConfig(message, fix="set engine.name=hf")
    return files


QUANT_METHODS = {"int8": "compressed-tensors", "awq": "awq"}
"""engine.quantization -> ``quant_method`` of the copy's config.json."""


def quantized_copy(folder: Path, settings: EngineConfig, spec: ModelSpec, on_gpu: bool) -> Path:
    """The folder from which vLLM loads weights: engine.model, a quantised copy, or ``folder`` itself.

    Raises BadConfig for a copy of another model or quantisation, and for fp8 without a GPU.
    """
    if settings.quantization == "fp8" and not on_gpu:
        raise BadConfig("engine.quantization=fp8 needs a GPU", fix="unset it, or use awq")
    if settings.model is None:
        return folder
    copy = resolve(settings.model)
    own, original = (model_config(path, spec.family_name) for path in (copy, folder))
    method = (own.get("quantization_config") or {}).get("quant_method")
    if method != QUANT_METHODS[settings.quantization]:
        message = f"engine.model {copy} has the quantisation {method}, not {settings.quantization}"
        raise BadConfig(message, fix="name a copy of that quantisation")
    texts = [raw.get("text_config") or raw for raw in (own, original)]
    sizes = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"
    if (
        own.get("model_type") != original.get("model_type")
        or any(texts[0].get(key) != texts[1].get(key) for key in sizes)
        or load_spec(copy, family=spec.family_name) != spec
    ):
        raise BadConfig(f"engine.model {copy} is no copy of {folder}", fix="quantise policy.model itself")
    return copy


def link_model(folder: Path, target: Path, spec: ModelSpec, max_pixels: int) -> Path:
    """Create a folder of links to the model's files; returns `target`.

    A vision model gets image processor settings from `spec`, with which vLLM does not resize views of at most
    max_pixels pixels whose sides are multiples of `spec.multiple`.
    """
    target.mkdir(parents=True)
    for file in folder.iterdir():
        if file.name not in _PROCESSOR_FILES:
            (target / file.name).symlink_to(file.resolve())
    for name, settings in processor_files(spec, max_pixels).items():
        (target / name).write_text(json.dumps(settings))
    return target


@contextlib.contextmanager
def child_environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for vLLM's child processes; restores the environment, which vLLM modifies too."""
    original = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in set(os.environ) - set(original):
            del os.environ[name]
        for name, value in original.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


def adapter_arguments(policy: PolicyConfig, spec: ModelSpec, model_config: Any) -> dict[str, Any] | None:
    """vLLM's arguments for adapters at runtime; None if its model has none for the vision tower."""
    from vllm.model_executor.model_loader import get_model_cls

    tower, experts = policy.lora.vision_tower, bool(spec.family.stacked)
    model = get_model_cls(model_config)
    served = getattr(model, "supports_tower_connector_lora", False)
    # vLLM's Qwen3-VL-MoE says so, but does not name the fused qkv, which it therefore passes over.
    if tower and (not served or (experts and "qkv" not in model.packed_modules_mapping)):
        log.warning("vLLM's %s has no adapters in the vision tower: it loads merged weights", model.__name__)
        return None
    # Without a list vLLM reserves adapters of all experts too, and of lm_head, with which its process dies when it
    # is to score given tokens. It knows layers of the language model by their last names; in the vision tower others
    # have the same. A shared expert calls its gate so.
    names = {"expert_gate"} if experts else set[str]()
    for layer in Architecture(policy).shapes(policy.lora.targets, tower):
        names.add(model.hf_to_vllm_mapper.map_name(layer) if is_vision(layer) else layer_type(layer))
    return {
        "enable_lora": True,
        "enable_tower_connector_lora": tower,
        "max_lora_rank": served_rank(largest_rank(policy.lora)),
        "max_loras": MAX_LORAS,
        "lora_target_modules": sorted(names),
    }


def picture_probes(spec: ModelSpec, dialogue: DialogueConfig) -> list[UInt8[np.ndarray, "height width 3"]]:
    """Black views of the smallest and the largest size of each budget, to see whether a server resizes them."""
    sizes = set[tuple[int, int]]()
    for settings in (dialogue.input, dialogue.crop, dialogue.frame) if spec.reads_images else ():
        if (budget := PixelBudget.of(settings)).max_pixels >= spec.multiple**2:
            sizes |= {fitted_size(side, side, budget, spec.multiple) for side in (1, LARGEST_SIDE)}
    return [np.zeros((*size, 3), np.uint8) for size in sorted(sizes)]


def png_url(picture: Image.Image) -> str:
    """A picture for a server, without loss."""
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def collapse(tokens: Sequence[int], pieces: Sequence[Sequence[int]], placeholder: Sequence[int]) -> list[int]:
    """Replace each picture's `pieces` of the tokens, which stand in this order, by a placeholder.

    Raises BadInput for tokens without one of the pieces.
    """
    short, start, ids = list[int](), 0, [int(token) for token in tokens]
    for piece in pieces:
        place = start
        try:
            # Only places with the piece's first token are compared: a picture has thousands of tokens
            while ids[(place := ids.index(piece[0], place)) : place + len(piece)] != list(piece):
                place += 1
        except ValueError:
            raise BadInput("the tokens of a picture are not those of the model's family") from None
        short += [*ids[start:place], *placeholder]
        start = place + len(piece)
    return short + ids[start:]
