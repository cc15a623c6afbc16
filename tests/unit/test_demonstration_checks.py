"""Demonstrations that cannot be learnt from are found when they are read, each with what is wrong and how to correct it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pixelis.config import load
from pixelis.datasets.demonstration_stream import demonstrations
from pixelis.errors import BadInput

LOOK = {"think": "closer", "op": "zoom_in", "box": [0.1, 0.1, 0.5, 0.5]}
ANSWER = {"answer": "7"}


def read(folder: Path, *rows: dict[str, Any], overrides: tuple[str, ...] = ()) -> list[str]:
    path = folder / "demonstrations.jsonl"
    Image.new("RGB", (64, 64)).save(folder / "picture.png")
    media = [{"id": "img0", "uri": "picture.png"}]
    lines = [{"id": f"d{i}", "question": "Which?", "media": media, "answers": ["7"], **row} for i, row in enumerate(rows)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return [row.id for row in demonstrations(load(None, list(overrides)), str(path), 1)]


def test_a_sound_demonstration_passes_and_a_masked_mistake_may_be_wrong(tmp_path: Path) -> None:
    mistake = {"op": "zoom_in", "box": [3, 4, 50, 60], "learn": False}
    assert read(tmp_path, {"turns": [LOOK, ANSWER]}, {"turns": [mistake, LOOK, ANSWER], "scorer": "exact"}) == ["d0", "d1"]


@pytest.mark.parametrize(
    ("row", "column", "message"),
    [
        ({"turns": [LOOK]}, "turns.0", "the last turn calls an operation"),
        ({"turns": [ANSWER, LOOK, ANSWER]}, "turns.0", "only the last turn answers"),
        ({"turns": [{**LOOK, "op": "zoom"}, ANSWER]}, "turns.0.op", "did you mean `zoom_in`?"),
        ({"turns": [{**LOOK, "box": [10, 20, 300, 400]}, ANSWER]}, "turns.0.box", "not pixels"),
        ({"turns": [{"op": "zoom_in", "bbox": [0, 0, 1, 1]}, ANSWER]}, "turns.0.arguments", "arguments are box"),
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
