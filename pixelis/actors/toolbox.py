"""The Toolbox actor: opens pictures and runs pixel operations off the generators."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import ray

from pixelis.config import Config
from pixelis.dialogue.pixels import PixelBudget, fit
from pixelis.operations import execute
from pixelis.operations.media import load_image
from pixelis.records import Action, ImageView, Media, Observation

Pictures = dict[str, np.ndarray]
"""Full-resolution uint8 HxWx3 arrays by media id."""


@dataclass(slots=True)
class Call:
    """One operation of one episode; ``group`` says which of the pictures passed along it is about."""

    action: Action
    images: list[ImageView]
    group: int


@ray.remote(max_restarts=-1, max_task_retries=2)
class Toolbox:
    """Stateless between calls; pictures come and go by reference."""

    def __init__(self, config: Config):
        self.config = config
        self.input = PixelBudget(config.dialogue.input.min_pixels, config.dialogue.input.max_pixels)
        self.crop = PixelBudget(config.dialogue.crop.min_pixels, config.dialogue.crop.max_pixels)

    def health(self) -> str:
        """Answers when alive."""
        return "ok"

    def open(self, media: list[Media], multiple: int) -> tuple[Pictures, tuple[list[ImageView], list[np.ndarray]]]:
        """Two returns: full-resolution pictures by id, and the views the policy gets with their sizes.

        ``multiple`` is what both sides of a view are divisible by (patch x merge). Raises BadImage for what cannot be decoded
        under the caps.
        """
        caps = self.config.toolbox
        pictures, images, views = {}, [], []
        for item in media:
            picture = load_image(item.uri, caps.max_image_bytes, caps.max_image_pixels)
            view = fit(picture, self.input, multiple)
            pictures[item.id] = picture
            views.append(view)
            size, shown = picture.shape[1::-1], view.shape[1::-1]
            uri = item.uri if not item.uri.startswith("data:") else ""
            images.append(ImageView(id=item.id, uri=uri, source_size=size, view_size=shown))
        return pictures, (images, views)

    def execute(self, calls: Sequence[Call], multiple: int, *groups: Pictures) -> list[tuple[Observation, list[np.ndarray]]]:
        """Run a batch of calls; each gives an observation (errors included) and the views it shows."""
        out = []
        for call in calls:
            start = time.perf_counter()
            observation, views = execute(call.action, call.images, groups[call.group], self.crop, multiple)
            observation.seconds = time.perf_counter() - start
            out.append((observation, views))
        return out
