"""ZOOM_IN: look at a region again, with as many pixels as the crop budget allows."""

from __future__ import annotations

import numpy as np

from pixelis.dialogue.pixels import fit
from pixelis.errors import BadInput, OperationError
from pixelis.operations import geometry
from pixelis.operations.operation import BoxArgument, Operation, OperationArguments, Result, Scene, Shown, Target


class ZoomInArguments(OperationArguments):
    """``box``: the region, 0..1 of the target."""

    box: BoxArgument


class ZoomIn(Operation):
    """Crops from the full-resolution picture, through any number of earlier crops; no padding around the box."""

    name = "zoom_in"
    description = "Look closer at a region of an image. Returns the region enlarged."
    Arguments = ZoomInArguments
    quick = True

    @classmethod
    def run(cls, arguments: ZoomInArguments, target: Target, scene: Scene) -> Result:
        """One view of the region.

        The box is clamped to the target and comes back moved to the nearest pixel edges, so that a crop of the crop is exact.
        OperationError ``out_of_range`` when nothing is left, ``too_small`` below 4 pixels, ``bad_box`` for a strip too thin to
        show.
        """
        picture = target.picture
        height, width = picture.shape[:2]
        left, top, right, bottom = target.pixels(arguments.box)
        shown = (left / width, top / height, right / width, bottom / height)
        box = geometry.clamp(target.from_root(shown))
        try:
            view = fit(picture[top:bottom, left:right], scene.budget, scene.multiple)
        except BadInput as error:
            raise OperationError(error.message, code="bad_box") from None
        if np.shares_memory(view, picture):
            view = view.copy()  # a crop must not keep the whole picture alive
        return Result(images=[Shown(view, box)], data={"pixels": [left, top, right, bottom]})
