"""Named tensors in safetensors files, whole or divided among workers, and in one piece of memory.

`parts` in a file's header is a JSON object, name -> [first element, *whole shape].
"""

from __future__ import annotations

import errno
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pixelis.errors import BadInput


@dataclass(frozen=True)
class Part:
    """A worker's part of a tensor: the flattened elements from `start` on. shape: of the whole."""

    values: np.ndarray
    start: int
    shape: tuple[int, ...]


def save_tensors(
    tensors: Mapping[str, np.ndarray | Part], path: Path, header: Mapping[str, str] | None = None
) -> None:
    """Write tensors and parts of tensors. Raises OSError if writing fails."""
    arrays, parts = {}, {}
    for name, tensor in tensors.items():
        values = tensor.values if isinstance(tensor, Part) else tensor
        if isinstance(tensor, Part):
            if values.size == math.prod(tensor.shape):
                values = values.reshape(tensor.shape)
            else:
                parts[name] = [tensor.start, *tensor.shape]
        arrays[name] = np.ascontiguousarray(values)
    metadata = {**(header or {}), **({"parts": json.dumps(parts)} if parts else {})}
    try:
        save_file(arrays, path, metadata=metadata or None)
    except SafetensorError as error:  # also of a full disk
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error)) from None
    if not metadata:
        return
    with open(path, "r+b") as file:  # safetensors writes the entries of the header in another order each time
        size = int.from_bytes(file.read(8), "little")
        content = json.loads(file.read(size))
        content["__metadata__"] = dict(sorted(content["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))


def part_name(stem: str, worker: int, workers: int) -> str:
    """Name of a worker's file: `STEM.safetensors` of a single worker, else `STEM.2-of-4.safetensors`."""
    return f"{stem}.safetensors" if workers == 1 else f"{stem}.{worker + 1}-of-{workers}.safetensors"


def stem_of(path: Path) -> str:
    return path.name.split(".", 1)[0]


def files_of(folder: Path, stem: str) -> list[Path]:
    return sorted(p for p in folder.glob(f"{stem}.*safetensors") if stem_of(p) == stem)


class StoredTensors(Mapping[str, np.ndarray]):
    """The whole tensors in some files, each read when it is asked for. BadInput if a part is missing."""

    def __init__(self, files: list[Path]):
        self._pieces: dict[str, list[tuple[Any, int, tuple[int, ...]]]] = {}
        for path in files:
            file = safe_open(path, framework="numpy")
            parts = json.loads((file.metadata() or {}).get("parts", "{}"))
            for name in file.keys():  # noqa: SIM118 (no mapping)
                start, *shape = parts.get(name, (0, *file.get_slice(name).get_shape()))
                self._pieces.setdefault(name, []).append((file, int(start), tuple(shape)))

    def __getitem__(self, name: str) -> np.ndarray:
        pieces = sorted(self._pieces[name], key=lambda piece: piece[1])
        values, end, (*_, shape) = [], 0, pieces[0]
        for file, start, _ in pieces:
            if start == end:
                values.append(file.get_tensor(name))
                end += values[-1].size
        if end != math.prod(shape):
            raise BadInput(
                f"a part of {name} is missing in the checkpoint",
                code="damaged_checkpoint",
                fix="use an older one",
            )
        return (values[0] if len(values) == 1 else np.concatenate(values)).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


# In memory

ALIGNMENT = 64
"""Bytes at whose multiples a tensor starts."""
Entry = tuple[str, str, tuple[int, ...]]


class FlatTensors(dict[str, np.ndarray]):
    """Tensors as views of `data`, uint8, in the order of `layout`: one object to send."""

    def __init__(self, layout: Sequence[Entry], data: np.ndarray | None = None):
        self.layout = tuple((name, dtype, tuple(shape)) for name, dtype, shape in layout)
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in self.layout]
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += math.ceil(size / ALIGNMENT) * ALIGNMENT
        self.data = np.empty(end, np.uint8) if data is None else data
        super().__init__(
            (name, self.data[start : start + size].view(dtype).reshape(shape))
            for (name, dtype, shape), start, size in zip(self.layout, starts, sizes, strict=True)
        )

    @classmethod
    def of(cls, tensors: Mapping[str, np.ndarray]) -> FlatTensors:
        """The tensors themselves if they are flat, else a copy."""
        if isinstance(tensors, cls):
            return tensors
        flat = cls([(name, values.dtype.str, values.shape) for name, values in tensors.items()])
        for name, values in tensors.items():
            flat[name][...] = values
        return flat

    def __reduce__(self) -> tuple[Any, ...]:
        return FlatTensors, (self.layout, self.data)  # one object; views would each be copied
