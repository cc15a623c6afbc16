"""Calls of operations on pictures and clips in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pixelis.operations import Scene, execute
from pixelis.operations.video import Clip
from pixelis.records import Action, ImageView, Observation


def whole(picture: np.ndarray, name: str = "img0", **links: Any) -> ImageView:
    """The view that shows all of a picture, pixel by pixel."""
    size = picture.shape[1], picture.shape[0]
    return ImageView(id=name, source_size=size, view_size=size, **links)


def scene_of(
    media: np.ndarray | dict[str, np.ndarray | Clip], views: Sequence[ImageView] = (), **more: Any
) -> Scene:
    """A scene of one picture ``img0`` or of several media, with further views."""
    named = media if isinstance(media, dict) else {"img0": media}
    pictures = [whole(medium, name) for name, medium in named.items() if isinstance(medium, np.ndarray)]
    return Scene(named, [*pictures, *views], **more)


def call(
    op: str,
    media: np.ndarray | dict[str, np.ndarray | Clip],
    target: str = "img0",
    views: Sequence[ImageView] = (),
    scene: dict[str, Any] | None = None,
    **arguments: Any,
) -> tuple[Observation, list[np.ndarray]]:
    """Executes an operation; ``scene`` holds further fields of the scene."""
    action = Action(op=op, target=target, arguments=arguments)
    return execute(action, scene_of(media, views, **(scene or {})))
