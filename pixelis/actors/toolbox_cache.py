"""The cache of a toolbox pool: results by a key that is equal for equal work."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np

from pixelis.actors.toolbox import Objects
from pixelis.actors.toolbox_work import Opened
from pixelis.errors import OperationError
from pixelis.operations import Operation, geometry
from pixelis.operations.scale import Scale
from pixelis.records import Action, ImageView, Media, Observation

ENTRY_BYTES, JSON_FACTOR = 2000, 6
"""Measured memory of a cached result beyond its views: of the entry, and per byte of its JSON."""
TRANSIENT = ("out_of_memory", "crashed", "timeout")
"""Codes of errors that a second try may not have."""
NAMES_IDS = ("unknown_object", "bad_target")
"""Codes of errors whose text lists the ids of the episode, which the key lacks."""


class ByteCache:
    def __init__(self, max_bytes: int):
        self.max_bytes, self.bytes = max_bytes, 0
        self.values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        if key not in self.values:
            return None
        self.values.move_to_end(key)
        return self.values[key][0]

    def put(self, key: Hashable, value: Any, size: int) -> None:
        if key in self.values:
            self.bytes -= self.values.pop(key)[1]
        if size > self.max_bytes:
            return
        self.values[key] = value, size
        self.bytes += size
        while self.bytes > self.max_bytes:
            self.bytes -= self.values.popitem(last=False)[1][1]

    def clear(self) -> None:
        self.values.clear()
        self.bytes = 0


def media_key(media: list[Media]) -> Hashable:
    """A key of pictures and the state of their files. None for clips and for files that cannot be found."""
    parts: list[tuple] = []
    for item in media:
        if item.kind != "image":
            return None
        if item.is_inline:
            parts.append((item.id, hashlib.sha256(item.uri.encode()).digest()))
            continue
        try:
            state = os.stat(item.uri)
        except (OSError, ValueError):
            return None
        parts.append((item.id, item.uri, state.st_ino, state.st_mtime_ns, state.st_size))
    return "open", *parts


def is_reusable(observation: Observation) -> bool:
    return observation.code not in (*TRANSIENT, *NAMES_IDS)


def memory_bytes(views: list[np.ndarray], size: int) -> int:
    """Memory of a result of ``size`` bytes: those of its ``views``, and of JSON or text."""
    pixels = sum(view.nbytes for view in views)
    return pixels + JSON_FACTOR * max(0, size - pixels) + ENTRY_BYTES


def call_key(
    operation: type[Operation],
    kind: str,
    action: Action,
    images: list[ImageView],
    objects: Objects,
    opened: Opened,
) -> bytes | None:
    """A hash of all that a result depends on: media, operation, arguments, and views and objects in these.

    ``kind``: scale of the policy's coordinates. None for a call with invalid arguments.
    """
    try:
        arguments = operation.check(action.arguments)
        scale = Scale.of(kind, images)  # type: ignore[arg-type]
        regions: list[tuple] = []
        named_objects: list[str] = []
        view_ids = {image.id for image in images}
        for name in (action.target, *_strings(action.arguments)):
            if name in view_ids:
                links = geometry.chain(images, name)
                root = links[0]
                regions.append(
                    (name, root.id, root.parent, root.frame, geometry.to_root(links), scale.extent(name))
                )
            elif name in opened.hashes:
                regions.append((name, *(image.view_size for image in images if image.parent == name)))
            if name in objects:
                named_objects.append(repr(objects[name]))
    except OperationError:
        return None
    media = tuple(opened.hashes.items())
    key = action.op, action.target, arguments.model_dump_json(), media, tuple(regions), tuple(named_objects)
    return hashlib.sha256(repr(key).encode()).digest()  # arguments may be long


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(inner)
