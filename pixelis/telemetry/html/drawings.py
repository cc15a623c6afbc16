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
from pixelis.records import Action, Box, ImageView, Observation, Trajectory
from pixelis.telemetry.events import as_number
from pixelis.telemetry.html.details import as_index, as_list, mappings

DRAWING_PIXELS = 560
"""Longer side of a drawing on a picture."""
TRACK_PIXELS = 320
TRACK_FRAMES = 6


@dataclass(frozen=True)
class Drawing:
    """``data`` of an observation to draw on a region of a picture, or of a frame of a clip.

    ``view`` names the view of that frame, if it has one. ``shows_target``: the drawing shows the target of
    the call, because nothing that was found has a place.
    """

    root: str
    frame: int | None
    time: float | None
    region: Box
    data: Mapping[str, Any]
    longest: int = DRAWING_PIXELS
    view: str = ""
    shows_target: bool = False

    @property
    def caption(self) -> str:
        if self.frame is not None:
            return (f"{self.view}: " if self.view else "") + frame_label(self.frame, self.time)
        if self.shows_target:
            return "The target of the call"
        return "What was found in this region" if self.region != geometry.WHOLE else "What was found"

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
        # Enlarge small crops before drawing: labels need room.
        scale = self.longest / 2 / max(part.shape[:2])
        if scale > 1:
            size = (max(1, round(part.shape[1] * scale)), max(1, round(part.shape[0] * scale)))
            part = cv2.resize(np.ascontiguousarray(part), size, interpolation=cv2.INTER_CUBIC)
        region = (left / width, top / height, right / width, bottom / height)
        return draw.annotate(part, self.data, region, self.frame, self.root)


def frame_key(clip: str, frame: int) -> str:
    """The key of a clip's frame at full resolution among a page's pictures."""
    return f"{clip}#{frame}"


def drawings(trajectory: Trajectory, turn: int) -> list[Drawing]:
    """The drawings for the observation of a turn; none for a zoom, which is marked on the picture."""
    observation = trajectory.turns[turn].observation
    if observation is None or observation.status != "ok":
        return []
    caller = next((number for number in range(turn - 1, -1, -1) if trajectory.turns[number].is_policy), turn)
    calls = trajectory.turns[caller].actions[turn - caller - 1 :]
    action = (
        calls[0]
        if calls
        else Action(op=str(observation.data.get("op", "")), target=str(observation.data.get("target", "")))
    )
    if (target := _locate(trajectory.images, action.target)) is None:
        return []
    root, frame, region = target
    earlier = [
        t.observation
        for t in trajectory.turns[:turn]
        if t.observation is not None and t.observation.status == "ok"
    ]
    objects = {
        o["id"]: o for e in earlier for o in mappings(e.data.get("objects")) if isinstance(o.get("id"), str)
    }
    is_zoom = any(view.box is not None for view in observation.images) and not observation.data.get("objects")
    data = drawable(observation.data, {} if is_zoom else action.arguments, objects, region)
    if not any(data.values()):
        return []
    if tracks := mappings(data["tracks"]):
        return _track_drawings(trajectory, observation, root, tracks)
    for item in mappings(data["objects"])[:1]:
        if isinstance(item.get("root"), str) and (item["root"], item.get("frame")) != (root, frame):
            root, frame, region = item["root"], as_index(item.get("frame")), geometry.WHOLE
    time = (
        next((v.time for v in trajectory.images if v.parent == root and v.frame == frame), None)
        if frame is not None
        else None
    )
    shows_target = not any(observation.data.get(key) for key in DRAWABLE)
    x0, y0, x1, y1 = region
    if (x1 - x0) * (y1 - y0) > 0.4 or x1 <= 0 or y1 <= 0 or x0 >= 1 or y0 >= 1:
        region = geometry.WHOLE
    else:  # show a small target with a margin of 10 %
        dx, dy = 0.1 * (x1 - x0), 0.1 * (y1 - y0)
        region = max(0.0, x0 - dx), max(0.0, y0 - dy), min(1.0, x1 + dx), min(1.0, y1 + dy)
    return [Drawing(root, frame, time, region, data, shows_target=shows_target)]


def _track_drawings(
    trajectory: Trajectory, observation: Observation, root: str, tracks: Sequence[Mapping[str, Any]]
) -> list[Drawing]:
    """One drawing for each returned frame, or for TRACK_FRAMES frames spread over the tracks."""
    numbers = [view.frame for view in observation.images if view.frame is not None]
    if len(numbers) < 2:
        tracked = {
            index
            for track in tracks
            for n in as_list(track.get("frames"))
            if (index := as_index(n)) is not None
        }
        numbers = subsample(sorted(tracked), TRACK_FRAMES)
    times = {
        v.frame: v.time
        for v in trajectory.images
        if v.parent == root and v.frame is not None and v.time is not None
    }
    for frame in mappings(observation.data.get("frames")):
        index, time = as_index(frame.get("index")), as_number(frame.get("time"))
        if index is not None and time is not None:
            times.setdefault(index, time)
    views = {view.frame: view.id for view in observation.images}
    return [
        Drawing(root, n, times.get(n), geometry.WHOLE, {"tracks": tracks}, TRACK_PIXELS, views.get(n, ""))
        for n in numbers
    ]


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
    if target not in {view.id for view in images} and any(
        v.parent == target and v.frame is not None for v in images
    ):
        return target, None, geometry.WHOLE
    try:
        links = geometry.chain(images, target)
    except OperationError:
        return None
    box = draw.valid_box(geometry.to_root(links))
    root = links[0].id if links[0].frame is None else links[0].parent
    return (str(root), links[0].frame, box) if box is not None else None
