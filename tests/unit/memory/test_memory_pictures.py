"""Pictures of experiences."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_entries import PNG, Opened, made

from pixelis.config import MemoryConfig
from pixelis.memory import Entry, Shard
from pixelis.memory.database import connect

CONTENTS = [PNG + random.Random(i).randbytes(3000) for i in range(4)]
CHANGES = st.one_of(
    st.tuples(
        st.just("add"),
        st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 3), max_size=3)), max_size=4),
    ),
    st.tuples(st.just("delete"), st.lists(st.integers(0, 12), max_size=4)),
    st.tuples(st.just("user"), st.integers(0, 1)),
    st.tuples(st.just("reopen"), st.none()),
)


def stored(folder: Path) -> list[bytes]:
    """The contents in the table of pictures."""
    with connect(folder / "shard.sqlite") as db:
        result = [png for (png,) in db.execute("SELECT png FROM pictures")]
    db.close()
    return result


def showing(number: int, *contents: int, user: str | None = None) -> Entry:
    return Entry(
        made(number, user=user), None, {f"img{i}": CONTENTS[content] for i, content in enumerate(contents)}
    )


def test_a_picture_of_several_experiences_is_stored_once(shard: Shard, tmp_path: Path) -> None:
    assert shard.add([showing(0, 0, 1), showing(1, 0), showing(2, 0, 0), showing(3)]) == [True] * 4
    assert sorted(stored(tmp_path)) == sorted(CONTENTS[:2])
    assert shard.pictures("e0") == {"img0": CONTENTS[0], "img1": CONTENTS[1]}
    assert shard.pictures("e2") == {"img0": CONTENTS[0], "img1": CONTENTS[0]}
    assert shard.pictures("e3") == shard.pictures("unknown") == {}
    shard.export(tmp_path / "all.parquet")
    other = Shard(tmp_path / "other", MemoryConfig())
    assert other.load(tmp_path / "all.parquet") == 4
    assert sorted(stored(tmp_path / "other")) == sorted(CONTENTS[:2])
    assert [other.pictures(f"e{i}") for i in range(4)] == [shard.pictures(f"e{i}") for i in range(4)]
    other.close()


def test_a_picture_goes_with_the_last_user_who_showed_it(shard: Shard, tmp_path: Path) -> None:
    shard.add([showing(0, 0, 1, user="a"), showing(1, 0, user="b")])
    assert shard.delete_user("a") == ["e0"]
    assert stored(tmp_path) == CONTENTS[:1]
    assert (shard.pictures("e0"), shard.pictures("e1")) == ({}, {"img0": CONTENTS[0]})
    assert shard.delete_user("b") == ["e1"]
    shard.close()
    for file in tmp_path.iterdir():
        assert not any(content[8:] in file.read_bytes() for content in CONTENTS), file.name


def test_pictures_go_with_evicted_and_pruned_experiences(tmp_path: Path) -> None:
    shard = Shard(tmp_path, MemoryConfig(), capacity=2)
    shard.add([showing(0, 0), showing(1, 0, 1)])
    shard.add([showing(2, 2), showing(3, 3)])
    assert sorted(stored(tmp_path)) == sorted(CONTENTS[2:])
    shard.prune(3.5 + 86_400 * MemoryConfig().retention_days)
    assert stored(tmp_path) == []
    shard.close()


def test_a_shared_picture_that_is_damaged_is_named_for_all_and_replaced_by_the_next_add(
    opened: Opened,
    shard: Shard,
    tmp_path: Path,
) -> None:
    shard.add([showing(0, 0, 1), showing(1, 0), showing(2, 1)])
    shard.close()
    intact = (tmp_path / "shard.sqlite").read_bytes()
    damage = intact.replace(CONTENTS[0][20:40], bytes(20))
    assert damage != intact
    (tmp_path / "shard.sqlite").write_bytes(damage)
    shard = opened()
    assert shard.database.salvaged.without_pictures == ["e0", "e1"]
    assert [shard.pictures(f"e{i}") for i in range(3)] == [{"img1": CONTENTS[1]}, {}, {"img0": CONTENTS[1]}]
    with connect(tmp_path / "shard.sqlite") as db:  # while it is open
        db.execute("UPDATE pictures SET png = x'89'")
    db.close()
    assert shard.pictures("e2") == {}
    shard.add([showing(3, 1)])
    assert shard.pictures("e2") == shard.pictures("e3") == {"img0": CONTENTS[1]}


@pytest.mark.slow
@given(changes=st.lists(CHANGES, max_size=12), capacity=st.integers(2, 9))
@settings(max_examples=10)
def test_every_picture_of_an_experience_is_stored_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, changes: list, capacity: int
) -> None:
    folder, expected = tmp_path_factory.mktemp("pictures"), dict[int, dict[str, bytes]]()
    shard = Shard(folder, MemoryConfig(), capacity)
    try:
        for change, value in changes:
            if change == "add":
                added = [showing(number, *contents, user=f"u{number % 2}") for number, contents in value]
                for (number, _), entry, new in zip(value, added, shard.add(added), strict=True):
                    assert new == (number not in expected)
                    if new:
                        if len(expected) >= capacity:
                            del expected[next(iter(expected))]
                        expected[number] = entry.pictures
            elif change == "delete":
                shard.delete([f"e{number}" for number in value])
                expected = {number: pictures for number, pictures in expected.items() if number not in value}
            elif change == "user":
                shard.delete_user(f"u{value}")
                expected = {number: pictures for number, pictures in expected.items() if number % 2 != value}
            else:
                shard.close()
                shard = Shard(folder, MemoryConfig(), capacity)
                assert shard.damaged == 0
            assert {n: shard.pictures(f"e{n}") for n in range(13) if f"e{n}" in shard._rows} == expected
            distinct = {content for pictures in expected.values() for content in pictures.values()}
            assert sorted(stored(folder)) == sorted(distinct)
    finally:
        shard.close()
