"""Parts of the packaged sources: the item to generate, its question and its picture, photographs and objects to paste."""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pixelis.datasets import cards, pasting
from pixelis.datasets.cards import SPLITS
from pixelis.datasets.corruptions import Corruption
from pixelis.datasets.files import replace_file
from pixelis.datasets.pasting import CutOut, Edges, photograph
from pixelis.operations import masks
from pixelis.records import Annotations, Box, Media, Question, Region

SCHEME = "packaged:"
NAMES = ("clips", "coins", "digits", "photos", "shapes", "text")
"""The sources; their order is part of what they generate."""
GROUNDS = {
    split: tuple(name for name in names if not name.endswith((".mp4", "coins.png", "page.png", "text.png")))
    for split, names in cards.PHOTOGRAPHS.items()
}
"""Photographs under pasted objects and words."""
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "train": (("person", "astronaut"), ("helmet", "helmet"), ("man", "cameraman"), ("flower", "flower")),
    "validation": (),
    "test": (("cup", "cup"),),
}
"""Outlines that are cut out in each split, with their labels."""


@dataclass(frozen=True)
class Item:
    """The item to generate: its source, split, seed and index; ``options`` are the source's own."""

    name: str
    split: str
    seed: int
    index: int
    folder: Path
    options: dict[str, str]
    corruption: Corruption | None = None

    @property
    def id(self) -> str:
        """Also the stem of its file."""
        shown = "".join(f"-{value}" for key, value in self.options.items() if key not in ("level", "pairs"))
        return f"{self.name}-{self.split}-{self.seed}-{self.index}{shown.replace(',', '+')}"

    @property
    def rng(self) -> np.random.Generator:
        """A new random generator that depends on this item only."""
        return np.random.default_rng([NAMES.index(self.name), SPLITS.index(self.split), self.seed, self.index])

    @property
    def shift(self) -> str:
        """The one of the shifts that this picture has; the picture before it does not depend on it."""
        return self._one_of("shift")

    @property
    def event(self) -> str:
        """The one of the events that happens in this clip."""
        return self._one_of("event")

    def _one_of(self, option: str) -> str:
        names = [name for name in self.options.get(option, "").split(",") if name]
        return names[self.index % len(names)] if names else ""


def question_of(item: Item, media: Media, notes: Annotations, **meta: Any) -> Question:
    """The annotated item as a question without text."""
    source = {"source": f"{SCHEME}{item.name}"}
    return Question(id=item.id, question="", media=[media], split=item.split, annotations=notes, meta={**source, **meta})


def region_of(number: int, label: str, mask: np.ndarray, **attributes: str) -> Region:
    """A region with its mask, bool [h, w]."""
    encoded = masks.Mask.of(mask)
    return Region(id=f"r{number}", label=label, box=encoded.box, mask=encoded.encode(), attributes=attributes)


def shares(edges: Edges, width: int, height: int) -> Box:
    """Edges in pixels as a box inside 0..1."""
    x0, y0, x1, y1 = edges
    return max(0.0, x0 / width), max(0.0, y0 / height), min(1.0, x1 / width), min(1.0, y1 / height)


def picture_of(item: Item, pixels: np.ndarray, photo: bool = True, part: str = "") -> Media:
    """The media of a picture, uint8 [h, w, 3], which is written unless it exists: photographs as JPEG, drawings as PNG."""
    name = item.id + part + ("" if item.corruption is None else f"-{item.corruption.kind}-{item.corruption.severity}")
    path = item.folder / f"{name}{'.jpg' if photo else '.png'}"
    if not path.exists():
        file = io.BytesIO()
        if item.corruption is not None:
            pixels = item.corruption.apply(pixels, item.rng)
        image = Image.fromarray(np.ascontiguousarray(pixels))
        if photo:
            image.save(file, "JPEG", quality=92, subsampling=0)
        else:
            image.save(file, "PNG")
        replace_file(path, [file.getvalue()])
    return Media(id="img0", uri=str(path), width=pixels.shape[1], height=pixels.shape[0])


@functools.cache
def coin_rows() -> list[list[np.ndarray]]:
    """Masks of the coins row by row from the top, each row from the left."""
    coins = sorted(pasting.coin_masks(), key=lambda mask: float(np.nonzero(mask)[0].mean()))
    rows = [coins[i : i + 6] for i in range(0, len(coins), 6)]
    return [sorted(row, key=lambda mask: float(np.nonzero(mask)[1].mean())) for row in rows]


@functools.lru_cache(maxsize=16)
def ground_of(name: str, longest: int = 640) -> np.ndarray:
    """A photograph under pasted objects and words, read-only uint8 [h, w, 3]."""
    picture = photograph(name)
    scale = longest / max(picture.shape[:2])
    size = round(picture.shape[1] * scale), round(picture.shape[0] * scale)
    pixels = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS))
    pixels.setflags(write=False)
    return pixels


@functools.cache
def cut_outs(split: str) -> tuple[CutOut, ...]:
    """The objects that a split pastes on photographs."""
    objects = [pasting.outlined_cut_out(name, label) for name, label in PARTS[split]]
    if split == "train":
        cat = pasting.outlined("(205,140,125,120)", *photograph("skimage/data/chelsea.png").shape[:2])
        objects.append(pasting.cut_out("cat", "skimage/data/chelsea.png", cat))
        objects.append(pasting.cut_out("horse", "skimage/data/horse.png", photograph("skimage/data/horse.png")[..., 0] < 128))
        objects.append(pasting.cut_out("coin", "skimage/data/coins.png", coin_rows()[0][2]))
    elif split == "validation":
        objects.append(pasting.cut_out("cell", "skimage/data/cell.png", _bright("skimage/data/cell.png", 120)))
        objects.append(pasting.cut_out("coin", "skimage/data/coins.png", coin_rows()[2][1]))
    else:
        objects.append(pasting.cut_out("retina", "skimage/data/retina.jpg", _bright("skimage/data/retina.jpg", 24)))
        objects.append(pasting.cut_out("coin", "skimage/data/coins.png", coin_rows()[3][3]))
    return tuple(objects)


def _bright(name: str, threshold: int) -> np.ndarray:
    """The largest part of a photograph that is brighter than ``threshold``, with its holes filled: bool [H, W]."""
    from scipy import ndimage

    labels, count = ndimage.label(photograph(name).max(2) > threshold)
    sizes = ndimage.sum_labels(np.ones(labels.shape), labels, range(1, count + 1))
    return np.asarray(ndimage.binary_fill_holes(labels == 1 + int(np.argmax(sizes))))
