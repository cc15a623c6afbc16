"""TRACK_OBJECT: track boxes through the frames of a clip, forward and backward, and measure their motion."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import cv2
from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from pixelis.config import ToolboxConfig
from pixelis.errors import OperationError
from pixelis.operations import csrt, geometry
from pixelis.operations.csrt import PixelBox, Track
from pixelis.operations.draw import annotate
from pixelis.operations.media import subsample
from pixelis.operations.operation import BoxArgument, Operation, OperationArguments, Result, Scene, Target, View
from pixelis.operations.track_masks import check_masks, segment_track
from pixelis.operations.video import Clip
from pixelis.records import Box

STATIONARY_PX = 10.0
LISTED = 12
"""Boxes in the text, of all tracks together."""
MAX_OBJECTS = 8


class TrackObjectArguments(OperationArguments):
    """``box``: the object in frame ``start``, 0..1 of the target; ``boxes``: several; or ``object``: the id of an object.

    An object is tracked from its own frame. An ``end`` before that frame tracks backward. ``masks``: also return the object's
    mask in each frame. It is not in the schema that the policy reads.
    """

    box: BoxArgument | None = None
    boxes: list[BoxArgument] | None = Field(None, description="several objects")
    object: str | None = None
    start: int | None = None
    end: int | None = None
    masks: SkipJsonSchema[bool] = False

    @model_validator(mode="after")
    def _one_way(self) -> TrackObjectArguments:
        if sum(value is not None for value in (self.box, self.boxes, self.object)) != 1:
            raise ValueError("give exactly one of box, boxes and object")
        if self.boxes is not None and not 1 <= len(self.boxes) <= MAX_OBJECTS:
            raise ValueError(f"boxes needs 1 to {MAX_OBJECTS} entries")
        return self


class TrackObject(Operation):
    """Tracks with OpenCV's CSRT and our own measure of confidence; see `csrt`."""

    name = "track_object"
    description = (
        "Track an object through a video. Give its box in frame start (default: the target's frame, or 0), or the id of a known "
        "object. Returns its box in the frames up to end (before start: backward), its status (completed, lost, active), when it "
        "was hidden, and its motion."
    )
    Arguments = TrackObjectArguments

    @classmethod
    def ready(cls, settings: ToolboxConfig) -> None:
        """Raise MissingDependency when OpenCV lacks the tracker."""
        csrt.create_tracker()

    @classmethod
    def run(cls, arguments: TrackObjectArguments, target: Target, scene: Scene) -> Result:
        """Track to frame ``end``, through ``max_track_frames`` frames shared by all objects; shows up to four frames.

        Raises OperationError ``not_a_video``, ``unknown_object``, ``bad_target``, ``bad_box``, ``too_small``, ``out_of_range``,
        ``nothing_found``, ``limit`` for too many masks; MissingDependency when OpenCV comes without CSRT.
        """
        clip = target.clip
        first, boxes = _begin(arguments, target, scene)
        end = _end(arguments.end, first, len(clip.times) - 1)
        most = max(2, scene.settings.max_track_frames // len(boxes)) - 1
        stop = first + max(-most, min(most, end - first))
        if arguments.masks:
            check_masks((abs(stop - first) + 1) * len(boxes))
        cv2.setRNGSeed(scene.seed & 0x7FFFFFFF)
        edges = [geometry.to_pixels(box, clip.width, clip.height) for box in boxes]
        entries = []
        for track in csrt.follow(clip, first, stop, edges):
            status = "lost" if stop not in track.frames else "active" if stop != end else "completed"
            entry = _describe(track, status, clip, target.root, first)
            if arguments.masks:
                entry["masks"] = segment_track(clip, entry["frames"], entry["boxes"], scene.settings, scene.seed)
            entries.append(entry)
        records = [_record(entry, clip, -1 if first < stop else 0) for entry in entries]
        return Result(
            _text(entries, first < stop, clip, target, scene),
            _views(entries, clip, scene),
            {"tracks": entries, "objects": records},
        )


def _begin(arguments: TrackObjectArguments, target: Target, scene: Scene) -> tuple[int, list[Box]]:
    """The frame of the given boxes, and the boxes, 0..1 of the frame."""
    last = len(target.clip.times) - 1
    if arguments.object is not None:
        record = scene.object(arguments.object)
        if record.get("root") != target.root or record.get("frame") is None:
            raise OperationError(
                f"object {arguments.object[:20]} is in {record.get('root')}, set that as target", code="bad_target"
            )
        first = int(record["frame"])
        if arguments.start not in (None, first):
            raise OperationError(
                f"object {arguments.object[:20]} is tracked from its own frame {first}, omit start", code="bad_arguments"
            )
        boxes = [geometry.clamp(geometry.as_box(record["box"]))]
    else:
        first = (target.frame or 0) if arguments.start is None else arguments.start
        own = arguments.boxes if arguments.box is None else [arguments.box]
        boxes = [target.to_root(geometry.clamp(box)) for box in own or []]
    if not 0 <= first <= last:
        raise OperationError(f"no frame {str(first)[:20]}; the frames are 0..{last}", code="out_of_range")
    return first, boxes


def _end(end: int | None, first: int, last: int) -> int:
    """The requested last frame of the track, in either direction. Raises OperationError ``out_of_range``."""
    if end is None:
        if first == last:
            raise OperationError(
                f"frame {first} is the last frame: set end to an earlier one to track backward", code="out_of_range"
            )
        return last
    if end == first or not 0 <= end <= last:
        raise OperationError(f"end must be in 0..{last} and differ from start {first}", code="out_of_range")
    return end


def motion(boxes: Sequence[PixelBox], times: Sequence[float], frames: Sequence[int] | None = None) -> dict[str, dict[str, Any]]:
    """Statistics of the path of the boxes' centres, in full-resolution pixels.

    ``times`` in seconds and increasing numbers of ``frames``, one per box; by default the frames are consecutive.
    The direction is that of the displacement: 0 degrees is right, 90 is down. Stationary: always within 10 pixels of the start.
    """
    centres = [((x0 + x1) / 2, (y0 + y1) / 2) for x0, y0, x1, y1 in boxes]
    steps = [math.dist(a, b) for a, b in itertools.pairwise(centres)]
    intervals = [b - a for a, b in itertools.pairwise(times)]
    strides = [b - a for a, b in itertools.pairwise(range(len(boxes)) if frames is None else frames)]
    path, displacement = math.fsum(steps), math.dist(centres[0], centres[-1])
    seconds = times[-1] - times[0]
    farthest = max(math.dist(centres[0], centre) for centre in centres)
    angle = math.degrees(math.atan2(centres[-1][1] - centres[0][1], centres[-1][0] - centres[0][0]))
    speeds = [step / interval for step, interval in zip(steps, intervals, strict=True) if interval > 0]
    values = {
        "total_distance": (path, "px"),
        "path_length": (path, "px"),
        "displacement": (displacement, "px"),
        "average_velocity": (path / sum(strides) if steps else 0.0, "px/frame"),
        "max_velocity": (max((step / stride for step, stride in zip(steps, strides, strict=True)), default=0.0), "px/frame"),
        "average_speed": (path / seconds if seconds > 0 else 0.0, "px/s"),
        "max_speed": (max(speeds, default=0.0), "px/s"),
        "direction": (angle, "deg"),
    }
    statistics: dict[str, dict[str, Any]] = {name: {"value": round(v, 3), "unit": unit} for name, (v, unit) in values.items()}
    statistics["is_stationary"] = {"value": farthest < STATIONARY_PX, "unit": "bool"}
    return statistics


def _describe(track: Track, status: str, clip: Clip, root: str, first: int) -> dict[str, Any]:
    """The track as plain values. ``first``: the frame of the given box."""
    boxes = [_normalise(box, clip.width, clip.height) for box in track.boxes]
    ends = [(track.frames[i], boxes[i]) for i in ((0, -1) if first == track.frames[0] else (-1, 0))]
    key = " ".join(f"{frame} {box}" for frame, box in ends)
    return {
        "id": hashlib.sha256(f"{root} {key}".encode()).hexdigest()[:8],
        "root": root,
        "status": status,
        "frames": track.frames,
        "boxes": boxes,
        "scores": track.scores,
        "hidden": [[a + 1, b - 1] for a, b in itertools.pairwise(track.frames) if b - a > 1],
        "cuts": track.cuts,
        "statistics": motion(track.boxes, [float(clip.times[frame]) for frame in track.frames], track.frames),
    }


def _record(entry: dict[str, Any], clip: Clip, index: int) -> dict[str, Any]:
    """The object in the frame where its track stopped, the first or the last, which later operations may name."""
    x0, y0, x1, y1 = entry["boxes"][index]
    record = {
        "id": entry["id"],
        "kind": "track",
        "root": entry["root"],
        "frame": entry["frames"][index],
        "box": entry["boxes"][index],
        "area": round((x1 - x0) * clip.width * (y1 - y0) * clip.height),
        "score": entry["scores"][index],
        "method": "csrt",
    }
    return record | ({"mask": entry["masks"][index]} if "masks" in entry else {})


def _normalise(box: PixelBox, width: int, height: int) -> list[float]:
    """Convert pixels to 0..1 of the frame, clipped to it."""
    x0, y0, x1, y1 = box
    return [round(min(1.0, max(0.0, v)), 6) for v in (x0 / width, y0 / height, x1 / width, y1 / height)]


def _text(entries: list[dict[str, Any]], forward: bool, clip: Clip, target: Target, scene: Scene) -> str:
    lines = []
    for number, entry in enumerate(entries, 1):
        prefix = f"{number}: " if len(entries) > 1 else ""
        lines += [prefix + line for line in _track_lines(entry, forward, max(3, LISTED // len(entries)), clip, target, scene)]
    if cuts := entries[0]["cuts"]:
        lines.append(f"The scene changes with frame {', '.join(map(str, cuts[:6]))}.")
    return "\n".join(lines)


def _track_lines(entry: dict[str, Any], forward: bool, listed: int, clip: Clip, target: Target, scene: Scene) -> list[str]:
    frames, boxes, status, hidden = entry["frames"], entry["boxes"], entry["status"], entry["hidden"]
    value = {name: item["value"] for name, item in entry["statistics"].items()}
    indices = subsample(range(len(frames)), listed)
    places = "; ".join(f"{frames[i]}: {scene.scale.around(target.from_root(tuple(boxes[i])), target.id)}" for i in indices)
    seconds = clip.times[frames[-1]] - clip.times[frames[0]]
    lines = [
        f"track {entry['id']}: {status}, frames {frames[0]} to {frames[-1]} of {target.root} ({seconds:.2f} s).",
        f"Box by frame: {places}.",
        f"Motion in px of the full frame: path {value['path_length']:.0f}, displacement {value['displacement']:.0f}, "
        f"average {value['average_velocity']:.1f} per frame ({value['average_speed']:.0f} per second), "
        f"maximum {value['max_velocity']:.1f} per frame; "
        + ("stationary." if value["is_stationary"] else f"direction {value['direction']:.0f} deg (0 right, 90 down)."),
    ]
    if hidden:
        lines.append(f"The object was hidden in frames {', '.join(f'{a} to {b}' for a, b in hidden[:6])}.")
    if status == "lost":
        lines.append(f"The object was not seen {f'after frame {frames[-1]}' if forward else f'before frame {frames[0]}'}.")
    elif status == "active":
        lines.append(f"Stopped at the limit of {scene.settings.max_track_frames} frames: continue with object={entry['id']}.")
    return lines


def _views(entries: list[dict[str, Any]], clip: Clip, scene: Scene) -> list[View]:
    """Up to four frames spread over the tracks, with the boxes of all objects in them, numbered when there are several."""
    numbers = subsample(sorted({frame for entry in entries for frame in entry["frames"]}), 4)
    views = []
    for number, frame in zip(numbers, clip.frames(numbers), strict=True):
        boxes, tints = [], []
        for position, entry in enumerate(entries, 1):
            if number not in entry["frames"]:
                continue
            i = entry["frames"].index(number)
            boxes.append({"box": entry["boxes"][i], "label": str(position) if len(entries) > 1 else ""})
            if "masks" in entry and entry["masks"][i] is not None:
                tints.append({"mask": entry["masks"][i]})
        views.append(
            View(annotate(scene.fit_frame(frame), {"boxes": boxes, "objects": tints}), None, number, float(clip.times[number]))
        )
    return views
