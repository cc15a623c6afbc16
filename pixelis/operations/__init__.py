"""The pixel operations and their registry. Pure functions of pixels: no ray, no torch model."""

from __future__ import annotations

import difflib
import inspect
import logging
import re
from collections.abc import Iterable, Mapping

import numpy as np
from pydantic import PydanticUserError

from pixelis.config.references import load_reference
from pixelis.errors import BadConfig, BadInput, OperationError
from pixelis.operations import geometry
from pixelis.operations.compare import Compare
from pixelis.operations.enhance import Enhance
from pixelis.operations.environment import Environment, EnvironmentAction, EnvironmentResult
from pixelis.operations.find import Find
from pixelis.operations.flip import Flip
from pixelis.operations.get_properties import GetProperties
from pixelis.operations.mark import Mark
from pixelis.operations.measure import Measure
from pixelis.operations.operation import MADE, Operation, OperationArguments, Result, Scene, Target, View
from pixelis.operations.python import Python
from pixelis.operations.read_text import ReadText
from pixelis.operations.rotate import Rotate
from pixelis.operations.search_clip import SearchClip
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

_OUT_OF_MEMORY = re.compile(r"insufficient memory|can't (allocate|start new thread)|bad.?alloc|failed to allocate", re.IGNORECASE)
"""Out-of-memory messages of OpenCV, torch, onnxruntime and Python's threads."""

OPERATIONS: dict[str, type[Operation]] = {
    operation.name: operation
    for operation in (
        ZoomIn,
        SegmentObjectAt,
        GetProperties,
        ReadText,
        TrackObject,
        SelectFrames,
        Rotate,
        Flip,
        Enhance,
        Compare,
        Measure,
        Mark,
        Python,
        SearchClip,
        Find,
    )
}
"""The built-in operations by name."""


def select(names: Iterable[str]) -> list[type[Operation]]:
    """Return the operations of these names in order; ``package.module:Class`` names a user's own.

    Raises BadConfig for an unknown name, a class that is no operation, and two operations of one name.
    """
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
            raise BadConfig(f"toolbox.operations: two operations are called {operation.name!r}", fix="keep one of them")
        selected[operation.name] = operation
    return list(selected.values())


def _load_custom(path: str) -> type[Operation]:
    result = load_reference(path, "toolbox.operations")
    if not (isinstance(result, type) and issubclass(result, Operation)):
        raise BadConfig(f"toolbox.operations: {path} is no Operation", fix="derive it from pixelis.operations.Operation")
    missing = [field for field in ("name", "description", "Arguments") if not hasattr(result, field)]
    if getattr(result.run, "__func__", None) is Operation.run.__func__:  # type: ignore[attr-defined]
        missing.append("run")
    if missing:
        raise BadConfig(f"toolbox.operations: {path} lacks {', '.join(missing)}", fix="see docs/operations.md")
    if problem := _problem(result):
        raise BadConfig(f"toolbox.operations: {path}: {problem}", fix="see docs/operations.md")
    return result


def _problem(operation: type[Operation]) -> str:
    """What would fail only when the operation is offered or called; empty for a sound one."""
    if not (isinstance(operation.name, str) and operation.name.isidentifier()):
        return f"its name {str(operation.name)[:40]!r} is no identifier"
    if not (isinstance(operation.description, str) and operation.description.strip()):
        return "its description is empty"
    if not (isinstance(operation.Arguments, type) and issubclass(operation.Arguments, OperationArguments)):
        return "its Arguments are not derived from OperationArguments"
    for method in ("run", "check", "ready"):
        if not inspect.ismethod(getattr(operation, method)):
            return f"{method} is no classmethod"
    try:
        inspect.signature(operation.run).bind(None, None, None)
    except TypeError:
        return "run does not take arguments, target and scene"
    try:
        operation.Arguments.model_json_schema()
    except PydanticUserError as error:
        return f"its arguments have no JSON schema: {error.message}"
    return ""


def execute(
    action: Action, scene: Scene, operations: Mapping[str, type[Operation]] | None = None
) -> tuple[Observation, list[np.ndarray]]:
    """Execute one action of an episode. Never raises: a failure is an error observation with a code.

    ``operations`` are the available ones by name, by default the built-in ones. Returns the observation and the views
    (uint8 [h, w, 3]) that its ``images`` describe. Ids are empty: the agent assigns them. ``data`` holds op, target and the
    operation's own data.
    """
    try:
        return _execute(action, scene, OPERATIONS if operations is None else operations)
    except (OperationError, BadInput) as error:
        return Observation(status="error", code=error.code, text=error.message), []
    except Exception as error:  # a broken operation must cost one observation, not the other episodes of this process
        if (cause := _operation_error(error)) is not None:
            return Observation(status="error", code=cause.code, text=cause.message), []
        if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
            return Observation(status="error", code="out_of_memory", text=f"{action.op} needs too much memory"), []
        log.exception("operation %s crashed", action.op)
        return Observation(status="error", code="crashed", text=f"{action.op} failed: {type(error).__name__}"), []


def _operation_error(error: BaseException) -> OperationError | None:
    """The OperationError that a library wrapped: rapidocr wraps the error raised by a deadline's alarm."""
    cause = error.__cause__ or error.__context__
    return cause if cause is None or isinstance(cause, OperationError) else _operation_error(cause)


def _execute(action: Action, scene: Scene, operations: Mapping[str, type[Operation]]) -> tuple[Observation, list[np.ndarray]]:
    operation = operations.get(action.op)
    if operation is None:
        raise OperationError(f"no operation {action.op[:30]}, use {', '.join(operations)}", code="unknown_op")
    arguments = operation.check(action.arguments)
    target = scene.target(action.target)
    result = operation.run(arguments, target, scene)
    images = [_image_view(view, target, scene) for view in result.images]
    data = {"op": action.op, "target": action.target, **result.data}
    return Observation(status="ok", text=result.text, images=images, data=data), [view.pixels for view in result.images]


def _image_view(view: View, target: Target, scene: Scene) -> ImageView:
    if view.source == MADE:
        size = (view.pixels.shape[1], view.pixels.shape[0])
        return ImageView(id="", parent=MADE, source_size=size, view_size=size)
    if view.source is not None:
        target = scene.target(view.source)
    box = view.box or geometry.WHOLE
    if view.frame is None:
        parent, edges = target.id, target.pixels(box)
    else:
        parent, edges = target.root, geometry.to_pixels(box, target.clip.width, target.clip.height)
    left, top, right, bottom = edges
    size, view_size = (right - left, bottom - top), (view.pixels.shape[1], view.pixels.shape[0])
    return ImageView(id="", parent=parent, frame=view.frame, time=view.time, box=view.box, source_size=size, view_size=view_size)
