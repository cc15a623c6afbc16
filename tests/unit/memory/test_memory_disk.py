"""A shard on a disk that is full, read-only or fails."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from memory_entries import PNG, entries, wait_for
from small_disks import fail, failing_disk, fill, freeze, make_read_only, mount_again, small_disk

from pixelis.config import MemoryConfig
from pixelis.errors import InfraFailure
from pixelis.files import disk_failure
from pixelis.memory import Entry, Shard


def large(number: int) -> Entry:
    """Experience ``e<number>`` with a picture of 50 kB."""
    (entry,) = entries(1, first=number, seed=number)
    entry.pictures = {"img0": PNG + os.urandom(50_000)}
    return entry


def fill_up(shard: Shard) -> list[str]:
    """Add until the disk refuses; returns the ids acknowledged."""
    acknowledged: list[str] = []
    for number in range(1000):
        try:
            shard.add([large(number)])
        except InfraFailure as error:
            return acknowledged if error.code == "no_space" else pytest.fail(str(error))
        acknowledged.append(f"e{number}")
    raise AssertionError("the disk is not full")


def test_a_full_disk_refuses_by_name_and_loses_nothing_acknowledged(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 5) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(3_000_000))
        shard = Shard(disk / "shard", MemoryConfig())
        acknowledged = fill_up(shard)
        assert shard.stats()["refusal"] == "no_space"
        assert len(shard.search(large(0).vector[None], 99)[0]) == len(acknowledged), "it still answers"
        ballast.unlink()
        wait_for(lambda: not shard.stats()["refusal"])  # without a request
        assert shard.add([large(5000)]) == [True]
        shard.close()
        shard = Shard(disk / "shard", MemoryConfig())
        assert all(shard.rows([*acknowledged, "e5000"]))
        assert len(shard) == len(acknowledged) + 1
        shard.close()


def test_a_start_on_a_full_or_read_only_disk_says_so(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2) as disk:
        ballast = fill(disk)
        with pytest.raises(InfraFailure, match="no space") as caught:
            Shard(disk / "shard", MemoryConfig())
        assert caught.value.code == "no_space"
        ballast.unlink()
        shard = Shard(disk / "shard", MemoryConfig())
        shard.add([large(1)])
        shard.close()
        make_read_only(disk)
        for folder in ("shard", "new"):
            with pytest.raises(InfraFailure, match="read-only") as caught:
                Shard(disk / folder, MemoryConfig())
            assert caught.value.code == "read_only"


def test_a_disk_that_becomes_read_only_refuses_by_name_and_loses_nothing_acknowledged(tmp_path: Path) -> None:
    """The kernel does so when a disk fails; files that are open can then not be written either."""
    with failing_disk(tmp_path / "disk") as disk:
        shard = Shard(disk / "shard", MemoryConfig())
        assert shard.add([large(1)]) == [True]
        for make, undo in ((freeze, lambda folder: freeze(folder, False)), (fail, None)):
            make(disk)
            with pytest.raises(InfraFailure, match="read-only") as caught:
                shard.add([large(2)])
            assert (caught.value.code, shard.stats()["refusal"]) == ("read_only", "read_only")
            assert len(shard.search(large(0).vector[None], 9)[0]) == 1, "it still answers"
            if undo is not None:
                undo(disk)
                wait_for(lambda: not shard.stats()["refusal"])  # without a request
        shard.close()
        mount_again(disk)
        shard = Shard(disk / "shard", MemoryConfig())
        assert shard.add([large(2)]) == [True]
        assert all(shard.rows(["e1", "e2"]))
        shard.close()


def test_an_error_of_a_disk_that_is_neither_full_nor_read_only_is_named(tmp_path: Path) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
    failure = disk_failure(tmp_path / "shard.sqlite", error)
    assert (failure.code, "I/O error" in failure.message) == ("io_error", True)
