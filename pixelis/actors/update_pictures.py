"""The pictures of update tasks and of the canary in the object store: each content once, however many of them show it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from weakref import WeakValueDictionary

import numpy as np
import ray

Refs = dict[str, list[ray.ObjectRef]]
"""References to the views (uint8 [h, w, 3]) of each trajectory, by its id."""


class Picture:
    """A picture in the object store. It is freed with the last reference to this object."""

    __slots__ = ("__weakref__", "digest", "ref")

    def __init__(self, digest: str, ref: ray.ObjectRef):
        self.digest, self.ref = digest, ref


PictureViews = dict[str, list[Picture]]
"""The views of each trajectory, by its id."""


class UpdatePictures:
    """Stores pictures by the hash of their content. Its process owns them, so that they outlive the process that sent them.

    Nothing is kept for its own sake: a picture lives as long as a task, a batch or the canary holds its ``Picture``.
    """

    def __init__(self) -> None:
        self._known: WeakValueDictionary[str, Picture] = WeakValueDictionary()
        self._lock = threading.Lock()

    def hold(self, views: Mapping[str, Sequence[np.ndarray]]) -> PictureViews:
        """Store the pictures whose content is new; blocks while it hashes and copies. ``views`` by trajectory id."""
        digests: dict[int, str] = {}  # the trajectories of a task share the arrays of the question's pictures

        def digest(view: np.ndarray) -> str:
            if id(view) not in digests:
                digests[id(view)] = content_hash(view)
            return digests[id(view)]

        return {id: [self._add(view, digest(view)) for view in arrays] for id, arrays in views.items()}

    def add(self, picture: np.ndarray) -> Picture:
        """Store a picture if its content is new; blocks as ``hold``."""
        return self._add(picture, content_hash(picture))

    def _add(self, array: np.ndarray, digest: str) -> Picture:
        with self._lock:
            picture = self._known.get(digest)
            if picture is None:
                picture = self._known[digest] = Picture(digest, ray.put(array))
            return picture


def content_hash(picture: np.ndarray) -> str:
    """SHA-256 of a picture's shape and pixels."""
    digest = hashlib.sha256(str((picture.dtype.str, picture.shape)).encode())
    digest.update(np.ascontiguousarray(picture).data)
    return digest.hexdigest()


def references(views: PictureViews) -> Refs:
    """What another process needs to fetch the views."""
    return {id: [picture.ref for picture in pictures] for id, pictures in views.items()}


def fetch(views: Sequence[Refs]) -> list[dict[str, list[np.ndarray]]]:
    """The pixels of several tasks; each picture is fetched once. Raises RayError for pictures that are lost."""
    refs = list(dict.fromkeys(ref for task in views for part in task.values() for ref in part))
    pixels = dict(zip(refs, ray.get(refs), strict=True))
    return [{id: [pixels[ref] for ref in part] for id, part in task.items()} for task in views]
