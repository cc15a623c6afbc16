"""Accuracy of `track_object` against OpenCV's CSRT alone, on objects with a known motion over real
footage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import pi, sin

import cv2
import numpy as np

from benchmarks import operation_datasets as sets
from benchmarks.harness import Report
from benchmarks.operation_quality import call
from pixelis.config import ToolboxConfig
from pixelis.evaluation.tracking import TrackingScores
from pixelis.operations.video import Clip, open_clip

Edges = Sequence[float]
Tracks = list[dict[int, Edges]]
"""For each object, its edges in pixels (left, top, right, bottom) in the frames that show it."""


@dataclass(frozen=True)
class Scenario:
    """A clip (its bytes), the true edges of its objects, and whether they are tracked from its last frame to
    its first.
    """

    data: bytes
    truth: Tracks
    backward: bool = False


def run(report: Report, thin: int) -> None:
    """Report HOTA, IDF1 and MOTA of `track_object` and of CSRT alone in each group, and the ratio of their
    CPU times.
    """
    cv2.setNumThreads(1)
    count = max(24, 110 // thin)
    names = list(sets.MOTIONS)[::thin]
    groups: dict[str, Callable[[], list[Scenario]]] = {
        "always visible": lambda: [_ordinary(name, count, False) for name in names],
        "backward": lambda: [_ordinary(name, count, True) for name in names],
        "hidden behind a wall": lambda: [
            _wall(name, count) for name in ("cat", "face", "cup", "flower")[::thin]
        ],
        "leaves and returns": lambda: [
            _returns(name, count) for name in ("cat", "face", "cup", "flower")[::thin]
        ],
        "vanishes": lambda: [_vanishes(name, count) for name in ("cat", "face", "cup", "flower")[::thin]],
        "a fixed camera": lambda: [_fixed(name, count) for name in ("cat", "face", "cup", "flower")[::thin]],
        "three objects that cross": lambda: [_crossing(clip, count) for clip in ("BIKES", "BUNNY")[::thin]],
    }
    for group, build in groups.items():
        ours, bare, seconds = TrackingScores(), TrackingScores(), np.zeros(2)
        scenarios = build()
        for scenario in scenarios:
            clip = open_clip(scenario.data, ToolboxConfig())
            for _ in clip.frames(range(min(8, len(clip.times)))):
                pass  # opens the decoder
            for position, (scores, method) in enumerate(((ours, _ours), (bare, _csrt))):
                start = time.process_time()
                result = method(clip, scenario)
                seconds[position] += time.process_time() - start
                first = len(clip.times) - 1 if scenario.backward else 0
                # The given box counts for neither.
                scores.add(
                    *(
                        [{n: b for n, b in t.items() if n != first} for t in tracks]
                        for tracks in (scenario.truth, result)
                    )
                )
        note = f"{len(scenarios)} clips, CPU time {seconds[0] / seconds[1]:.2f} of CSRT alone"
        report.row(f"track_object: {group}", str(ours), "", note)
        report.row(f"CSRT alone: {group}", str(bare))


def _start(clip: Clip, scenario: Scenario) -> tuple[int, int, list[Edges]]:
    """The first and the last frame of the tracks, and the objects' edges in the first."""
    first, last = (len(clip.times) - 1, 0) if scenario.backward else (0, len(clip.times) - 1)
    return first, last, [track[first] for track in scenario.truth]


def _ours(clip: Clip, scenario: Scenario) -> Tracks:
    first, last, edges = _start(clip, scenario)
    size = np.array([clip.width, clip.height] * 2)
    boxes = [(np.array(e) / size).tolist() for e in edges]
    settings = ToolboxConfig(max_track_frames=len(boxes) * len(clip.times))
    observation = call("track_object", clip, "vid0", settings, boxes=boxes, start=first, end=last)
    assert observation.status == "ok", observation.text
    return [
        dict(zip(t["frames"], np.array(t["boxes"]) * size, strict=True)) for t in observation.data["tracks"]
    ]


def _csrt(clip: Clip, scenario: Scenario) -> Tracks:
    """A tracker for each object on the full frames; a frame has no box where the tracker itself reports a
    failure.
    """
    first, last, edges = _start(clip, scenario)
    numbers = list(range(first, last + 1)) if first <= last else list(range(first, last - 1, -1))
    chunks = [numbers[i : i + 32] for i in range(0, len(numbers), 32)]
    trackers: list[cv2.Tracker] = []
    result: Tracks = [{} for _ in edges]
    for chunk in chunks:
        frames = dict(zip(sorted(chunk), clip.frames(sorted(chunk)), strict=True))
        for number in chunk:
            picture = cv2.cvtColor(frames[number], cv2.COLOR_RGB2BGR)
            if not trackers:
                for x0, y0, x1, y1 in edges:
                    trackers.append(
                        cv2.TrackerCSRT_create()
                        if hasattr(cv2, "TrackerCSRT_create")
                        else cv2.TrackerCSRT.create()
                    )
                    trackers[-1].init(picture, (round(x0), round(y0), round(x1 - x0), round(y1 - y0)))
                continue
            for tracker, track in zip(trackers, result, strict=True):
                ok, (x, y, width, height) = tracker.update(picture)
                if ok:
                    track[number] = (x, y, x + width, y + height)
    return result


# --- clips
# ----------------------------------------------------------------------------------------------------------------------


def _visible(truth: Sequence[Edges | None]) -> dict[int, Edges]:
    return {number: edges for number, edges in enumerate(truth) if edges is not None}


def _encoded(frames: Sequence[np.ndarray]) -> bytes:
    import clips

    return clips.encode(frames, options={"crf": "20", "preset": "veryfast"})


def _ordinary(name: str, count: int, backward: bool) -> Scenario:
    data, truth = sets.moving(name, count)
    return Scenario(data, [_visible(truth)], backward)


def _pasted(
    clip: str,
    size: tuple[int, int],
    count: int,
    name: str,
    path: Callable[[float], tuple[float, float]],
    height: float,
) -> tuple[Sequence[np.ndarray], list[np.ndarray], list[Edges | None]]:
    """The footage, its frames with the photo, and the photo's edges."""
    import clips

    ground = clips.footage(getattr(clips, clip), count, *size)
    frames, truth = clips.paste(ground, sets.subject(name), path, lambda t: height)
    return ground, frames, truth


def _fixed(name: str, count: int) -> Scenario:
    """The object moves in the middle third of the clip only; the sensor has a noise of 2 grey levels."""
    import clips

    noise = np.random.default_rng(0).normal(0, 2, (count, 272, 640, 3))
    ground = np.clip(cv2.resize(sets.photo("coffee"), (640, 272)) + noise, 0, 255).astype(np.uint8)
    frames, truth = clips.paste(
        list(ground),
        sets.subject(name),
        lambda t: (0.25 + 0.5 * min(1.0, max(0.0, 3 * t - 1)), 0.5),
        lambda t: 90,
    )
    return Scenario(_encoded(frames), [_visible(truth)])


def _wall(name: str, count: int) -> Scenario:
    """The object passes behind a brick wall. It counts as visible while more than half of it is."""
    _, frames, truth = _pasted(
        "BIKES", (640, 272), count, name, lambda t: (0.1 + 0.8 * t, 0.5 + 0.1 * sin(6 * t)), 70
    )
    wall = cv2.resize(sets.photo("brick"), (640, 272))
    left, right = 256, 384
    for frame in frames:
        frame[:, left:right] = wall[:, left:right]
    shown = [e if e and min(right, e[2]) - max(left, e[0]) < (e[2] - e[0]) / 2 else None for e in truth]
    return Scenario(_encoded(frames), [_visible(shown)])


def _returns(name: str, count: int) -> Scenario:
    _, frames, truth = _pasted(
        "BUNNY", (640, 360), count, name, lambda t: (0.5 + 0.8 * sin(pi * t), 0.5 + 0.2 * t), 80
    )
    return Scenario(_encoded(frames), [_visible(truth)])


def _vanishes(name: str, count: int) -> Scenario:
    ground, frames, truth = _pasted("BIKES", (640, 272), count, name, lambda t: (0.3 + 0.2 * t, 0.5), 70)
    half = count // 2
    return Scenario(_encoded([*frames[:half], *ground[half:]]), [_visible(truth[:half])])


def _crossing(clip: str, count: int) -> Scenario:
    """Three objects; a later one passes before an earlier one, which is visible while less than half of its
    box is covered.
    """
    import clips

    size = (640, 272) if clip == "BIKES" else (640, 360)
    courses: Mapping[str, Callable[[float], tuple[float, float]]] = {
        "cat": lambda t: (0.15 + 0.7 * t, 0.3 + 0.3 * t),
        "face": lambda t: (0.85 - 0.7 * t, 0.35 + 0.2 * t),
        "cup": lambda t: (0.5 + 0.1 * sin(6 * t), 0.75 - 0.5 * t),
    }
    frames: Sequence[np.ndarray] = clips.footage(getattr(clips, clip), count, *size)
    tracks: Tracks = []
    for name, course in courses.items():
        frames, truth = clips.paste(frames, sets.subject(name), course, lambda t: 64)
        tracks = [{n: e for n, e in track.items() if _covered(e, truth[n]) < 0.5} for track in tracks]
        tracks.append(_visible(truth))
    return Scenario(_encoded(frames), tracks)


def _covered(edges: Edges, other: Edges | None) -> float:
    """The share of a box that another one covers."""
    if other is None:
        return 0.0
    width, height = (max(0.0, min(edges[i + 2], other[i + 2]) - max(edges[i], other[i])) for i in (0, 1))
    return width * height / ((edges[2] - edges[0]) * (edges[3] - edges[1]))
