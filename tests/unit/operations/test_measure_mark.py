"""MEASURE finds exact numbers and lines of known drawings; MARK draws what was named, where it was named."""

from __future__ import annotations

import math

import cv2
import numpy as np
import pytest
import skimage.data
from calling import call

from pixelis.records import ImageView

WHITE = np.full((300, 400, 3), 255, np.uint8)
COFFEE = skimage.data.coffee()


def drawing() -> np.ndarray:
    picture = WHITE.copy()
    cv2.line(picture, (20, 30), (380, 50), (0, 0, 0), 3)
    cv2.line(picture, (20, 60), (280, 74), (0, 0, 0), 1)
    cv2.line(picture, (100, 100), (89, 290), (200, 0, 0), 3)
    return picture


def test_a_line_is_measured_in_pixels_shares_and_degrees():
    observation, (view,) = call("measure", WHITE, point=[0.25, 0.5], end_point=[0.5, 0.25])
    assert observation.data["length"] == pytest.approx(125)  # 100 right, 75 up
    expected = [pytest.approx(125 / 400, abs=1e-4), pytest.approx(125 / 300, abs=1e-4)]
    assert observation.data["share"] == expected
    assert observation.data["direction"] == pytest.approx(math.degrees(math.atan2(75, 100)), abs=0.01)
    assert "125.0 px" in observation.text
    assert "53.1 deg clockwise from up" in observation.text
    assert (view[110:115, 145:155] != 255).any()  # drawn in the middle of the line
    assert (view[200:, :] == 255).all()


def test_a_line_on_a_crop_has_the_pixels_of_the_whole_picture():
    crop = ImageView(
        id="obs1", parent="img0", box=(0.5, 0.5, 1.0, 1.0), source_size=(200, 150), view_size=(400, 300)
    )
    observation, _ = call("measure", WHITE, "obs1", (crop,), point=[0, 0], end_point=[1, 0])
    assert observation.data["length"] == 200
    assert "100.0 % of the width and 133.3 % of the height of obs1" in observation.text
    assert observation.data["segments"][0]["points"] == [[0.5, 0.5], [1.0, 0.5]]


@pytest.mark.parametrize(
    ("end", "angle"), [((0.5, 0.25), 90), ((0.25, 0.5), 180), ((0.75, 0.75), 45), ((0.25, 0.75), 135)]
)
def test_an_angle_at_a_vertex(end: tuple, angle: float):
    square = np.full((200, 200, 3), 255, np.uint8)
    observation, _ = call("measure", square, point=[0.9, 0.5], vertex=[0.5, 0.5], end_point=list(end))
    assert observation.data["angle"] == pytest.approx(angle)
    assert f"angle {angle:.1f} deg" in observation.text


def test_lines_of_a_drawing_are_found_once_each_with_their_angles():
    observation, _ = call("measure", drawing(), box=[0, 0, 1, 1])
    found = observation.data["straight_lines"]
    truth = [((20, 30), (380, 50)), ((20, 60), (280, 74)), ((100, 100), (89, 290))]
    assert len(found) == 3
    for line, (start, end) in zip(found, truth, strict=True):
        assert line["length"] == pytest.approx(math.dist(start, end), abs=6)
        angle = math.degrees(math.atan2(start[1] - end[1], end[0] - start[0])) % 180
        assert abs(line["angle"] - angle) < 1
        points = np.multiply(line["points"], (400, 300))
        assert min(np.abs(points - [start, end]).max(), np.abs(points - [end, start]).max()) < 5
    within, (view,) = call("measure", drawing(), box=[0.1, 0.3, 0.5, 1])
    assert len(within.data["straight_lines"]) == 1
    assert view.shape == (210, 160, 3)


def test_marks_are_drawn_where_they_were_named_and_kept():
    observation, (view,) = call(
        "mark", COFFEE, boxes=[[0.1, 0.1, 0.3, 0.4]], points=[[0.8, 0.5]], labels=["cup", "spoon"]
    )
    assert observation.data["boxes"] == [{"box": [0.1, 0.1, 0.3, 0.4], "label": "cup"}]
    assert observation.data["points"] == [{"point": [0.8, 0.5], "label": "spoon"}]
    changed = (view != COFFEE).any(axis=2)
    assert changed[200, 480]
    assert changed[40, 60:180].all()
    assert not changed[60:140, 80:170].any()  # the inside of the box stays visible
    assert changed.mean() < 0.05
    assert "2 marks drawn" in observation.text


def test_a_region_with_numbered_marks():
    crop = ImageView(
        id="obs1", parent="img0", box=(0.5, 0.0, 1.0, 1.0), source_size=(300, 400), view_size=(300, 400)
    )
    observation, (view,) = call(
        "mark", COFFEE, "obs1", (crop,), points=[[0.25, 0.25], [0.1, 0.9]], box=[0, 0, 0.5, 1]
    )
    assert view.shape == (400, 150, 3)
    expected = [("1", [0.625, 0.25]), ("2", [0.55, 0.9])]
    assert [(p["label"], p["point"]) for p in observation.data["points"]] == expected
    assert (view[100, 75] != COFFEE[100, 375]).any()
