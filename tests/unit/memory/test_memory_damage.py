"""Damaged shard files."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from memory_entries import PNG, Opened, entries, listed, made, vectors

from pixelis.config import MemoryConfig
from pixelis.errors import BadInput, DataFailure, PixelisError
from pixelis.memory import Entry, Shard
from pixelis.memory import rows as rows_module
from pixelis.memory import shard as shard_module
from pixelis.memory.database import connect
from pixelis.memory.schema import prepare
from pixelis.records import Feedback

COUNT = 60


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Entry], Path]:
    """The file of a shard, its entries as an export shows them, and the export."""
    folder = tmp_path_factory.mktemp("intact")
    shard = Shard(folder, MemoryConfig())
    given = entries(COUNT)
    for number, entry in enumerate(given):
        entry.pictures = {"img0": PNG + random.Random(number).randbytes(3000)}
    shard.add(given)
    shard.feedback("e3", Feedback(comment="hm"))
    shard.retrieved("r", ["e4"])
    content = read_all(shard)
    shard.export(folder / "all.parquet")
    shard.close()
    return (folder / "shard.sqlite").read_bytes(), content, folder / "all.parquet"


def read_all(shard: Shard) -> list[Entry]:
    return [entry for chunk in shard.stored.entries(sorted(shard._ids)) for entry in chunk]


def same(one: Entry, other: Entry) -> bool:
    if one.vector is not None and not np.array_equal(one.vector, other.vector):
        return False
    return one.experience == other.experience and one.pictures.items() <= other.pictures.items()


def restore(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "shard.sqlite").write_bytes(content)
    return folder


@pytest.mark.slow
def test_a_flipped_bit_is_never_silent(
    intact: tuple[bytes, list[Entry], Path], tmp_path: Path, record_figures: Callable[..., None]
) -> None:
    content, expected, export = intact
    by_id, rng, outcomes = {e.experience.id: e for e in expected}, random.Random(7), Counter[str]()
    for trial in range(12):
        damaged = bytearray(content)
        # Also in the header
        place = rng.randrange(100) if trial < 2 else rng.randrange(len(content))
        damaged[place] ^= 1 << rng.randrange(8)
        folder = restore(tmp_path / str(trial), bytes(damaged))
        try:
            shard = Shard(folder, MemoryConfig())
        except PixelisError as error:
            outcomes[f"refused: {error.code}"] += 1
            continue
        found = read_all(shard)
        assert all(same(entry, by_id[entry.experience.id]) for entry in found), place
        whole = [e for e in found if e.vector is not None and e.pictures]
        if len(whole) == COUNT:
            outcomes["nothing lost"] += 1
        else:
            outcomes["lost and named"] += 1
            assert shard.damaged >= COUNT - len(whole) > 0, place
            assert len(found) >= COUNT - 8, "damage hides only what is on its page"
            line = json.loads((folder / "damage.jsonl").read_text().splitlines()[0])
            assert (folder / line["file"]).exists()
        shard.load(export)
        assert [e.experience.id for e in read_all(shard) if e.vector is not None and e.pictures] == [
            *by_id
        ] or shard.damaged
        assert {e.experience.id for e in read_all(shard)} == set(by_id), "repaired from the export"
        assert shard.add(entries(1, first=1000)) == [True]
        shard.close()
        shard = Shard(folder, MemoryConfig())
        assert shard.damaged == 0, "the repaired file is sound"
        shard.close()
    record_figures(**{name.replace(" ", "_").replace(":", ""): count for name, count in outcomes.items()})
    refused = {name for name in outcomes if name.startswith("refused")}
    assert refused <= {"refused: damaged", "refused: bad_schema", "refused: read_only"}
    assert outcomes["lost and named"] > 3


def test_a_row_damaged_while_the_shard_is_open_hides_no_other(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "CHUNK", 4)
    shard = opened()
    given = entries(10)
    for number, entry in enumerate(given):
        entry.pictures = {"img0": PNG + b"%d" % number}
    shard.add(given)
    with connect(tmp_path / "shard.sqlite") as db:  # a change that the checksums do not know
        prepare(db).execute("UPDATE vectors SET checksum = x'00' WHERE seq = 4")
        db.execute("UPDATE experiences SET record = replace(record, 'Which', X'ff') WHERE id = 'e5'")
        shown = "SELECT hash FROM experience_pictures WHERE seq = 7"
        db.execute(f"UPDATE pictures SET png = x'89' WHERE hash = ({shown})")
    db.close()
    others = [f"e{i}" for i in (9, 8, 7, 6, 4, 3, 2, 1, 0)]
    assert [e.id for e in listed(shard, 99)] == others
    assert [e.id for e in listed(shard, 9)] == others, "a page is filled"
    assert shard.rows(["e5"]) == [None]
    assert [row is None for row in shard.rows(["e4", "e5", "e6"])] == [False, True, False]
    with pytest.raises(DataFailure, match="damaged"):
        shard.row("e5")
    assert shard.row("unknown") is None
    assert shard.pictures("e6") == {}
    assert shard.pictures("e7") == {"img0": PNG + b"7"}
    assert sorted(e.experience.id for e in read_all(shard)) == sorted(others)
    shard = opened()
    result = shard.database.salvaged
    assert (result.experiences, result.lost_ids) == (9, ["e5"])
    assert (result.without_vector, result.without_pictures) == (["e3"], ["e6"])
    assert len(shard.search(vectors(1), 99)[0]) == 8
    assert len(list(tmp_path.glob("damaged-*"))) >= 1
    assert shard.prune(0.0) == []
    assert len(list(tmp_path.glob("damaged-*"))) >= 1, (
        "where nothing is too old, a start leaves the copy that its log names"
    )
    assert shard.delete(["e0"]) == 1
    assert not list(tmp_path.glob("damaged-*")), "a deletion reaches the damaged copy"


def test_a_salvage_interrupted_between_its_renames_is_completed(
    opened: Opened, shard: Shard, tmp_path: Path
) -> None:
    shard.add(entries(5))
    shard.close()
    (tmp_path / "shard.sqlite").rename(tmp_path / "salvaged.sqlite")
    shard = opened()
    assert len(shard) == 5


def test_a_salvaged_shard_keeps_its_counts_numbers_and_withdrawals(
    opened: Opened, shard: Shard, tmp_path: Path
) -> None:
    shard.add(entries(6))
    shard.delete(["e5"])
    shard.succeeded("r", ["e1"])
    shard.withdraw([3])
    shard.close()
    with connect(tmp_path / "shard.sqlite") as db:
        prepare(db).execute("UPDATE experiences SET record = '{}' WHERE id = 'e4'")
    db.close()
    (tmp_path / "salvaged.sqlite").write_bytes(b"left by a start that was killed")
    shard = opened()
    assert shard.database.salvaged.lost_ids == ["e4"]
    assert shard.succeeded("r", ["e1"]) == 0, "is still counted"
    assert shard.stats()["added"] == 6, "no number is used again"
    shard.add([Entry(made(7, policy_version=3))])
    assert shard.row("e7")[1] == "failed", "the version is still withdrawn"


def test_feedback_is_capped_by_name(shard: Shard) -> None:
    shard.add(entries(2))
    for number in range(shard_module.MAX_FEEDBACK):
        shard.feedback("e0", Feedback(comment=f"{number}", created_at=float(number)))
    with pytest.raises(BadInput) as caught:
        shard.feedback("e0", Feedback(correct=False, created_at=99.0))
    assert caught.value.code == "feedback_full"
    assert len(shard.feedback("e1", Feedback(correct=True)).feedback) == 1
