"""decord as the reader of a clip's frames, for clips on which it is proved to read the frames of the index.

decord 0.6 returns other frames on random access to open groups of pictures, HEVC and more, without an error. A clip is therefore
decoded by both readers when it is opened with ``toolbox.video_backend: decord``, and refused if one frame differs.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pixelis.errors import BadImage, MissingDependency

CLOSE_S = 1e-3
"""Difference up to which two times of a frame are equal: decord stores them in single precision."""


class DecordReader:
    """Frames of an encoded clip by number. Raises BadImage ``video_backend`` when decord cannot open it."""

    def __init__(self, data: np.ndarray):
        decord = require_decord()
        self._error: type[Exception] = decord.DECORDError
        try:
            self._reader: Any = decord.VideoReader(io.BytesIO(data.tobytes()), num_threads=1)
            self.times = np.asarray(self._reader.get_frame_timestamp(range(len(self._reader))), np.float64).reshape(-1, 2)[:, 0]
        except (self._error, RuntimeError, IndexError) as error:
            raise differs(f"decord cannot open it ({str(error).splitlines()[-1][:80]})") from None

    def read(self, number: int) -> np.ndarray:
        """Pixels of frame ``number``: uint8 [H, W, 3], RGB."""
        try:
            return self._reader[number].asnumpy()
        except (self._error, RuntimeError, IndexError) as error:
            raise differs(f"decord cannot read frame {number} ({str(error).splitlines()[-1][:80]})") from None

    def close(self) -> None:
        self._reader = None


def require_decord() -> Any:
    """The package; MissingDependency when it is not installed."""
    try:
        import decord
    except (ImportError, OSError):  # a wheel of another platform fails to load its library
        message = "toolbox.video_backend=decord needs the package decord"
        raise MissingDependency(message, fix="pip install decord==0.6.0, or set toolbox.video_backend=pyav") from None
    return decord


def differs(reason: str) -> BadImage:
    """The refusal of a clip."""
    message = f"decord does not read the frames of this clip: {reason}"
    return BadImage(message, code="video_backend", fix="set toolbox.video_backend=pyav, which reads every clip")


def prove_equal(data: np.ndarray, times: np.ndarray, keys: Sequence[int], frames: Callable[[], Iterator[np.ndarray]]) -> None:
    """Raise BadImage ``video_backend`` unless decord has the frames ``frames()`` at ``times``.

    Groups of pictures are read from the last to the first, and of each its last frame first, so that every group is sought, and
    both skipped through and read in order. Without ``keys``, the key frames, nothing can be proved: decord seeks by its own.
    """
    if not keys:
        raise differs("its container has no index of key frames")
    reader = DecordReader(data)
    try:
        if len(reader.times) != len(times):
            raise differs(f"it counts {len(reader.times)} frames instead of {len(times)}")
        if not np.allclose(reader.times, times, rtol=0, atol=CLOSE_S):
            raise differs("it shows frames at other times")
        expected = [_digest(frame) for frame in frames()]
        for start, stop in reversed(list(zip(keys, [*keys[1:], len(times)], strict=True))):
            for number in (stop - 1, *range(start, stop)):
                if _digest(reader.read(number)) != expected[number]:
                    raise differs(f"its frame {number} is another")
    finally:
        reader.close()


def _digest(frame: np.ndarray) -> bytes:
    return hashlib.blake2b(f"{frame.shape}".encode() + frame.tobytes(), digest_size=16).digest()
