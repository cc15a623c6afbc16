"""What every job's driver does for its user: one owner of a run folder, clear ends."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_policy
from small_disks import fill, make_read_only, small_disk

from pixelis.actors import node_watch
from pixelis.config import Config, parse
from pixelis.errors import BadConfig, BadInput, InfraFailure, MissingFile
from pixelis.jobs import driver as jobs
from pixelis.jobs import run_lock
from pixelis.jobs import watch as watching
from pixelis.policy import checkpoint
from pixelis.policy.adapters import save_adapter
from pixelis.telemetry import lineage
from pixelis.telemetry.events import EventLog


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make(tmp_path / "run")


def make(run_dir: Path, **policy: object) -> Config:
    policy = {"model": str(tiny_policy.folder("qwen3_vl")), **policy}
    return parse({"policy": policy, "run": {"dir": str(run_dir)}, "telemetry": {"progress": True}})


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "POLL_S", 0.02)


# -- the run folder ------------------------------------------------------------------------------------------


def test_a_run_folder_holds_its_lock_while_it_is_used_and_its_configuration_for_ever(config: Config) -> None:
    with jobs.run_folder(config) as folder:
        held = json.loads((folder / "lock.json").read_text())
        assert (held["pid"], held["host"]) == (os.getpid(), socket.gethostname())
    assert not (folder / "lock.json").exists()
    assert Config.model_validate(jobs.yaml.safe_load((folder / "config.yaml").read_text())) == config
    with jobs.run_folder(config):
        pass


def test_a_full_or_read_only_run_folder_is_one_message_and_leaves_no_lock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(folder: Path) -> str:
        with pytest.raises(SystemExit) as caught, jobs.driver("serve"), jobs.run_folder(make(folder)):
            pass
        assert caught.value.code == 1
        return capsys.readouterr().err

    with small_disk(tmp_path / "disk", 1) as disk:
        ballast = fill(disk)
        for folder in (disk, disk / "new"):
            message = start(folder)
            assert message.startswith(f"pixelis serve: the disk refuses {disk}"), message
            assert "no space" in message
            assert len(message.splitlines()) == 2, "the message and its fix"
        ballast.unlink()
        with jobs.run_folder(make(disk)):
            pass
        make_read_only(disk)
        assert "read-only" in start(disk)


def test_an_operation_that_does_not_exist_is_refused_before_anything_is_written(config: Config) -> None:
    toolbox = config.toolbox.model_copy(update={"operations": ["own.module:Shape", "zoom"]})
    wrong = config.model_copy(update={"toolbox": toolbox})
    with pytest.raises(BadConfig, match="'zoom'") as caught, jobs.run_folder(wrong):
        pass
    assert "zoom_in" in str(caught.value)
    assert not Path(config.run.dir).exists()


@pytest.fixture
def holder(config: Config) -> Iterator[subprocess.Popen[str]]:
    """A process that has the run folder."""
    hold = (
        "import sys, time; from pixelis.config import Config; from pixelis.jobs import driver\n"
        "with driver.run_folder(Config.model_validate_json(sys.argv[1])): print(1, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", hold, config.model_dump_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is on another machine."""
    monkeypatch.setattr(run_lock, "boot_id", lambda: "another machine")
    monkeypatch.setattr(run_lock, "LEASE_S", 3.0)


def is_refused(config: Config, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(BadConfig) as caught, jobs.run_folder(config):
        pass
    for word in (str(holder.pid), socket.gethostname()):
        assert word in caught.value.message
    assert "run.dir" in (caught.value.fix or "")
    held = json.loads((Path(config.run.dir) / "lock.json").read_text())
    assert held["pid"] == holder.pid, "nothing of the first run is overwritten"


def test_a_second_run_in_a_folder_in_use_is_refused_naming_its_owner(
    config: Config, holder: subprocess.Popen[str]
) -> None:
    is_refused(config, holder)
    holder.kill()
    holder.wait()
    with jobs.run_folder(config) as folder:  # the kernel has released the lock of the dead process
        assert json.loads((folder / "lock.json").read_text())["pid"] == os.getpid()


@pytest.mark.long
def test_a_second_machine_is_refused_where_locks_do_not_reach_it(
    config: Config, holder: subprocess.Popen[str], elsewhere: None
) -> None:
    (Path(config.run.dir) / ".lock").unlink()  # as if it were another machine's
    is_refused(config, holder)


def test_a_second_machine_takes_over_from_a_lost_one_whose_lock_is_still_held(
    config: Config, holder: subprocess.Popen[str], elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.send_signal(signal.SIGSTOP)  # cut off: it keeps the lock
    monkeypatch.setattr(time, "time", lambda: 1.0)  # whatever its clock says
    with jobs.run_folder(config) as folder:
        assert json.loads((folder / "lock.json").read_text())["pid"] == os.getpid()
        holder.send_signal(signal.SIGCONT)
        assert holder.wait(20) == 1, "it writes nothing more"
        assert f"{folder} was taken over by" in holder.stderr.read()
        assert json.loads((folder / "lock.json").read_text())["pid"] == os.getpid()
    assert not (folder / "lock.json").exists()


def test_another_policy_in_a_folder_with_checkpoints_is_refused_and_resume_false_starts_over(
    tmp_path: Path,
) -> None:
    config = make(tmp_path / "run")
    with jobs.run_folder(config) as folder:
        checkpoint.write(folder, 3, {}, {})
        EventLog(folder).write("step/sft", step=3, **{"policy/loss": 2.5})
        assert watching.latest_step(folder, "step/sft", ("policy/loss", "policy/kl")) == (3, {"loss": 2.5})
        (folder / "consumed.jsonl").write_text("{}\n")
        (folder / "STOP").touch()
    other = make(tmp_path / "run", lora={"rank": 2})
    with pytest.raises(BadConfig, match=r"policy\.lora") as caught, jobs.run_folder(other):
        pass
    assert "run.resume=false" in (caught.value.fix or "")
    with jobs.run_folder(config):
        assert checkpoint.latest(folder) is not None
        assert not (folder / "STOP").exists(), "a stop of the last run does not end this one"
    repeated = other.model_copy(update={"run": other.run.model_copy(update={"resume": False})})
    with jobs.run_folder(repeated):
        assert checkpoint.latest(folder) is None
        assert watching.latest_step(folder, "step/sft") == (0, {})
        assert not (folder / "consumed.jsonl").exists(), "the new run has learnt from nothing yet"
        known = lineage.read(folder)
        assert not known.earlier, "it is made from nothing of the old one"


def test_unreadable_inputs_are_reported_before_anything_starts(tmp_path: Path) -> None:
    gone = make(tmp_path / "run", model=str(tmp_path / "no-model"))
    damaged, lora = tmp_path / "step_00000001", tmp_path / "step_00000003"
    save_adapter(tiny_policy.random_adapter(), lora)
    save_adapter(tiny_policy.random_adapter(), damaged)
    file = damaged / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-3] + b"abc")
    cases: list[tuple[Config, tuple[str, ...], type[BadInput], str]] = [
        (gone, (), MissingFile, "no-model"),
        (make(tmp_path / "run", adapter=str(tmp_path / "step_00000002")), (), MissingFile, "step_00000002"),
        (make(tmp_path / "run", adapter=str(damaged)), (), BadInput, "damaged"),
        (make(tmp_path / "run", adapter=str(lora), full=True), (), BadConfig, "is a LoRA adapter"),
        (make(tmp_path / "run"), (str(tmp_path / "no.jsonl"),), MissingFile, "no.jsonl"),
    ]
    for config, sources, kind, word in cases:
        with pytest.raises(kind, match=word) as caught, jobs.run_folder(config, *sources):
            pass
        assert caught.value.fix
    assert not (tmp_path / "run").exists()


# -- how a job ends ------------------------------------------------------------------------------------------


@pytest.fixture
def keep_handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("keep_handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_in_the_background_of_a_script_ends_by_either_signal(number: signal.Signals) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the shell does
    with pytest.raises(SystemExit) as caught, jobs.driver("rft"):
        signal.raise_signal(number)
    assert caught.value.code == 130


@pytest.mark.usefixtures("keep_handlers")
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadConfig("key x is unknown", fix="see --help"), 2),
        (MissingFile("no model", fix="make one"), 1),
        (InfraFailure("no generator", fix="add nodes"), 1),
        (KeyboardInterrupt(), 130),
        (jobs.Stopped(), 130),
    ],
)
def test_an_error_becomes_one_message_and_an_exit_code(
    error: BaseException, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, jobs.driver("rft"):
        raise error
    assert caught.value.code == code
    output = capfd.readouterr().err
    assert output.startswith("pixelis rft: ")
    assert "Traceback" not in output
    if isinstance(error, BadInput | InfraFailure):
        assert error.message in output
        assert f"fix: {error.fix}" in output


def test_a_job_without_the_head_of_its_cluster_ends_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def exit(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(watching.os, "_exit", exit)
    monkeypatch.setattr(watching, "HEAD_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(
            node_watch.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=address)
        )
        head = node_watch.HeadWatch()
        watching.end_without_head("rft", head)
    watching.end_without_head("rft", head)  # it may only restart
    time.sleep(0.2)
    with pytest.raises(SystemExit, match="1"):
        watching.end_without_head("rft", head)
    output = capfd.readouterr().err
    assert output.startswith(f"pixelis rft: the head of the Ray cluster at {address} has not answered for ")
    assert "fix: start the cluster again" in output


# -- while work runs -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_polls")
def test_watch_shows_progress_and_gives_the_result_or_the_error(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    done = [0]

    def work() -> str:
        for _ in range(5):
            time.sleep(0.05)
            done[0] += 1
        return "checkpoint"

    assert watching.watch(config, "sft", 5, work, lambda: (done[0], {"loss": 1.25})) == "checkpoint"
    shown = capsys.readouterr().out
    assert "[sft] 5/5" in shown
    assert "loss 1.25" in shown

    def fail() -> None:
        raise InfraFailure("three steps were not finite")

    with pytest.raises(InfraFailure, match="not finite"):
        watching.watch(config, "sft", 5, fail, lambda: (0, {}))


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def terminated(makes_steps: bool) -> Callable[[], tuple[int, dict[str, Any]]]:
    """Progress of a job that gets a SIGTERM when its driver asks for the fourth time."""
    calls = itertools.count()

    def poll() -> tuple[int, dict[str, Any]]:
        if (call := next(calls)) == 3:
            terminate()
        return (call if makes_steps else 0), {}

    return poll


@pytest.mark.usefixtures("keep_handlers", "quick_polls")
def test_a_sigterm_asks_the_learner_to_stop_and_waits_for_its_checkpoint(
    config: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    Path(config.run.dir).mkdir()
    saved, released = [], threading.Event()

    def learner() -> None:
        while not (jobs.stop_file(config).exists() and released.is_set()):
            time.sleep(0.01)
        saved.append("checkpoint")

    with pytest.raises(SystemExit) as caught, jobs.driver("rft"):
        watching.watch(config, "rft", 5, learner, terminated(makes_steps=False), stop=released.set)
    assert caught.value.code == 130
    assert saved == ["checkpoint"]
    assert "checkpoint" in capfd.readouterr().err


@pytest.mark.usefixtures("keep_handlers", "quick_polls")
def test_a_long_step_is_saved_in_the_time_that_a_job_has_to_stop(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "START_STOP_S", 0.2)
    for job, wait, seconds in (("", "120", 600), ("job", "", 600), ("job", "120", 115), ("job", "3", 0.2)):
        monkeypatch.setenv("RAY_JOB_SUBMISSION_ID", job)
        monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", wait)
        assert watching.stop_s() == seconds
    Path(config.run.dir).mkdir()
    saved = list[str]()

    def learner() -> None:
        while not jobs.stop_file(config).exists():
            time.sleep(0.01)
        time.sleep(0.5)
        saved.append("checkpoint")

    with pytest.raises(SystemExit), jobs.driver("rft"):
        watching.watch(config, "rft", 5, learner, terminated(makes_steps=True), grace_s=60)
    assert saved == ["checkpoint"]
    started, end, again = time.monotonic(), threading.Event(), threading.Timer(0.1, terminate)
    with pytest.raises(SystemExit) as caught, jobs.driver("rft"):
        watching.watch(config, "rft", 5, end.wait, terminated(makes_steps=True), stop=again.start, grace_s=60)
    assert (caught.value.code, time.monotonic() - started < 30) == (130, True)
    end.set()
