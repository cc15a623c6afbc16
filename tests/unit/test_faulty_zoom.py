"""The faults of `benchmarks.robustness`: which calls they hit, and what those do."""

from __future__ import annotations

import time

import numpy as np
import pytest

from benchmarks import faulty_zoom
from pixelis.operations import execute, select
from pixelis.operations.operation import Scene
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.records import Action, ImageView

SCENE = Scene(
    media={"img0": np.random.default_rng(0).integers(0, 256, (200, 200, 3), np.uint8)},
    images=[ImageView(id="img0")],
    budget=PixelBudget(64 * 64, 64 * 64),
)


def zoom(name: str, x: float, y: float = 0.1):
    operations = {operation.name: operation for operation in select([f"benchmarks.faulty_zoom:{name}"])}
    return execute(Action(op="zoom_in", arguments={"box": [x, y, x + 0.3, y + 0.3]}), SCENE, operations)


@pytest.mark.parametrize("percent", faulty_zoom.SHARES)
def test_a_share_of_the_calls_fails_always_the_same_ones(percent):
    places = [(0.01 * (i % 50), 0.01 * (i // 50)) for i in range(200)]
    failed = [
        [zoom(f"Failing{percent}", *place)[0].code == "unavailable" for place in places] for _ in range(2)
    ]
    assert failed[0] == failed[1]
    assert np.mean(failed[0]) == pytest.approx(percent / 100, abs=0.08)


def test_a_lie_is_a_region_of_the_same_size_elsewhere_without_a_word():
    (lie, shown), (truth, expected) = zoom("Lying100", 0.2), zoom("Slow100", 0.2)
    assert (lie.status, lie.text) == (truth.status, truth.text) == ("ok", "")
    assert lie.images[0].source_size == truth.images[0].source_size
    assert not np.array_equal(shown[0], expected[0])


def test_a_late_call_outlasts_the_timeout_of_the_toolbox(monkeypatch):
    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    zoom("Late100", 0.2)
    assert slept[0] > SCENE.settings.timeout_s
