"""Hashes of pictures and clips: of their content, and of their appearance (64 bits)."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import cv2
import faiss
import numpy as np
from jaxtyping import UInt8
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from pixelis.config import ToolboxConfig
from pixelis.datasets.media import open_media
from pixelis.datasets.media_root import SCHEME
from pixelis.errors import BadInput
from pixelis.operations.video import Clip
from pixelis.records import Media

MAX_BITS = 3
"""Different bits of two perceptual hashes up to which their pictures look alike."""


class MediaHashes:
    """Hashes of media, cached across runs in the file ``cache`` by path, size and modification time."""

    def __init__(self, settings: ToolboxConfig, cache: Path | None = None):
        self.settings, self.cache = settings, cache
        self._hashes: dict[str, str] = {}
        if cache is not None and cache.is_file():
            with cache.open(encoding="utf-8") as lines:
                for line in lines:
                    try:
                        key, value = json.loads(line)
                    except (ValueError, TypeError):  # a torn last line of a killed run
                        continue
                    self._hashes[key] = value

    def content(self, media: Media) -> str:
        """The hash of a file's bytes or of any other URI itself; of all frames and spans of a clip."""
        if media.frames:
            content = _sha(" ".join(self._bytes(name) for name in media.frames).encode())
        else:
            content = self._bytes(media.uri)
        return _sha(f"{content} {media.spans}".encode()) if media.spans else content

    def perceptual_hash(self, media: Media) -> int:
        """The perceptual hash of a picture or of a clip's middle frame; BadImage when decoding fails."""
        middle = media.frames[len(media.frames) // 2] if media.frames and not media.spans else None
        key = "look " + self._key(middle or (media.frames[0] if media.frames else media.uri))
        if media.spans:
            key = f"{key} {len(media.frames or [])} {media.spans}"
        if key not in self._hashes:
            opened = open_media(Media(id=media.id, uri=middle) if middle else media, self.settings)
            picture = opened.frame(len(opened.times) // 2) if isinstance(opened, Clip) else opened
            self._store(key, f"{perceptual(picture):016x}")
        return int(self._hashes[key], 16)

    def _bytes(self, uri: str) -> str:
        if SCHEME.match(uri):  # generated from its URI, or remote: the URI stands for the content
            return _sha(uri.encode())
        key = "bytes " + self._key(uri)
        if key not in self._hashes:
            try:
                with open(uri, "rb") as file:
                    self._store(key, hashlib.file_digest(file, "sha256").hexdigest())
            except OSError as error:
                raise BadInput(f"{uri} cannot be read: {error.strerror}", code="media_not_found") from None
        return self._hashes[key]

    def _key(self, uri: str) -> str:
        if SCHEME.match(uri):
            return uri if len(uri) < 200 else _sha(uri.encode())
        try:
            status = os.stat(uri)
        except (OSError, ValueError) as error:
            raise BadInput(
                f"{uri} cannot be read: {getattr(error, 'strerror', error)}", code="media_not_found"
            ) from None
        return f"{uri} {status.st_size} {status.st_mtime_ns}"

    def _store(self, key: str, value: str) -> None:
        self._hashes[key] = value
        if self.cache is not None:
            with self.cache.open("a", encoding="utf-8") as cache_file:
                cache_file.write(json.dumps([key, value]) + "\n")


def perceptual(picture: UInt8[np.ndarray, "height width 3"]) -> int:
    """64 bits from the low frequencies of a picture, of which few change when it is scaled or compressed."""
    small = cv2.resize(np.ascontiguousarray(picture), (64, 64), interpolation=cv2.INTER_AREA)
    return int.from_bytes(cv2.img_hash.pHash(cv2.cvtColor(small, cv2.COLOR_RGB2BGR)).tobytes(), "big")


def group_similar(hashes: list[int], bits: int = MAX_BITS) -> list[int]:
    """The number of each hash's group; pairs that differ in at most ``bits`` bits are in one group."""
    values, index = np.unique(np.asarray(hashes, np.uint64), return_inverse=True)
    searched = faiss.IndexBinaryFlat(64)
    searched.add(values.view(np.uint8).reshape(-1, 8))
    starts, _, others = searched.range_search(values.view(np.uint8).reshape(-1, 8), bits + 1)
    # Of the neighbours of each hash in ``others``: the rows of a sparse matrix
    starts = starts.astype(np.int64)
    graph = csr_array((np.ones(len(others)), others, starts), shape=(len(values), len(values)))
    return connected_components(graph, directed=False)[1][index].tolist()


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
