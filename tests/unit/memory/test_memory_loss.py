"""Acknowledged changes that are in no file any more are counted at the next start, whatever took them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from memory_entries import entries

from pixelis.config import MemoryConfig
from pixelis.errors import InfraFailure
from pixelis.memory import Shard
from pixelis.records import Feedback

COUNT = 40
MAIN, LOG = "shard.sqlite", "shard.sqlite-wal"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a shard whose process died: a part is in the main file, the rest in the log."""
    folder, copy = tmp_path_factory.mktemp("running"), tmp_path_factory.mktemp("copies") / "killed"
    shard = Shard(folder, MemoryConfig())
    shard.add(entries(COUNT // 2))
    shard.database.forget()  # moves the log into the main file
    for entry in entries(COUNT // 2, first=COUNT // 2):
        shard.add([entry])
    for number in range(10):
        shard.feedback(f"e{number}", Feedback(comment="hm"))
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("lock"))
    shard.close()
    return copy


def cut(name: str, share: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(share * len(content))])

    return change


def flip(name: str, share: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[int(share * (len(content) - 1))] ^= 1
        (folder / name).write_bytes(content)

    return change


def remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


SHARES = (0.0, 0.001, 0.1, 0.5, 0.9, 0.999)
DAMAGE = {
    "nothing": lambda folder: None,
    "main removed": remove(MAIN),
    "log removed": remove(LOG),
    "both removed": remove(MAIN, LOG),
    **{f"{name} cut at {share}": cut(name, share) for name in (MAIN, LOG) for share in SHARES},
    **{f"{name} flipped at {share}": flip(name, share) for name in (MAIN, LOG) for share in (*SHARES, 1.0)},
}


@pytest.mark.parametrize("name", DAMAGE)
def test_no_loss_is_silent(killed: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "memory"
    shutil.copytree(killed, folder)
    DAMAGE[name](folder)
    try:
        shard = Shard(folder, MemoryConfig())
    except InfraFailure:
        for path in folder.glob("shard.sqlite*"):  # what the error says to do
            path.unlink()
        shard = Shard(folder, MemoryConfig())
        assert (len(shard), shard.damaged) == (0, COUNT)
    feedback = sum(len(e.feedback) for e in shard.get([f"e{n}" for n in range(10)]) if e is not None)
    if len(shard) == COUNT and feedback == 10:
        assert shard.damaged == 0
    else:
        assert shard.damaged == max(1, COUNT - len(shard))
        line = json.loads((folder / "damage.jsonl").read_text().splitlines()[-1])
        assert line["lost"] == COUNT - len(shard)
        assert line["changes"] > 0 or line["file"].startswith("damaged-")
    assert shard.add(entries(1, first=1000)) == [True]
    shard.close()
    shard = Shard(folder, MemoryConfig())
    assert shard.damaged == 0, "a loss is reported once"
    shard.close()


def test_a_shard_may_refuse_to_start_without_what_it_acknowledged(killed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    shutil.copytree(killed, folder)
    cut(MAIN, 0)(folder)
    remove(LOG)(folder)
    for _ in range(2):
        with pytest.raises(InfraFailure, match=f"{COUNT} lost") as caught:
            Shard(folder, MemoryConfig(on_loss="refuse"))
        assert (caught.value.code, "memory.on_loss=continue" in caught.value.fix) == ("damaged", True)
    shutil.copy(killed / MAIN, folder / MAIN)  # restored
    shutil.copy(killed / LOG, folder / LOG)
    shard = Shard(folder, MemoryConfig(on_loss="refuse"))
    assert (len(shard), shard.damaged) == (COUNT, 0)
    shard.close()
