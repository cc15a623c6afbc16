"""The bytes of a clip as packets and frames: one video stream, decoded by PyAV, that can reach nothing but these bytes."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

from pixelis.errors import BadImage

FORMATS = "mov,mp4,matroska,webm,avi,mpeg,mpegts,mpegvideo,m4v,h264,hevc,flv,asf,ogg,gif,ivf,nut,dv"
"""Demuxers that only ever read the bytes they are given: no playlists, no concatenation, no picture patterns, no SDP."""


class _Bytes(io.RawIOBase):
    """A file over an array, without a copy of it."""

    def __init__(self, data: np.ndarray):
        self._view, self._at = data.data.cast("B"), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        stop = len(self._view) if size is None or size < 0 else min(len(self._view), self._at + size)
        chunk = bytes(self._view[self._at : stop])
        self._at = max(self._at, stop)
        return chunk

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, len(self._view))[whence])
        return self._at

    def tell(self) -> int:
        return self._at


class Source:
    """An open container and its video stream. ``time``: seconds of a packet or frame, None where it has no time stamp."""

    def __init__(self, data: np.ndarray, max_pixels: int):
        import av

        # The bytes are the only input: whatever else a hostile file names is refused by FFmpeg itself.
        options = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
        self.errors: tuple[type[Exception], ...] = (av.FFmpegError, ValueError, EOFError, RuntimeError)
        try:
            self.container: Any = av.open(_Bytes(data), options=options, metadata_errors="ignore", buffer_size=1 << 16)
        except (*self.errors, OSError) as error:
            raise undecodable(getattr(error, "strerror", None) or error) from None
        self.stream = self._choose()
        context = self.stream.codec_context
        check_pixels(context.width, context.height, max_pixels)
        context.options = {**context.options, "max_pixels": str(max_pixels)}
        context.thread_count = 1
        self.base = float(self.stream.time_base) if self.stream.time_base else 0.0

    def _choose(self) -> Any:
        for stream in self.container.streams.video:
            if "ATTACHED_PIC" not in str(stream.disposition).upper() and stream.codec_context is not None:
                return stream
        raise BadImage(
            "the file has no moving picture, only sound or text" if self.container.streams else "the file is empty",
            code="video_no_picture",
            fix="send a clip with a video stream",
        )

    def time(self, item: Any) -> float | None:
        return None if item.pts is None or not self.base else item.pts * self.base

    def packets(self) -> Iterator[Any]:
        """Packets of the stream up to the end, or to where the file is cut off."""
        while True:
            try:
                for packet in self.container.demux(self.stream):
                    if packet.size or packet.pts is not None:
                        yield packet
                return
            except IndexError:
                continue  # a packet of a stream that began after the header was read: PyAV cannot name it
            except self.errors:
                return

    def decode(self, packets: Iterator[Any]) -> Iterator[Any]:
        """Frames of the packets and those held back until the end; a damaged packet costs its own frames only."""
        context = self.stream.codec_context
        for packet in packets:
            try:
                yield from packet.decode()
            except self.errors:
                continue
        try:
            yield from context.decode(None)
        except self.errors:
            return

    def close(self) -> None:
        """Let go of the container."""
        self.container.close()


def frame_pixels(frame: Any, size: tuple[int, int] | None, limit: int) -> np.ndarray:
    """A decoded frame as it is shown: uint8 [H, W, 3]; ``size`` (width, height) is what a stream that changes is brought to."""
    check_pixels(frame.width, frame.height, limit)
    pixels = frame.to_ndarray(format="rgb24")
    if (turn := _turn(frame)) is not None:
        pixels = np.ascontiguousarray(turn(pixels))
    if size is not None and (pixels.shape[1], pixels.shape[0]) != size:
        pixels = np.array(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
    return pixels


def _turn(frame: Any) -> Callable[[np.ndarray], np.ndarray] | None:
    """What the display matrix does to the picture, in quarter turns and mirrors; None for nothing."""
    matrix = next((item for item in frame.side_data if item.type.name == "DISPLAYMATRIX"), None)
    if matrix is None or len(raw := bytes(matrix)) < 36:
        return None
    a, b, _, c, d, *_ = struct.unpack("=9i", raw[:36])
    if abs(a) + abs(d) >= abs(b) + abs(c):
        steps = (slice(None, None, -1 if d < 0 else 1), slice(None, None, -1 if a < 0 else 1))
        return None if a >= 0 and d >= 0 else lambda pixels: pixels[steps]
    steps = (slice(None, None, -1 if b < 0 else 1), slice(None, None, -1 if c < 0 else 1))
    return lambda pixels: pixels.transpose(1, 0, 2)[steps]


def check_pixels(width: int, height: int, limit: int) -> None:
    """BadImage ``video_empty`` or ``video_too_many_pixels`` for frames of this size."""
    if width < 1 or height < 1:
        raise BadImage(f"the frames are {width}x{height} pixels", code="video_empty")
    if width * height > limit:
        raise BadImage(
            f"the frames are {width}x{height} = {width * height} pixels, more than {limit}",
            code="video_too_many_pixels",
            fix="send a smaller clip or raise toolbox.max_image_pixels",
        )


def undecodable(reason: object) -> BadImage:
    """The error of a clip whose bytes make no sense."""
    text = " ".join(str(reason).split())[:160]
    return BadImage(
        f"the clip cannot be decoded: {text}",
        code="video_undecodable",
        fix="send a whole mp4, mov, mkv, webm, avi, mpg, ts or gif file",
    )
