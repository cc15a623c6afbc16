"""The policy's first views of a question's media: whole pictures, and some frames of each clip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pixelis.config import DialogueConfig
from pixelis.operations.pixel_budget import PixelBudget, fit
from pixelis.operations.video import Clip
from pixelis.records import ImageView


def first_look(
    media: Mapping[str, np.ndarray | Clip], dialogue: DialogueConfig, multiple: int
) -> tuple[list[ImageView], list[np.ndarray]]:
    """The first views of a question: each picture as a whole, and some frames of each clip.

    Returns descriptions and pixels (uint8 [h, w, 3], sides are multiples of ``multiple``). Frames are named
    vid0.0, vid0.1, ...
    """
    picture_budget, frame_budget = PixelBudget.of(dialogue.input), PixelBudget.of(dialogue.frame)
    images, views = [], []

    def add(name: str, picture: np.ndarray, budget: PixelBudget, **source: object) -> None:
        view = fit(picture, budget, multiple)
        views.append(view)
        size, view_size = (picture.shape[1], picture.shape[0]), (view.shape[1], view.shape[0])
        images.append(
            ImageView.model_validate({"id": name, "source_size": size, "view_size": view_size, **source})
        )

    for name, item in media.items():
        if isinstance(item, Clip):
            numbers = segment_centers(len(item.times), dialogue.frames)
            for i, (number, frame) in enumerate(zip(numbers, item.frames(numbers), strict=True)):
                add(
                    f"{name}.{i}",
                    frame,
                    frame_budget,
                    parent=name,
                    frame=number,
                    time=float(item.times[number]),
                )
        else:
            add(name, item, picture_budget)
    return images, views


def segment_centers(count: int, limit: int) -> list[int]:
    """Divide range(count) into up to ``limit`` equal segments and return the middle number of each."""
    limit = min(count, limit)
    return [(2 * i + 1) * count // (2 * limit) for i in range(limit)]


def subsample(items: Sequence[int], limit: int) -> list[int]:
    """Up to ``limit`` evenly spaced items, including the first and the last."""
    if len(items) <= limit or limit < 2:
        return list(items[:limit])
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]
