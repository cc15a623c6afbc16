"""Code that runs in vLLM's processes: banned tokens, weight updates from files, the end with the owner.

vLLM imports this module by name (logits processor, worker extension).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.utils import get_packed_modules_mapping
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from pixelis.engines.vllm_files import OWNER
from pixelis.policy.export import checkpoint_tensors

TRANSFER = "pixelis_file"
LOADER = "pixelis"
"""Load format of `PublishedLayout`."""
BANNED, UNPUBLISHED = "pixelis_banned", "pixelis_unpublished"
"""Keys of `additional_config` with the banned ids, and with `BaseFile.unpublished`."""


class Extension:
    """A mixin of vLLM's worker. Importing its module registers the engines below and watches the owner."""

    def unserved(self: Any, folder: str) -> list[str]:
        """Adapted layers of a folder in PEFT's format that vLLM would pass over without an error."""
        model, served = self.get_model(), set[str]()
        fused = get_packed_modules_mapping(model)
        modules = list(model.named_modules(remove_duplicate=False))
        # A second owner of a layer may call it without its adapter.
        bypassed = {id(module) for name, module in modules if not name.endswith(".base_layer")}
        for name, module in modules:
            if isinstance(module, BaseLayerWithLoRA) and id(module.base_layer) not in bypassed:
                parent, dot, last = name.rpartition(".")
                served |= {f"{parent}{dot}{part}" for part in fused.get(last, [last])}
        mapper = getattr(model, "hf_to_vllm_mapper", WeightsMapper()).get_rename_mapper()
        layers = json.loads((Path(folder) / "adapter_config.json").read_text())["target_modules"]
        return [layer for layer in layers if mapper.map_name(layer) not in served]


def _end_with_owner() -> None:
    """Kill vLLM's processes when their owner dies: GPU memory they kept would block a new owner."""
    owner, parent = int(os.environ.get(OWNER, 0)), os.getppid()
    if not owner or owner == os.getpid():
        return

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(owner)) as handle:
            select.select([handle], [], [])
        # With several workers the parent is the engine, otherwise the worker is the engine.
        for pid in {parent, os.getpid()} - {owner}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    threading.Thread(target=watch, name="pixelis-owner", daemon=True).start()


class _Ban:
    """Masks the banned ids in every row, whatever its request says."""

    banned: Int64[Tensor, " banned"]

    def mask(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        return logits.index_fill_(1, self.banned.to(logits.device), float("-inf"))


def _banned(vllm_config: Any, device: torch.device) -> Int64[Tensor, " banned"]:
    return torch.tensor(vllm_config.additional_config[BANNED], dtype=torch.int64, device=device)


class Ban(_Ban, LogitsProcessor):
    """The ban for vLLM's first model runner (CPU, and GPUs without Triton)."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self.banned = _banned(vllm_config, device)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Does nothing: the ban does not depend on the batch."""

    def apply(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        return self.mask(logits)


class BanV2(_Ban, LogitsProcessorV2):
    """The ban for vLLM's second model runner."""

    def __init__(self, vllm_config: Any, req_states: Any):
        self.banned = _banned(vllm_config, req_states.device)

    def apply(self, logits: Float[Tensor, "rows vocab"], ctx: Any) -> Float[Tensor, "rows vocab"]:
        return self.mask(logits)


@dataclass
class FileInit(WeightTransferInitInfo):
    """No initialisation data."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """base: the model's folder. changes: a safetensors file with the changed tensors, or None."""

    base: str
    changes: str | None = None


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):
    """vLLM's weight transfer through files in a shared folder, for CPU and GPU.

    Passes all tensors, because vLLM fuses layers (q, k and v) and rebuilds a layer only from all its parts.
    """

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """No connection is needed."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        changes = dict(checkpoint_tensors(update_info.changes)) if update_info.changes else {}
        tensors = checkpoint_tensors(update_info.base)
        self.model.load_weights(_as_published((name, changes.get(name, tensor)) for name, tensor in tensors))

    def finish_weight_update(self) -> None:
        """End the reload. A tied output layer is packed again: on CPU it is a copy."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            for name, module in self.model.named_modules():
                if name.rsplit(".", 1)[-1] == "lm_head":
                    module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Does nothing: there are no resources to release."""


@register_model_loader(LOADER)
class PublishedLayout(DefaultModelLoader):
    """vLLM's loader, for experts that transformers stacked: vLLM reads only the layout of the published files."""

    def __init__(self, load_config: Any):
        super().__init__(replace(load_config, load_format="safetensors"))

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        yield from _as_published(super().get_all_weights(model_config, model))


def _as_published(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    unpublished = set(get_current_vllm_config().additional_config[UNPUBLISHED])
    for name, tensor in tensors:
        yield name, tensor.transpose(1, 2) if name in unpublished else tensor


WeightTransferEngineFactory.register_engine(TRANSFER, FileTransfer)
_end_with_owner()
