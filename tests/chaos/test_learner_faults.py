"""Learners that are killed or asked to stop, through the real jobs: nothing half done is served, and a run goes on exactly.

The numbers F3, F5 and F16 are those of the project's list of faults.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import ray

from pixelis.actors import learner, placement
from pixelis.actors.batch_sources import RolloutSource
from pixelis.actors.train_job import TrainJob
from pixelis.actors.weights import WeightPublisher
from pixelis.config import Config, load
from pixelis.jobs import rft
from pixelis.jobs.driver import run_folder
from pixelis.policy import checkpoint
from pixelis.policy.adapters import load_adapter
from pixelis.telemetry import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BARE = Path(__file__).parents[1] / "ray" / "bare.yaml"
"""A configuration without a word, so that processes and tests share the defaults and nothing else."""
FEW = "rft.steps=10 rft.prompts_per_step=4 rft.group_size=4 dialogue.max_turn_tokens=16"
"""Ten steps of seconds; brevity within the group is what there is to learn, as a policy without SFT never answers."""
RUN = [*FEW.split(), "policy.model=nano", "rewards.weights.length=1.0", "learner.lr=3e-4", "learner.checkpoint_every=1000"]
# What an engine records of a row has other last bits in other company (some 1e-6), and who decodes together is up to time.
RUN += ["rft.loss.importance=none"]
# A reward with a running state, which a restarted scorer must not forget.
RUN += ["rewards.normalise.terms=[length]"]
RecordFigures = Callable[..., None]


def config(folder: Path, *more: str) -> Config:
    return load(None, [*RUN, f"run.dir={folder}", *more])


def train(settings: Config) -> Path:
    with run_folder(settings, settings.data.train), placement.placed(settings) as actors:
        return rft.run(settings, actors)


@pytest.fixture(scope="module")
def whole(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of ten steps in one go, exactly on-policy."""
    folder = tmp_path_factory.mktemp("whole")
    assert checkpoint.step_of(train(config(folder))) == 10
    assert sum(row["learner/trained_sequences"] > 0 for row in events.read(folder, "step/policy")) >= 5
    return folder


def lines(folder: Path) -> dict[int, dict[str, Any]]:
    """What was logged of each step, the last time it was made."""
    return {row["step"]: row for row in events.read(folder, "step/policy")}


def learnt_from(folder: Path) -> dict[int, list[str]]:
    """Ids of the questions of each step, the last time they were handed out."""
    import json

    rows = [json.loads(line) for line in (folder / "consumed.jsonl").read_text().splitlines()]
    return {row["step"]: row["ids"] for row in rows}


def check_same(folder: Path, whole: Path) -> float:
    """The run in ``folder`` is the one in ``whole``: same questions, same losses. Their largest difference."""
    assert learnt_from(folder) == learnt_from(whole)
    one, other = lines(folder), lines(whole)
    assert list(one) == list(other) == list(range(1, 11))
    for step in one:
        keys = ("policy/loss", "reward/total", "policy/grad_norm")
        # What a step's end tells is lost with the Coordinator that was to tell it; the state behind it is not.
        for key in (*keys, "normalise/length_mean") if step != COORDINATOR + 1 else keys:
            assert one[step][key] == pytest.approx(other[step][key], abs=1e-6), (step, key)
    return max(abs(one[step]["policy/loss"] - other[step]["policy/loss"]) for step in one)


# -- stopped -------------------------------------------------------------------------------------------------------------------


@contextmanager
def process(name: str, *arguments: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """`python -m pixelis.jobs.NAME` in a session of its own with a Ray of its own, and the mark that all its children bear."""
    mark = f"pixelis-chaos-{uuid4().hex}"
    env = {**os.environ, "PIXELIS_CHAOS_MARK": mark, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", f"pixelis.jobs.{name}", str(BARE), *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
    try:
        yield job, mark
    finally:
        for pid in bearers(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait(timeout=30)


def bearers(mark: str) -> list[int]:
    """Ids of the living processes that were started with this mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def shared_memory() -> set[str]:
    """Files in /dev/shm, without those of suites that run beside this one: these jobs use neither vLLM nor loky."""
    files = (path for path in Path("/dev/shm").rglob("*") if path.is_file())
    return {str(path) for path in files if not str(path).startswith(("/dev/shm/pixelis-vllm-", "/dev/shm/sem.loky-"))}


def in_use() -> set[str]:
    """Those that some living process has open or mapped; other programs of this machine come and go."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                found |= {line.split(maxsplit=5)[-1].strip() for line in (folder / "maps").open() if "/dev/shm/" in line}
                found |= {os.readlink(link) for link in (folder / "fd").iterdir() if "/dev/shm/" in os.readlink(link)}
    return found


def stop(folder: Path, kind: int, steps: int, *more: str) -> dict[str, Any]:
    """Start the job, send the signal once ``steps`` are made: how it ended, after how long, and what it left behind."""
    before = shared_memory()
    with process("rft", *RUN, f"run.dir={folder}", *more) as (job, mark):
        give_up = time.monotonic() + 300
        while len(events.read(folder, "step/policy")) < steps and job.poll() is None and time.monotonic() < give_up:
            time.sleep(0.01)
        began = time.monotonic()
        # As a terminal does: the whole group gets a Ctrl-C, a SIGTERM goes to the driver alone.
        os.killpg(job.pid, kind) if kind == signal.SIGINT else job.send_signal(kind)
        _, told = job.communicate(timeout=120)
        seconds = time.monotonic() - began
        with suppress(AssertionError):
            wait_for(lambda: not bearers(mark) and not (shared_memory() - before - in_use()), 20)
        gone = time.monotonic() - began
        left = bearers(mark)
        names = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:80] for pid in left]
        return {
            "code": job.returncode,
            "told": told,
            "seconds": seconds,
            "gone": gone,
            "orphans": names,
            "shared": sorted(shared_memory() - before - in_use()),
        }


def wait_for(what: Callable[[], bool], timeout_s: float) -> None:
    give_up = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < give_up
        time.sleep(0.2)


def check_clean(ended: dict[str, Any], folder: Path) -> int:
    """A clean end; the step of the checkpoint that it left."""
    assert ended["code"] == 130, ended["told"]
    assert "Traceback" not in ended["told"], ended["told"]
    assert ended["orphans"] == []
    assert ended["shared"] == []
    assert not (folder / "lock.json").exists()
    assert ended["seconds"] < 30
    kept = checkpoint.latest(folder)
    assert kept is not None
    assert load_adapter(kept).tensors
    assert checkpoint.step_of(kept) == len(events.read(folder, "step/policy")), "every step that was made is in it"
    return checkpoint.step_of(kept)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a run that got a SIGTERM after its fourth step, and how it ended."""
    folder = tmp_path_factory.mktemp("stopped")
    return folder, stop(folder, signal.SIGTERM, 4)


def test_f16_a_sigterm_leaves_a_checkpoint_and_nothing_else(
    stopped: tuple[Path, dict[str, Any]], record_figures: RecordFigures
) -> None:
    """F16: SIGTERM, as at preemption. Goal: checkpoint and clean exit <= 10 s, no process and no shared memory left."""
    folder, ended = stopped
    step = check_clean(ended, folder)
    record_figures(
        exit_s=ended["seconds"], all_processes_gone_s=ended["gone"], stopped_at_step=step, orphans=0, shared_memory_files=0
    )


# -- killed --------------------------------------------------------------------------------------------------------------------


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find the folder of this file
COORDINATOR, SCORER, BEFORE, DURING = 5, 6, 7, 9
"""Batches after whose optimizer step an actor dies: the learner before anything is published, and while it is published."""


class Killed(WeightPublisher):
    """Kills the Coordinator and the scorer once, and its own process once after batch BEFORE and once after batch DURING."""

    folder: str = ""
    victims: dict[int, Any]

    def publish(self, trainer: Any, metrics: dict[str, float], restart: bool = False) -> Any:
        step = trainer.batches - 1
        first = Path(self.folder, f"killed-{step}")
        if step in self.victims and not restart and not first.exists():
            first.write_text(str(time.time()))
            ray.kill(self.victims[step], no_restart=False)
        if step in (BEFORE, DURING) and not restart and not first.exists():
            first.write_text(str(time.time()))
            if step == DURING:
                super().publish(trainer, metrics)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().publish(trainer, metrics, restart)


def test_f05_f26_f03_a_stopped_run_goes_on_as_if_it_had_not_been_also_when_its_actors_are_killed(
    whole: Path, stopped: tuple[Path, dict[str, Any]], record_figures: RecordFigures
) -> None:
    """F5: 10 steps == 4 + resume + 6 (the stop may come a step late). Goal: same sample ids, losses equal to 1e-6; here bitwise.

    F26, in the same run: Coordinator and scorer are killed. Goal: admission, consumed ids and reward state as before, the result
    equal to that of the run without faults.

    F3, in the same run: SIGKILL between optimizer step and publish, and during publish. Goal: generators keep the old version,
    numbering goes on after the restart, every version is whole by its checksum.
    """
    folder, _ = stopped
    at = len(events.read(folder, "step/policy"))
    assert 4 <= at <= COORDINATOR
    settings = config(folder, "learner.checkpoint_every=1", "learner.max_failures=3")
    with run_folder(settings, settings.data.train), placement.placed(settings) as actors:
        weights = Killed(actors.store, "rft")
        weights.folder, weights.victims = str(folder), {COORDINATOR: actors.coordinator, SCORER: actors.scorers[0]}
        source = RolloutSource(settings, actors.coordinator, weights)
        learner.fit(TrainJob(settings, source, settings.rft.loss, settings.rft.sampling.temperature))
        kept = ray.get(actors.store.list.remote())
        held = {}
        for record in kept[-4:]:
            (ref,) = ray.get(actors.store.get.remote(record.version))
            held[record.version] = ray.get(ref).sha256()
        promoted = ray.get(actors.store.promoted.remote())
        serving = ray.get([g.health.remote() for g in actors.generators])
    assert all((folder / f"killed-{step}").exists() for step in (COORDINATOR, SCORER))
    died = [float((folder / f"killed-{step}").read_text()) for step in (BEFORE, DURING)]
    worst = check_same(folder, whole)
    numbers = [record.version for record in kept]
    assert numbers == list(range(len(numbers))), "numbers go on, none is used twice"
    assert all(record.sha256 == held[record.version] for record in kept if record.version in held)
    folders = [f for f in (folder / "versions").iterdir() if f.is_dir()]
    assert folders
    assert all(checkpoint.is_complete(f) for f in folders)
    one, other = (load_adapter(f / "checkpoints" / "step_00000010") for f in (folder, whole))
    assert one.sha256() == other.sha256() == held[promoted], "what is served is what was learnt"
    assert {health["version"] for health in serving} == {promoted}
    # Generators sample from the weights that the learner has, whoever died in between.
    drift = max(row.get("policy/drift_max", 0.0) for row in lines(folder).values())
    assert drift < 1e-3
    made = [row["time"] for row in events.read(folder, "step/policy")]
    again = [next(time for time in made if time > death) - death for death in died]
    record_figures(resumed_after=at, steps_lost=len(made) - 10, back_after_s=max(again), versions=len(numbers))
    record_figures(drift_max=drift, loss_difference=worst)


@pytest.mark.skipif(os.environ.get("PIXELIS_CHAOS") != "full", reason="PIXELIS_CHAOS=full: half a minute like the SIGTERM test")
def test_f16_a_ctrl_c_leaves_a_checkpoint_and_nothing_else(tmp_path: Path, record_figures: RecordFigures) -> None:
    """F16: Ctrl-C, which the terminal sends to every process of the group. Goal: as for SIGTERM."""
    ended = stop(tmp_path, signal.SIGINT, 1)
    check_clean(ended, tmp_path)
    record_figures(exit_s=ended["seconds"], all_processes_gone_s=ended["gone"], orphans=0, shared_memory_files=0)
