"""The learner beside a service: what fails is started again and told to Evolution."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pixelis.actors.placement import Actors
from pixelis.actors.serving import ServingActors
from pixelis.config import load
from pixelis.errors import InfraFailure, MissingFile
from pixelis.jobs import serve
from pixelis.policy import checkpoint


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the thread would have waited between two learners."""
    waited: list[float] = []
    monkeypatch.setattr(serve.ray, "get", lambda value: value)

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            return self.is_set()

    monkeypatch.setattr(serve, "threading", SimpleNamespace(Thread=threading.Thread, Event=Event))
    return waited


def learnt(folder: Path, evolve: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[serve.Learning, list[str]]:
    """The learner's thread when it has ended, and the failures that Evolution heard of."""
    heard: list[str] = []
    evolution = SimpleNamespace(learner_failed=SimpleNamespace(remote=heard.append))
    monkeypatch.setattr(serve, "evolve", evolve)
    config = load(None, [f"run.dir={folder}"])
    learning = serve.Learning(config, Actors(), ServingActors(evolution=evolution))  # type: ignore[arg-type]
    learning.thread.join(30)
    return learning, heard


def test_a_learner_that_fails_is_started_again_later_each_time_that_no_update_lies_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    outcomes = iter([1, None, None, 2, None, "end"])

    def evolve(*_: Any) -> None:
        if (outcome := next(outcomes)) == "end":
            return
        if outcome is not None:
            checkpoint.write(tmp_path, int(outcome), {}, {})
        raise (RuntimeError("gone") if outcome else InfraFailure("away"))

    learning, heard = learnt(tmp_path, evolve, monkeypatch)
    assert learning.failed is None
    assert pauses == [1.0, 2.0, 4.0, 1.0, 2.0]
    assert len(heard) == 5
    assert "RuntimeError: gone" in heard[0]


def test_permanent_failures_are_reported_and_not_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    calls = []

    def fails(*_: Any) -> None:
        calls.append(1)
        raise MissingFile("no weights")

    learning, heard = learnt(tmp_path, fails, monkeypatch)
    assert isinstance(learning.failed, MissingFile)
    assert (len(calls), heard) == (1, ["no weights"])
