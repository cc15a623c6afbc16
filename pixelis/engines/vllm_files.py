"""Files for vLLM's processes: the model folder, adapters, and changed weights.

vLLM reads the model from a folder of links with our image processor settings, so that views of `fit` are not
resized again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import filelock

from pixelis.errors import BadConfig
from pixelis.families.family import ModelSpec
from pixelis.families.spec import load_spec, model_config
from pixelis.files import locked
from pixelis.policy.model_path import resolve

if TYPE_CHECKING:
    from pixelis.config import EngineConfig

PREFIX = "pixelis-vllm-"
OWNER = "PIXELIS_VLLM_OWNER"
"""Environment variable of vLLM's processes with the id of the process that started them."""
_PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


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
