"""The base of pixel operations: a name, checked arguments, and a pure function of full-resolution pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from pixelis.config import ToolboxConfig
from pixelis.errors import OperationError
from pixelis.operations import geometry
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.operations.scale import Scale
from pixelis.operations.video import Clip
from pixelis.records import Box, ImageView, Point

BoxArgument = Annotated[Box, BeforeValidator(geometry.as_box)]
"""A region, 0..1 of the target. Call the field ``box``: the dialects translate it by that name."""
PointArgument = Annotated[Point, BeforeValidator(geometry.as_point)]
"""A place, 0..1 of the target. Call the field ``point`` or ``center``: the dialects translate it by that name."""

UNBOUNDED = PixelBudget(1, 10**9)
DEFAULTS = ToolboxConfig()


class OperationArguments(BaseModel):
    """Base of an operation's canonical arguments: unknown keys and wrong types are errors, nothing is coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclass(frozen=True)
class Target:
    """What an action is about: a picture, a clip (``is_clip``), or a region of a picture or of a frame, in full resolution.

    ``root`` is the id of the question's own media and ``media`` its pixels, ``frame`` the number of the frame within a clip,
    ``box`` the region, 0..1 of the whole picture or frame.
    """

    id: str
    root: str
    media: np.ndarray | Clip
    frame: int | None = None
    box: Box = geometry.WHOLE

    @property
    def is_clip(self) -> bool:
        """True for a whole clip, which has no pixels until a frame is chosen."""
        return isinstance(self.media, Clip) and self.frame is None

    @property
    def clip(self) -> Clip:
        """The clip that the target is, or was taken from; OperationError ``not_a_video`` for a still picture."""
        if not isinstance(self.media, Clip):
            raise OperationError(f"{self.id} is a still picture", code="not_a_video")
        return self.media

    @cached_property
    def picture(self) -> np.ndarray:
        """The whole picture or frame: read-only uint8 [H, W, 3]; OperationError ``not_a_picture`` for a clip."""
        if not isinstance(self.media, Clip):
            return self.media
        if self.frame is None:
            raise OperationError(f"{self.id} is a video: name one of its frames, or call select_frames", code="not_a_picture")
        return self.media.frame(self.frame)

    def pixels(self, box: Box = geometry.WHOLE) -> tuple[int, int, int, int]:
        """Edges left, top, right, bottom of a box of the target in ``picture``; ``out_of_range`` or ``too_small``."""
        height, width = self.picture.shape[:2]
        return geometry.to_pixels(self.to_root(geometry.clamp(box)), width, height)

    def to_root(self, box: Box) -> Box:
        """A box of the target as a box of the whole picture or frame."""
        return geometry.compose(self.box, box)

    def from_root(self, box: Box) -> Box:
        """A box of the whole picture or frame as a box of the target; may reach beyond 0..1."""
        return geometry.relative(self.box, box)


@dataclass(frozen=True)
class Scene:
    """What an operation may know of its episode: the media, the views shown so far, and what earlier operations found.

    ``media``: the question's own pictures (uint8 [H, W, 3], RGB, full resolution) and clips by id. ``objects``: records of
    segmented objects and tracks by their id, as operations put them into ``data["objects"]``. ``budget`` and ``multiple``:
    the size that views are fit to. ``kind``: the scale of the numbers that the policy reads and writes.
    """

    media: Mapping[str, np.ndarray | Clip]
    images: Sequence[ImageView]
    objects: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    budget: PixelBudget = UNBOUNDED
    frame_budget: PixelBudget = UNBOUNDED
    multiple: int = 1
    kind: str = "thousand"
    settings: ToolboxConfig = DEFAULTS
    seed: int = 0

    @cached_property
    def scale(self) -> Scale:
        """How places are written in ``Result.text``."""
        return Scale.of(self.kind, self.images)  # type: ignore[arg-type]

    def target(self, name: str) -> Target:
        """The picture, clip or region of this id; OperationError ``bad_target``."""
        if isinstance(clip := self.media.get(name), Clip):
            return Target(name, name, clip)
        links = geometry.chain(self.images, name)
        first = links[0]
        root = first.id if first.frame is None else str(first.parent)
        if root not in self.media:
            raise OperationError(f"the media {root} is not loaded", code="bad_target")
        return Target(name, root, self.media[root], first.frame, geometry.to_root(links))

    def found(self, name: str) -> dict[str, Any]:
        """The record of an object or track that an earlier operation found; OperationError ``unknown_object``."""
        if name not in self.objects:
            known = ", ".join(list(self.objects)[-6:]) or "none yet, call segment_object_at first"
            raise OperationError(f"no object {name[:20]}; known: {known}", code="unknown_object")
        return self.objects[name]


@dataclass(slots=True)
class Shown:
    """A view that an operation shows: uint8 [h, w, 3] fit to the budget.

    ``box`` is the region of the target that it shows. With ``frame`` (and its ``time`` in seconds) it shows that frame of the
    target's clip, ``box`` then being of the frame and None for all of it.
    """

    view: np.ndarray
    box: Box | None = geometry.WHOLE
    frame: int | None = None
    time: float | None = None


@dataclass(slots=True)
class Result:
    """What an operation gives back: text for the policy, views, and plain data for rewards, evaluation and pages.

    Places in ``text`` are written by ``scene.scale``; in ``data`` they are 0..1 of the whole picture or frame.
    """

    text: str = ""
    images: list[Shown] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


class Operation:
    """Base of the operations. They are pure: the same arguments and pixels give the same result, so a log can be replayed.

    ``description`` is one paragraph that the policy reads. ``quick`` operations take a few milliseconds at most: calls of the
    same moment may travel together.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    Arguments: ClassVar[type[OperationArguments]]
    quick: ClassVar[bool] = False

    @classmethod
    def check(cls, arguments: Mapping[str, Any]) -> OperationArguments:
        """Validated canonical arguments; OperationError ``bad_arguments`` (or ``bad_box``) names the first thing wrong."""
        try:
            return cls.Arguments.model_validate(dict(arguments))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            problem = {"missing": "is missing", "extra_forbidden": "is unknown"}.get(first["type"], first["msg"])
            problem = problem.removeprefix("Value error, ")
            raise OperationError(f"{where[:40]} {problem}".strip(), code="bad_arguments") from None

    @classmethod
    def ready(cls, settings: ToolboxConfig) -> None:
        """Check when a job starts that what the operation needs is there; MissingDependency, MissingFile or BadConfig."""

    @classmethod
    def run(cls, arguments: Any, target: Target, scene: Scene) -> Result:
        """Carry it out on ``target``; raises OperationError."""
        raise NotImplementedError
