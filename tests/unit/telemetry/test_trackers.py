"""Trackers: each writes its own files, and none ends a run by its failure."""

from __future__ import annotations

import logging
import os
import sys
import types

import pytest
from accelerate import tracking

from pixelis.config import Config, parse
from pixelis.errors import MissingDependency
from pixelis.jobs.driver import run_folder
from pixelis.telemetry import trackers
from pixelis.telemetry.trackers import Tracker

METRICS = {"reward/accuracy": 0.5, "note": "text", "policy/loss": float("nan")}


def config(folder, *names: str) -> Config:
    return parse({"run": {"dir": str(folder)}, "telemetry": {"trackers": list(names)}})


def test_a_failing_tracker_gives_one_warning_and_the_run_continues(tmp_path, caplog, monkeypatch):
    def fail(self, values, step):
        raise ConnectionError("the tracker is down")

    monkeypatch.setattr(tracking.TensorBoardTracker, "log", fail)
    with caplog.at_level(logging.WARNING), Tracker(config(tmp_path, "tensorboard")) as tracker:
        assert tracker.names == ["tensorboard"]
        for step in range(3):
            tracker.log(step, METRICS)
        assert tracker.names == []
    assert [r.message for r in caplog.records] == [
        "tracker tensorboard failed and is off for the rest of this run: ConnectionError: the tracker is down"
    ]


def test_tensorboard_files_hold_the_numbers_of_each_step(tmp_path):
    with Tracker(config(tmp_path, "tensorboard"), only=("wandb",)) as tracker:
        assert tracker.names == []
    assert not (tmp_path / "tensorboard").exists()
    with Tracker(config(tmp_path, "tensorboard")) as tracker:
        tracker.log(1, METRICS)
    (file,) = (tmp_path / "tensorboard").glob("events.*")
    written = file.read_bytes()
    assert b"reward/accuracy" in written
    assert b"policy/loss" not in written


def test_a_run_that_starts_again_hides_in_tensorboard_what_it_logged_before(tmp_path):
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    for resumed in (0, 5):  # killed before its first checkpoint, and after the one of step 5
        with Tracker(config(tmp_path / str(resumed), "tensorboard"), resumed) as tracker:
            tracker.log(resumed + 1, METRICS)
    hidden = []
    for file in tmp_path.glob("*/tensorboard/*"):
        content = file.read_bytes()
        while content:  # length, its checksum, the event, its checksum
            size = int.from_bytes(content[:8], "little")
            event = event_pb2.Event.FromString(content[12 : 12 + size])
            hidden += [event.step] if event.WhichOneof("what") == "session_log" else []
            content = content[16 + size :]
    assert sorted(hidden) == [1, 6]


@pytest.mark.parametrize(("name", "package"), trackers.PACKAGES.items())
def test_a_job_does_not_start_without_a_configured_tracker(tmp_path, monkeypatch, name, package):
    if package in ("wandb", "tensorboardX"):  # installed
        trackers.require_trackers(config(tmp_path / "run", name))
    monkeypatch.setitem(sys.modules, package, None)
    run = run_folder(config(tmp_path / "run", name))
    with pytest.raises(MissingDependency, match=package) as caught, run:
        pass
    assert f"take {name} out of telemetry.trackers" in str(caught.value)
    assert not (tmp_path / "run").exists()
    trackers.require_trackers(parse({}))


class Recorder:
    """Stands in for the package of a tracker: records the calls on it."""

    __version__ = "99"

    def __init__(self):
        self.calls: list[tuple[str, tuple, dict]] = []

    def __getattr__(self, name):
        def record(*arguments, **options):
            self.calls.append((name, arguments, options))
            return self

        return record

    def __getitem__(self, key):
        return self

    def __len__(self):
        return 1


@pytest.mark.parametrize("name", ["mlflow", "swanlab", "comet", "trackio"])
def test_a_tracker_gets_each_step_and_is_closed(tmp_path, monkeypatch, caplog, name):
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != "COMET_API_KEY"})
    monkeypatch.setitem(sys.modules, trackers.PACKAGES[name], package := Recorder())
    if name == "swanlab":
        package.config = {}
    with Tracker(config(tmp_path, name)) as tracker:
        tracker.log(7, METRICS)
        assert tracker.names == [name], caplog.text
    logged = [(a, o) for call, a, o in package.calls if call in ("log", "log_metrics", "log_metric")]
    assert logged in ([(({"reward/accuracy": 0.5},), {"step": 7})], [(("reward/accuracy", 0.5), {"step": 7})])
    assert package.calls[-1][0] in ("end_run", "finish", "end")
    monkeypatch.setitem(sys.modules, trackers.PACKAGES[name], None)
    with Tracker(config(tmp_path, name)) as tracker:
        assert tracker.names == []
    assert f"pip install {trackers.PACKAGES[name]}" in caplog.text


@pytest.mark.slow
@pytest.mark.long
def test_wandb_itself_writes_offline_without_a_key(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    with Tracker(config(tmp_path, "wandb")) as tracker:
        tracker.log(1, METRICS)
        assert tracker.names == ["wandb"]
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1


def test_wandb_without_a_network_writes_offline(tmp_path, caplog, monkeypatch):
    modes, run = [], Recorder()

    def init(mode, **arguments):
        modes.append(mode)
        if mode == "online":
            raise ConnectionError("no such host\nand more")
        return run

    fake = types.SimpleNamespace(init=init, Error=ConnectionError, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "key")
    with caplog.at_level(logging.WARNING), Tracker(config(tmp_path, "wandb")) as tracker:
        tracker.log(3, METRICS)
    assert modes == ["online", "offline"]
    assert run.calls == [("log", ({"reward/accuracy": 0.5},), {"step": 3}), ("finish", (), {})]
    assert [r.message for r in caplog.records] == [
        "cannot reach Weights & Biases, writing offline instead: no such host"
    ]
