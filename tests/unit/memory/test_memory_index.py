"""The index: exact up to a size, near it where it is approximate, and never a vector that was removed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from memory_entries import entries, vectors

from pixelis.config import MemoryConfig
from pixelis.memory import Shard
from pixelis.memory import index as index_module
from pixelis.memory.index import Index

KINDS = ("flat", "hnsw", "ivf")
METRICS = ("cosine", "euclidean", "manhattan")


def config(index: str = "flat", metric: str = "cosine") -> MemoryConfig:
    return MemoryConfig(index=index, metric=metric)  # type: ignore[arg-type]


def similarity(metric: str, stored: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Similarities [n, stored] by NumPy in float64."""
    stored, queries = stored.astype(float), queries.astype(float)
    if metric == "cosine":
        return (
            queries @ stored.T / (np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(stored, axis=1))
        )
    difference = queries[:, None] - stored
    return -np.sqrt((difference**2).sum(2)) if metric == "euclidean" else -np.abs(difference).sum(2)


def few_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for which some hundred vectors are many."""
    monkeypatch.setattr(index_module, "MAX_EXACT", 200)
    monkeypatch.setattr(index_module, "IVF_LISTS", 0.4)
    monkeypatch.setattr(index_module, "IVF_PROBED", 0.75)


def built(kind: str, metric: str, stored: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> Index:
    """An index of ``stored`` under the rows from 100, all but the last 50 in its approximate part."""
    few_vectors(monkeypatch)
    index = Index(config(kind, metric), stored.shape[1])
    index.add(range(100, 50 + len(stored)), stored[:-50])
    index.build()
    index.add(range(50 + len(stored), 100 + len(stored)), stored[-50:])
    assert (index.approximate is None) == (kind == "flat")
    assert len(index) == len(stored)
    return index


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_nearest_by_every_kind_and_metric(kind: str, metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, queries = vectors(600, 24), vectors(40, 24, seed=3)
    result, rows = built(kind, metric, stored, monkeypatch).search(queries, 10)
    expected = similarity(metric, stored, queries)
    # Distances of close vectors lose digits where FAISS subtracts large numbers.
    np.testing.assert_allclose(
        result, np.take_along_axis(expected, rows - 100, 1), atol=2e-3 if metric == "euclidean" else 1e-4
    )
    assert (np.diff(result, axis=1) <= 1e-6).all()
    recall = np.mean(
        [len(set(np.argsort(-e)[:10] + 100) & set(r)) / 10 for e, r in zip(expected, rows, strict=True)]
    )
    assert recall >= (1.0 if kind == "flat" else 0.95)


@pytest.mark.parametrize("kind", KINDS)
def test_removed_vectors_never_come_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = vectors(400, 24)
    index = built(kind, "cosine", stored, monkeypatch)
    removed = set(range(100, 500, 7))
    for _ in range(2):  # removing again changes nothing
        index.remove([*removed, 12345])
        assert len(index) == 400 - len(removed)
    result, rows = index.search(stored, 20)
    assert not removed & set(rows.ravel().tolist())
    assert np.isfinite(result[rows >= 0]).all()
    others = [row for row in range(100, 500) if row not in removed]
    assert (rows[np.array(others) - 100, 0] == others).mean() >= (1.0 if kind == "flat" else 0.98)
    index.remove(range(100, 500))
    assert len(index) == 0
    assert (index.search(stored[:2], 5)[1] == -1).all()
    index.add(range(500, 510), vectors(10, 24, seed=4))
    assert set(index.search(stored[:1], 10)[1][0]) == set(range(500, 510))


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_a_large_shard_opens_with_an_approximate_index(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = entries(300)
    shard = Shard(tmp_path, config(kind))
    shard.add(given[:250])
    assert shard._index.approximate is None, "search is exact until the next start"
    shard.close()
    few_vectors(monkeypatch)
    (tmp_path / "index.built").write_bytes(b"left by an earlier release")
    shard = Shard(tmp_path, config(kind))
    assert shard._index.approximate is not None
    assert not (tmp_path / "index.built").exists(), "it may hold vectors that are deleted"
    shard.add(given[250:])
    shard.delete(["e3"])
    names = [line[0][0] for line in shard.search(np.stack([e.vector for e in given]), 1)]
    assert "e3" not in names
    assert np.mean([name == f"e{i}" for i, name in enumerate(names)]) >= 0.98
    assert shard.stats()["vectors"] == 299
    shard.close()
