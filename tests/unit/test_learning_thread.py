"""The learner beside a service: what fails now and then goes on, what cannot get anywhere ends and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pixelis.actors.cluster import Actors
from pixelis.actors.serving import Online
from pixelis.config import load
from pixelis.errors import DataFailure, InfraFailure
from pixelis.jobs import serve
from pixelis.policy import checkpoint


def test_failures_add_up_only_where_no_update_lies_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter([1, 2, None])

    def evolve(*_: Any) -> None:
        step = next(steps)
        if step is not None:
            checkpoint.write(tmp_path, step, {}, {})
        raise RuntimeError("gone")

    monkeypatch.setattr(serve, "evolve", evolve)
    learning = serve.Learning(load(None, [f"run.dir={tmp_path}"]), Actors(), Online(evolution=object()))  # type: ignore[arg-type]
    learning.thread.join(30)
    assert isinstance(learning.failed, InfraFailure)
    assert "RuntimeError: gone" in str(learning.failed)
    assert list(steps) == []


def test_an_error_of_ours_is_told_as_it_is_and_an_end_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise DataFailure("no data")

    for evolve, kind in ((fails, DataFailure), (lambda *_: None, type(None))):
        monkeypatch.setattr(serve, "evolve", evolve)
        learning = serve.Learning(load(None, [f"run.dir={tmp_path}"]), Actors(), Online(evolution=object()))  # type: ignore[arg-type]
        learning.thread.join(30)
        assert type(learning.failed) is kind
