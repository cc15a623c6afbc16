"""Refinement by the policy's pass rates: episodes with and without operations on every question, run once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pixelis.config import load
from pixelis.jobs import refine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.long
def test_pass_rates_of_the_policy_select_the_questions_for_rft(ray_cluster: None, tmp_path: Path):
    overrides = ["policy.model=nano", "data.limit=10", "data.direct_share=0.3", f"run.dir={tmp_path}"]
    overrides += ["dialogue.max_turn_tokens=16"]
    overrides += ["refinement.quality.provenance=false", "refinement.quality.min_score=0.5"]
    rates = {"episodes": 3, "utility": "true", "low": 0, "high": 0.9}
    overrides += [f"refinement.pass_rate.{key}={value}" for key, value in rates.items()]
    overrides += ["refinement.gates.per_task=0", "refinement.gates.sizes=0", "telemetry.progress=false"]
    summary = refine.run(load(None, overrides))
    files = [tmp_path / f"episodes-{name}.json" for name in ("looking", "glance")]
    tables = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    questions = {row[0] for row in tables[0]["rows"]}
    assert len(questions) == summary["kept"]
    assert all(len(table["rows"]) == 3 * len(questions) for table in tables)
    assert {row[1] for row in tables[0]["rows"]} == {True}
    assert {row[1] for row in tables[1]["rows"]} == {False}
    assert all(row[2] in (0.0, 1.0) for table in tables for row in table["rows"])
    assert sum(summary["pass_rate"].values()) == summary["kept"]
    assert summary["sets"]["rft"]["questions"] == summary["pass_rate"].get("kept", 0)
    assert summary["sets"]["sft"]["count"] == summary["kept"], "demonstrations do not depend on the pass rate"
    modified = files[0].stat().st_mtime_ns
    assert refine.run(load(None, [*overrides, "refinement.pass_rate.high=1"]))["kept"] == summary["kept"]
    assert files[0].stat().st_mtime_ns == modified, "new bounds reuse the same episodes"
