"""Clips with the exact time of every frame and random access to frames by number.

Opening a clip counts its packets and decodes both ends to verify that each yields one frame. If not (packed
B-frames, field pairs, hidden frames), the whole clip is decoded once to number its frames.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pixelis.config import ToolboxConfig
from pixelis.errors import BadImage, OperationError
from pixelis.operations.container import DecordReader, Source, frame_pixels, undecodable
from pixelis.operations.encoded import read_encoded
from pixelis.operations.image import load_image
from pixelis.records import Span

MAX_CACHED_BYTES = 128_000_000
"""Size of the process-wide cache of decoded frames."""

SEEKABLE = {"mov", "matroska", "avi", "flv", "nut", "ivf"}
"""Containers with an index; others are read from the start."""

_PICTURES = "pictures"
_HEAD = 24
_LONGEST_TAIL = 64


@dataclass(frozen=True)
class Clip:
    """An encoded clip whose frames are decoded on demand.

    ``data``: uint8 arrays, one for a file or one per picture of a frame list; an object store passes them on
    without a copy. ``times``: float64 seconds at which each frame is shown, increasing. ``width``,
    ``height``: display size. ``keys``: frames at which decoding can start; empty: only at the first. A cut
    clip has the frames ``numbers`` of a ``whole`` one.
    """

    data: tuple[np.ndarray, ...]
    times: np.ndarray
    width: int
    height: int
    container: str
    sha256: str
    keys: tuple[int, ...] = ()
    backend: str = "pyav"
    whole: Clip | None = None
    numbers: np.ndarray | None = None

    @property
    def duration(self) -> float:
        """Seconds that the frames are shown; a last frame counts for the median duration."""
        steps = np.diff(self.times)
        if self.numbers is None:
            return float(self.times[-1] - self.times[0] + (np.median(steps) if len(steps) else 0.0))
        inside = np.diff(self.numbers) == 1
        last = np.median(np.diff(self.whole.times)) if self.whole and len(self.whole.times) > 1 else 0.0
        return float(steps[inside].sum() + (1 + np.count_nonzero(~inside)) * last)

    @property
    def end(self) -> float:
        """Seconds at which the last frame ends."""
        if self.whole is None:
            return float(self.times[0]) + self.duration
        following = int(self.numbers[-1]) + 1 if self.numbers is not None else 0
        return float(self.whole.times[following]) if following < len(self.whole.times) else self.whole.end

    def cut(self, spans: Sequence[Span]) -> Clip:
        """The clip with only the frames shown in ``spans`` (seconds). Raises BadImage ``video_span``."""
        parts = []
        for start, end in spans:
            if start >= self.end or end - 1e-6 <= self.times[0]:
                place = f"which runs from {self.times[0]:.2f} to {self.end:.2f} s"
                message = f"the span from {start:g} to {end:g} s is outside the clip, {place}"
                raise BadImage(message, code="video_span", fix="correct the spans of the media")
            first = self.at(start)
            parts.append(np.arange(first, max(first + 1, int(np.searchsorted(self.times, end - 1e-6)))))
        numbers = np.unique(np.concatenate(parts))
        digest = hashlib.sha256(f"{self.sha256} {[tuple(span) for span in spans]}".encode()).hexdigest()
        return replace(self, times=self.times[numbers], sha256=digest, keys=(), whole=self, numbers=numbers)

    def frame(self, index: int) -> np.ndarray:
        """Frame ``index``, from 0: read-only uint8 [H, W, 3], RGB. Raises OperationError ``out_of_range``."""
        return next(self.frames([index]))

    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Frames in the requested order, read-only uint8 [H, W, 3], RGB.

        Raises OperationError ``out_of_range`` before decoding, BadImage for a damaged frame.
        """
        for index in indices:
            if isinstance(index, (bool, float)) or not 0 <= index < len(self.times):
                raise OperationError(
                    f"no frame {str(index)[:20]}; the frames are 0..{len(self.times) - 1}",
                    code="out_of_range",
                )
        return (self._get(int(index)) for index in indices)

    def at(self, time: float) -> int:
        """Number of the frame shown at ``time`` seconds, from the first to the last."""
        return max(0, int(np.searchsorted(self.times, time + 1e-6, side="right")) - 1)

    def _get(self, number: int) -> np.ndarray:
        if self.whole is not None and self.numbers is not None:
            return self.whole._get(int(self.numbers[number]))
        key = (self.backend, self.sha256, number)
        with _LOCK:
            if (result := _FRAMES.get(key)) is not None:
                return result
            if self.container == _PICTURES:
                picture = np.array(
                    load_image(self.data[number].tobytes(), 1 << 62, 4 * self.width * self.height)
                )
                height, width = picture.shape[:2]
                if (height, width) != (self.height, self.width):
                    raise BadImage(
                        f"picture {number} is {width}x{height}, the first is {self.width}x{self.height}",
                        code="video_frames_differ",
                        fix="give pictures of one size, or pass them as single pictures",
                    )
            else:
                picture = _reader(self).read(number)
            picture.setflags(write=False)
            _FRAMES.add(key, picture)
            return picture


def open_clip(
    source: str | bytes | Path | Sequence[str],
    settings: ToolboxConfig,
    fps: float = 1.0,
    spans: Sequence[Span] | None = None,
) -> Clip:
    """Open a clip from bytes, a path, a ``data:`` URL, or a list of paths and URLs of equal-sized pictures.

    ``fps``: pictures per second of a list. ``spans``: only these seconds of the clip. The limits of
    ``settings`` apply to the whole clip, before decoding. Raises BadImage (``video_*``; ``image_*`` for the
    pictures of a list). Any path is opened: a gateway must let only ``data:`` URLs through.
    """
    if isinstance(source, (bytes, str, Path)):
        clip = _index(_read(source, settings.max_video_bytes), settings)
    else:
        clip = _frame_list(list(source), settings, fps)
    return clip if spans is None else clip.cut(spans)


def clip_pixels(source: str | bytes, settings: ToolboxConfig) -> int:
    """Pixels of a frame, from the header of an encoded clip. Raises BadImage as `open_clip`."""
    opened = Source(_read(source, settings.max_video_bytes), settings.max_image_pixels)
    try:
        context = opened.stream.codec_context
        return context.width * context.height
    finally:
        opened.close()


def _read(source: str | bytes | Path, limit: int) -> np.ndarray:
    return np.frombuffer(read_encoded(source, limit, "video"), np.uint8)  # read-only


def _too_many_frames(limit: int) -> BadImage:
    return BadImage(
        f"the clip has more than {limit} frames",
        code="video_too_many_frames",
        fix="cut the clip or raise toolbox.max_video_frames",
    )


def _check_length(seconds: float, limit: float) -> None:
    if seconds > limit:
        raise BadImage(
            f"the clip is longer than {limit:g} seconds",
            code="video_too_long",
            fix="cut the clip or raise toolbox.max_video_seconds",
        )


def _frame_list(sources: list[str], settings: ToolboxConfig, fps: float) -> Clip:
    if not sources:
        raise BadImage("the clip has no pictures", code="video_empty")
    if not (np.isfinite(fps) and fps > 0):
        raise BadImage(f"fps must be above 0, not {fps}", code="video_undecodable")
    if len(sources) > settings.max_video_frames:
        raise _too_many_frames(settings.max_video_frames)
    _check_length(len(sources) / fps, settings.max_video_seconds)
    data: list[np.ndarray] = []
    remaining = settings.max_video_bytes
    for source in sources:
        data.append(_read(source, min(remaining, settings.max_image_bytes)))
        remaining -= len(data[-1])
    first = load_image(data[0].tobytes(), settings.max_image_bytes, settings.max_image_pixels)
    height, width = first.shape[:2]
    digest = hashlib.sha256(f"{fps}".encode())
    for encoded in data:
        digest.update(hashlib.sha256(encoded.data).digest())
    times = np.arange(len(data), dtype=np.float64) / fps
    return Clip(tuple(data), times, width, height, _PICTURES, digest.hexdigest())


Packets = tuple[list[float | None], list[float | None]]
"""Times of all packets and of the key frames, in the order of the file."""
Numbered = tuple[list[float], tuple[int, ...], np.ndarray]
"""Times of the frames, numbers of the key frames, and the first picture."""


def _index(data: np.ndarray, settings: ToolboxConfig) -> Clip:
    source = Source(data, settings.max_image_pixels)
    try:
        container = source.container.format.name.split(",")[0]
        packets, unique = _demux(source, settings)
    finally:
        source.close()
    if not packets[0]:
        raise undecodable("it has no frames")
    keys: tuple[int, ...] = ()
    if settings.video_backend == "decord":
        reader = DecordReader(data)
        times, first = reader.times.tolist(), reader.read(0)
        reader.close()
    else:
        numbered = _by_packets(data, packets, settings) if unique else None
        times, keys, first = numbered or _by_frames(data, packets, settings)
    height, width = first.shape[:2]
    _check_length(times[-1] - times[0], settings.max_video_seconds)
    return Clip(
        (data,),
        np.array(times, np.float64),
        width,
        height,
        container,
        hashlib.sha256(data.data).hexdigest(),
        keys if container in SEEKABLE else (),
        settings.video_backend,
    )


def _demux(source: Source, settings: ToolboxConfig) -> tuple[Packets, bool]:
    times: list[float | None] = []
    keys: list[float | None] = []
    intact, low, high = True, np.inf, -np.inf
    for packet in source.packets():
        if packet.is_discard:
            continue
        if len(times) >= settings.max_video_frames:
            raise _too_many_frames(settings.max_video_frames)
        time = source.time(packet)
        times.append(time)
        if packet.is_keyframe:
            keys.append(time)
        if time is None or packet.is_corrupt:
            intact = False
            continue
        low, high = min(low, time), max(high, time)
        _check_length(high - low, settings.max_video_seconds)
    return (times, keys), intact and len(set(times)) == len(times)


def _by_packets(data: np.ndarray, packets: Packets, settings: ToolboxConfig) -> Numbered | None:
    """One frame per packet; None when either end of the clip contradicts this."""
    times, key_times = (sorted(time for time in part if time is not None) for part in packets)
    keys = tuple(np.searchsorted(times, key_times).tolist())
    if not keys or keys[0] != 0:
        return None
    reader = _Reader(data, times, keys, settings.max_image_pixels)
    try:
        first = None
        for number in range(min(_HEAD, len(times))):
            frame = reader.next()
            if frame is None or frame[0] != times[number] or frame[1].interlaced_frame:
                return None
            first = frame_pixels(frame[1], None, settings.max_image_pixels) if first is None else first
        if len(times) - keys[-1] <= _LONGEST_TAIL:
            reader.start(keys[-1])
            tail = []
            while (frame := reader.next()) is not None:
                tail.append(frame[0])
            if not tail or tail != times[keys[-1] : keys[-1] + len(tail)]:
                return None
            times = times[: keys[-1] + len(tail)]  # a truncated file ends with its last complete frame
        return (times, keys, first) if first is not None else None
    finally:
        reader.close()


def _by_frames(data: np.ndarray, packets: Packets, settings: ToolboxConfig) -> Numbered:
    source = Source(data, settings.max_image_pixels)
    stamps: list[float | None] = []
    first = None
    try:
        rate = float(source.stream.average_rate or 25)
        for frame in source.decode(source.packets()):
            if first is None:
                first = frame_pixels(frame, None, settings.max_image_pixels)
            stamps.append(source.time(frame))
            if len(stamps) > settings.max_video_frames:
                raise _too_many_frames(settings.max_video_frames)
    finally:
        source.close()
    if first is None:
        raise undecodable("none of its packets holds a frame")
    times = [time for time in stamps if time is not None]
    if len(times) < len(stamps) or not (np.diff(times) > 0).all():
        return [number / (rate if 1 / 1000 < rate < 1000 else 25) for number in range(len(stamps))], (), first
    numbers = {time: number for number, time in enumerate(times)}
    keys = tuple(sorted(numbers[time] for time in packets[1] if time is not None and time in numbers))
    usable = keys and keys[0] == 0 and None not in packets[1]
    return times, keys if usable else (), first


class _Reader:
    """Decodes frames of a clip by number, from the last position where that is shorter than a seek."""

    def __init__(
        self,
        data: np.ndarray,
        times: Sequence[float] | np.ndarray,
        keys: tuple[int, ...],
        max_pixels: int,
        size: Any = None,
    ):
        self._data, self._times, self._keys, self._limit, self._size = data, times, keys, max_pixels, size
        self._numbers = {float(time): number for number, time in enumerate(times)} if keys else {}
        self._source: Source | None = None
        self._stream: Iterator[Any] = iter(())
        self._last = -1  # the number of the last decoded frame
        self.start(0)

    def start(self, key: int) -> None:
        """Continue decoding at key frame ``key``, or at the first frame if the seek fails."""
        self._last = -1
        if key > 0:
            source = self._source = self._source or Source(self._data, self._limit)
            with contextlib.suppress(*source.errors):
                source.container.seek(
                    round(self._times[key] / source.base), stream=source.stream, backward=True
                )
                packets = source.packets()
                first = next((p for p in packets if p.is_keyframe and not p.is_discard), None)
                time = None if first is None else source.time(first)
                if time is not None and time <= self._times[key]:
                    self._stream = source.decode(itertools.chain([first], packets))
                    return
        self.close()
        self._source = Source(self._data, self._limit)
        self._stream = self._source.decode(self._source.packets())

    def next(self) -> tuple[float | None, Any] | None:
        """Time and frame of the next decoded frame; None at the end."""
        assert self._source is not None
        frame = next(self._stream, None)
        return None if frame is None else (self._source.time(frame), frame)

    def read(self, number: int) -> np.ndarray:
        """Pixels of frame ``number``. Raises BadImage ``video_undecodable`` for a damaged frame."""
        key = max((key for key in self._keys if key <= number), default=0)
        if not max(key - 1, 0) <= self._last < number:
            self.start(key)
        pixels = self._seek(number)
        if pixels is None and key > 0:  # starting there lost frames
            self.start(0)
            pixels = self._seek(number)
        if pixels is None:
            self.start(0)
            raise undecodable(f"frame {number} is damaged")
        return pixels

    def _seek(self, number: int) -> np.ndarray | None:
        while (item := self.next()) is not None:
            time, frame = item
            at = self._numbers.get(time, self._last) if self._keys and time is not None else self._last + 1
            self._last = max(self._last, at)
            if at == number:
                return frame_pixels(frame, self._size, self._limit)
            if at > number:
                return None
        self._last = len(self._times)
        return None

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


class _Frames:
    def __init__(self) -> None:
        self._frames: OrderedDict[tuple[str, str, int], np.ndarray] = OrderedDict()
        self._bytes = 0

    def get(self, key: tuple[str, str, int]) -> np.ndarray | None:
        if key in self._frames:
            self._frames.move_to_end(key)
        return self._frames.get(key)

    def add(self, key: tuple[str, str, int], frame: np.ndarray) -> None:
        self._frames[key] = frame
        self._bytes += frame.nbytes
        while self._bytes > MAX_CACHED_BYTES:
            self._bytes -= self._frames.popitem(last=False)[1].nbytes


_FRAMES = _Frames()
_LOCK = threading.RLock()
_READERS: OrderedDict[str, _Reader | DecordReader] = OrderedDict()


def _reader(clip: Clip) -> _Reader | DecordReader:
    key = f"{clip.backend} {clip.sha256}"
    reader = _READERS.pop(key, None)
    if reader is None and clip.backend == "decord":
        reader = DecordReader(clip.data[0])
    elif reader is None:
        size = (clip.width, clip.height)
        reader = _Reader(
            clip.data[0], clip.times, clip.keys, max(4 * clip.width * clip.height, 1 << 20), size
        )
    _READERS[key] = reader
    while len(_READERS) > 2:
        _READERS.popitem(last=False)[1].close()
    return reader
