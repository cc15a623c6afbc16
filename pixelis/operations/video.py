"""Clips: encoded bytes or pictures, the exact time of every frame, and any frame by number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pixelis.config import Toolbox


@dataclass(frozen=True)
class Clip:
    """A clip by reference: encoded bytes that are decoded frame by frame, late."""

    data: tuple[np.ndarray, ...]
    times: np.ndarray
    width: int
    height: int
    container: str
    sha256: str

    def frame(self, index: int) -> np.ndarray:
        raise NotImplementedError

    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        raise NotImplementedError


def open_clip(source: str | bytes | Path | Sequence[str], settings: Toolbox, fps: float = 1.0) -> Clip:
    raise NotImplementedError
