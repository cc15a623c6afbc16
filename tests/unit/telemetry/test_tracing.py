"""Traces: nesting across processes, work done later for many requests, files that a viewer reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import pixelis

from pixelis.config import load
from pixelis.errors import BadConfig
from pixelis.telemetry import tracing

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

PROCESSES = """
import sys, time
from pixelis.config import load
from pixelis.telemetry import tracing
role, folder, parent = sys.argv[1:]
tracing.start(load(None, ["telemetry.traces=file", f"run.dir={folder}"]), role)
if role == "gateway":
    with tracing.span("POST /v1/agent", parent or None, samples=2) as span:
        began = tracing.begin("rollout")
        print(tracing.traceparent(began))
        began.end()
        try:
            with tracing.span("store"):
                raise OSError("disk <full>")
        except OSError:
            pass
else:
    with tracing.span("group", parent):
        with tracing.span("zoom_in", target="img0"):
            time.sleep(0.01)
    tracing.record("update", [parent, parent, ""], time.time() + 30, step=3)
"""


def process(role: str, folder: Path, parent: str = "") -> str:
    """Run a process that records spans; returns what it prints."""
    command = [sys.executable, "-c", PROCESSES, role, str(folder), parent]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one traced request, in whose trace two processes recorded spans."""
    folder = tmp_path_factory.mktemp("traced")
    process("generator", folder, process("gateway", folder, CALLER))
    return folder


def test_a_request_is_one_trace_over_its_processes_and_joins_that_of_its_caller(folder: Path) -> None:
    traces = tracing.read(folder / "traces")
    assert list(traces) == [CALLER.split("-")[1]]
    (spans,) = traces.values()
    rows = [(depth, span["name"], span["service"]) for depth, span in tracing.tree(spans)]
    assert rows == [
        (0, "POST /v1/agent", "gateway"),
        (1, "rollout", "gateway"),
        (2, "group", "generator"),
        (3, "zoom_in", "generator"),
        (2, "update", "generator"),
        (1, "store", "gateway"),
    ]
    by_name = {span["name"]: span for span in spans}
    assert by_name["zoom_in"]["end"] - by_name["zoom_in"]["start"] >= 0.01
    assert by_name["zoom_in"]["attributes"] == {"target": "img0"}
    assert by_name["store"]["failed"]
    assert not by_name["group"]["failed"]


def test_an_incomplete_line_costs_no_other_span(folder: Path, tmp_path: Path) -> None:
    for path in (folder / "traces").glob("*.jsonl"):
        torn = '{"resourceSpans": [{"resour\n[]\n' + path.read_text() + '{"resourceSpans'
        (tmp_path / path.name).write_text(torn)
    assert sum(map(len, tracing.read(tmp_path).values())) == 6


def test_without_recording_the_caller_s_context_is_passed_on() -> None:
    assert tracing.traceparent() == ""
    with tracing.span("request", CALLER) as span:
        assert not span.is_recording()
        assert tracing.traceparent() == CALLER
        assert tracing.trace_id() == CALLER.split("-")[1]
    with tracing.span("request", "00-not-a-traceparent"):
        assert tracing.traceparent() == ""


def test_the_command_lists_traces_and_draws_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trace(*arguments: str) -> tuple[int, str, str]:
        return pixelis(capsys, monkeypatch, "trace", *arguments)

    id = CALLER.split("-")[1]
    code, listed, _ = trace(str(folder))
    assert (code, id in listed, "6 spans  POST /v1/agent" in listed) == (0, True, True)
    code, drawn, _ = trace(str(folder), id[:6])
    assert code == 0
    lines = drawn.splitlines()
    assert lines[0].startswith("POST /v1/agent")
    assert float(next(line for line in lines if "update" in line).split()[2]) > 20_000
    assert "failed" in lines[-1]
    assert "zoom_in" in (folder / "traces" / f"{id}.html").read_text()
    for arguments, expected in (
        ((str(folder), "ffff"), 1),
        ((str(folder.parent / "none"),), 1),
        ((), 2),
        ((str(folder), "--x"), 2),
    ):
        code, _, problem = trace(*arguments)
        assert (code, "fix:" in problem) == (expected, True)


def test_a_destination_is_file_or_a_url() -> None:
    assert load(None, ["telemetry.traces=https://collector:4318/v1/traces"]).telemetry.traces
    with pytest.raises(BadConfig, match="traces"):
        load(None, ["telemetry.traces=jaeger"])
