"""What is drawn stands where the data says, on any view of any resolution, and odd data costs nothing."""

from __future__ import annotations

import cv2
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pixelis.operations import masks
from pixelis.operations.draw import COLOURS, annotate


def ground(height: int = 240, width: int = 320, value: int = 90) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def disc(height: int = 240, width: int = 320) -> np.ndarray:
    inside = np.zeros((height, width), np.uint8)
    cv2.circle(inside, (width // 4, height // 2), height // 5, 1, -1)
    return inside.astype(bool)


def thing(inside: np.ndarray, **more) -> dict:
    mask = masks.Mask.of(inside)
    record = {"id": "3f9ac1d2", "kind": "object", "root": "img0", "frame": None}
    return {**record, "box": list(mask.box), "mask": mask.encode(), **more}


def changed(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    return (before != after).any(axis=2)


def test_a_mask_is_tinted_inside_and_nowhere_else():
    picture, inside = ground(), disc()
    picture.setflags(write=False)
    out = annotate(picture, {"objects": [thing(inside)]})
    assert out.shape == picture.shape
    assert (picture == 90).all()
    tint = np.round(np.array([90, 90, 90]) * 0.6 + np.array(COLOURS[0]) * 0.4)
    core = cv2.erode(inside.astype(np.uint8), np.ones((9, 9), np.uint8)).astype(bool)
    assert (np.abs(out[core] - tint) <= 1).all()
    assert not changed(picture, out)[:, 200:].any()


def test_a_region_shows_what_the_whole_picture_shows_there():
    inside = disc(480, 640)
    data = {"objects": [thing(inside)]}
    whole = annotate(ground(480, 640), data)
    part = annotate(ground(240, 320), data, region=(0.0, 0.25, 0.5, 0.75))
    core = cv2.erode(inside.astype(np.uint8), np.ones((15, 15), np.uint8)).astype(bool)[120:360, :320]
    assert (part[core] == whole[120:360, :320][core]).all()
    small = annotate(ground(120, 160), data)  # the same place on a view of a quarter of the size
    assert (small[60, 40] == whole[240, 160]).all()


def test_drawn_boxes_do_not_cover_their_content():
    out = annotate(ground(), {"boxes": [[0.25, 0.25, 0.75, 0.75]]})
    mark = changed(ground(), out)
    assert not mark[60:180, 80:240][1:-1, 1:-1].any()
    assert mark[59, 100]
    assert mark[100, 79]


def test_lines_carry_their_text_and_no_label_covers_a_line():
    lines = [{"text": f"line {i}", "box": [0.1, 0.1 + 0.15 * i, 0.5, 0.2 + 0.15 * i]} for i in range(5)]
    # The font lacks it: its number stands there instead
    lines.append({"text": "你好", "box": [0.6, 0.8, 0.9, 0.9]})
    out = annotate(ground(480, 640), {"lines": lines})
    mark = changed(ground(480, 640), out)
    for line in lines:
        x0, y0, x1, y1 = line["box"]
        assert not mark[
            round(y0 * 480) + 2 : round(y1 * 480) - 2, round(x0 * 640) + 2 : round(x1 * 640) - 2
        ].any()
    assert (out == (0, 0, 0)).all(2).sum() > 500  # letters
    bare = annotate(ground(480, 640), {"lines": [{**line, "text": ""} for line in lines]})
    assert changed(bare, out).any()


def test_a_track_shows_its_box_on_the_frame_and_its_way_on_all():
    boxes = [[0.1 + 0.05 * i, 0.4, 0.2 + 0.05 * i, 0.6] for i in range(10)]
    track = {"id": "ab12cd34", "root": "vid0", "frames": list(range(20, 30)), "boxes": boxes}
    data = {"tracks": [{**track, "status": "active"}]}
    on_20, on_29, off = (
        changed(ground(), annotate(ground(), data, frame=n, root="vid0")) for n in (20, 29, 50)
    )
    edge = round(0.6 * 240)
    assert on_20[edge, 35:60].all()
    assert on_29[edge, 180:200].all()
    assert not on_29[edge, 35:60].any()
    assert not off[edge].any()
    assert off[120, 60:170].any()  # the way
    assert not changed(ground(), annotate(ground(), data, root="vid1")).any()


def test_objects_of_other_frames_and_media_are_left_out():
    data = {"objects": [thing(disc(), frame=7)]}
    assert changed(ground(), annotate(ground(), data, frame=7)).any()
    assert not changed(ground(), annotate(ground(), data, frame=8)).any()
    assert not changed(ground(), annotate(ground(), data, root="img1")).any()


numbers = st.one_of(st.floats(), st.integers(-5, 5), st.none(), st.text(max_size=3))
KEYS = ["id", "box", "mask", "text", "root", "frame", "frames", "boxes", "size", "counts", "label", "kind"]
anything = st.recursive(
    st.one_of(numbers, st.booleans()),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["objects", "boxes", "lines", "tracks"]), anything, max_size=4))
def test_odd_data_draws_nothing_or_something_but_never_fails(data):
    assert annotate(ground(40, 50), data).shape == (40, 50, 3)
