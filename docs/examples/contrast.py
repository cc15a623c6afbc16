"""STRETCH_CONTRAST: a region with its contrast stretched, for faint print or details in the shade."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from pixelis.errors import OperationError
from pixelis.operations import Operation, OperationArguments, Result, Scene, Target, View
from pixelis.operations.geometry import WHOLE, clamp
from pixelis.operations.operation import BoxArgument


class StretchContrastArguments(OperationArguments):
    """``percent``: share of the darkest and of the brightest values that become black and white.

    ``box``: 0..1 of the target.
    """

    percent: float = Field(
        1.0, ge=0, le=25, description="share of the darkest and brightest values to cut off, 0 to 25"
    )
    box: BoxArgument | None = Field(None, description="the region to show, default all of the image")


class StretchContrast(Operation):
    """Shows pixels of the picture through one curve for all channels, so that colors keep their hue."""

    name = "stretch_contrast"
    description = (
        "Show an image, or a region of it, with its contrast stretched, to see faint print or "
        "details in the shade."
    )
    Arguments = StretchContrastArguments
    quick = True

    @classmethod
    def run(cls, arguments: StretchContrastArguments, target: Target, scene: Scene) -> Result:
        """One view.

        OperationError ``out_of_range``, ``too_small``, ``bad_box``; ``nothing_found`` for a region of one
        color.
        """
        box = clamp(arguments.box or WHOLE)
        left, top, right, bottom = target.pixels(box)
        region = target.picture[top:bottom, left:right].astype(np.float32)
        dark, bright = np.percentile(region, [arguments.percent, 100 - arguments.percent])
        if bright <= dark:
            raise OperationError(
                "the region has one brightness, there is nothing to stretch", code="nothing_found"
            )
        stretched = np.clip((region - dark) / (bright - dark) * 255, 0, 255).round().astype(np.uint8)
        text = f"Contrast stretched: {dark:.0f} is black, {bright:.0f} is white."
        return Result(
            text, [View(scene.fit_crop(stretched), box)], {"black": float(dark), "white": float(bright)}
        )
