"""Prepares observations for a page: drawn on the picture or on frames, with their values as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from pixelis.errors import OperationError
from pixelis.operations import draw, geometry
from pixelis.operations.pictures import PLACED, frame_label, spread, what_to_draw
from pixelis.records import Action, Box, ImageView, Observation, Trajectory
from pixelis.telemetry.events import as_number
from pixelis.telemetry.words import number, text

FOUND_PIXELS = 560
"""Longer side of a picture with what was found on it."""
TRACK_PIXELS = 320
TRACK_FRAMES = 6
MAX_LINES = 60
MAX_VALUES = 8
PLAIN_UNITS = ("", "ratio", "bool", "name", "names", "count", "1")
"""Units that say nothing beside the value."""
MAX_OBJECTS = 12


@dataclass(frozen=True)
class Finding:
    """One drawing: ``data`` of an observation on a region of a picture, or of a frame of a clip (``view`` if it has one).

    ``asked``: it shows what the call was about, since nothing with a place was found.
    """

    root: str
    frame: int | None
    time: float | None
    region: Box
    data: Mapping[str, Any]
    longest: int = FOUND_PIXELS
    view: str = ""
    asked: bool = False

    @property
    def caption(self) -> str:
        """What it shows, as plain text."""
        if self.frame is not None:
            return (f"{self.view}: " if self.view else "") + frame_label(self.frame, self.time)
        if self.asked:
            return "What the call is about"
        return "What was found in this region" if self.region != geometry.WHOLE else "What was found"


def frame_key(clip: str, frame: int) -> str:
    """The name under which a page's pictures hold a frame of a clip in full resolution."""
    return f"{clip}#{frame}"


def findings(trajectory: Trajectory, place: int) -> list[Finding]:
    """The drawings for the observation of turn ``place``; none for a zoom, whose box is marked on the picture itself."""
    observation = trajectory.turns[place].observation
    if observation is None or observation.status != "ok":
        return []
    action = next((t.action for t in reversed(trajectory.turns[:place]) if t.is_policy), None)
    action = action or Action(op=str(observation.data.get("op", "")), target=str(observation.data.get("target", "")))
    earlier = [t.observation for t in trajectory.turns[:place] if t.observation is not None and t.observation.status == "ok"]
    objects = {o["id"]: o for e in earlier for o in _mappings(e.data.get("objects")) if isinstance(o.get("id"), str)}
    if (spot := _spot(trajectory.images, action.target)) is None:
        return []
    root, frame, region = spot
    marked = any(view.box is not None for view in observation.images) and not observation.data.get("objects")
    data = what_to_draw(observation.data, {} if marked else action.arguments, objects, region)
    if not any(data.values()):
        return []
    asked = not any(observation.data.get(key) for key in PLACED)
    tracks = _mappings(data["tracks"])
    if tracks:
        numbers = [view.frame for view in observation.images if view.frame is not None]
        if len(numbers) < 2:  # the operation showed no choice of its own
            every = sorted({n for t in tracks for n in _list(t.get("frames")) if _whole(n) is not None})
            numbers = spread(every, TRACK_FRAMES)
        times = _times(trajectory, root, observation)
        names = {view.frame: view.id for view in observation.images}
        # A track is seen on frames, so that its last box does not hide the object behind a line.
        return [
            Finding(root, n, times.get(n), geometry.WHOLE, {"tracks": tracks}, TRACK_PIXELS, names.get(n, "")) for n in numbers
        ]
    for thing in _mappings(data["objects"])[:1]:
        if isinstance(thing.get("root"), str) and (thing["root"], thing.get("frame")) != (root, frame):
            root, frame, region = thing["root"], _whole(thing.get("frame")), geometry.WHOLE
    time = next((v.time for v in trajectory.images if v.parent == root and v.frame == frame), None) if frame is not None else None
    return [Finding(root, frame, time, _around(region), data, asked=asked)]


def wanted_frames(trajectory: Trajectory) -> dict[str, list[int]]:
    """Numbers of the frames that a page of this episode shows, by clip: those looked at and those drawn on."""
    wanted: dict[str, set[int]] = {}
    for view in trajectory.images:
        if view.parent is not None and view.frame is not None:
            wanted.setdefault(view.parent, set()).add(view.frame)
    for place in range(len(trajectory.turns)):
        for finding in findings(trajectory, place):
            if finding.frame is not None:
                wanted.setdefault(finding.root, set()).add(finding.frame)
    return {clip: sorted(numbers) for clip, numbers in wanted.items()}


def drawn(finding: Finding, pictures: Mapping[str, np.ndarray], images: Sequence[ImageView]) -> np.ndarray | None:
    """The finding's pixels with its data on them, uint8 [h, w, 3]; None when the picture was not kept."""
    picture = pixels_of(pictures, images, finding.root, finding.frame)
    if picture is None:
        return None
    height, width = picture.shape[:2]
    x0, y0, x1, y1 = finding.region
    left, top = min(int(x0 * width), width - 1), min(int(y0 * height), height - 1)
    right, bottom = max(left + 1, round(x1 * width)), max(top + 1, round(y1 * height))
    part = draw.shrink(picture[top:bottom, left:right], finding.longest)
    # Small crops are enlarged first: a label needs room.
    scale = finding.longest / 2 / max(part.shape[:2])
    if scale > 1:
        size = (max(1, round(part.shape[1] * scale)), max(1, round(part.shape[0] * scale)))
        part = cv2.resize(np.ascontiguousarray(part), size, interpolation=cv2.INTER_CUBIC)
    region = (left / width, top / height, right / width, bottom / height)
    return draw.annotate(part, finding.data, region, finding.frame, finding.root)


def pixels_of(pictures: Mapping[str, np.ndarray], images: Sequence[ImageView], root: str, frame: int | None) -> np.ndarray | None:
    """A whole picture or frame from a page's pictures: in full resolution, else a view of the whole of it."""
    if frame is None:
        return pictures.get(root)
    if (full := pictures.get(frame_key(root, frame))) is not None:
        return full
    views = [v.id for v in images if v.parent == root and v.frame == frame and v.box is None]
    return next((pictures[name] for name in views if name in pictures), None)


def words(observation: Observation) -> str:
    """Read lines, properties, objects and tracks of an observation as HTML; empty when it has none. All text is escaped."""
    data = observation.data
    out = [_object(thing) for thing in _mappings(data.get("objects"))[:MAX_OBJECTS] if thing.get("kind") != "track"]
    if lines := _mappings(data.get("lines")):
        items = "".join(f"<li>{text(line.get('text', ''), 500)}{_confidence(line)}</li>" for line in lines[:MAX_LINES])
        more = f'<p class="caption">and {len(lines) - MAX_LINES} more lines</p>' if len(lines) > MAX_LINES else ""
        out.append(f'<ol class="read">{items}</ol>{more}')
    out += [_track(track) for track in _mappings(data.get("tracks"))]
    if isinstance(data.get("properties"), Mapping):
        for group, values in data["properties"].items():
            if isinstance(values, Mapping) and values:
                out.append(f"<p><b>{text(group, 60)}</b></p>{_values(values)}")
    return "".join(out)


def _object(thing: Mapping[str, Any]) -> str:
    parts = [f"Object <b>{text(thing.get('id', ''), 40)}</b>"]
    if (area := as_number(thing.get("area"))) is not None:
        parts.append(f"{area:,.0f} pixels".replace(",", " "))
    if (score := as_number(thing.get("score"))) is not None:
        parts.append(f"score {score:.2f}")
    if thing.get("method"):
        parts.append(f"by {text(thing['method'], 40)}")
    return f"<p>{', '.join(parts)}</p>"


def _track(track: Mapping[str, Any]) -> str:
    frames = [n for n in _list(track.get("frames")) if _whole(n) is not None]
    over = f" over frames {min(frames)} to {max(frames)}" if frames else ""
    said = f"<p>Track <b>{text(track.get('id', ''), 40)}</b>: {text(track.get('status', ''), 40)}{over}</p>"
    statistics = track.get("statistics")
    return said + (_values(statistics) if isinstance(statistics, Mapping) and statistics else "")


def _values(values: Mapping[Any, Any]) -> str:
    items = []
    for name, value in list(values.items())[:40]:
        unit = ""
        if isinstance(value, Mapping) and "value" in value:
            unit = str(value.get("unit") or "")
            value = value["value"]
        label = str(name).replace("_", " ")
        items.append(f"<div><dt>{text(label, 60)}</dt><dd>{_swatch(value, unit)}{_value(value)}{_unit(unit)}</dd></div>")
    return f'<dl class="facts">{"".join(items)}</dl>'


def _unit(unit: str) -> str:
    return "" if unit in PLAIN_UNITS else f" <small>{text(unit.replace('^2', '²'), 30)}</small>"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if (plain := as_number(value)) is not None:
        return number(plain)
    if isinstance(value, (list, tuple)):
        if len(value) > MAX_VALUES or any(isinstance(v, (list, tuple, Mapping)) for v in value):
            return f"{_leaves(value)} values"
        return ", ".join(_value(v) for v in value) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{text(k, 40)} {_value(v)}" for k, v in list(value.items())[:MAX_VALUES])
    return text(value, 200)


def _leaves(value: Any, depth: int = 0) -> int:
    return sum(_leaves(v, depth + 1) for v in value) if isinstance(value, (list, tuple)) and depth < 4 else 1


def _swatch(value: Any, unit: str) -> str:
    """A patch of the colour, for three numbers 0..255."""
    if unit not in ("0..255", "RGB 0..255") or not isinstance(value, (list, tuple)) or len(value) != 3:
        return ""
    channels = [as_number(v) for v in value]
    if any(c is None or not 0 <= c <= 255 for c in channels):
        return ""
    return f'<i class="swatch" style="background:rgb({",".join(str(round(c or 0)) for c in channels)})"></i>'


def _confidence(line: Mapping[str, Any]) -> str:
    sure = as_number(line.get("confidence"))
    return "" if sure is None else f" <small>{number(min(max(sure, 0.0), 1.0), share=True)}</small>"


def _spot(images: Sequence[ImageView], target: str) -> tuple[str, int | None, Box] | None:
    """The media, frame and region that a target is; None when its chain is broken."""
    if target not in {view.id for view in images} and any(v.parent == target and v.frame is not None for v in images):
        return target, None, geometry.WHOLE
    try:
        links = geometry.chain(images, target)
    except OperationError:
        return None
    box = draw.as_place(geometry.to_root(links))
    root = links[0].id if links[0].frame is None else links[0].parent
    return (str(root), links[0].frame, box) if box is not None else None


def _around(region: Box) -> Box:
    """The part of the picture to show: a small target with some of what is around it, else all."""
    x0, y0, x1, y1 = region
    if (x1 - x0) * (y1 - y0) > 0.4 or x1 <= 0 or y1 <= 0 or x0 >= 1 or y0 >= 1:
        return geometry.WHOLE
    dx, dy = 0.1 * (x1 - x0), 0.1 * (y1 - y0)
    return max(0.0, x0 - dx), max(0.0, y0 - dy), min(1.0, x1 + dx), min(1.0, y1 + dy)


def _times(trajectory: Trajectory, root: str, observation: Observation) -> dict[int, float]:
    times = {v.frame: v.time for v in trajectory.images if v.parent == root and v.frame is not None and v.time is not None}
    for frame in _mappings(observation.data.get("frames")):
        index, time = _whole(frame.get("index")), as_number(frame.get("time"))
        if index is not None and time is not None:
            times.setdefault(index, time)
    return times


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _list(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else []


def _mappings(values: Any) -> list[Mapping[str, Any]]:
    return [v for v in values if isinstance(v, Mapping)] if isinstance(values, (list, tuple)) else []


def shots(items: Sequence[tuple[str, str]]) -> str:
    """Small pictures side by side: (HTML of the picture, HTML of its caption)."""
    figures = "".join(f"<figure>{picture}<figcaption>{caption}</figcaption></figure>" for picture, caption in items)
    return f'<div class="shots">{figures}</div>'
