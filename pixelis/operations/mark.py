"""MARK: draw boxes and points with labels on a picture, for the next look."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints, model_validator

from pixelis.errors import OperationError
from pixelis.operations.geometry import WHOLE, clamp
from pixelis.operations.operation import (
    BoxArgument,
    Operation,
    OperationArguments,
    PointArgument,
    Result,
    Scene,
    Target,
)

MAX_MARKS = 40

Label = Annotated[str, StringConstraints(max_length=40)]


class MarkArguments(OperationArguments):
    boxes: list[BoxArgument] | None = Field(None, description="regions to frame")
    points: list[PointArgument] | None = Field(None, description="points to mark")
    labels: list[Label] | None = Field(
        None, description="a short label for each box, then for each point; default 1, 2, 3, ..."
    )
    box: BoxArgument | None = Field(None, description="the region to show, default all of the image")

    @model_validator(mode="after")
    def _marks(self) -> MarkArguments:
        count = len(self.boxes or []) + len(self.points or [])
        if count == 0:
            raise ValueError("give boxes or points to mark")
        if count > MAX_MARKS:
            raise OperationError(f"{count} marks, at most {MAX_MARKS}", code="limit")
        if self.labels is not None and len(self.labels) != count:
            raise ValueError(f"{len(self.labels)} labels for {count} boxes and points")
        return self


class Mark(Operation):
    name = "mark"
    description = (
        "Draw boxes and points with labels on an image, to look at several places at once, to count, or to "
        "check where something is. Only this view has the marks."
    )
    Arguments = MarkArguments
    quick = True

    @classmethod
    def run(cls, arguments: MarkArguments, target: Target, scene: Scene) -> Result:
        """One drawn view; ``data`` keeps the marks, 0..1 of the whole picture."""
        box = clamp(arguments.box or WHOLE)
        boxes, points = [clamp(b) for b in arguments.boxes or []], arguments.points or []
        labels = arguments.labels or [str(number) for number in range(1, len(boxes) + len(points) + 1)]
        x0, y0, x1, y1 = box
        outside = [
            label
            for label, place in zip(labels, [*boxes, *((*point, *point) for point in points)], strict=True)
            if place[0] > x1 or place[2] < x0 or place[1] > y1 or place[3] < y0
        ]
        if outside:
            raise OperationError(f"the mark {outside[0]} lies outside the shown region", code="out_of_range")
        data: dict[str, Any] = {
            "boxes": [
                {"box": list(target.to_root(b)), "label": label}
                for b, label in zip(boxes, labels, strict=False)
            ],
            "points": [
                {"point": list(target.to_root((*point, 1.0, 1.0))[:2]), "label": label}
                for point, label in zip(points, labels[len(boxes) :], strict=True)
            ],
        }
        text = f"{len(labels)} mark{'s' if len(labels) > 1 else ''} drawn; {target.id} itself has none"
        return Result(text, [scene.show(target, box, data)], data)
