"""SELECT_FRAMES: exact frames by number, time or rate, and limits that a policy can act on."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from calling import call
from clips import encode, footage

from pixelis.config import ToolboxConfig
from pixelis.operations.video import Clip, open_clip
from pixelis.records import ImageView, Observation


@functools.cache
def clip() -> Clip:
    """72 frames at 25 a second."""
    return open_clip(encode(footage(), codec="ffv1", container="matroska"), ToolboxConfig())


def run(target: str = "vid0", /, **arguments) -> tuple[Observation, list[np.ndarray]]:
    shown = ImageView(id="vid0.0", parent="vid0", frame=30, time=1.2, view_size=(160, 96))
    return call("select_frames", {"vid0": clip()}, target, [shown], **arguments)


def shown(**arguments) -> list[int | None]:
    return [image.frame for image in run(**arguments)[0].images]


def test_by_number_in_the_order_asked():
    observation, views = run(frames=[40, 3, 71])
    assert [image.frame for image in observation.images] == [40, 3, 71]
    assert [image.time for image in observation.images] == pytest.approx([1.6, 0.12, 2.84])
    for image, view in zip(observation.images, views, strict=True):
        np.testing.assert_array_equal(view, clip().frame(image.frame))
        assert image.box is None
    frames = [{"index": image.frame, "time": image.time} for image in observation.images]
    assert observation.data["frames"] == frames
    text = "vid0 has 72 frames, 2.88 s. Shown: 40 at 1.60 s, 3 at 0.12 s, 71 at 2.84 s."
    assert observation.text == text
    assert [image.frame for image in run("vid0.0", frames=[2])[0].images] == [
        2
    ]  # a frame stands for its clip


def test_by_time_is_the_frame_shown_then():
    assert shown(times=[0.0, 0.039, 0.04, 1.999, 2.0, 2.88]) == [0, 1, 49, 50, 71]
    assert "1 duplicate frame omitted" in run(times=[0.0, 0.039])[0].text


def test_by_rate():
    assert shown(rate=2) == [0, 12, 25, 37, 50, 62]
    assert shown(rate=5, start=1, end=2) == [25, 30, 35, 40, 45, 50]
    assert shown(rate=100, start=1.0, end=1.05) == [25, 26]
    assert shown(rate=1, start=2.84, end=2.84) == [71]
    assert len(shown(rate=2.46)) <= 8


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rate": 25}, "72 frames requested, the limit is 8"),
        ({"frames": [72]}, "0..71"),
        ({"times": [3.5]}, "time 3.5 s is outside the clip, which runs from 0.00 to 2.88 s"),
        ({"rate": 1, "start": 2, "end": 1}, "start 2 s is after end 1 s"),
    ],
)
def test_refusals_name_the_limits(arguments: dict, text: str):
    assert text in run(**arguments)[0].text
