"""Demuxes and decodes one video stream from bytes with PyAV; FFmpeg cannot access anything but these bytes."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

from pixelis.errors import BadImage
from pixelis.operations.encoded import check_pixels

FORMATS = "mov,mp4,matroska,webm,avi,mpeg,mpegts,mpegvideo,m4v,h264,hevc,flv,asf,ogg,gif,ivf,nut,dv"
"""Demuxers that read only the given bytes: no playlists, no concatenation, no picture patterns, no SDP."""


class _Bytes(io.RawIOBase):
    """A readable file over an array, without copying it."""

    def __init__(self, data: np.ndarray):
        self._view, self._position = data.data.cast("B"), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        stop = len(self._view) if size is None or size < 0 else min(len(self._view), self._position + size)
        chunk = bytes(self._view[self._position : stop])
        self._position = max(self._position, stop)
        return chunk

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, len(self._view))[whence])
        return self._position

    def tell(self) -> int:
        return self._position


class Source:
    """An open container and its first video stream."""

    def __init__(self, data: np.ndarray, max_pixels: int):
        import av

        # FFmpeg itself refuses any other input that a hostile file names.
        options = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
        self.errors: tuple[type[Exception], ...] = (av.FFmpegError, ValueError, EOFError, RuntimeError)
        try:
            self.container: Any = av.open(_Bytes(data), options=options, metadata_errors="ignore", buffer_size=1 << 16)
        except (*self.errors, OSError) as error:
            raise undecodable(getattr(error, "strerror", None) or error) from None
        self.stream = self._video_stream()
        context = self.stream.codec_context
        check_pixels(context.width, context.height, max_pixels, "video")
        context.options = {**context.options, "max_pixels": str(max_pixels)}
        context.thread_count = 1
        self.base = float(self.stream.time_base) if self.stream.time_base else 0.0

    def _video_stream(self) -> Any:
        for stream in self.container.streams.video:
            if "ATTACHED_PIC" not in str(stream.disposition).upper() and stream.codec_context is not None:
                return stream
        raise BadImage(
            "the file has no video stream" if self.container.streams else "the file is empty",
            code="video_no_picture",
            fix="send a clip with a video stream",
        )

    def time(self, item: Any) -> float | None:
        """Seconds of a packet or frame; None without a time stamp."""
        return None if item.pts is None or not self.base else item.pts * self.base

    def packets(self) -> Iterator[Any]:
        """Packets of the stream up to the end, or to the point where the file is cut off."""
        while True:
            try:
                for packet in self.container.demux(self.stream):
                    if packet.size or packet.pts is not None:
                        yield packet
                return
            except IndexError:
                continue  # PyAV has no stream for a packet of a stream that is missing in the header
            except self.errors:
                return

    def decode(self, packets: Iterator[Any]) -> Iterator[Any]:
        """Frames of the packets, then the frames that the decoder delayed. A damaged packet loses only its own frames."""
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
        """Close the container."""
        self.container.close()


def frame_pixels(frame: Any, size: tuple[int, int] | None, limit: int) -> np.ndarray:
    """Convert a decoded frame to uint8 [H, W, 3], rotated for display and, with ``size`` (width, height), resized to it."""
    check_pixels(frame.width, frame.height, limit, "video")
    pixels = frame.to_ndarray(format="rgb24", threads=1)
    if (orient := _orientation(frame)) is not None:
        pixels = np.ascontiguousarray(orient(pixels))
    if size is not None and (pixels.shape[1], pixels.shape[0]) != size:
        pixels = np.array(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
    return pixels


def _orientation(frame: Any) -> Callable[[np.ndarray], np.ndarray] | None:
    """The quarter turns and flips of the display matrix as a function; None for the identity."""
    matrix = next((item for item in frame.side_data if item.type.name == "DISPLAYMATRIX"), None)
    if matrix is None or len(raw := bytes(matrix)) < 36:
        return None
    a, b, _, c, d, *_ = struct.unpack("=9i", raw[:36])
    if abs(a) + abs(d) >= abs(b) + abs(c):
        steps = (slice(None, None, -1 if d < 0 else 1), slice(None, None, -1 if a < 0 else 1))
        return None if a >= 0 and d >= 0 else lambda pixels: pixels[steps]
    steps = (slice(None, None, -1 if b < 0 else 1), slice(None, None, -1 if c < 0 else 1))
    return lambda pixels: pixels.transpose(1, 0, 2)[steps]


def undecodable(reason: object) -> BadImage:
    """The error for a clip that cannot be decoded."""
    text = " ".join(str(reason).split())[:160]
    return BadImage(
        f"the clip cannot be decoded: {text}",
        code="video_undecodable",
        fix="send a complete mp4, mov, mkv, webm, avi, mpg, ts or gif file",
    )
