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
from PIL import Image, ImageDraw, ImageFont

from pixelis.errors import MissingDependency, OperationError
from pixelis.operations import Scene, execute, ocr
from pixelis.operations.read_text import UNCERTAIN, ReadText, format_lines, reading_order
from pixelis.records import Action, ImageView

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
PAGE = np.repeat(skimage.data.page()[..., None], 3, axis=2)
PAGE_TEXT = (
    "Region-based segmentation Let us first determine markers of the coins and the background. These "
    "markers are pixels that we "
    "can label unambiguously as either object or background. Here, the markers are found at the two "
    "extreme parts of the "
    "histogram of grey values: markers np.zeros_like(coins)"
)


def view_of(picture: np.ndarray, name="img0", **links) -> ImageView:
    size = (picture.shape[1], picture.shape[0])
    return ImageView(id=name, source_size=size, view_size=size, **links)


def read(picture: np.ndarray, box=None, target="img0", images=None, kind="thousand"):
    scene = Scene({"img0": picture}, images or [view_of(picture)], kind=kind)
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


def draw(
    picture: np.ndarray,
    words,
    size: int,
    font="DejaVuSans.ttf",
    colour=(0, 0, 0),
    gap=14,
    at=(12, 12),
    columns=3,
):
    """Words drawn in a grid over a picture, and where each stands: left, top, right, bottom."""
    image = Image.fromarray(picture)
    pen, face = ImageDraw.Draw(image), ImageFont.truetype(str(FONTS / font), size)
    boxes, (x, y) = [], at
    for i, word in enumerate(words):
        pen.text(
            (x, y),
            word,
            font=face,
            fill=colour,
            stroke_width=size // 14,
            stroke_fill=tuple(255 - c for c in colour),
        )
        boxes.append(pen.textbbox((x, y), word, font=face, stroke_width=size // 14))
        x += int(face.getlength(word)) + 3 * gap
        if i % columns == columns - 1:
            x, y = at[0], y + size + gap
    return np.asarray(image), boxes


def page(lines, size=18, width=700, turn=0) -> np.ndarray:
    image = Image.new("RGB", (width, 40 + int(1.6 * size) * len(lines)), "white")
    pen, face = ImageDraw.Draw(image), ImageFont.truetype(str(FONTS / "DejaVuSerif.ttf"), size)
    for i, line in enumerate(lines):
        pen.text((20, 20 + int(1.6 * size) * i), line, font=face, fill="black")
    return np.ascontiguousarray(np.rot90(np.asarray(image), turn))


STORY = [
    "The quick brown fox jumped over a lazy dog.",
    "Every platform shows the time of departure,",
    "coffee and sugar are sold near the entrance,",
    "and the invoice number is 4711 for 89.50 euros.",
]


@pytest.mark.slow
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
    ("photo", "size", "font", "colour"),
    [
        pytest.param("astronaut", 40, "DejaVuSans-Bold.ttf", (255, 255, 255), marks=pytest.mark.long),
        ("coffee", 28, "DejaVuSerif.ttf", (255, 230, 60)),
        pytest.param("rocket", 16, "DejaVuSans.ttf", (255, 255, 255), marks=pytest.mark.long),
        pytest.param("chelsea", 20, "DejaVuSansMono.ttf", (0, 0, 0), marks=pytest.mark.long),
    ],
)
def test_words_over_photos_whole_and_cut_out_tightly(photo: str, size: int, font: str, colour):
    picture, boxes = draw(getattr(skimage.data, photo)(), WORDS, size, font, colour, columns=2)
    fits = [
        (w, b)
        for w, b in zip(WORDS, boxes, strict=True)
        if b[2] < picture.shape[1] and b[3] < picture.shape[0]
    ]
    assert len(fits) >= 10
    assert recall([word for word, _ in fits], said(read(picture))) >= 0.9
    height, width = picture.shape[:2]
    alone = [plain(w) == said(read(np.ascontiguousarray(picture[t:b, x0:x1]))) for w, (x0, t, x1, b) in fits]
    inside = [
        plain(w) == said(read(picture, [x0 / width, t / height, x1 / width, b / height]))
        for w, (x0, t, x1, b) in fits
    ]
    assert np.mean(alone) >= 0.9
    assert np.mean(inside) >= 0.9


@pytest.mark.parametrize("turn", [0, 1, 2, 3])
def test_a_page_on_its_side_or_head_is_read_in_order(turn: int):
    result = read(page(STORY, turn=turn))
    assert [plain(line["text"]) for line in result.data["lines"]] == [plain(line) for line in STORY]


def test_words_stand_where_they_were_drawn():
    picture, boxes = draw(np.full((200, 700, 3), 255, np.uint8), WORDS[:9], 24)
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
    result = read(picture, [0, 49 / height, 1, 76 / height])
    (line,) = result.data["lines"]
    assert plain(line["text"]) == plain(STORY[1])
    crop = view_of(picture[40:80], "obs1", parent="img0", box=(0.0, 40 / height, 0.5, 80 / height))
    inner = read(picture, target="obs1", images=[view_of(picture), crop])
    assert "number" not in inner.text
    (line,) = inner.data["lines"]
    assert STORY[1].startswith(line["text"][:20])
    assert line["box"][2] <= 0.52
    left, top, right, bottom = map(int, inner.text.split()[0].split(","))
    assert left < 80
    assert right > 950
    assert top < 500 < bottom


def test_no_text_is_a_success():
    for photo in (skimage.data.brick(), skimage.data.grass(), skimage.data.moon()):
        result = read(np.repeat(photo[..., None], 3, axis=2))
        assert (result.text, result.data["lines"], result.data["num_words"]) == ("no text found", [], 0)
    assert read(np.zeros((8, 8, 3), np.uint8)).text == "no text found"


@pytest.mark.slow
def test_small_text_on_a_large_page_is_found_in_bounded_time():
    image = Image.new("RGB", (2250, 3000), "white")
    pen, face = ImageDraw.Draw(image), ImageFont.truetype(str(FONTS / "DejaVuSans.ttf"), 15)
    pen.text((1500, 2600), "Footnote 4711 in small letters", font=face, fill="black")
    pen.text(
        (200, 200), "HEADLINE", font=ImageFont.truetype(str(FONTS / "DejaVuSans.ttf"), 300), fill="black"
    )
    result = read(np.asarray(image))
    expected = ["headline", plain("Footnote 4711 in small letters")]
    assert [plain(line["text"]) for line in result.data["lines"]] == expected


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
    assert widths
    assert max(widths) <= ocr.STRIP_HEIGHT * 75
    quads = np.array([[[0, 10], [width, 10], [width, 14], [0, 14]] for width in (604, 40)], np.float32)
    assert ocr.engine().read(picture, quads) == ([], 0)
    assert max(widths) <= ocr.STRIP_HEIGHT * 75


def test_long_text_is_cut_for_the_policy():
    picture = np.zeros((100, 100, 3), np.uint8)
    scene = Scene({"img0": picture}, [view_of(picture)])
    line = {"text": "a line of some length", "confidence": 0.99, "box": [0.1, 0.1, 0.9, 0.2], "words": []}
    text = format_lines([line] * 100, 5, scene.target("img0"), scene)
    assert len(text) <= 2000
    shown = len(text.splitlines()) - 1
    assert text.splitlines()[0] == "100,100,900,200 a line of some length"
    assert text.endswith(f"... and {105 - shown} more lines; zoom in to read them")
    assert len(format_lines([{**line, "text": "x" * 5000}], 0, scene.target("img0"), scene)) <= 2000


def lines_at(*boxes) -> list[ocr.Line]:
    return [
        ocr.Line(name, 1.0, np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]], np.float32), [0.5], [1.0])
        for name, x0, y0, x1, y1 in boxes
    ]


def order(lines) -> str:
    return " ".join(line.text for line in reading_order(lines))


def test_columns_are_read_one_after_the_other():
    left = [(f"l{i}", 0, 40 + 20 * i, 200, 55 + 20 * i) for i in range(5)]
    right = [(f"r{i}", 230, 42 + 20 * i, 430, 57 + 20 * i) for i in range(5)]
    title, foot = ("title", 50, 0, 380, 20), ("foot", 0, 200, 430, 215)
    mixed = lines_at(foot, *right, title, *left[::-1])
    assert order(mixed) == "title l0 l1 l2 l3 l4 r0 r1 r2 r3 r4 foot"


def test_a_grid_of_numbers_beside_running_text_is_read_after_it():
    """The numbers were read into the sentences."""
    prose = [(f"t{i}", 0, 22 * i, 300, 16 + 22 * i) for i in range(8)]
    grid = [
        (f"n{row}{column}", 340 + 60 * column, 6 + 31 * row, 370 + 60 * column, 22 + 31 * row)
        for row in range(5)
        for column in range(3)
    ]
    numbers = " ".join(name for name, *_ in grid)
    assert order(lines_at(*grid, *prose)) == "t0 t1 t2 t3 t4 t5 t6 t7 " + numbers


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
    monkeypatch.setattr(
        engine, "_map", lambda tile: seen.append(tile.shape[0] * tile.shape[1]) or search(tile)
    )
    stars = np.tile(skimage.data.hubble_deep_field(), (4, 4, 1))[:3000, :4000]
    engine.find(np.ascontiguousarray(stars[..., ::-1]))
    assert sum(seen) < 1.05 * (ocr.COARSE_PIXELS + ocr.FINE_BUDGET)
    seen.clear()
    image = Image.new("RGB", (4000, 3000), (200, 200, 190))
    ImageDraw.Draw(image).text(
        (2500, 1700), "small print", font=ImageFont.truetype(str(FONTS / "DejaVuSans.ttf"), 16), fill="black"
    )
    result = read(np.asarray(image))
    assert "small print" in result.text
    assert sum(seen) < 1.2 * ocr.COARSE_PIXELS


def test_refusals_of_the_arguments():
    assert (
        execute(
            Action(op="read_text", arguments={"box": [0.1, 0.1, 0.1001, 0.2]}),
            Scene({"img0": PAGE}, [view_of(PAGE)]),
            {"read_text": ReadText},
        )[0].code
        == "too_small"
    )
    for arguments, code in (({"box": [0, 0, 2]}, "bad_box"), ({"language": "en"}, "bad_arguments")):
        with pytest.raises(OperationError) as error:
            ReadText.check(arguments)
        assert error.value.code == code


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


@pytest.mark.slow
@pytest.mark.long  # a statistic of many photos
def test_few_small_parts_of_photos_read_as_letters():
    """Twice as many did before short lines had to read alike from several cuts."""
    dice, seen = np.random.default_rng(1), 0
    for name in ("chelsea", "retina", "grass", "gravel", "moon", "coins"):
        photo = getattr(skimage.data, name)()
        photo = photo if photo.ndim == 3 else np.repeat(photo[..., None], 3, axis=2)
        for _ in range(3):
            y, x = dice.integers(0, photo.shape[0] - 90), dice.integers(0, photo.shape[1] - 160)
            seen += bool(read(np.ascontiguousarray(photo[y : y + 90, x : x + 160])).data["lines"])
    assert seen <= 2
