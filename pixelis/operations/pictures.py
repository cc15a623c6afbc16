"""Writes the pictures of a result: its views, the annotated picture, contact sheets and tracks as video."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pixelis.operations import draw, geometry
from pixelis.operations.operation import Scene
from pixelis.operations.pixel_budget import shrink
from pixelis.operations.video import Clip
from pixelis.records import Action, Box, Observation

LONGEST = 2560
FILM_LONGEST = 960
FILM_FRAMES = 600
DRAWABLE = ("objects", "lines", "tracks", "boxes", "points", "segments")


def write_pictures(
    folder: Path, action: Action, observation: Observation, views: Sequence[np.ndarray], scene: Scene
) -> list[Path]:
    """Write the pictures of a successful observation to ``folder``; returns their paths.

    ``OP.view.png`` (or one per view), ``OP.annotated.png`` (the whole picture), ``OP.mp4`` (the track on every
    frame) and ``OP.txt`` (read text), where the result has them.
    """
    op, paths = action.op, []
    target = scene.target(action.target)
    for number, (image, view) in enumerate(zip(observation.images, views, strict=True)):
        name = "view" if len(views) == 1 else f"view{number}"
        name = name if image.frame is None else f"frame{image.frame}"
        paths.append(_save(folder / f"{op}.{name}.png", view))
    items = drawable(observation.data, action.arguments, scene.objects, target.box)
    if observation.images and not any(observation.data.get(key) for key in DRAWABLE):
        boxes = [
            target.to_root(v.box) for v in observation.images if v.parent == target.id and v.box is not None
        ]
        items["boxes"] = [box for box in boxes if box != geometry.WHOLE]
    tracks = [t for t in observation.data.get("tracks", []) if t.get("frames")]
    if tracks and isinstance(target.media, Clip):
        clip, numbers = target.clip, sorted({n for t in tracks for n in t["frames"]})
        film = numbers[:FILM_FRAMES]
        times = [float(clip.times[n]) for n in film]
        annotated_frames = (
            draw.caption(
                draw.annotate(shrink(frame, FILM_LONGEST), items, frame=number, root=target.root),
                frame_label(number, time),
            )
            for number, time, frame in zip(film, times, clip.frames(film), strict=True)
        )
        paths.append(write_film(folder / op, annotated_frames, times))
    elif not target.is_clip and any(items.values()):
        picture = shrink(target.picture, LONGEST)
        annotated = draw.annotate(picture, items, frame=target.frame, root=target.root)
        paths.append(_save(folder / f"{op}.annotated.png", annotated))
    if isinstance(lines := observation.data.get("lines"), list):
        path = folder / f"{op}.txt"
        path.write_text("".join(f"{line.get('text', '')}\n" for line in lines), encoding="utf-8")
        paths.append(path)
    return paths


def drawable(
    data: Mapping[str, Any],
    arguments: Mapping[str, Any],
    objects: Mapping[str, Mapping[str, Any]],
    region: Box,
) -> dict[str, Any]:
    """The items of an observation's data for `draw.annotate`, else the object or box of the call.

    ``region``: the target of the call as a box of the whole picture or frame.
    """
    result = {key: data.get(key, []) for key in DRAWABLE}
    if not any(result.values()):
        name = arguments.get("object")
        if isinstance(name, str) and name in objects:
            result["objects"] = [objects[name]]
        elif (box := draw.valid_box(arguments.get("box"))) is not None:
            result["boxes"] = [geometry.compose(region, box)]
    return result


def frame_label(number: int | None, seconds: float | None) -> str:
    return f"frame {number}" + ("" if seconds is None else f", {seconds:.2f} s")


def write_film(path: Path, frames: Iterable[np.ndarray], times: Sequence[float]) -> Path:
    """Write frames of one size (uint8 [h, w, 3]), shown at ``times``, as H.264 to ``path``.mp4."""
    import av

    out = path.with_name(path.name + ".mp4")
    steps = np.diff(times)
    rate = (
        Fraction(1 / float(np.median(steps))).limit_denominator(1001)
        if len(steps) and np.median(steps) > 0
        else Fraction(25)
    )
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


def _save(path: Path, picture: np.ndarray) -> Path:
    Image.fromarray(np.ascontiguousarray(picture)).save(path, compress_level=3)
    return path
