"""ZOOM_IN: show a region again, with as many pixels as the crop budget allows."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import AllowInfNan, Field, model_validator

from pixelis.operations import geometry
from pixelis.operations.operation import (
    BoxArgument,
    Operation,
    OperationArguments,
    PointArgument,
    Result,
    Scene,
    Target,
    View,
)
from pixelis.records import Box

MAX_FACTOR = 1000.0

Factor = Annotated[float, AllowInfNan(False), Field(gt=1, le=MAX_FACTOR)]
Padding = Annotated[float, AllowInfNan(False), Field(ge=0, le=0.5)]


class ZoomInArguments(OperationArguments):
    """``box``, or ``center`` and ``factor``: 1/``factor`` of each side around a point.

    ``padding``: share of the target's width and height to add on each side (Pixel-Reasoner uses 0.1).
    """

    box: BoxArgument | None = Field(None, description="the region")
    center: PointArgument | None = Field(
        None, description="center of the region, with factor instead of a box"
    )
    factor: Factor | None = Field(None, description="magnification above 1, with center")
    padding: Padding | None = Field(None, description="fraction of the image to add on each side, 0 to 0.5")

    @model_validator(mode="after")
    def _one_way(self) -> ZoomInArguments:
        if self.box is not None and (self.center is not None or self.factor is not None):
            raise ValueError("give a box, or a center and a factor, not both")
        if self.box is None and (self.center is None or self.factor is None):
            raise ValueError("give a box, or a center and a factor")
        return self

    @property
    def requested(self) -> Box:
        """The requested region, 0..1 of the target, before clamping and padding."""
        if self.box is not None:
            return self.box
        assert self.center is not None
        assert self.factor is not None
        (x, y), half = self.center, 0.5 / self.factor
        return x - half, y - half, x + half, y + half

    def moved_inside(self) -> Box:
        """The requested region; one around a center is moved into 0..1, its size unchanged."""
        x0, y0, x1, _ = self.requested
        if self.center is None:
            return self.requested
        side = x1 - x0
        x0, y0 = max(0.0, min(x0, 1 - side)), max(0.0, min(y0, 1 - side))
        return x0, y0, x0 + side, y0 + side

    def pad(self, box: Box) -> Box:
        """``box`` with ``padding`` on each side, clamped to 0..1."""
        padding = self.padding or 0.0
        x0, y0, x1, y1 = box
        return max(0.0, x0 - padding), max(0.0, y0 - padding), min(1.0, x1 + padding), min(1.0, y1 + padding)


class ZoomIn(Operation):
    """Crops the full-resolution picture, through any number of earlier crops."""

    name = "zoom_in"
    description = (
        "Zoom in on a region of an image, in full resolution and enlarged. Give the region, or its center "
        "and a factor; padding adds some surroundings."
    )
    Arguments = ZoomInArguments
    quick = True

    @classmethod
    def run(cls, arguments: ZoomInArguments, target: Target, scene: Scene) -> Result:
        """Return one view of the region; text only when the region differs from the requested box.

        The region is padded and clamped, then moved to the nearest pixel edges, so that a crop of the crop is
        exact. data: ``pixels`` (edges of the view), ``zoom_level`` (view pixels per full-resolution pixel,
        geometric mean of both sides), ``source_size`` and ``view_size`` (width, height), ``adjusted``.
        """
        region = arguments.pad(geometry.clamp(arguments.moved_inside()))
        left, top, right, bottom = target.pixels(region)
        box = geometry.clamp(target.from_root(target.snap(region)))
        view = scene.fit_crop(target.crop(region))
        source, size = (right - left, bottom - top), (view.shape[1], view.shape[0])
        # Rounding to pixel edges does not count: policies are trained on zooms without this text.
        adjusted = arguments.center is not None or region != arguments.requested
        text = ""
        if adjusted:
            place = ",".join(map(str, scene.scale.around(box, target.id)))
            text = f"shows {place} of {target.id}, {source[0]}x{source[1]} px, at {size[0]}x{size[1]}"
        data = {
            "pixels": [left, top, right, bottom],
            "source_size": list(source),
            "view_size": list(size),
            "zoom_level": round(float(np.sqrt(size[0] / source[0] * size[1] / source[1])), 4),
            "adjusted": adjusted,
        }
        return Result(text=text, images=[View(view, box)], data=data)
