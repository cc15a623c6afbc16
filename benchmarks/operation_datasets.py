"""Pictures and clips with ground truth for the operations, from installed packages or a folder of Debian's
opencv-doc.

Outlines were drawn by hand, to a few pixels. The outlines of IN_SAMPLE were known when the weights that
choose among grabcut masks were set. Those of HELD_OUT were drawn afterwards, and nothing was tuned to them.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import cos, pi, sin
from pathlib import Path

import cv2
import numpy as np
import skimage.data
from scipy import ndimage
from sklearn.datasets import load_sample_images

from pixelis.datasets import pasting
from pixelis.datasets.pasting import Edges
from pixelis.operations.image import load_image

# The tests' clip generators are used, so that tests and benchmarks cover the same containers and motions.
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

SHIPPED = Path(skimage.data.__file__).parent


def photo(name: str) -> np.ndarray:
    """Return a picture, uint8 [H, W, 3], of scikit-image or scikit-learn (``china``, ``flower``)."""
    if name in ("china", "flower"):
        return load_sample_images().images[name == "flower"]
    pixels = getattr(skimage.data, name)()
    return np.ascontiguousarray(pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, 2))


def find_photo(name: str, folder: Path | None) -> np.ndarray | None:
    """Return a picture by name, or by file name from scikit-image's files or ``folder``; None if there is no
    such file.
    """
    if "." not in name:
        return photo(name)
    for root in (SHIPPED, folder):
        if root is not None and (paths := sorted(root.rglob(name))):
            return load_image(paths[0], 10**9, 10**9)
    return None


# --- text
# -----------------------------------------------------------------------------------------------------------------------

PAGE = (
    "Region-based segmentation Let us first determine markers of the coins and the background. These "
    "markers are pixels "
    "that we can label unambiguously as either object or background. Here, the markers are found at the "
    "two extreme "
    "parts of the histogram of grey values: markers = np.zeros_like(coins)"
)
PROSE = (
    "technical details are too complex to cover in the book itself. In teaching our courses, we have found "
    "it useful "
    "for the students to attempt a number of small implementation projects, which often build on one "
    "another, in order "
    "to get them used to working with real-world images and the challenges that these present. The "
    "students are then "
    "asked to choose an individual topic for each of their small-group, final projects. (Sometimes these "
    "projects even "
    "turn into conference papers!) The exercises at the end of each chapter contain numerous suggestions "
    "for smaller "
    "mid-term projects, as well as more open-ended problems whose solutions are still active research "
    "topics. Wherever "
    "possible, I encourage students to try their algorithms on their own personal photographs, since this "
    "better "
    "motivates them, often leads to creative variants on the problems, and better acquaints them with the "
    "variety and "
    "complexity of real-world imagery. In formulating and solving computer vision problems, I have often "
    "found it "
    "useful to draw inspiration from three high-level approaches:"
)
TEXTS = {
    "page.png": PAGE,
    "imageTextN.png": PROSE,
    "imageTextR.png": PROSE,
    "scenetext01.jpg": "NOTICE DOUBLE PARKING PROHIBITED AT ALL TIMES",
    "scenetext02.jpg": "Sports Centre Conference Centre Car Parks",
    "scenetext03.jpg": "the copy centre",
    "scenetext04.jpg": "GM 125",
    "scenetext05.jpg": "NO PARKING NO PARKING",
    "scenetext06.jpg": "priory galleries at the ship priory galleries the ship",
    "scenetext_segmented_word01.jpg": "HOTEL",
    "scenetext_segmented_word02.jpg": "Stationery Box",
    "scenetext_segmented_word03.jpg": "Customer Freephone Private Hire Service",
    "scenetext_segmented_word04.jpg": "FOSTER'S FOSTER'S FOSTER'S FOSTER'S",
    "scenetext_segmented_word05.jpg": "SANYO PRO xtraX MULTIMEDIA PROJECTOR",
    "scenetext_word01.jpg": "CHINA",
    "scenetext_word02.jpg": "HERE",
    "scenetext_word03.jpg": "riser",
    "scenetext_word04.jpg": "Produkt",
}
"""The text on real pictures. All but the first are in opencv-doc."""

BACKGROUNDS = (
    "astronaut",
    "coffee",
    "chelsea",
    "rocket",
    "retina",
    "brick",
    "grass",
    "camera",
    "immunohistochemistry",
)


def plain(text: str) -> str:
    """Reduce text to lower-case letters and digits."""
    return re.sub(r"[^0-9a-z]", "", text.lower())


_TEXT = (
    "reading small letters over photographs every zoom should answer quickly Total 1234 invoice EXIT Paris "
    "2026 "
    "Platform coffee sugar milk 89.50 Hello World Quick brown foxes jumped lazily Speed limit 70 North "
    "West Market "
    "Street Open daily"
)
WORDS = _TEXT.split()


def recall(words: list[str], text: str) -> int:
    """Count the words that occur in the text; each occurrence counts once."""
    text, count = plain(text), 0
    for word in words:
        key = plain(word)
        if key and key in text:
            text, count = text.replace(key, "|", 1), count + 1
    return count


def rendered(name: str, seed: int) -> tuple[np.ndarray, list[tuple[str, Edges]]]:
    """Return a photo with words of 12 to 64 pixels at random places, and the words with their edges in
    pixels.
    """
    picture, phrases = pasting.write_words(
        photo(name), random.Random(seed), WORDS, (12, 16, 24, 40, 64), max_words=30
    )
    return picture, [word for phrase in phrases for word in phrase]


# --- objects
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outlined:
    """An object with its true mask, bool [H, W], and a point on it that a person would click, x and y in
    pixels.
    """

    name: str
    picture: np.ndarray
    mask: np.ndarray
    point: tuple[int, int]

    @property
    def box(self) -> Edges:
        """Return left, top, right and bottom in pixels."""
        x, y, width, height = cv2.boundingRect(self.mask.astype(np.uint8))
        return x, y, x + width, y + height


IN_SAMPLE = {
    "flower": ("flower", "(308,223,136,137)", (308, 223)),
    "cup": (
        "coffee",
        (
            "172,100 185,55 225,25 290,18 350,28 390,60 401,100 398,150 385,195 350,250 310,278 250,280 "
            "215,262 180,160"
        ),
        (200, 160),
    ),
    "saucer": ("coffee", "(278,234,200,150)", (140, 250)),
    "helmet": ("astronaut", "(387,450,107,105)", (370, 420)),
    "person": (
        "astronaut",
        "160,60 170,25 215,14 260,18 290,50 297,90 285,125 262,130 258,165 300,200 305,245 350,275 360,340 "
        "310,365 280,430 "
        "280,512 100,512 25,480 35,400 60,290 115,210 120,170 150,150 190,150 175,120",
        (120, 300),
    ),
    "rocket": ("rocket", "322,127 332,150 333,405 311,405 311,150", (322, 280)),
    "man": (
        "camera",
        "165,85 185,65 230,65 262,100 265,125 240,150 240,190 232,200 270,210 300,180 325,175 330,200 "
        "300,250 280,295 "
        "235,300 205,285 140,370 120,380 145,440 150,512 90,512 75,420 40,360 25,340 0,300 10,260 20,200 "
        "60,150 110,115 "
        "160,105",
        (100, 250),
    ),
    "left eye": ("chelsea", "(171,117,34,29)", (150, 117)),
    "right eye": ("chelsea", "(319,138,27,26)", (305, 138)),
    "spoon": ("coffee", "(366,287,40,38)", (366, 287)),
    "patch": ("astronaut", "(169,385,36,38)", (169, 385)),
    "crema": ("coffee", "(285,145,85,48)", (285, 150)),
}
"""name: (picture, outline of `pasting.outlined`, a point on the object)."""

HELD_OUT = {
    "seat": (
        "motorcycle_left.png",
        "152,165 165,158 190,163 215,167 240,166 260,185 275,193 310,192 345,187 357,190 355,202 330,222 "
        "300,240 275,252 "
        "262,248 245,232 215,215 180,205 160,190",
        (220, 190),
    ),
    "headlight": ("motorcycle_left.png", "(538,157,24,31)", (545, 160)),
    "indicator": ("motorcycle_left.png", "(572,130,10,12)", (572, 130)),
    "bottle": ("motorcycle_left.png", "402,57 410,52 419,59 418,91 402,91", (410, 75)),
    "carton": ("motorcycle_left.png", "528,30 596,28 590,98 530,98", (560, 70)),
    "apple": (
        "apple.jpg",
        "101,82 124,64 150,60 196,61 229,59 274,57 313,59 353,65 392,82 425,108 447,140 460,189 460,229 "
        "454,287 441,340 "
        "421,392 398,438 379,470 353,487 320,493 287,495 261,493 235,487 202,493 176,495 140,487 118,474 "
        "101,444 82,392 "
        "62,340 49,281 42,248 42,209 49,176 59,137 78,101",
        (200, 260),
    ),
    "orange": (
        "orange.jpg",
        "101,91 137,72 189,57 242,52 287,52 333,62 379,85 418,121 444,163 457,209 462,255 457,307 444,359 "
        "418,411 385,451 "
        "356,477 340,491 230,491 144,491 118,464 91,431 65,392 46,346 36,300 33,255 39,202 56,150 75,118",
        (300, 250),
    ),
    "orange wedge": (
        "fruits.jpg",
        "199,54 251,42 268,72 281,118 294,163 307,189 314,229 323,268 336,320 330,346 319,385 323,418 "
        "346,451 349,460 "
        "307,474 261,478 216,472 167,451 131,418 124,405 121,353 108,320 78,287 75,261 78,222 91,183 "
        "111,144 140,101 170,75",
        (180, 250),
    ),
    "lemon": (
        "fruits.jpg",
        "512,248 470,251 425,268 385,297 346,333 327,366 320,392 327,425 346,451 372,477 385,480 512,480",
        (420, 380),
    ),
    "kiwi": (
        "fruits.jpg",
        "0,278 39,281 78,297 108,320 121,356 123,398 111,431 85,457 62,480 0,480",
        (60, 340),
    ),
    "squirrel": (
        "squirrel_cls.jpg",
        "194,136 205,119 225,104 246,116 254,130 263,157 266,133 276,128 290,136 300,133 307,140 328,150 "
        "345,167 356,184 "
        "351,194 334,198 338,208 328,212 310,222 328,222 348,229 351,246 329,247 310,249 300,263 287,287 "
        "273,307 276,321 "
        "270,328 256,321 246,334 232,351 215,360 198,358 174,345 154,321 140,293 131,246 147,212 164,184 "
        "184,167 194,150",
        (205, 265),
    ),
    "butterfly": (
        "butterfly.jpg",
        "9,215 7,224 13,233 27,240 49,247 72,249 90,255 108,262 121,264 130,280 146,291 148,282 161,291 "
        "173,276 186,291 "
        "193,314 197,309 199,289 213,294 220,282 229,287 235,264 238,247 242,264 255,287 260,280 269,298 "
        "282,309 312,310 "
        "318,296 329,287 354,269 361,255 390,244 412,233 430,229 457,220 480,208 485,197 475,179 457,157 "
        "430,134 399,117 "
        "372,110 345,104 305,102 269,103 247,105 244,81 231,76 218,81 218,96 214,108 179,109 148,112 "
        "117,121 81,139 49,161 "
        "27,184",
        (150, 150),
    ),
    "black lid": ("stuff.jpg", "(228,56,35,38)", (228, 55)),
    "white lid": ("stuff.jpg", "(395,185,58,59)", (395, 185)),
    "coin": ("stuff.jpg", "(210,307,20,20)", (210, 307)),
    "lighter": ("stuff.jpg", "318,314 357,314 357,343 354,459 317,459", (336, 400)),
    "ball": ("messi5.jpg", "(363,312,24,24)", (363, 310)),
    "player": (
        "messi5.jpg",
        "69,89 82,87 93,91 102,100 130,109 155,117 175,115 203,111 214,111 208,92 214,72 236,63 253,66 "
        "262,78 262,95 "
        "256,111 287,111 295,131 309,137 315,145 337,158 354,159 377,155 374,167 365,179 346,173 321,162 "
        "304,148 287,151 "
        "284,162 295,196 295,212 321,218 354,238 382,243 410,254 438,260 455,277 455,289 433,280 410,271 "
        "382,260 354,263 "
        "337,254 329,274 298,274 278,269 262,285 248,291 264,299 287,316 307,322 307,334 256,336 253,327 "
        "264,316 248,305 "
        "236,299 222,288 220,277 225,254 222,246 225,243 208,187 194,148 163,142 152,131 124,125 105,109 "
        "91,100 79,95 71,93",
        (240, 150),
    ),
}


def outlined(objects: dict[str, tuple[str, str, tuple[int, int]]], folder: Path | None) -> list[Outlined]:
    """Return the objects with hand-drawn outlines; skip those whose photo is not installed."""
    available = []
    for name, (picture, shape, point) in objects.items():
        pixels = find_photo(picture, folder)
        if pixels is None:
            continue
        size = pixels.shape[:2]
        mask = pasting.outlined(shape, *size)
        if name == "saucer":
            mask |= pasting.outlined(IN_SAMPLE["cup"][1], *size)
        available.append(Outlined(name, pixels, mask, point))
    return available


def coins() -> list[Outlined]:
    """Return the coins of scikit-image, with masks by the watershed of its documentation."""
    picture, coins = photo("coins"), []
    for i, mask in enumerate(pasting.coin_masks(), 1):
        y, x = ndimage.center_of_mass(mask)
        coins.append(Outlined(f"coin {i}", picture, mask, (round(x), round(y))))
    return coins


def composites(count: int = 24, seed: int = 5) -> list[Outlined]:
    """Return photos cut out as discs, horses, flowers and rectangles, pasted on other photos; masks are
    exact.
    """
    rng = np.random.default_rng(seed)
    backgrounds = [
        photo(name)
        for name in ("astronaut", "coffee", "chelsea", "rocket", "china", "flower", "brick", "grass")
    ]
    coffee, face, flower, retina = photo("coffee"), photo("astronaut"), photo("flower"), photo("retina")
    fillings = [
        photo("gravel"),
        photo("immunohistochemistry"),
        photo("hubble_deep_field")[:512, :512],
        coffee[80:380, 100:460],
        face[200:500, 0:300],
        retina[300:1000, 300:1000],
        photo("moon"),
        flower[90:350, 180:440],
        photo("chelsea"),
    ]
    cutouts = []
    for i in range(count):
        picture = backgrounds[i % len(backgrounds)].copy()
        height, width = picture.shape[:2]
        side = int(min(height, width) * rng.uniform(0.2, 0.6))
        shape = _shape(i % 4, side, rng)
        filling = cv2.resize(fillings[i % len(fillings)], (side, side), interpolation=cv2.INTER_AREA)
        x, y = rng.integers(0, width - side + 1), rng.integers(0, height - side + 1)
        alpha = cv2.GaussianBlur(shape.astype(np.float32), (0, 0), 0.7)[..., None]
        part = picture[y : y + side, x : x + side]
        part[:] = (filling * alpha + part * (1 - alpha)).astype(np.uint8)
        mask = np.zeros((height, width), bool)
        mask[y : y + side, x : x + side] = shape > 0
        row, column = np.unravel_index(ndimage.distance_transform_edt(mask).argmax(), mask.shape)
        cutouts.append(Outlined(f"cut-out {i}", picture, mask, (int(column), int(row))))
    return cutouts


def _shape(kind: int, side: int, rng: np.random.Generator) -> np.ndarray:
    """Return a mask, uint8 [side, side]: an ellipse, a horse, a flower or a rectangle."""
    shape = np.zeros((side, side), np.uint8)
    if kind == 0:
        axes = int(side * 0.45), int(side * rng.uniform(0.25, 0.45))
        cv2.ellipse(shape, (side // 2, side // 2), axes, float(rng.uniform(0, 180)), 0, 360, 1, -1)
    elif kind == 1:
        horse = (~skimage.data.horse().astype(bool)).astype(np.uint8)
        shape = cv2.resize(horse, (side, side), interpolation=cv2.INTER_NEAREST)
    elif kind == 2:
        angle = np.linspace(0, 2 * np.pi, 120)
        radius = side * (0.35 + 0.1 * np.sin(3 * angle + rng.uniform(0, 6)) * rng.uniform(0.3, 1))
        points = np.stack([side / 2 + radius * np.cos(angle), side / 2 + radius * np.sin(angle)], 1)
        cv2.fillPoly(shape, [points.astype(np.int32)], 1)
    else:
        size = side * 0.6, side * rng.uniform(0.3, 0.6)
        cv2.fillPoly(
            shape,
            [cv2.boxPoints(((side / 2, side / 2), size, float(rng.uniform(0, 90)))).astype(np.int32)],
            1,
        )
    return shape


def vqa(count: int = 30) -> list[Outlined]:
    """Return the 64 x 64 drawings of easy-vqa, each with one flat shape on a background."""
    import easy_vqa

    folder = Path(easy_vqa.__file__).parent / "data" / "train" / "images"
    drawings = []
    for i in range(count):
        picture = load_image(folder / f"{i}.png", 10**9, 10**9)
        mask, _ = pasting.flat_mask(picture)
        y, x = ndimage.center_of_mass(mask)
        drawings.append(Outlined(f"drawing {i}", picture, mask, (round(x), round(y))))
    return drawings


# --- motion
# ---------------------------------------------------------------------------------------------------------------------


Motion = tuple[str, tuple[int, int], str, Callable[[float], tuple[float, float]], Callable[[float], float]]

MOTIONS: dict[str, Motion] = {
    "face on 720p": (
        "BUNNY",
        (1280, 720),
        "face",
        lambda t: (0.2 + 0.6 * t, 0.5 + 0.25 * sin(2 * pi * t)),
        lambda t: 140 + 84 * t,
    ),
    "large cat on 720p": (
        "BUNNY",
        (1280, 720),
        "cat",
        lambda t: (0.4 + 0.2 * t, 0.5),
        lambda t: 231 + 198 * t,
    ),
    "shrinking cat": (
        "BIKES",
        (640, 272),
        "cat",
        lambda t: (0.8 - 0.6 * t, 0.35 + 0.3 * t),
        lambda t: 90 - 36 * t,
    ),
    "small face": (
        "BIKES",
        (640, 272),
        "face",
        lambda t: (0.1 + 0.8 * t, 0.5 + 0.3 * sin(9 * t)),
        lambda t: 28,
    ),
    "cat on QCIF": (
        "CARPHONE",
        (176, 144),
        "cat",
        lambda t: (0.5 + 0.25 * cos(6 * t), 0.5 + 0.2 * sin(6 * t)),
        lambda t: 45,
    ),
    "fast cup": (
        "BIKES",
        (640, 272),
        "cup",
        lambda t: (0.5 + 0.4 * sin(12 * t), 0.5 + 0.25 * cos(7 * t)),
        lambda t: 70 + 20 * sin(5 * t),
    ),
    "growing flower": (
        "BUNNY",
        (640, 360),
        "flower",
        lambda t: (0.6 - 0.2 * t, 0.45 + 0.1 * sin(8 * t)),
        lambda t: 60 + 90 * t,
    ),
}
"""name: (clip, frame size, pasted object, its centre and its height in pixels at t in 0..1).

The last two were added after the tracker's constants were set. The others are also used by its tests.
"""


def moving(name: str, count: int) -> tuple[bytes, list[Edges | None]]:
    """Return a clip (mp4) of real footage with a moving photo pasted on it, and the photo's true box in each
    frame.
    """
    import clips

    clip, size, pasted, path, height = MOTIONS[name]
    frames, truth = clips.paste(
        clips.footage(getattr(clips, clip), count, *size), subject(pasted), path, height
    )
    return clips.encode(frames, options={"crf": "20", "preset": "veryfast"}), truth


def subject(name: str) -> np.ndarray:
    """Return the part of a photo that shows a face, a cat, a cup or a flower, uint8 [h, w, 3]."""
    source, rows, columns = {
        "face": ("astronaut", slice(60, 230), slice(150, 300)),
        "cat": ("chelsea", slice(20, 260), slice(80, 330)),
        "cup": ("coffee", slice(15, 285), slice(165, 405)),
        "flower": ("flower", slice(90, 360), slice(170, 446)),
    }[name]
    return photo(source)[rows, columns]


def textures(count: int, seed: int) -> Iterator[np.ndarray]:
    """Yield small random parts of photos without text."""
    rng = np.random.default_rng(seed)
    for name in (
        "chelsea",
        "coffee",
        "retina",
        "brick",
        "grass",
        "gravel",
        "moon",
        "immunohistochemistry",
        "hubble_deep_field",
    ):
        picture = photo(name)
        for _ in range(count):
            width = int(rng.integers(16, 200))
            height = int(width * rng.choice([0.25, 0.4, 0.7, 1, 2]))
            if 5 <= height < picture.shape[0] and width < picture.shape[1]:
                y, x = rng.integers(0, picture.shape[0] - height), rng.integers(0, picture.shape[1] - width)
                yield np.ascontiguousarray(picture[y : y + height, x : x + width])
