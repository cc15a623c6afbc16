"""Drawings of observations: found objects, lines and tracks on the picture or on frames of a clip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from pixelis.errors import OperationError
from pixelis.operations import draw, geometry
from pixelis.operations.media import subsample
from pixelis.operations.pictures import DRAWABLE, drawable, frame_label
from pixelis.operations.pixel_budget import shrink
from pixelis.records import Action, Box, ImageView, Trajectory
from pixelis.telemetry.html.details import MALFORMED

DRAWING_PIXELS = 560
"""Longer side of a drawing on a picture."""
TRACK_PIXELS = 320
TRACK_FRAMES = 6


@dataclass(frozen=True)
class Drawing:
    """``data`` of an observation to draw on a region of a picture, or of a frame of a clip."""

    root: str
    frame: int | None
    time: float | None
    region: Box
    data: Mapping[str, Any]
    title: str
    longest: int = DRAWING_PIXELS

    @property
    def caption(self) -> str:
        return self.title if self.frame is None else frame_label(self.frame, self.time)

    def paint(self, pictures: Mapping[str, np.ndarray], images: Sequence[ImageView]) -> np.ndarray | None:
        """The pixels with the data drawn on them, uint8 [height, width, 3]; None without the picture."""
        picture = full_picture(pictures, images, self.root, self.frame)
        if picture is None:
            return None
        height, width = picture.shape[:2]
        x0, y0, x1, y1 = self.region
        left, top = min(int(x0 * width), width - 1), min(int(y0 * height), height - 1)
        right, bottom = max(left + 1, round(x1 * width)), max(top + 1, round(y1 * height))
        part = shrink(picture[top:bottom, left:right], self.longest)
        scale = self.longest / 2 / max(part.shape[:2])
        if scale > 1:  # labels need room
            part = cv2.resize(part, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
        region = (left / width, top / height, right / width, bottom / height)
        return draw.annotate(part, self.data, region, self.frame, self.root)


def frame_key(clip: str, frame: int) -> str:
    """The key of a clip's frame at full resolution among a page's pictures."""
    return f"{clip}#{frame}"


def drawings(trajectory: Trajectory, turn: int) -> list[Drawing]:
    """The drawings for the observation of a turn; none for a zoom, which is marked on the picture."""
    try:
        return _drawings(trajectory, turn)
    except MALFORMED:
        return []


def _drawings(trajectory: Trajectory, turn: int) -> list[Drawing]:
    observation = trajectory.turns[turn].observation
    if observation is None or observation.status != "ok":
        return []
    data, images = observation.data, trajectory.images
    calls = (action for action, shown in trajectory.executed if shown is observation)
    unknown = Action(op=str(data.get("op", "")), target=str(data.get("target", "")))
    action = next(calls, unknown)
    if (target := _locate(images, action.target)) is None:
        return []
    root, frame, region = target
    earlier = [t.observation for t in trajectory.turns[:turn] if t.observation is not None]
    objects = {item["id"]: item for before in earlier for item in before.data.get("objects", [])}
    is_zoom = any(view.box is not None for view in observation.images) and not data.get("objects")
    items = drawable(data, {} if is_zoom else action.arguments, objects, region)
    if not any(items.values()):
        return []
    times = {view.frame: view.time for view in images if view.parent == root}
    if tracks := items["tracks"]:
        numbers = [view.frame for view in observation.images if view.frame is not None]
        if len(numbers) < 2:
            tracked = {_index(number) for track in tracks for number in track["frames"]}
            numbers = subsample(sorted(tracked), TRACK_FRAMES)
        return [
            Drawing(root, n, times.get(n), geometry.WHOLE, {"tracks": tracks}, "", TRACK_PIXELS)
            for n in numbers
        ]
    for item in items["objects"][:1]:
        if "root" in item and (item["root"], item.get("frame")) != (root, frame):
            root, region = str(item["root"]), geometry.WHOLE
            frame = None if item.get("frame") is None else _index(item["frame"])
    title = "What was found" if any(data.get(key) for key in DRAWABLE) else "The target of the call"
    return [Drawing(root, frame, times.get(frame), _surrounded(region), items, title)]


def _surrounded(region: Box) -> Box:
    """A small region with a margin of 10 %; the whole picture instead of a large one, or one outside."""
    x0, y0, x1, y1 = region
    if (x1 - x0) * (y1 - y0) > 0.4 or x1 <= 0 or y1 <= 0 or x0 >= 1 or y0 >= 1:
        return geometry.WHOLE
    dx, dy = 0.1 * (x1 - x0), 0.1 * (y1 - y0)
    return max(0.0, x0 - dx), max(0.0, y0 - dy), min(1.0, x1 + dx), min(1.0, y1 + dy)


def _index(number: object) -> int:
    """The number of a frame; ValueError for anything else."""
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no number of a frame")
    return number


def required_frames(trajectory: Trajectory) -> dict[str, list[int]]:
    """Clip -> numbers of the frames that an episode's page shows: seen by the policy, or drawn on."""
    required: dict[str, set[int]] = {}
    for view in trajectory.images:
        if view.parent is not None and view.frame is not None:
            required.setdefault(view.parent, set()).add(view.frame)
    for turn in range(len(trajectory.turns)):
        for drawing in drawings(trajectory, turn):
            if drawing.frame is not None:
                required.setdefault(drawing.root, set()).add(drawing.frame)
    return {clip: sorted(numbers) for clip, numbers in required.items()}


def full_picture(
    pictures: Mapping[str, np.ndarray], images: Sequence[ImageView], root: str, frame: int | None
) -> np.ndarray | None:
    """A whole picture or frame, at full resolution or as a view shows it; None if neither was kept."""
    if frame is None:
        return pictures.get(root)
    if (full := pictures.get(frame_key(root, frame))) is not None:
        return full
    views = [v.id for v in images if v.parent == root and v.frame == frame and v.box is None]
    return next((pictures[name] for name in views if name in pictures), None)


def _locate(images: Sequence[ImageView], target: str) -> tuple[str, int | None, Box] | None:
    """The media, frame and region of a target; None if one of its parents is missing."""
    known = {view.id for view in images}
    if target not in known and any(v.parent == target and v.frame is not None for v in images):
        return target, None, geometry.WHOLE
    try:
        links = geometry.chain(images, target)
    except OperationError:
        return None
    box = draw.valid_box(geometry.to_root(links))
    root = links[0].id if links[0].frame is None else links[0].parent
    return (str(root), links[0].frame, box) if box is not None else None
