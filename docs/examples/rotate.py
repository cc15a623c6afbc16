"""ROTATE: a region turned by 90, 180 or 270 degrees, for text that runs up a page or a photo that lies on its side."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from pixelis.errors import BadInput, OperationError
from pixelis.operations import Operation, OperationArguments, Result, Scene, Target, View
from pixelis.operations.geometry import WHOLE, clamp
from pixelis.operations.operation import BoxArgument
from pixelis.operations.pixel_budget import fit


class RotateArguments(OperationArguments):
    """``angle``: degrees clockwise. ``box``: the region, 0..1 of the target; None for all of it."""

    angle: Literal[90, 180, 270] = Field(description="degrees clockwise")
    box: BoxArgument | None = Field(None, description="the region to turn, default all of the image")


class Rotate(Operation):
    """A view's box says which region it shows, never how: places in further calls stay those of the picture as it is."""

    name = "rotate"
    description = (
        "Show an image, or a region of it, turned clockwise by 90, 180 or 270 degrees, to read what does not stand upright. "
        "Places in further calls are of the image as it was, not turned."
    )
    Arguments = RotateArguments
    quick = True

    @classmethod
    def run(cls, arguments: RotateArguments, target: Target, scene: Scene) -> Result:
        """One turned view. OperationError ``out_of_range``, ``too_small``, ``bad_box`` for a strip too thin to show."""
        box = clamp(arguments.box or WHOLE)
        left, top, right, bottom = target.pixels(box)
        turned = np.ascontiguousarray(np.rot90(target.picture[top:bottom, left:right], k=-arguments.angle // 90))
        try:
            view = fit(turned, scene.budget, scene.multiple)
        except BadInput as error:
            raise OperationError(error.message, code="bad_box") from None
        text = f"Turned {arguments.angle} degrees clockwise. Boxes in further calls are of {target.id} as it was, not turned."
        return Result(text, [View(view, box)], {"angle": arguments.angle, "pixels": [left, top, right, bottom]})
