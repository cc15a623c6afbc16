"""The pixel operations and their registry. Pure functions of pixels: no ray, no torch model."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping

import numpy as np

from pixelis.config.references import load_reference
from pixelis.errors import BadConfig, BadInput, OperationError
from pixelis.operations import geometry
from pixelis.operations.get_properties import GetProperties
from pixelis.operations.operation import Operation, OperationArguments, Result, Scene, Shown, Target
from pixelis.operations.read_text import ReadText
from pixelis.operations.segment_object_at import SegmentObjectAt
from pixelis.operations.select_frames import SelectFrames
from pixelis.operations.track_object import TrackObject
from pixelis.operations.zoom_in import ZoomIn
from pixelis.records import Action, ImageView, Observation

__all__ = ["OPERATIONS", "Operation", "OperationArguments", "Result", "Scene", "Shown", "Target", "execute", "select"]

log = logging.getLogger(__name__)

_EXHAUSTED = re.compile(r"insufficient memory|can't (allocate|start new thread)|bad.?alloc|failed to allocate", re.IGNORECASE)
"""How OpenCV, torch, onnxruntime and the threads of Python say that there is no memory left."""

OPERATIONS: dict[str, type[Operation]] = {
    operation.name: operation for operation in (ZoomIn, SegmentObjectAt, GetProperties, ReadText, TrackObject, SelectFrames)
}
"""Every operation of ours by the name the policy calls it."""


def select(names: Iterable[str]) -> list[type[Operation]]:
    """The operations of these names in order; ``package.module:Class`` is one of the user's own.

    Raises BadConfig for one that does not exist or is no operation, and for two of one name.
    """
    chosen: dict[str, type[Operation]] = {}
    for name in names:
        operation = _own(name) if ":" in name else OPERATIONS.get(name)
        if operation is None:
            near = difflib.get_close_matches(name, OPERATIONS, n=1)
            raise BadConfig(
                f"toolbox.operations: there is no operation {name!r}",
                fix=f"did you mean {near[0]}?" if near else "choose from " + ", ".join(OPERATIONS),
            )
        if operation.name in chosen:
            raise BadConfig(f"toolbox.operations: two operations are called {operation.name!r}", fix="keep one of them")
        chosen[operation.name] = operation
    return list(chosen.values())


def _own(path: str) -> type[Operation]:
    result = load_reference(path, "toolbox.operations")
    if not (isinstance(result, type) and issubclass(result, Operation)):
        raise BadConfig(f"toolbox.operations: {path} is no Operation", fix="derive it from pixelis.operations.Operation")
    missing = [field for field in ("name", "description", "Arguments") if not hasattr(result, field)]
    if missing or result.run.__func__ is Operation.run.__func__:  # type: ignore[attr-defined]
        raise BadConfig(f"toolbox.operations: {path} lacks {', '.join([*missing, 'run'])}", fix="see docs/operations.md")
    return result


def execute(
    action: Action, scene: Scene, operations: Mapping[str, type[Operation]] | None = None
) -> tuple[Observation, list[np.ndarray]]:
    """Carry out one action of an episode; never raises: what goes wrong is an observation with a named code.

    ``operations`` are those on offer by name, all of ours by default. Returns the observation and the views (uint8 [h, w, 3])
    that its ``images`` describe; ids stay empty, the agent gives them. ``data`` holds op, target and what the operation adds.
    """
    try:
        return _execute(action, scene, OPERATIONS if operations is None else operations)
    except (OperationError, BadInput) as error:
        return Observation(status="error", code=error.code, text=error.message), []
    except MemoryError:
        return Observation(status="error", code="out_of_memory", text=f"{action.op} needs too much memory"), []
    except Exception as error:  # a broken operation must cost one observation, not the episodes beside it
        if (told := _told(error)) is not None:
            return Observation(status="error", code=told.code, text=told.message), []
        if _EXHAUSTED.search(str(error)):
            return Observation(status="error", code="out_of_memory", text=f"{action.op} needs too much memory"), []
        log.exception("operation %s crashed", action.op)
        return Observation(status="error", code="crashed", text=f"{action.op} failed: {type(error).__name__}"), []


def _told(error: BaseException) -> OperationError | None:
    """Our own error inside that of a library: one raised by a deadline's alarm comes back wrapped from rapidocr."""
    cause = error.__cause__ or error.__context__
    return cause if cause is None or isinstance(cause, OperationError) else _told(cause)


def _execute(action: Action, scene: Scene, operations: Mapping[str, type[Operation]]) -> tuple[Observation, list[np.ndarray]]:
    operation = operations.get(action.op)
    if operation is None:
        raise OperationError(f"no operation {action.op[:30]}, use {', '.join(operations)}", code="unknown_op")
    arguments = operation.check(action.arguments)
    target = scene.target(action.target)
    result = operation.run(arguments, target, scene)
    described = [_describe(shown, target) for shown in result.images]
    data = {"op": action.op, "target": action.target, **result.data}
    return Observation(status="ok", text=result.text, images=described, data=data), [shown.view for shown in result.images]


def _describe(shown: Shown, target: Target) -> ImageView:
    view_size = (shown.view.shape[1], shown.view.shape[0])
    if shown.frame is not None:
        clip = target.clip
        left, top, right, bottom = geometry.to_pixels(shown.box or geometry.WHOLE, clip.width, clip.height)
        parent = target.root
    else:
        left, top, right, bottom = target.pixels(shown.box or geometry.WHOLE)
        parent = target.id
    size = (right - left, bottom - top)
    return ImageView(
        id="", parent=parent, frame=shown.frame, time=shown.time, box=shown.box, source_size=size, view_size=view_size
    )
