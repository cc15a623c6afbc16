"""Coordinate scales of models, and conversion to and from 0..1 of a view."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pixelis.errors import OperationError
from pixelis.operations.geometry import as_box, as_point
from pixelis.records import Box, Coordinates, ImageView, Point


@dataclass(frozen=True)
class Place:
    """A coordinate argument: its name in calls, 4 numbers (a box) or 2 (a point), whether it is a list.

    ``image``: the argument that names its image, by default the target of the call.
    """

    wire: str
    count: int
    many: bool = False
    image: str = "target"


PLACES = {
    "box": Place("bbox_2d", 4),
    "point": Place("point_2d", 2),
    "center": Place("center_2d", 2),
    "end_point": Place("end_point_2d", 2),
    "vertex": Place("vertex_2d", 2),
    "other_box": Place("other_bbox_2d", 4, image="other"),
    "like_box": Place("like_bbox_2d", 4, image="like"),
    "boxes": Place("bboxes_2d", 4, many=True),
    "points": Place("points_2d", 2, many=True),
}
"""Coordinate arguments by field name; their names in calls follow Qwen's."""
MAX_PLACES = 64

TOLERANCE = 0.01
"""Part of a step by which a box may exceed the box that covers it."""

_COUNTS = {place.wire: place.count for place in PLACES.values()}


def image_of(place: Place, arguments: Mapping[str, Any], target: str) -> str:
    """The id of the image that a coordinate argument of a call is about."""
    name = arguments.get(place.image) if place.image != "target" else None
    return name if isinstance(name, str) else target


@dataclass(frozen=True)
class Scale:
    """A model's coordinate scale and its mapping to 0..1 of a view.

    ``kind``: ``thousand`` is whole numbers 0..1000; ``unit`` is 0..1 in steps of 0.001; ``pixels`` is whole
    pixels of the view, up to ``slack`` beyond the border. ``sizes``: (width, height) by image id; None:
    targets are not checked. ``clips``: the ids in ``sizes`` that are clips. ``clamp``: cut boxes at the
    border; None leaves it to the dialect.
    """

    kind: Coordinates
    sizes: Mapping[str, tuple[int, int]] | None = None
    slack: int = 0
    clips: tuple[str, ...] = ()
    clamp: bool | None = None

    @classmethod
    def of(
        cls, kind: Coordinates, images: Sequence[ImageView], slack: int = 0, clamp: bool | None = None
    ) -> Scale:
        """The scale for an episode with these views. A clip has the size of its first shown frame."""
        clips = {
            image.parent: image.view_size
            for image in reversed(images)
            if image.parent and image.frame is not None
        }
        sizes = {**clips, **{image.id: image.view_size for image in images}}
        return cls(kind, sizes or None, slack, tuple(clips), clamp)

    @property
    def images(self) -> list[str]:
        """Ids of the images in the order shown; empty when they are unknown."""
        return [name for name in self.sizes or () if name not in self.clips]

    def extent(self, target: str) -> tuple[int, int]:
        """Largest x and y of a target. Raises OperationError ``bad_target`` for an unknown image."""
        if self.sizes is not None and target not in self.sizes:
            raise OperationError(
                f"no image {target[:20]}, use {', '.join(list(self.sizes)[:8])}", code="bad_target"
            )
        if self.kind != "pixels":
            return (1000, 1000) if self.kind == "thousand" else (1, 1)
        width, height = (self.sizes or {}).get(target, (0, 0))
        if width < 1 or height < 1:
            raise OperationError(f"the size of {target[:20]} is not known", code="bad_target")
        return width, height

    def read_argument(self, field: str, value: Any, target: str) -> Box | Point | list[Box | Point]:
        """Convert the coordinate argument ``field`` (a key of PLACES) from its value in calls.

        Raises as `read`, and OperationError ``limit`` for a list of more than MAX_PLACES.
        """
        place = PLACES[field]
        if not place.many:
            return self.read(place.wire, value, target)
        if not isinstance(value, list):
            raise OperationError(
                f"{place.wire} is a list of places", code="bad_box" if place.count == 4 else "bad_point"
            )
        if len(value) > MAX_PLACES:
            raise OperationError(f"{place.wire} has {len(value)} places, at most {MAX_PLACES}", code="limit")
        return [self.read(place.wire, item, target) for item in value]

    def read(self, name: str, value: Any, target: str) -> Box | Point:
        """Convert one place of the call argument ``name`` to a Box or Point.

        Raises OperationError ``bad_box``, ``bad_point`` or ``out_of_range``.
        """
        if _COUNTS[name] == 4:
            numbers = self._parse(name, value, target, 4, "x0,y0,x1,y1", "bad_box")
            x0, y0, x1, y1 = (min(max(v, 0.0), 1.0) for v in numbers) if self.clamp else numbers
            if self.clamp and numbers[0] < numbers[2] and numbers[1] < numbers[3] and (x0 >= x1 or y0 >= y1):
                raise OperationError(f"{name} lies outside the image", code="out_of_range")
            if x0 >= x1 or y0 >= y1:
                raise OperationError(f"{name} needs x0 < x1 and y0 < y1", code="bad_box")
            return x0, y0, x1, y1
        x, y = self._parse(name, value, target, 2, "x,y", "bad_point")
        return x, y

    def write_argument(self, field: str, value: Any, target: str) -> list[Any]:
        """Convert the coordinate argument ``field`` to its value in calls. Raises as `write`."""
        if not PLACES[field].many:
            return self.write(value, target)
        if not isinstance(value, list | tuple):
            raise OperationError(f"{field} is a list of places", code="bad_box")
        return [self.write(item, target) for item in value]

    def write(self, place: Box | Point | Sequence[float], target: str) -> list[float]:
        """Convert a Box or Point to the nearest numbers of the scale. Raises ``too_small``."""
        if not isinstance(place, list | tuple):
            raise OperationError("a place is a list of numbers", code="bad_box")
        if len(place) == 2:
            return self._numbers([round(v) for v in self._steps(as_point(place), target)])
        x0, y0, x1, y1 = self._numbers([round(v) for v in self._steps(as_box(place), target)])
        if x0 >= x1 or y0 >= y1:
            raise OperationError("the box is smaller than one step of the coordinates", code="too_small")
        return [x0, y0, x1, y1]

    def around(self, box: Box | Sequence[float], target: str) -> list[float]:
        """The smallest box on the scale's grid that covers ``box``, for results.

        Without TOLERANCE, rounding errors would make whole pixels grow by one.
        """
        x0, y0, x1, y1 = self._steps(box, target)
        x0, y0, x1, y1 = x0 + TOLERANCE, y0 + TOLERANCE, x1 - TOLERANCE, y1 - TOLERANCE
        return self._numbers([math.floor(x0), math.floor(y0), math.ceil(x1), math.ceil(y1)])

    def _steps(self, place: Sequence[float], target: str) -> list[float]:
        extent = self.extent(target)
        steps = (1000, 1000) if self.kind == "unit" else extent
        return [value * steps[i % 2] for i, value in enumerate(place)]

    def _numbers(self, steps: Sequence[int]) -> list[float]:
        return [step / 1000 for step in steps] if self.kind == "unit" else [*steps]

    def _parse(self, name: str, value: Any, target: str, count: int, shape: str, code: str) -> list[float]:
        extent, slack = self.extent(target), self.slack if self.kind == "pixels" else 0
        if not isinstance(value, list) or len(value) != count:
            raise OperationError(f"{name} is {('two', 'four')[count // 4]} numbers {shape}", code=code)
        for i, v in enumerate(value):
            limit = extent[i % 2]
            if type(v) is not int and (self.kind != "unit" or type(v) is not float):
                raise OperationError(
                    f"{name} holds {'' if self.kind == 'unit' else 'whole '}numbers 0..{limit}", code=code
                )
            if not -slack <= v <= limit + slack and not (self.clamp and count == 4):
                raise OperationError(f"{name} must be between 0 and {limit}", code="out_of_range")
        # Numbers of thousands of digits cannot be divided.
        return [max(-extent[i % 2], min(v, 2 * extent[i % 2])) / extent[i % 2] for i, v in enumerate(value)]
