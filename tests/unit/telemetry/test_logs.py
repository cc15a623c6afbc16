"""Logs as JSON lines: one line a record, with its trace; a disk that is full costs no more than the lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROCESS = """
import logging, sys
from pixelis.config import load
from pixelis.telemetry import logs, tracing
config = load(None, ["telemetry.logs=true", f"run.dir={sys.argv[1]}"])
tracing.start(config, "generator")
logs.start(config, "generator")
log = logging.getLogger("pixelis.actors")
if len(sys.argv) > 2:
    (folder := __import__("pathlib").Path(sys.argv[1]) / "logs").rmdir()
    folder.write_text("no folder")
log.info("outside")
with tracing.span("group"):
    print(tracing.trace_id())
    log.warning("a line\\nand %s", "another")
    try:
        raise OSError("disk <full>")
    except OSError:
        log.exception("failed")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROCESS, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ,
    )


def test_a_record_is_one_line_with_its_trace_and_its_traceback(tmp_path: Path) -> None:
    trace_id = run(str(tmp_path)).stdout.strip()
    assert len(trace_id) == 32
    (file,) = (tmp_path / "logs").iterdir()
    outside, inside, failed = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert "trace_id" not in outside
    assert inside["trace_id"] == failed["trace_id"] == trace_id
    expected = ("a line\nand another", "warning", "generator")
    assert (inside["message"], inside["level"], inside["service"]) == expected
    assert "OSError: disk <full>" in failed["message"]


def test_a_file_that_cannot_be_written_costs_no_more_than_the_lines(tmp_path: Path) -> None:
    assert "Logging error" not in run(str(tmp_path), "break").stderr
