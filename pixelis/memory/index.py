"""The vector index of one shard, derived from the database: nearest rows by FAISS.

``flat`` is exact. ``hnsw`` and ``ivf`` have two parts: what is built, and a flat tail of what is not yet, searched together. So
no add, restart or rebuild keeps a search waiting: ``maintain`` moves the tail into the built part in small steps, and builds anew
beside the running one when much of it is gone.
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

import faiss as _faiss
import numpy as np

from pixelis.config import MemoryConfig
from pixelis.memory.vectors import checked, unit

faiss: Any = _faiss
"""Its own type stubs know half of it."""
METRICS = {"cosine": faiss.METRIC_INNER_PRODUCT, "euclidean": faiss.METRIC_L2, "manhattan": faiss.METRIC_L1}
TAIL = 1024
"""Rows of the tail that wait for the built part."""
STEP = 32
"""Rows that go into the built part under one lock."""
GONE = 0.25
"""Share of the built part that may be gone before it is built anew."""
MOST_ON_GPU = 2048
"""Neighbours that FAISS finds on a GPU at most."""
TRAINED_BY = 39
"""Vectors a list of ``ivf`` at least, as FAISS asks of its clustering."""

Found = tuple[np.ndarray, np.ndarray]
"""Similarities float32 [n, k], best first, and rows int64 [n, k]; -1 where there is no more."""


class Flat:
    """All vectors, compared one by one. A removed row's place is taken by the last one."""

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

    def search(self, vectors: np.ndarray, k: int) -> Found:
        if not len(self):
            return _nothing(len(vectors), k)
        scores, places = self.index.search(vectors, k)
        return scores, np.where(places >= 0, self.rows[places], -1)


class Mirrored(Flat):
    """The same with a copy on a GPU that searches; the vectors here stay what counts, as a GPU's index cannot remove."""

    def __init__(self, width: int, metric: int):
        super().__init__(width, metric)
        self.resources = faiss.StandardGpuResources()
        self.copy = faiss.GpuIndexFlat(self.resources, width, metric)
        self.stale = False

    def remove(self, row: int) -> bool:
        removed = super().remove(row)
        self.stale |= removed
        return removed

    def search(self, vectors: np.ndarray, k: int) -> Found:
        if k > MOST_ON_GPU or not len(self):
            return super().search(vectors, k)
        if self.stale:
            self.copy.reset()
            self.stale = False
        if self.copy.ntotal < len(self):
            self.copy.add(self._values()[self.copy.ntotal :])
        scores, places = self.copy.search(vectors, k)
        return scores, np.where(places >= 0, self.rows[places], -1)


def flat(width: int, metric: int) -> Flat:
    """On a GPU when there is one and FAISS was built for it, else on the CPU."""
    return Mirrored(width, metric) if hasattr(faiss, "GpuIndexFlat") and faiss.get_num_gpus() else Flat(width, metric)


class Built:
    """A graph (``hnsw``) or inverted lists (``ivf``). Neither lets go of vectors: a removed one is masked out of every search."""

    def __init__(self, config: MemoryConfig, index: Any, rows: np.ndarray):
        self.config, self.index, self.rows = config, index, rows
        self.places = {int(row): place for place, row in enumerate(rows)}
        self.bits = np.full(len(rows) // 8 + 1, 255, np.uint8)
        self.trained_on = max(len(rows), 1)

    @classmethod
    def over(cls, config: MemoryConfig, vectors: np.ndarray) -> Built:
        """An empty one; ``ivf`` learns its lists from ``vectors``."""
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
    def gone(self) -> int:
        """Removed rows that still take place."""
        return len(self.rows) - len(self.places)

    def add(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        start = len(self.rows)
        self.index.add(vectors)
        self.rows = np.concatenate([self.rows, rows])
        self.places.update(zip(rows.tolist(), range(start, start + len(rows)), strict=True))
        more = len(self.rows) // 8 + 1 - len(self.bits)
        if more > 0:
            self.bits = np.concatenate([self.bits, np.full(more + len(self.bits) // 8, 255, np.uint8)])

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
            kept = faiss.downcast_index(self.index.storage)
            return faiss.rev_swig_ptr(kept.get_xb(), kept.ntotal * kept.d).reshape(kept.ntotal, kept.d)
        values = np.empty((len(self.rows), self.index.d), np.float32)
        for number in range(self.index.nlist):
            size = self.index.invlists.list_size(number)
            if size:
                ids = faiss.rev_swig_ptr(self.index.invlists.get_ids(number), size)
                codes = faiss.rev_swig_ptr(self.index.invlists.get_codes(number), size * self.index.d * 4)
                values[ids] = codes.view(np.float32).reshape(size, -1)
        return values

    def alive(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows that were not removed, and copies of their vectors."""
        places = np.fromiter(self.places.values(), np.int64, len(self.places))
        return self.rows[places], self._values()[places]

    def search(self, vectors: np.ndarray, k: int) -> Found:
        if not len(self):
            return _nothing(len(vectors), k)
        chosen = {"sel": faiss.IDSelectorBitmap(self.bits)} if self.gone else {}
        if self.config.index == "hnsw":
            how = faiss.SearchParametersHNSW(efSearch=max(self.config.hnsw.ef_search, k), **chosen)
        else:
            how = faiss.SearchParametersIVF(nprobe=self.config.ivf.nprobe, **chosen)
        scores, places = self.index.search(vectors, k, params=how)
        return scores, np.where(places >= 0, self.rows[places], -1)


class Index:
    """Vectors of one width by row number; safe to use from several threads."""

    def __init__(self, config: MemoryConfig, width: int):
        self.config, self.width = config, width
        self.metric = METRICS[config.metric]
        # A tail is short: a way to the GPU and back would take longer than it.
        self.tail = flat(width, self.metric) if config.index == "flat" else Flat(width, self.metric)
        self.built: Built | None = None
        self._lock = threading.RLock()
        self._draining = self._stale = False
        self._removed: set[int] | None = None
        """Rows removed while another built part is in the making."""
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        faiss.omp_set_num_threads(int(threads) if threads.isdigit() else 1)

    def __len__(self) -> int:
        with self._lock:  # a row that is on its way from the tail counts once
            return len(self.tail) + (len(self.built) if self.built is not None else 0)

    def _ready(self, vectors: np.ndarray) -> np.ndarray:
        cosine = self.config.metric == "cosine"
        vectors = checked(vectors, self.width, direction=cosine)
        return unit(vectors) if cosine else vectors

    def add(self, rows: Sequence[int], vectors: np.ndarray) -> None:
        """Add ``vectors`` float32 [n, width] under numbers that were never used here before."""
        vectors = self._ready(vectors)
        with self._lock:
            self.tail.add(np.asarray(rows, np.int64), vectors)

    def remove(self, rows: Sequence[int], wipe: bool = False) -> None:
        """Take rows out of all results; unknown ones are no error. ``wipe``: their values go from memory, too."""
        with self._lock:
            for row in rows:
                if not self.tail.remove(row) and self.built is not None and self.built.remove(row, wipe) and wipe:
                    self._stale |= self.config.index == "ivf"
                if self._removed is not None:
                    self._removed.add(row)

    def search(self, vectors: np.ndarray, k: int) -> Found:
        """The ``k`` nearest rows of each of ``vectors`` [n, width], and their similarity: cosine, or a negative distance."""
        vectors = self._ready(vectors)
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

    def _due(self) -> bool:
        """True when the built part has to be made (anew)."""
        if self.config.index == "flat":
            return False
        if self.built is None:
            least = TAIL if self.config.index == "hnsw" else TRAINED_BY * self.config.ivf.nlist
            return len(self.tail) >= least
        outgrown = self.config.index == "ivf" and len(self) > 4 * self.built.trained_on
        return self._stale or outgrown or self.built.gone > GONE * len(self.built.rows)

    def maintain(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """One step of housekeeping, by one thread at a time; True when there is more to do."""
        if self._due():
            return self._build(stop)
        with self._lock:
            if self.built is None:
                return False
            waiting = len(self.tail)
            self._draining = bool(waiting) and (self._draining or waiting >= TAIL)
            if not self._draining:
                return False
            rows = self.tail.rows[max(0, waiting - STEP) : waiting].copy()
            self.built.add(rows, self.tail.take(rows.tolist()))
            for row in rows.tolist():
                self.tail.remove(row)
            return True

    def _build(self, stop: Callable[[], bool]) -> bool:
        with self._lock:
            tail = np.fromiter(self.tail.places, np.int64, len(self.tail))
            parts = [(tail, self.tail.take(tail.tolist()))] + ([self.built.alive()] if self.built else [])
            rows, vectors = (np.concatenate(columns) for columns in zip(*parts, strict=True))
            self._removed, self._stale = set(), False
        if len(rows) == 0:
            with self._lock:
                self.built, self._removed = None, None
            return False
        fresh = None
        if self._enough(len(rows)):
            with ThreadPoolExecutor(1, initializer=_behind) as pool:
                fresh = pool.submit(self._made, rows, vectors, stop).result()
            if fresh is None:
                self._removed = None
                return False
        with self._lock:
            kept = fresh.places if fresh is not None else {}
            later = [row for row in self.tail.places if row not in kept]
            tail_now = Flat(self.width, self.metric)
            if later:
                tail_now.add(np.asarray(later, np.int64), self.tail.take(later))
            if fresh is None:
                alive = [
                    place for place, row in enumerate(rows.tolist()) if row not in self._removed and row not in tail_now.places
                ]
                tail_now.add(rows[alive], vectors[alive])
            else:
                for row in self._removed:
                    fresh.remove(row, wipe=True)
            self.tail, self.built, self._removed = tail_now, fresh, None
        return True

    def _made(self, rows: np.ndarray, vectors: np.ndarray, stop: Callable[[], bool]) -> Built | None:
        """Another built part, in steps between which it may be stopped: None then. Nobody waits for it."""
        fresh = Built.over(self.config, vectors)
        for start in range(0, len(rows), STEP):
            if stop():
                return None
            fresh.add(rows[start : start + STEP], vectors[start : start + STEP])
        return fresh

    def _enough(self, count: int) -> bool:
        return self.config.index == "hnsw" or count >= TRAINED_BY * self.config.ivf.nlist

    # --- the built part as a file -------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        c = self.config
        shape = [c.hnsw.M, c.hnsw.ef_construction] if c.index == "hnsw" else [c.ivf.nlist]
        return {"index": c.index, "metric": c.metric, "width": self.width, "shape": shape, "faiss": faiss.__version__}

    def save(self, path: Path, owner: str) -> None:
        """Write the built part aside and rename it into place; ``owner`` names the database that it belongs to.

        Called by the thread that maintains: only that one adds to the built part, and what is masked is not in the file.
        """
        built = self.built
        if built is None:
            path.unlink(missing_ok=True)
            return
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
        os.replace(aside, path)

    def load(self, path: Path, owner: str, present: np.ndarray) -> bool:
        """Take the built part from ``path`` if it fits; rows that are not among ``present`` (int64) are masked.

        False when there is none, when it is of other settings or another database, or damaged: it is then built anew.
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


def _behind() -> None:
    """Give this thread what processor time others leave."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _nothing(n: int, k: int) -> Found:
    return np.zeros((n, k), np.float32), np.full((n, k), -1, np.int64)
