"""COMPARE on real photos: equal, changed and moved regions, and spotting the difference."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import skimage.data
from calling import call

from pixelis.operations.pixel_budget import PixelBudget
from pixelis.records import ImageView

COFFEE = skimage.data.coffee()


def run(*pictures: np.ndarray, budget: PixelBudget | None = None, **arguments):
    scene = {} if budget is None else {"budget": budget, "multiple": 28}
    return call(
        "compare", {f"img{i}": picture for i, picture in enumerate(pictures)}, scene=scene, **arguments
    )


def test_spot_the_difference_in_two_pictures_through_jpeg():
    changed = COFFEE.copy()
    changed[300:340, 100:150] = changed[300:340, 400:450]
    cv2.circle(changed, (500, 60), 12, (220, 30, 30), -1)
    changed = cv2.imdecode(cv2.imencode(".jpg", changed, [cv2.IMWRITE_JPEG_QUALITY, 85])[1], cv2.IMREAD_COLOR)
    observation, views = run(COFFEE, changed, other="img1")
    assert observation.status == "ok"
    places = [
        tuple(round(v * s) for v, s in zip(box, (600, 400, 600, 400), strict=True))
        for box in observation.data["boxes"]
    ]
    for truth in ((100, 300, 150, 340), (488, 48, 512, 72)):
        assert any(np.abs(np.subtract(place, truth)).max() <= 6 for place in places), (truth, places)
    assert len(places) == 2
    assert "most at [" in observation.text
    assert [image.parent for image in observation.images] == ["img0", "img1"]
    assert views[0].shape == views[1].shape


def test_equal_regions_have_no_difference_and_other_colors_a_known_one():
    observation, _ = run(COFFEE, COFFEE.copy(), other="img1")
    assert observation.data["delta_e"] == 0
    assert observation.data["structural_similarity"] == observation.data["histogram_correlation"] == 1
    assert observation.data["boxes"] == []
    assert "no visible difference" in observation.text
    red, blue = (np.full((60, 60, 3), color, np.uint8) for color in ((255, 0, 0), (0, 0, 255)))
    observation, _ = run(red, blue, other="img1")
    assert observation.data["delta_e"] == pytest.approx(52.88, abs=0.1)  # CIEDE2000 of the sRGB primaries
    assert observation.data["boxes"] == [[0, 0, 1, 1]]


def test_two_regions_of_one_picture_are_shown_in_one_size():
    budget = PixelBudget(56 * 56, 112 * 112)
    observation, views = run(COFFEE, box=[0, 0, 0.5, 0.5], other_box=[0.5, 0.5, 0.75, 0.8], budget=budget)
    assert views[0].shape == views[1].shape
    assert [image.box for image in observation.images] == [(0, 0, 0.5, 0.5), (0.5, 0.5, 0.75, 0.8)]
    assert observation.data["area_ratio"] == pytest.approx(150 * 120 / (300 * 200), abs=1e-3)
    assert "boxes" in observation.data
    assert "differ visibly" not in observation.text  # regions of different sizes have no places in common
    _, views = run(COFFEE, box=[0, 0, 1, 0.1], other_box=[0, 0, 0.1, 1], budget=budget)
    assert views[0].shape[1] > views[0].shape[0]
    assert views[1].shape[1] < views[1].shape[0]


def test_the_places_are_of_the_target_though_it_is_a_crop():
    changed = COFFEE.copy()
    changed[300:340, 100:150] = 255 - changed[300:340, 100:150]
    half = {"box": (0, 0.5, 0.5, 1.0), "source_size": (300, 200), "view_size": (300, 200)}
    crops = [ImageView(id="obs1", parent="img0", **half), ImageView(id="obs2", parent="img1", **half)]
    observation, _ = call("compare", {"img0": COFFEE, "img1": changed}, "obs1", crops, other="obs2")
    np.testing.assert_allclose(observation.data["boxes"][0], (100 / 600, 0.75, 150 / 600, 0.85), atol=0.01)
    assert "of obs1" in observation.text
    first = [int(v) for v in observation.text.split("most at [")[1].split("]")[0].split(",")]
    np.testing.assert_allclose(first, (333, 500, 500, 700), atol=12)
    assert observation.images[1].parent == "obs2"
