"""What a policy reads when it asks for what cannot be done: an error with a code and a short text."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import skimage.data
from calling import call
from clips import encode, footage

from pixelis.config import ToolboxConfig
from pixelis.operations import sandbox_worker
from pixelis.operations.python import MAX_PIXELS
from pixelis.operations.video import Clip, open_clip
from pixelis.records import ImageView

COFFEE = skimage.data.coffee()
BOX = [0.1, 0.1, 0.5, 0.5]
THIN = [0.1, 0.1, 0.101, 0.5]
REVERSED = [0.5, 0.1, 0.1, 0.5]
OUTSIDE = [1.1, 0.1, 1.3, 0.5]
MASK = {"size": [400, 600], "counts": [0, 240_000]}
STILL = {"id": "0123abcd", "kind": "object", "root": "img0", "frame": None, "box": [0, 0, 1, 1]}


@functools.cache
def clip() -> Clip:
    """72 frames at 25 a second."""
    return open_clip(encode(footage(), codec="ffv1", container="matroska"), ToolboxConfig())


# fmt: off
PICTURES = [
    ("zoom_in", {"box": BOX, "pad": 2}, "bad_arguments"),
    ("zoom_in", {"center": [0.5, 0.5]}, "bad_arguments"),
    ("zoom_in", {"box": BOX, "center": [0.5, 0.5], "factor": 2.0}, "bad_arguments"),
    *(("zoom_in", {"center": [0.5, 0.5], "factor": f}, "bad_arguments") for f in (1, 1001, math.nan)),
    *(("zoom_in", {"box": BOX, "padding": p}, "bad_arguments") for p in (-0.1, 0.6, math.nan)),
    ("zoom_in", {"center": [1.5, 0.5], "factor": 2}, "out_of_range"),
    ("zoom_in", {"center": [0.5, 0.5], "factor": 900}, "too_small"),
    ("zoom_in", {"box": [0.9979, 0.9, 1.5, 1.0]}, "too_small"),
    ("zoom_in", {"box": REVERSED}, "bad_box"),
    ("zoom_in", {"box": [math.nan, 0.1, 0.5, 0.5]}, "bad_box"),
    ("zoom_in", {"box": OUTSIDE}, "out_of_range"),
    ("compare", {"other": "img0"}, "bad_arguments"),
    ("compare", {"box": [0, 0, 1, 1], "other_box": [-0.5, 0, 2, 1]}, "bad_arguments"),
    ("compare", {"other": "img7"}, "bad_target"),
    ("compare", {"other_box": REVERSED}, "bad_box"),
    ("compare", {"other_box": THIN}, "too_small"),
    ("compare", {"box": BOX, "other_box": OUTSIDE}, "out_of_range"),
    ("measure", {"point": [0.1, 0.1], "end_point": [0.2, 0.2], "box": BOX}, "bad_arguments"),
    ("measure", {"point": [0.1, 0.1], "end_point": [0.1, 0.1]}, "bad_arguments"),
    ("measure", {"point": [0.1, 0.1], "end_point": [1.2, 0.2]}, "out_of_range"),
    ("mark", {"points": [[0.5, 0.5]], "labels": ["a", "b"]}, "bad_arguments"),
    ("mark", {"points": [[0.5, 0.5]] * 41}, "limit"),
    ("mark", {"boxes": [REVERSED]}, "bad_box"),
    ("mark", {"points": [[0.9, 0.5]], "box": BOX}, "out_of_range"),
    ("get_properties", {"object": "deadbeef"}, "unknown_object"),
    ("get_properties", {"object": "deadbeef", "box": BOX}, "bad_arguments"),
    ("get_properties", {"box": THIN}, "too_small"),
    ("get_properties", {"mask": {**MASK, "size": [600, 400]}}, "bad_arguments"),
    ("get_properties", {"mask": {**MASK, "counts": [240_000]}}, "nothing_found"),
    ("segment_object_at", {"point": [0.5, 0.5], "box": BOX}, "bad_arguments"),
    ("segment_object_at", {"point": [math.nan, 0.5]}, "bad_point"),
    ("segment_object_at", {"point": [1.2, 0.5]}, "out_of_range"),
    ("segment_object_at", {"box": THIN}, "too_small"),
    ("find", {"text": " "}, "bad_arguments"),
    ("find", {"text": "cup"}, "missing_file"),
    ("find", {"text": "x" * 101}, "bad_arguments"),
    ("read_text", {"language": "en"}, "bad_arguments"),
    ("read_text", {"box": THIN}, "too_small"),
    ("python", {"code": "x" * (sandbox_worker.MAX_CODE + 1)}, "bad_arguments"),
    ("python", {"code": "1", "box": THIN}, "too_small"),
    ("select_frames", {"frames": [0]}, "not_a_video"),
    ("track_object", {"box": BOX}, "not_a_video"),
    ("search_clip", {"event": "cut"}, "not_a_video"),
    ("paint", {}, "unknown_op"),
]
CLIPS = [
    ("select_frames", {"frames": [1], "times": [0.1]}, "bad_arguments"),
    ("select_frames", {"frames": [1], "start": 1.0}, "bad_arguments"),
    ("select_frames", {"frames": list(range(1000))}, "limit"),
    ("select_frames", {"times": [i / 10 for i in range(20)]}, "limit"),
    ("select_frames", {"rate": 1e300}, "limit"),
    *(("select_frames", {"frames": bad}, "out_of_range") for bad in ([72], [-1], [3, 10**40])),
    ("select_frames", {"rate": 1, "end": 9}, "out_of_range"),
    ("track_object", {"box": BOX, "object": "0123abcd"}, "bad_arguments"),
    ("track_object", {"box": BOX, "boxes": [BOX]}, "bad_arguments"),
    ("track_object", {"boxes": [BOX] * 9}, "bad_arguments"),
    ("track_object", {"object": "ffffffff"}, "unknown_object"),
    ("track_object", {"object": "0123abcd"}, "bad_target"),
    ("track_object", {"box": THIN}, "too_small"),
    ("track_object", {"box": OUTSIDE}, "out_of_range"),
    ("track_object", {"box": BOX, "start": 72}, "out_of_range"),
    ("track_object", {"box": BOX, "end": 72}, "out_of_range"),
    ("track_object", {"box": BOX, "end": 0}, "out_of_range"),
    ("search_clip", {}, "bad_arguments"),
    ("search_clip", {"event": "cut", "text": "a bike"}, "bad_arguments"),
    ("search_clip", {"event": "cut", "like_box": [0, 0, 1, 1]}, "bad_arguments"),
    ("search_clip", {"text": "a bike"}, "bad_arguments"),
    ("search_clip", {"like": "vid0"}, "not_a_picture"),
    ("search_clip", {"event": "cut", "start": 2.0, "end": 1.0}, "out_of_range"),
    ("search_clip", {"event": "cut", "start": 99.0}, "out_of_range"),
    ("segment_object_at", {"point": [0.5, 0.5]}, "not_a_picture"),
    ("get_properties", {}, "not_a_picture"),
]
# fmt: on


@pytest.mark.parametrize(
    ("target", "op", "arguments", "code"),
    [*(("img0", *row) for row in PICTURES), *(("vid0", *row) for row in CLIPS)],
)
def test_refused_calls_are_error_observations(target: str, op: str, arguments: dict, code: str):
    media = {"img0": COFFEE, "vid0": clip()}
    observation, views = call(op, media, target, scene={"objects": {"0123abcd": STILL}}, **arguments)
    expected = ("error", code, None, [], [])
    assert (observation.status, observation.code, observation.id, observation.images, views) == expected
    assert 0 < len(observation.text) < 250


def test_nothing_is_there_to_measure_segment_or_compute():
    plain = np.full((300, 400, 3), 127, np.uint8)
    for arguments in ({"point": [0.5, 0.5]}, {"box": [0.2, 0.2, 0.8, 0.8]}, {"box": [0, 0, 1, 1]}):
        assert call("segment_object_at", plain, **arguments)[0].code == "nothing_found"
    assert call("segment_object_at", plain[:1, :1], point=[0.5, 0.5])[0].code == "too_small"
    assert call("measure", plain, box=[0, 0, 1, 1])[0].code == "nothing_found"
    side = int(MAX_PIXELS**0.5) + 10
    huge = np.broadcast_to(np.zeros((1, 1, 3), np.uint8), (side, side, 3))
    assert call("python", huge, code="1")[0].code == "limit"


def test_targets_that_lead_nowhere():
    half = (0.0, 0.0, 0.5, 0.5)
    views = [
        ImageView(id=name, parent=parent, box=half)
        for name, parent in (("lost", "gone"), ("a", "b"), ("b", "a"))
    ]
    for target in ("obs9", "lost", "a"):
        assert call("zoom_in", COFFEE, target, views, box=BOX)[0].code == "bad_target"
