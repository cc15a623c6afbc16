"""SELECT_FRAMES: exact frames by number, time or rate, and limits that a policy can act on."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from clips import encode, footage

from pixelis.config import ToolboxConfig
from pixelis.errors import OperationError
from pixelis.operations import Result, Scene
from pixelis.operations.select_frames import SelectFrames
from pixelis.operations.video import Clip, open_clip
from pixelis.records import ImageView

SETTINGS = ToolboxConfig()


@functools.cache
def clip() -> Clip:
    """72 frames at 25 a second."""
    return open_clip(encode(footage(), codec="ffv1", container="matroska"), SETTINGS)


def scene(**more) -> Scene:
    images = [
        ImageView(id="vid0.0", parent="vid0", frame=30, time=1.2, source_size=(160, 96), view_size=(160, 96))
    ]
    images.append(ImageView(id="img0", source_size=(60, 50), view_size=(60, 50)))
    return Scene({"vid0": clip(), "img0": np.zeros((50, 60, 3), np.uint8)}, images, **more)


def run(target: str = "vid0", /, where: Scene | None = None, **arguments) -> Result:
    where = where or scene()
    return SelectFrames.run(SelectFrames.check(arguments), where.target(target), where)


def code(target: str = "vid0", /, **arguments) -> tuple[str, str]:
    with pytest.raises(OperationError) as caught:
        run(target, **arguments)
    assert len(caught.value.message) < 200
    return caught.value.code, caught.value.message


def test_by_number_in_the_order_asked():
    result = run(frames=[40, 3, 71])
    assert [image.frame for image in result.images] == [40, 3, 71]
    assert [image.time for image in result.images] == pytest.approx([1.6, 0.12, 2.84])
    assert all(np.array_equal(image.pixels, clip().frame(image.frame)) for image in result.images)
    assert all(image.box is None for image in result.images)
    assert result.data == {"frames": [{"index": image.frame, "time": image.time} for image in result.images]}
    assert result.text == "vid0 has 72 frames, 2.88 s. Shown: 40 at 1.60 s, 3 at 0.12 s, 71 at 2.84 s."


def test_by_time_is_the_frame_shown_then():
    expected = [0, 1, 49, 50, 71]
    assert [image.frame for image in run(times=[0.0, 0.039, 0.04, 1.999, 2.0, 2.88]).images] == expected
    assert "1 duplicate frame omitted" in run(times=[0.0, 0.039]).text


def test_by_rate():
    assert [image.frame for image in run(rate=2).images] == [0, 12, 25, 37, 50, 62]
    assert [image.frame for image in run(rate=5, start=1, end=2).images] == [25, 30, 35, 40, 45, 50]
    assert [image.frame for image in run(rate=100, start=1.0, end=1.05).images] == [25, 26]
    assert [image.frame for image in run(rate=1, start=2.84, end=2.84).images] == [71]


def test_a_frame_of_a_clip_stands_for_its_clip():
    assert [image.frame for image in run("vid0.0", frames=[2]).images] == [2]


def test_too_many():
    assert code(frames=list(range(1000)))[0] == "limit"
    assert code(times=[i / 10 for i in range(20)])[0] == "limit"
    assert code(rate=1e300)[0] == "limit"
    kind, message = code(rate=25)
    assert kind == "limit"
    assert "72 frames requested, the limit is 8" in message
    assert len(run(rate=2.46).images) <= 8


def test_out_of_range():
    for bad in ([72], [-1], [3, 10**40]):
        kind, message = code(frames=bad)
        assert kind == "out_of_range"
        assert "0..71" in message
    expected = ("out_of_range", "time 3.5 s is outside the clip, which runs from 0.00 to 2.88 s")
    assert code(times=[3.5]) == expected
    assert code(times=[-0.5])[0] == code(rate=1, end=9)[0] == code(rate=1, start=-1)[0] == "out_of_range"
    assert code(rate=1, start=2, end=1) == ("out_of_range", "start 2 s is after end 1 s")


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"frames": [1], "times": [0.1]},
        {"frames": []},
        {"frames": [1.5]},
        {"times": [float("nan")]},
        {"rate": 0},
        {"frames": [1], "start": 1.0},
        {"frames": [1], "step": 2},
    ],
    ids=str,
)
def test_bad_arguments(arguments):
    assert code(**arguments)[0] == "bad_arguments"


def test_a_picture_has_no_frames():
    assert code("img0", frames=[0])[0] == "not_a_video"
