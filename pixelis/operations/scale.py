"""Coordinate scales that models write in, and conversion to and from 0..1 of a named view."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pixelis.errors import OperationError
from pixelis.operations.geometry import as_box, as_point
from pixelis.records import Box, Coordinates, ImageView, Point

WIRE = {"box": "bbox_2d", "point": "point_2d", "center": "center_2d"}
"""Arguments that are places, and their names on the wire: Qwen's names for boxes and points."""


@dataclass(frozen=True)
class Scale:
    """The numbers in which a model writes places, and how they map to 0..1 of a view.

    ``thousand``: whole numbers 0..1000. ``unit``: numbers 0..1, written in thousandths. ``pixels``: whole pixels of the view as
    the model saw it, ``sizes`` holds (width, height) by image id; up to ``slack`` pixels beyond the border are let through (the
    operation clamps). None in ``sizes`` means that the images of the episode are not known and targets are not checked.
    ``clips``: those ids in ``sizes`` that are clips and no images.
    """

    kind: Coordinates
    sizes: Mapping[str, tuple[int, int]] | None = None
    slack: int = 0
    clips: tuple[str, ...] = ()

    @classmethod
    def of(cls, kind: Coordinates, images: Sequence[ImageView], slack: int = 0) -> Scale:
        """The scale for an episode with these views; a clip is as large as the first of its frames that was shown."""
        clips = {image.parent: image.view_size for image in reversed(images) if image.parent and image.frame is not None}
        sizes = {**clips, **{image.id: image.view_size for image in images}}
        return cls(kind, sizes or None, slack, tuple(clips))

    @property
    def images(self) -> list[str]:
        """Ids of the images so far, in the order in which the model saw them; empty when they are not known."""
        return [name for name in self.sizes or () if name not in self.clips]

    def extent(self, target: str) -> tuple[int, int]:
        """Largest x and y of a target; ``bad_target`` when the image does not exist."""
        if self.sizes is not None and target not in self.sizes:
            raise OperationError(f"no image {target[:20]}, use {', '.join(list(self.sizes)[:8])}", code="bad_target")
        if self.kind != "pixels":
            return (1000, 1000) if self.kind == "thousand" else (1, 1)
        width, height = (self.sizes or {}).get(target, (0, 0))
        if width < 1 or height < 1:
            raise OperationError(f"the size of {target[:20]} is not known", code="bad_target")
        return width, height

    def read(self, name: str, value: Any, target: str) -> Box | Point:
        """Numbers of the wire argument ``name`` -> Box or Point; ``bad_box``, ``bad_point`` or ``out_of_range``."""
        if name == WIRE["box"]:
            x0, y0, x1, y1 = self._numbers(name, value, target, 4, "x0,y0,x1,y1", "bad_box")
            if x0 >= x1 or y0 >= y1:
                raise OperationError(f"{name} needs x0 < x1 and y0 < y1", code="bad_box")
            return x0, y0, x1, y1
        x, y = self._numbers(name, value, target, 2, "x,y", "bad_point")
        return x, y

    def write(self, place: Box | Point | Sequence[float], target: str) -> list[float]:
        """Box or Point -> nearest numbers on the wire; ``too_small`` when a box has no area on that grid."""
        if len(place) == 2:
            return self._grid(as_point(place), target)
        x0, y0, x1, y1 = self._grid(as_box(place), target)
        if x0 >= x1 or y0 >= y1:
            raise OperationError("the box is smaller than one step of the coordinates", code="too_small")
        return [x0, y0, x1, y1]

    def around(self, box: Box | Sequence[float], target: str) -> list[float]:
        """The smallest box on the wire's grid that covers ``box``: for results, which may be smaller than one step."""
        return self._grid(box, target, (_down, _down, _up, _up))

    def _grid(
        self, place: Sequence[float], target: str, rounding: Sequence[Callable[[float], int]] = (round, round, round, round)
    ) -> list[float]:
        extent = self.extent(target)
        steps = (1000, 1000) if self.kind == "unit" else extent
        numbers = [to(v * steps[i % 2]) for i, (v, to) in enumerate(zip(place, rounding, strict=False))]
        return [number / 1000 for number in numbers] if self.kind == "unit" else [*numbers]

    def _numbers(self, name: str, value: Any, target: str, count: int, shape: str, code: str) -> list[float]:
        extent, slack = self.extent(target), self.slack if self.kind == "pixels" else 0
        if not isinstance(value, list) or len(value) != count:
            raise OperationError(f"{name} is {('two', 'four')[count // 4]} numbers {shape}", code=code)
        for i, v in enumerate(value):
            limit = extent[i % 2]
            if type(v) is not int and (self.kind != "unit" or type(v) is not float):
                raise OperationError(f"{name} holds {'' if self.kind == 'unit' else 'whole '}numbers 0..{limit}", code=code)
            if not -slack <= v <= limit + slack:
                raise OperationError(f"{name} must be between 0 and {limit}", code="out_of_range")
        return [v / extent[i % 2] for i, v in enumerate(value)]


def _down(value: float) -> int:
    return int(value // 1)


def _up(value: float) -> int:
    return int(-(-value // 1))
