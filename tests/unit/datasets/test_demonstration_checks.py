"""Demonstrations that cannot be learnt from are found when they are read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_policy
from command_line import job_of
from PIL import Image

from pixelis.actors.rollouts import Rollouts
from pixelis.config import Config, load, parse
from pixelis.datasets.demonstration_store import DemonstrationStore
from pixelis.datasets.demonstration_stream import demonstrations
from pixelis.datasets.questions import read_rows
from pixelis.errors import BadImage, BadInput
from pixelis.jobs.dry_run import check_inputs
from pixelis.records import Demonstration, Question
from pixelis.telemetry import events

LOOK = {"think": "closer", "op": "zoom_in", "box": [0.1, 0.1, 0.5, 0.5]}
ANSWER = {"answer": "7"}


def read(folder: Path, *rows: dict[str, Any], overrides: tuple[str, ...] = ()) -> list[str]:
    path = folder / "demonstrations.jsonl"
    Image.new("RGB", (64, 64)).save(folder / "picture.png")
    media = [{"id": "img0", "uri": "picture.png"}]
    every = {"question": "Which?", "media": media, "answers": ["7"]}
    lines = [{"id": f"d{i}", **every, **row} for i, row in enumerate(rows)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return [row.id for row in demonstrations(load(None, list(overrides)), str(path), 1)]


def test_a_sound_demonstration_passes_and_a_masked_mistake_may_be_wrong(tmp_path: Path) -> None:
    mistake = {"op": "zoom_in", "box": [3, 4, 50, 60], "learn": False}
    masked = {"turns": [mistake, LOOK, ANSWER], "scorer": "exact"}
    assert read(tmp_path, {"turns": [LOOK, ANSWER]}, masked) == ["d0", "d1"]


@pytest.mark.parametrize(
    ("row", "column", "message"),
    [
        ({"turns": [LOOK]}, "turns.0", "the last turn calls an operation"),
        ({"turns": [ANSWER, LOOK, ANSWER]}, "turns.0", "only the last turn answers"),
        ({"turns": [{**LOOK, "op": "zoom"}, ANSWER]}, "turns.0.op", "did you mean"),
        ({"turns": [{**LOOK, "box": [10, 20, 300, 400]}, ANSWER]}, "turns.0.box", "not pixels"),
        (
            {"turns": [{"op": "zoom_in", "bbox": [0, 0, 1, 1]}, ANSWER]},
            "turns.0.arguments",
            "arguments are box",
        ),
        ({"turns": [LOOK, ANSWER], "scorer": "exakt"}, "scorer", "did you mean `exact`?"),
    ],
)
def test_errors_name_their_location(tmp_path: Path, row: dict[str, Any], column: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(tmp_path, {"turns": [LOOK, ANSWER]}, row)
    assert f"demonstrations.jsonl, row 2 (d1), column {column}: " in str(caught.value)
    assert message in str(caught.value)
    assert "pydantic" not in str(caught.value)
    assert read(tmp_path, {"turns": [LOOK, ANSWER]}, row, overrides=("data.max_bad_rows=1",)) == ["d0"]


def test_a_limit_counts_usable_demonstrations(tmp_path: Path) -> None:
    good, bad = {"turns": [LOOK, ANSWER]}, {"turns": [LOOK]}
    few = ("data.limit=2", "data.max_bad_rows=1")
    assert read(tmp_path, bad, good, good, good, bad, overrides=few) == ["d1", "d2"]


# -- what only the media show --------------------------------------------------------------------------------


def job(folder: Path, name: str, source: str, **data: float) -> Config:
    room = {"max_context": 512, "input": {"min_pixels": 4096, "max_pixels": 4096}}
    own = {"data": {name: source, **data}, "run": {"dir": str(folder / "run")}, "evaluate": {"sets": {}}}
    return parse({**own, "policy": {"model": str(tiny_policy.folder("qwen2_5_vl"))}, "dialogue": room})


def write(folder: Path, *changes: dict[str, Any]) -> str:
    """Rows of a table with changes; the pictures are good, thin and no picture at all."""
    Image.new("RGB", (64, 64)).save(folder / "good.png")
    Image.new("RGB", (3, 900)).save(folder / "thin.png")
    (folder / "broken.png").write_bytes(b"no picture")
    every = {"image": "good.png", "question": "What?", "answer": "no"}
    rows = [{"id": f"t{i}", **every, **row} for i, row in enumerate(changes)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(folder / "rows.jsonl")


FAULTS: list[tuple[dict[str, str], tuple[str, ...]]] = [
    ({"image": "thin.png"}, ("thin.png", "3 x 900", "200 times")),
    ({"image": "broken.png"}, ("broken.png", "cannot be decoded")),
    ({"question": "What? " * 600}, ("tokens are longer than dialogue.max_context 512",)),
]


@pytest.mark.parametrize(("change", "words"), FAULTS)
@pytest.mark.parametrize(
    ("kind", "key"), [("sft", "demonstrations"), ("rft", "train"), ("evaluate", "evaluate")]
)
def test_a_dry_run_names_the_row_that_cannot_be_shown(
    tmp_path: Path, capsys: Any, kind: str, key: str, change: dict[str, str], words: tuple[str, ...]
) -> None:
    source, inputs = write(tmp_path, {}, change, {}), job_of(kind).inputs
    with pytest.raises(BadInput) as caught:
        check_inputs(inputs(job(tmp_path, key, source)))
    assert all(word in caught.value.message for word in ("rows.jsonl, row 2 (t1): ", *words))
    check_inputs(inputs(job(tmp_path, key, source, probe_rows=0)))
    if key == "evaluate":  # a held-out set must be complete
        return
    capsys.readouterr()
    check_inputs(inputs(job(tmp_path, key, source, max_bad_rows=1)))
    assert "rows.jsonl, row 2 (t1): " in capsys.readouterr().err
    with pytest.raises(BadInput, match="2 bad rows"):
        check_inputs(inputs(job(tmp_path, key, write(tmp_path, change, change, {}), max_bad_rows=1)))


def test_a_run_logs_the_row_of_a_question_that_cannot_be_shown(tmp_path: Path) -> None:
    class Router:
        async def rollout(self, request: Any, reserved: Any) -> None:
            raise BadImage("thin.png: too thin", code="image_too_thin")

    (question,) = read_rows(write(tmp_path, {}))
    assert isinstance(question, Question)
    rollouts = Rollouts(job(tmp_path, "train", "rows.jsonl"), Router(), [object()])  # type: ignore[arg-type, list-item]
    assert asyncio.run(rollouts.group(question, 0)) == "image_too_thin"
    (event,) = events.read(tmp_path / "run", "bad_row")
    expected = ("rows.jsonl", "1", "t0", "thin.png: too thin")
    assert (Path(event["file"]).name, event["row"], event["id"], event["message"]) == expected


def test_stored_demonstrations_know_their_rows(tmp_path: Path) -> None:
    source = write(tmp_path, {}, {})
    rows = [row for row in read_rows(source, Demonstration) if isinstance(row, Demonstration)]
    store = DemonstrationStore.fill(tmp_path / "store", rows, ["golden"])
    assert [store[i].origin for i in range(2)] == [(source, "1"), (source, "2")]
    assert store[1].place.endswith("rows.jsonl, row 2 (t1)")
