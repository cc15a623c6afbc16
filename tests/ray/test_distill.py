"""`pixelis distill`: a policy's episodes with and without operations become demonstrations for SFT."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from memory_entries import made
from PIL import Image

from pixelis.config import MemoryConfig, load
from pixelis.datasets import card_questions, cards
from pixelis.datasets.questions import read_demonstrations
from pixelis.errors import DataFailure
from pixelis.jobs import distill, sft
from pixelis.memory import Entry, Shard
from pixelis.records import Media, Question

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NANO = ["dialogue.max_turn_tokens=24", "telemetry.progress=false", "distill.episodes=2", "data.limit=6"]


@pytest.mark.long  # tests/unit/datasets: the reader, the threshold
def test_an_exported_memory_is_played_once(ray_cluster: None, tmp_path: Path):
    """The base model writes no answers, so that no vote labels its questions: nothing is distilled."""
    picture, file = cards.render(card_questions.question_row("train", 1, 0)["media"][0]["uri"]), io.BytesIO()
    Image.fromarray(picture).resize((64, 64)).save(file, "PNG")
    question = Question(id="q", question="Which digit?", media=[Media(id="img0", uri="stored:img0")])
    shard, exported = Shard(tmp_path / "memory", MemoryConfig()), tmp_path / "exported"
    shard.add([Entry(made(i, question=question), None, {"img0": file.getvalue()}) for i in range(3)])
    exported.mkdir()
    shard.export(exported / "experiences-0.parquet")
    shard.close()
    run = tmp_path / "run"
    config = load(None, [*NANO, f"data.train={exported}?cache={tmp_path / 'cache'}", f"run.dir={run}"])
    with pytest.raises(DataFailure, match="no demonstration is left"):
        distill.run(config)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert (summary["questions"], summary["dropped"]["no_label"], summary["threshold"]) == (3, 3, None)
    played = [run / f"trajectories-{arm}.jsonl" for arm in ("looking", "glance")]
    assert [len(file.read_text(encoding="utf-8").splitlines()) for file in played] == [3, 3]
    before = [file.stat().st_mtime_ns for file in played]
    with pytest.raises(DataFailure):
        distill.run(config)
    assert [file.stat().st_mtime_ns for file in played] == before
    assert not (run / distill.FILE).exists()


@pytest.mark.long
def test_right_episodes_are_demonstrated(ray_cluster: None, tmp_path: Path):
    source, shown = "cards:?split=train&sizes=10", "data.demonstrations=cards:?split=train&sizes=10"
    trained = [shown, "data.direct_share=0.3", "sft.steps=100", "sft.batch=16", "learner.lr=2e-3"]
    adapter = sft.run(load("configs/nano/base.yaml", [*NANO, *trained, f"run.dir={tmp_path / 'sft'}"]))
    asked = [f"data.train={source}", f"policy.adapter={adapter}", "data.limit=24", f"run.dir={tmp_path}"]
    summary = distill.run(load("configs/nano/base.yaml", [*NANO, *asked]))
    rows = read_demonstrations(str(tmp_path / distill.FILE), 100, 0, 0.0)
    rows = rows[: summary["demonstrations"]]
    assert rows
    assert sum(not row.steps for row in rows) == summary["at_once"]
    assert sum(summary["categories"]["size 10"].values()) == 24 - summary["held_out"]
    for row in rows:
        assert row.final == row.answers[0]
