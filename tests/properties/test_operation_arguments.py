"""Hostile arguments of the operations beside the six default ones: a result or an error with a code."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import numpy as np
import pytest
import skimage.data
from clips import encode, footage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pixelis.config import ToolboxConfig
from pixelis.operations import OPERATIONS, Scene, execute
from pixelis.operations.operation import UNBOUNDED
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.operations.scale import PLACES
from pixelis.operations.video import Clip, open_clip
from pixelis.records import Action, ImageView

NAMES = ("rotate", "flip", "enhance", "compare", "measure", "mark", "search_clip")
PICTURE = skimage.data.coffee()[100:180, 100:220].copy()
VIEWS = [
    ImageView(id="img0", source_size=(120, 80), view_size=(112, 84)),
    ImageView(
        id="obs1", parent="img0", box=(0.25, 0.25, 0.75, 0.5), source_size=(60, 20), view_size=(112, 56)
    ),
    ImageView(id="vid0.0", parent="vid0", frame=3, time=0.12, source_size=(64, 48), view_size=(84, 56)),
    ImageView(id="made", parent="made", source_size=(64, 48), view_size=(84, 56)),
]
NUMBERS = st.one_of(
    st.floats(-0.2, 1.2),
    st.sampled_from([0, 1, 0.5, math.nan, math.inf, -1e300, 10**30]),
    st.integers(-3, 1001),
)
WORDS = st.sampled_from(
    ["img0", "obs1", "vid0", "vid0.0", "made", "img7", "", "horizontal", "contrast", "denoise", "sharpen"]
)
WORDS |= st.sampled_from(["brighten", "vertical", "cut", "motion", "a red cup"]) | st.text(max_size=5)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    WORDS,
    st.lists(st.one_of(NUMBERS, WORDS, st.lists(NUMBERS, max_size=5)), max_size=4),
)
POINTS = st.lists(st.floats(0, 1), min_size=2, max_size=2)
BOXES = st.tuples(st.floats(0, 0.9), st.floats(0, 0.9), st.floats(0, 1), st.floats(0, 1)).map(
    lambda v: [v[0], v[1], min(1.0, v[0] + v[2]), min(1.0, v[1] + v[3])]
)
BUDGETS = [UNBOUNDED, PixelBudget(28 * 28, 112 * 112)]


@functools.cache
def clip() -> Clip:
    return open_clip(encode(footage(count=12, width=64, height=48)), ToolboxConfig())


@st.composite
def arguments(draw, name: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for field in OPERATIONS[name].Arguments.model_fields:
        if draw(st.booleans()):
            place = PLACES.get(field)
            sound = WORDS if place is None else BOXES if place.count == 4 else POINTS
            many = place is not None and place.many
            result[field] = draw(st.one_of(st.lists(sound, max_size=4) if many else sound, VALUES))
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_result_that_fits_or_an_error_with_a_code(name: str, data):
    target = data.draw(st.sampled_from(["img0", "obs1", "vid0", "vid0.0", "made", "nowhere"]))
    kind = data.draw(st.sampled_from(["thousand", "unit", "pixels"]))
    budget = data.draw(st.sampled_from(BUDGETS))
    action = Action(op=name, target=target, arguments=data.draw(arguments(name)))
    multiple = 1 if budget is UNBOUNDED else 28
    scene = Scene({"img0": PICTURE, "vid0": clip()}, VIEWS, {}, budget, budget, multiple, kind)
    before = PICTURE.copy()
    observation, views = execute(action, scene)
    assert (before == PICTURE).all()
    if observation.status == "error":
        assert observation.code not in ("crashed", "out_of_memory", None), observation.text
        assert 0 < len(observation.text) < 250
        assert views == []
        return
    json.dumps(observation.model_dump(mode="json"), allow_nan=False)
    assert len(views) == len(observation.images)
    for image, view in zip(observation.images, views, strict=True):
        assert image.view_size == (view.shape[1], view.shape[0])
        assert view.shape[0] * view.shape[1] <= budget.max_pixels
        assert not np.shares_memory(view, PICTURE)  # a view must not keep the whole picture alive
        assert image.parent in ("img0", "obs1", "vid0", "vid0.0")
