"""Annotated pictures and clips from installed packages: ``packaged:NAME?split=train&count=200``.

Questions have annotations and no text. The same name gives the same files, written to ``folder`` when first
read. Splits share no drawing, digit, row of coins or photograph, not even with `cards`.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pixelis.datasets import cards, pasting
from pixelis.datasets.cards import SPLITS, package_file
from pixelis.datasets.corruptions import corruption_of
from pixelis.datasets.packaged_clips import EVENTS, clips
from pixelis.datasets.packaged_items import (
    GROUNDS,
    SCHEME,
    Item,
    coin_rows,
    cut_outs,
    ground_of,
    picture_of,
    question_of,
    region_of,
    shares,
)
from pixelis.datasets.pasting import photograph
from pixelis.datasets.source_options import parse_options, suggest, whole_option
from pixelis.errors import BadInput
from pixelis.operations import masks
from pixelis.records import Annotations, Box, Line, Media, Question, Region

FOLDER = "runs/media"
LEVELS = ("simple", "medium", "hard")
SHIFTS = ("turned", "mirrored", "dark")
DARKNESS = 0.05
"""Factor of the brightness under the shift `dark`."""
SHAPES = ("circle", "rectangle", "triangle")
TILE = 64 * 3
"""Side of a drawing on a board, three times its own."""

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
    "Library Bakery Museum Harbour Station Garden Market Pharmacy Exit Entrance Closed Open Welcome Danger "
    "Platform Ticket Office Coffee Sugar Butter Orange Winter Summer Monday Friday North South Bridge Castle "
    "Theatre Hotel Airport Parking Private Public Street Avenue School Doctor Engine Signal Number Total "
    "Invoice Receipt Discount Weather Forest"
)


def read(source: str, folder: str | Path | None = None) -> Iterator[Question]:
    name = source.removeprefix(SCHEME).partition("?")[0]
    if name not in SOURCES:
        fix = f"choose from {', '.join(SOURCES)}"
        raise BadInput(f"{source}: no packaged source {name!r}{suggest(name, SOURCES)}", fix=fix)
    own, corrupted = OPTIONS.get(name, ()), () if name == "clips" else ("corruption", "severity")
    options = parse_options(source, ("split", "count", "seed", "folder", *own, *corrupted))[1]
    count, seed = whole_option(source, options, "count", 200), whole_option(source, options, "seed", 0)
    shifts = SHIFTS if name == "text" else cards.SHIFTS
    known = {"split": SPLITS, "level": LEVELS, "shift": shifts, "event": EVENTS}
    for option, values in known.items():
        if unknown := set(filter(None, options.get(option, "").split(","))) - set(values):
            raise BadInput(f"{source}: unknown {option} {min(unknown)!r}", fix=f"use {', '.join(values)}")
    path = Path(options.get("folder", folder or FOLDER))
    own_options = {key: options[key] for key in own if key in options}
    corruption = corruption_of(source, options)
    for index in range(count):
        item = Item(name, options.get("split", "train"), seed, index, path, own_options, corruption)
        yield SOURCES[name](item)


# Drawings


@functools.cache
def _drawings(split: str) -> tuple[tuple[int, str], ...]:
    with package_file("easy_vqa/data/train/questions.json").open(encoding="utf-8") as file:
        rows = json.load(file)
    shapes: dict[int, str] = {}
    for text, answer, number in rows:
        named = [shape for shape in SHAPES if f" {shape}?" in text and text.startswith("what")]
        if named or answer in SHAPES:
            shapes[number] = named[0] if named else answer
    drawings = sorted(shapes.items())
    order = np.random.default_rng(20).permutation(len(drawings))
    return tuple(drawings[i] for i in cards.split_part(order, split, (8, 9)))


def shapes(item: Item) -> Question:
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
        regions.append(region_of(len(regions), label, mask, color=pasting.INKS[ink]))
    question = question_of(item, picture_of(item, board, photo=False), Annotations(regions=regions))
    return question if item.options.get("pairs", "no") == "no" else _with_copy(question, item, board)


def _with_copy(question: Question, item: Item, board: np.ndarray) -> Question:
    """The board and a copy of it, in which half of the time one shape has another colour."""
    assert question.annotations is not None
    rng, copy = np.random.default_rng([item.seed, item.index, 1]), board.copy()
    regions = [
        r.model_copy(update={"id": f"s{r.id[1:]}", "media": "img1"}) for r in question.annotations.regions
    ]
    if rng.random() < 0.5:
        number = int(rng.integers(len(regions)))
        color = regions[number].attributes["color"]
        inks = [(ink, name) for ink, name in pasting.INKS.items() if name != color]
        ink, other = inks[int(rng.integers(len(inks)))]
        copy[masks.decode(regions[number].mask).full()] = ink
        regions[number] = regions[number].model_copy(update={"attributes": {"color": other}})
    second = picture_of(item, copy, photo=False, part="-copy").model_copy(update={"id": "img1"})
    notes = Annotations(regions=[*question.annotations.regions, *regions])
    return question.model_copy(update={"media": [*question.media, second], "annotations": notes})


def digits(item: Item) -> Question:
    """A scene of `cards` with all of its cards; at level simple, a close view of its target."""
    if item.options.get("clip", "no") != "no":
        return _digits_clip(item)
    level = item.options.get("level") or LEVELS[item.index % len(LEVELS)]
    shift = item.options.get("shift", "")
    uri = cards.picture_uri(item.split, item.seed, item.index, shift, corruption=item.corruption)
    scene = cards.scene_of(item.split, item.seed, item.index, shift)
    left, top, side = 0, 0, cards.PICTURE
    if level == "simple":
        # Cards are 24 pixels apart, so that no other is visible
        card, side = scene.target, int(item.rng.integers(72, 85))
        margin = item.rng.integers(0, side - cards.CARD + 1, 2)
        left = min(max(0, card.left - int(margin[0])), cards.PICTURE - side)
        top = min(max(0, card.top - int(margin[1])), cards.PICTURE - side)
        uri += f"&crop={left},{top},{left + side},{top + side}"
    regions: list[Region] = []
    for card in scene.cards:
        x0, y0 = card.left - left, card.top - top
        edges = (x0, y0, x0 + cards.CARD, y0 + cards.CARD)
        if min(edges) >= 0 and max(edges) <= side:
            id, box = f"r{len(regions)}", shares(edges, side, side)
            attributes = {"color": card.colour, "digit": str(card.digit)}
            regions.append(Region(id=id, label="card", box=box, attributes=attributes))
    media = Media(id="img0", uri=uri, width=side, height=side)
    return question_of(item, media, Annotations(regions=regions), level=level)


def _digits_clip(item: Item) -> Question:
    """The scene as a clip of one frame a second, in which each card shows another digit every second.

    The target is as large in every other clip as the digit of a card in a good zoom.
    """
    sizes = "1" if item.index % 2 else str(cards.MAX_SIZE)
    seconds = range(cards.CLIP_SECONDS)
    shift = item.options.get("shift", "")
    frames = [
        cards.picture_uri(item.split, item.seed, item.index, shift, second=n, sizes=sizes) for n in seconds
    ]
    regions = [
        Region(
            id=f"r{number}-{second}",
            label="card",
            media="vid0",
            frame=second,
            box=card.box,
            attributes={"color": card.colour, "digit": str(card.digit)},
        )
        for second in seconds
        for number, card in enumerate(
            cards.scene_of(item.split, item.seed, item.index, shift, second, sizes).cards
        )
    ]
    media = Media(id="vid0", kind="video", frames=frames, fps=1.0)
    return question_of(item, media, Annotations(regions=regions))


# Coins, photographs and words


def coins(item: Item) -> Question:
    """Neighbouring coins, enlarged; two rows train, one validates, one tests."""
    rng, picture = item.rng, photograph("skimage/data/coins.png")
    rows = {"train": (0, 1), "validation": (2,), "test": (3,)}[item.split]
    first, last = sorted(int(v) for v in rng.choice(rows, 2))
    left, right = sorted(int(v) for v in rng.integers(0, 6, 2))
    selected = [mask for row in coin_rows()[first : last + 1] for mask in row[left : right + 1]]
    inside = np.logical_or.reduce(selected)
    every = np.logical_or.reduce([mask for row in coin_rows() for mask in row])
    window = _free_window(inside, every & ~inside)
    scale, steps = int(rng.integers(2, 5)), tuple(int(v) for v in rng.choice((-1, 1), 2))

    def crop(pixels: np.ndarray) -> np.ndarray:
        return pixels[window][:: steps[0], :: steps[1]]

    size = crop(picture).shape[1] * scale, crop(picture).shape[0] * scale
    pixels = np.asarray(Image.fromarray(crop(picture)).resize(size, Image.Resampling.BICUBIC))
    enlarged = [crop(mask).repeat(scale, 0).repeat(scale, 1) for mask in selected]
    regions = [region_of(i, "coin", mask) for i, mask in enumerate(enlarged)]
    return question_of(item, picture_of(item, pixels), Annotations(regions=regions))


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


def photos(item: Item) -> Question:
    rng = item.rng
    ground = GROUNDS[item.split][int(rng.integers(len(GROUNDS[item.split])))]
    picture = ground_of(ground).copy()
    height, width = picture.shape[:2]
    kinds = [cut_out for cut_out in cut_outs(item.split) if cut_out.source != ground]
    selected = rng.choice(len(kinds), min(len(kinds), int(rng.integers(1, 4))), replace=False)
    objects = [kinds[int(i)] for i in selected for _ in range(int(rng.integers(1, 5)))][:7]
    occupied, regions = np.zeros((height, width), bool), list[Region]()
    for cut_out in (objects * 2)[: max(2, len(objects))]:
        for _ in range(30):
            piece = cut_out.resized(
                int(min(height, width) * rng.uniform(0.14, 0.4)), bool(rng.random() < 0.5)
            )
            rows, columns = piece.mask.shape
            if rows + 8 >= height or columns + 8 >= width:
                continue
            left, top = int(rng.integers(4, width - columns - 4)), int(rng.integers(4, height - rows - 4))
            around = slice(max(0, top - 12), top + rows + 12), slice(max(0, left - 12), left + columns + 12)
            if not occupied[around].any():
                occupied[around] = True
                regions.append(
                    region_of(len(regions), cut_out.label, pasting.paste(picture, piece, left, top))
                )
                break
    return question_of(item, picture_of(item, picture), Annotations(regions=regions))


def text(item: Item) -> Question:
    """Phrases over a photograph, annotated as lines and words; the first item of train is the page."""
    if item.split == "train" and item.index == 0 and not item.one_of("shift"):
        notes = Annotations(lines=[Line(text=line) for line in PAGE])
        return question_of(item, picture_of(item, photograph("skimage/data/page.png"), photo=False), notes)
    rng = item.rng
    ground = ground_of(GROUNDS[item.split][int(rng.integers(len(GROUNDS[item.split])))])
    numbers = [f"{v / 100:.2f}" for v in rng.integers(100, 99999, 8)] + [
        str(v) for v in rng.integers(10, 9999, 8)
    ]
    words, dice = [*SIGNS.split(), *numbers], random.Random(int(rng.integers(2**31)))
    max_words = int(rng.integers(3, 12))
    pixels, phrases = pasting.write_words(ground, dice, words, (20, 26, 34, 44), max_words=max_words)
    height, width = pixels.shape[:2]
    lines = []
    for phrase in phrases:
        corners = np.asarray([edges for _, edges in phrase])
        hull = (*corners[:, :2].min(0).tolist(), *corners[:, 2:].max(0).tolist())
        lines.append(Line(text=" ".join(word for word, _ in phrase), box=shares(hull, width, height)))
        lines += [Line(text=word, box=shares(edges, width, height), level="word") for word, edges in phrase]
    meta: dict[str, Any] = {}
    if shift := item.one_of("shift"):
        meta["shift"] = shift
    if shift == "dark":
        pixels = (pixels * DARKNESS).astype(np.uint8)
    elif shift == "mirrored":
        pixels = pixels[:, ::-1]
        lines = [_moved(line, lambda x0, y0, x1, y1: (1 - x1, y0, 1 - x0, y1)) for line in lines]
    elif shift == "turned":
        quarters = int(np.random.default_rng([item.seed, item.index]).integers(1, 4))
        pixels, meta["turned"] = np.rot90(pixels, -quarters), 90 * quarters
        for _ in range(quarters):  # clockwise
            lines = [_moved(line, lambda x0, y0, x1, y1: (1 - y1, x0, 1 - y0, x1)) for line in lines]
    # JPEG would leave nothing of what is faint.
    return question_of(
        item, picture_of(item, pixels, photo=shift != "dark"), Annotations(lines=lines), **meta
    )


def _moved(line: Line, move: Callable[..., Box]) -> Line:
    assert line.box is not None
    return line.model_copy(update={"box": move(*line.box)})


SOURCES: dict[str, Callable[[Item], Question]] = {
    "shapes": shapes,
    "digits": digits,
    "coins": coins,
    "text": text,
    "photos": photos,
    "clips": clips,
}
OPTIONS = {
    "clips": ("event",),
    "digits": ("level", "clip", "shift"),
    "shapes": ("pairs",),
    "text": ("shift",),
}
