"""Views and pictures in the object store, each content once: of rollout groups and of update tasks."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import ray
from ray.exceptions import RayError

from pixelis.records import Group, ImageView, Media

Views = dict[str, list[np.ndarray]]
"""Trajectory id -> uint8 views of its images, in the order of `Trajectory.images`."""


class Stored:
    """An object in the object store, freed with the last reference to this one."""

    __slots__ = ("__weakref__", "ref")

    def __init__(self, ref: ray.ObjectRef):
        self.ref = ref


@dataclass(frozen=True, slots=True)
class GroupViews:
    """References to the views of a group.

    added: to {trajectory id: the views after `first`, or None if it shows no image}; first: what the question
    starts with, by medium: a list of views, or None.
    """

    added: ray.ObjectRef
    first: tuple[Stored, ...] = ()

    @property
    def refs(self) -> list[ray.ObjectRef]:
        return [self.added, *(views.ref for views in self.first)]

    async def get(self) -> Views:
        added, *first = await asyncio.gather(*self.refs)
        return _assemble(added, first)


async def joined(groups: Iterable[GroupViews]) -> GroupViews:
    """The views of several groups as those of one. Raises RayError if some are lost."""
    views: Views = {}
    for group in groups:
        views |= await group.get()
    return GroupViews(ray.put(views))


def fetch_groups(groups: Sequence[GroupViews]) -> list[Views]:
    """The views of groups; each object is fetched once. Raises RayError if some are lost."""
    values = _values(ref for group in groups for ref in group.refs)
    return [_assemble(values[group.added], [values[views.ref] for views in group.first]) for group in groups]


def _values(refs: Iterable[ray.ObjectRef]) -> dict[ray.ObjectRef, Any]:
    distinct = list(dict.fromkeys(refs))
    return dict(zip(distinct, ray.get(distinct), strict=True))


def _assemble(added: Mapping[str, list[np.ndarray] | None], first: Sequence[Any]) -> Views:
    start = [view for views in first for view in views or ()]
    return {id: [] if views is None else [*start, *views] for id, views in added.items()}


class SharedViews:
    """Finds the first views that groups of this process still refer to, by URI of the medium."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[str, Stored] = WeakValueDictionary()

    def of(self, media: Sequence[Media]) -> dict[str, Stored]:
        """Known views by medium id, which another group of `media` need not store again."""
        return {item.id: views for item in media if (views := self._known.get(item.uri)) is not None}

    async def collect(
        self,
        group: Group,
        added: ray.ObjectRef,
        first: Sequence[ray.ObjectRef],
        known: Mapping[str, Stored],
    ) -> GroupViews:
        """The views of a group whose request named the `known` ones."""
        views, has_images = [], any(t.images for t in group.trajectories)
        for item, ref in zip(group.question.media, first, strict=False):
            if item.id in known and await ref is None:
                views.append(known[item.id])
                continue
            views.append(Stored(ref))
            if has_images:
                self._known[item.uri] = views[-1]
        return GroupViews(added, tuple(views))


async def first_views(
    media: Sequence[Media],
    images: Sequence[ImageView],
    views: Sequence[np.ndarray],
    known: Mapping[str, ray.ObjectRef],
) -> list[list[np.ndarray] | None]:
    """What a generator stores of the first views of each medium, None where the caller has them.

    known: references to views that the caller expects to be the same; they are compared.
    """

    async def is_same(ref: ray.ObjectRef, own: list[np.ndarray]) -> bool:
        try:
            stored = await ref or []
        except RayError:  # lost
            return False
        equal = await asyncio.to_thread(lambda: list(map(np.array_equal, stored, own)))
        return len(stored) == len(own) and all(equal)

    result = list[list[np.ndarray] | None]()
    for item in media:
        own = [view for image, view in zip(images, views, strict=True) if item.id in (image.id, image.parent)]
        caller_has = item.id in known and await is_same(known[item.id], own)
        result.append(None if caller_has else own)
    return result


# -- pictures of update tasks and of the canary


PictureViews = dict[str, list[Stored]]
"""Trajectory id -> its stored views."""


class UpdatePictures:
    """Stores pictures by the hash of their content; its process owns them, whoever sent them."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[str, Stored] = WeakValueDictionary()
        self._lock = threading.Lock()

    def hold(self, views: Mapping[str, Sequence[np.ndarray]]) -> PictureViews:
        """Store the pictures whose content is new; ``views`` by trajectory id. Blocks."""
        # The trajectories of a task share the arrays of the question's pictures: hash each once.
        distinct = {id(view): view for arrays in views.values() for view in arrays}
        stored = {key: self.add(view) for key, view in distinct.items()}
        return {name: [stored[id(view)] for view in arrays] for name, arrays in views.items()}

    def add(self, picture: np.ndarray) -> Stored:
        digest = hashlib.sha256(str((picture.dtype.str, picture.shape)).encode())
        digest.update(np.ascontiguousarray(picture).data)
        with self._lock:
            stored = self._known.get(digest.hexdigest())
            if stored is None:
                stored = self._known[digest.hexdigest()] = Stored(ray.put(picture))
            return stored


def fetch(views: Sequence[PictureViews]) -> list[Views]:
    """The pixels of several tasks; each picture is fetched once. Raises RayError if some are lost."""
    pixels = _values(stored.ref for task in views for part in task.values() for stored in part)
    return [{id: [pixels[stored.ref] for stored in part] for id, part in task.items()} for task in views]
