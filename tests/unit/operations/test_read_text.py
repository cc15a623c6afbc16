"""Reading real scans, photos with text drawn on them, tight crops, turned and large pages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import skimage.data
from calling import scene_of, whole
from PIL import Image, ImageDraw, ImageFont

from pixelis.errors import MissingDependency
from pixelis.operations import ocr
from pixelis.operations.read_text import UNCERTAIN, ReadText, format_lines, reading_order

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
PAGE = np.repeat(skimage.data.page()[..., None], 3, axis=2)
PAGE_TEXT = (
    "Region-based segmentation Let us first determine markers of the coins and the background. These "
    "markers are pixels that we can label unambiguously as either object or background. Here, the markers "
    "are found at the two extreme parts of the histogram of grey values: markers np.zeros_like(coins)"
)


def read(picture: np.ndarray, box=None, target="img0", views=()):
    scene = scene_of(picture, views)
    return ReadText.run(ReadText.check({} if box is None else {"box": box}), scene.target(target), scene)


def plain(text: str) -> str:
    return re.sub(r"[^0-9a-z]", "", text.lower())


def said(result) -> str:
    return plain(" ".join(line["text"] for line in result.data["lines"]))


def recall(words, text: str) -> float:
    """Share of the words that stand in the text, each used up once; spaces, case and punctuation are alike."""
    result = 0
    for word in map(plain, words):
        if word in text:
            result += 1
            text = text.replace(word, "|", 1)
    return result / len(words)


def font(size: int, name="DejaVuSans.ttf") -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(FONTS / name), size)


def draw(picture: np.ndarray, words, face: ImageFont.FreeTypeFont, colour=(0, 0, 0), columns=3):
    """Words drawn in a grid over a picture, and where each stands: left, top, right, bottom."""
    image = Image.fromarray(picture)
    pen, width = ImageDraw.Draw(image), int(face.size) // 14
    boxes, x, y = [], 12, 12
    for i, word in enumerate(words):
        edge = tuple(255 - c for c in colour)
        pen.text((x, y), word, font=face, fill=colour, stroke_width=width, stroke_fill=edge)
        boxes.append(pen.textbbox((x, y), word, font=face, stroke_width=width))
        x += int(face.getlength(word)) + 42
        if i % columns == columns - 1:
            x, y = 12, y + int(face.size) + 14
    return np.asarray(image), boxes


def page(lines, turn=0) -> np.ndarray:
    image = Image.new("RGB", (700, 40 + 28 * len(lines)), "white")
    pen, face = ImageDraw.Draw(image), font(18, "DejaVuSerif.ttf")
    for i, line in enumerate(lines):
        pen.text((20, 20 + 28 * i), line, font=face, fill="black")
    return np.ascontiguousarray(np.rot90(np.asarray(image), turn))


STORY = [
    "The quick brown fox jumped over a lazy dog.",
    "Every platform shows the time of departure,",
    "coffee and sugar are sold near the entrance,",
    "and the invoice number is 4711 for 89.50 euros.",
]


@pytest.mark.slow
@pytest.mark.long
def test_a_scanned_page():
    result = read(PAGE)
    assert recall(PAGE_TEXT.split(), said(result)) >= 0.95
    text = [line["text"] for line in result.data["lines"]]
    assert text[0].startswith("Region-based")
    assert plain(text[1]) == plain("Let us first determine markers of the coins and the")
    assert result.data["num_lines"] == len(text)
    assert result.data["num_words"] == sum(len(line["words"]) for line in result.data["lines"])
    assert 0.9 < result.data["confidence"] <= 1
    json.dumps(result.data)
    assert not result.images


WORDS = [
    "Platform", "coffee", "89.50", "EXIT", "Market", "Street", "invoice", "2026", "lazily", "jumped", "every",
    "North",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("photo", "size", "name", "colour"),
    [
        pytest.param("astronaut", 40, "DejaVuSans-Bold.ttf", (255, 255, 255), marks=pytest.mark.long),
        ("coffee", 28, "DejaVuSerif.ttf", (255, 230, 60)),
        pytest.param("rocket", 16, "DejaVuSans.ttf", (255, 255, 255), marks=pytest.mark.long),
        pytest.param("chelsea", 20, "DejaVuSansMono.ttf", (0, 0, 0), marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_words_over_photos_whole_and_cut_out_tightly(photo: str, size: int, name: str, colour):
    picture, boxes = draw(getattr(skimage.data, photo)(), WORDS, font(size, name), colour, columns=2)
    height, width = picture.shape[:2]
    drawn = [(w, b) for w, b in zip(WORDS, boxes, strict=True) if b[2] < width and b[3] < height]
    assert len(drawn) >= 10
    assert recall([word for word, _ in drawn], said(read(picture))) >= 0.9
    alone, inside = [], []
    for word, (x0, y0, x1, y1) in drawn:
        alone.append(plain(word) == said(read(np.ascontiguousarray(picture[y0:y1, x0:x1]))))
        inside.append(plain(word) == said(read(picture, [x0 / width, y0 / height, x1 / width, y1 / height])))
    assert np.mean(alone) >= 0.9
    assert np.mean(inside) >= 0.9


@pytest.mark.parametrize("turn", [0, 1, 2, 3])
def test_a_page_on_its_side_or_head_is_read_in_order(turn: int):
    result = read(page(STORY, turn=turn))
    assert [plain(line["text"]) for line in result.data["lines"]] == [plain(line) for line in STORY]


def test_words_stand_where_they_were_drawn():
    picture, boxes = draw(np.full((200, 700, 3), 255, np.uint8), WORDS[:9], font(24))
    result = read(picture)
    results = {plain(w["text"]): w["box"] for line in result.data["lines"] for w in line["words"]}
    for word, (x0, y0, x1, y1) in zip(WORDS[:9], boxes, strict=True):
        a, b, c, d = np.array(results[plain(word)]) * [700, 200, 700, 200]
        shared = max(0, min(x1, c) - max(x0, a)) * max(0, min(y1, d) - max(y0, b))
        assert shared / ((x1 - x0) * (y1 - y0)) > 0.8
        assert max(abs(a - x0), abs(c - x1)) < 14


def test_only_text_in_the_region_is_returned_and_places_are_of_the_target():
    picture = page(STORY)
    height = picture.shape[0]
    (line,) = read(picture, [0, 49 / height, 1, 76 / height]).data["lines"]
    assert plain(line["text"]) == plain(STORY[1])
    crop = whole(picture[40:80], "obs1", parent="img0", box=(0.0, 40 / height, 0.5, 80 / height))
    inner = read(picture, target="obs1", views=[crop])
    (line,) = inner.data["lines"]
    assert STORY[1].startswith(line["text"][:20])
    assert line["box"][2] <= 0.52
    left, top, right, bottom = map(int, inner.text.split()[0].split(","))
    assert (left < 80, right > 950, top < 500 < bottom) == (True, True, True)


def test_no_text_is_a_success():
    for photo in (skimage.data.brick(), skimage.data.grass(), skimage.data.moon()):
        result = read(np.repeat(photo[..., None], 3, axis=2))
        assert (result.text, result.data["lines"], result.data["num_words"]) == ("no text found", [], 0)
    assert read(np.zeros((8, 8, 3), np.uint8)).text == "no text found"


@pytest.mark.slow
def test_small_text_on_a_large_page_is_found():
    image = Image.new("RGB", (2250, 3000), "white")
    pen = ImageDraw.Draw(image)
    pen.text((1500, 2600), "Footnote 4711 in small letters", font=font(15), fill="black")
    pen.text((200, 200), "HEADLINE", font=font(300), fill="black")
    lines = read(np.asarray(image)).data["lines"]
    assert [plain(line["text"]) for line in lines] == ["headline", plain("Footnote 4711 in small letters")]


@pytest.mark.slow
def test_a_thin_box_is_not_read_as_one_long_line(monkeypatch):
    """A strip of 4000x4 pixels took a minute to find nothing."""
    widths: list[int] = []
    cut = ocr.strip

    def strip(picture: np.ndarray, quad: np.ndarray) -> np.ndarray:
        out = cut(picture, quad)
        widths.append(out.shape[1])
        return out

    monkeypatch.setattr(ocr, "strip", strip)
    picture = np.full((300, 4000, 3), 230, np.uint8)
    for box in ((0, 100 / 300, 1, 104 / 300), (0.1, 0, 0.101, 1), (0.1, 100 / 300, 0.11, 104 / 300)):
        assert read(picture, box).text == "no text found"
    quads = np.array([[[0, 10], [width, 10], [width, 14], [0, 14]] for width in (604, 40)], np.float32)
    assert ocr.engine().read(picture, quads) == ([], 0)
    assert 0 < max(widths) <= ocr.STRIP_HEIGHT * 75


def lines_at(*boxes) -> list[ocr.Line]:
    return [
        ocr.Line(name, 1.0, np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]], np.float32), [0.5], [1.0])
        for name, x0, y0, x1, y1 in boxes
    ]


def order(lines) -> str:
    return " ".join(line.text for line in reading_order(lines))


def test_long_text_is_cut_for_the_policy():
    scene = scene_of(np.zeros((100, 100, 3), np.uint8))
    line = {"text": "a line of some length", "confidence": 0.99, "box": [0.1, 0.1, 0.9, 0.2], "words": []}
    text = format_lines([line] * 100, 5, scene.target("img0"), scene)
    assert len(text) <= 2000
    assert text.splitlines()[0] == "100,100,900,200 a line of some length"
    assert text.endswith(f"... and {106 - len(text.splitlines())} more lines; zoom in to read them")
    assert len(format_lines([{**line, "text": "x" * 5000}], 0, scene.target("img0"), scene)) <= 2000


def test_columns_are_read_one_after_the_other():
    left = [(f"l{i}", 0, 40 + 20 * i, 200, 55 + 20 * i) for i in range(5)]
    right = [(f"r{i}", 230, 42 + 20 * i, 430, 57 + 20 * i) for i in range(5)]
    title, foot = ("title", 50, 0, 380, 20), ("foot", 0, 200, 430, 215)
    mixed = lines_at(foot, *right, title, *left[::-1])
    assert order(mixed) == "title l0 l1 l2 l3 l4 r0 r1 r2 r3 r4 foot"


def test_a_grid_of_numbers_beside_running_text_is_read_after_it():
    prose = [(f"t{i}", 0, 22 * i, 300, 16 + 22 * i) for i in range(8)]
    places = [(340 + 60 * column, 6 + 31 * row) for row in range(5) for column in range(3)]
    grid = [(f"n{i}", x, y, x + 30, y + 16) for i, (x, y) in enumerate(places)]
    expected = [name for name, *_ in [*prose, *grid]]
    assert order(lines_at(*grid, *prose)).split() == expected


def test_a_short_line_read_with_high_confidence_is_marked_not_dropped(monkeypatch):
    engine = ocr.engine()
    quad = np.array([[0, 0], [20, 0], [20, 10], [0, 10]], np.float32)
    for confidence, survives in ((0.95, True), (0.85, False)):
        line = ocr.Line("A7", confidence, quad, [0.3, 0.7], [confidence] * 2)
        other = ocr.Line("47", 0.9, quad, [0.3, 0.7], [0.9] * 2)
        monkeypatch.setattr(engine, "_recognise", lambda picture, quads, other=other: [other] * len(quads))
        lines = engine._stable(np.zeros((20, 40, 3), np.uint8), [line])
        assert [found.text for found in lines] == ["A7"] * survives
        assert all(found.confidence < UNCERTAIN for found in lines)


@pytest.mark.long
@pytest.mark.slow
def test_the_search_for_small_text_follows_the_text_not_the_pixels(monkeypatch):
    """Twelve megapixels of fine detail, and of one line of text: the detector sees a part of them."""
    engine, seen = ocr.engine(), []
    search = engine._map
    monkeypatch.setattr(ocr, "FINE_BUDGET", 1_000_000)  # a quarter of it, for time
    monkeypatch.setattr(engine, "_map", lambda tile: seen.append(tile[..., 0].size) or search(tile))
    stars = np.tile(skimage.data.hubble_deep_field(), (4, 4, 1))[:3000, :4000]
    engine.find(np.ascontiguousarray(stars[..., ::-1]))
    assert sum(seen) < 1.05 * (ocr.COARSE_PIXELS + ocr.FINE_BUDGET)
    seen.clear()
    image = Image.new("RGB", (4000, 3000), (200, 200, 190))
    ImageDraw.Draw(image).text((2500, 1700), "small print", font=font(16), fill="black")
    assert "small print" in read(np.asarray(image)).text
    assert sum(seen) < 1.2 * ocr.COARSE_PIXELS


def test_a_missing_model_is_named_and_never_fetched(monkeypatch):
    monkeypatch.setitem(ocr.MODELS, "Rec", "not_there.onnx")
    with pytest.raises(MissingDependency, match="not_there") as error:
        ocr.Engine()
    assert "rapidocr" in error.value.fix


@pytest.mark.slow
def test_reading_opens_no_connection_and_prints_nothing():
    code = (
        "import socket, numpy as np\n"
        "def closed(*a, **k): raise AssertionError('a connection')\n"
        "socket.socket.connect = socket.create_connection = closed\n"
        "from pixelis.operations import ocr\n"
        "ocr.engine().find(np.zeros((64, 64, 3), np.uint8))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
