"""The index: exact where it says so, near it where it is approximate, and never a vector that is gone."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from memory_entries import entries, vectors, wait_for

from pixelis.config import MemoryConfig
from pixelis.memory import Shard
from pixelis.memory import index as index_module
from pixelis.memory.index import Index
from pixelis.records.vectors import unit

KINDS = ("flat", "hnsw", "ivf")
METRICS = ("cosine", "euclidean", "manhattan")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that a few hundred vectors fill."""
    monkeypatch.setattr(index_module, "TAIL", 64)
    monkeypatch.setattr(index_module, "MIN_PER_LIST", 20)


def config(index: str = "flat", metric: str = "cosine") -> MemoryConfig:
    return MemoryConfig(index=index, metric=metric, ivf={"nlist": 8, "nprobe": 6}, hnsw={"M": 16})  # type: ignore[arg-type]


def truth(metric: str, stored: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Similarities [n, stored] by NumPy in float64."""
    stored, queries = stored.astype(float), queries.astype(float)
    if metric == "cosine":
        lengths = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(stored, axis=1)
        return queries @ stored.T / lengths
    difference = queries[:, None] - stored
    return -np.sqrt((difference**2).sum(2)) if metric == "euclidean" else -np.abs(difference).sum(2)


def settle(index: Index) -> None:
    while index.maintain():
        pass


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_nearest_by_every_kind_and_metric(kind: str, metric: str) -> None:
    stored, queries = vectors(600, 24), vectors(40, 24, seed=3)
    index = Index(config(kind, metric), 24)
    index.add(range(100, 700), stored)
    settle(index)
    assert (index.built is None) == (kind == "flat")
    assert len(index) == 600
    result, rows = index.search(queries, 10)
    expected = truth(metric, stored, queries)
    best = -np.sort(-expected, axis=1)[:, :10]
    # Distances of close vectors lose digits where FAISS subtracts large numbers.
    np.testing.assert_allclose(result, np.take_along_axis(expected, rows - 100, 1), atol=2e-3 if metric == "euclidean" else 1e-4)
    assert (np.diff(result, axis=1) <= 1e-6).all()
    recall = np.mean([len(set(np.argsort(-e)[:10] + 100) & set(r)) / 10 for e, r in zip(expected, rows, strict=True)])
    assert recall >= (1.0 if kind == "flat" else 0.95)
    if kind == "flat":
        np.testing.assert_allclose(result, best, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_removed_entries_never_come_back(kind: str) -> None:
    stored = vectors(400, 24)
    index = Index(config(kind), 24)
    index.add(range(300), stored[:300])
    settle(index)
    index.add(range(300, 400), stored[300:])
    gone = set(range(0, 400, 7))
    index.remove([*gone, 12345])
    for _ in range(3):
        assert len(index) == 400 - len(gone)
        result, rows = index.search(stored, 20)
        assert not gone & set(rows.ravel().tolist())
        assert np.isfinite(result[rows >= 0]).all()
        kept = [i for i in range(400) if i not in gone]
        assert (rows[kept, 0] == kept).mean() >= (1.0 if kind == "flat" else 0.98)
        settle(index)
        more = list(range(0, 400, 3))
        index.remove(more)
        gone |= set(more)
    assert index.built is None or index.built.removed <= 0.25 * len(index.built.rows), "it is built anew when much is gone"


@pytest.mark.parametrize("kind", KINDS)
def test_all_may_go_and_others_come(kind: str) -> None:
    index = Index(config(kind), 24)
    index.add(range(300), vectors(300, 24))
    settle(index)
    index.remove(range(300))
    settle(index)
    assert len(index) == 0
    assert (index.search(vectors(2, 24), 5)[1] == -1).all()
    index.add(range(300, 310), vectors(10, 24, seed=4))
    assert set(index.search(vectors(1, 24), 10)[1][0]) == set(range(300, 310))


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_searches_and_changes_go_on_while_it_is_built_anew(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "STEP", 8)
    stored = vectors(900, 24)
    index = Index(config(kind), 24)
    index.add(range(500), stored[:500])
    settle(index)
    index.remove(range(0, 400, 2))
    stopped, start_result = threading.Event(), threading.Event()

    def step() -> bool:
        # In the middle of building: what happens now has to be in what is built.
        if not start_result.is_set():
            start_result.set()
            index.remove(range(401, 450))
            index.add(range(500, 900), stored[500:])
            index.remove(range(500, 520))
            assert len(set(index.search(stored[520:521], 5)[1][0])) == 5
        return stopped.is_set()

    assert index.maintain(step)
    kept = [*range(1, 400, 2), 400, *range(450, 500), *range(520, 900)]
    for _ in range(2):
        assert len(index) == len(kept)
        rows = index.search(stored[kept], 1)[1][:, 0]
        assert (rows == kept).mean() >= 0.98
        settle(index)
    stopped.set()
    index.remove(range(450, 800))
    assert not index.maintain(stopped.is_set), "an end in the middle leaves the running one as it is"
    assert (index.search(stored[800:], 1)[1][:, 0] == np.arange(800, 900)).mean() >= 0.98


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_the_built_part_comes_back_from_its_file(kind: str, tmp_path: Path) -> None:
    file, stored = tmp_path / "index.built", vectors(500, 24)
    index = Index(config(kind), 24)
    index.add(range(500), stored)
    settle(index)
    index.save(file, "owner")
    repeated = Index(config(kind), 24)
    present = np.array([r for r in range(500) if r % 5])
    assert repeated.load(file, "owner", present)
    index.remove(range(0, 500, 5))
    for one, other in zip(index.search(stored, 9), repeated.search(stored, 9), strict=True):
        np.testing.assert_array_equal(one, other)
    content = bytearray(file.read_bytes())
    refused = {
        "another owner": (config(kind), "other", bytes(content)),
        "other settings": (config(kind, "euclidean"), "owner", bytes(content)),
        "torn": (config(kind), "owner", bytes(content[:-100])),
        "no header": (config(kind), "owner", b"\x80\x04]"),
        "empty": (config(kind), "owner", b""),
    }
    content[len(content) // 2] ^= 1
    refused["a flipped bit"] = (config(kind), "owner", bytes(content))
    for why, (settings, owner, body) in refused.items():
        file.write_bytes(body)
        fresh = Index(settings, 24)
        assert not fresh.load(file, owner, present), why
        assert fresh.built is None
    assert not Index(config(kind), 24).load(tmp_path / "none", "owner", present)


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_a_shard_opens_with_its_built_index_and_what_came_after(kind: str, tmp_path: Path) -> None:
    given = entries(300)
    shard = Shard(tmp_path, config(kind))
    shard.add(given[:250])
    shard.close()
    shard = Shard(tmp_path, config(kind))  # the keeper may have been ended before it built
    wait_for(lambda: shard.stats()["waiting_for_index"] < 64)
    shard.close()
    assert (tmp_path / "index.built").is_file()
    built = (tmp_path / "index.built").read_bytes()
    shard = Shard(tmp_path, config(kind))
    assert shard.stats()["waiting_for_index"] < 64
    shard.add(given[250:])
    shard.delete(["e3"])
    shard.close()
    # As after a crash: the file is older than the database.
    (tmp_path / "index.built").write_bytes(built)
    shard = Shard(tmp_path, config(kind))
    names = [line[0][0] for line in shard.search(np.stack([e.vector for e in given]), 1)]
    assert "e3" not in names
    assert np.mean([name == f"e{i}" for i, name in enumerate(names)]) >= 0.98
    assert shard.stats()["vectors"] == 299
    shard.close()


def test_a_wiped_vector_is_zero_in_the_graph() -> None:
    stored = vectors(200, 24)
    index = Index(config("hnsw"), 24)
    index.add(range(200), stored)
    settle(index)
    index.remove([7], wipe=True)
    assert index.built is not None
    values = index.built._values()
    assert (values[index.built.rows.tolist().index(7)] == 0).all()
    assert not (np.abs(values - unit(stored[7])).max(1) < 1e-6).any()


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_a_vector_deleted_while_the_index_is_written_is_not_in_the_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, index, file = vectors(200, 24), Index(config(kind), 24), tmp_path / "index.built"
    index.add(range(200), stored)
    settle(index)
    serialize = index_module.faiss.serialize_index

    def delete_then(built: object) -> object:
        written = serialize(built)
        index.remove([7], wipe=True)
        return written

    with monkeypatch.context() as patch:
        patch.setattr(index_module.faiss, "serialize_index", delete_then)
        assert not index.save(file, "owner")
    assert not list(tmp_path.iterdir())
    settle(index)
    assert index.save(file, "owner")
    assert unit(stored[7:8]).tobytes() not in file.read_bytes()


@pytest.mark.parametrize("stops", [False, True])
def test_a_vector_deleted_while_lists_are_built_is_in_no_file(tmp_path: Path, stops: bool) -> None:
    stored, index, file = vectors(400, 24), Index(config("ivf"), 24), tmp_path / "index.built"
    index.add(range(400), stored)
    if stops:
        settle(index)
        index.remove([7], wipe=True)

    def during() -> bool:
        index.remove([7], wipe=True)
        return stops

    assert index.maintain(during) is not stops
    index.save(file, "owner")
    assert not file.exists(), "these lists still have the vector"
    settle(index)
    index.save(file, "owner")
    assert unit(stored[7:8]).tobytes() not in file.read_bytes()
    assert 7 not in index.search(stored[7:8], 20)[1]


def test_a_row_on_its_way_into_the_built_part_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "STEP", 4)
    index = Index(config("hnsw"), 24)
    stored, seen, done = vectors(1200, 24), set(), threading.Event()
    index.add(range(600), stored[:600])

    def count() -> None:
        while not done.is_set():
            seen.add(len(index))

    counting = threading.Thread(target=count)
    counting.start()
    settle(index)
    index.add(range(600, 1200), stored[600:])
    settle(index)
    done.set()
    counting.join()
    assert seen <= {600, 1200}
