"""Masks of a tracked object: its box in each frame is segmented by the back-end of ``toolbox.segmenter``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pixelis.config import ToolboxConfig
from pixelis.errors import OperationError
from pixelis.operations import geometry, grabcut, mobilenet, sam
from pixelis.operations.video import Clip

MAX_MASKS = 64
"""Frames of a track with masks: segmenting a frame takes much longer than tracking through it."""


def check_masks(count: int) -> None:
    """Raise OperationError ``limit`` if masks of so many frames are too many."""
    if count > MAX_MASKS:
        message = f"masks of {count} frames requested, the limit is {MAX_MASKS}: set end, or omit masks"
        raise OperationError(message, code="limit")


def segment_track(
    clip: Clip, frames: Sequence[int], boxes: Sequence[Sequence[float]], settings: ToolboxConfig, seed: int
) -> list[Any]:
    """COCO's code of the object in each frame, None where the box shows no object. ``boxes``: 0..1 of the frame.

    Raises MissingFile or BadConfig for an unusable checkpoint.
    """
    codes: list[Any] = []
    for picture, box in zip(clip.frames(frames), boxes, strict=True):
        edges = geometry.to_pixels(geometry.as_box(box), clip.width, clip.height)
        try:
            if settings.segmenter == "mobilenet":
                segment = mobilenet.segment(picture, (0, 0, clip.width, clip.height), None, edges, seed)
            elif settings.segmenter == "grabcut":
                segment = grabcut.by_box(picture, edges, seed)
            else:
                segment = sam.segment(picture, (0, 0, clip.width, clip.height), None, edges, settings.segmenter)
        except OperationError as error:
            if error.code not in ("nothing_found", "too_small"):
                raise
            codes.append(None)
        else:
            codes.append(segment.mask.encode())
    return codes
