"""SEGMENT_OBJECT_AT: the mask of the object at a point or in a box."""

from __future__ import annotations

import hashlib
from typing import Any

from pydantic import model_validator

from pixelis.config import ToolboxConfig
from pixelis.errors import BadInput, OperationError
from pixelis.operations import geometry, segmenters
from pixelis.operations.draw import annotate
from pixelis.operations.masks import Mask, Segment
from pixelis.operations.operation import BoxArgument, Operation, OperationArguments, PointArgument, Result, Scene, Shown, Target
from pixelis.operations.pixel_budget import fit
from pixelis.operations.segmenters import segment
from pixelis.records import Box

TRUST = {"grabcut": "grabcut, from colours and edges alone: approximate", "sam": "sam"}


class SegmentArguments(OperationArguments):
    """``point``: a place on the object, or ``box``: a region around it, 0..1 of the target; exactly one of them."""

    point: PointArgument | None = None
    box: BoxArgument | None = None

    @model_validator(mode="after")
    def _one_place(self) -> SegmentArguments:
        if (self.point is None) == (self.box is None):
            raise ValueError("give a point on the object or a box around it, one of the two")
        return self


class SegmentObjectAt(Operation):
    """Finds one object; ``toolbox.segmenter`` chooses the back-end."""

    name = "segment_object_at"
    description = (
        "Find the outline of the object at a point, or of the object in a box, of an image. Give exactly one of the two. "
        "Returns the object's id (for get_properties and track_object), its box, its share of the image, and the outline drawn."
    )
    Arguments = SegmentArguments

    @classmethod
    def ready(cls, settings: ToolboxConfig) -> None:
        """The checkpoint of ``toolbox.segmenter`` can be loaded."""
        segmenters.check(settings)

    @classmethod
    def run(cls, arguments: SegmentArguments, target: Target, scene: Scene) -> Result:
        """One object: text, its record in ``data["objects"]`` with the mask over the whole picture, and an overlay.

        A mask from a point stays within the target. OperationError ``out_of_range``, ``too_small``, ``nothing_found``,
        ``not_a_picture`` for a clip.
        """
        picture = target.picture
        region = target.pixels()
        box = None if arguments.box is None else target.pixels(arguments.box)
        point = None if arguments.point is None else _pixel(arguments.point, target)
        found = segment(picture, region, point, box, scene.settings, scene.seed)
        record = describe(found, target)
        return Result(
            _text(record, found.mask, target, scene), [_overlay(record, found.mask, target, scene)], {"objects": [record]}
        )


def describe(found: Segment, target: Target) -> dict[str, Any]:
    """The record of an object: plain values, places 0..1 of the whole picture or frame. Its id follows from what it is."""
    code = found.mask.encode()
    key = f"{target.root}:{target.frame}:{code['size']}:{code['counts']}"
    return {
        "id": hashlib.sha256(key.encode()).hexdigest()[:8],
        "kind": "object",
        "root": target.root,
        "frame": target.frame,
        "box": list(found.mask.box),
        "area": found.mask.area,
        "score": found.score,
        "method": found.method,
        "mask": code,
    }


def _pixel(point: tuple[float, float], target: Target) -> tuple[float, float]:
    x, y = geometry.point_in(target.box, point)
    height, width = target.picture.shape[:2]
    return x * width, y * height


def _text(record: dict[str, Any], mask: Mask, target: Target, scene: Scene) -> str:
    share = mask.area / (mask.height * mask.width)
    whole = "image" if target.frame is None else "frame"
    numbers = scene.scale.around(_within(target.from_root(mask.box)), target.id)
    return (
        f"object {record['id']}\n"
        f"box {numbers} of {target.id}\n"
        f"area {percent(share)} of the whole {whole} ({mask.area} px)\n"
        f"score {record['score']:.2f} ({TRUST[record['method']]})"
    )


def percent(share: float) -> str:
    """A share in per cent with two digits that count: 0.34 %, 3.4 %, 34 %."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 9.5 else f"{value:.1f} %" if value >= 0.95 else f"{value:.2g} %"


def _within(box: Box) -> Box:
    """A box held inside the target, against the last digit of its composition."""
    x0, y0, x1, y1 = (min(max(v, 0.0), 1.0) for v in box)
    return x0, y0, x1, y1


def _overlay(record: dict[str, Any], mask: Mask, target: Target, scene: Scene) -> Shown:
    """The object and a quarter of its size around it, within the target: the mask tinted, its outline drawn."""
    picture = target.picture
    bounds = target.pixels()
    left, top, right, bottom = mask.edges
    margin = max(8, (right - left) // 4, (bottom - top) // 4)
    # A strip shows nothing and fits no budget: the view is at least a quarter as wide as high, and the other way round.
    x0, x1 = _span(left, right, max(2 * margin, (bottom - top) // 4), bounds[0], bounds[2])
    y0, y1 = _span(top, bottom, max(2 * margin, (right - left) // 4), bounds[1], bounds[3])
    height, width = picture.shape[:2]
    shown = (x0 / width, y0 / height, x1 / width, y1 / height)
    try:
        view = fit(picture[y0:y1, x0:x1], scene.budget, scene.multiple)
    except BadInput as error:
        raise OperationError(error.message, code="bad_box") from None
    # Neither box nor id is drawn: in a small view they would hide the object.
    return Shown(annotate(view, {"objects": [{"mask": record["mask"]}]}, shown), _within(target.from_root(shown)))


def _span(start: int, stop: int, more: int, least: int, most: int) -> tuple[int, int]:
    return max(least, start - more // 2), min(most, stop + more // 2)
