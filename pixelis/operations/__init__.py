"""The pixel operations and their registry. Pure functions of pixels: no ray, no torch model."""

from __future__ import annotations

import difflib
import inspect
import logging
import re
from collections.abc import Iterable, Mapping

import numpy as np

from pixelis.config.references import Registry, load_reference
from pixelis.errors import BadConfig, BadInput, OperationError
from pixelis.operations import geometry
from pixelis.operations.environment import Environment, EnvironmentAction, EnvironmentResult
from pixelis.operations.get_properties import GetProperties
from pixelis.operations.operation import MADE, Operation, OperationArguments, Result, Scene, Target, View
from pixelis.operations.read_text import ReadText
from pixelis.operations.segment_object_at import SegmentObjectAt
from pixelis.operations.select_frames import SelectFrames
from pixelis.operations.track_object import TrackObject
from pixelis.operations.zoom_in import ZoomIn
from pixelis.records import Action, ImageView, Observation

__all__ = [
    "OPERATIONS",
    "Environment",
    "EnvironmentAction",
    "EnvironmentResult",
    "Operation",
    "OperationArguments",
    "Result",
    "Scene",
    "Target",
    "View",
    "execute",
    "select",
]

log = logging.getLogger(__name__)

_OUT_OF_MEMORY = re.compile(
    r"insufficient memory|can't (allocate|start new thread)|bad.?alloc|failed to allocate", re.IGNORECASE
)
"""Messages of OpenCV, torch, onnxruntime and Python's threads."""


OPERATIONS: Mapping[str, type[Operation]] = Registry(
    "toolbox.operations",
    {
        "zoom_in": ZoomIn,
        "segment_object_at": SegmentObjectAt,
        "get_properties": GetProperties,
        "read_text": ReadText,
        "track_object": TrackObject,
        "select_frames": SelectFrames,
        "rotate": "pixelis.operations.rotate:Rotate",
        "flip": "pixelis.operations.flip:Flip",
        "enhance": "pixelis.operations.enhance:Enhance",
        "compare": "pixelis.operations.compare:Compare",
        "measure": "pixelis.operations.measure:Measure",
        "mark": "pixelis.operations.mark:Mark",
        "python": "pixelis.operations.python:Python",
        "search_clip": "pixelis.operations.search_clip:SearchClip",
        "find": "pixelis.operations.find:Find",
    },
)
"""The built-in operations; the first six are the default of ``toolbox.operations``, others load on use."""


def select(names: Iterable[str]) -> list[type[Operation]]:
    """The operations of these names; ``package.module:Class`` names a user's own. Raises BadConfig."""
    selected: dict[str, type[Operation]] = {}
    for name in names:
        operation = _load_custom(name) if ":" in name else OPERATIONS.get(name)
        if operation is None:
            similar = difflib.get_close_matches(name, OPERATIONS, n=1)
            raise BadConfig(
                f"toolbox.operations: there is no operation {name!r}",
                fix=f"did you mean {similar[0]}?" if similar else "choose from " + ", ".join(OPERATIONS),
            )
        if operation.name in selected:
            raise BadConfig(
                f"toolbox.operations: two operations are called {operation.name!r}", fix="keep one of them"
            )
        selected[operation.name] = operation
    return list(selected.values())


def _load_custom(path: str) -> type[Operation]:
    result = load_reference(path, "toolbox.operations")
    if not (isinstance(result, type) and issubclass(result, Operation)):
        raise BadConfig(
            f"toolbox.operations: {path} is no Operation", fix="derive it from pixelis.operations.Operation"
        )
    missing = [field for field in ("name", "description", "Arguments") if not getattr(result, field, None)]
    problem = ""
    if missing:
        problem = f"lacks {', '.join(missing)}"
    elif not (isinstance(result.Arguments, type) and issubclass(result.Arguments, OperationArguments)):
        problem = "has Arguments that are not derived from OperationArguments"
    elif not inspect.ismethod(result.run) or len(inspect.signature(result.run).parameters) != 3:
        problem = "needs a classmethod run(cls, arguments, target, scene)"
    if problem:
        raise BadConfig(f"toolbox.operations: {path} {problem}", fix="see docs/operations.md")
    return result


def execute(
    action: Action, scene: Scene, operations: Mapping[str, type[Operation]] = OPERATIONS
) -> tuple[Observation, list[np.ndarray]]:
    """Execute one action of an episode. Never raises: a failure is an error observation with a code.

    Returns the observation and the views (uint8 [h, w, 3]) that its ``images`` describe. Ids are empty: the
    agent assigns them.
    """
    try:
        operation = operations.get(action.op)
        if operation is None:
            raise OperationError(
                f"no operation {action.op[:30]}, use {', '.join(operations)}", code="unknown_op"
            )
        arguments = operation.check(action.arguments)
        target = scene.target(action.target)
        result = operation.run(arguments, target, scene)
        images = [_image_view(view, target, scene) for view in result.images]
        data = {"op": action.op, "target": action.target, **result.data}
        observation = Observation(status="ok", text=result.text, images=images, data=data)
        return observation, [view.pixels for view in result.images]
    except (OperationError, BadInput) as error:
        code, text = error.code, error.message
    # A broken operation must cost one observation, not the other episodes of this process.
    except Exception as error:
        if (cause := _operation_error(error)) is not None:
            code, text = cause.code, cause.message
        elif isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
            code, text = "out_of_memory", f"{action.op} needs too much memory"
        else:
            log.exception("operation %s crashed", action.op)
            code, text = "crashed", f"{action.op} failed: {type(error).__name__}"
    return Observation(status="error", code=code, text=text), []


def _operation_error(error: BaseException) -> OperationError | None:
    """The OperationError that a library wrapped: rapidocr wraps the error of a deadline's alarm."""
    cause = error.__cause__ or error.__context__
    return cause if cause is None or isinstance(cause, OperationError) else _operation_error(cause)


def _image_view(view: View, target: Target, scene: Scene) -> ImageView:
    view_size = (view.pixels.shape[1], view.pixels.shape[0])
    if view.source == MADE:
        return ImageView(id="", parent=MADE, source_size=view_size, view_size=view_size)
    if view.source is not None:
        target = scene.target(view.source)
    box = view.box or geometry.WHOLE
    if view.frame is None:
        parent, (left, top, right, bottom) = target.id, target.pixels(box)
    else:
        parent = target.root
        left, top, right, bottom = geometry.to_pixels(box, target.clip.width, target.clip.height)
    return ImageView(
        id="",
        parent=parent,
        frame=view.frame,
        time=view.time,
        box=view.box,
        source_size=(right - left, bottom - top),
        view_size=view_size,
    )
