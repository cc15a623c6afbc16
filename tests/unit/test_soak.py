"""What the soak of a service counts as a broken promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import Report
from benchmarks.soak_service import Outcome, Record, _report
from pixelis.config import load
from pixelis.evolution import audit

STATUS: dict[str, Any] = {"updates": 1, "policy_version": 1, "alerts": []}


@pytest.mark.parametrize(
    ("change", "promise"),
    [
        ({}, None),
        ({"stored": {"a": 1}}, "1 experiences lost"),
        ({"stored": {"a": 0, "b": 0}}, "1 feedback lost"),
        ({"unreadable": ["a"]}, "1 reads of 404"),
        ({"heads": ["f" * 64]}, "audit log"),
        ({"code": None}, "exit code None"),
        ({"left": ["raylet"]}, "processes left: raylet"),
    ],
)
def test_each_loss_is_a_broken_promise(tmp_path: Path, change: dict[str, Any], promise: str | None) -> None:
    with audit.AuditLog(tmp_path / audit.FOLDER, load(None).evolution.audit) as log:
        log.write("start", "evolution", "start")
    record = Record(
        outcomes=[Outcome("agent", 1.0, 0.1, ["200"])], acknowledged={"a": 1.0, "b": 2.0}, feedback={"a": 1}
    )
    record.unreadable, record.heads = change.get("unreadable", []), change.get("heads", [])
    stored, code = change.get("stored", {"a": 1, "b": 0}), change.get("code", 130)
    broken = _report(Report("soak"), record, stored, STATUS, code, change.get("left", []), tmp_path)
    assert [text for text in broken if promise is None or promise not in text] == []
    assert bool(broken) is (promise is not None)
