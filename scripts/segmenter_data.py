"""Pictures with true masks to train the packaged segmenter: crops of annotated photographs, and composites of
cut-out objects.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from PIL import Image
from scipy.io import loadmat

SKIPPED = "cartoon", "symbols", "space", "seasonal", "flags", "roadsigns"
"""Folders of drawings among the stamps."""
LEAST = 0.004
"""Least share of a view that an object covers."""
MOST_OBJECTS = 4
LONGEST = 480
"""Longest side at which photographs are kept."""
MOST_MASKS = 12
"""Largest objects that are kept of a photograph."""
PART = 0.15
"""Least share of the largest connected piece of a mask that another piece has to count as an object of its
own.
"""
SAME = 0.92
"""Correlation of the thumbnails of two pictures from which they count as the same."""
BOX_MARGIN = 0.35
"""Surroundings of a box in a view, as inference takes them, as a share of the box on each side."""
HOLDS_NOTHING = 0.1
"""Most of a box's area that objects may cover for the box to be wrong."""
CUTS, LARGEST_CUT = 0.4, 0.4
"""Share of the wrong boxes that cut an object, and the largest IoU of such a box with that of the object."""

Cutout = tuple[np.ndarray, np.ndarray]
"""An object: uint8 [h, w, 3] and its opacity, float32 [h, w]."""


@dataclass(frozen=True)
class View:
    """A picture, uint8 [H, W, 3], and the masks of objects in it, bool [n, H, W]; in training the first is
    the framed one.
    """

    picture: np.ndarray
    masks: np.ndarray


def stamps(folder: Path) -> list[Cutout]:
    """Photographs of single objects on a transparent ground: Debian's tuxpaint-stamps-default."""
    cutouts = []
    for path in sorted(folder.rglob("*.png")):
        if any(word in path.parts for word in SKIPPED) or path.stem.endswith(("_mirror", "_flip")):
            continue
        with Image.open(path) as file:
            image = file.convert("RGBA")
            image.thumbnail((320, 320))
            pixels = np.asarray(image)
        alpha = pixels[..., 3].astype(np.float32) / 255
        if 0.05 < (alpha > 0.5).mean() < 0.98:
            cutouts.append((np.ascontiguousarray(pixels[..., :3]), alpha))
    return cutouts


def coco_objects(images: Path, labels: Path) -> list[View]:
    """Photographs and their objects as lines of a class and a polygon in 0..1 (the format of coco128-seg)."""
    views = []
    for path in sorted(images.glob("*.jpg")):
        label, picture = labels / f"{path.stem}.txt", _small(Image.open(path).convert("RGB"))
        masks = []
        for line in label.read_text().splitlines() if label.is_file() else ():
            points = np.array(line.split()[1:], np.float64).reshape(-1, 2) * picture.shape[1::-1]
            mask = np.zeros(picture.shape[:2], np.uint8)
            cv2.fillPoly(mask, [np.round(points).astype(np.int32)], 1)
            masks.append(mask > 0)
        views += _view(picture, masks)
    return views


def coco_instances(images: Path, annotations: Path) -> list[View]:
    """Photographs and their objects as polygons in pixels (COCO's ``instances_*.json``); crowds are left
    out.
    """
    notes = json.loads(annotations.read_text())
    polygons: dict[int, list[list[list[float]]]] = {}
    for note in notes["annotations"]:
        if not note["iscrowd"]:
            polygons.setdefault(note["image_id"], []).append(note["segmentation"])
    views = []
    for entry in notes["images"]:
        picture = _small(Image.open(images / entry["file_name"]).convert("RGB"))
        scale = np.array(picture.shape[1::-1]) / (entry["width"], entry["height"])
        masks = []
        for parts in polygons.get(entry["id"], []):
            mask = np.zeros(picture.shape[:2], np.uint8)
            cv2.fillPoly(
                mask, [np.round(np.reshape(part, (-1, 2)) * scale).astype(np.int32) for part in parts], 1
            )
            masks.append(mask > 0)
        views += _view(picture, masks)
    return views


def masked_photographs(images: Path, masks: Path) -> list[View]:
    """Photographs, and a mask of the same name for each, whose connected pieces are the objects."""
    views = []
    for path in sorted(images.rglob("*.jpg")):
        picture = _small(Image.open(path).convert("RGB"))
        with Image.open((masks / path.relative_to(images)).with_suffix(".png")) as file:
            mask = np.asarray(file.convert("L").resize(picture.shape[1::-1])) > 127
        views += _view(picture, _pieces(mask))
    return views


def clothed_people(folder: Path) -> list[View]:
    """Photographs of Clothing Co-Parsing with a label for each pixel: the person, and the two largest
    garments.
    """
    views = []
    for path in sorted((folder / "annotations" / "pixel-level").glob("*.mat")):
        picture = _small(Image.open(folder / "photos" / f"{path.stem}.jpg").convert("RGB"))
        labels = loadmat(path)["groundtruth"].astype(np.uint8)
        labels = cv2.resize(labels, picture.shape[1::-1], interpolation=cv2.INTER_NEAREST)
        garments = [
            pieces[0] for label in np.unique(labels[labels > 0]) if (pieces := _pieces(labels == label))
        ]
        garments.sort(key=np.count_nonzero, reverse=True)
        views += _view(picture, [*_pieces(labels > 0)[:1], *garments[:2]])
    return views


def video_frames(folder: Path, step: int) -> list[View]:
    """Every ``step``-th frame of the clips of DAVIS."""
    views = []
    for path in sorted((folder / "JPEGImages" / "480p").glob("*/*.jpg")):
        if int(path.stem) % step == 0:
            picture = _small(Image.open(path).convert("RGB"))
            with Image.open(folder / "Annotations" / "480p" / path.parent.name / f"{path.stem}.png") as file:
                mask = np.asarray(file.convert("L").resize(picture.shape[1::-1])) > 127
            views += _view(picture, _pieces(mask))
    return views


def unseen(views: list[View], folders: list[Path]) -> list[View]:
    """The views whose picture is none of those in ``folders``, neither as it is nor mirrored."""
    known = np.stack(
        [_thumbnail(Image.open(path)) for folder in folders for path in sorted(folder.rglob("*.jpg"))]
    )
    known = np.concatenate([known, known.reshape(-1, 16, 16)[..., ::-1].reshape(-1, 256)])
    return [view for view in views if float((known @ _thumbnail(Image.fromarray(view.picture))).max()) < SAME]


def _thumbnail(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image.convert("L").resize((16, 16), Image.Resampling.BOX), np.float32).ravel()
    pixels = pixels - pixels.mean()
    return pixels / (np.linalg.norm(pixels) + 1e-6)


def _small(image: Image.Image) -> np.ndarray:
    image.thumbnail((LONGEST, LONGEST), Image.Resampling.BOX)
    return np.asarray(image)


def _pieces(mask: np.ndarray) -> list[np.ndarray]:
    """The large connected pieces of a mask, the largest first."""
    _, parts, statistics, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)
    areas = statistics[1:, cv2.CC_STAT_AREA]
    return [parts == 1 + i for i in np.argsort(-areas) if areas[i] >= PART * areas.max()]


def _view(picture: np.ndarray, masks: list[np.ndarray]) -> list[View]:
    masks = sorted((mask for mask in masks if LEAST < mask.mean() < 0.9), key=np.count_nonzero, reverse=True)
    return [View(picture, np.stack(masks[:MOST_MASKS]))] if masks else []


def cut_out(views: list[View]) -> list[Cutout]:
    """The larger objects of annotated photographs, to be pasted elsewhere."""
    cutouts = []
    for view in views:
        for mask in view.masks:
            x, y, w, h = cv2.boundingRect(mask.astype(np.uint8))
            touches = x == 0 or y == 0 or x + w == mask.shape[1] or y + h == mask.shape[0]
            if min(w, h) > 60 and not touches:
                alpha = cv2.GaussianBlur(mask[y : y + h, x : x + w].astype(np.float32), (0, 0), 1.0)
                cutouts.append((view.picture[y : y + h, x : x + w].copy(), np.clip(2 * alpha - 1, 0, 1)))
    return cutouts


def crop(view: View, side: int, framing: str, rng: np.random.Generator) -> View | None:
    """A part of a photograph, framed as inference does: ``whole``, the surroundings of an object, or those of
    its ``box``.

    None if the object is too small.
    """
    height, width = view.masks.shape[1:]
    target = view.masks[rng.integers(len(view.masks))]
    x, y, w, h = cv2.boundingRect(target.astype(np.uint8))
    if framing == "whole":
        inset = rng.uniform(0, 0.3, 4) * (rng.random() < 0.5) * (1, 1, -1, -1)
        edges = np.array([0, 0, width, height]) + inset * (width, height, width, height)
    else:
        margin = (
            BOX_MARGIN * rng.uniform(0.8, 1.25)
            if framing == "box"
            else float(np.exp(rng.uniform(np.log(0.3), np.log(1.5))))
        )
        jitter = 0.05 if framing == "box" else 0.3 * margin
        edges = np.array([x, y, x + w, y + h]) + (
            np.array([-1, -1, 1, 1]) * margin + rng.normal(0, jitter, 4)
        ) * (w, h, w, h)
    left, top = (int(np.clip(edges[i], 0, (x, y)[i])) for i in range(2))
    right, bottom = (
        int(np.clip(np.ceil(edges[2 + i]), (x + w, y + h)[i], (width, height)[i])) for i in range(2)
    )
    if framing != "whole" and max(w, h) < 16:
        return None
    masks = []
    for mask in [target, *(mask for mask in view.masks if mask is not target)]:
        inner = mask[top:bottom, left:right]
        if inner.mean() > LEAST and inner.sum() > 0.5 * mask.sum():
            masks.append(mask)
        elif mask is target:
            return None
    return _scaled(view.picture, masks, (left, top, right, bottom), side, rng)


def wrong_box(view: View, side: int, rng: np.random.Generator) -> View | None:
    """The surroundings of a box that holds no object or cuts one; its masks are the box and the object that
    it cuts, if any.

    None if no such box was found.
    """
    height, width = view.masks.shape[1:]
    covered = np.any(view.masks, axis=0)
    boxes = np.array([cv2.boundingRect(mask.astype(np.uint8)) for mask in view.masks])
    cuts = rng.random() < CUTS
    for _ in range(20):
        number = rng.integers(len(boxes))
        if cuts:
            x, y, w, h = boxes[number]
            size = np.array([w, h]) * np.exp(rng.uniform(-0.7, 0.3, 2))
            start = (x, y) + np.array([w, h]) * rng.uniform(0, 1, 2) - size / 2
        else:
            size = np.array([width, height]) * np.exp(
                rng.uniform(np.log(0.1), np.log(0.5)) + rng.uniform(-0.4, 0.4, 2)
            )
            start = rng.uniform(-0.05, 1, 2) * (width, height)
        left, top = np.clip(start, 0, (width - 8, height - 8)).astype(int)
        right, bottom = np.clip(start + size, (left + 8, top + 8), (width, height)).astype(int)
        across = np.minimum(right, boxes[:, 0] + boxes[:, 2]) - np.maximum(left, boxes[:, 0])
        down = np.minimum(bottom, boxes[:, 1] + boxes[:, 3]) - np.maximum(top, boxes[:, 1])
        both = across.clip(0) * down.clip(0)
        overlaps = both / ((right - left) * (bottom - top) + boxes[:, 2] * boxes[:, 3] - both)
        held = view.masks[number] if cuts else covered
        share = held[top:bottom, left:right].mean()
        # A box that cuts one object may be that of another.
        if (overlaps.max() < LARGEST_CUT and share > 0.2) if cuts else share < HOLDS_NOTHING:
            break
    else:
        return None
    interior = np.zeros((height, width), bool)
    interior[top:bottom, left:right] = True
    x, y = BOX_MARGIN * rng.uniform(0.8, 1.25) * np.array([right - left, bottom - top])
    edges = (
        max(0, int(left - x)),
        max(0, int(top - y)),
        min(width, int(right + x)),
        min(height, int(bottom + y)),
    )
    return _scaled(view.picture, [interior, view.masks[number]] if cuts else [interior], edges, side, rng)


def _scaled(
    picture: np.ndarray,
    masks: list[np.ndarray],
    edges: tuple[int, int, int, int],
    side: int,
    rng: np.random.Generator,
) -> View | None:
    """A part of a picture and of masks in the size of a view."""
    left, top, right, bottom = edges
    part = picture[top:bottom, left:right]
    kind = cv2.INTER_AREA if min(part.shape[:2]) > side else cv2.INTER_LINEAR
    inner = [
        cv2.resize(m[top:bottom, left:right].astype(np.float32), (side, side), interpolation=kind) > 0.5
        for m in masks
    ]
    return _finish(cv2.resize(part, (side, side), interpolation=kind), inner, rng)


def composite(
    cutouts: list[Cutout], backgrounds: list[np.ndarray], side: int, rng: np.random.Generator
) -> View | None:
    """Up to MOST_OBJECTS objects pasted over a part of a photograph, or now and then over a plain ground."""
    canvas = _ground(backgrounds, side, rng)
    labels = np.zeros((side, side), np.uint8)
    full = {}
    for number in range(1, 1 + int(rng.integers(1, MOST_OBJECTS + 1))):
        pixels, alpha = (
            _shape(backgrounds, rng) if rng.random() < 0.18 else cutouts[rng.integers(len(cutouts))]
        )
        # The square view stretches the picture: so does the object.
        longest = float(side * np.exp(rng.uniform(np.log(0.12), np.log(0.95))))
        aspect = float(np.exp(rng.uniform(-0.3, 0.3)))
        scale = longest / max(pixels.shape[:2])
        size = max(6, int(pixels.shape[1] * scale * aspect)), max(6, int(pixels.shape[0] * scale / aspect))
        pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
        alpha = cv2.resize(alpha, size, interpolation=cv2.INTER_AREA)
        if rng.random() < 0.5:
            pixels, alpha = pixels[:, ::-1], alpha[:, ::-1]
        angle = float(rng.normal(0, 15) if rng.random() < 0.8 else rng.uniform(-180, 180))
        x, y = rng.uniform(0.05, 0.95, 2) * side
        matrix = cv2.getRotationMatrix2D((size[0] / 2, size[1] / 2), angle, 1.0)
        matrix[:, 2] += (x - size[0] / 2, y - size[1] / 2)
        layer = cv2.warpAffine(
            np.ascontiguousarray(pixels), matrix, (side, side), borderMode=cv2.BORDER_REPLICATE
        )
        opacity = cv2.warpAffine(np.ascontiguousarray(alpha), matrix, (side, side))
        gain, offset = rng.uniform(0.7, 1.25), rng.uniform(-25, 25)
        layer = np.clip(layer.astype(np.float32) * gain + offset, 0, 255)
        if rng.random() < 0.3:  # a shadow, which is not the object
            shadow = cv2.GaussianBlur(
                np.roll(opacity, (int(side * 0.03), int(side * 0.02)), (0, 1)), (0, 0), side * 0.02
            )
            canvas *= 1 - 0.5 * shadow[..., None]
        if rng.random() < 0.3:
            opacity = cv2.GaussianBlur(opacity, (0, 0), rng.uniform(0.5, 1.2))
        canvas = layer * opacity[..., None] + canvas * (1 - opacity[..., None])
        labels[opacity > 0.5] = number
        full[number] = np.count_nonzero(opacity > 0.5)
    masks = [
        labels == n
        for n, area in full.items()
        if np.count_nonzero(labels == n) > max(0.4 * area, LEAST * side * side)
    ]
    return _finish(canvas.astype(np.uint8), [masks[i] for i in rng.permutation(len(masks))], rng)


def _ground(backgrounds: list[np.ndarray], side: int, rng: np.random.Generator) -> np.ndarray:
    if rng.random() < 0.1:
        first, second = rng.uniform(0, 255, (2, 3))
        slope = np.linspace(0, rng.random(), side)[:, None, None]
        return (
            np.broadcast_to(first * (1 - slope) + second * slope, (side, side, 3)).astype(np.float32).copy()
        )
    picture = backgrounds[rng.integers(len(backgrounds))]
    height, width = picture.shape[:2]
    share = rng.uniform(0.3, 1.0)
    h = max(40, int(height * share))
    w = max(40, int(width * min(1.0, share * np.exp(rng.uniform(-0.3, 0.3)))))
    h, w = min(h, height), min(w, width)
    y, x = rng.integers(0, height - h + 1), rng.integers(0, width - w + 1)
    part = cv2.resize(picture[y : y + h, x : x + w], (side, side), interpolation=cv2.INTER_AREA).astype(
        np.float32
    )
    if rng.random() < 0.5:
        part = part[:, ::-1]
    return np.clip(part * rng.uniform(0.7, 1.2) + rng.uniform(-20, 20), 0, 255)


def _shape(backgrounds: list[np.ndarray], rng: np.random.Generator) -> Cutout:
    """A smooth or angular shape filled with a photograph's texture or a colour."""
    side = 160
    corners = int(rng.integers(3, 9))
    angle = (
        np.sort(rng.uniform(0, 2 * np.pi, corners)) if rng.random() < 0.5 else np.linspace(0, 2 * np.pi, 90)
    )
    radius = 70 * (1 - 0.4 * rng.random() * (1 + np.sin(rng.integers(1, 5) * angle + rng.uniform(0, 6))) / 2)
    points = np.stack(
        [side / 2 + radius * np.cos(angle), side / 2 + radius * np.sin(angle) * rng.uniform(0.5, 1)], 1
    )
    alpha = np.zeros((side, side), np.float32)
    cv2.fillPoly(alpha, [points.astype(np.int32)], 1.0)
    if rng.random() < 0.4:
        pixels = np.full((side, side, 3), rng.uniform(0, 255, 3), np.uint8)
    else:
        pixels = np.clip(_ground(backgrounds, side, rng), 0, 255).astype(np.uint8)
    return pixels, alpha


def _finish(picture: np.ndarray, masks: list[np.ndarray], rng: np.random.Generator) -> View | None:
    """Mirror, recolour, add noise and compress, so that no seam tells the pasted objects."""
    if not masks:
        return None
    selected = masks[:1] + [masks[1 + i] for i in rng.permutation(len(masks) - 1)[: MOST_OBJECTS - 1]]
    if rng.random() < 0.5:
        picture, selected = picture[:, ::-1], [mask[:, ::-1] for mask in selected]
    values: np.ndarray = picture.astype(np.float32) * rng.uniform(0.8, 1.2, 3) + rng.uniform(-15, 15)
    if rng.random() < 0.1:
        values = np.repeat(values.mean(2, keepdims=True), 3, 2)
    if rng.random() < 0.3:
        values = cv2.GaussianBlur(values, (0, 0), rng.uniform(0.3, 1.0))
    values += rng.normal(0, rng.uniform(0, 6), values.shape)
    _, code = cv2.imencode(
        ".jpg",
        np.clip(values, 0, 255).astype(np.uint8),
        [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(50, 96))],
    )
    return View(np.ascontiguousarray(cv2.imdecode(code, cv2.IMREAD_COLOR)), np.stack(selected))


def sample_prompt(
    mask: np.ndarray, by_box: bool, rng: np.random.Generator
) -> tuple[tuple[float, float] | None, tuple[float, float, float, float] | None]:
    """A point that a person would click, mostly well inside, or a box, tight or roughly drawn, in pixels."""
    if by_box:
        x, y, w, h = cv2.boundingRect(mask.astype(np.uint8))
        spread = 0.01 if rng.random() < 0.5 else 0.05
        edges = np.array([x, y, x + w, y + h], np.float64) + rng.normal(0, spread, 4) * (w, h, w, h)
        left, top, right, bottom = np.clip(edges, 0, len(mask))
        return None, (left, top, max(right, left + 2), max(bottom, top + 2))
    depth = cv2.distanceTransform(np.pad(mask.astype(np.uint8), 1), cv2.DIST_L2, 3)[1:-1, 1:-1]
    share = rng.choice([0.95, 0.3, 0.05], p=[0.4, 0.4, 0.2])
    rows, columns = np.nonzero(depth >= share * depth.max())
    i = rng.integers(len(rows))
    return (columns[i] + 0.5, rows[i] + 0.5), None
