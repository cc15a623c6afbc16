"""FLIP: show a picture, or a region of it, mirrored."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

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

SWAPS = {"horizontal": "left and right", "vertical": "top and bottom"}


class FlipArguments(OperationArguments):
    direction: Literal["horizontal", "vertical"] = Field(
        description="horizontal swaps left and right, vertical swaps top and bottom"
    )
    box: BoxArgument | None = Field(None, description="the region to flip, default all of the image")


class Flip(Operation):
    """The view's box is the region as it is: places in further calls are not mirrored."""

    name = "flip"
    description = (
        "Show an image, or a region of it, mirrored, to read mirror writing or to check symmetry. "
        "Places in further calls are of the image as it was, not flipped."
    )
    Arguments = FlipArguments
    quick = True

    @classmethod
    def run(cls, arguments: FlipArguments, target: Target, scene: Scene) -> Result:
        box = clamp(arguments.box or WHOLE)
        axis = 1 if arguments.direction == "horizontal" else 0
        view = scene.fit_crop(np.flip(target.crop(box), axis))
        text = (
            f"flipped, {SWAPS[arguments.direction]} swapped; places are of {target.id} as it was, not flipped"
        )
        return Result(text, [View(view, box)], {"direction": arguments.direction})
