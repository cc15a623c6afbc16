"""ZOOM_IN: look at a region again, with as many pixels as the crop budget allows."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import AllowInfNan, Field, model_validator

from pixelis.errors import BadInput, OperationError
from pixelis.operations import geometry
from pixelis.operations.operation import BoxArgument, Operation, OperationArguments, PointArgument, Result, Scene, Shown, Target
from pixelis.operations.pixel_budget import fit
from pixelis.records import Box

MAX_FACTOR = 1000.0

Factor = Annotated[float, AllowInfNan(False), Field(gt=1, le=MAX_FACTOR)]
Padding = Annotated[float, AllowInfNan(False), Field(ge=0, le=0.5)]


class ZoomInArguments(OperationArguments):
    """``box``: the region, 0..1 of the target; or ``center`` and ``factor``: a ``factor``-th of each side around a point.

    ``padding``: share of the target's width and height that is added on each side, as Pixel-Reasoner's 0.1.
    """

    box: BoxArgument | None = Field(None, description="the region")
    center: PointArgument | None = Field(None, description="instead of a region its middle, with factor")
    factor: Factor | None = Field(None, description="with center: how many times closer, above 1")
    padding: Padding | None = Field(None, description="share of the image to add on each side, 0 to 0.5")

    @model_validator(mode="after")
    def _one_way(self) -> ZoomInArguments:
        if self.box is not None and (self.center is not None or self.factor is not None):
            raise OperationError("give a box, or a center and a factor, not both", code="bad_arguments")
        if self.box is None and (self.center is None or self.factor is None):
            raise OperationError("give a box, or a center and a factor", code="bad_arguments")
        return self

    @property
    def asked(self) -> Box:
        """The region asked for, 0..1 of the target, before clamping and padding."""
        if self.box is not None:
            return self.box
        assert self.center is not None
        assert self.factor is not None
        (x, y), half = self.center, 0.5 / self.factor
        return x - half, y - half, x + half, y + half


class ZoomIn(Operation):
    """Crops from the full-resolution picture, through any number of earlier crops."""

    name = "zoom_in"
    description = (
        "Look closer at a region of an image, in full resolution and enlarged. Give the region, or its center and a factor; "
        "padding adds some surroundings."
    )
    Arguments = ZoomInArguments
    quick = True

    @classmethod
    def run(cls, arguments: ZoomInArguments, target: Target, scene: Scene) -> Result:
        """One view of the region, and text only when the region is not just the box that was asked for.

        The region is clamped to the target and padded within it (a view lies inside its parent; what lies beyond is seen by
        zooming into the parent), and comes back moved to the nearest pixel edges, so that a crop of the crop is exact. A region
        around a point near the edge keeps its size and moves inside.

        data: ``pixels`` (left, top, right, bottom shown), ``zoom_level`` (view pixels per full-resolution pixel, geometric mean
        of both sides), ``source_size`` and ``view_size`` (width, height), ``adjusted`` (it differs from what was asked for).
        OperationError ``out_of_range`` when nothing is left, ``too_small`` below 4 pixels, ``bad_box`` for a strip too thin to
        show.
        """
        picture = target.picture
        height, width = picture.shape[:2]
        asked = arguments.asked
        region = _moved_inside(asked) if arguments.center is not None else geometry.clamp(asked)
        if arguments.padding:
            region = _padded(region, arguments.padding)
        left, top, right, bottom = target.pixels(region)
        shown = (left / width, top / height, right / width, bottom / height)
        box = geometry.clamp(target.from_root(shown))
        try:
            view = fit(picture[top:bottom, left:right], scene.budget, scene.multiple)
        except BadInput as error:
            raise OperationError(error.message, code="bad_box") from None
        if np.shares_memory(view, picture):
            view = view.copy()  # a crop must not keep the whole picture alive
        source, size = (right - left, bottom - top), (view.shape[1], view.shape[0])
        # Rounding to pixel edges is no news; policies are trained on zooms without a word about it.
        adjusted = arguments.center is not None or region != asked
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
        return Result(text=text, images=[Shown(view, box)], data=data)


def _moved_inside(box: Box) -> Box:
    """A box of equal sides up to 1 moved into 0..1."""
    side = box[2] - box[0]
    x0, y0 = (max(0.0, min(low, 1 - side)) for low in box[:2])
    return x0, y0, min(1.0, x0 + side), min(1.0, y0 + side)


def _padded(box: Box, padding: float) -> Box:
    return max(0.0, box[0] - padding), max(0.0, box[1] - padding), min(1.0, box[2] + padding), min(1.0, box[3] + padding)
