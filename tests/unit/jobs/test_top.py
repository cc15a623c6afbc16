"""`pixelis top` on a run and its errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.text import Text

from pixelis.errors import InfraFailure, MissingFile
from pixelis.jobs.top import Service, _watch, curve
from pixelis.telemetry.events import EventLog


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pixelis.jobs.top", *arguments], capture_output=True, text=True
    )


def test_a_run_is_drawn_with_its_curves_and_alarms(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log:
        log.write("stage", name="starting the engine")
        first = top(str(tmp_path), "--once").stdout
        for step in range(1, 21):
            log.write("step/policy", step=step, **{"train/accuracy": step / 20, "policy/kl": step / 100})
        # Repeated after a resume
        log.write("step/policy", step=20, **{"train/accuracy": 0.25, "policy/kl": 0.2})
        log.write("evaluation", step=20, **{"evaluate/accuracy": 0.875})
        log.write("notice", text="waits for a node")
    assert "no step yet: starting the engine" in first
    shown = top(str(tmp_path), "--once")
    assert shown.returncode == 0
    # The repeated step counts once
    for text in ("step 20", "0.05 to 0.95", "0.875", "KL to the start", "waits for a node"):
        assert text in shown.stdout


def test_what_cannot_be_watched_is_named_with_a_fix(tmp_path: Path) -> None:
    for arguments, code in (((str(tmp_path), "--once"), 1), (("http://127.0.0.1:9", "--once"), 1), ((), 2)):
        refused = top(*arguments)
        assert refused.returncode == code
        assert "fix:" in refused.stderr


def test_another_service_and_one_that_is_away_are_named() -> None:
    answers: dict[str, tuple[int, str]] = {}

    def reply(request: httpx.Request) -> httpx.Response:
        code, text = answers.get(request.url.path, (404, '{"detail": "Not Found"}'))
        return httpx.Response(code, text=text)

    service = Service("http://service")
    service.http = httpx.Client(transport=httpx.MockTransport(reply))
    for health in ((404, "{}"), (200, "[1]"), (200, "hello")):
        answers["/healthz"] = health
        with pytest.raises(InfraFailure, match="no Pixelis service"):
            service.draw()
    answers["/healthz"] = (503, '{"status": "no generator answers", "generators": 0, "memory": null}')
    answers["/v1/evolution"] = (503, '{"error": {"message": "starting"}}')
    with pytest.raises(InfraFailure, match="answers /v1/evolution with 503"):
        service.draw()
    answers["/v1/evolution"] = (200, '{"counts": {"answered": 3}}')
    service.draw()  # the health is drawn though it is bad


def test_a_service_that_is_away_for_a_while_is_watched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[Any] = [Text("before"), InfraFailure("503"), Text("after"), KeyboardInterrupt()]
    drawn = []

    def draw() -> Text:
        frame = frames.pop(0)
        if isinstance(frame, BaseException):
            raise frame
        drawn.append(frame.plain)
        return frame

    monkeypatch.setattr("time.sleep", lambda _: None)
    _watch(draw, 0.0)
    assert (drawn, frames) == (["before", "after"], [])
    frames[:] = [Text("before"), MissingFile("gone")]
    with pytest.raises(MissingFile):  # a run that was removed
        _watch(draw, 0.0)


def test_a_curve_keeps_its_shape() -> None:
    assert curve([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert curve([0.0] * 500 + [1.0] * 500, 4) == "▁▁██"
    assert curve([2.0, 2.0]) == "▁▁"
    assert curve([]) == ""
