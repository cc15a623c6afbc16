"""TRACK_OBJECT: track a box through the frames of a clip and measure its motion."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import cv2
import numpy as np
from pydantic import model_validator
from pydantic.json_schema import SkipJsonSchema

from pixelis.config import ToolboxConfig
from pixelis.errors import MissingDependency, OperationError
from pixelis.operations import geometry, shots
from pixelis.operations.draw import annotate
from pixelis.operations.media import subsample
from pixelis.operations.operation import BoxArgument, Operation, OperationArguments, Result, Scene, Target, View
from pixelis.operations.pixel_budget import shrink
from pixelis.operations.track_masks import check_masks, segment_track
from pixelis.operations.video import Clip
from pixelis.records import Box

LONGEST = 640
"""Longer side of the tracked copy: as accurate as full resolution and several times faster on large frames."""
SHORTEST_OBJECT = 24
"""Least pixels of the object's shorter side on that copy, unless the object is smaller."""

THRESHOLD = 0.36
"""Least similarity of a box that shows the object: correct tracks stay above 0.42, wrong ones mostly below 0.34."""
DROP = 0.5
"""The same as a share of the mean so far: an object with high similarity is lost when the similarity halves."""
PATIENCE = 5
"""Consecutive frames below the threshold after which the object is lost; fewer are an occlusion."""
AFTER_CUT = 0.6
"""Least similarity of a box that shows the same object in a new scene, where it is a matter of chance what the box shows."""
STRUCTURE = 3.0
"""Least contrast within a box and its margin (standard deviation of brightness, of 255, without its slope and its noise)."""
MIN_INSIDE = 0.55
"""Least share of the box inside the frame: the tracker keeps the centre of the box inside when the object has left."""

STATIONARY_PX = 10.0
LISTED = 12

Status = Literal["active", "lost", "completed"]
PixelBox = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels."""


class TrackObjectArguments(OperationArguments):
    """``box``: the object in frame ``start``, 0..1 of the target; or ``object``: the id of an object, tracked from its frame.

    ``masks``: also return the object's mask in each frame. It is not in the schema that the policy reads.
    """

    box: BoxArgument | None = None
    object: str | None = None
    start: int | None = None
    end: int | None = None
    masks: SkipJsonSchema[bool] = False

    @model_validator(mode="after")
    def _one_way(self) -> TrackObjectArguments:
        if (self.box is None) == (self.object is None):
            raise ValueError("give exactly one of box and object")
        return self


@dataclass(frozen=True)
class Track:
    """The object's box in each frame from ``first`` on, in full-resolution pixels, and its similarity 0..1.

    ``cuts``: frames with which a new scene begins, the last of them possibly the one after the track.
    """

    first: int
    boxes: list[PixelBox]
    scores: list[float]
    status: Status
    cuts: list[int]


class TrackObject(Operation):
    """OpenCV's CSRT (Lukezic et al. 2017) with our own confidence measure: the tracker itself rarely reports a failure."""

    name = "track_object"
    description = (
        "Track an object through a video. Give its box in frame start (default: the target's frame, or 0), or the id of a known "
        "object. Returns its box in the frames up to end, its status (completed, lost, active) and its motion."
    )
    Arguments = TrackObjectArguments

    @classmethod
    def ready(cls, settings: ToolboxConfig) -> None:
        """Raise MissingDependency when OpenCV lacks the tracker."""
        _csrt()

    @classmethod
    def run(cls, arguments: TrackObjectArguments, target: Target, scene: Scene) -> Result:
        """Track up to frame ``end`` or for ``max_track_frames`` frames; shows up to four frames.

        Raises OperationError ``not_a_video``, ``unknown_object``, ``bad_target``, ``bad_box``, ``too_small``, ``out_of_range``,
        ``nothing_found``, ``limit`` for too many masks; MissingDependency when OpenCV comes without CSRT.
        """
        clip = target.clip
        first, box = _begin(arguments, target, scene)
        last = len(clip.times) - 1
        end = last if arguments.end is None else arguments.end
        if not first < end <= last:
            if first == last:
                raise OperationError(f"frame {first} is the last frame, there is nothing to track", code="out_of_range")
            raise OperationError(f"end must be in {first + 1}..{last}, after start {first}", code="out_of_range")
        stop = min(end, first + scene.settings.max_track_frames - 1)
        if arguments.masks:
            check_masks(stop - first + 1)
        cv2.setRNGSeed(scene.seed & 0x7FFFFFFF)
        edges = geometry.to_pixels(box, clip.width, clip.height)
        track = follow(clip, first, stop, edges)
        if track.status == "completed" and stop < end:
            track = dataclasses.replace(track, status="active")
        return _report(track, clip, target, scene, arguments.masks)


def _begin(arguments: TrackObjectArguments, target: Target, scene: Scene) -> tuple[int, Box]:
    """The first frame, and the object's box in it, 0..1 of the frame."""
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
        box = geometry.clamp(geometry.as_box(record["box"]))
    else:
        assert arguments.box is not None
        first = (target.frame or 0) if arguments.start is None else arguments.start
        box = target.to_root(geometry.clamp(arguments.box))
    if not 0 <= first <= last:
        raise OperationError(f"no frame {str(first)[:20]}; the frames are 0..{last}", code="out_of_range")
    return first, box


def follow(clip: Clip, first: int, stop: int, edges: Sequence[float]) -> Track:
    """Track the box ``edges`` (left, top, right, bottom in pixels) from frame ``first`` to ``stop``, both included.

    The track ends with the last frame that shows the object. Raises OperationError ``nothing_found`` for an untrackable box.
    """
    side, shorter = max(clip.width, clip.height), min(edges[2] - edges[0], edges[3] - edges[1])
    longest = max(LONGEST, SHORTEST_OBJECT * side / shorter)
    frames = clip.frames(range(first, stop + 1))
    pictures = (cv2.cvtColor(shrink(frame, longest), cv2.COLOR_RGB2BGR) for frame in frames)
    picture = next(pictures)
    across, down = picture.shape[1] / clip.width, picture.shape[0] / clip.height
    start = (edges[0] * across, edges[1] * down, edges[2] * across, edges[3] * down)
    boxes, scores, status, cuts = _follow(picture, pictures, start)
    full = [tuple(map(float, edges))] + [(x0 / across, y0 / down, x1 / across, y1 / down) for x0, y0, x1, y1 in boxes[1:]]
    return Track(first, full, scores, status, [first + number for number in cuts])


def _follow(
    picture: np.ndarray, pictures: Iterator[np.ndarray], start: PixelBox
) -> tuple[list[PixelBox], list[float], Status, list[int]]:
    tracker = _csrt()
    left, top = round(start[0]), round(start[1])
    try:
        tracker.init(picture, (left, top, max(2, round(start[2]) - left), max(2, round(start[3]) - top)))
        appearance = _Appearance(picture, start)
    except cv2.error:
        raise OperationError("the box shows nothing that can be tracked", code="nothing_found") from None
    if appearance.structure < STRUCTURE:
        message = "the box shows an even area, which looks the same wherever it moves: give a box around something distinct"
        raise OperationError(message, code="nothing_found")
    boxes, scores, low, threshold, cuts = [start], [1.0], 0, THRESHOLD, list[int]()
    for number, (frame, cut) in enumerate(shots.mark_cuts(picture, pictures), 1):
        try:
            ok, (x, y, width, height) = tracker.update(frame)
        except cv2.error:
            ok = False
        box, score = boxes[-1], 0.0
        if ok and width >= 1 and height >= 1:
            box = (float(x), float(y), float(x + width), float(y + height))
            score = appearance.score(frame, box)
        if cut:
            cuts.append(number)
            if score < AFTER_CUT:
                count = max(1, len(scores) - low)
                return boxes[:count], scores[:count], "lost", cuts
        boxes.append(box)
        scores.append(score)
        low = low + 1 if score < threshold else 0
        if not low:
            threshold = max(THRESHOLD, DROP * float(np.mean(scores)))
        if low >= PATIENCE:
            break
    # At the end of the range, three frames below the threshold are enough.
    if low > PATIENCE // 2:
        count = max(1, len(scores) - low)
        return boxes[:count], scores[:count], "lost", cuts
    return boxes, scores, "completed", cuts


def _csrt() -> Any:
    create = getattr(cv2, "TrackerCSRT_create", None) or getattr(getattr(cv2, "TrackerCSRT", None), "create", None)
    if create is None:
        raise MissingDependency(
            "track_object needs OpenCV with its contributed trackers",
            fix="pip install --force-reinstall --no-deps opencv-contrib-python-headless",
        )
    return create()


class _Appearance:
    """Similarity of a box to the object: the mean of colour and pattern, against the first frame and a slow average.

    Colours are compared as Lab histograms (Bhattacharyya), patterns by normalised correlation, best of small shifts. The average
    is updated only from frames with a high score, so that it does not learn an occluder.
    """

    SIDE, SHIFT, RATE, SURE = 32, 4, 0.05, 0.5

    def __init__(self, picture: np.ndarray, box: PixelBox):
        pattern = self._patch(picture, box)[self.SHIFT : -self.SHIFT, self.SHIFT : -self.SHIFT]
        colours = self._colours(pattern)
        self._references = [(pattern, colours), (pattern.copy(), colours.copy())]
        grey = self._patch(picture, box).mean(2)
        axis = np.arange(len(grey)) - (len(grey) - 1) / 2
        slope = (grey * axis).sum() / axis.std() ** 2 / grey.size, (grey * axis[:, None]).sum() / axis.std() ** 2 / grey.size
        even = grey.mean() + slope[0] * axis + slope[1] * axis[:, None]
        self.structure = float(cv2.GaussianBlur(grey - even, (0, 0), 1.5).std())

    def score(self, picture: np.ndarray, box: PixelBox) -> float:
        """Similarity 0..1; 0 for a box mostly outside the frame."""
        height, width = picture.shape[:2]
        x0, y0, x1, y1 = box
        inside = max(0.0, min(x1, width) - max(x0, 0)) * max(0.0, min(y1, height) - max(y0, 0)) / ((x1 - x0) * (y1 - y0))
        if inside < MIN_INSIDE:
            return 0.0
        patch = self._patch(picture, box)
        pattern = np.ascontiguousarray(patch[self.SHIFT : -self.SHIFT, self.SHIFT : -self.SHIFT])
        colours = self._colours(pattern)
        score = max(self._similarity(patch, colours, *reference) for reference in self._references)
        if score >= self.SURE:
            mean, histogram = self._references[1]
            self._references[1] = (mean + self.RATE * (pattern - mean), histogram + self.RATE * (colours - histogram))
        return round(score, 4)

    @staticmethod
    def _similarity(patch: np.ndarray, colours: np.ndarray, pattern: np.ndarray, histogram: np.ndarray) -> float:
        match = float(cv2.matchTemplate(patch, np.ascontiguousarray(pattern), cv2.TM_CCOEFF_NORMED).max())
        # A plain object has no pattern to correlate: use the colours alone.
        overlap = float(np.sqrt(colours * histogram).sum())
        colour = 1 - math.sqrt(max(0.0, 1 - overlap))
        return colour if pattern.std() < 2 or not math.isfinite(match) else 0.5 * colour + 0.5 * min(1.0, max(0.0, match))

    def _patch(self, picture: np.ndarray, box: PixelBox) -> np.ndarray:
        """The box scaled to float32 [SIDE + 2 SHIFT, SIDE + 2 SHIFT, 3], BGR, with a margin of SHIFT on each side."""
        x0, y0, x1, y1 = box
        height, width = picture.shape[:2]
        more_x, more_y = (x1 - x0) * 0.2 + 1, (y1 - y0) * 0.2 + 1
        left, top = max(0, math.floor(x0 - more_x)), max(0, math.floor(y0 - more_y))
        part = picture[top : min(height, math.ceil(y1 + more_y)), left : min(width, math.ceil(x1 + more_x))]
        across, down = self.SIDE / (x1 - x0), self.SIDE / (y1 - y0)
        part = cv2.blur(
            part, (max(1, round(1 / across)), max(1, round(1 / down)))
        )  # prevents aliasing when the box is scaled down
        matrix = np.array([[across, 0, (left - x0) * across + self.SHIFT], [0, down, (top - y0) * down + self.SHIFT]], np.float32)
        side = self.SIDE + 2 * self.SHIFT
        return cv2.warpAffine(part, matrix, (side, side), borderMode=cv2.BORDER_CONSTANT).astype(np.float32)

    @staticmethod
    def _colours(pattern: np.ndarray) -> np.ndarray:
        lab = cv2.cvtColor(np.ascontiguousarray(pattern).astype(np.uint8), cv2.COLOR_BGR2Lab)
        histogram = cv2.calcHist([lab], [0, 1, 2], None, [6, 12, 12], [0, 256, 64, 192, 64, 192])
        return histogram / max(1.0, float(histogram.sum()))


def motion(boxes: Sequence[PixelBox], times: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Statistics of the path of the boxes' centres, in full-resolution pixels; ``times`` in seconds, one per box.

    The direction is that of the displacement: 0 degrees is right, 90 is down. Stationary: always within 10 pixels of the start.
    """
    centres = [((x0 + x1) / 2, (y0 + y1) / 2) for x0, y0, x1, y1 in boxes]
    steps = [math.dist(a, b) for a, b in itertools.pairwise(centres)]
    intervals = [b - a for a, b in itertools.pairwise(times)]
    path, displacement = math.fsum(steps), math.dist(centres[0], centres[-1])
    seconds = times[-1] - times[0]
    farthest = max(math.dist(centres[0], centre) for centre in centres)
    angle = math.degrees(math.atan2(centres[-1][1] - centres[0][1], centres[-1][0] - centres[0][0]))
    speeds = [step / interval for step, interval in zip(steps, intervals, strict=True) if interval > 0]
    values = {
        "total_distance": (path, "px"),
        "path_length": (path, "px"),
        "displacement": (displacement, "px"),
        "average_velocity": (path / len(steps) if steps else 0.0, "px/frame"),
        "max_velocity": (max(steps, default=0.0), "px/frame"),
        "average_speed": (path / seconds if seconds > 0 else 0.0, "px/s"),
        "max_speed": (max(speeds, default=0.0), "px/s"),
        "direction": (angle, "deg"),
    }
    statistics: dict[str, dict[str, Any]] = {name: {"value": round(v, 3), "unit": unit} for name, (v, unit) in values.items()}
    statistics["is_stationary"] = {"value": farthest < STATIONARY_PX, "unit": "bool"}
    return statistics


def _report(track: Track, clip: Clip, target: Target, scene: Scene, masks: bool) -> Result:
    frames = list(range(track.first, track.first + len(track.boxes)))
    boxes = [_normalise(box, clip.width, clip.height) for box in track.boxes]
    statistics = motion(track.boxes, [float(clip.times[frame]) for frame in frames])
    key = f"{target.root} {track.first} {boxes[0]} {frames[-1]} {boxes[-1]}"
    name = hashlib.sha256(key.encode()).hexdigest()[:8]
    last = track.boxes[-1]
    record = {
        "id": name,
        "kind": "track",
        "root": target.root,
        "frame": frames[-1],
        "box": boxes[-1],
        "area": round((last[2] - last[0]) * (last[3] - last[1])),
        "score": track.scores[-1],
        "method": "csrt",
    }
    entry = {
        "id": name,
        "root": target.root,
        "status": track.status,
        "frames": frames,
        "boxes": boxes,
        "scores": track.scores,
        "cuts": track.cuts,
        "statistics": statistics,
    }
    if masks:
        codes = segment_track(clip, frames, boxes, scene.settings, scene.seed)
        entry["masks"], record["mask"] = codes, codes[-1]
    data = {"tracks": [entry], "objects": [record]}
    return Result(_text(entry, clip, target, scene), _views(entry, clip, scene), data)


def _normalise(box: PixelBox, width: int, height: int) -> list[float]:
    """Convert pixels to 0..1 of the frame, clipped to it."""
    x0, y0, x1, y1 = box
    return [round(min(1.0, max(0.0, v)), 6) for v in (x0 / width, y0 / height, x1 / width, y1 / height)]


def _text(entry: dict[str, Any], clip: Clip, target: Target, scene: Scene) -> str:
    frames, boxes, status = entry["frames"], entry["boxes"], entry["status"]
    value = {name: item["value"] for name, item in entry["statistics"].items()}
    indices = subsample(range(len(frames)), LISTED)
    listed = "; ".join(f"{frames[i]}: {scene.scale.around(target.from_root(tuple(boxes[i])), target.id)}" for i in indices)
    seconds = clip.times[frames[-1]] - clip.times[frames[0]]
    lines = [
        f"track {entry['id']}: {status}, frames {frames[0]} to {frames[-1]} of {target.root} ({seconds:.2f} s).",
        f"Box by frame: {listed}.",
        f"Motion in px of the full frame: path {value['path_length']:.0f}, displacement {value['displacement']:.0f}, "
        f"average {value['average_velocity']:.1f} per frame ({value['average_speed']:.0f} per second), "
        f"maximum {value['max_velocity']:.1f} per frame; "
        + ("stationary." if value["is_stationary"] else f"direction {value['direction']:.0f} deg (0 right, 90 down)."),
    ]
    if entry["cuts"]:
        lines.append(f"The scene changes with frame {', '.join(map(str, entry['cuts'][:6]))}.")
    if status == "lost":
        lines.append(f"The object was not seen after frame {frames[-1]}.")
    elif status == "active":
        lines.append(f"Stopped at the limit of {scene.settings.max_track_frames} frames: continue with object={entry['id']}.")
    return "\n".join(lines)


def _views(entry: dict[str, Any], clip: Clip, scene: Scene) -> list[View]:
    indices = subsample(range(len(entry["frames"])), 4)
    numbers = [entry["frames"][i] for i in indices]
    views = []
    for i, number, frame in zip(indices, numbers, clip.frames(numbers), strict=True):
        mask = entry["masks"][i] if "masks" in entry else None
        pixels = annotate(scene.fit_frame(frame), {"boxes": [entry["boxes"][i]], "objects": [{"mask": mask}] if mask else []})
        views.append(View(pixels, None, number, float(clip.times[number])))
    return views
