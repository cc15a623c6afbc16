"""One memory shard: what is added stays, what goes is gone everywhere, and reopening changes nothing."""

from __future__ import annotations

import json
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from memory_entries import PNG, Opened, entries, listed, made, vectors, wait_for

from pixelis.config import MemoryConfig
from pixelis.errors import BadInput, InfraFailure, MissingFile
from pixelis.memory import Entry, Shard
from pixelis.records import Experience, Feedback
from pixelis.records.vectors import unit

DAY = 86_400.0


def ids(shard: Shard) -> list[str]:
    return sorted(e.id for e in listed(shard, 1000))


def test_reopening_restores_five_records_and_one_more(opened: Opened) -> None:
    given = entries(6)
    given[0].pictures = {"img0": PNG + b"0", "obs1": PNG + b"1"}
    shard = opened()
    assert shard.add(given[:5]) == [True] * 5
    shard = opened()
    assert shard.add(given[5:]) == [True]
    shard = opened()
    assert len(shard) == 6
    assert shard.get([f"e{i}" for i in range(6)]) == [e.experience for e in given]
    assert shard.pictures("e0") == given[0].pictures
    match = shard.search(np.stack([e.vector for e in given]), 1)
    assert [line[0][0] for line in match] == [f"e{i}" for i in range(6)]
    assert [line[0][1] for line in match] == pytest.approx([1.0] * 6, abs=1e-6)


def test_a_known_id_is_refused_and_nothing_of_it_changes(shard: Shard) -> None:
    first, other = entries(1)[0], Entry(made(0, policy_version=9), vectors(1, seed=5)[0])
    assert shard.add([first, other]) == [True, False], "also within one call"
    assert shard.add([other]) == [False]
    assert shard.get(["e0", "e1"]) == [first.experience, None]
    assert len(shard) == 1


def test_a_full_shard_keeps_the_newest_five_of_ten(opened: Opened) -> None:
    shard = opened(capacity=5)
    given = entries(10)
    for entry in given:
        shard.add([entry])
    assert ids(shard) == [f"e{i}" for i in range(5, 10)]
    match = shard.search(np.stack([e.vector for e in given]), 10)
    assert all({name for name, _ in line} == {f"e{i}" for i in range(5, 10)} for line in match), (
        "k beyond the size gives all"
    )
    shard = opened(capacity=5)
    assert shard.add(entries(12, first=20)) == [True] * 12, "more than there is room for, in one call"
    assert ids(shard) == [f"e{i}" for i in range(27, 32)]
    assert shard.stats()["added"] == 22


@pytest.mark.parametrize(
    ("confidence", "reward", "priority"), [(0.75, None, 0.1), (0.5, -1.0, 0.6), (1.0, 0.0, 0.01)]
)
def test_the_priority_of_a_new_experience(
    opened: Opened, confidence: float, reward: float | None, priority: float
) -> None:
    new = made(1).model_dump(exclude={"priority"})
    new["verdict"]["confidence"], new["trajectory"]["reward"] = confidence, reward
    shard = opened()
    shard.add([Entry(Experience(**new))])
    assert shard.get(["e1"])[0].priority == pytest.approx(priority)


def test_by_priority_the_least_makes_room(opened: Opened) -> None:
    shard = opened(capacity=3, evict="priority")
    for number, priority in enumerate([0.9, 0.1, 0.5, 0.3, 0.7]):
        shard.add([Entry(made(number, priority=priority), vectors(1, seed=number)[0])])
    assert ids(shard) == ["e0", "e2", "e4"]
    shard.add(entries(1, first=8))
    assert ids(shard) == ["e0", "e4", "e8"]


def test_writers_at_once_share_commits(shard: Shard) -> None:
    shard.add(entries(1))
    before, held, started = shard.database.commits, threading.Event(), threading.Event()
    # While one change holds the writer, the others come together.
    with ThreadPoolExecutor(21) as pool:
        first = pool.submit(shard.database.write, lambda db: (held.set(), started.wait(60)))
        assert held.wait(60), "or the writer takes others along with it"
        rest = [pool.submit(shard.add, [entry]) for entry in entries(20, first=100)]
        wait_for(lambda: shard.database._pending.qsize() == 20)
        started.set()
        assert first.result()
        assert [r.result() for r in rest] == [[True]] * 20
    assert shard.database.commits == before + 2
    assert len(shard) == len(ids(shard)) == 21


def test_one_bad_change_does_not_take_its_neighbours_along(shard: Shard) -> None:
    shard.add(entries(2))
    cases = [
        (np.ones(5, np.float32), "bad_vector"),
        (np.full(16, np.nan, np.float32), "bad_vector"),
        (np.zeros(16, np.float32), "bad_vector"),
    ]
    for vector, code in cases:
        with pytest.raises(BadInput) as caught:
            shard.add([*entries(1, first=50), Entry(made(51), vector)])
        assert caught.value.code == code
    with pytest.raises(BadInput, match="PNG"):
        shard.add([Entry(made(52), vectors(1)[0], {"img0": b"GIF89a"})])
    assert ids(shard) == ["e0", "e1"]
    with pytest.raises(BadInput):
        shard.search(np.ones((1, 5)), 3)
    assert shard.add([Entry(made(60))]) == [True], "without a vector it is kept and never found"
    assert len(shard.search(vectors(1), 9)[0]) == 2


def test_success_counts_once_for_each_retrieval(shard: Shard) -> None:
    shard.add(entries(3))
    for _ in range(2):
        shard.retrieved("r1", ["e0", "e1", "gone"])
        assert shard.succeeded("r1", ["e0"]) in (0, 1)
    assert shard.succeeded("r1", ["e0", "gone"]) == 0
    assert shard.succeeded("r2", ["e0"]) == 1, "the count of its retrieval was lost; it is one all the same"
    (zero, one, two) = shard.get(["e0", "e1", "e2"])
    assert (zero.retrievals, zero.successes) == (2, 2)
    assert (one.retrievals, one.successes) == (1, 0)
    assert (two.retrievals, two.successes) == (0, 0)


def test_a_draw_is_without_replacement_and_by_weight(shard: Shard) -> None:
    shard.add([Entry(made(i, priority=p)) for i, p in enumerate([0.01, 1.0, 1.0, 1.0])])
    for number in range(10):
        shard.retrieved(f"r{number}", ["e2", "e3"])
        shard.succeeded(f"r{number}", ["e3"])
    rng = np.random.default_rng(0)
    drawn = [[name for _, name in shard.draw(3, rng)] for _ in range(300)]
    assert all(len(set(line)) == 3 for line in drawn)
    first = {name: sum(line[0] == name for line in drawn) / 300 for name in ("e0", "e1", "e2", "e3")}
    weights = {"e0": 0.01, "e1": 1.0, "e2": 0.7, "e3": 1.0}
    for name, weight in weights.items():
        assert first[name] == pytest.approx(weight / 2.71, abs=0.09)
    assert sorted(name for _, name in shard.draw(99, rng)) == ["e0", "e1", "e2", "e3"]
    assert shard.draw(99, rng, "processed") == []
    shard.learnt(["e1", "e3"])
    assert sorted(name for _, name in shard.draw(99, rng, "processed")) == ["e1", "e3"]


def test_answers_of_withdrawn_versions_are_marked_as_failed(opened: Opened, shard: Shard) -> None:
    for version in (1, 2, 3):
        shard.add([Entry(made(version, policy_version=version))])
    assert shard.withdraw([2, 3]) == 2
    shard = opened()
    late = [Entry(made(7, policy_version=3)), Entry(made(8, policy_version=4))]
    shard.add(late)  # was on its way when the version was withdrawn

    def status() -> list[str]:
        return [known.status for known in shard.get(["e1", "e2", "e3", "e7", "e8"]) if known is not None]

    assert status() == ["pending", "failed", "failed", "failed", "pending"]
    assert shard.withdraw([2]) == 0
    assert status() == ["pending", "failed", "pending", "pending", "pending"], "version 3 serves again"


def test_feedback_is_kept(opened: Opened, shard: Shard) -> None:
    shard.add([Entry(made(0, feedback=[Feedback(comment="first")]))])
    said = Feedback(correct=False, answer="8", created_at=5.0)
    for _ in range(2):
        assert shard.feedback("e0", said).feedback == [Feedback(comment="first"), said]
    shard = opened()
    (now,) = shard.get(["e0"])
    assert now.feedback[1] == said
    with pytest.raises(BadInput) as caught:
        shard.feedback("x", said)
    assert caught.value.code == "unknown_experience"


def test_a_deleted_experience_is_in_no_file(opened: Opened, shard: Shard, tmp_path: Path) -> None:
    secret = np.linspace(1.0, 2.0, 16).astype(np.float32)
    for number in range(12):
        user = "someone" if number % 2 else "other"
        picture = {"img0": PNG + b"THE-PICTURE"} if number == 1 else {}
        shard.add(
            [Entry(made(number, user=user), secret if number == 1 else vectors(1, seed=number)[0], picture)]
        )
    shard.feedback("e1", Feedback(comment="THE-COMMENT"))
    shard.retrieved("r", ["e1"])
    shard = opened()
    assert shard.delete_user("someone") == [f"e{i}" for i in range(1, 12, 2)]
    assert ids(shard) == sorted(f"e{i}" for i in range(0, 12, 2))
    assert listed(shard, 99, user="someone") == []
    assert shard.pictures("e1") == {}
    assert {name for name, _ in shard.search(secret[None], 12)[0]} == set(ids(shard))
    shard.close()
    unit = (secret / np.linalg.norm(secret)).astype(np.float32)
    for file in tmp_path.iterdir():
        content = file.read_bytes()
        for trace in (b"THE-PICTURE", b"THE-COMMENT", b'"id":"e1"', secret.tobytes(), unit.tobytes()):
            assert trace not in content, f"{trace[:20]!r} in {file.name}"


def test_old_experiences_are_pruned_and_noted(opened: Opened, tmp_path: Path) -> None:
    shard = opened(retention_days=90)
    shard.add([Entry(made(i, created_at=i * DAY), vectors(1, seed=i)[0]) for i in range(5)])
    assert shard.prune(92 * DAY) == ["e0", "e1"]
    assert shard.prune(92 * DAY) == []
    assert ids(shard) == ["e2", "e3", "e4"]
    assert sorted(name for name, _ in shard.search(vectors(1), 5)[0]) == ids(shard)
    lines = [json.loads(line) for line in (tmp_path / "pruning.jsonl").read_text().splitlines()]
    assert lines == [{"time": 92 * DAY, "retention_days": 90.0, "count": 2, "ids": ["e0", "e1"]}]


def test_a_search_finds_the_nearest_of_a_user_with_the_words(shard: Shard) -> None:
    texts = ["Which digit is in the red frame?", "How many cards are RED?", "Which card is predicted?"]
    given = entries(300)
    for i, entry in enumerate(given):
        question = entry.experience.question.model_copy(update={"question": texts[i % 3]})
        owner = ("key.anna", "key.bob", None)[i % 7 % 3]
        given[i] = Entry(
            entry.experience.model_copy(update={"question": question, "user": owner}), entry.vector
        )
    shard.add(given)
    similarity = unit(np.stack([e.vector for e in given])) @ unit(given[5].vector)

    def nearest(k: int, user: str | None, *kinds: int) -> list[str]:
        order = np.argsort(-similarity, kind="stable").tolist()
        owned = [
            i
            for i in order
            if i % 3 in kinds and (user is None or (given[i].experience.user or "").startswith(user))
        ]
        return [given[i].experience.id for i in owned[:k]]

    def found(k: int, user: str | None, text: str) -> list[str]:
        (line,) = shard.search(given[5].vector[None], k, user, text)
        return [name for name, _ in line]

    assert found(4, None, "") == nearest(4, None, 0, 1, 2)
    assert found(9, "key.anna", "") == nearest(9, "key.anna", 0, 1, 2)
    assert found(500, "key.", "") == nearest(500, "key.", 0, 1, 2)
    assert found(5, None, "red") == nearest(5, None, 0, 1)  # "predicted" has no word that begins so
    assert found(5, None, "Dig RED") == nearest(5, None, 0)
    assert found(5, "key.bob", "dig") == nearest(5, "key.bob", 0)
    assert found(5, None, "nothing") == found(5, "key.carla", "") == []


def test_pages_miss_nothing_made_at_the_same_moment(shard: Shard) -> None:
    shard.add([Entry(made(i, created_at=float(i // 4))) for i in range(12)])
    pages, after = [], None
    while page := listed(shard, 3, after=after):
        pages += [e.id for e in page]
        after = (page[-1].created_at, page[-1].id)
    assert pages == [e.id for e in listed(shard, 12)]
    assert sorted(pages) == sorted(f"e{i}" for i in range(12))


def test_parquet_brings_everything_back(tmp_path: Path) -> None:
    import pyarrow.parquet

    shard = Shard(tmp_path / "a", MemoryConfig())
    given = entries(7)
    given[2].pictures = {"img0": PNG + b"x"}
    given[3].vector = None
    shard.add(given)
    shard.feedback("e1", Feedback(correct=True))
    shard.succeeded("r", ["e1"])
    assert shard.export(tmp_path / "out" / "all.parquet") == 7
    other = Shard(tmp_path / "b", MemoryConfig())
    other.add(given[:1])
    assert other.load(tmp_path / "out" / "all.parquet") == 6
    assert other.load(tmp_path / "out" / "all.parquet") == 0
    names = [f"e{i}" for i in range(7)]
    assert other.get(names) == shard.get(names)
    assert other.pictures("e2") == given[2].pictures
    query = vectors(3, seed=9)
    assert other.search(query, 7) == shard.search(query, 7)
    table = pyarrow.parquet.read_table(
        tmp_path / "out" / "all.parquet", columns=["id", "answer", "successes"]
    )
    assert table.to_pydict()["successes"] == [0, 1, 0, 0, 0, 0, 0]
    pyarrow.parquet.write_table(table, tmp_path / "foreign.parquet")
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "out" / "all.parquet").read_bytes()[:-9])
    for name in ("foreign", "torn"):
        with pytest.raises(BadInput):
            other.load(tmp_path / f"{name}.parquet")
    with pytest.raises(MissingFile):
        other.load(tmp_path / "none.parquet")
    shard.close()
    other.close()


def test_one_process_holds_a_folder_and_damage_is_said(tmp_path: Path) -> None:
    from pixelis.memory.database import Database

    shard = Shard(tmp_path / "a", MemoryConfig())
    with pytest.raises(InfraFailure) as caught:
        Database(tmp_path / "a", wait_s=0.05)
    assert caught.value.code == "locked"
    shard.close()
    with pytest.raises(InfraFailure):
        shard.add(entries(1))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "shard.sqlite").write_bytes(b"this is no database" * 1000)
    with pytest.raises(InfraFailure) as caught:
        Shard(tmp_path / "b", MemoryConfig())
    assert caught.value.code == "damaged"
    for schema in (2, 99):
        with sqlite3.connect(tmp_path / "a" / "shard.sqlite") as db:
            db.execute(f"PRAGMA user_version = {schema}")
        db.close()
        with pytest.raises(BadInput, match=f"has schema {schema}") as wrong:
            Shard(tmp_path / "a", MemoryConfig())
        assert wrong.value.code == "bad_schema"


def test_reads_do_not_wait_for_a_commit(shard: Shard) -> None:
    shard.add(entries(5))
    inside, go = threading.Event(), threading.Event()

    def slow(db: sqlite3.Connection) -> bool:
        db.execute("UPDATE experiences SET priority = 9")
        inside.set()
        return go.wait(30)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(shard.database.write, slow)
        assert inside.wait(30)
        assert shard.get(["e1"])[0].priority == 0.1, "and see what was committed"
        assert len(shard.search(vectors(1), 5)[0]) == 5
        assert shard.stats()["size"] == 5
        go.set()
        assert writing.result()
    assert shard.get(["e1"])[0].priority == 9
