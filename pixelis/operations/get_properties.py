"""GET_PROPERTIES: colour, texture, shape, size, position and appearance of an object, a region or a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
from pixelis.operations.segment_object_at import percent

Group = Literal["color", "texture", "shape", "size", "position", "appearance"]
GROUPS: tuple[Group, ...] = ("color", "texture", "shape", "size", "position", "appearance")

CLOSE = 512
"""Longest side of the copy on which texture, hue and sharpness are measured."""
SAMPLE = 40_000
"""Most pixels that are asked for their colour's name."""
CATEGORIES = ((0.01, "tiny"), (0.05, "small"), (0.2, "medium"), (0.5, "large"), (math.inf, "very_large"))
GREY_LEVELS = 32

Values = dict[str, dict[str, Any]]


class PropertiesArguments(OperationArguments):
    """``object``: id of an object or track, ``box``: a region 0..1 of the target, or ``mask``: a COCO code; none is all of it."""

    object: str | None = None
    box: BoxArgument | None = None
    mask: SkipJsonSchema[dict[str, Any] | None] = None
    groups: list[Group] | None = None

    @model_validator(mode="after")
    def _one_thing(self) -> PropertiesArguments:
        if sum(given is not None for given in (self.object, self.box, self.mask)) > 1:
            raise ValueError("give an object, a box or a mask, one of them")
        if self.groups is not None and not self.groups:
            raise ValueError("groups is empty, leave it out for all")
        return self


@dataclass(frozen=True)
class Thing:
    """What is measured: a mask (``outlined``) or a rectangle over a picture uint8 [H, W, 3]."""

    picture: np.ndarray
    mask: Mask
    outlined: bool

    @cached_property
    def pixels(self) -> np.ndarray:
        """The window of the picture that holds it."""
        left, top, right, bottom = self.mask.edges
        return self.picture[top:bottom, left:right]

    @cached_property
    def inside(self) -> np.ndarray:
        """uint8 [h, w], 1 inside."""
        return self.mask.inside.view(np.uint8)

    @cached_property
    def close(self) -> tuple[np.ndarray, np.ndarray]:
        """The window and its mask at no more than CLOSE pixels a side: uint8 [h, w, 3], bool [h, w]."""
        height, width = self.inside.shape
        scale = min(1.0, CLOSE / max(height, width))
        if scale == 1.0:
            return self.pixels, self.mask.inside
        size = max(1, round(width * scale)), max(1, round(height * scale))
        shares = cv2.resize(self.inside * np.uint8(255), size, interpolation=cv2.INTER_AREA)
        inside = shares > 127 if (shares > 127).any() else shares > 0
        return cv2.resize(self.pixels, size, interpolation=cv2.INTER_AREA), inside

    @cached_property
    def grey(self) -> np.ndarray:
        """Luma of the close copy, uint8 [h, w]."""
        return cv2.cvtColor(self.close[0], cv2.COLOR_RGB2GRAY)

    @cached_property
    def core(self) -> np.ndarray:
        """The close mask without its rim, where a 3 x 3 window would see the background; all of it where nothing else is left."""
        inside = self.close[1]
        core = cv2.erode(np.pad(inside.astype(np.uint8), 1, mode="edge"), np.ones((3, 3), np.uint8))[1:-1, 1:-1] > 0
        return core if core.any() else inside


class GetProperties(Operation):
    """Measures pixels; invents nothing."""

    name = "get_properties"
    description = (
        "Measure an object that segment_object_at or track_object found, a box, or a whole image: color, texture, shape, size, "
        "position and appearance, with units. Choose groups to read less."
    )
    Arguments = PropertiesArguments

    @classmethod
    def run(cls, arguments: PropertiesArguments, target: Target, scene: Scene) -> Result:
        """Text and ``data["properties"]``: {group: {name: {"value", "unit"}}}; no picture.

        The shape of a box or of a whole picture, which is a rectangle, is measured only when asked for. OperationError
        ``unknown_object``, ``bad_arguments`` (a mask of another size), ``nothing_found`` (an empty mask), ``too_small``.
        """
        target, thing, what = _choose(arguments, target, scene)
        groups = arguments.groups or [g for g in GROUPS if g != "shape" or thing.outlined]
        measured = {group: MEASURES[group](thing) for group in GROUPS if group in groups}
        text = "\n".join([what, *_lines(measured, thing, target, scene)])
        return Result(text, data={"properties": measured})


def _choose(arguments: PropertiesArguments, target: Target, scene: Scene) -> tuple[Target, Thing, str]:
    """The target that holds what is asked for, what it is, and how it is called."""
    if arguments.object is not None:
        record = scene.found(arguments.object)
        target = _home(record, target, scene)
        what = f"{record['kind']} {record['id']} of {target.id}" + _at(target)
        if record.get("mask") is not None:
            return target, _masked(target, record["mask"]), what
        return target, _boxed(target, geometry.to_pixels(record["box"], *target.picture.shape[1::-1])), what
    if arguments.mask is not None:
        return target, _masked(target, arguments.mask), f"mask on {target.id}" + _at(target)
    edges = target.pixels(arguments.box or geometry.WHOLE)
    thing = _boxed(target, edges)
    if arguments.box is None:
        return target, thing, f"all of {target.id}"
    return target, thing, f"box {scene.scale.around(geometry.clamp(arguments.box), target.id)} of {target.id}"


def _home(record: Mapping[str, Any], target: Target, scene: Scene) -> Target:
    """Where an object was found: the target itself when it shows the same picture or frame, else the whole of that."""
    if (record["root"], record["frame"]) == (target.root, target.frame):
        return target
    if record["root"] not in scene.media:
        raise OperationError(f"the media {str(record['root'])[:20]} is not loaded", code="bad_target")
    return Target(record["root"], record["root"], scene.media[record["root"]], record["frame"])


def _at(target: Target) -> str:
    return "" if target.frame is None or target.id != target.root else f", frame {target.frame}"


def _masked(target: Target, code: Any) -> Thing:
    height, width = target.picture.shape[:2]
    return Thing(target.picture, masks.decode(code, height, width), True)


def _boxed(target: Target, edges: tuple[int, int, int, int]) -> Thing:
    left, top, right, bottom = edges
    mask = Mask(np.ones((bottom - top, right - left), bool), left, top, *target.picture.shape[:2])
    return Thing(target.picture, mask, False)


def _value(value: Any, unit: str, digits: int = 3) -> dict[str, Any]:
    return {"value": round(float(value), digits) if isinstance(value, (float, np.floating)) else value, "unit": unit}


def color(thing: Thing) -> Values:
    """Mean, variance and histogram of all pixels, exactly; dominant colour of a sample; HSV of the close copy."""
    mean, deviation = cv2.meanStdDev(thing.pixels, mask=thing.inside)
    pixels, inside = thing.close
    sample = pixels[inside]
    sample = sample[np.linspace(0, len(sample) - 1, min(len(sample), SAMPLE)).astype(int)]
    rgb, name, share = colours.dominant(sample)
    hsv = cv2.cvtColor(sample[None].astype(np.float32) / 255, cv2.COLOR_RGB2HSV)[0].astype(np.float64)
    turn = np.exp(1j * np.radians(hsv[:, 0])) * hsv[:, 1] * hsv[:, 2]
    hue = float(np.degrees(np.angle(turn.mean())) % 360) if abs(turn.mean()) > 0.01 else None
    counts = [cv2.calcHist([thing.pixels], [c], thing.inside, [8], [0, 256]).ravel() / thing.mask.area for c in range(3)]
    return {
        "name": _value(name, "name"),
        "dominant": _value(rgb, "RGB 0..255"),
        "dominant_share": _value(share, "ratio"),
        "mean": _value([round(v, 3) for v in mean.ravel().tolist()], "RGB 0..255"),
        "variance": _value([round(v * v, 3) for v in deviation.ravel().tolist()], "(0..255)^2"),
        "brightness": _value(hsv[:, 2].mean(), "0..1"),
        "saturation": _value(hsv[:, 1].mean(), "0..1"),
        "hue": _value(hue, "deg", 1),
        "histogram": _value([[round(v, 5) for v in c.tolist()] for c in counts], "ratio, 8 bins of R, G, B"),
    }


def texture(thing: Thing) -> Values:
    """Grey-level co-occurrence (32 levels, neighbours in four directions, inside only), entropy, edges, local binary patterns."""
    from skimage.feature import graycomatrix, graycoprops, local_binary_pattern

    grey, inside, core = thing.grey, thing.close[1], thing.core
    levels = np.where(inside, grey // (256 // GREY_LEVELS), GREY_LEVELS).astype(np.uint8)
    pairs = graycomatrix(levels, [1], [0, np.pi / 4, np.pi / 2, 3 * np.pi / 4], GREY_LEVELS + 1, symmetric=True)
    pairs = pairs[:GREY_LEVELS, :GREY_LEVELS].astype(np.float64).sum(axis=(2, 3), keepdims=True)
    pairs /= max(1.0, float(pairs.sum()))
    found = {name: float(graycoprops(pairs, name)[0, 0]) for name in ("contrast", "homogeneity", "energy", "correlation")}
    shares = np.bincount(grey[inside], minlength=256) / np.count_nonzero(inside)
    shares = shares[shares > 0]
    edges = cv2.Canny(grey, 60, 140) > 0
    patterns = local_binary_pattern(grey, 8, 1, "uniform")[core]
    return {
        "contrast": _value(found["contrast"], "squared levels of 32"),
        "homogeneity": _value(found["homogeneity"], "0..1"),
        "energy": _value(found["energy"], "0..1"),
        "correlation": _value(found["correlation"], "-1..1"),
        "entropy": _value(max(0.0, -float((shares * np.log2(shares)).sum())), "bits"),
        "edge_density": _value(float(edges[core].mean()), "ratio"),
        "uniform_patterns": _value(float((patterns <= 8).mean()), "ratio"),
    }


def shape(thing: Thing) -> Values:
    """See ``shapes.measure``; the centroid in 0..1 of the whole picture or frame."""
    found = shapes.measure(thing.mask.inside)
    unit = dict.fromkeys(("perimeter", "rotated_length", "rotated_width"), "px") | {"orientation": "deg"}
    unit |= {"corners": "count", "holes": "count"}
    values = {name: _value(value, unit.get(name, "ratio"), 4) for name, value in found.items() if name not in ("x", "y")}
    return {"centroid": _value(_centroid(thing), "0..1"), **values}


def size(thing: Thing) -> Values:
    """Pixels, shares and lengths; the category by the share of the whole picture."""
    area, (height, width) = thing.mask.area, thing.mask.inside.shape
    share = area / (thing.mask.height * thing.mask.width)
    return {
        "area_pixels": _value(area, "px^2"),
        "relative_size": _value(share, "ratio", 6),
        "bbox_width": _value(width, "px"),
        "bbox_height": _value(height, "px"),
        "diagonal": _value(math.hypot(width, height), "px"),
        "equivalent_diameter": _value(math.sqrt(4 * area / math.pi), "px"),
        "category": _value(next(name for bound, name in CATEGORIES if share < bound), "name"),
    }


def position(thing: Thing) -> Values:
    """Where it is in the whole picture or frame; distances from the centre are in half diagonals (1 is a corner)."""
    x, y = _centroid(thing)
    height, width = thing.mask.height, thing.mask.width
    left, top, right, bottom = thing.mask.edges
    away = math.hypot((x - 0.5) * width, (y - 0.5) * height) / (math.hypot(width, height) / 2)
    gaps = {"left": left, "top": top, "right": width - right, "bottom": height - bottom}
    nearest = min(gaps, key=lambda side: gaps[side])
    return {
        "centroid": _value([round(x * width, 2), round(y * height, 2)], "px"),
        "normalised": _value([x, y], "0..1"),
        "quadrant": _value(f"{'upper' if y < 0.5 else 'lower'} {'left' if x < 0.5 else 'right'}", "name"),
        "distance_from_center": _value(away, "half diagonals", 4),
        "is_centered": _value(away < 0.1, "bool"),
        "nearest_edge": _value(nearest, "name"),
        "edge_distance": _value(gaps[nearest], "px"),
        "touches_edge": _value([side for side, gap in gaps.items() if gap == 0], "names"),
    }


def appearance(thing: Thing) -> Values:
    """Sharpness: variance of the Laplacian. Contrast: deviation of the grey. Focus: 1 - blur (Crete et al., 2007)."""
    from skimage.measure import blur_effect

    grey = thing.grey
    curved = cv2.Laplacian(grey, cv2.CV_32F, borderType=cv2.BORDER_REFLECT)[thing.core].astype(np.float64)
    spread = float(grey[thing.close[1]].std())
    # Blur is the loss of detail by blurring again: without detail, or without room for it, there is none to lose.
    focus = 1 - float(blur_effect(grey, h_size=5)) if min(grey.shape) >= 12 and grey.std() > 1 else None
    return {
        "sharpness": _value(float(curved.var()), "(0..255)^2", 1),
        "contrast": _value(spread / 255, "0..0.5"),
        "focus": _value(focus if focus is None or math.isfinite(focus) else None, "0..1"),
    }


MEASURES: dict[Group, Callable[[Thing], Values]] = {
    "color": color,
    "texture": texture,
    "shape": shape,
    "size": size,
    "position": position,
    "appearance": appearance,
}


def _centroid(thing: Thing) -> list[float]:
    x, y = shapes.centroid(thing.mask.inside)
    return [round((thing.mask.left + x) / thing.mask.width, 6), round((thing.mask.top + y) / thing.mask.height, 6)]


def _lines(measured: dict[Group, Values], thing: Thing, target: Target, scene: Scene) -> list[str]:
    """What the policy reads of each group; histograms and what follows from others stay in the data."""
    lines = []
    for group, values in measured.items():
        v = {name: entry["value"] for name, entry in values.items()}
        lines += WORDS[group](v)
        if group == "position":
            lines[-1] = _where(v, thing, target, scene) + lines[-1]
    if "shape" not in measured and not thing.outlined and len(measured) > 1:
        lines.append("no outline: segment_object_at gives the object's own")
    return lines


def _where(v: dict[str, Any], thing: Thing, target: Target, scene: Scene) -> str:
    x, y = v["normalised"]
    x, y = target.from_root((x, y, x + 1, y + 1))[:2]
    if not (0 <= x <= 1 and 0 <= y <= 1):
        return f"position: outside of {target.id}; "
    try:
        box = scene.scale.around([min(max(n, 0.0), 1.0) for n in target.from_root(thing.mask.box)], target.id)
        return f"position: center {scene.scale.write((x, y), target.id)}, box {box} of {target.id}; "
    except OperationError:  # a view that was never shown has no numbers in the model's scale
        return "position: "


def _rgb(values: list[float]) -> str:
    return ", ".join(f"{v:.0f}" for v in values)


def _color(v: dict[str, Any]) -> list[str]:
    hue = "no hue" if v["hue"] is None else f"hue {v['hue']:.0f} deg"
    return [
        f"color: {v['name']} ({percent(v['dominant_share'])}), RGB {_rgb(v['dominant'])}; mean RGB {_rgb(v['mean'])}",
        f"  brightness {v['brightness']:.2f}, saturation {v['saturation']:.2f} (0..1), {hue}",
    ]


def _texture(v: dict[str, Any]) -> list[str]:
    return [
        f"texture: entropy {v['entropy']:.2f} bits, edges on {percent(v['edge_density'])}, "
        f"homogeneity {v['homogeneity']:.2f} (0..1), contrast {v['contrast']:.2f} levels^2"
    ]


def _shape(v: dict[str, Any]) -> list[str]:
    axis = "no main axis" if v["orientation"] is None else f"main axis {v['orientation']:.0f} deg counter-clockwise from right"
    corners = "round" if v["corners"] == 0 else f"{v['corners']} corners"
    return [
        f"shape: {corners}, {v['holes']} holes, perimeter {v['perimeter']:.0f} px, {axis}",
        f"  circularity {v['circularity']:.2f}, solidity {v['solidity']:.2f}, eccentricity {v['eccentricity']:.2f} (0..1)",
        f"  upright box width:height {v['aspect_ratio']:.2f}; tightest turned box length:width {v['rotated_aspect_ratio']:.2f} "
        f"({v['rotated_length']:.0f} x {v['rotated_width']:.0f} px)",
    ]


def _size(v: dict[str, Any]) -> list[str]:
    return [
        f"size: {v['category']}, {percent(v['relative_size'])} of the whole image, {v['area_pixels']} px^2",
        f"  box {v['bbox_width']} x {v['bbox_height']} px, diagonal {v['diagonal']:.0f} px, "
        f"diameter of an equal disc {v['equivalent_diameter']:.0f} px",
    ]


def _position(v: dict[str, Any]) -> list[str]:
    place = "centered" if v["is_centered"] else v["quadrant"]
    edge = (
        f"touches {', '.join(v['touches_edge'])}" if v["touches_edge"] else f"{v['edge_distance']} px to {v['nearest_edge']} edge"
    )
    return [f"{place}, {v['distance_from_center']:.2f} half diagonals from the center, {edge} of the whole image"]


def _appearance(v: dict[str, Any]) -> list[str]:
    focus = "too plain to tell focus" if v["focus"] is None else f"focus {v['focus']:.2f} (0..1)"
    sharp = f"sharpness {v['sharpness']:.0f} (variance of Laplacian)"
    return [f"appearance: {sharp}, contrast {v['contrast']:.2f} (0..0.5), {focus}"]


WORDS: dict[Group, Callable[[dict[str, Any]], list[str]]] = {
    "color": _color,
    "texture": _texture,
    "shape": _shape,
    "size": _size,
    "position": _position,
    "appearance": _appearance,
}
