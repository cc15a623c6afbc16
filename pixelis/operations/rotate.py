"""ROTATE: show a picture, or a region of it, turned clockwise."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from PIL import Image
from pydantic import AllowInfNan, Field

from pixelis.operations.geometry import WHOLE, clamp
from pixelis.operations.operation import (
    BoxArgument,
    Operation,
    OperationArguments,
    Result,
    Scene,
    Target,
    View,
)

Angle = Annotated[float, AllowInfNan(False), Field(ge=-360, le=360)]


class RotateArguments(OperationArguments):
    angle: Angle = Field(description="degrees clockwise")
    box: BoxArgument | None = Field(None, description="the region to turn, default all of the image")


class Rotate(Operation):
    """The view's box is the region as it is: places in further calls are not turned."""

    name = "rotate"
    description = (
        "Show an image, or a region of it, turned clockwise, to read what does not stand upright. "
        "Places in further calls are of the image as it was, not turned."
    )
    Arguments = RotateArguments
    quick = True

    @classmethod
    def run(cls, arguments: RotateArguments, target: Target, scene: Scene) -> Result:
        """One turned view; nothing is cut off, corners that the turn uncovers are black."""
        box = clamp(arguments.box or WHOLE)
        region, angle = target.crop(box), arguments.angle % 360
        if angle % 90 == 0:
            turned = np.rot90(region, -int(angle // 90))
        else:
            turned = np.asarray(Image.fromarray(region).rotate(-angle, Image.Resampling.BICUBIC, expand=True))
        view = scene.fit_crop(np.ascontiguousarray(turned))
        text = f"turned clockwise by {angle:g} degrees; places are of {target.id} as it was, not turned"
        return Result(text=text, images=[View(view, box)], data={"angle": angle})
