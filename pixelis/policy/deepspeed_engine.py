"""The learner's DeepSpeed engine, with access to its state at any ZeRO stage and number of workers."""

from __future__ import annotations

import atexit
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from pixelis.errors import BadConfig, MissingFile
from pixelis.policy.adamw import AdamW
from pixelis.policy.adapters import to_float32
from pixelis.policy.tensor_parts import FlatTensors, Part

if TYPE_CHECKING:
    from torch import nn

    from pixelis import config

MOMENTS = ("exp_avg", "exp_avg_sq")
OWN_KEYS = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
OWN_KEYS |= {"optimizer", "scheduler"}
Shards = Mapping[str, Tensor]
"""A worker's parts of the parameters, by name."""


def ensure_process_group(device: torch.device) -> None:
    """Import DeepSpeed, and initialize torch.distributed with one worker unless Ray Train has done so."""
    # Else it moves the model to a GPU that the learner has not reserved
    os.environ["DS_ACCELERATOR"] = device.type
    from deepspeed import ops

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Compiling it takes a minute, and it reduces small tensors no faster than gloo.
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    os.environ.setdefault("LOCAL_RANK", "0")  # required by DeepSpeed
    # An in-process store needs no port.
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)


def deepspeed_config(learner: config.LearnerConfig, bfloat16: bool, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's configuration: defaults under the file `learner.deepspeed`. Raises MissingFile, BadConfig."""
    bucket = 200_000_000 if device.type == "cuda" else 20_000_000
    defaults: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # The learner calls step() at the end of a batch. The number of micro-batches depends on the lengths
        # of the samples.
        "managed_gradient_accumulation": False,
        "gradient_clipping": learner.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "bf16": {"enabled": bfloat16, "check_grad_overflow": True},
        "zero_optimization": {
            "stage": max(1, learner.zero_stage) if bfloat16 else learner.zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
    }
    if not learner.deepspeed:
        return defaults
    path = Path(learner.deepspeed)
    if not path.is_file():
        raise MissingFile(f"learner.deepspeed: no file {path}", fix="name a DeepSpeed JSON file")
    try:
        overrides = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadConfig(f"learner.deepspeed: {path.name} is not JSON: {error}") from None
    if taken := sorted(OWN_KEYS & set(overrides)):
        raise BadConfig(f"learner.deepspeed: `{taken[0]}` is decided by the learner", fix="remove it")
    return _merge(defaults, overrides)


def _merge(base: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    nested = {
        k: _merge(base[k], v)
        for k, v in overrides.items()
        if isinstance(v, Mapping) and isinstance(base.get(k), dict)
    }
    return {**base, **overrides, **nested}


class ZeroEngine:
    """A module under DeepSpeed with AdamW. All workers must call its methods together."""

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        learner: config.LearnerConfig,
        bfloat16: bool,
        device: torch.device,
    ):
        import deepspeed

        if not parameters:
            raise BadConfig("nothing to train: no parameter is trainable", fix="check policy.lora.targets")
        self.parameters, self.bfloat16 = parameters, bfloat16
        self.moments_dtype = getattr(torch, learner.moments)
        settings = deepspeed_config(learner, bfloat16, device)
        kind: Any = AdamW
        if self.moments_dtype == torch.float32:
            # On CPUs, where offloading puts it, torch's fused kernel takes a fifth of the time.
            offload = settings["zero_optimization"].get("offload_optimizer", {})
            kind = partial(torch.optim.AdamW, fused=offload.get("device") == "cpu")
        optimizer = kind(
            list(parameters.values()), lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay
        )
        self.stage = int(settings["zero_optimization"]["stage"])
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings, dist_init_required=False
        )
        self.engine.train()

    @property
    def _adam(self) -> torch.optim.Optimizer:
        return self.engine.optimizer if self.stage == 0 else self.engine.optimizer.optimizer

    def backward(self, loss: Float[Tensor, ""]) -> None:
        """Add the gradient of a micro-batch. The scaling turns DeepSpeed's mean over workers into a sum."""
        self.engine.backward(loss * dist.get_world_size())

    def apply(self, lr: float) -> float | None:
        """Clip the gradient and take the optimizer step; returns the gradient norm before clipping.

        None if the norm is not finite; then nothing has changed, bit for bit, on any worker.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        if self.stage == 0:
            # Before step(), so that all workers agree on whether to take it; DeepSpeed's allreduce_gradients
            # does nothing outside of it. step() reduces again, which does not change an average that all
            # workers share.
            self.engine.buffered_allreduce_fallback()
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
            if not np.isfinite(norm):
                self.engine.zero_grad()
                return None
            self.engine.step()
            return norm
        self.engine.step()
        if self.engine.optimizer.overflow:
            return None
        return float(self.engine.get_global_grad_norm() or 0.0)

    def weights(self) -> dict[str, np.ndarray]:
        """Copy of the trainable parameters, float32."""
        from deepspeed.utils import safe_get_full_fp32_param

        out = {}
        for name, parameter in self.parameters.items():
            is_complete = parameter.dtype == torch.float32 and not hasattr(parameter, "ds_id")
            out[name] = _copy(parameter if is_complete else safe_get_full_fp32_param(parameter))
        return out

    def model_weights(self) -> FlatTensors:
        """Copy of the trainable parameters in the model's type, bfloat16 as uint16, on the first worker."""
        from deepspeed import zero

        bits = {torch.bfloat16: torch.uint16}
        layout = [
            (name, "uint16" if p.dtype in bits else "float32", tuple(getattr(p, "ds_shape", p.shape)))
            for name, p in self.parameters.items()
        ]
        out = FlatTensors(layout if dist.get_rank() == 0 else [])
        for name, parameter in self.parameters.items():
            with zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                if name in out:
                    value = parameter.detach().contiguous()
                    torch.from_numpy(out[name]).copy_(value.view(bits.get(value.dtype, value.dtype)))
        return out

    def parts(self) -> tuple[dict[str, Part], dict[str, Part | np.ndarray]]:
        """This worker's parts of `weights` and of `moments`."""
        weights: dict[str, Part] = {}
        moments: dict[str, Part | np.ndarray] = {}
        states = list(self._adam.state.values())
        if states and dist.get_rank() == 0:
            moments["step"] = np.asarray([float(states[0]["step"])], dtype=np.float32)
        for name, parameter in self.parameters.items():
            weights |= self._part(name, parameter, None)
            for moment in MOMENTS if states else ():
                moments |= {f"{n}.{moment}": part for n, part in self._part(name, parameter, moment).items()}
        return weights, moments

    def _part(self, name: str, parameter: Any, moment: str | None) -> dict[str, Part]:
        if self.stage == 0:
            return _even_part(name, parameter if moment is None else self._adam.state[parameter][moment])
        if self.stage == 3:
            value = parameter._z3_optimizer.get_local_fp32_param(parameter, moment)
            return _zero3_part(name, parameter, value)
        if (mapping := parameter._hp_mapping) is None:
            return {}
        values, start = _copy(mapping.get_hp_fragment(moment)), mapping.lp_fragment_address.start
        return {name: Part(values, start, tuple(parameter.shape))}

    def parts_of(self, shards: Shards) -> dict[str, Part]:
        """This worker's parts of the parameters that `shards` stand for."""
        parts: dict[str, Part] = {}
        for name, parameter in self.parameters.items():
            if hasattr(parameter, "ds_id"):
                parts |= _zero3_part(name, parameter, shards[name])
            else:
                parts |= _even_part(name, shards[name])
        return parts

    def set_weights(self, values: Mapping[str, np.ndarray]) -> None:
        """Overwrite the trainable parameters and their float32 master copies."""
        from deepspeed import zero

        for name, parameter in self.parameters.items():
            value = torch.from_numpy(np.array(to_float32(values[name]))).to(self.engine.device)
            if hasattr(parameter, "ds_id"):
                with zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter.data.copy_(value)
            else:
                with torch.no_grad():
                    parameter.copy_(value)
            if self.stage > 0:
                self._set_part(parameter, value, None)

    def _set_part(self, parameter: Any, value: Tensor, moment: str | None) -> None:
        if self.stage < 3:
            parameter.set_full_hp_param(value, moment)
            return
        # DeepSpeed's own setter fails if the workers' parts are padded.
        size = parameter.ds_tensor.numel()
        values = value.reshape(-1)[dist.get_rank() * size :][:size]
        padded = torch.nn.functional.pad(values, (0, size - len(values)))
        parameter._z3_optimizer.set_local_hp_param(padded, parameter, moment)

    def shards(self) -> Shards:
        """This worker's part of the parameters that the forward pass reads."""
        return {name: self._shard(parameter).clone() for name, parameter in self.parameters.items()}

    @contextmanager
    def using(self, shards: Shards) -> Iterator[None]:
        """Use other parameters in forward passes; the current ones are restored bit for bit."""
        current = self.shards()
        try:
            self._set_shards(shards)
            yield
        finally:
            self._set_shards(current)

    @staticmethod
    def _shard(parameter: Any) -> Tensor:
        return parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter.detach()

    def _set_shards(self, shards: Shards) -> None:
        parameters: dict[str, Any] = self.parameters
        for name, parameter in parameters.items():
            if hasattr(parameter, "ds_id") and parameter.ds_persist:
                # DeepSpeed keeps small parameters gathered. The next pass gathers it again, from the new
                # parts.
                parameter.partition(has_been_updated=False)
            self._shard(parameter).copy_(shards[name])

    def moments(self) -> dict[str, np.ndarray]:
        """AdamW's state as `{name}.exp_avg`, `{name}.exp_avg_sq` and `step`."""
        from deepspeed.utils import safe_get_full_optimizer_state

        states = list(self._adam.state.values())
        if not states:
            return {}
        out = {"step": np.asarray([float(states[0]["step"])], dtype=np.float32)}
        for name, parameter in self.parameters.items():
            for moment in MOMENTS:
                if self.stage == 0:
                    value = self._adam.state[parameter][moment]
                else:
                    value = safe_get_full_optimizer_state(parameter, moment)
                out[f"{name}.{moment}"] = _copy(value)
        return out

    def set_moments(self, values: Mapping[str, np.ndarray]) -> None:
        """Restore AdamW's state, or clear it if `values` is empty."""
        adam = self._adam
        if self.stage == 0:
            partitions = list(self.parameters.values())
        elif self.stage == 3:
            partitions = list(self.engine.optimizer.fp32_partitioned_groups_flat)
        else:
            partitions = list(self.engine.optimizer.single_partition_of_fp32_groups)
        step = float(values["step"][0]) if values else 0.0
        # DeepSpeed allocates the state in the first step only, so allocate it here.
        for partition in partitions:
            state = adam.state[partition]
            state["step"] = torch.tensor(step)
            for moment in MOMENTS:
                if moment not in state:
                    state[moment] = torch.zeros_like(partition.detach(), dtype=self.moments_dtype)
                state[moment].zero_()
        if self.stage in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, parameter in self.parameters.items() if values else ():
            for moment in MOMENTS:
                value = torch.from_numpy(np.array(values[f"{name}.{moment}"])).to(self.engine.device)
                if self.stage == 0:
                    adam.state[parameter][moment].copy_(value)
                else:
                    self._set_part(parameter, value, moment)

    def close(self) -> None:
        self.engine.destroy()


def _copy(value: Tensor) -> np.ndarray:
    return value.detach().float().cpu().numpy().copy()


def _even_part(name: str, value: Tensor) -> dict[str, Part]:
    """{name: this worker's part of a tensor that all workers hold}."""
    worker, workers = dist.get_rank(), dist.get_world_size()
    start, end = value.numel() * worker // workers, value.numel() * (worker + 1) // workers
    return {name: Part(_copy(value.reshape(-1)[start:end]), start, tuple(value.shape))} if end > start else {}


def _zero3_part(name: str, parameter: Any, value: Tensor) -> dict[str, Part]:
    """{name: this worker's part of a tensor that ZeRO-3 divides, without padding}."""
    start = value.numel() * dist.get_rank()
    value = value.reshape(-1)[: max(0, parameter.ds_numel - start)]
    return {name: Part(_copy(value), start, tuple(parameter.ds_shape))} if value.numel() else {}
