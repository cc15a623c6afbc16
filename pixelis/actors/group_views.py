"""Views of groups in the object store: those that a question starts with once for all groups that show its pictures."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import ray
from ray.exceptions import RayError

from pixelis.records import Group, ImageView, Media

Views = dict[str, list[np.ndarray]]
"""Trajectory id -> uint8 views of its images, in the order of `Trajectory.images`."""


class MediumViews:
    """The views of a medium that a question starts with. They are freed with the last reference to this object.

    ref: to a list of uint8 [h, w, 3], to a picture that is its own view, or to None for no views.
    """

    __slots__ = ("__weakref__", "ref")

    def __init__(self, ref: ray.ObjectRef):
        self.ref = ref


@dataclass(frozen=True, slots=True)
class GroupViews:
    """References to the views of a group.

    added: reference to {trajectory id: the views after `first`, or None if the trajectory shows no image}; first: what its
    question starts with, by medium.
    """

    added: ray.ObjectRef
    first: tuple[MediumViews, ...] = ()

    @property
    def refs(self) -> list[ray.ObjectRef]:
        """All references."""
        return [self.added, *(views.ref for views in self.first)]

    async def get(self) -> Views:
        """The views. Raises RayError if they are lost."""
        added, *first = await asyncio.gather(*map(_value, self.refs))
        return _assemble(added, first)


def fetch_groups(groups: Sequence[GroupViews]) -> list[Views]:
    """The views of groups; each object is fetched once. Blocks. Raises RayError if some are lost."""
    refs = list(dict.fromkeys(ref for group in groups for ref in group.refs))
    values = dict(zip(refs, ray.get(refs), strict=True))
    return [_assemble(values[group.added], [values[views.ref] for views in group.first]) for group in groups]


def _assemble(added: Mapping[str, list[np.ndarray] | None], first: Sequence[Any]) -> Views:
    start = [view for views in first for view in _as_list(views)]
    return {id: [] if views is None else [*start, *views] for id, views in added.items()}


def _as_list(views: Any) -> list[np.ndarray]:
    return [] if views is None else [views] if isinstance(views, np.ndarray) else list(views)


async def _value(ref: ray.ObjectRef) -> Any:
    return await ref


class SharedViews:
    """The first views that groups of this process still refer to, by URI of the medium. Keeps none for its own sake."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[str, MediumViews] = WeakValueDictionary()

    def of(self, media: Sequence[Media]) -> dict[str, MediumViews]:
        """Known views by medium id. Another group of `media` need not store them again if they are still right."""
        return {item.id: views for item in media if (views := self._known.get(item.uri)) is not None}

    async def collect(
        self,
        group: Group,
        added: ray.ObjectRef,
        first: Sequence[ray.ObjectRef],
        known: Mapping[str, MediumViews],
        pictures: Mapping[str, ray.ObjectRef],
    ) -> GroupViews:
        """The views of a group whose request named the `known` ones; `added` and `first` are the generator's results.

        A picture of the caller that is its own view is not stored by the generator.
        """
        images = next((t.images for t in group.trajectories if t.images), [])
        views = []
        for item, ref in zip(group.question.media, first, strict=False):
            if item.id in known and await ref is None:
                views.append(known[item.id])
                continue
            own = MediumViews(pictures[item.id] if item.id in pictures and is_whole(item.id, images) else ref)
            if images:
                self._known[item.uri] = own
            views.append(own)
        return GroupViews(added, tuple(views))


def is_whole(medium: str, images: Sequence[ImageView]) -> bool:
    """Whether the first view of a medium is the picture itself, at full resolution."""
    return any(image.id == medium and image.view_size == image.source_size for image in images)


async def first_views(
    media: Sequence[Media],
    images: Sequence[ImageView],
    views: Sequence[np.ndarray],
    known: Mapping[str, ray.ObjectRef],
    pictures: Mapping[str, ray.ObjectRef],
) -> list[list[np.ndarray] | None]:
    """What a generator stores of the first views: those of each medium, None where the caller has them.

    known: references to views that the caller expects to be the same; they are compared.
    """

    async def of(medium: str) -> list[np.ndarray] | None:
        own = [view for image, view in zip(images, views, strict=True) if medium in (image.id, image.parent)]
        if medium in known:
            return None if await _holds(known[medium], own) else own
        return None if medium in pictures and is_whole(medium, images) else own

    return [await of(item.id) for item in media]


async def _holds(ref: ray.ObjectRef, views: list[np.ndarray]) -> bool:
    """Whether an object still exists and holds these views."""
    try:
        stored = _as_list(await ref)
    except RayError:
        return False
    return len(stored) == len(views) and await asyncio.to_thread(lambda: all(map(np.array_equal, stored, views)))
