"""COMPARE: show two regions side by side and measure how they differ."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from pydantic import Field

from pixelis.errors import OperationError
from pixelis.operations.geometry import WHOLE, clamp, compose
from pixelis.operations.operation import (
    BoxArgument,
    Operation,
    OperationArguments,
    Result,
    Scene,
    Target,
    View,
)
from pixelis.operations.pixel_budget import shrink
from pixelis.records import Box

MAX_SIDE = 768
MAX_STRETCH = 1.5
"""Ratio of aspect ratios up to which the second view takes the size of the first."""
VISIBLE = 8.0
"""Delta E of a small patch that counts as a difference; about 2 is just noticeable."""
MAX_PLACES, MIN_SHARE = 5, 0.03
"""Most places reported, and their least sum of differences as a share of the largest."""


class CompareArguments(OperationArguments):
    box: BoxArgument | None = Field(None, description="the first region, default all of the target")
    other: str | None = Field(None, description="id of the image to compare with, default the target")
    other_box: BoxArgument | None = Field(None, description="the second region, default all of that image")


class Compare(Operation):
    """Measures pixels; does not judge whether two regions show the same object."""

    name = "compare"
    description = (
        "Compare a region of an image with another region, of the same or another image (other, "
        "other_box). Shows both in one size and measures the differences in color, structure and size; for "
        "regions of one size also where they differ most."
    )
    Arguments = CompareArguments

    @classmethod
    def run(cls, arguments: CompareArguments, target: Target, scene: Scene) -> Result:
        """Two views and the measured differences.

        data: ``delta_e`` of the mean colours (CIEDE2000), ``histogram_correlation`` (-1..1, 8 x 8 x 8 bins of
        RGB), ``structural_similarity`` (-1..1, of the luma at one size; None below 7 pixels), ``area_ratio``
        (second / first), and for equal sizes ``boxes`` that differ, 0..1 of the whole first picture.
        """
        other = target if arguments.other is None else scene.target(arguments.other)
        box, other_box = clamp(arguments.box or WHOLE), clamp(arguments.other_box or WHOLE)
        edges, other_edges = target.pixels(box), other.pixels(other_box)
        if (target.root, target.frame, edges) == (other.root, other.frame, other_edges):
            raise OperationError(
                "this compares a region with itself: give other, or other_box", code="bad_arguments"
            )
        first, second = target.crop(box), other.crop(other_box)
        measures, boxes = _measure(first, second)
        boxes = [compose(box, place) for place in boxes]
        structure = measures["structural_similarity"]
        text = (
            f"mean colors differ by {measures['delta_e']:.1f} Delta E (2 is just visible)\n"
            f"histogram correlation {measures['histogram_correlation']:.2f}, structural similarity "
            f"{'not measured, too small' if structure is None else f'{structure:.2f}'} (1 is equal)\n"
            f"size {first.shape[1]}x{first.shape[0]} px and {second.shape[1]}x{second.shape[0]} px, "
            f"the second has {measures['area_ratio']:.3g} times the area"
        )
        if boxes:
            places = ", ".join(str(scene.scale.around(place, target.id)) for place in boxes)
            share = 100 * measures["differing_share"]
            text += f"\n{share:.2g} % of the pixels differ visibly; most at {places} of {target.id}"
        elif first.shape == second.shape:
            text += "\nno visible difference at any place"
        measures["boxes"] = [list(target.to_root(place)) for place in boxes]
        source = None if arguments.other is None else other.id
        view, other_view = scene.fit_crop(first), scene.fit_crop(second)
        stretch = first.shape[0] * second.shape[1] / (first.shape[1] * second.shape[0])
        if view.shape != other_view.shape and 1 / MAX_STRETCH <= stretch <= MAX_STRETCH:
            small = shrink(second, max(view.shape[:2]))
            other_view = cv2.resize(small, view.shape[1::-1], interpolation=cv2.INTER_CUBIC)
        return Result(text, [View(view, box), View(other_view, other_box, source=source)], measures)


def _measure(first: np.ndarray, second: np.ndarray) -> tuple[dict[str, Any], list[Box]]:
    """The measures, and for regions of equal size the places where they differ, 0..1."""
    from skimage.color import deltaE_ciede2000, rgb2lab
    from skimage.metrics import structural_similarity

    a, b = shrink(first, MAX_SIDE), shrink(second, MAX_SIDE)
    labs = [rgb2lab(region) for region in (a, b)]
    means = [lab.reshape(-1, 3).mean(axis=0) for lab in labs]
    first_bins, second_bins = (
        cv2.calcHist([region], [0, 1, 2], None, [8, 8, 8], [0, 256] * 3) for region in (a, b)
    )
    size = min(a.shape[1], b.shape[1]), min(a.shape[0], b.shape[0])
    greys = [
        cv2.cvtColor(cv2.resize(region, size, interpolation=cv2.INTER_AREA), cv2.COLOR_RGB2GRAY)
        for region in (a, b)
    ]
    similarity = float(structural_similarity(*greys)) if min(size) >= 7 else None
    areas = [region.shape[0] * region.shape[1] for region in (first, second)]
    measures = {
        "delta_e": round(float(deltaE_ciede2000(*means)), 2),
        "histogram_correlation": round(
            float(cv2.compareHist(first_bins, second_bins, cv2.HISTCMP_CORREL)), 3
        ),
        "structural_similarity": similarity if similarity is None else round(similarity, 3),
        "area_ratio": round(areas[1] / areas[0], 4),
        "sizes": [[region.shape[1], region.shape[0]] for region in (first, second)],
    }
    if first.shape != second.shape:
        return measures, []
    smooth = [rgb2lab(cv2.GaussianBlur(region, (0, 0), 1.0)) for region in (a, b)]
    difference = deltaE_ciede2000(*smooth).astype(np.float32)
    measures["differing_share"] = round(float((difference > VISIBLE).mean()), 4)
    return measures, _places(difference)


def _places(difference: np.ndarray) -> list[Box]:
    visible = (difference > VISIBLE).astype(np.uint8)
    reach = max(3, round(max(visible.shape) / 64)) | 1
    joined = cv2.morphologyEx(visible, cv2.MORPH_CLOSE, np.ones((reach, reach), np.uint8))
    count, labels, stats, _ = cv2.connectedComponentsWithStats(joined)
    sums = np.bincount(labels.ravel(), weights=(difference * visible).ravel(), minlength=count)
    sums[0] = 0.0
    # Specks beside a large difference come from lossy compression.
    order = [int(i) for i in np.argsort(-sums, kind="stable") if sums[i] > MIN_SHARE * sums.max()]
    height, width = difference.shape
    return [
        (x / width, y / height, (x + w) / width, (y + h) / height)
        for x, y, w, h in stats[order[:MAX_PLACES], :4].tolist()
    ]
