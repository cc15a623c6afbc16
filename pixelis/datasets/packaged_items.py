"""Parts of the packaged sources: the item to generate, its picture, and the objects to paste."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy import ndimage

from pixelis.datasets import cards, pasting
from pixelis.datasets.cards import SPLITS
from pixelis.datasets.corruptions import Corruption
from pixelis.datasets.pasting import CutOut, Edges, photograph
from pixelis.files import replacing
from pixelis.operations import masks
from pixelis.records import Annotations, Box, Media, Question, Region

SCHEME = "packaged:"
NAMES = ("clips", "coins", "digits", "photos", "shapes", "text")
"""The order seeds what they generate."""
GROUNDS = {
    split: tuple(name for name in names if not name.endswith((".mp4", "coins.png", "page.png", "text.png")))
    for split, names in cards.PHOTOGRAPHS.items()
}
"""Photographs under pasted objects and words."""
CUT_OUTS = tomllib.loads(Path(__file__).with_name("cut_outs.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Item:
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
        return np.random.default_rng(
            [NAMES.index(self.name), SPLITS.index(self.split), self.seed, self.index]
        )

    def one_of(self, option: str) -> str:
        """The one of the listed names that applies to this item; empty without."""
        names = [name for name in self.options.get(option, "").split(",") if name]
        return names[self.index % len(names)] if names else ""


def question_of(item: Item, media: Media, notes: Annotations, **meta: Any) -> Question:
    source = {"source": f"{SCHEME}{item.name}"}
    return Question(
        id=item.id, question="", media=[media], split=item.split, annotations=notes, meta={**source, **meta}
    )


def region_of(number: int, label: str, mask: np.ndarray, **attributes: str) -> Region:
    encoded = masks.Mask.of(mask)
    return Region(id=f"r{number}", label=label, box=encoded.box, mask=encoded.encode(), attributes=attributes)


def shares(edges: Edges, width: int, height: int) -> Box:
    """Edges in pixels as a box inside 0..1."""
    x0, y0, x1, y1 = edges
    return max(0.0, x0 / width), max(0.0, y0 / height), min(1.0, x1 / width), min(1.0, y1 / height)


def picture_of(item: Item, pixels: np.ndarray, photo: bool = True, part: str = "") -> Media:
    """The media of a picture, uint8 [h, w, 3], which is written unless it exists."""
    name = (
        item.id
        + part
        + ("" if item.corruption is None else f"-{item.corruption.kind}-{item.corruption.severity}")
    )
    path = item.folder / f"{name}{'.jpg' if photo else '.png'}"
    if not path.exists():
        if item.corruption is not None:
            pixels = item.corruption.apply(pixels, item.rng)
        image = Image.fromarray(np.ascontiguousarray(pixels))
        with replacing(path) as file:
            if photo:
                image.save(file, "JPEG", quality=92, subsampling=0)
            else:
                image.save(file, "PNG")
    return Media(id="img0", uri=str(path), width=pixels.shape[1], height=pixels.shape[0])


@functools.cache
def coin_rows() -> list[list[np.ndarray]]:
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
    objects = []
    for entry in CUT_OUTS[split]:
        picture = photograph(entry["photograph"])
        if "outline" in entry:
            mask = pasting.outlined(entry["outline"], *picture.shape[:2])
        elif "coin" in entry:
            row, column = entry["coin"]
            mask = coin_rows()[row][column]
        elif "darker" in entry:
            mask = picture[..., 0] < entry["darker"]
        else:
            pieces, _ = ndimage.label(picture.max(2) > entry["brighter"])
            largest = 1 + int(np.argmax(np.bincount(pieces.ravel())[1:]))
            mask = np.asarray(ndimage.binary_fill_holes(pieces == largest))
        objects.append(pasting.cut_out(entry["label"], entry["photograph"], mask))
    return tuple(objects)
