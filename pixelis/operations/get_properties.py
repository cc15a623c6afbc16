"""GET_PROPERTIES: color, texture, shape, size, position and appearance of an object or a region."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import cv2
import numpy as np
from pydantic import model_validator
from pydantic.json_schema import SkipJsonSchema

from pixelis.errors import OperationError
from pixelis.operations import colours, geometry, masks, shapes
from pixelis.operations.masks import Mask
from pixelis.operations.operation import BoxArgument, Operation, OperationArguments, Result, Scene, Target
from pixelis.operations.pixel_budget import shrink

Group = Literal["color", "texture", "shape", "size", "position", "appearance"]
GROUPS: tuple[Group, ...] = ("color", "texture", "shape", "size", "position", "appearance")

MAX_SIDE = 512
SAMPLE = 40_000
CATEGORIES = ((0.01, "tiny"), (0.05, "small"), (0.2, "medium"), (0.5, "large"), (math.inf, "very_large"))
GREY_LEVELS = 32
DATA_ONLY = {
    "variance",
    "histogram",
    "energy",
    "correlation",
    "uniform_patterns",
    "convexity",
    "normalised",
    "centroid",
}
SELF_EVIDENT = {"name", "names", "ratio", "bool", "count", "0..1"}

Values = dict[str, tuple[Any, str] | tuple[Any, str, int]]
"""Value, unit, and for a float its number of digits, by default 3."""


class PropertiesArguments(OperationArguments):
    """At most one of ``object`` (an id), ``box`` and ``mask`` (a COCO code); default: all."""

    object: str | None = None
    box: BoxArgument | None = None
    mask: SkipJsonSchema[dict[str, Any] | None] = None
    groups: list[Group] | None = None

    @model_validator(mode="after")
    def _one_region(self) -> PropertiesArguments:
        if sum(argument is not None for argument in (self.object, self.box, self.mask)) > 1:
            raise ValueError("give only one of object, box and mask")
        if self.groups is not None and not self.groups:
            raise ValueError("groups is empty, omit it to measure all")
        return self


@dataclass(frozen=True)
class Selection:
    """The measured pixels: a mask (``outlined``) or a rectangle of a picture uint8 [H, W, 3]."""

    picture: np.ndarray
    mask: Mask
    outlined: bool

    @cached_property
    def pixels(self) -> np.ndarray:
        left, top, right, bottom = self.mask.edges
        return self.picture[top:bottom, left:right]

    @cached_property
    def inside(self) -> np.ndarray:
        """uint8 [h, w], 1 inside."""
        return self.mask.inside.view(np.uint8)

    @cached_property
    def scaled(self) -> tuple[np.ndarray, np.ndarray]:
        """The window and its mask with at most MAX_SIDE pixels a side: uint8 [h, w, 3], bool [h, w]."""
        shares = shrink(self.inside * np.uint8(255), MAX_SIDE)
        inside = shares > 127 if (shares > 127).any() else shares > 0
        return shrink(self.pixels, MAX_SIDE), inside

    @cached_property
    def grey(self) -> np.ndarray:
        return cv2.cvtColor(self.scaled[0], cv2.COLOR_RGB2GRAY)

    @cached_property
    def core(self) -> np.ndarray:
        """The scaled mask without its border, where a 3 x 3 window sees the background, if any is left."""
        inside = self.scaled[1]
        core = (
            cv2.erode(np.pad(inside.astype(np.uint8), 1, mode="edge"), np.ones((3, 3), np.uint8))[1:-1, 1:-1]
            > 0
        )
        return core if core.any() else inside


class GetProperties(Operation):
    """Measures pixels; does not classify objects."""

    name = "get_properties"
    description = (
        "Measure an object that segment_object_at or track_object found, a box, or a whole image: color, "
        "texture, shape, size, position and appearance, with units. Choose groups to read less."
    )
    Arguments = PropertiesArguments

    @classmethod
    def run(cls, arguments: PropertiesArguments, target: Target, scene: Scene) -> Result:
        """Return text and ``data["properties"]``: {group: {name: {"value", "unit"}}}."""
        target, selection, title = _select(arguments, target, scene)
        groups = arguments.groups or [g for g in GROUPS if g != "shape" or selection.outlined]
        measured: dict[Group, dict[str, dict[str, Any]]] = {}
        for group in (g for g in GROUPS if g in groups):
            measured[group] = {}
            for name, (value, unit, *digits) in MEASURES[group](selection).items():
                if isinstance(value, (float, np.floating)):
                    value = round(float(value), *(digits or [3]))
                measured[group][name] = {"value": value, "unit": unit}
        lines = [title]
        for group, values in measured.items():
            place = ""
            if group == "position":
                place = _place(values["normalised"]["value"], selection, target, scene)
            shown = [
                f"{name.replace('_', ' ')} {_written(entry['value'])}"
                + ("" if entry["unit"] in SELF_EVIDENT else f" {entry['unit']}")
                for name, entry in values.items()
                if name not in DATA_ONLY and entry["value"] is not None
            ]
            lines.append(f"{group}: {place}{', '.join(shown)}")
        if "shape" not in measured and not selection.outlined and len(measured) > 1:
            lines.append("a box has no outline: use segment_object_at to measure an object's shape")
        return Result("\n".join(lines), data={"properties": measured})


def _select(arguments: PropertiesArguments, target: Target, scene: Scene) -> tuple[Target, Selection, str]:
    if arguments.object is not None:
        record = scene.object(arguments.object)
        if (record["root"], record["frame"]) != (target.root, target.frame):
            # The object is elsewhere: take the whole picture or frame that has it.
            if record["root"] not in scene.media:
                raise OperationError(f"the media {str(record['root'])[:20]} is not loaded", code="bad_target")
            target = Target(record["root"], record["root"], scene.media[record["root"]], record["frame"])
        frame = "" if target.frame is None or target.id != target.root else f", frame {target.frame}"
        title = f"{record['kind']} {record['id']} of {target.id}{frame}"
        if record.get("mask") is not None:
            return target, _masked(target, record["mask"]), title
        return target, _boxed(target, geometry.to_pixels(record["box"], *target.picture.shape[1::-1])), title
    if arguments.mask is not None:
        return target, _masked(target, arguments.mask), f"mask on {target.id}"
    selection = _boxed(target, target.pixels(arguments.box or geometry.WHOLE))
    if arguments.box is None:
        return target, selection, f"all of {target.id}"
    place = scene.scale.around(geometry.clamp(arguments.box), target.id)
    return target, selection, f"box {place} of {target.id}"


def _masked(target: Target, code: Any) -> Selection:
    height, width = target.picture.shape[:2]
    return Selection(target.picture, masks.decode(code, height, width), True)


def _boxed(target: Target, edges: masks.Edges) -> Selection:
    left, top, right, bottom = edges
    mask = Mask(np.ones((bottom - top, right - left), bool), left, top, *target.picture.shape[:2])
    return Selection(target.picture, mask, False)


def color(selection: Selection) -> Values:
    """Mean, variance and histogram of all pixels; dominant colour of a sample; HSV of the scaled copy."""
    mean, deviation = cv2.meanStdDev(selection.pixels, mask=selection.inside)
    pixels, inside = selection.scaled
    sample = pixels[inside]
    sample = sample[np.linspace(0, len(sample) - 1, min(len(sample), SAMPLE)).astype(int)]
    rgb, name, share = colours.dominant(sample)
    hsv = cv2.cvtColor(sample[None].astype(np.float32) / 255, cv2.COLOR_RGB2HSV)[0].astype(np.float64)
    vectors = np.exp(1j * np.radians(hsv[:, 0])) * hsv[:, 1] * hsv[:, 2]
    hue = float(np.degrees(np.angle(vectors.mean())) % 360) if abs(vectors.mean()) > 0.01 else None
    counts = [
        cv2.calcHist([selection.pixels], [c], selection.inside, [8], [0, 256]).ravel() / selection.mask.area
        for c in range(3)
    ]
    return {
        "name": (name, "name"),
        "near": (colours.between(np.array(rgb)), "name"),
        "dominant": (rgb, "RGB 0..255"),
        "dominant_share": (share, "ratio"),
        "mean": ([round(v, 3) for v in mean.ravel().tolist()], "RGB 0..255"),
        "variance": ([round(v * v, 3) for v in deviation.ravel().tolist()], "(0..255)^2"),
        "brightness": (hsv[:, 2].mean(), "0..1"),
        "saturation": (hsv[:, 1].mean(), "0..1"),
        "hue": (hue, "deg", 1),
        "histogram": ([[round(v, 5) for v in c.tolist()] for c in counts], "ratio, 8 bins of R, G, B"),
    }


def texture(selection: Selection) -> Values:
    """Grey-level co-occurrence (32 levels, four directions), entropy, edge density, local binary patterns."""
    from skimage.feature import graycomatrix, graycoprops, local_binary_pattern

    grey, inside, core = selection.grey, selection.scaled[1], selection.core
    levels = np.where(inside, grey // (256 // GREY_LEVELS), GREY_LEVELS).astype(np.uint8)
    pairs = graycomatrix(
        levels, [1], [0, np.pi / 4, np.pi / 2, 3 * np.pi / 4], GREY_LEVELS + 1, symmetric=True
    )
    pairs = pairs[:GREY_LEVELS, :GREY_LEVELS].astype(np.float64).sum(axis=(2, 3), keepdims=True)
    pairs /= max(1.0, float(pairs.sum()))
    shares = np.bincount(grey[inside], minlength=256) / np.count_nonzero(inside)
    shares = shares[shares > 0]
    edges = cv2.Canny(grey, 60, 140) > 0
    patterns = local_binary_pattern(grey, 8, 1, "uniform")[core]
    return {
        "contrast": (graycoprops(pairs, "contrast")[0, 0], "squared levels of 32"),
        "homogeneity": (graycoprops(pairs, "homogeneity")[0, 0], "0..1"),
        "energy": (graycoprops(pairs, "energy")[0, 0], "0..1"),
        "correlation": (graycoprops(pairs, "correlation")[0, 0], "-1..1"),
        "entropy": (max(0.0, -float((shares * np.log2(shares)).sum())), "bits"),
        "edge_density": (float(edges[core].mean()), "ratio"),
        "uniform_patterns": (float((patterns <= 8).mean()), "ratio"),
    }


def shape(selection: Selection) -> Values:
    """`shapes.measure`, and the centroid in 0..1 of the whole picture or frame."""
    measures = shapes.measure(selection.mask.inside)
    unit = dict.fromkeys(("perimeter", "rotated_length", "rotated_width"), "px") | {"orientation": "deg"}
    unit |= {"corners": "count", "holes": "count"}
    values = {name: (value, unit.get(name, "ratio"), 4) for name, value in measures.items()}
    return {"centroid": (_centroid(selection), "0..1"), **values}


def size(selection: Selection) -> Values:
    """Areas and lengths; the category depends on the share of the whole picture."""
    area, (height, width) = selection.mask.area, selection.mask.inside.shape
    share = area / (selection.mask.height * selection.mask.width)
    return {
        "area_pixels": (area, "px^2"),
        "relative_size": (share, "ratio", 6),
        "bbox_width": (width, "px"),
        "bbox_height": (height, "px"),
        "diagonal": (math.hypot(width, height), "px"),
        "equivalent_diameter": (math.sqrt(4 * area / math.pi), "px"),
        "category": (next(name for bound, name in CATEGORIES if share < bound), "name"),
    }


def position(selection: Selection) -> Values:
    """In the whole picture or frame; distances from the centre are in half diagonals (1 is a corner)."""
    x, y = _centroid(selection)
    height, width = selection.mask.height, selection.mask.width
    left, top, right, bottom = selection.mask.edges
    distance = math.hypot((x - 0.5) * width, (y - 0.5) * height) / (math.hypot(width, height) / 2)
    gaps = {"left": left, "top": top, "right": width - right, "bottom": height - bottom}
    nearest = min(gaps, key=lambda side: gaps[side])
    return {
        "centroid": ([round(x * width, 2), round(y * height, 2)], "px"),
        "normalised": ([x, y], "0..1"),
        "quadrant": (f"{'upper' if y < 0.5 else 'lower'} {'left' if x < 0.5 else 'right'}", "name"),
        "distance_from_center": (distance, "half diagonals", 4),
        "is_centered": (distance < 0.1, "bool"),
        "nearest_edge": (nearest, "name"),
        "edge_distance": (gaps[nearest], "px"),
        "touches_edge": ([side for side, gap in gaps.items() if gap == 0], "names"),
    }


def appearance(selection: Selection) -> Values:
    """Variance of the Laplacian, deviation of the luma, and 1 - blur (Crete et al., 2007)."""
    from skimage.measure import blur_effect

    grey = selection.grey
    laplacian = cv2.Laplacian(grey, cv2.CV_64F, borderType=cv2.BORDER_REFLECT)[selection.core]
    spread = float(grey[selection.scaled[1]].std())
    # Blur is measured as the loss of detail by blurring again: it needs some detail and some room.
    focus = 1 - float(blur_effect(grey, h_size=5)) if min(grey.shape) >= 12 and grey.std() > 1 else None
    return {
        "sharpness": (float(laplacian.var()), "(0..255)^2", 1),
        "contrast": (spread / 255, "0..0.5"),
        "focus": (focus if focus is None or math.isfinite(focus) else None, "0..1"),
    }


MEASURES: dict[Group, Callable[[Selection], Values]] = {
    "color": color,
    "texture": texture,
    "shape": shape,
    "size": size,
    "position": position,
    "appearance": appearance,
}


def _centroid(selection: Selection) -> list[float]:
    x, y = shapes.centroid(selection.mask.inside)
    return [
        round((selection.mask.left + x) / selection.mask.width, 6),
        round((selection.mask.top + y) / selection.mask.height, 6),
    ]


def _place(centre: tuple[float, float], selection: Selection, target: Target, scene: Scene) -> str:
    x, y = target.from_root((*centre, 2.0, 2.0))[:2]
    if not (0 <= x <= 1 and 0 <= y <= 1):
        return f"outside {target.id}, "
    try:
        center, box = scene.scale.write((x, y), target.id), scene.place(selection.mask.box, target)
        return f"center {center}, box {box} of {target.id}, "
    except OperationError:  # the scale has no numbers for a view that was never shown
        return ""


def _written(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_written, value)) or "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value).lower()
