"""Pictures of a result in a folder: the views, the whole picture with what was found on it, a track on its frames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pixelis.operations import draw, geometry
from pixelis.operations.operation import Scene, Target
from pixelis.operations.video import Clip
from pixelis.records import Action, Box, Observation

LONGEST = 2560
"""Longer side of a picture that is drawn on."""
FILM_LONGEST = 960
SHEET_LONGEST = 400
FILM_FRAMES = 600
SHEET_FRAMES = 12
PLACED = ("objects", "lines", "tracks", "boxes")
"""What of an observation's data has a place."""


def write_pictures(
    folder: Path, action: Action, observation: Observation, views: Sequence[np.ndarray], scene: Scene
) -> list[Path]:
    """Write what a successful observation shows below ``folder``, all names starting with the operation's; returns the paths.

    ``OP.view.png`` (or one for each view), ``OP.annotated.png`` (the whole picture), ``OP.sheet.png`` (frames of a clip side by
    side), ``OP.mp4`` (the track on every frame) and ``OP.txt`` (read text), as far as the result has them.
    """
    op, written = action.op, []
    target = scene.target(action.target)
    for place, (shown, view) in enumerate(zip(observation.images, views, strict=True)):
        name = "view" if len(views) == 1 else f"view{place}"
        name = name if shown.frame is None else f"frame{shown.frame}"
        written.append(_save(folder / f"{op}.{name}.png", view))
    found = what_to_draw(observation.data, action.arguments, scene.objects, target.box)
    if observation.images and not any(observation.data.get(key) for key in PLACED):
        boxes = [target.to_root(v.box) for v in observation.images if v.parent == target.id and v.box is not None]
        found["boxes"] = [box for box in boxes if box != geometry.WHOLE]
    tracks = [t for t in observation.data.get("tracks", []) if t.get("frames")]
    if tracks and isinstance(target.media, Clip):
        written += _track(folder, op, target, found, sorted({n for t in tracks for n in t["frames"]}))
    elif not target.is_clip and any(found.values()):
        picture = draw.shrink(target.picture, LONGEST)
        written.append(_save(folder / f"{op}.annotated.png", draw.annotate(picture, found, frame=target.frame, root=target.root)))
    frames = [(i, view) for i, view in zip(observation.images, views, strict=True) if i.frame is not None and i.time is not None]
    if len(frames) > 1 and not tracks:
        said = [draw.caption(draw.shrink(view, SHEET_LONGEST), frame_label(i.frame, i.time)) for i, view in frames]
        written.append(_save(folder / f"{op}.sheet.png", draw.contact_sheet(said)))
    if isinstance(lines := observation.data.get("lines"), list):
        path = folder / f"{op}.txt"
        path.write_text("".join(f"{line.get('text', '')}\n" for line in lines), encoding="utf-8")
        written.append(path)
    return written


def what_to_draw(
    data: Mapping[str, Any], arguments: Mapping[str, Any], objects: Mapping[str, Mapping[str, Any]], region: Box
) -> dict[str, Any]:
    """What `draw.annotate` is to draw of an observation's data.

    When it found nothing that has a place, that is the object or the box it was asked about; ``arguments`` and ``objects`` are
    those of the call, ``region`` its target as a box of the whole picture or frame.
    """
    result = {key: data.get(key, []) for key in PLACED}
    if not any(result.values()):
        asked = arguments.get("object")
        if isinstance(asked, str) and asked in objects:
            result["objects"] = [objects[asked]]
        elif (box := draw.as_place(arguments.get("box"))) is not None:
            result["boxes"] = [geometry.compose(region, box)]
    return result


def frame_label(number: int | None, seconds: float | None) -> str:
    """``frame 45, 1.50 s``."""
    time = "" if seconds is None else f", {seconds:.2f} s"
    return f"frame {number}{time}"


def spread(items: Sequence[int], most: int) -> list[int]:
    """Up to ``most`` of the items, evenly spread, the first and the last among them."""
    if len(items) <= most or most < 2:
        return list(items[:most])
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _track(folder: Path, op: str, target: Target, found: Mapping[str, Any], numbers: Sequence[int]) -> list[Path]:
    clip = target.clip
    sheet = list(_annotated(clip, spread(numbers, SHEET_FRAMES), found, target.root, SHEET_LONGEST))
    written = [_save(folder / f"{op}.sheet.png", draw.contact_sheet(sheet))]
    numbers = numbers[:FILM_FRAMES]
    times = [float(clip.times[n]) for n in numbers]
    return [*written, write_film(folder / op, _annotated(clip, numbers, found, target.root, FILM_LONGEST), times)]


def _annotated(clip: Clip, numbers: Sequence[int], found: Mapping[str, Any], root: str, longest: int) -> Iterator[np.ndarray]:
    for number, frame in zip(numbers, clip.frames(numbers), strict=True):
        drawn = draw.annotate(draw.shrink(frame, longest), found, frame=number, root=root)
        yield draw.caption(drawn, frame_label(number, float(clip.times[number])))


def write_film(path: Path, frames: Iterable[np.ndarray], times: Sequence[float]) -> Path:
    """Frames of one size (uint8 [h, w, 3]) as H.264 in ``path``.mp4, which every browser plays; returns the file.

    Where PyAV was built without an H.264 encoder it is an animated ``path``.webp. ``times`` in seconds, rising.
    """
    import av

    try:
        av.Codec("libx264", "w")
    except Exception:  # PyAV has its own error for each way of lacking a codec
        return _webp(path.with_name(path.name + ".webp"), frames, times)
    out = path.with_name(path.name + ".mp4")
    steps = np.diff(times)
    rate = Fraction(1 / float(np.median(steps))).limit_denominator(1001) if len(steps) and np.median(steps) > 0 else Fraction(25)
    with av.open(str(out), "w", options={"movflags": "+faststart"}) as container:
        stream: Any = container.add_stream("libx264", rate=rate, options={"crf": "23", "preset": "veryfast"})
        stream.pix_fmt = "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 12800)
        for picture, time in zip(frames, times, strict=True):
            even = np.ascontiguousarray(picture[: picture.shape[0] // 2 * 2, : picture.shape[1] // 2 * 2])
            frame = av.VideoFrame.from_ndarray(even, format="rgb24")
            if not stream.codec_context.is_open:
                stream.width, stream.height = frame.width, frame.height
            frame.pts, frame.time_base = round((time - times[0]) * 12800), stream.time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out


def _webp(path: Path, frames: Iterable[np.ndarray], times: Sequence[float]) -> Path:
    pictures = [Image.fromarray(frame) for frame in frames]
    steps = [*(max(10, round(1000 * float(step))) for step in np.diff(times)), 1000]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=steps, loop=0, quality=75)
    return path


def _save(path: Path, picture: np.ndarray) -> Path:
    Image.fromarray(np.ascontiguousarray(picture)).save(path, compress_level=3)
    return path
