"""docs/python.md runs as it is: jobs from Python, their results, and an agent with the trained adapter."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import pixelis
from pixelis.config import load
from pixelis.datasets import card_questions
from pixelis.datasets.cards import render
from pixelis.errors import BadConfig, BadInput, MissingFile, PixelisError
from pixelis.policy import checkpoint
from pixelis.telemetry import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("ray_cluster")]

PAGE = Path(__file__).resolve().parents[2] / "docs/python.md"


@pytest.mark.long
def test_the_page_trains_evaluates_and_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = card_questions.question_row("test", 7, 0)
    Image.fromarray(render(row["media"][0]["uri"])).save("card.png")
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)  # noqa: S102
    sft, rft, report = names["sft"], names["rft"], names["report"]
    assert sft.checkpoint == checkpoint.latest(tmp_path / "runs/python/sft")
    assert sft.metrics["step"].to_pylist() == list(range(1, 21))
    losses = sft.metrics["policy/loss"].to_pylist()
    assert losses[-1] < losses[0]
    assert losses == [event["policy/loss"] for event in events.read(sft.run_dir, "step/sft")]
    assert (rft.run_dir, rft.metrics["step"].to_pylist()) == (tmp_path / "runs/python/rft", [1, 2])
    assert rft.checkpoint == checkpoint.latest(rft.run_dir)
    (row,) = report.metrics.to_pylist()
    assert row.items() <= json.loads((report.run_dir / "evaluation.json").read_text()).items()
    assert row["n"] == 8
    assert (report.run_dir / "report.html").is_file()
    assert len(names["answer"].samples) == 4
    mistakes(rft.checkpoint, tmp_path)


def mistakes(adapter: Path, folder: Path) -> None:
    """They raise the errors whose messages the commands print; nothing exits."""
    damaged = folder / "step_00000002"
    shutil.copytree(adapter, damaged)
    weights = damaged / "adapter.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    broken = load("configs/nano/evaluate.yaml", {"policy.adapter": damaged, "run.dir": folder / "broken"})
    cases: list[tuple[type[PixelisError], Any, str]] = [
        (BadConfig, lambda: pixelis.rft(rft={"step": 3}), "did you mean `rft.steps`"),
        (BadConfig, lambda: pixelis.sft(sft={"batch": 0}), r"sft\.batch"),
        (MissingFile, lambda: pixelis.evaluate("configs/nano/evaluat.yaml"), "no configuration file"),
        (BadInput, lambda: pixelis.evaluate(broken), "damaged"),
    ]
    for kind, call, message in cases:
        with pytest.raises(kind, match=message) as caught:
            call()
        assert caught.value.fix or message == "damaged"
