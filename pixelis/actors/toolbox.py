"""The Toolbox actor: opens pictures and runs pixel operations off the generators."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from pixelis.config import Config
from pixelis.dialogue.pixels import PixelBudget
from pixelis.operations import Scene, execute, select
from pixelis.operations.media import first_look, open_media
from pixelis.operations.video import Clip
from pixelis.records import Action, ImageView, Media, Observation

Pictures = dict[str, np.ndarray | Clip]
"""Full-resolution uint8 [H, W, 3] pictures and clips by media id."""


@dataclass(slots=True)
class Call:
    """One operation of one episode; ``group`` says which of the pictures passed along it is about."""

    action: Action
    images: list[ImageView]
    objects: dict[str, dict[str, Any]]
    group: int


@ray.remote(max_restarts=-1, max_task_retries=2)
class Toolbox:
    """Stateless between calls; pictures come and go by reference."""

    def __init__(self, config: Config):
        self.config = config
        d = config.dialogue
        self.crop = PixelBudget(d.crop.min_pixels, d.crop.max_pixels)
        self.frame = PixelBudget(d.frame.min_pixels, d.frame.max_pixels)
        self.operations = {operation.name: operation for operation in select(config.toolbox.operations)}

    def health(self) -> str:
        """Answers when alive."""
        return "ok"

    def open(self, media: list[Media], multiple: int) -> tuple[Pictures, tuple[list[ImageView], list[np.ndarray]]]:
        """Two returns: full-resolution pictures by id, and the views the policy gets with their sizes.

        ``multiple`` is what both sides of a view are divisible by (patch x merge). Raises BadImage for what cannot be decoded
        under the caps.
        """
        opened = {item.id: open_media(item, self.config.toolbox) for item in media}
        return opened, first_look(opened, self.config.dialogue, multiple)

    def execute(
        self, calls: Sequence[Call], multiple: int, kind: str, *groups: Pictures
    ) -> list[tuple[Observation, list[np.ndarray]]]:
        """Run a batch of calls; each gives an observation (errors included) and the views it shows."""
        out = []
        for call in calls:
            start = time.perf_counter()
            scene = Scene(
                media=groups[call.group],
                images=call.images,
                objects=call.objects,
                budget=self.crop,
                frame_budget=self.frame,
                multiple=multiple,
                kind=kind,
                settings=self.config.toolbox,
            )
            observation, views = execute(call.action, scene, self.operations)
            observation.seconds = time.perf_counter() - start
            out.append((observation, views))
        return out
