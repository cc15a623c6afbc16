"""The learners lose their node: told at once, resumed on what is left, no step logged twice."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from own_process import BARE, ROOT

from pixelis.actors import learner
from pixelis.actors.learner import _wait_for_room
from pixelis.config import load
from pixelis.policy import checkpoint
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
print(cluster.address, second.node_id, flush=True)
for line in sys.stdin:
    second.kill_raylet()
    print("killed", flush=True)
    break
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def nodes() -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Address of two nodes in a process of its own, the id of the second, and a function that kills it."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", NODES], stderr=subprocess.DEVNULL, **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    address, second = process.stdout.readline().split()

    def kill() -> None:
        process.stdin.write("kill\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        process.stdout.readline()  # type: ignore[union-attr]

    yield address, second, kill
    process.stdin.close()
    process.wait(timeout=60)


def train_on(address: str, folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-u",
        "-m",
        "pixelis.jobs.rft",
        str(BARE),
        *RUN,
        f"run.dir={folder}",
        *overrides,
    ]
    env = {**os.environ, "RAY_ADDRESS": address}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


# Shorter: killed learners in test_learner_faults.py, lost nodes in tests/unit/actors/test_node_watch.py.
@pytest.mark.long
def test_a_lost_node_of_the_learners(
    nodes: tuple[str, str, Callable[[], None]], tmp_path: Path, record_figures: Callable[..., None]
) -> None:
    address, _, kill = nodes
    job = train_on(address, tmp_path)
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


@pytest.mark.long
def test_an_announced_end_of_a_node_loses_few_steps(
    nodes: tuple[str, str, Callable[[], None]], tmp_path: Path
) -> None:
    address, second, kill = nodes
    job = train_on(
        address, tmp_path, "rft.steps=40", "learner.checkpoint_every=100", "learner.max_failures=0"
    )
    announce = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address]
    announce += ["--node-id", second, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    announce += ["--reason-message", "reclaimed", "--deadline-remaining-seconds", "20"]
    try:
        while len(events.read(tmp_path, "step/policy")) < 2 and job.poll() is None:
            time.sleep(0.1)
        subprocess.run(announce, check=True, capture_output=True, timeout=60)
        while (saved := checkpoint.latest(str(tmp_path))) is None and job.poll() is None:
            time.sleep(0.1)
        assert saved is not None
        kill()
        output, _ = job.communicate(timeout=250)
    finally:
        job.kill()
    assert job.returncode == 0, output
    assert f"1 of 2 learners resume from step {checkpoint.step_of(saved)}" in output
    assert 2 <= checkpoint.step_of(saved) < 40


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


def on_machine(name: str, folder: Path) -> list[str]:
    """The prefix of a command for a machine of its own: its host name, boot, network and processes.

    Its processes end with the first of them, as those of a lost machine do.
    """
    boot = folder / name
    boot.write_text(str(uuid.uuid4()))
    setup = f"hostname {name}; ip link set lo up; mount --bind {boot} /proc/sys/kernel/random/boot_id"
    apart = ["unshare", "--uts", "--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
    return [*apart, "sh", "-ec", f'{setup}; exec "$@"', "sh"]


def may_unshare(folder: Path) -> bool:
    if not (shutil.which("unshare") and shutil.which("ip")):
        return False
    return not subprocess.run([*on_machine("probe", folder), "true"], capture_output=True).returncode


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_run_of_a_lost_machine_resumes_on_another_one(tmp_path: Path) -> None:
    """Both see the run folder, and nobody deletes the lost one's record: it is silent, so the other takes over."""
    if not may_unshare(tmp_path):
        pytest.skip("namespaces of a machine's own need root, unshare and ip")
    folder, steps = tmp_path / "run", 30
    job = [sys.executable, "-u", "-m", "pixelis.jobs.sft", str(ROOT / "configs/nano/sft.yaml")]
    job += [f"run.dir={folder}", f"sft.steps={steps}", "learner.checkpoint_every=5"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*on_machine("pod-a", tmp_path), *job], cwd=ROOT, **pipes) as first:
        deadline = time.monotonic() + 400
        while checkpoint.latest(folder) is None:
            assert first.poll() is None, first.stdout.read()  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        first.kill()
    done = len(events.read(folder, "step/sft"))
    assert 5 <= done < steps
    second = subprocess.run(
        [*on_machine("pod-b", tmp_path), *job], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"{folder} is taken over from host pod-a" in second.stderr
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = [row["step"] for row in rows if row.get("kind") == "step/sft"]
    assert events.read(folder, "step/sft")[-1]["step"] == steps
    assert len(trained) < done + steps, "the second machine began where the checkpoint of the first one ended"
    assert not (folder / "lock.json").exists()
