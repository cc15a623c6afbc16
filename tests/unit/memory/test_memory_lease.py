"""One process has a shard's folder, whatever machine it is on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_entries import Opened, entries, wait_for

from pixelis.config import MemoryConfig
from pixelis.errors import InfraFailure
from pixelis.memory import Shard, lease

HOLD = (
    "import sys; sys.path.insert(0, sys.argv[2])\n"
    "from memory_entries import *\n"
    "from pixelis.memory import Shard\n"
    "from pixelis.config import MemoryConfig\n"
    "shard = Shard(sys.argv[1], MemoryConfig())\n"
    "shard.add(entries(3))\n"
    "print('ready', flush=True)\n"
    "sys.stdin.read()\n"
    "shard.close()\n"
)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the shard in ``tmp_path/shard`` open, until its input ends."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "shard"), str(Path(__file__).parents[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is on another machine, and the file system has no locks over machines."""
    monkeypatch.setattr(lease, "boot_id", lambda: "another machine")
    monkeypatch.setattr(lease.fcntl, "flock", lambda *_: None)


def test_a_second_machine_is_refused_by_name(
    holder: subprocess.Popen[str], elsewhere: None, tmp_path: Path
) -> None:
    with pytest.raises(InfraFailure) as caught:
        Shard(tmp_path / "shard", MemoryConfig())
    assert caught.value.code == "locked"
    assert f"process {holder.pid} on " in caught.value.message
    holder.communicate()
    shard = Shard(tmp_path / "shard", MemoryConfig())  # given back: no wait
    assert len(shard) == 3
    shard.close()


def test_a_second_machine_takes_over_from_a_dead_one(
    holder: subprocess.Popen[str], elsewhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.kill()
    holder.wait()
    monkeypatch.setattr(lease, "LEASE_S", 0.5)
    monkeypatch.setattr(time, "time", lambda: 1.0)  # whatever its clock says
    shard = Shard(tmp_path / "shard", MemoryConfig())
    assert len(shard) == 3
    assert shard.add(entries(1, first=9)) == [True]
    shard.close()


def test_an_owner_that_was_cut_off_stores_nothing_any_more(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    shard = opened()
    shard.add(entries(2))
    other = {**json.loads((tmp_path / "lock").read_bytes()), "owner": "x", "host": "node-7", "pid": 42}
    (tmp_path / "lock").write_bytes(json.dumps(other).encode().ljust(lease.SIZE))
    wait_for(lambda: shard.database._lease.lost)
    with pytest.raises(InfraFailure, match="process 42 on node-7"):
        shard.add(entries(1, first=5))
    assert (len(shard.list_rows(9)), shard.refusal) == (2, "locked")
    shard.close()
    assert json.loads((tmp_path / "lock").read_bytes())["owner"] == "x", "the new owner keeps it"


def test_a_late_owner_looks_before_it_writes(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 1000.0)
    shard = opened()
    shard.database._lease.beat_at -= lease.LEASE_S  # as after a suspension
    assert shard.add(entries(1)) == [True]
    (tmp_path / "lock").write_bytes(b'{"owner": "x"}'.ljust(lease.SIZE))
    with pytest.raises(InfraFailure, match="in use"):
        shard.add(entries(1, first=5))
