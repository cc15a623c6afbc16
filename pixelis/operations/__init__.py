"""The pixel operations and their registry. Pure functions of pixels: no ray, no torch model."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pixelis.dialogue.pixels import PixelBudget
from pixelis.errors import BadConfig, OperationError
from pixelis.operations import geometry
from pixelis.operations.operation import Operation, Result
from pixelis.operations.zoom_in import ZoomIn
from pixelis.records import Action, ImageView, Observation

__all__ = ["OPERATIONS", "Operation", "Result", "execute", "select"]

log = logging.getLogger(__name__)

OPERATIONS: dict[str, type[Operation]] = {operation.name: operation for operation in (ZoomIn,)}
"""Every operation by the name the policy calls it."""


def select(names: Iterable[str]) -> list[type[Operation]]:
    """The operations of these names in order; BadConfig for one that does not exist."""
    chosen = []
    for name in names:
        if name not in OPERATIONS:
            near = difflib.get_close_matches(name, OPERATIONS, n=1)
            raise BadConfig(
                f"toolbox.operations: there is no operation {name!r}",
                fix=f"did you mean {near[0]}?" if near else "choose from " + ", ".join(OPERATIONS),
            )
        chosen.append(OPERATIONS[name])
    return chosen


def execute(
    action: Action,
    images: Sequence[ImageView],
    pictures: Mapping[str, np.ndarray],
    crop_budget: PixelBudget,
    multiple: int,
) -> tuple[Observation, list[np.ndarray]]:
    """Carry out one action of an episode; never raises: what goes wrong is an observation with a named code.

    ``images`` are all views of the episode so far, ``pictures`` the full-resolution uint8 [H, W, 3] arrays of the question's
    own pictures by id. Returns the observation and the views (uint8, sides in steps of ``multiple``) that its ``images``
    describe; ids stay empty, the agent gives them. ``data`` holds op, target and what the operation adds.
    """
    try:
        return _execute(action, images, pictures, crop_budget, multiple)
    except OperationError as error:
        return Observation(status="error", code=error.code, text=error.message), []
    except Exception as error:  # a broken operation must cost one observation, not the episodes beside it
        log.exception("operation %s crashed", action.op)
        return Observation(status="error", code="crashed", text=f"{action.op} failed: {type(error).__name__}"), []


def _execute(
    action: Action, images: Sequence[ImageView], pictures: Mapping[str, np.ndarray], budget: PixelBudget, multiple: int
) -> tuple[Observation, list[np.ndarray]]:
    operation = OPERATIONS.get(action.op)
    if operation is None:
        raise OperationError(f"no operation {action.op[:30]}, use {', '.join(OPERATIONS)}", code="unknown_op")
    arguments = operation.check(action.arguments)
    target = geometry.chain(images, action.target)
    root = target[0].id
    if root not in pictures:
        raise OperationError(f"the picture {root} is not loaded", code="crashed")
    picture = pictures[root]
    result = operation.run(arguments, target, picture, budget, multiple)
    described, views = [], []
    for box, view in result.images:
        height, width = picture.shape[:2]
        left, top, right, bottom = geometry.to_pixels(geometry.to_root(target, box), width, height)
        described.append(
            ImageView(
                id="",
                parent=action.target,
                box=box,
                source_size=(right - left, bottom - top),
                view_size=(view.shape[1], view.shape[0]),
            )
        )
        views.append(view)
    data = {"op": action.op, "target": action.target, **result.data}
    return Observation(status="ok", text=result.text, images=described, data=data), views
