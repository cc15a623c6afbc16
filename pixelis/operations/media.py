"""The policy's first view of a question's media: whole pictures, and some frames of each clip."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pixelis.config import DialogueConfig
from pixelis.operations.pixel_budget import PixelBudget, fit
from pixelis.operations.video import Clip
from pixelis.records import ImageView


def first_look(
    opened: Mapping[str, np.ndarray | Clip], dialogue: DialogueConfig, multiple: int
) -> tuple[list[ImageView], list[np.ndarray]]:
    """What the policy sees of a question's media at first: each picture whole, of a clip ``dialogue.frames`` frames.

    Returns the views described and as uint8 [h, w, 3], sides in steps of ``multiple``. Frames are called vid0.0, vid0.1, ...
    """
    picture_budget = PixelBudget(dialogue.input.min_pixels, dialogue.input.max_pixels)
    frame_budget = PixelBudget(dialogue.frame.min_pixels, dialogue.frame.max_pixels)
    images, views = [], []
    for name, item in opened.items():
        if isinstance(item, Clip):
            numbers = spread(len(item.times), dialogue.frames)
            for place, (number, frame) in enumerate(zip(numbers, item.frames(numbers), strict=True)):
                views.append(fit(frame, frame_budget, multiple))
                images.append(
                    ImageView(
                        id=f"{name}.{place}",
                        parent=name,
                        frame=number,
                        time=float(item.times[number]),
                        source_size=(item.width, item.height),
                        view_size=(views[-1].shape[1], views[-1].shape[0]),
                    )
                )
        else:
            views.append(fit(item, picture_budget, multiple))
            size, shown = (item.shape[1], item.shape[0]), (views[-1].shape[1], views[-1].shape[0])
            images.append(ImageView(id=name, source_size=size, view_size=shown))
    return images, views


def spread(count: int, most: int) -> list[int]:
    """Up to ``most`` whole numbers of range(count), evenly spread, each in the middle of its share."""
    most = min(count, most)
    return [(2 * i + 1) * count // (2 * most) for i in range(most)]
