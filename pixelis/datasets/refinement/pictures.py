"""Fingerprints of pictures and clips: a hash of equal content, and a 64-bit perceptual hash. Each is decoded once."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np

from pixelis.config import ToolboxConfig
from pixelis.datasets.media import open_media
from pixelis.errors import BadInput, PixelisError
from pixelis.operations.image import load_image
from pixelis.operations.video import Clip
from pixelis.records import Media

THREADS = 4
BLOCK = 1 << 20
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):")


class Pictures:
    """Hashes of media under the caps of ``settings``; a file at ``cache`` keeps them from run to run.

    A local file is known by its path, size and time of change.
    """

    def __init__(self, settings: ToolboxConfig, cache: Path | None = None):
        self.settings, self.cache = settings, cache
        self.known: dict[str, str] = {}
        if cache is not None and cache.is_file():
            with cache.open(encoding="utf-8") as lines:
                for line in lines:
                    try:
                        key, value = json.loads(line)
                    except (ValueError, TypeError):  # a torn last line of a killed run
                        continue
                    self.known[key] = value

    def content(self, media: Media) -> str:
        """Hash of the bytes: of the file, of a ``data:`` URL's body; of a name that is not a file, the name.

        A clip of frames is the hash of theirs. BadInput ``media_not_found`` for a file that is not there.
        """
        if media.frames:
            return _sha(" ".join(self._bytes(name) for name in media.frames).encode())
        return self._bytes(media.uri)

    def look(self, media: Media) -> int:
        """Perceptual hash (DCT, 64 bits) of the picture, of a clip its middle frame; BadImage when it cannot be decoded."""
        key = "look " + self._key(media.frames[len(media.frames) // 2] if media.frames else media.uri)
        if key not in self.known:
            if media.frames:
                picture = load_image(
                    media.frames[len(media.frames) // 2], self.settings.max_image_bytes, self.settings.max_image_pixels
                )
            else:
                opened = open_media(media, self.settings)
                picture = opened.frame(len(opened.times) // 2) if isinstance(opened, Clip) else opened
            self._keep(key, f"{perceptual(picture):016x}")
        return int(self.known[key], 16)

    def looks(self, media: Iterable[Media]) -> Iterator[int | PixelisError]:
        """``look`` of each, in order, some at a time; an error is given, not raised."""

        def one(item: Media) -> int | PixelisError:
            try:
                return self.look(item)
            except PixelisError as error:
                return error

        with ThreadPoolExecutor(THREADS) as pool:
            yield from pool.map(one, media)

    def _bytes(self, uri: str) -> str:
        scheme = match[1].lower() if (match := _SCHEME.match(uri)) else ""
        if scheme == "data":
            body = uri.partition(",")[2]
            try:
                return _sha(base64.b64decode(body, validate=True))
            except ValueError:
                return _sha(uri.encode())
        if scheme:  # drawn from its name, or far away: the name stands for the content
            return _sha(uri.encode())
        key = "bytes " + self._key(uri)
        if key not in self.known:
            digest = hashlib.sha256()
            try:
                with open(uri, "rb") as handle:
                    while block := handle.read(BLOCK):
                        digest.update(block)
            except OSError as error:
                raise BadInput(f"{uri} cannot be read: {error.strerror}", code="media_not_found") from None
            self._keep(key, digest.hexdigest())
        return self.known[key]

    def _key(self, uri: str) -> str:
        if _SCHEME.match(uri):
            return uri if len(uri) < 200 else _sha(uri.encode())
        try:
            found = os.stat(uri)
        except (OSError, ValueError) as error:
            raise BadInput(f"{uri} cannot be read: {getattr(error, 'strerror', error)}", code="media_not_found") from None
        return f"{uri} {found.st_size} {found.st_mtime_ns}"

    def _keep(self, key: str, value: str) -> None:
        self.known[key] = value
        if self.cache is not None:
            with self.cache.open("a", encoding="utf-8") as out:
                out.write(json.dumps([key, value]) + "\n")


def perceptual(picture: np.ndarray) -> int:
    """64 bits of the low frequencies of a uint8 [h, w, 3] picture: few of them change when it is scaled or saved again."""
    small = cv2.resize(np.ascontiguousarray(picture), (64, 64), interpolation=cv2.INTER_AREA)
    return int.from_bytes(cv2.img_hash.pHash(cv2.cvtColor(small, cv2.COLOR_RGB2BGR)).tobytes(), "big")


def alike(looks: list[int], bits: int) -> list[int]:
    """For each look the number of its group: groups are joined by pairs that differ in at most ``bits`` (0..3) bits.

    Two looks that differ in three bits agree in one of four parts of sixteen: only those are compared.
    """
    if not 0 <= bits <= 3:
        raise BadInput(f"{bits} bits: 0 to 3 are compared")
    values, place = np.unique(np.asarray(looks, np.uint64), return_inverse=True)
    parent = list(range(len(values)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for part in range(4 if bits else 0):
        keys = (values >> np.uint64(16 * part)) & np.uint64(0xFFFF)
        order = np.argsort(keys, kind="stable")
        starts = np.flatnonzero(np.r_[True, np.diff(keys[order]) != 0])
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            bucket = order[start:end]
            for at, i in enumerate(bucket[:-1]):
                near = np.bitwise_count(values[bucket[at + 1 :]] ^ values[i]) <= bits
                for j in bucket[at + 1 :][near]:
                    parent[root(int(j))] = root(int(i))
    return [root(int(i)) for i in place]


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
