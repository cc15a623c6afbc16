"""A reproduction rehearsed with the embedded model: train, evaluate before and after, compare, and do nothing twice."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from command_line import pixelis

from pixelis.policy import checkpoint
from pixelis.telemetry import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = (
    *("policy.model=nano", "policy.full=false", "policy.dtype=auto", "policy.gradient_checkpointing=false"),
    *("engine.name=hf", "engine.workers=1", "engine.cpus=null", "engine.gpus=0", "engine.colocate=false"),
    *("toolbox.workers=1", "toolbox.cpus=null", "cluster.nodes.count=1", "cluster.object_store_bytes=null"),
    *("learner.workers=1", "learner.cpus=null", "learner.gpus=0", "learner.zero_stage=0"),
    *("learner.deepspeed=null", "learner.row_tokens=null", "learner.lr=0.01", "telemetry.trajectories=0"),
    *("dialogue.max_turn_tokens=null", "dialogue.max_context=null"),
    *("dialogue.input.min_pixels=null", "dialogue.input.max_pixels=null", "rewards.extractor=dialect"),
    *("data.train=cards:?split=train", "data.evaluate=cards:?split=test&seed=7", "evaluate.questions=6"),
    *("rft.prompts_per_step=2", "rft.group_size=4", "evaluate.causal_use=0"),
)


@pytest.mark.usefixtures("ray_cluster")
def test_a_reproduction_writes_one_file_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    words = (
        "reproduce",
        "configs/reproduce/r1_v/train_2b.yaml",
        *SMALL,
        f"run.dir={tmp_path}",
        "rft.steps=2",
    )
    try:
        code, out, err = pixelis(capsys, monkeypatch, *words)
        assert code == 0, err[-3000:]
        report = json.loads((tmp_path / "reproduction.json").read_text())
        again = pixelis(capsys, monkeypatch, *words)
        changed = pixelis(capsys, monkeypatch, *words, "learner.lr=0.02")
    finally:
        signal.signal(signal.SIGTERM, handler)

    (row,) = report["figures"]
    for name in ("before", "after"):
        summary = json.loads((tmp_path / name / "evaluation.json").read_text())
        assert row[name] == {key: summary[key] for key in ("accuracy", "ci95", "n")}
        assert row[name]["n"] == 6
    assert row["difference"]["n"] == 6
    assert row["difference"]["mean"] == pytest.approx(row["after"]["accuracy"] - row["before"]["accuracy"])
    (figure,) = report["published"]["figures"]
    assert (figure["published"], figure["ours"]) == (0.825, row["after"]["accuracy"])
    assert "SuperCLEVR-200" in out
    before, train, after = (report["stages"][name] for name in ("before", "train", "after"))
    last = checkpoint.latest(tmp_path / "train")
    assert last is not None
    assert train["result"] == str(last)
    assert checkpoint.step_of(last) == 2
    trained = [item for item in after["lineage"]["inputs"] if item["role"] == "adapter"]
    assert [item["sha256"] for item in trained] == [report["checkpoint_sha256"]]
    assert not [item for item in before["lineage"]["inputs"] if item["role"] == "adapter"]
    for stage in (before, train, after):
        assert {"torch", "ray", "transformers"} <= stage["versions"].keys()
        assert "CPU cores" in stage["hardware"]
        assert stage["seconds"] > 0
        assert stage["lineage"]["code"]["version"]

    assert again[0] == 0
    assert json.loads((tmp_path / "reproduction.json").read_text()) == report
    assert [len(events.read(tmp_path / name, "evaluate")) for name in ("before", "after")] == [1, 1]
    assert [event["step"] for event in events.read(tmp_path / "train", "step/policy")] == [1, 2]
    assert (changed[0], "learner.lr changed" in changed[2]) == (2, True), changed[2]
