"""Learners that are killed or stopped in real jobs: a run resumes exactly. F3, F5, ... number the faults."""

from __future__ import annotations

import json
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
from own_process import start_rft
from placed_actors import wait_until

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

STEPS = 7
RUN = [f"rft.steps={STEPS}", "rft.prompts_per_step=4", "rft.group_size=4", "dialogue.max_turn_tokens=16"]
RUN += ["policy.model=nano", "learner.lr=3e-4"]
# A policy without SFT never answers, so the reward is for short replies.
RUN += ["rewards.weights.length=1.0", "learner.checkpoint_every=1000"]
# The engine's log-probabilities depend on the batch in their last bits (1e-6), and batches depend on timing.
RUN += ["rft.loss.importance=none"]
# A reward with a running state, which a restarted scorer must restore.
RUN += ["rewards.normalise.terms=[length]"]
RecordFigures = Callable[..., None]


def config(folder: Path, *overrides: str) -> Config:
    return load(None, [*RUN, f"run.dir={folder}", *overrides])


@pytest.fixture(scope="module")
def uninterrupted(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted, colocated on-policy run. The others have generators of their own, and its result."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    colocated = (
        "engine.colocate=true",
        "engine.on_update=keep",
        "rft.evaluate_every=4",
        "evaluate.questions=4",
    )
    settings = config(folder, *colocated)
    with run_folder(settings, settings.data.train), placement.placed(settings) as actors:
        assert checkpoint.step_of(rft.run(settings, actors)) == STEPS
        assert not ray.get(actors.generators[0].health.remote())["asleep"]
    trained = [row["learner/trained_sequences"] > 0 for row in step_rows(folder).values()]
    assert sum(trained) >= STEPS // 2
    return folder


def step_rows(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the last logged row of each step."""
    return {row["step"]: row for row in events.read(folder, "step/policy")}


def consumed_ids(folder: Path) -> dict[int, list[str]]:
    """Return step -> ids of its questions. No step stands there twice."""
    rows = [json.loads(line) for line in (folder / "consumed.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["step"] for row in rows})
    return {row["step"]: row["ids"] for row in rows}


def check_equal_runs(folder: Path, reference: Path) -> float:
    """Check that two runs have the same questions and losses; return the largest difference of a loss."""
    assert consumed_ids(folder) == consumed_ids(reference)
    rows, expected = step_rows(folder), step_rows(reference)
    assert list(rows) == list(expected) == list(range(1, STEPS + 1))
    for step in rows:
        keys = ("policy/loss", "reward/total", "policy/grad_norm")
        # The metrics of a step's end are lost with a killed Coordinator; the state behind them is not.
        for key in (*keys, "normalise/length_mean") if step != COORDINATOR + 1 else keys:
            assert rows[step][key] == pytest.approx(expected[step][key], abs=1e-6), (step, key)
    return max(abs(rows[step]["policy/loss"] - expected[step]["policy/loss"]) for step in rows)


# -- stopped -------------------------------------------------------------------------------------------------


@contextmanager
def marked_job(folder: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """Run an RFT job in its own session with its own Ray; yield it and a mark that its children inherit."""
    mark = f"pixelis-chaos-{uuid4().hex}"
    variables = {"PIXELIS_CHAOS_MARK": mark, "PYTHONPATH": str(Path(__file__).parent)}
    job = start_rft(folder, RUN, **variables)
    try:
        yield job, mark
    finally:
        for pid in marked_processes(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait(timeout=30)


def marked_processes(mark: str) -> list[int]:
    """Return the ids of the running processes with this mark in their environment."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
    return pids


def shared_memory() -> set[str]:
    """Return the files in /dev/shm, except those of vLLM and loky, which only other test suites use."""
    files = {str(path) for path in Path("/dev/shm").rglob("*") if path.is_file()}
    return {file for file in files if not file.startswith(("/dev/shm/pixelis-vllm-", "/dev/shm/sem.loky-"))}


def shared_memory_in_use() -> set[str]:
    """Return the files in /dev/shm that a running process, of this or another program, has open or mapped."""
    files = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            mapped = [line.split(maxsplit=5)[-1].strip() for line in (folder / "maps").open()]
            opened = [os.readlink(link) for link in (folder / "fd").iterdir()]
            files.update(file for file in (*mapped, *opened) if file.startswith("/dev/shm/"))
    return files


def stop(folder: Path, number: int, steps: int) -> dict[str, Any]:
    """Send a job the signal after ``steps`` steps; return its exit, its duration and what it left behind."""
    initial = shared_memory()

    def left_in_memory() -> set[str]:
        return shared_memory() - initial - shared_memory_in_use()

    with marked_job(folder) as (job, mark):
        wait_until(lambda: len(step_rows(folder)) >= steps or job.poll() is not None, 300)
        start = time.monotonic()
        # As a terminal does: Ctrl-C goes to the whole process group, SIGTERM to the driver only.
        os.killpg(job.pid, number) if number == signal.SIGINT else job.send_signal(number)
        _, errors = job.communicate(timeout=120)
        seconds = time.monotonic() - start
        with suppress(AssertionError):
            wait_until(lambda: not marked_processes(mark) and not left_in_memory(), 20, 0.2)
        all_ended = time.monotonic() - start
        orphans = [Path(f"/proc/{pid}/cmdline").read_bytes()[:80] for pid in marked_processes(mark)]
        return {
            "code": job.returncode,
            "errors": errors,
            "seconds": seconds,
            "all_ended": all_ended,
            "orphans": orphans,
            "shared": sorted(left_in_memory()),
        }


def check_clean(result: dict[str, Any], folder: Path) -> int:
    """Check for a clean exit; return the step of the last checkpoint."""
    assert result["code"] == 130, result["errors"]
    assert "Traceback" not in result["errors"], result["errors"]
    assert result["orphans"] == []
    assert result["shared"] == []
    assert not (folder / "lock.json").exists()
    # The goal is 10 s on an idle machine; the step in progress is finished on a busy one, too
    assert result["seconds"] < 60
    latest = checkpoint.latest(folder)
    assert latest is not None
    assert load_adapter(latest).tensors
    assert checkpoint.step_of(latest) == len(events.read(folder, "step/policy")), (
        "a completed step is not in the checkpoint"
    )
    return checkpoint.step_of(latest)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a run that received SIGTERM after its first step, and the result of `stop`."""
    folder = tmp_path_factory.mktemp("stopped")
    return folder, stop(folder, signal.SIGTERM, 1)


@pytest.mark.long  # tests/ray/test_submit.py stops a job so
def test_f16_a_sigterm_leaves_a_checkpoint_and_nothing_else(
    stopped: tuple[Path, dict[str, Any]], record_figures: RecordFigures
) -> None:
    """F16: as at preemption. Goal: a clean exit <= 10 s, no process and no shared memory left."""
    folder, result = stopped
    step = check_clean(result, folder)
    record_figures(exit_s=result["seconds"], all_processes_gone_s=result["all_ended"], stopped_at_step=step)


# -- killed --------------------------------------------------------------------------------------------------


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file
COORDINATOR, SCORER, LEARNER = 3, 4, 5
"""Batches after whose optimizer step an actor is killed; the learner while it publishes the weights."""


class KillingPublisher(WeightPublisher):
    """Kills the Coordinator, the scorer and its own learner process, each once at its batch."""

    folder: str = ""
    victims: dict[int, Any]

    def publish(self, trainer: Any, metrics: dict[str, float], restart: bool = False) -> Any:
        step = trainer.batches - 1
        marker = Path(self.folder, f"killed-{step}")
        if step in self.victims and not restart and not marker.exists():
            marker.write_text(str(time.time()))
            ray.kill(self.victims[step], no_restart=False)
        if step == LEARNER and not restart and not marker.exists():
            marker.write_text(str(time.time()))
            super().publish(trainer, metrics)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().publish(trainer, metrics, restart)


@pytest.mark.long  # tests/ray/test_jobs.py resumes a run to the same weights, without kills
def test_f05_f26_f03_a_resumed_run_with_killed_actors_equals_an_uninterrupted_run(
    uninterrupted: Path, stopped: tuple[Path, dict[str, Any]], record_figures: RecordFigures
) -> None:
    """F5: 7 steps == 1 + resume + 6 (the stop may come late), with the same samples, losses and weights.

    F26: Coordinator and scorer are killed meanwhile. F3: and the learner during publication: numbering
    continues, and every version is complete.
    """
    folder, _ = stopped
    resumed_after = len(events.read(folder, "step/policy"))
    assert 1 <= resumed_after <= COORDINATOR
    settings = config(folder, "learner.checkpoint_every=1", "learner.max_failures=3")
    with run_folder(settings, settings.data.train), placement.placed(settings) as actors:
        weights = KillingPublisher(actors.store, "rft")
        weights.folder = str(folder)
        weights.victims = {COORDINATOR: actors.coordinator, SCORER: actors.scorers[0]}
        source = RolloutSource(settings, actors.coordinator, weights)
        learner.fit(TrainJob(settings, source, settings.rft.loss, settings.rft.sampling.temperature))
        versions = ray.get(actors.store.list.remote())
        digests = {}
        for record in versions[-4:]:
            (ref,) = ray.get(actors.store.get.remote(record.version))
            digests[record.version] = ray.get(ref).sha256()
        promoted = ray.get(actors.store.promoted.remote())
        serving = ray.get([g.health.remote() for g in actors.generators])
    assert all((folder / f"killed-{step}").exists() for step in (COORDINATOR, SCORER))
    assert not any("rollout/asleep_s" in row for row in step_rows(folder).values())
    death = float((folder / f"killed-{LEARNER}").read_text())
    difference = check_equal_runs(folder, uninterrupted)
    numbers = [record.version for record in versions]
    assert numbers == list(range(len(numbers))), "numbers are skipped or used twice"
    assert all(record.sha256 == digests[record.version] for record in versions if record.version in digests)
    folders = [f for f in (folder / "versions").iterdir() if f.is_dir()]
    assert folders
    assert all(checkpoint.is_complete(f) for f in folders)
    one, other = (load_adapter(f / "checkpoints" / f"step_{STEPS:08d}") for f in (folder, uninterrupted))
    assert one.sha256() == other.sha256() == digests[promoted], "the served weights are not the final ones"
    assert {health["version"] for health in serving} == {promoted}
    # Generators sample from the learner's weights throughout.
    drift = max(row.get("policy/drift_max", 0.0) for row in step_rows(folder).values())
    assert drift < 1e-3
    times = [row["time"] for row in events.read(folder, "step/policy")]
    back_after = next(t for t in times if t > death) - death
    record_figures(
        resumed_after=resumed_after,
        steps_lost=len(times) - STEPS,
        back_after_s=back_after,
        versions=len(numbers),
    )
    record_figures(drift_max=drift, loss_difference=difference)


@pytest.mark.long  # a run resumed with killed actors makes the same comparison
def test_two_jobs_at_once_on_one_cluster_do_not_disturb_each_other(
    uninterrupted: Path, tmp_path: Path
) -> None:
    """Two jobs of one name, one in its own process, make the steps of one alone and leave no reservation."""
    from ray.util.placement_group import placement_group_table

    first, second = tmp_path / "first", tmp_path / "second"
    other = start_rft(second, RUN, RAY_ADDRESS=ray.get_runtime_context().gcs_address)
    try:
        settings = config(first)
        with run_folder(settings, settings.data.train), placement.placed(settings) as actors:
            rft.run(settings, actors)
        _, errors = other.communicate(timeout=200)
    finally:
        other.kill()
    assert other.returncode == 0, errors
    for folder in (first, second):
        check_equal_runs(folder, uninterrupted)
    wait_until(lambda: all(group["state"] == "REMOVED" for group in placement_group_table().values()), 30)


@pytest.mark.long  # tests/engines/test_hf.py: sleep; tests/unit/actors/test_generator_router.py: of all generators
def test_the_generators_of_a_colocated_run_sleep_while_the_learner_works(
    uninterrupted: Path, record_figures: RecordFigures
) -> None:
    """During every step of the learner and during nothing else; evaluations happen before."""
    rows = step_rows(uninterrupted).values()
    assert all(row["rollout/asleep_s"] >= row["learner/seconds"] for row in rows)
    assert 4 in {row["step"] for row in events.read(uninterrupted, "evaluation")}
    asleep, learning = (sum(row[key] for row in rows) for key in ("rollout/asleep_s", "learner/seconds"))
    record_figures(asleep_s=asleep, learner_s=learning)


@pytest.mark.long
def test_f16_a_ctrl_c_leaves_a_checkpoint_and_nothing_else(
    tmp_path: Path, record_figures: RecordFigures
) -> None:
    """F16: Ctrl-C, which the terminal sends to every process of the group. Goal: as for SIGTERM."""
    result = stop(tmp_path, signal.SIGINT, 1)
    check_clean(result, tmp_path)
    record_figures(exit_s=result["seconds"], all_processes_gone_s=result["all_ended"])
