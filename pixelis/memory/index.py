"""The vector index of one shard with FAISS, derived from the database when a shard opens.

Search is exact, except that ``hnsw`` and ``ivf`` approximate it for the vectors that a large shard opens
with.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from pixelis.config import MemoryConfig
from pixelis.errors import MissingDependency, install_extra
from pixelis.records.vectors import unit, validate

try:
    import faiss as _faiss
except ImportError:
    raise MissingDependency(
        "the memory needs FAISS, which is not installed",
        fix=f"{install_extra('cpu')}; with a GPU: {install_extra('gpu')}",
    ) from None
faiss: Any = _faiss
"""The type stubs of FAISS are incomplete."""
METRICS = {"cosine": faiss.METRIC_INNER_PRODUCT, "euclidean": faiss.METRIC_L2, "manhattan": faiss.METRIC_L1}
MAX_EXACT = 100_000
"""Number of vectors above which an approximate index is built."""
HNSW_M, HNSW_EF_CONSTRUCTION, HNSW_EF_SEARCH = 32, 200, 100
"""Links of a node, and candidates considered in building and searching the graph."""
IVF_LISTS, IVF_PROBED = 4.0, 0.1
"""Inverted lists by the square root of the number of vectors, and the share of them that a search visits."""
MAX_GPU_K = 2048
"""Most neighbours of a GPU search in FAISS."""

Neighbours = tuple[np.ndarray, np.ndarray]
"""Scores float32 [n, k], best first, and rows int64 [n, k], -1 beyond the last result."""


class Exact:
    """Exhaustive search. The last vector moves into the place of a removed one."""

    def __init__(self, width: int, metric: int):
        self.metric = metric
        self.values, self.rows = np.empty((0, width), np.float32), np.empty(0, np.int64)
        self.places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.places)

    @property
    def vectors(self) -> np.ndarray:
        return self.values[: len(self)]

    def add(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        start, end = len(self), len(self) + len(rows)
        if end > len(self.values):
            room = max(end, start + start // 2)
            values, names = np.empty((room, self.values.shape[1]), np.float32), np.empty(room, np.int64)
            values[:start], names[:start] = self.vectors, self.rows[:start]
            self.values, self.rows = values, names
        self.values[start:end], self.rows[start:end] = vectors, rows
        self.places.update(zip(rows.tolist(), range(start, end), strict=True))

    def remove(self, row: int) -> bool:
        """Remove a row; False if it is unknown."""
        place = self.places.pop(row, None)
        if place is None:
            return False
        last = len(self)
        if place != last:
            moved = int(self.rows[last])
            self.values[place], self.rows[place] = self.values[last], moved
            self.places[moved] = place
        self.values[last] = 0
        return True

    def search(self, vectors: np.ndarray, k: int) -> Neighbours:
        if not len(self):
            return np.zeros((len(vectors), k), np.float32), np.full((len(vectors), k), -1, np.int64)
        scores, places = self.search_places(vectors, k)
        return scores, np.where(places >= 0, self.rows[places], -1)

    def search_places(self, vectors: np.ndarray, k: int) -> Neighbours:
        """As ``search``, with places in ``vectors`` instead of rows."""
        return faiss.knn(vectors, self.vectors, k, self.metric)


class GpuExact(Exact):
    """Searches a copy on a GPU, which is made anew after removals: FAISS cannot remove from a GPU index."""

    def __init__(self, width: int, metric: int):
        super().__init__(width, metric)
        self.resources = faiss.StandardGpuResources()
        self.copy = faiss.GpuIndexFlat(self.resources, width, metric)
        self.stale = False

    def remove(self, row: int) -> bool:
        removed = super().remove(row)
        self.stale |= removed
        return removed

    def search_places(self, vectors: np.ndarray, k: int) -> Neighbours:
        if k > MAX_GPU_K:
            return super().search_places(vectors, k)
        if self.stale:
            self.copy.reset()
            self.stale = False
        if self.copy.ntotal < len(self):
            self.copy.add(self.vectors[self.copy.ntotal :])
        return self.copy.search(vectors, k)


class Approximate:
    """A graph (``hnsw``) or inverted lists (``ivf``) of ascending ``rows``, built once.

    Removed vectors stay in it, but in no result.
    """

    def __init__(self, config: MemoryConfig, rows: np.ndarray, vectors: np.ndarray):
        width, metric = vectors.shape[1], METRICS[config.metric]
        self.config, self.rows, self.alive = config, rows, len(rows)
        self.bits = np.full(len(rows) // 8 + 1, 255, np.uint8)
        if config.index == "hnsw":
            self.index = faiss.IndexHNSWFlat(width, HNSW_M, metric)
            self.index.hnsw.efConstruction = HNSW_EF_CONSTRUCTION
        else:
            lists = int(IVF_LISTS * np.sqrt(len(rows)))
            self.index = faiss.IndexIVFFlat(faiss.IndexFlat(width, metric), width, lists, metric)
            self.index.train(vectors)
            self.probes = math.ceil(IVF_PROBED * lists)
        self.index.add(vectors)

    def remove(self, row: int) -> None:
        place = int(np.searchsorted(self.rows, row))
        if place < len(self.rows) and self.rows[place] == row and self.bits[place >> 3] >> (place & 7) & 1:
            self.bits[place >> 3] &= 255 ^ (1 << (place & 7))
            self.alive -= 1

    def search(self, vectors: np.ndarray, k: int) -> Neighbours:
        selector = {"sel": faiss.IDSelectorBitmap(self.bits)} if self.alive < len(self.rows) else {}
        if self.config.index == "hnsw":
            parameters = faiss.SearchParametersHNSW(efSearch=max(HNSW_EF_SEARCH, k), **selector)
        else:
            parameters = faiss.SearchParametersIVF(nprobe=self.probes, **selector)
        scores, places = self.index.search(vectors, k, params=parameters)
        return scores, np.where(places >= 0, self.rows[places], -1)


class Index:
    """Vectors of one width by row number. Thread-safe."""

    def __init__(self, config: MemoryConfig, width: int):
        self.config, self.width = config, width
        self.exact = self._new_exact()
        self.approximate: Approximate | None = None
        self._lock = threading.RLock()
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        faiss.omp_set_num_threads(int(threads) if threads.isdigit() else 1)

    def _new_exact(self) -> Exact:
        kind = GpuExact if hasattr(faiss, "GpuIndexFlat") and faiss.get_num_gpus() else Exact
        return kind(self.width, METRICS[self.config.metric])

    def __len__(self) -> int:
        with self._lock:
            return len(self.exact) + (self.approximate.alive if self.approximate else 0)

    def _prepare(self, vectors: np.ndarray) -> np.ndarray:
        cosine = self.config.metric == "cosine"
        vectors = validate(vectors, self.width, direction=cosine)
        return unit(vectors) if cosine else vectors

    def add(self, rows: Sequence[int], vectors: np.ndarray) -> None:
        """Add ``vectors`` float32 [n, width] under ascending row numbers that were never used before."""
        vectors = self._prepare(vectors)
        with self._lock:
            self.exact.add(np.asarray(rows, np.int64), vectors)

    def build(self) -> None:
        """Move the vectors so far to an approximate index, if configured and they are many."""
        with self._lock:
            if self.config.index == "flat" or len(self.exact) <= MAX_EXACT:
                return
            threads = faiss.omp_get_max_threads()
            faiss.omp_set_num_threads(os.cpu_count() or 1)  # the shard cannot serve before it ends
            self.approximate = Approximate(
                self.config, self.exact.rows[: len(self.exact)], self.exact.vectors
            )
            faiss.omp_set_num_threads(threads)
            self.exact = self._new_exact()

    def remove(self, rows: Sequence[int]) -> None:
        """Leave rows out of all results; unknown rows are ignored."""
        with self._lock:
            for row in rows:
                if not self.exact.remove(row) and self.approximate is not None:
                    self.approximate.remove(row)

    def search(self, vectors: np.ndarray, k: int) -> Neighbours:
        """Similarities (cosine or negative distance) and numbers of the ``k`` nearest rows of each vector."""
        vectors = self._prepare(vectors)
        with self._lock:
            scores, rows = self.exact.search(vectors, k)
            if self.approximate is not None:
                more = self.approximate.search(vectors, k)
                scores, rows = (
                    np.concatenate(pair, axis=1) for pair in zip((scores, rows), more, strict=True)
                )
        if self.config.metric == "cosine":
            similarities = np.clip(scores, -1, 1)
        else:
            similarities = -np.sqrt(np.maximum(scores, 0)) if self.config.metric == "euclidean" else -scores
        similarities = np.where(rows >= 0, similarities, -np.inf).astype(np.float32)
        order = np.argsort(-similarities, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(similarities, order, 1), np.take_along_axis(rows, order, 1)
