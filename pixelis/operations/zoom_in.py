"""ZOOM_IN: look at a region again, with as many pixels as the crop budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import BeforeValidator

from pixelis.dialogue.pixels import PixelBudget, fit
from pixelis.errors import BadInput, OperationError
from pixelis.operations import geometry
from pixelis.operations.operation import Operation, OperationArguments, Result
from pixelis.records import Box, ImageView


class ZoomInArguments(OperationArguments):
    """``box``: the region, 0..1 of the target."""

    box: Annotated[Box, BeforeValidator(geometry.as_box)]


class ZoomIn(Operation):
    """Crops from the full-resolution picture, through any number of earlier crops; no padding around the box."""

    name = "zoom_in"
    description = "Look closer at a region of an image. Returns the region enlarged."
    Arguments = ZoomInArguments

    @classmethod
    def run(
        cls, arguments: ZoomInArguments, target: Sequence[ImageView], picture: np.ndarray, budget: PixelBudget, multiple: int
    ) -> Result:
        """One view of the region, cut from ``picture`` (uint8 [H, W, 3]).

        The box is clamped to the target and comes back moved to the nearest pixel edges, so that a crop of the crop is exact.
        OperationError ``out_of_range`` when nothing is left, ``too_small`` below 4 pixels, ``bad_box`` for a strip too thin to
        show.
        """
        height, width = picture.shape[:2]
        wanted = geometry.to_root(target, geometry.clamp(arguments.box))
        left, top, right, bottom = geometry.to_pixels(wanted, width, height)
        shown = (left / width, top / height, right / width, bottom / height)
        box = geometry.clamp(geometry.relative(geometry.to_root(target), shown))
        try:
            view = fit(picture[top:bottom, left:right], budget, multiple)
        except BadInput as error:
            raise OperationError(error.message, code="bad_box") from None
        if np.shares_memory(view, picture):
            view = view.copy()  # a crop must not keep the whole picture alive
        return Result(images=[(box, view)], data={"pixels": [left, top, right, bottom]})
