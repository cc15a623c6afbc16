"""Processes that share a GPU start on it one after another."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pixelis.actors.cluster import alone_on

START = (
    "from pixelis.actors.cluster import alone_on\nwith alone_on(['1', '0']): print(1, flush=True); input()"
)


def test_a_process_starts_on_a_gpu_when_the_one_that_starts_there_is_done_or_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    other = subprocess.Popen([sys.executable, "-c", START], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    started = threading.Event()

    def start() -> None:
        with alone_on(["1", "2"]):
            started.set()

    with alone_on(["2"]), alone_on([]):
        pass
    waiting = threading.Thread(target=start)
    waiting.start()
    assert not started.wait(0.3)
    other.kill()
    other.wait()
    assert started.wait(10)
    waiting.join()
