"""The segmenters behind ``toolbox.segmenter``: GrabCut without weights, or a SAM checkpoint."""

from __future__ import annotations

import numpy as np

from pixelis.config import ToolboxConfig
from pixelis.operations import grabcut, sam
from pixelis.operations.masks import Edges, Segment


def segment(
    picture: np.ndarray,
    region: Edges,
    point: tuple[float, float] | None,
    box: Edges | None,
    settings: ToolboxConfig,
    seed: int = 0,
) -> Segment:
    """The object at a point or in a box of a picture, by the back-end that ``toolbox.segmenter`` names.

    picture: uint8 [H, W, 3], RGB. ``region``: the part of it that the model looks at; a mask from a point stays inside. Places
    are in pixels of the picture. OperationError ``nothing_found``; MissingFile or BadConfig for a checkpoint that cannot be used.
    """
    if settings.segmenter == "grabcut":
        if box is not None:
            return grabcut.by_box(picture, box, seed)
        assert point is not None
        return grabcut.by_point(picture, region, point, seed)
    return sam.segment(picture, region, point, box, settings.segmenter)


def check(settings: ToolboxConfig) -> None:
    """Load what ``toolbox.segmenter`` names, so that a wrong folder is told when a job starts: MissingFile or BadConfig."""
    if settings.segmenter != "grabcut":
        sam.load(settings.segmenter)
