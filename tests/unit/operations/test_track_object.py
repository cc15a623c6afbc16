"""TRACK_OBJECT: real photos with a known motion over real footage, what is lost, statistics."""

from __future__ import annotations

import functools
import json
import math

import cv2
import numpy as np
import pytest
import skimage.data
from clips import BIKES, Moving, encode, footage, overlap, paste
from pycocotools import mask as coco

from pixelis.config import ToolboxConfig
from pixelis.errors import OperationError
from pixelis.operations import Result, Scene, shots
from pixelis.operations.get_properties import GetProperties
from pixelis.operations.masks import decode
from pixelis.operations.track_object import TrackObject, motion
from pixelis.operations.video import Clip, open_clip
from pixelis.records import ImageView

SETTINGS = ToolboxConfig()


def cat_picture() -> np.ndarray:
    return skimage.data.chelsea()[20:260, 80:330]


def face_picture() -> np.ndarray:
    return skimage.data.astronaut()[60:230, 150:300]


BIKES_SIZE = {"width": 640, "height": 272}


@functools.cache
def arc() -> tuple[Clip, Moving]:
    """A face swings over footage of a road and grows by half; its frames are encoded with loss."""
    ground = footage(BIKES, 50, **BIKES_SIZE)
    moving = paste(
        ground,
        face_picture(),
        lambda t: (0.25 + 0.5 * t, 0.5 + 0.2 * math.sin(2 * math.pi * t)),
        lambda t: 70 + 35 * t,
    )
    return open_clip(encode(moving[0], options={"crf": "23"}), SETTINGS), moving


def scene(clip: Clip, objects: dict | None = None, **more) -> Scene:
    size = (clip.width, clip.height)
    images = [
        ImageView(id="vid0.0", parent="vid0", frame=0, time=0.0, source_size=size, view_size=size),
        ImageView(id="vid0.1", parent="vid0", frame=20, time=0.8, source_size=size, view_size=size),
        ImageView(id="obs1", parent="vid0.0", box=(0.0, 0.0, 0.5, 1.0), source_size=size, view_size=size),
    ]
    return Scene({"vid0": clip}, images, objects or {}, **more)


def run(where: Scene, target: str = "vid0", /, **arguments) -> Result:
    return TrackObject.run(TrackObject.check(arguments), where.target(target), where)


def share(clip: Clip, box) -> list[float]:
    return (np.array(box) / [clip.width, clip.height, clip.width, clip.height]).tolist()


def pixels(clip: Clip, track: dict) -> list[list[float]]:
    return (np.array(track["boxes"]) * [clip.width, clip.height, clip.width, clip.height]).tolist()


def mean_overlap(clip: Clip, track: dict, truth) -> float:
    """Over all frames after the first that show the object; a frame without a box counts 0."""
    found = dict(zip(track["frames"], pixels(clip, track), strict=True))
    shown = [(n, box) for n, box in enumerate(truth) if box is not None and n > track["frames"][0]]
    return sum(overlap(found[n], box) if n in found else 0.0 for n, box in shown) / len(shown)


@functools.cache
def tracked() -> Result:
    clip, (_, truth) = arc()
    return run(scene(clip), box=share(clip, truth[0]))


@pytest.mark.slow
def test_a_known_motion_is_followed():
    clip, (_, truth) = arc()
    track = tracked().data["tracks"][0]
    assert track["status"] == "completed"
    assert track["frames"] == list(range(50))
    assert mean_overlap(clip, track, truth) > 0.75


def test_what_creeps_over_still_ground_is_followed():
    """Less than half a pixel a frame, below the noise of the sensor, after a pause."""
    noise = np.random.default_rng(0).normal(0, 2, (60, 240, 320, 3))
    ground = np.clip(skimage.data.coffee()[:240, :320] + noise, 0, 255).astype(np.uint8)
    frames, truth = paste(
        list(ground), face_picture(), lambda t: (0.4 + 0.1 * max(0.0, 2 * t - 1), 0.5), lambda t: 80.0
    )
    clip = open_clip(encode(frames, options={"crf": "23"}), SETTINGS)
    track = run(scene(clip), box=share(clip, truth[0])).data["tracks"][0]
    assert track["frames"] == list(range(60))
    assert mean_overlap(clip, track, truth) > 0.8
    start, end = (np.mean(pixels(clip, track)[n][::2]) for n in (0, -1))
    assert end - start == pytest.approx(32, abs=6)


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param("leaves", marks=pytest.mark.long), "vanishes"])
def test_an_object_that_leaves_or_vanishes_is_lost(way):
    ground = footage(BIKES, 48, **BIKES_SIZE)
    if way == "leaves":
        frames, truth = paste(ground, face_picture(), lambda t: (0.5 + 0.9 * t, 0.5), lambda t: 80)
        last = max(number for number, box in enumerate(truth) if box is not None)
    else:
        frames, truth = paste(ground, face_picture(), lambda t: (0.3 + 0.2 * t, 0.5), lambda t: 80)
        frames[26:], last = ground[26:], 25
    clip = open_clip(encode(frames), SETTINGS)
    result = run(scene(clip), box=share(clip, truth[0]))
    track = result.data["tracks"][0]
    assert track["status"] == "lost"
    assert abs(track["frames"][-1] - last) <= 5
    assert f"not seen after frame {track['frames'][-1]}" in result.text
    assert len(track["boxes"]) == len(track["frames"]) == len(track["scores"])


def panned(name: str, count: int) -> list[np.ndarray]:
    """A camera moves over a photograph, two pixels to the right and one down for each frame."""
    photo = getattr(skimage.data, name)()
    photo = photo if photo.ndim == 3 else np.repeat(photo[..., None], 3, 2)
    return [np.ascontiguousarray(photo[20 + i : 164 + i, 4 + 2 * i : 196 + 2 * i]) for i in range(count)]


def hides(left: int, right: int) -> tuple[Clip, list, list[int]]:
    """A face passes behind a wall: the clip, its edges where more than half of it shows, frames without it."""
    ground = footage(BIKES, 60, **BIKES_SIZE)
    frames, truth = paste(ground, face_picture(), lambda t: (0.15 + 0.7 * t, 0.5), lambda t: 70)
    wall = cv2.resize(skimage.data.brick(), (640, 272))[..., None]
    for frame in frames:
        frame[:, left:right] = wall[:, left:right]
    covered = [max(0, min(right, e[2]) - max(left, e[0])) / (e[2] - e[0]) for e in truth]
    shown = [e if share < 0.5 else None for e, share in zip(truth, covered, strict=True)]
    clip = open_clip(encode(frames, options={"crf": "20"}), SETTINGS)
    return clip, shown, [n for n, share in enumerate(covered) if share == 1]


@pytest.mark.slow
def test_an_object_behind_a_wall_is_found_again():
    clip, truth, covered = hides(256, 384)
    result = run(scene(clip), box=share(clip, truth[0]))
    track = result.data["tracks"][0]
    assert track["status"] == "completed"
    ((first, last),) = track["hidden"]
    assert abs(first - covered[0]) <= 4
    assert abs(last - covered[-1]) <= 4
    assert f"hidden in frames {first} to {last}." in result.text
    assert sorted([*track["frames"], *range(first, last + 1)]) == list(range(60))
    assert mean_overlap(clip, track, truth) > 0.6
    # The gap is no jump: its distance is that of many frames
    assert track["statistics"]["max_velocity"]["value"] < 30


@pytest.mark.slow
@pytest.mark.long
def test_backward_equals_forward_on_the_reversed_clip():
    clip, (frames, truth) = arc()
    reverse = open_clip(encode(frames[::-1], options={"crf": "23"}), SETTINGS)
    box = share(clip, truth[-1])
    backward, forward = run(scene(clip), box=box, start=49, end=10), run(scene(reverse), box=box, end=39)
    track, mirrored = backward.data["tracks"][0], forward.data["tracks"][0]
    assert track["status"] == mirrored["status"] == "completed"
    assert track["frames"] == list(range(10, 50))
    pairs = zip(pixels(clip, track), pixels(clip, mirrored)[::-1], strict=True)
    assert np.mean([overlap(*pair) for pair in pairs]) > 0.85
    first, second = (t["statistics"]["direction"]["value"] for t in (track, mirrored))
    assert abs(abs(first - second) - 180) < 5
    # Its object is where the track ends, and is followed on from there
    record = backward.data["objects"][0]
    assert (record["frame"], record["box"]) == (10, track["boxes"][0])
    onward = run(scene(clip, {record["id"]: record}), object=record["id"], end=4).data["tracks"][0]
    assert (onward["frames"], onward["status"]) == (list(range(4, 11)), "completed")


@functools.cache
def crossing() -> tuple[Clip, list, list]:
    """A cat passes before a face."""
    ground = footage(BIKES, 30, **BIKES_SIZE)
    frames, face = paste(ground, face_picture(), lambda t: (0.2 + 0.6 * t, 0.45), lambda t: 64)
    frames, cat = paste(frames, cat_picture(), lambda t: (0.8 - 0.6 * t, 0.6), lambda t: 64)
    return open_clip(encode(frames, options={"crf": "20"}), SETTINGS), face, cat


@pytest.mark.slow
def test_several_objects_keep_their_identities():
    clip, *truths = crossing()
    result = run(scene(clip), boxes=[share(clip, truth[0]) for truth in truths])
    tracks, records = result.data["tracks"], result.data["objects"]
    assert [record["id"] for record in records] == [track["id"] for track in tracks]
    assert len({track["id"] for track in tracks}) == 2
    for track, truth in zip(tracks, truths, strict=True):
        assert (track["status"], track["frames"][-1]) == ("completed", 29)
        assert mean_overlap(clip, track, truth) > 0.6
        assert overlap(pixels(clip, track)[-1], truth[-1]) > 0.6
    assert result.text.startswith(f"1: track {tracks[0]['id']}: completed")
    assert f"\n2: track {tracks[1]['id']}: completed" in result.text
    assert len(result.images) == 4


def test_objects_share_the_limits():
    clip, *truths = crossing()
    boxes = [share(clip, truth[0]) for truth in truths]
    result = run(scene(clip, settings=ToolboxConfig(max_track_frames=8)), boxes=boxes)
    assert [(t["frames"], t["status"]) for t in result.data["tracks"]] == [([0, 1, 2, 3], "active")] * 2
    assert all(f"continue with object={record['id']}" in result.text for record in result.data["objects"])


def test_featureless_ground_is_nothing_to_track():
    """The sky behind a rocket, and the even half of a frame beside half a photo."""
    noise = np.random.default_rng(0).normal(0, 3, (5, 256, 384, 3))
    sky = np.clip(skimage.data.rocket()[:256, :384] + noise, 0, 255).astype(np.uint8)
    half = np.concatenate(
        [np.full((96, 80, 3), 150, np.uint8), skimage.data.chelsea()[50:146, 120:200]], axis=1
    )
    for frames, boxes, words in (
        (list(sky), {"box": [0.29, 0.08, 0.47, 0.31]}, "even area"),
        (
            [half] * 3,
            {"boxes": [[0.55, 0.1, 0.95, 0.9], [0.05, 0.1, 0.45, 0.9]]},
            "box 2: the box shows an even",
        ),
    ):
        clip = open_clip(encode(frames, options={"crf": "18"}), SETTINGS)
        with pytest.raises(OperationError, match=words) as caught:
            run(scene(clip), **boxes)
        assert caught.value.code == "nothing_found"


@pytest.mark.parametrize(
    ("before", "after"), [("gravel", "grass"), ("grass", "gravel"), ("chelsea", "coffee")]
)
@pytest.mark.long
def test_a_cut_ends_the_track_though_the_box_looks_alike(before, after):
    """Grass for gravel in the same grey: the box alone shows a similar area, which was followed on."""
    clip = open_clip(encode(panned(before, 5) + panned(after, 8), options={"crf": "20"}), SETTINGS)
    result = run(scene(clip), box=[0.3, 0.3, 0.65, 0.7])
    track = result.data["tracks"][0]
    assert (track["status"], track["frames"], track["cuts"]) == ("lost", [0, 1, 2, 3, 4], [5])
    assert "The scene changes with frame 5." in result.text


@pytest.mark.slow
def test_cuts_of_footage_are_marked_and_flashes_are_not():
    frames = [cv2.resize(frame, (240, 136)) for frame in footage(BIKES, 40, **BIKES_SIZE)]

    def cuts(shown: list[np.ndarray]) -> list[int]:
        marked = shots.mark_cuts(shown[0], iter(shown[1:]))
        return [number for number, (_, cut) in enumerate(marked, 1) if cut]

    assert cuts(frames) == [30]  # the footage itself has one
    for length in (1, 2, 3):
        flash = [*frames[:10], *[np.full_like(frames[0], 250)] * length, *frames[10 + length : 20]]
        assert cuts(flash) == []
    faded = [(frame * abs(number - 12) / 12).astype(np.uint8) for number, frame in enumerate(frames[:24])]
    assert cuts(faded) == []
    wide = cv2.resize(footage(BIKES, 1, 1280, 544)[0], (720, 408))
    # A pan by 9 % of the width from frame to frame
    assert cuts([wide[:136, 22 * n : 22 * n + 240] for n in range(20)]) == []
    # Nothing but even ground: brightness is all there is
    smooth, other = ([cv2.GaussianBlur(f, (0, 0), 25) for f in part] for part in (faded, frames[32:38]))
    assert cuts(smooth) == []
    assert cuts([*smooth[:6], *other]) == [6]
    assert cuts([*frames[:5], *frames[35:36]]) == [5]  # with the last frame


def test_what_is_reported():
    clip, _ = arc()
    result = tracked()
    track, record = result.data["tracks"][0], result.data["objects"][0]
    assert json.loads(json.dumps(result.data)) == result.data
    expected = {"id": track["id"], "kind": "track", "frame": 49, "box": track["boxes"][-1], "method": "csrt"}
    assert {name: record[name] for name in expected} == expected
    assert all(0 <= score <= 1 for score in track["scores"])
    assert all(0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1 for x0, y0, x1, y1 in track["boxes"])
    assert len(result.text) < 1200
    assert result.text.startswith(f"track {track['id']}: completed, frames 0 to 49 of vid0 (1.96 s).")
    assert result.text.count("[") == 12
    assert [image.frame for image in result.images] == [0, 16, 33, 49]
    x0, y0, x1, y1 = (round(v) for v in pixels(clip, track)[-1])
    changed = np.abs(result.images[-1].pixels.astype(int) - clip.frame(49)).max(axis=2) > 60
    edges = [changed[y0, x0:x1], changed[y1 - 1, x0:x1], changed[y0:y1, x0], changed[y0:y1, x1 - 1]]
    assert all(edge.mean() > 0.8 for edge in edges)


def test_motion_of_a_known_path():
    boxes = [(3 * i, 4 * i, 3 * i + 20, 4 * i + 30) for i in range(11)]
    told = motion(boxes, [i / 10 for i in range(11)])
    expected = {"value": 50.0, "unit": "px"}
    assert told["path_length"] == told["total_distance"] == told["displacement"] == expected
    assert told["average_velocity"] == told["max_velocity"] == {"value": 5.0, "unit": "px/frame"}
    assert told["average_speed"] == told["max_speed"] == {"value": 50.0, "unit": "px/s"}
    assert told["direction"] == {"value": round(math.degrees(math.atan2(4, 3)), 3), "unit": "deg"}
    assert told["is_stationary"]["value"] is False
    assert motion(boxes[:2], [0, 1])["is_stationary"]["value"] is True
    assert motion(boxes[:1], [0])["average_velocity"]["value"] == 0
    angles = np.linspace(0, 2 * math.pi, 60)
    circle = [(x, y, x + 9, y + 9) for x, y in 100 * np.stack([np.cos(angles), np.sin(angles)], 1)]
    assert motion(circle, list(range(60)))["is_stationary"]["value"] is False


@pytest.mark.slow
def test_masks_follow_the_object():
    clip, (_, truth) = arc()
    result = run(scene(clip), box=share(clip, truth[0]), end=11, masks=True)
    track, record = result.data["tracks"][0], result.data["objects"][0]
    assert len(track["masks"]) == len(track["frames"]) == 12
    y, x = np.mgrid[: clip.height, : clip.width] + 0.5
    overlaps = []
    for code, (x0, y0, x1, y1) in zip(track["masks"], truth, strict=False):
        oval = ((x - (x0 + x1) / 2) / (x1 - x0)) ** 2 + ((y - (y0 + y1) / 2) / (y1 - y0)) ** 2 <= 0.25
        mask = coco.decode({"size": code["size"], "counts": code["counts"].encode()}).astype(bool)
        overlaps.append((mask & oval).sum() / (mask | oval).sum())
    assert np.mean(overlaps) > 0.6
    assert json.loads(json.dumps(result.data)) == result.data
    later = scene(clip, {record["id"]: record})
    arguments = GetProperties.check({"object": record["id"], "groups": ["size"]})
    measured = GetProperties.run(arguments, later.target("vid0"), later)
    assert measured.data["properties"]["size"]["area_pixels"]["value"] == decode(track["masks"][-1]).area
    assert "masks" not in run(scene(clip), box=share(clip, truth[0]), end=2).data["tracks"][0]


def test_too_many_masks_are_refused_before_tracking():
    clip = open_clip(encode(footage(BIKES, 70, 64, 32)), SETTINGS)
    with pytest.raises(OperationError, match="masks of 70 frames") as error:
        run(scene(clip), box=[0.2, 0.2, 0.6, 0.6], masks=True)
    assert error.value.code == "limit"
    assert "masks" not in json.dumps(TrackObject.Arguments.model_json_schema()["properties"])


def test_from_an_object_a_frame_or_a_crop():
    clip, (_, truth) = arc()
    record = {"id": "0123abcd", "kind": "object", "root": "vid0", "frame": 20, "box": share(clip, truth[20])}
    by_object = run(scene(clip, {"0123abcd": record}), object="0123abcd", end=26)
    by_frame = run(scene(clip), "vid0.1", box=share(clip, truth[20]), end=26)
    assert by_object.data["tracks"] == by_frame.data["tracks"]
    x0, y0, x1, y1 = share(clip, truth[0])
    crop = run(scene(clip), "obs1", box=[2 * x0, y0, 2 * x1, y1], end=6).data["tracks"][0]
    assert crop["boxes"][0] == pytest.approx([x0, y0, x1, y1], abs=2e-6)
