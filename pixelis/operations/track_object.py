"""TRACK_OBJECT: track boxes through the frames of a clip, forward and backward, and measure their motion."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from pixelis.config import ToolboxConfig
from pixelis.errors import OperationError
from pixelis.operations import csrt, geometry
from pixelis.operations.csrt import PixelBox, Track
from pixelis.operations.draw import annotate
from pixelis.operations.media import subsample
from pixelis.operations.operation import (
    BoxArgument,
    Operation,
    OperationArguments,
    Result,
    Scene,
    Target,
    View,
    object_id,
)
from pixelis.operations.segment_object_at import segment
from pixelis.operations.video import Clip
from pixelis.records import Box

STATIONARY_PX = 10.0
WAYS = ("right", "down right", "down", "down left", "left", "up left", "up", "up right")
"""Directions in steps of 45 degrees."""
LISTED = 12
MAX_OBJECTS = 8
MAX_MASKS = 64
"""Segmenting a frame takes much longer than tracking through it."""


class TrackObjectArguments(OperationArguments):
    """``box`` or ``boxes`` in frame ``start``, or the id of an ``object``, from its own frame.

    An earlier ``end`` tracks backward. ``masks``, not offered to the policy, adds a mask in each frame.
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
    name = "track_object"
    description = (
        "Track an object through a video. Give its box in frame start (default: the target's frame, or 0), "
        "or the id of a known object. Returns its box in the frames up to end (before start: backward), its "
        "status (completed, lost, active), when it was hidden, and its motion."
    )
    Arguments = TrackObjectArguments

    @classmethod
    def ready(cls, settings: ToolboxConfig) -> None:
        csrt.create_tracker()

    @classmethod
    def run(cls, arguments: TrackObjectArguments, target: Target, scene: Scene) -> Result:
        """Track to frame ``end``; up to four frames are shown."""
        clip = target.clip
        first, boxes = _begin(arguments, target, scene)
        last = len(clip.times) - 1
        end = last if arguments.end is None else arguments.end
        if end == first or not 0 <= end <= last:
            message = f"end must be in 0..{last} and differ from start {first}"
            raise OperationError(message, code="out_of_range")
        most = max(2, scene.settings.max_track_frames // len(boxes)) - 1
        stop = first + max(-most, min(most, end - first))
        if arguments.masks and (count := (abs(stop - first) + 1) * len(boxes)) > MAX_MASKS:
            message = f"masks of {count} frames requested, the limit is {MAX_MASKS}: set end, or omit masks"
            raise OperationError(message, code="limit")
        cv2.setRNGSeed(scene.seed & 0x7FFFFFFF)
        edges = [geometry.to_pixels(box, clip.width, clip.height) for box in boxes]
        entries, records, lines = [], [], []
        for number, track in enumerate(csrt.follow(clip, first, stop, edges), 1):
            status = "lost" if stop not in track.frames else "active" if stop != end else "completed"
            entry = _describe(track, status, clip, target.root, first)
            if arguments.masks:
                entry["masks"] = segment_track(
                    clip, entry["frames"], entry["boxes"], scene.settings, scene.seed
                )
            entries.append(entry)
            records.append(_record(entry, clip, -1 if first < stop else 0))
            prefix = f"{number}: " if len(boxes) > 1 else ""
            listed = max(3, LISTED // len(boxes))
            lines += [
                prefix + line for line in _track_lines(entry, first < stop, listed, clip, target, scene)
            ]
        if cuts := entries[0]["cuts"]:
            lines.append(f"The scene changes with frame {', '.join(map(str, cuts[:6]))}.")
        return Result("\n".join(lines), _views(entries, clip, scene), {"tracks": entries, "objects": records})


def _begin(arguments: TrackObjectArguments, target: Target, scene: Scene) -> tuple[int, list[Box]]:
    last = len(target.clip.times) - 1
    if arguments.object is not None:
        record, name = scene.object(arguments.object), arguments.object[:20]
        if record.get("root") != target.root or record.get("frame") is None:
            message = f"object {name} is in {record.get('root')}, set that as target"
            raise OperationError(message, code="bad_target")
        first = int(record["frame"])
        if arguments.start not in (None, first):
            message = f"object {name} is tracked from its own frame {first}, omit start"
            raise OperationError(message, code="bad_arguments")
        boxes = [geometry.clamp(geometry.as_box(record["box"]))]
    else:
        first = (target.frame or 0) if arguments.start is None else arguments.start
        own = arguments.boxes if arguments.box is None else [arguments.box]
        boxes = [target.to_root(geometry.clamp(box)) for box in own or []]
    if not 0 <= first <= last:
        raise OperationError(f"no frame {str(first)[:20]}; the frames are 0..{last}", code="out_of_range")
    return first, boxes


def segment_track(
    clip: Clip, frames: Sequence[int], boxes: Sequence[Sequence[float]], settings: ToolboxConfig, seed: int
) -> list[Any]:
    """COCO's code of the object in each frame, None where the box (0..1 of the frame) shows no object."""
    codes: list[Any] = []
    for picture, box in zip(clip.frames(frames), boxes, strict=True):
        try:
            edges = geometry.to_pixels(geometry.as_box(box), clip.width, clip.height)
            segment_of_frame = segment(picture, (0, 0, clip.width, clip.height), None, edges, settings, seed)
        except OperationError as error:
            if error.code not in ("nothing_found", "too_small"):
                raise
            codes.append(None)
        else:
            codes.append(segment_of_frame.mask.encode())
    return codes


def motion(
    boxes: Sequence[PixelBox], times: Sequence[float], frames: Sequence[int] | None = None
) -> dict[str, dict[str, Any]]:
    """Statistics of the path of the boxes' centres, in full-resolution pixels.

    ``times`` in seconds, and numbers of ``frames``, by default consecutive. Direction of the displacement: 0
    degrees is right, 90 down. Stationary: always within 10 pixels of the start.
    """
    centres = np.array([((x0 + x1) / 2, (y0 + y1) / 2) for x0, y0, x1, y1 in boxes])
    steps = np.hypot(*np.diff(centres, axis=0).T)
    intervals, strides = np.diff(times), np.diff(range(len(boxes)) if frames is None else frames)
    across, down = centres[-1] - centres[0]
    seconds = times[-1] - times[0]
    moving = intervals > 0
    values = {
        "total_distance": (steps.sum(), "px"),
        "path_length": (steps.sum(), "px"),
        "displacement": (math.hypot(across, down), "px"),
        "average_velocity": (steps.sum() / max(1, strides.sum()), "px/frame"),
        "max_velocity": ((steps / strides).max(initial=0.0), "px/frame"),
        "average_speed": (steps.sum() / seconds if seconds > 0 else 0.0, "px/s"),
        "max_speed": ((steps[moving] / intervals[moving]).max(initial=0.0), "px/s"),
        "direction": (math.degrees(math.atan2(down, across)), "deg"),
    }
    statistics: dict[str, dict[str, Any]] = {
        name: {"value": round(float(v), 3), "unit": unit} for name, (v, unit) in values.items()
    }
    farthest = np.hypot(*(centres - centres[0]).T).max()
    statistics["is_stationary"] = {"value": bool(farthest < STATIONARY_PX), "unit": "bool"}
    return statistics


def _describe(track: Track, status: str, clip: Clip, root: str, first: int) -> dict[str, Any]:
    size = (clip.width, clip.height)
    boxes = [
        [round(min(1.0, max(0.0, v / size[i % 2])), 6) for i, v in enumerate(box)] for box in track.boxes
    ]
    ends = [(track.frames[i], boxes[i]) for i in ((0, -1) if first == track.frames[0] else (-1, 0))]
    key = " ".join(f"{frame} {box}" for frame, box in ends)
    return {
        "id": object_id(f"{root} {key}"),
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
    """The object in the frame where its track stopped, the first or the last, for later operations."""
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


def _track_lines(
    entry: dict[str, Any], forward: bool, listed: int, clip: Clip, target: Target, scene: Scene
) -> list[str]:
    frames, boxes, status, hidden = entry["frames"], entry["boxes"], entry["status"], entry["hidden"]
    value = {name: item["value"] for name, item in entry["statistics"].items()}
    indices = subsample(range(len(frames)), listed)
    places = "; ".join(
        f"{frames[i]}: {scene.scale.around(target.from_root(tuple(boxes[i])), target.id)}" for i in indices
    )
    seconds = clip.times[frames[-1]] - clip.times[frames[0]]
    way = WAYS[round(value["direction"] / 45) % len(WAYS)]
    direction = f"direction {way}, {value['direction']:.0f} deg (0 right, 90 down)"
    lines = [
        f"track {entry['id']}: {status}, frames {frames[0]} to {frames[-1]} of {target.root} ({seconds:.2f} s).",
        f"Box by frame: {places}.",
        f"Motion in px of the full frame: path {value['path_length']:.0f}, displacement "
        f"{value['displacement']:.0f}, average {value['average_velocity']:.1f} per frame "
        f"({value['average_speed']:.0f} per second), maximum {value['max_velocity']:.1f} per frame; "
        f"{'stationary' if value['is_stationary'] else direction}.",
    ]
    if hidden:
        lines.append(f"The object was hidden in frames {', '.join(f'{a} to {b}' for a, b in hidden[:6])}.")
    if status == "lost":
        place = f"after frame {frames[-1]}" if forward else f"before frame {frames[0]}"
        lines.append(f"The object was not seen {place}.")
    elif status == "active":
        limit = scene.settings.max_track_frames
        lines.append(f"Stopped at the limit of {limit} frames: continue with object={entry['id']}.")
    return lines


def _views(entries: list[dict[str, Any]], clip: Clip, scene: Scene) -> list[View]:
    numbers = subsample(sorted({frame for entry in entries for frame in entry["frames"]}), 4)
    views = scene.show_frames(clip, numbers)
    for view in views:
        boxes, tints = [], []
        for position, entry in enumerate(entries, 1):
            if view.frame not in entry["frames"]:
                continue
            i = entry["frames"].index(view.frame)
            boxes.append({"box": entry["boxes"][i], "label": str(position) if len(entries) > 1 else ""})
            if "masks" in entry and entry["masks"][i] is not None:
                tints.append({"mask": entry["masks"][i]})
        view.pixels = annotate(view.pixels, {"boxes": boxes, "objects": tints})
    return views
