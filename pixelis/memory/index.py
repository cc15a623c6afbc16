"""The vector index of one shard: nearest-neighbour search with FAISS, derived from the database.

``flat`` is exact. ``hnsw`` and ``ivf`` consist of a built index and a flat tail of rows not yet in it, searched together, so that
searches never wait for an insertion, restart or rebuild. ``maintain`` moves the tail to the built index in small steps. When many
rows were removed it builds a replacement in the background.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from pixelis.config import MemoryConfig
from pixelis.errors import MissingDependency, install_extra
from pixelis.records.vectors import unit, validate

try:
    import faiss as _faiss
except ImportError:
    raise MissingDependency(
        "the memory needs FAISS, which is not installed", fix=f"{install_extra('cpu')}; with a GPU: {install_extra('gpu')}"
    ) from None
faiss: Any = _faiss
"""The type stubs of FAISS are incomplete."""
METRICS = {"cosine": faiss.METRIC_INNER_PRODUCT, "euclidean": faiss.METRIC_L2, "manhattan": faiss.METRIC_L1}
TAIL = 1024
"""Rows of the tail at which it is moved to the built index."""
STEP = 32
"""Rows added to the built index per lock."""
MAX_REMOVED = 0.25
"""Share of removed rows above which the built index is replaced."""
MAX_GPU_K = 2048
"""Most neighbours of a GPU search in FAISS."""
MIN_PER_LIST = 39
"""Least vectors per list of ``ivf``: FAISS's minimum for its clustering."""

Neighbours = tuple[np.ndarray, np.ndarray]
"""Similarities float32 [n, k], best first, and rows int64 [n, k], -1 beyond the last result."""


class Flat:
    """Exhaustive search. The last row moves into the place of a removed one."""

    def __init__(self, width: int, metric: int):
        self.width = width
        self.index = faiss.IndexFlat(width, metric)
        self.rows = np.empty(0, np.int64)
        self.places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.places)

    def add(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        start = len(self)
        self.index.add(vectors)
        if start + len(rows) > len(self.rows):
            self.rows = np.concatenate([self.rows[:start], rows, np.empty(start // 2, np.int64)])
        self.rows[start : start + len(rows)] = rows
        self.places.update(zip(rows.tolist(), range(start, start + len(rows)), strict=True))

    def remove(self, row: int) -> bool:
        place = self.places.pop(row, None)
        if place is None:
            return False
        last, values = len(self), self._values()
        if place != last:
            values[place] = values[last]
            moved = int(self.rows[last])
            self.rows[place], self.places[moved] = moved, place
        values[last] = 0
        del values
        self.index.codes.resize(last * self.width * 4)
        self.index.ntotal = last
        return True

    def _values(self) -> np.ndarray:
        total = self.index.ntotal
        return faiss.rev_swig_ptr(self.index.get_xb(), total * self.width).reshape(total, self.width)

    def take(self, rows: Sequence[int]) -> np.ndarray:
        """Copies of the vectors of these rows."""
        return self._values()[[self.places[row] for row in rows]] if rows else np.empty((0, self.width), np.float32)

    def search(self, vectors: np.ndarray, k: int) -> Neighbours:
        if not len(self):
            return _no_results(len(vectors), k)
        scores, places = self.index.search(vectors, k)
        return scores, np.where(places >= 0, self.rows[places], -1)


class GpuFlat(Flat):
    """Exhaustive search on a GPU copy, which is rebuilt after removals: FAISS cannot remove from a GPU index."""

    def __init__(self, width: int, metric: int):
        super().__init__(width, metric)
        self.resources = faiss.StandardGpuResources()
        self.copy = faiss.GpuIndexFlat(self.resources, width, metric)
        self.stale = False

    def remove(self, row: int) -> bool:
        removed = super().remove(row)
        self.stale |= removed
        return removed

    def search(self, vectors: np.ndarray, k: int) -> Neighbours:
        if k > MAX_GPU_K or not len(self):
            return super().search(vectors, k)
        if self.stale:
            self.copy.reset()
            self.stale = False
        if self.copy.ntotal < len(self):
            self.copy.add(self._values()[self.copy.ntotal :])
        scores, places = self.copy.search(vectors, k)
        return scores, np.where(places >= 0, self.rows[places], -1)


def flat(width: int, metric: int) -> Flat:
    """A flat index on the GPU if there is one and FAISS supports it, else on the CPU."""
    return GpuFlat(width, metric) if hasattr(faiss, "GpuIndexFlat") and faiss.get_num_gpus() else Flat(width, metric)


class Built:
    """A graph (``hnsw``) or inverted lists (``ivf``). Removed vectors remain in the index and are masked in every search."""

    def __init__(self, config: MemoryConfig, index: Any, rows: np.ndarray):
        self.config, self.index, self.rows = config, index, rows
        self.places = {int(row): place for place, row in enumerate(rows)}
        self.bits = np.full(len(rows) // 8 + 1, 255, np.uint8)
        self.trained_on = max(len(rows), 1)

    @classmethod
    def empty(cls, config: MemoryConfig, vectors: np.ndarray) -> Built:
        """An empty index; ``ivf`` is trained on ``vectors``."""
        width, metric = vectors.shape[1], METRICS[config.metric]
        if config.index == "hnsw":
            index = faiss.IndexHNSWFlat(width, config.hnsw.M, metric)
            index.hnsw.efConstruction = config.hnsw.ef_construction
        else:
            index = faiss.IndexIVFFlat(faiss.IndexFlat(width, metric), width, config.ivf.nlist, metric)
            index.train(vectors)
        result = cls(config, index, np.empty(0, np.int64))
        result.trained_on = len(vectors)
        return result

    def __len__(self) -> int:
        return len(self.places)

    @property
    def removed(self) -> int:
        """Number of removed rows that remain in the index."""
        return len(self.rows) - len(self.places)

    def add(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        start = len(self.rows)
        self.index.add(vectors)
        self.rows = np.concatenate([self.rows, rows])
        self.places.update(zip(rows.tolist(), range(start, start + len(rows)), strict=True))
        missing = len(self.rows) // 8 + 1 - len(self.bits)
        if missing > 0:
            self.bits = np.concatenate([self.bits, np.full(missing + len(self.bits) // 8, 255, np.uint8)])

    def remove(self, row: int, wipe: bool = False) -> bool:
        place = self.places.pop(row, None)
        if place is None:
            return False
        self.bits[place >> 3] &= 255 ^ (1 << (place & 7))
        if wipe and self.config.index == "hnsw":
            self._values()[place] = 0
        return True

    def _values(self) -> np.ndarray:
        if self.config.index == "hnsw":
            storage = faiss.downcast_index(self.index.storage)
            return faiss.rev_swig_ptr(storage.get_xb(), storage.ntotal * storage.d).reshape(storage.ntotal, storage.d)
        values = np.empty((len(self.rows), self.index.d), np.float32)
        for number in range(self.index.nlist):
            size = self.index.invlists.list_size(number)
            if size:
                ids = faiss.rev_swig_ptr(self.index.invlists.get_ids(number), size)
                codes = faiss.rev_swig_ptr(self.index.invlists.get_codes(number), size * self.index.d * 4)
                values[ids] = codes.view(np.float32).reshape(size, -1)
        return values

    def alive(self) -> tuple[np.ndarray, np.ndarray]:
        """The remaining rows and copies of their vectors."""
        places = np.fromiter(self.places.values(), np.int64, len(self.places))
        return self.rows[places], self._values()[places]

    def search(self, vectors: np.ndarray, k: int) -> Neighbours:
        if not len(self):
            return _no_results(len(vectors), k)
        selector = {"sel": faiss.IDSelectorBitmap(self.bits)} if self.removed else {}
        if self.config.index == "hnsw":
            parameters = faiss.SearchParametersHNSW(efSearch=max(self.config.hnsw.ef_search, k), **selector)
        else:
            parameters = faiss.SearchParametersIVF(nprobe=self.config.ivf.nprobe, **selector)
        scores, places = self.index.search(vectors, k, params=parameters)
        return scores, np.where(places >= 0, self.rows[places], -1)


class Index:
    """Vectors of one width by row number. Thread-safe."""

    def __init__(self, config: MemoryConfig, width: int):
        self.config, self.width = config, width
        self.metric = METRICS[config.metric]
        # A short tail is faster on the CPU than the transfer to a GPU.
        self.tail = flat(width, self.metric) if config.index == "flat" else Flat(width, self.metric)
        self.built: Built | None = None
        self._lock = threading.RLock()
        self._draining = self._stale = False
        self._removed: dict[int, bool] | None = None
        """Rows removed while a replacement is being built, and whether they are wiped."""
        self._wipes = 0
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        faiss.omp_set_num_threads(int(threads) if threads.isdigit() else 1)

    def __len__(self) -> int:
        with self._lock:  # a row that is moving from the tail counts once
            return len(self.tail) + (len(self.built) if self.built is not None else 0)

    def _prepare(self, vectors: np.ndarray) -> np.ndarray:
        cosine = self.config.metric == "cosine"
        vectors = validate(vectors, self.width, direction=cosine)
        return unit(vectors) if cosine else vectors

    def add(self, rows: Sequence[int], vectors: np.ndarray) -> None:
        """Add ``vectors`` float32 [n, width] under row numbers that were never used before."""
        vectors = self._prepare(vectors)
        with self._lock:
            self.tail.add(np.asarray(rows, np.int64), vectors)

    def remove(self, rows: Sequence[int], wipe: bool = False) -> None:
        """Remove rows from all results; unknown rows are ignored. ``wipe``: also erase their values from memory."""
        with self._lock:
            self._wipes += wipe
            for row in rows:
                if not self.tail.remove(row) and self.built is not None and self.built.remove(row, wipe) and wipe:
                    self._stale |= self.config.index == "ivf"
                if self._removed is not None:
                    self._removed[row] = wipe

    def search(self, vectors: np.ndarray, k: int) -> Neighbours:
        """The ``k`` nearest rows of each of ``vectors`` [n, width] and their similarities: cosine or negative distance."""
        vectors = self._prepare(vectors)
        with self._lock:
            parts = [self.tail.search(vectors, k)] if len(self.tail) or not self.built else []
            if self.built:
                parts.append(self.built.search(vectors, k))
        scores, rows = (np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True))
        similarities = self._similarity(scores, rows)
        if len(parts) > 1:
            order = np.argsort(-similarities, axis=1, kind="stable")[:, :k]
            similarities, rows = np.take_along_axis(similarities, order, 1), np.take_along_axis(rows, order, 1)
        return similarities, rows

    def _similarity(self, scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
        if self.config.metric == "cosine":
            scores = np.clip(scores, -1, 1)
        elif self.config.metric == "euclidean":
            scores = -np.sqrt(np.maximum(scores, 0))
        else:
            scores = -scores
        return np.where(rows >= 0, scores, -np.inf).astype(np.float32)

    def _needs_build(self) -> bool:
        """True if the built index must be built or replaced."""
        if self.config.index == "flat":
            return False
        if self.built is None:
            required = TAIL if self.config.index == "hnsw" else MIN_PER_LIST * self.config.ivf.nlist
            return len(self.tail) >= required
        outgrown = self.config.index == "ivf" and len(self) > 4 * self.built.trained_on
        return self._stale or outgrown or self.built.removed > MAX_REMOVED * len(self.built.rows)

    def maintain(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Run one maintenance step, in one thread at a time; returns True if there is more to do."""
        if self._needs_build():
            return self._build(stop)
        with self._lock:
            if self.built is None:
                return False
            count = len(self.tail)
            self._draining = bool(count) and (self._draining or count >= TAIL)
            if not self._draining:
                return False
            rows = self.tail.rows[max(0, count - STEP) : count].copy()
            self.built.add(rows, self.tail.take(rows.tolist()))
            for row in rows.tolist():
                self.tail.remove(row)
            return True

    def _build(self, stop: Callable[[], bool]) -> bool:
        with self._lock:
            tail = np.fromiter(self.tail.places, np.int64, len(self.tail))
            parts = [(tail, self.tail.take(tail.tolist()))] + ([self.built.alive()] if self.built else [])
            rows, vectors = (np.concatenate(columns) for columns in zip(*parts, strict=True))
            self._removed = {}
        if len(rows) == 0:
            with self._lock:
                self.built, self._removed, self._stale = None, None, False
            return False
        fresh = None
        if self.config.index == "hnsw" or len(rows) >= MIN_PER_LIST * self.config.ivf.nlist:
            with ThreadPoolExecutor(1, initializer=_lower_priority) as pool:
                fresh = pool.submit(self._build_replacement, rows, vectors, stop).result()
            if fresh is None:
                self._removed = None
                return False
        with self._lock:
            indexed = fresh.places if fresh is not None else {}
            unindexed = [row for row in self.tail.places if row not in indexed]
            new_tail = Flat(self.width, self.metric)
            if unindexed:
                new_tail.add(np.asarray(unindexed, np.int64), self.tail.take(unindexed))
            if fresh is None:
                alive = [
                    place for place, row in enumerate(rows.tolist()) if row not in self._removed and row not in new_tail.places
                ]
                new_tail.add(rows[alive], vectors[alive])
            else:
                for row in self._removed:
                    fresh.remove(row, wipe=True)
            # Lists cannot be wiped in place: another replacement has to leave out what was deleted meanwhile.
            self._stale = self.config.index == "ivf" and fresh is not None and any(self._removed.values())
            self.tail, self.built, self._removed = new_tail, fresh, None
        return True

    def _build_replacement(self, rows: np.ndarray, vectors: np.ndarray, stop: Callable[[], bool]) -> Built | None:
        """Build an index in small steps; returns None if ``stop`` asks to stop."""
        fresh = Built.empty(self.config, vectors)
        for start in range(0, len(rows), STEP):
            if stop():
                return None
            fresh.add(rows[start : start + STEP], vectors[start : start + STEP])
        return fresh

    # --- the built index as a file ------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        c = self.config
        shape = [c.hnsw.M, c.hnsw.ef_construction] if c.index == "hnsw" else [c.ivf.nlist]
        return {"index": c.index, "metric": c.metric, "width": self.width, "shape": shape, "faiss": faiss.__version__}

    def save(self, path: Path, owner: str) -> bool:
        """Write the built index to a temporary file and rename it into place; ``owner`` is the name of its database.

        Only for the maintenance thread, which alone adds to the built index. The mask of removed rows is not saved. Returns False
        if a row was wiped meanwhile: the file would have had it.
        """
        with self._lock:
            built, wipes = (None if self._stale else self.built), self._wipes
        if built is None:
            path.unlink(missing_ok=True)
            return True
        body = built.rows.tobytes(), faiss.serialize_index(built.index).data
        digest = hashlib.sha256()
        for part in body:
            digest.update(part)
        head = {**self._settings(), "owner": owner, "rows": len(built.rows), "trained_on": built.trained_on}
        aside = path.with_suffix(".aside")
        with open(aside, "wb") as file:
            os.chmod(aside, 0o600)
            file.write(json.dumps({**head, "sha256": digest.hexdigest()}).encode() + b"\n")
            for part in body:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        with self._lock:
            if self._wipes != wipes:
                aside.unlink()
                return False
            os.replace(aside, path)
        return True

    def load(self, path: Path, owner: str, present: np.ndarray) -> bool:
        """Load the built index from ``path``; rows that are not in ``present`` (int64) are masked.

        Returns False if the file is missing, damaged, or has other settings or another owner: the index is then rebuilt.
        """
        if self.config.index == "flat" or not path.is_file():
            return False
        with open(path, "rb") as file:
            try:
                head = json.loads(file.readline(65536))
            except ValueError:
                return False
            if (
                not isinstance(head, dict)
                or {k: head.get(k) for k in self._settings()} != self._settings()
                or head["owner"] != owner
            ):
                return False
            body = np.fromfile(file, np.uint8)
        if hashlib.sha256(body.data).hexdigest() != head["sha256"]:
            return False
        size = 8 * int(head["rows"])
        built = Built(self.config, faiss.deserialize_index(body[size:]), body[:size].view(np.int64).copy())
        built.trained_on = int(head["trained_on"])
        for row in np.setdiff1d(built.rows, present).tolist():
            built.remove(row)
        self.built = built
        return True


def _lower_priority() -> None:
    """Lower the scheduling priority of this thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _no_results(n: int, k: int) -> Neighbours:
    return np.zeros((n, k), np.float32), np.full((n, k), -1, np.int64)
