"""The learners lose their node: told at once, resumed on what is left, no step logged twice."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from own_process import BARE

from pixelis.actors import learner
from pixelis.actors.learner import _wait_for_room
from pixelis.config import load
from pixelis.telemetry import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RUN = ["rft.steps=8", "rft.prompts_per_step=4", "rft.group_size=4", "dialogue.max_turn_tokens=16"]
RUN += ["policy.model=nano", "learner.lr=3e-4", "rewards.weights.length=1.0", "learner.checkpoint_every=3"]
# Two learners fit only the second node (3 CPUs), one of them the rest of the first (2 CPUs).
RUN += ["learner.workers=2", "learner.min_workers=1", "learner.cpus=1.2"]
RUN += ["toolbox.cpus=0.1", "rewards.cpus=0.1"]
NODES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 100_000_000})
second = cluster.add_node(num_cpus=3, object_store_memory=100_000_000)
print(cluster.address, flush=True)
for line in sys.stdin:
    second.kill_raylet()
    print("killed", flush=True)
    break
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def nodes() -> Iterator[tuple[str, Callable[[], None]]]:
    """Address of two nodes in a process of its own, and a function that kills the second."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", NODES], stderr=subprocess.DEVNULL, **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    address = process.stdout.readline().split()[0]

    def kill() -> None:
        process.stdin.write("kill\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        process.stdout.readline()  # type: ignore[union-attr]

    yield address, kill
    process.stdin.close()
    process.wait(timeout=60)


# Shorter: killed learners in test_learner_faults.py, lost nodes in tests/unit/actors/test_node_watch.py.
@pytest.mark.long
def test_a_lost_node_of_the_learners(
    nodes: tuple[str, Callable[[], None]], tmp_path: Path, record_figures: Callable[..., None]
) -> None:
    address, kill = nodes
    command = [sys.executable, "-u", "-m", "pixelis.jobs.rft", str(BARE), *RUN, f"run.dir={tmp_path}"]
    env = {**os.environ, "RAY_ADDRESS": address}
    job = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: queue.Queue[tuple[float, str]] = queue.Queue()

    def read() -> None:
        for line in job.stdout or ():
            lines.put((time.monotonic(), line))

    threading.Thread(target=read, daemon=True).start()
    try:
        while len(events.read(tmp_path, "step/policy")) < 4 and job.poll() is None:
            time.sleep(0.1)
        kill()
        killed = time.monotonic()
        assert job.wait(timeout=200) == 0
    finally:
        job.kill()
    output = [lines.get() for _ in range(lines.qsize())]
    text = "".join(line for _, line in output)
    told = next((at for at, line in output if "was lost with learner 0, learner 1" in line), None)
    assert told is not None, text
    assert told - killed <= 5
    resumed = next((at for at, line in output if line.startswith("1 of 2 learners resume from step 3")), None)
    assert resumed is not None, text
    meanwhile = "".join(line for at, line in output if told < at < resumed)
    assert "left" not in meanwhile, "no time left while nothing runs"
    assert [row["step"] for row in events.read(tmp_path, "step/policy")] == list(range(1, 9))
    assert {row["step"] for row in events.read(tmp_path, events.REPLAYED)} >= {4}
    assert [len(row["nodes"]) for row in events.read(tmp_path, learner.PLACED)] == [2, 1]
    record_figures(told_s=told - killed, resumed_s=resumed - killed)


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_without_room_tells_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learner, "ROOM_POLL_S", 0.5)
    config = load(None, [f"run.dir={tmp_path}", "learner.cpus=100"])
    threading.Timer(2.0, (tmp_path / "STOP").touch).start()
    assert _wait_for_room(config, "", elastic=True) is None
    (notice,) = events.read(tmp_path, events.NOTICE)
    assert notice["waiting"]
    assert "waiting for room for 1 x CPU 100 (nodes: " in notice["text"]
    assert "step 0, as there is no checkpoint" in notice["text"]
    assert notice["text"] in capfd.readouterr().err
