"""Base class of pixel operations and what they work on and return."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from pixelis.config import DialogueConfig, ToolboxConfig
from pixelis.errors import BadInput, OperationError
from pixelis.operations import geometry
from pixelis.operations.draw import annotate
from pixelis.operations.pixel_budget import PixelBudget, fit
from pixelis.operations.scale import Scale
from pixelis.operations.video import Clip
from pixelis.records import Box, ImageView, Point

BoxArgument = Annotated[Box, BeforeValidator(geometry.as_box)]
"""A region, 0..1 of its image; the field's name must be in `scale.PLACES`."""
PointArgument = Annotated[Point, BeforeValidator(geometry.as_point)]
"""A point, 0..1 of its image; the field's name must be in `scale.PLACES`."""

MADE = "made"
"""Parent of a view that shows no region of a picture: no call can cut from it."""
UNBOUNDED = PixelBudget(1, 10**9)


class OperationArguments(BaseModel):
    """Base class of an operation's canonical arguments; unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def object_id(key: str) -> str:
    """A short id that a policy can copy without a mistake: five hexadecimal digits of a hash of ``key``."""
    return hashlib.sha256(key.encode()).hexdigest()[:5]


@dataclass(frozen=True)
class Target:
    """The full-resolution media of an action: a picture, a clip, or a region of a picture or frame.

    ``root``: id of the question's own media, whose pixels are ``media``. ``frame``: number in a clip.
    ``box``: the region, 0..1 of the whole picture or frame.
    """

    id: str
    root: str
    media: np.ndarray | Clip
    frame: int | None = None
    box: Box = geometry.WHOLE

    @property
    def is_clip(self) -> bool:
        """True for a whole clip, which has no pixels until a frame is selected."""
        return isinstance(self.media, Clip) and self.frame is None

    @property
    def clip(self) -> Clip:
        """The clip that the target is or belongs to. Raises OperationError ``not_a_video``."""
        if not isinstance(self.media, Clip):
            raise OperationError(f"{self.id} is a still picture", code="not_a_video")
        return self.media

    @cached_property
    def picture(self) -> np.ndarray:
        """The whole picture or frame: read-only uint8 [H, W, 3]. Raises OperationError ``not_a_picture``."""
        if not isinstance(self.media, Clip):
            return self.media
        if self.frame is None:
            raise OperationError(
                f"{self.id} is a video: name one of its frames, or call select_frames", code="not_a_picture"
            )
        return self.media.frame(self.frame)

    def pixels(self, box: Box = geometry.WHOLE) -> tuple[int, int, int, int]:
        """Edges of a box of the target in ``picture``. Raises ``out_of_range`` or ``too_small``."""
        height, width = self.picture.shape[:2]
        return geometry.to_pixels(self.to_root(geometry.clamp(box)), width, height)

    def crop(self, box: Box = geometry.WHOLE) -> np.ndarray:
        """The full-resolution pixels of a box of the target, without copying. Raises as `pixels`."""
        left, top, right, bottom = self.pixels(box)
        return self.picture[top:bottom, left:right]

    def snap(self, box: Box = geometry.WHOLE) -> Box:
        """A box of the target at its pixel edges, 0..1 of the whole picture or frame. Raises as `pixels`."""
        left, top, right, bottom = self.pixels(box)
        height, width = self.picture.shape[:2]
        return left / width, top / height, right / width, bottom / height

    def record(self, key: str, **values: Any) -> dict[str, Any]:
        """An object found here, as in ``data["objects"]``; its id is from ``key``."""
        return {"id": object_id(key), "kind": "object", "root": self.root, "frame": self.frame, **values}

    def to_root(self, box: Box) -> Box:
        """Convert a box of the target to a box of the whole picture or frame."""
        return geometry.compose(self.box, box)

    def from_root(self, box: Box) -> Box:
        """Convert a box of the whole picture or frame to a box of the target. May exceed 0..1."""
        return geometry.relative(self.box, box)


@dataclass(frozen=True)
class Scene:
    """What an operation may read of an episode.

    ``media``: the question's own pictures (uint8 [H, W, 3], RGB, full resolution) and clips by id.
    ``images``: views so far. ``objects``: records of earlier ``data["objects"]`` by id. ``budget``,
    ``frame_budget``, ``multiple``: sizes that views are fit to. ``kind``: the policy's coordinate scale.
    """

    media: Mapping[str, np.ndarray | Clip]
    images: Sequence[ImageView]
    objects: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    budget: PixelBudget = UNBOUNDED
    frame_budget: PixelBudget = UNBOUNDED
    multiple: int = 1
    kind: str = "thousand"
    settings: ToolboxConfig = field(default_factory=ToolboxConfig)
    seed: int = 0

    @classmethod
    def of(
        cls,
        dialogue: DialogueConfig,
        settings: ToolboxConfig,
        multiple: int,
        kind: str,
        media: Mapping[str, np.ndarray | Clip],
        images: Sequence[ImageView],
        objects: Mapping[str, dict[str, Any]],
    ) -> Scene:
        budgets = PixelBudget.of(dialogue.crop), PixelBudget.of(dialogue.frame)
        return cls(media, images, objects, *budgets, multiple, kind, settings)

    @cached_property
    def scale(self) -> Scale:
        return Scale.of(self.kind, self.images)  # type: ignore[arg-type]

    def target(self, name: str) -> Target:
        """The picture, clip or region of this id. Raises OperationError ``bad_target``."""
        if isinstance(clip := self.media.get(name), Clip):
            return Target(name, name, clip)
        links = geometry.chain(self.images, name)
        first = links[0]
        root = first.id if first.frame is None else str(first.parent)
        if root not in self.media:
            raise OperationError(f"the media {root} is not loaded", code="bad_target")
        return Target(name, root, self.media[root], first.frame, geometry.to_root(links))

    def object(self, name: str) -> dict[str, Any]:
        """The record of an earlier object or track. Raises OperationError ``unknown_object``."""
        if name not in self.objects:
            ids = ", ".join(list(self.objects)[-6:]) or "none yet, call segment_object_at first"
            raise OperationError(f"no object {name[:20]}; known: {ids}", code="unknown_object")
        return self.objects[name]

    def fit_crop(self, crop: np.ndarray) -> np.ndarray:
        """Fit a crop (uint8 [H, W, 3]) to ``budget``. Raises ``bad_box`` for a strip too thin to show."""
        return self._fit(crop, self.budget, "bad_box")

    def place(self, box: Sequence[float], target: Target) -> list[float]:
        """A box of the whole picture or frame in the policy's numbers of the target, clipped to it."""
        x0, y0, x1, y1 = box
        inner = target.from_root((x0, y0, x1, y1))
        return self.scale.around([min(max(value, 0.0), 1.0) for value in inner], target.id)

    def show(self, target: Target, box: Box, data: Mapping[str, Any]) -> View:
        """A view of a box of the target on which the items of ``data`` are drawn (see `draw.annotate`)."""
        return View(annotate(self.fit_crop(target.crop(box)), data, target.snap(box)), box)

    def show_frames(self, clip: Clip, numbers: Sequence[int]) -> list[View]:
        """Views of whole frames. Raises OperationError ``too_small``."""
        return [
            View(self._fit(frame, self.frame_budget, "too_small"), None, number, float(clip.times[number]))
            for number, frame in zip(numbers, clip.frames(numbers), strict=True)
        ]

    def _fit(self, pixels: np.ndarray, budget: PixelBudget, code: str) -> np.ndarray:
        try:
            view = fit(pixels, budget, self.multiple)
        except BadInput as error:
            raise OperationError(error.message, code=code) from None
        # A view must not keep the whole picture alive.
        return view.copy() if np.shares_memory(view, pixels) else view


@dataclass(slots=True)
class View:
    """A picture that an operation shows: ``pixels`` uint8 [h, w, 3], fit to the budget.

    ``box``: the region of the target that it shows. With ``frame`` (and ``time`` in seconds) it shows that
    frame of the clip; None is the whole frame. ``source``: the id of another picture that it shows, or MADE.
    """

    pixels: np.ndarray
    box: Box | None = geometry.WHOLE
    frame: int | None = None
    time: float | None = None
    source: str | None = None


@dataclass(slots=True)
class Result:
    """Text for the policy (coordinates in ``scene.scale``), views, and plain data.

    Coordinates in ``data`` are 0..1 of the whole picture or frame.
    """

    text: str = ""
    images: list[View] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


class Operation:
    """Base class of operations: pure functions, so that logs can be replayed and results cached.

    ``description`` is one paragraph for the policy. ``quick``: takes milliseconds, so concurrent calls may be
    batched. Calls of operations that are not ``targeted`` name no image. ``parameters``: the JSON schema of the
    arguments in calls, if it is not to be derived from ``Arguments``.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    Arguments: ClassVar[type[OperationArguments]]
    quick: ClassVar[bool] = False
    targeted: ClassVar[bool] = True
    parameters: ClassVar[dict[str, Any] | None] = None

    @classmethod
    def check(cls, arguments: Mapping[str, Any]) -> OperationArguments:
        """Validate canonical arguments. Raises OperationError ``bad_arguments`` (or ``bad_box``)."""
        try:
            return cls.Arguments.model_validate(dict(arguments))
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"])
            problem = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
            raise OperationError(f"{path[:40]}: {problem}".removeprefix(": "), code="bad_arguments") from None

    @classmethod
    def ready(cls, settings: ToolboxConfig) -> None:
        """Check requirements when a job starts. Raises MissingDependency, MissingFile or BadConfig."""

    @classmethod
    def run(cls, arguments: Any, target: Target, scene: Scene) -> Result:
        """Run the operation on ``target``. Raises OperationError."""
        raise NotImplementedError
