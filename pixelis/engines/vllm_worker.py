"""What runs inside vLLM's own processes: the ban on tokens that must never be sampled, and taking up new weights from a file.

vLLM imports this module by name (logits processor, worker extension); nothing of ours but `vllm_files` is needed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from pixelis.engines.vllm_files import checkpoint_tensors

TRANSFER = "pixelis_file"
BANNED = "pixelis_banned"
"""Key of `additional_config` with the ids that may never be sampled."""


class Extension:
    """Mixed into vLLM's worker: nothing in itself, but importing its module makes the transfer below known there."""


class _Ban:
    """Masks the banned ids of every row whatever its request asks for, so that no request can get around it."""

    banned: torch.Tensor

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] with the banned columns at -inf, in place."""
        return logits.index_fill_(1, self.banned.to(logits.device), float("-inf"))


def _banned(vllm_config: Any, device: torch.device) -> torch.Tensor:
    return torch.tensor(vllm_config.additional_config[BANNED], dtype=torch.int64, device=device)


class Ban(_Ban, LogitsProcessor):
    """The ban for vLLM's first model runner (the CPU's, and that of a GPU without Triton)."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self.banned = _banned(vllm_config, device)

    def is_argmax_invariant(self) -> bool:
        """False: it decides greedy tokens too, so vLLM applies it before anything else."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Nothing depends on the batch."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """See `_Ban.mask`."""
        return self.mask(logits)


class BanV2(_Ban, LogitsProcessorV2):
    """The ban for vLLM's second model runner."""

    def __init__(self, vllm_config: Any, req_states: Any):
        self.banned = _banned(vllm_config, req_states.device)

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """See `_Ban.mask`."""
        return self.mask(logits)


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing to agree on before."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """base: the model's folder; changes: a safetensors file with the tensors that differ, under the same names, or None."""

    base: str
    changes: str | None = None


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):
    """vLLM's weight transfer through files: works wherever two processes share a folder, on CPU and GPU.

    Every tensor is given, changed or not: vLLM fuses layers (q, k and v) and rebuilds a layer only from all its parts.
    """

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """No connection is needed."""

    def start_weight_update(self) -> None:
        """Begin vLLM's reload, layer by layer."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one set of weights; see `receive_weights`."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load the base's tensors with the changed ones in their places."""
        self.model.load_weights(self._weights(update_info))

    def _weights(self, update_info: FileUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        changes = dict(checkpoint_tensors(update_info.changes)) if update_info.changes else {}
        for name, tensor in checkpoint_tensors(update_info.base):
            yield name, changes.get(name, tensor)

    def finish_weight_update(self) -> None:
        """End the reload; the output layer of models that share it with the embedding is packed again (on CPU it has a copy)."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            for name, module in self.model.named_modules():
                if name.rsplit(".", 1)[-1] == "lm_head":
                    module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing is held."""


WeightTransferEngineFactory.register_engine(TRANSFER, FileTransfer)
