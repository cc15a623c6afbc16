"""Whatever is added, deleted and evicted in whatever order: index and database agree."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pixelis.actors.memory import merge
from pixelis.actors.memory_shard import shard_of
from pixelis.config import MemoryConfig
from pixelis.memory import Entry, Shard
from pixelis.memory import index as index_module

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from memory_entries import entries, listed, made, vectors

KINDS = ("flat", "hnsw", "ivf")


def priority_of(number: int) -> int:
    return 1 + (number * 7) % 11


CHANGES = st.one_of(
    st.tuples(st.just("add"), st.lists(st.integers(0, 60), min_size=1, max_size=8)),
    st.tuples(st.just("delete"), st.lists(st.integers(0, 60), max_size=4)),
    st.tuples(st.just("prune"), st.integers(0, 30)),
    st.tuples(st.just("user"), st.integers(0, 2)),
    st.tuples(st.just("reopen"), st.none()),
)


@pytest.mark.slow
@given(
    count=st.integers(0, 60),
    shards=st.integers(1, 5),
    k=st.integers(1, 70),
    metric=st.sampled_from(["cosine", "euclidean", "manhattan"]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=10)
def test_shards_together_are_one_index(count: int, shards: int, k: int, metric: str, seed: int) -> None:
    config = MemoryConfig(metric=metric)  # type: ignore[arg-type]
    stored, queries = entries(count, 8, seed=seed), vectors(3, 8, seed=seed + 1)
    with tempfile.TemporaryDirectory() as folder:
        whole = Shard(Path(folder) / "whole", config)
        parts = [Shard(Path(folder) / str(i), config) for i in range(shards)]
        try:
            whole.add(stored)
            for entry in stored:
                parts[shard_of(entry.experience.id, shards)].add([entry])
            one = whole.search(queries, k)
            several = [part.search(queries, k) for part in parts]
        finally:
            for shard in [whole, *parts]:
                shard.close()
    for i, expected in enumerate(one):
        merged = merge([part[i] for part in several], k)
        assert [name for name, _ in merged] == [name for name, _ in expected]
        assert [s for _, s in merged] == pytest.approx([s for _, s in expected], abs=1e-5)
        assert len(merged) == min(k, count)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(
    changes=st.lists(CHANGES, max_size=14),
    evict=st.sampled_from(["fifo", "priority"]),
    capacity=st.integers(1, 40),
)
@settings(max_examples=10)
def test_index_and_database_stay_equal(kind: str, changes: list, evict: str, capacity: int) -> None:
    before = index_module.MAX_EXACT, index_module.IVF_LISTS
    index_module.MAX_EXACT, index_module.IVF_LISTS = 6, 0.8
    day = 86_400.0
    config = MemoryConfig(index=kind, evict=evict, retention_days=1)  # type: ignore[arg-type]
    known = vectors(61, 8)
    expected: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        shard = Shard(folder, config, capacity)
        try:
            for what, value in changes:
                if what == "add":
                    every = {n: {"user": f"u{n % 3}", "priority": priority_of(n)} for n in value}
                    members = [Entry(made(n, created_at=n * day, **every[n]), known[n]) for n in value]
                    new = shard.add(members)
                    for number, added in zip(value, new, strict=True):
                        assert added == (number not in expected)
                        if not added:
                            continue
                        if len(expected) >= capacity:
                            by_age = iter(expected)
                            first = next(by_age) if evict == "fifo" else min(expected, key=expected.get)
                            del expected[first]
                        expected[number] = priority_of(number)
                elif what == "delete":
                    assert shard.delete([f"e{n}" for n in value]) == len({n for n in value if n in expected})
                    expected = {n: p for n, p in expected.items() if n not in value}
                elif what == "prune":
                    out = {n for n in expected if n < value}
                    assert set(shard.prune((value + 1) * day)) == {f"e{n}" for n in out}
                    expected = {n: p for n, p in expected.items() if n not in out}
                elif what == "user":
                    out = {n for n in expected if n % 3 == value}
                    assert set(shard.delete_user(f"u{value}")) == {f"e{n}" for n in out}
                    expected = {n: p for n, p in expected.items() if n not in out}
                elif what == "reopen":
                    shard.close()
                    shard = Shard(folder, config, capacity)
                names = {f"e{n}" for n in expected}
                assert len(shard) == shard.stats()["size"] == shard.stats()["vectors"] == len(expected)
                assert {e.id for e in listed(shard, 99)} == names
                result = {name for line in shard.search(known, 61) for name, _ in line}
                assert result <= names
                if kind == "flat":
                    assert result == names
        finally:
            shard.close()
            index_module.MAX_EXACT, index_module.IVF_LISTS = before
