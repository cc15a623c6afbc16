"""Lets torchvision's GPU build load beside torch's CPU build, in every process whose PYTHONPATH names this folder.

torchvision registers two operators of its compiled part when it is imported; on a torch without CUDA that part does not load and
the import fails. vLLM's image processors need torchvision, but not those operators: declaring them is enough.
"""

import importlib.abc
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
                    self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


_libraries: list = []
sys.meta_path.insert(0, _Declare())
