"""Decodes one video stream from bytes: with PyAV, whose FFmpeg can read nothing else, or with decord."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from pixelis.errors import BadImage, MissingDependency
from pixelis.operations.encoded import check_pixels

FORMATS = "mov,mp4,matroska,webm,avi,mpeg,mpegts,mpegvideo,m4v,h264,hevc,flv,asf,ogg,gif,ivf,nut,dv"
"""Demuxers that read only the given bytes: no playlists, concatenation, picture patterns or SDP."""


class _Bytes:
    def __init__(self, data: np.ndarray):
        self._view, self._position = data.data.cast("B"), 0

    def read(self, size: int) -> bytes:
        chunk = bytes(self._view[self._position : self._position + size])
        self._position += len(chunk)
        return chunk

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, len(self._view))[whence])
        return self._position

    def tell(self) -> int:
        return self._position


class Source:
    """An open container's first video stream; BadImage for other files, or frames beyond ``max_pixels``."""

    def __init__(self, data: np.ndarray, max_pixels: int):
        import av

        # FFmpeg itself refuses any other input that a hostile file names.
        options = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
        self.errors: tuple[type[Exception], ...] = (av.FFmpegError, ValueError, EOFError, RuntimeError)
        try:
            self.container: Any = av.open(
                _Bytes(data), options=options, metadata_errors="ignore", buffer_size=1 << 16
            )
        except (*self.errors, OSError) as error:
            raise undecodable(getattr(error, "strerror", None) or error) from None
        for stream in self.container.streams.video:
            if "ATTACHED_PIC" not in str(stream.disposition).upper() and stream.codec_context is not None:
                self.stream: Any = stream
                break
        else:
            message = "the file has no video stream" if self.container.streams else "the file is empty"
            raise BadImage(message, code="video_no_picture", fix="send a clip with a video stream")
        context = self.stream.codec_context
        check_pixels(context.width, context.height, max_pixels, "video")
        context.options = {**context.options, "max_pixels": str(max_pixels)}
        context.thread_count = 1
        self.base = float(self.stream.time_base) if self.stream.time_base else 0.0

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
        """Frames of the packets, then the delayed ones; damaged packets lose only their frames."""
        for packet in packets:
            try:
                yield from packet.decode()
            except self.errors:
                continue
        try:
            yield from self.stream.codec_context.decode(None)
        except self.errors:
            return

    def close(self) -> None:
        self.container.close()


class DecordReader:
    """Frames of a clip as decord numbers them; ``times``: float64 seconds of each, increasing.

    BadImage ``video_backend`` for a clip that decord cannot read.
    """

    def __init__(self, data: np.ndarray):
        decord = require_decord()
        self._errors: tuple[type[Exception], ...] = (decord.DECORDError, RuntimeError, IndexError)
        try:
            self._reader: Any = decord.VideoReader(io.BytesIO(data.tobytes()), num_threads=1)
            stamps = self._reader.get_frame_timestamp(range(len(self._reader)))
        except self._errors as error:
            raise self._refused(str(error).splitlines()[-1]) from None
        self.times = np.asarray(stamps, np.float64).reshape(-1, 2)[:, 0]
        if not len(self.times) or not (np.diff(self.times) > 0).all():
            raise self._refused("it gives its frames no increasing times")

    def read(self, number: int) -> np.ndarray:
        """Pixels of frame ``number``: uint8 [H, W, 3], RGB."""
        try:
            return self._reader[number].asnumpy()
        except self._errors as error:
            raise self._refused(str(error).splitlines()[-1]) from None

    def close(self) -> None:
        self._reader = None

    @staticmethod
    def _refused(reason: str) -> BadImage:
        message = f"decord cannot read the clip: {reason[:80]}"
        return BadImage(
            message, code="video_backend", fix="set toolbox.video_backend=pyav, which reads every clip"
        )


def require_decord() -> Any:
    """The package decord. Raises MissingDependency if it is not installed."""
    try:
        import decord
    except (ImportError, OSError):  # a wheel of another platform fails to load its library
        message = "toolbox.video_backend=decord needs the package decord"
        raise MissingDependency(
            message, fix="pip install decord==0.6.0, or set toolbox.video_backend=pyav"
        ) from None
    return decord


def frame_pixels(frame: Any, size: tuple[int, int] | None, limit: int) -> np.ndarray:
    """A decoded frame as uint8 [H, W, 3], rotated for display and resized to ``size`` (width, height)."""
    check_pixels(frame.width, frame.height, limit, "video")
    pixels = frame.to_ndarray(format="rgb24", threads=1)
    pixels = np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))
    if size is not None and (pixels.shape[1], pixels.shape[0]) != size:
        pixels = np.array(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
    return pixels


def undecodable(reason: object) -> BadImage:
    text = " ".join(str(reason).split())[:160]
    return BadImage(
        f"the clip cannot be decoded: {text}",
        code="video_undecodable",
        fix="send a complete mp4, mov, mkv, webm, avi, mpg, ts or gif file",
    )
