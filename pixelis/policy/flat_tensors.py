"""Named tensors in one piece of memory, which travels as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

ALIGNMENT = 64
"""Bytes at whose multiples a tensor starts."""
Entry = tuple[str, str, tuple[int, ...]]
"""Name, numpy dtype and shape of a tensor."""


class FlatTensors(Mapping[str, np.ndarray]):
    """Tensors as views of `data`, uint8, in the order of `layout`. Without `data`, memory is allocated for them."""

    def __init__(self, layout: Sequence[Entry], data: np.ndarray | None = None):
        self.layout = tuple((name, dtype, tuple(shape)) for name, dtype, shape in layout)
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in self.layout]
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += math.ceil(size / ALIGNMENT) * ALIGNMENT
        self.data = np.empty(end, np.uint8) if data is None else data
        self._views = {
            name: self.data[start : start + size].view(dtype).reshape(shape)
            for (name, dtype, shape), start, size in zip(self.layout, starts, sizes, strict=True)
        }

    @classmethod
    def of(cls, tensors: Mapping[str, np.ndarray]) -> FlatTensors:
        """The tensors themselves if they are flat, else a copy."""
        if isinstance(tensors, cls):
            return tensors
        flat = cls([(name, values.dtype.str, values.shape) for name, values in tensors.items()])
        for name, values in tensors.items():
            flat[name][...] = values
        return flat

    def __getitem__(self, name: str) -> np.ndarray:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __reduce__(self) -> tuple[Any, ...]:
        return FlatTensors, (self.layout, self.data)  # one object; views would each be copied
