"""DeepSpeed: building the engine, and reading and writing its whole state whatever the ZeRO stage and the number of workers.

State goes in and out as full tensors by name, so a checkpoint of two workers under ZeRO-2 resumes on one under ZeRO-1.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from pixelis.errors import BadConfig, MissingFile

if TYPE_CHECKING:
    from torch import nn

    from pixelis import config

MOMENTS = ("exp_avg", "exp_avg_sq")


def ensure_process_group(device: torch.device) -> None:
    """Start a group of one worker when torch.distributed is not running (Ray Train starts it otherwise).

    It lives as long as the process: DeepSpeed remembers the group of its first engine for all later ones.
    """
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it
    # A store inside the process: no port to choose, none to collide on.
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)


def settings(learner: config.LearnerConfig, bfloat16: bool, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's configuration: ours, with `learner.deepspeed` merged over it. Raises MissingFile, BadConfig."""
    bucket = 200_000_000 if device.type == "cuda" else 20_000_000
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # step() is the boundary: a batch has as many micro-batches as its lengths ask for.
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
        return ours
    path = Path(learner.deepspeed)
    if not path.is_file():
        raise MissingFile(f"learner.deepspeed: no file {path}", fix="name a DeepSpeed JSON file or leave the key empty")
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadConfig(f"learner.deepspeed: {path.name} is not JSON: {error}") from None
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler"):
        if key in theirs:
            raise BadConfig(f"learner.deepspeed: `{key}` is decided by the learner", fix="remove it from the file")
    return _merge(ours, theirs)


def _merge(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    nested = {k: _merge(base[k], v) for k, v in top.items() if isinstance(v, Mapping) and isinstance(base.get(k), dict)}
    return {**base, **top, **nested}


class ZeroEngine:
    """A module under DeepSpeed with a torch AdamW on its trainable parameters.

    parameters: the trainable ones under the names that checkpoints use.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        learner: config.LearnerConfig,
        bfloat16: bool,
        device: torch.device,
    ):
        if device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed
        from deepspeed import ops

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # Would compile for a minute and then reduce small tensors no faster than gloo.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if not parameters:
            raise BadConfig("nothing to train: no parameter is trainable", fix="check policy.lora.targets")
        self.parameters = parameters
        ensure_process_group(device)
        optimizer = torch.optim.AdamW(
            list(parameters.values()), lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay
        )
        values = settings(learner, bfloat16, device)
        self.stage = int(values["zero_optimization"]["stage"])
        self.engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=values, dist_init_required=False)
        self.engine.train()

    @property
    def _adam(self) -> torch.optim.Optimizer:
        return self.engine.optimizer if self.stage == 0 else self.engine.optimizer.optimizer

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this micro-batch; the sum over workers counts, not DeepSpeed's mean."""
        self.engine.backward(loss * dist.get_world_size())

    def apply(self, lr: float) -> float | None:
        """Clip and take the step; the global norm of the gradient before clipping, or None when it was not finite.

        Then nothing has changed: parameters and moments are bitwise what they were, on all workers.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        if self.stage == 0:
            # step() reduces again, which leaves an average that all workers share as it is.
            self.engine.allreduce_gradients()
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
        found = self.engine.get_global_grad_norm()
        return float(found) if found is not None else 0.0

    def weights(self) -> dict[str, np.ndarray]:
        """The trainable parameters in float32. All workers must call it together."""
        from deepspeed.utils import safe_get_full_fp32_param

        out = {}
        for name, parameter in self.parameters.items():
            whole = parameter.dtype == torch.float32 and not hasattr(parameter, "ds_id")
            value = parameter.detach() if whole else safe_get_full_fp32_param(parameter)
            out[name] = value.float().cpu().numpy().copy()
        return out

    def set_weights(self, values: Mapping[str, np.ndarray]) -> None:
        """Overwrite the trainable parameters, master copies included. All workers must call it together."""
        from deepspeed import zero
        from deepspeed.utils import safe_set_full_fp32_param

        for name, parameter in self.parameters.items():
            value = torch.from_numpy(np.array(values[name], dtype=np.float32)).to(self.engine.device)
            if hasattr(parameter, "ds_id"):
                with zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter.data.copy_(value)
            else:
                with torch.no_grad():
                    parameter.copy_(value)
            if self.stage > 0:
                safe_set_full_fp32_param(parameter, value)

    def moments(self) -> dict[str, np.ndarray]:
        """AdamW's state as `{name}.exp_avg`, `{name}.exp_avg_sq` and `step`; empty before the first step. A collective call."""
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
                out[f"{name}.{moment}"] = value.float().cpu().numpy().copy()
        return out

    def set_moments(self, values: Mapping[str, np.ndarray]) -> None:
        """Restore AdamW's state, or clear it when `values` is empty. A collective call."""
        from deepspeed.utils import safe_set_full_optimizer_state

        adam = self._adam
        if self.stage == 0:
            owned = list(self.parameters.values())
        elif self.stage == 3:
            owned = list(self.engine.optimizer.fp32_partitioned_groups_flat)
        else:
            owned = list(self.engine.optimizer.single_partition_of_fp32_groups)
        step = float(values["step"][0]) if values else 0.0
        # Without a state of the right shape there is nothing to write into; DeepSpeed makes it in the first step only.
        for part in owned:
            state = adam.state[part]
            state["step"] = torch.tensor(step)
            for moment in MOMENTS:
                if moment not in state:
                    state[moment] = torch.zeros_like(part.detach())
                state[moment].zero_()
        if self.stage in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, parameter in self.parameters.items() if values else ():
            for moment in MOMENTS:
                value = torch.from_numpy(np.array(values[f"{name}.{moment}"])).to(self.engine.device)
                if self.stage == 0:
                    adam.state[parameter][moment].copy_(value)
                else:
                    safe_set_full_optimizer_state(parameter, value, moment)

    def close(self) -> None:
        """Free the engine."""
        self.engine.destroy()
