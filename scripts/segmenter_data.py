"""Pictures with true masks to train the packaged segmenter: crops of annotated photographs, and composites of cut-out objects."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

SKIPPED = "cartoon", "symbols", "space", "seasonal", "flags", "roadsigns"
"""Folders of drawings among the stamps."""
LEAST = 0.004
"""Least share of a view that an object covers."""
MOST_OBJECTS = 4

Cutout = tuple[np.ndarray, np.ndarray]
"""An object: uint8 [h, w, 3] and its opacity, float32 [h, w]."""


@dataclass(frozen=True)
class View:
    """A picture, uint8 [S, S, 3], and the masks of up to MOST_OBJECTS objects in it, bool [n, S, S]."""

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


def coco_objects(folder: Path) -> list[View]:
    """Photographs of COCO128 with even positions in the order of names, and all their objects."""
    views = []
    for path in sorted((folder / "images" / "train2017").glob("*.jpg"))[::2]:
        picture = np.asarray(Image.open(path).convert("RGB"))
        height, width = picture.shape[:2]
        masks = []
        label = folder / "labels" / "train2017" / f"{path.stem}.txt"
        for line in label.read_text().splitlines() if label.is_file() else ():
            points = np.array(line.split()[1:], np.float64).reshape(-1, 2) * (width, height)
            mask = np.zeros((height, width), np.uint8)
            cv2.fillPoly(mask, [np.round(points).astype(np.int32)], 1)
            if mask.mean() > 0.002:
                masks.append(mask > 0)
        if masks:
            views.append(View(picture, np.stack(masks)))
    return views


def voc_objects(folder: Path) -> list[View]:
    """Photographs of a VOC folder that have instance masks (SegmentationObject), and their objects."""
    views = []
    for path in sorted((folder / "SegmentationObject").glob("*.png")):
        photograph = folder / "JPEGImages" / f"{path.stem}.jpg"
        if photograph.is_file():
            labels = np.asarray(Image.open(path))
            masks = [labels == label for label in np.unique(labels) if 0 < label < 255]
            views.append(View(np.asarray(Image.open(photograph).convert("RGB")), np.stack(masks)))
    return views


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


def crop(view: View, side: int, rng: np.random.Generator) -> View | None:
    """A random part of a photograph around one of its objects, mirrored and recoloured; None if no object is large enough."""
    height, width = view.masks.shape[1:]
    x, y, w, h = cv2.boundingRect(view.masks[rng.integers(len(view.masks))].astype(np.uint8))
    zoom = float(rng.uniform(1.1, 4.0))
    w1 = int(np.clip(w * zoom, 48, width)) if rng.random() < 0.8 else width
    h1 = int(np.clip(h * zoom, 48, height)) if w1 < width else height
    w1, h1 = max(w1, h1 // 2), max(h1, w1 // 2)
    w1, h1 = min(w1, width), min(h1, height)
    x0 = int(np.clip(x + w / 2 - w1 * rng.uniform(0.3, 0.7), 0, width - w1))
    y0 = int(np.clip(y + h / 2 - h1 * rng.uniform(0.3, 0.7), 0, height - h1))
    part = cv2.resize(view.picture[y0 : y0 + h1, x0 : x0 + w1], (side, side), interpolation=cv2.INTER_AREA)
    masks = []
    for mask in view.masks:
        inner = mask[y0 : y0 + h1, x0 : x0 + w1]
        if inner.mean() > LEAST and inner.sum() > 0.5 * mask.sum():
            masks.append(cv2.resize(inner.astype(np.uint8), (side, side), interpolation=cv2.INTER_NEAREST) > 0)
    return _finish(part, masks, rng)


def composite(cutouts: list[Cutout], backgrounds: list[np.ndarray], side: int, rng: np.random.Generator) -> View | None:
    """Up to MOST_OBJECTS objects pasted over a part of a photograph, or now and then over a plain ground."""
    canvas = _ground(backgrounds, side, rng)
    labels = np.zeros((side, side), np.uint8)
    full = {}
    for number in range(1, 1 + int(rng.integers(1, MOST_OBJECTS + 1))):
        pixels, alpha = _shape(backgrounds, rng) if rng.random() < 0.12 else cutouts[rng.integers(len(cutouts))]
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
        layer = cv2.warpAffine(np.ascontiguousarray(pixels), matrix, (side, side), borderMode=cv2.BORDER_REPLICATE)
        opacity = cv2.warpAffine(np.ascontiguousarray(alpha), matrix, (side, side))
        gain, offset = rng.uniform(0.7, 1.25), rng.uniform(-25, 25)
        layer = np.clip(layer.astype(np.float32) * gain + offset, 0, 255)
        if rng.random() < 0.3:  # a shadow, which is not the object
            shadow = cv2.GaussianBlur(np.roll(opacity, (int(side * 0.03), int(side * 0.02)), (0, 1)), (0, 0), side * 0.02)
            canvas *= 1 - 0.5 * shadow[..., None]
        if rng.random() < 0.3:
            opacity = cv2.GaussianBlur(opacity, (0, 0), rng.uniform(0.5, 1.2))
        canvas = layer * opacity[..., None] + canvas * (1 - opacity[..., None])
        labels[opacity > 0.5] = number
        full[number] = np.count_nonzero(opacity > 0.5)
    masks = [labels == n for n, area in full.items() if np.count_nonzero(labels == n) > max(0.4 * area, LEAST * side * side)]
    return _finish(canvas.astype(np.uint8), masks, rng)


def _ground(backgrounds: list[np.ndarray], side: int, rng: np.random.Generator) -> np.ndarray:
    if rng.random() < 0.1:
        first, second = rng.uniform(0, 255, (2, 3))
        slope = np.linspace(0, rng.random(), side)[:, None, None]
        return np.broadcast_to(first * (1 - slope) + second * slope, (side, side, 3)).astype(np.float32).copy()
    picture = backgrounds[rng.integers(len(backgrounds))]
    height, width = picture.shape[:2]
    share = rng.uniform(0.3, 1.0)
    h, w = max(40, int(height * share)), max(40, int(width * min(1.0, share * np.exp(rng.uniform(-0.3, 0.3)))))
    h, w = min(h, height), min(w, width)
    y, x = rng.integers(0, height - h + 1), rng.integers(0, width - w + 1)
    part = cv2.resize(picture[y : y + h, x : x + w], (side, side), interpolation=cv2.INTER_AREA).astype(np.float32)
    if rng.random() < 0.5:
        part = part[:, ::-1]
    return np.clip(part * rng.uniform(0.7, 1.2) + rng.uniform(-20, 20), 0, 255)


def _shape(backgrounds: list[np.ndarray], rng: np.random.Generator) -> Cutout:
    """A smooth or angular shape filled with a photograph's texture or a colour."""
    side = 160
    corners = int(rng.integers(3, 9))
    angle = np.sort(rng.uniform(0, 2 * np.pi, corners)) if rng.random() < 0.5 else np.linspace(0, 2 * np.pi, 90)
    radius = 70 * (1 - 0.4 * rng.random() * (1 + np.sin(rng.integers(1, 5) * angle + rng.uniform(0, 6))) / 2)
    points = np.stack([side / 2 + radius * np.cos(angle), side / 2 + radius * np.sin(angle) * rng.uniform(0.5, 1)], 1)
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
    selected = [masks[i] for i in rng.permutation(len(masks))[:MOST_OBJECTS]]
    if rng.random() < 0.5:
        picture, selected = picture[:, ::-1], [mask[:, ::-1] for mask in selected]
    values: np.ndarray = picture.astype(np.float32) * rng.uniform(0.8, 1.2, 3) + rng.uniform(-15, 15)
    if rng.random() < 0.1:
        values = np.repeat(values.mean(2, keepdims=True), 3, 2)
    if rng.random() < 0.3:
        values = cv2.GaussianBlur(values, (0, 0), rng.uniform(0.3, 1.0))
    values += rng.normal(0, rng.uniform(0, 6), values.shape)
    _, code = cv2.imencode(
        ".jpg", np.clip(values, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(50, 96))]
    )
    return View(np.ascontiguousarray(cv2.imdecode(code, cv2.IMREAD_COLOR)), np.stack(selected))


def sample_prompt(
    mask: np.ndarray, rng: np.random.Generator
) -> tuple[tuple[float, float] | None, tuple[float, float, float, float] | None]:
    """A point that a person would click, mostly well inside, or a roughly drawn box, in pixels."""
    if rng.random() < 0.35:
        x, y, w, h = cv2.boundingRect(mask.astype(np.uint8))
        edges = np.array([x, y, x + w, y + h], np.float64) + rng.normal(0, 0.03, 4) * (w, h, w, h)
        left, top, right, bottom = np.clip(edges, 0, len(mask))
        return None, (left, top, max(right, left + 2), max(bottom, top + 2))
    depth = cv2.distanceTransform(np.pad(mask.astype(np.uint8), 1), cv2.DIST_L2, 3)[1:-1, 1:-1]
    share = 0.9 if rng.random() < 0.4 else 0.3
    rows, columns = np.nonzero(depth >= share * depth.max())
    i = rng.integers(len(rows))
    return (columns[i] + 0.5, rows[i] + 0.5), None
