"""Lets vLLM's CPU build run in this environment, in every process whose PYTHONPATH names this folder.

torchvision's GPU build registers two operators of its compiled part when it is imported; on a torch without
CUDA that part does not load and the import fails. vLLM's image processors need torchvision, but not those
operators: declaring them is enough.

vLLM asks the weight of a layer on which device its adapters belong. Of int8 layers the CPU build has released
the weight.
"""

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


class _Device(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "vllm.lora.layers.utils":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def patched(module):
            run(module)
            of = module._get_lora_device
            module._get_lora_device = lambda layer: (
                of(layer) if getattr(layer, "weight", layer) is not None else "cpu"
            )

        spec.loader.exec_module = patched
        return spec


_libraries: list = []
sys.meta_path[:0] = [_Declare(), _Device()]
