"""The worked example of docs/operations.md is the file in docs/examples, and it runs as a user's own operation does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import skimage.data

from pixelis.operations import Scene, execute, select
from pixelis.records import Action, ImageView

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def rotate(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    for name in [n for n in sys.modules if n == "docs" or n.startswith("docs.")]:
        monkeypatch.delitem(sys.modules, name)
    return {operation.name: operation for operation in select(["zoom_in", "docs.examples.rotate:Rotate"])}


def scene() -> Scene:
    picture = skimage.data.coffee()
    return Scene({"img0": picture}, [ImageView(id="img0", source_size=(600, 400), view_size=(600, 400))])


def test_the_document_shows_the_file():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/operations.md").read_text(), re.DOTALL)
    assert blocks == [(ROOT / "docs/examples/rotate.py").read_text()]


@pytest.mark.parametrize(("angle", "turns"), [(90, 3), (180, 2), (270, 1)])
def test_it_turns_clockwise_and_says_so(rotate, angle, turns):
    observation, views = execute(Action(op="rotate", arguments={"angle": angle, "box": [0.5, 0, 1, 0.5]}), scene(), rotate)
    assert observation.status == "ok"
    assert (views[0] == np.rot90(skimage.data.coffee()[:200, 300:], turns)).all()
    assert observation.images[0].box == (0.5, 0.0, 1.0, 0.5)
    assert observation.images[0].view_size == ((200, 300) if angle != 180 else (300, 200))
    assert "not turned" in observation.text


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"angle": 45}, "bad_arguments"),
        ({}, "bad_arguments"),
        ({"angle": 90, "box": [1, 0, 0, 1]}, "bad_box"),
        ({"angle": 90, "box": [2, 2, 3, 3]}, "out_of_range"),
        ({"angle": 90, "box": [0, 0, 0.001, 1]}, "too_small"),
    ],
)
def test_its_errors_have_codes(rotate, arguments, code):
    observation, views = execute(Action(op="rotate", arguments=arguments), scene(), rotate)
    assert (observation.status, observation.code, views) == ("error", code, [])
