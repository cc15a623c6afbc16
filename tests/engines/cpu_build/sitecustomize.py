"""Lets vLLM's CPU build run in this environment, in every process whose PYTHONPATH names this folder.

torchvision's GPU build registers two operators of its compiled part when it is imported; on a torch without
CUDA that part does not load and the import fails. vLLM's image processors need torchvision, but not those
operators: declaring them is enough.

vLLM asks the weight of a layer on which device its adapters belong. Of int8 layers the CPU build has released
the weight.

With adapters, even if only on the attention, vLLM computes experts by Triton, which the CPU build lacks. It packs
experts for its kernels, but not again after a weight update.
"""

import dataclasses
import importlib.abc
import importlib.machinery
import sys


class _Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
                self.library = torch.library.Library("torchvision", "DEF")
                _libraries.append(self.library)
                for operator in ("nms", "qnms"):
                    self.library.define(
                        f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )
        return None


class _Patch(importlib.abc.MetaPathFinder):
    def __init__(self, module, patch):
        self.module, self.patch = module, patch

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def patched(module):
            run(module)
            self.patch(module)

        spec.loader.exec_module = patched
        return spec


def _device_without_weight(module):
    of = module._get_lora_device
    module._get_lora_device = lambda layer: (
        of(layer) if getattr(layer, "weight", layer) is not None else "cpu"
    )


def _experts_without_adapters(module):
    select = module.select_unquantized_moe_backend
    module.select_unquantized_moe_backend = lambda moe_config: select(
        dataclasses.replace(moe_config, is_lora_enabled=False)
    )


def _pack_experts_again(module):
    method = module.UnquantizedFusedMoEMethod
    setup = method._setup_kernel

    def set_up_as_at_first(self, *args, **kwargs):
        self.moe_kernel = None
        setup(self, *args, **kwargs)

    method._setup_kernel = set_up_as_at_first


_libraries: list = []
sys.meta_path[:0] = [
    _Declare(),
    _Patch("vllm.lora.layers.utils", _device_without_weight),
    _Patch("vllm.model_executor.layers.fused_moe.oracle.unquantized", _experts_without_adapters),
    _Patch("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method", _pack_experts_again),
]
