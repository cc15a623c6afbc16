"""Clips: encoded bytes or pictures, the exact time of every frame, and any frame by number.

One decoder, PyAV, reads every container: decord gives wrong frames without a word on random access to open groups of pictures,
HEVC, intra refresh, MPEG-4 with B-frames and transport streams, and other colours for interlaced and 10-bit clips. A clip is
indexed once, when it is opened: the packets are counted (never the header believed) and the decoder is asked whether one packet
is one frame; where it is not (packed B-frames, field pairs, hidden frames), the whole clip is decoded once to number its frames.
Later reads start at the key frame before and recognise a frame by its time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pixelis.config import ToolboxConfig
from pixelis.errors import BadImage, OperationError
from pixelis.operations.container import Source, frame_pixels, undecodable
from pixelis.operations.image import FORMATS, load_image

FRAMES_KEPT, BYTES_KEPT = 100, 128_000_000
"""Decoded frames that a process remembers: a zoom into a frame usually follows its selection."""

ENTERED = {"mov", "matroska", "avi", "flv", "nut", "ivf"}
"""Containers with an index of their own: after a seek every packet has its right time. Others are read from the start."""

_PICTURES = "pictures"
_HEAD = 24
_LONGEST_TAIL = 64
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")


@dataclass(frozen=True)
class Clip:
    """A clip by reference: encoded bytes that are decoded frame by frame, late.

    ``data``: uint8 arrays, one of a file or one for each picture of a frame list; they travel through an object store without a
    copy. ``times``: float64 seconds at which each frame is shown, increasing. ``width`` and ``height`` are those shown, rotation
    applied. ``keys``: numbers of frames that decoding can start at; empty when it must start at the first.
    """

    data: tuple[np.ndarray, ...]
    times: np.ndarray
    width: int
    height: int
    container: str
    sha256: str
    keys: tuple[int, ...] = ()

    @property
    def duration(self) -> float:
        """Seconds from the first frame's start to the last one's end, the last being shown as long as the middle one of all."""
        steps = np.diff(self.times)
        return float(self.times[-1] - self.times[0] + (np.median(steps) if len(steps) else 0.0))

    def frame(self, index: int) -> np.ndarray:
        """Frame ``index``, from 0: read-only uint8 [H, W, 3], RGB. OperationError ``out_of_range``."""
        return next(self.frames([index]))

    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Frames in the order asked, read-only uint8 [H, W, 3], RGB; a run of rising numbers is decoded once.

        OperationError ``out_of_range`` before the first is decoded, BadImage ``video_undecodable`` for a damaged one.
        """
        numbers = [self._number(index) for index in indices]
        return (self._get(number) for number in numbers)

    def at(self, time: float) -> int:
        """Number of the frame shown at ``time`` seconds; the first one's before it, the last one's after it."""
        return max(0, int(np.searchsorted(self.times, time + 1e-6, side="right")) - 1)

    def _number(self, index: int) -> int:
        if isinstance(index, (bool, float)) or not 0 <= index < len(self.times):
            raise OperationError(f"no frame {str(index)[:20]}; the frames are 0..{len(self.times) - 1}", code="out_of_range")
        return int(index)

    def _get(self, number: int) -> np.ndarray:
        with _LOCK:
            if (result := _FRAMES.get((self.sha256, number))) is not None:
                return result
            picture = self._picture(number) if self.container == _PICTURES else _reader(self).read(number)
            picture.setflags(write=False)
            _FRAMES.put((self.sha256, number), picture)
            return picture

    def _picture(self, number: int) -> np.ndarray:
        picture = load_image(self.data[number].tobytes(), 1 << 62, self.width * self.height)
        if picture.shape[:2] != (self.height, self.width):
            raise undecodable(f"picture {number} is {picture.shape[1]}x{picture.shape[0]}, not {self.width}x{self.height}")
        return np.array(picture)


def open_clip(source: str | bytes | Path | Sequence[str], settings: ToolboxConfig, fps: float = 1.0) -> Clip:
    """A clip from encoded bytes, a file path, a ``data:`` URL, or a list of paths and ``data:`` URLs of equally large pictures.

    ``fps``: how many pictures of a list are shown a second. The caps of ``settings`` are checked before anything is decoded.
    Raises BadImage with code video_scheme, video_not_found, video_empty, video_too_many_bytes, video_too_many_pixels,
    video_too_many_frames, video_too_long, video_no_picture, video_frames_differ or video_undecodable, and image_* for the
    pictures of a list. A path is opened as it is: a gateway must let only ``data:`` URLs through.
    """
    if isinstance(source, (bytes, str, Path)):
        data = _read(source, settings.max_video_bytes)
        return _index(data, hashlib.sha256(data.data).hexdigest(), settings)
    return _frame_list(list(source), settings, fps)


def _read(source: str | bytes | Path, limit: int) -> np.ndarray:
    if isinstance(source, bytes):
        data = np.frombuffer(source, np.uint8)
    elif isinstance(source, str) and (match := _SCHEME.match(source)):
        if match[1].lower() != "data":
            raise BadImage(
                f"{match[1][:20]}: clips are not opened",
                code="video_scheme",
                fix="give a file path, a data: URL with base64, or the bytes",
            )
        data = np.frombuffer(_data_url(source, limit), np.uint8)
    else:
        data = _file(Path(source), limit)
    if not len(data):
        raise BadImage("the clip is empty", code="video_empty")
    if len(data) > limit:
        raise _too_many_bytes(len(data), limit)
    data.setflags(write=False)
    return data


def _file(path: Path, limit: int) -> np.ndarray:
    try:
        if not path.is_file():
            raise BadImage(
                f"no clip {str(path)[-100:]!r}", code="video_not_found", fix="paths are relative to where the job runs"
            )
        if (size := path.stat().st_size) > limit:
            raise _too_many_bytes(size, limit)
        return np.fromfile(path, np.uint8)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise BadImage(f"the clip cannot be read: {reason}", code="video_not_found") from None


def _data_url(url: str, limit: int) -> bytes:
    head = url[:200].partition(",")[0]
    if not head.lower().rstrip().endswith(";base64"):
        raise BadImage("the data: URL is not base64", code="video_undecodable", fix="write data:video/mp4;base64,...")
    if (size := (len(url) - len(head) - 1) * 3 // 4) > limit + 3:
        raise _too_many_bytes(size, limit)
    try:
        return base64.b64decode(url[len(head) + 1 :], validate=True)
    except (binascii.Error, ValueError):
        raise BadImage("the data: URL holds broken base64", code="video_undecodable") from None


def _too_many_bytes(size: int, limit: int) -> BadImage:
    return BadImage(
        f"the clip has {size} bytes, more than {limit}",
        code="video_too_many_bytes",
        fix="send a smaller clip or raise toolbox.max_video_bytes",
    )


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
        raise BadImage(f"a clip shows more than 0 pictures a second, not {fps}", code="video_undecodable")
    if len(sources) > settings.max_video_frames:
        raise _too_many_frames(settings.max_video_frames)
    _check_length(len(sources) / fps, settings.max_video_seconds)
    data: list[np.ndarray] = []
    room = settings.max_video_bytes
    for source in sources:
        data.append(_read(source, min(room, settings.max_image_bytes)))
        room -= len(data[-1])
    first = load_image(data[0].tobytes(), settings.max_image_bytes, settings.max_image_pixels)
    height, width = first.shape[:2]
    for number, encoded in enumerate(data[1:], 1):
        try:
            with Image.open(io.BytesIO(encoded.data), formats=FORMATS) as picture:
                size = sorted(picture.size)  # sides may be swapped by EXIF: the decoded frame is checked again
        except Exception as error:  # decoders raise nearly anything on damaged bytes
            raise undecodable(f"picture {number}: {type(error).__name__}") from None
        if size != sorted((width, height)):
            raise BadImage(
                f"picture {number} is {size[0]}x{size[1]}, the first is {width}x{height}",
                code="video_frames_differ",
                fix="give pictures of one size, or ask about them as single pictures",
            )
    digest = hashlib.sha256(f"{fps}".encode())
    for encoded in data:
        digest.update(hashlib.sha256(encoded.data).digest())
    times = np.arange(len(data), dtype=np.float64) / fps
    return Clip(tuple(data), times, width, height, _PICTURES, digest.hexdigest())


@dataclass(frozen=True)
class _Packets:
    times: list[float | None]
    keys: list[float | None]
    plain: bool
    """Every packet has a time of its own and none is hidden."""


def _index(data: np.ndarray, sha256: str, settings: ToolboxConfig) -> Clip:
    source = Source(data, settings.max_image_pixels)
    try:
        container = source.container.format.name.split(",")[0]
        found = _demux(source, settings)
    finally:
        source.close()
    if not found.times:
        raise undecodable("it has no frames")
    numbered = _by_packets(data, found, settings) if found.plain else None
    times, keys, first = numbered or _by_frames(data, found, settings)
    height, width = first.shape[:2]
    _check_length(times[-1] - times[0], settings.max_video_seconds)
    keys = keys if container in ENTERED else ()
    return Clip((data,), np.array(times, np.float64), width, height, container, sha256, keys)


def _demux(source: Source, settings: ToolboxConfig) -> _Packets:
    times: list[float | None] = []
    keys: list[float | None] = []
    plain, low, high = True, np.inf, -np.inf
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
            plain = False
            continue
        low, high = min(low, time), max(high, time)
        _check_length(high - low, settings.max_video_seconds)
    plain = plain and len(set(times)) == len(times)
    return _Packets(times, keys, plain)


Numbered = tuple[list[float], tuple[int, ...], np.ndarray]


def _by_packets(data: np.ndarray, found: _Packets, settings: ToolboxConfig) -> Numbered | None:
    """Times, keys and the first picture, one frame to each packet; None where a look at both ends shows another rule."""
    times = sorted(time for time in found.times if time is not None)
    keys = tuple(int(np.searchsorted(times, time)) for time in sorted(time for time in found.keys if time is not None))
    if not keys or keys[0] != 0:
        return None
    reader = _Reader(data, times, keys, settings.max_image_pixels)
    try:
        first = None
        for number in range(min(_HEAD, len(times))):
            frame = reader.next()
            if frame is None or frame[0] != times[number] or frame[1].interlaced_frame:
                return None
            first = reader.pixels(frame[1]) if first is None else first
        if len(times) - keys[-1] <= _LONGEST_TAIL:
            reader.start(keys[-1])
            tail = []
            while (frame := reader.next()) is not None:
                tail.append(frame[0])
            if not tail or tail != times[keys[-1] : keys[-1] + len(tail)]:
                return None
            times = times[: keys[-1] + len(tail)]  # a file that was cut off ends with its last whole frame
        return (times, keys, first) if first is not None else None
    finally:
        reader.close()


def _by_frames(data: np.ndarray, found: _Packets, settings: ToolboxConfig) -> Numbered:
    """The same by decoding the whole clip: the frames are those that come out."""
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
    if len(times) < len(stamps) or not 1 / 1000 < rate < 1000 or any(b <= a for a, b in itertools.pairwise(times)):
        return [number / (rate if 1 / 1000 < rate < 1000 else 25) for number in range(len(stamps))], (), first
    known = {time: number for number, time in enumerate(times)}
    keys = tuple(sorted(known[time] for time in found.keys if time is not None and time in known))
    usable = keys and keys[0] == 0 and None not in found.keys
    return times, keys if usable else (), first


class _Reader:
    """Decodes frames of a clip by number. A number ahead in the same stretch goes on from where the decoder is."""

    def __init__(
        self, data: np.ndarray, times: Sequence[float] | np.ndarray, keys: tuple[int, ...], max_pixels: int, size: Any = None
    ):
        self._data, self._times, self._keys, self._limit, self._size = data, times, keys, max_pixels, size
        self._numbers = {float(time): number for number, time in enumerate(times)} if keys else {}
        self._source: Source | None = None
        self._stream: Iterator[Any] = iter(())
        self._at = -1  # the last number that came out
        self.start(0)

    def start(self, key: int) -> None:
        """Make the key frame ``key`` the next that comes out, or if the file does not let itself be entered there, an earlier."""
        self._at = -1
        while key > 0:
            source = self._open()
            wanted = self._times[key]
            try:
                source.container.seek(round(wanted / source.base), stream=source.stream, backward=True)
            except source.errors:
                break
            if (packet := self._entry(source, wanted)) is not None:
                head, rest = packet
                self._stream = source.decode(_chain(head, rest))
                return
            key = max(earlier for earlier in self._keys if earlier < key)
        source = self._open(fresh=True)
        self._stream = source.decode(source.packets())

    def _entry(self, source: Source, wanted: float) -> tuple[Any, Iterator[Any]] | None:
        """The first key packet after a seek, unless it comes after the one wanted."""
        packets = source.packets()
        for packet in packets:
            if packet.is_keyframe and not packet.is_discard:
                time = source.time(packet)
                return (packet, packets) if time is not None and time <= wanted else None
        return None

    def _open(self, fresh: bool = False) -> Source:
        if self._source is not None and fresh:
            self._source.close()
            self._source = None
        if self._source is None:
            self._source = Source(self._data, self._limit)
        return self._source

    def next(self) -> tuple[float | None, Any] | None:
        """Time and frame of the next that comes out, None at the end."""
        assert self._source is not None
        frame = next(self._stream, None)
        return None if frame is None else (self._source.time(frame), frame)

    def read(self, number: int) -> np.ndarray:
        """Pixels of frame ``number``; BadImage ``video_undecodable`` when it does not come out."""
        key = max((key for key in self._keys if key <= number), default=0)
        if not max(key - 1, 0) <= self._at < number:
            self.start(key)
        pixels = self._seek(number)
        while pixels is None and key > 0:  # entering there lost frames: enter earlier
            key = max(earlier for earlier in self._keys if earlier < key)
            self.start(key)
            pixels = self._seek(number)
        if pixels is None:
            self.start(0)
            raise undecodable(f"frame {number} is damaged")
        return pixels

    def _seek(self, number: int) -> np.ndarray | None:
        while (item := self.next()) is not None:
            time, frame = item
            at = self._numbers.get(time, self._at) if self._keys and time is not None else self._at + 1
            self._at = max(self._at, at)
            if at == number:
                return self.pixels(frame)
            if at > number:
                return None
        self._at = len(self._times)
        return None

    def pixels(self, frame: Any) -> np.ndarray:
        return frame_pixels(frame, self._size, self._limit)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


def _chain(head: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield head
    yield from rest


class _Frames:
    """Decoded frames by (sha256, number), the least recently used go first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], np.ndarray] = OrderedDict()
        self._bytes = 0

    def get(self, key: tuple[str, int]) -> np.ndarray | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: tuple[str, int], frame: np.ndarray) -> None:
        self._kept[key] = frame
        self._bytes += frame.nbytes
        while len(self._kept) > FRAMES_KEPT or self._bytes > BYTES_KEPT:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes


_FRAMES = _Frames()
_LOCK = threading.RLock()
_READERS: OrderedDict[str, _Reader] = OrderedDict()


def _reader(clip: Clip) -> _Reader:
    reader = _READERS.pop(clip.sha256, None)
    if reader is None:
        size = (clip.width, clip.height)
        reader = _Reader(clip.data[0], clip.times, clip.keys, max(4 * clip.width * clip.height, 1 << 20), size)
    _READERS[clip.sha256] = reader
    while len(_READERS) > 2:
        _READERS.popitem(last=False)[1].close()
    return reader
