"""SEGMENT_OBJECT_AT: the mask of the object at a point or in a box."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import model_validator

from pixelis.config import ToolboxConfig
from pixelis.operations import geometry, mobilenet, sam
from pixelis.operations.draw import annotate
from pixelis.operations.masks import Edges, Mask, Segment
from pixelis.operations.operation import (
    BoxArgument,
    Operation,
    OperationArguments,
    PointArgument,
    Result,
    Scene,
    Target,
    View,
)

METHODS = {"mobilenet": "mobilenet, a small network: approximate", "sam": "sam"}
UNSURE = 0.5


class SegmentArguments(OperationArguments):
    point: PointArgument | None = None
    box: BoxArgument | None = None

    @model_validator(mode="after")
    def _one_place(self) -> SegmentArguments:
        if (self.point is None) == (self.box is None):
            raise ValueError("give either a point on the object or a box around it")
        return self


class SegmentObjectAt(Operation):
    name = "segment_object_at"
    description = (
        "Find the outline of the object at a point, or of the object in a box, of an image. Give exactly "
        "one of the two. Returns the object's id (for get_properties and track_object), its box, its share "
        "of the image, and the outline drawn."
    )
    Arguments = SegmentArguments

    @classmethod
    def ready(cls, settings: ToolboxConfig) -> None:
        if settings.segmenter == "mobilenet":
            mobilenet.load()
        else:
            sam.load(settings.segmenter)

    @classmethod
    def run(cls, arguments: SegmentArguments, target: Target, scene: Scene) -> Result:
        """Return one object with its mask in ``data["objects"]``, and an overlay.

        A mask from a point stays within the target.
        """
        picture, region, point, box = target.picture, target.pixels(), None, None
        if arguments.point is not None:
            x, y, _, _ = target.to_root((*arguments.point, 1, 1))
            point = x * picture.shape[1], y * picture.shape[0]
        else:
            box = target.pixels(arguments.box or geometry.WHOLE)
        segmented = segment(picture, region, point, box, scene.settings, scene.seed)
        record, mask = describe(segmented, target), segmented.mask
        share = percent(mask.area / (mask.height * mask.width))
        text = (
            f"object {record['id']}\n"
            f"box {scene.place(mask.box, target)} of {target.id}\n"
            f"area {share} of the whole {'image' if target.frame is None else 'frame'} ({mask.area} px)\n"
            f"score {record['score']:.2f} ({METHODS[record['method']]})"
            + ("; unsure: check the outline, give a box, or zoom in" if record["score"] < UNSURE else "")
        )
        return Result(text, [_overlay(record, mask, target, scene)], {"objects": [record]})


def segment(
    picture: np.ndarray,
    region: Edges,
    point: tuple[float, float] | None,
    box: Edges | None,
    settings: ToolboxConfig,
    seed: int,
) -> Segment:
    """Segment the object at a point or in a box (pixels of the picture) with ``toolbox.segmenter``.

    Raises OperationError ``nothing_found``; MissingFile or BadConfig for an unusable checkpoint.
    """
    if settings.segmenter == "mobilenet":
        return mobilenet.segment(picture, region, point, box, seed)
    return sam.segment(picture, region, point, box, settings.segmenter)


def describe(segment: Segment, target: Target) -> dict[str, Any]:
    """The record of an object, 0..1 of the whole picture or frame; its id hashes media and mask."""
    code = segment.mask.encode()
    key = f"{target.root}:{target.frame}:{code['size']}:{code['counts']}"
    properties = {"area": segment.mask.area, "score": segment.score, "method": segment.method, "mask": code}
    return target.record(key, box=list(segment.mask.box), **properties)


def percent(share: float) -> str:
    """A share in per cent with two significant digits: 0.34 %, 3.4 %, 34 %."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 9.5 else f"{value:.1f} %" if value >= 0.95 else f"{value:.2g} %"


def _overlay(record: dict[str, Any], mask: Mask, target: Target, scene: Scene) -> View:
    picture = target.picture
    bounds = target.pixels()
    left, top, right, bottom = mask.edges
    margin = max(8, (right - left) // 4, (bottom - top) // 4)
    # A thin strip fits no budget: each side of the view is at least a quarter of the other.
    across, down = max(2 * margin, (bottom - top) // 4) // 2, max(2 * margin, (right - left) // 4) // 2
    x0, x1 = max(bounds[0], left - across), min(bounds[2], right + across)
    y0, y1 = max(bounds[1], top - down), min(bounds[3], bottom + down)
    height, width = picture.shape[:2]
    box = (x0 / width, y0 / height, x1 / width, y1 / height)
    view = scene.fit_crop(picture[y0:y1, x0:x1])
    # Neither box nor id is drawn: in a small view they would hide the object.
    shown = geometry.clamp(target.from_root(box))
    return View(annotate(view, {"objects": [{"mask": record["mask"]}]}, box), shown)
