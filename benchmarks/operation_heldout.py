"""Cuts and reading on material that no operation was built with.

The photographs are BSDS500's ``test`` folder with ``--bsds``, else three of scikit-image's and matplotlib's.
``--photos`` adds the footage and the pictures of opencv-doc that nothing else here reads. The faces are those
of matplotlib's fonts in which no other test, task or demonstration is written; the prose is that of
scikit-learn's data sets. Motions, cuts and words are exact.
"""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import cv2
import matplotlib
import numpy as np
import sklearn.datasets
from PIL import Image, ImageDraw, ImageFont

from benchmarks import operation_datasets as sets
from benchmarks.harness import Report
from benchmarks.operation_quality import call
from pixelis.config import ToolboxConfig
from pixelis.operations.image import load_image
from pixelis.operations.video import open_clip

DATA = Path(matplotlib.get_data_path())
PACKAGED = (
    sets.SHIPPED / "motorcycle_right.png",
    sets.SHIPPED / "clock_motion.png",
    DATA / "sample_data" / "grace_hopper.jpg",
)
FACES = (
    "STIXGeneralItalic",
    "STIXGeneralBol",
    "cmss10",
    "cmtt10",
    "cmb10",
    "cmti10",
    "DejaVuSansMono-Bold",
    "DejaVuSerif-Italic",
)
FRAME = 320, 240
"""Width and height of the composed clips."""
LENGTH = 24
"""Frames of a composed scene."""
FOOTAGE = {"Megamind.avi": (1, 270, [97, 153, 199]), "tree.avi": (0, 200, []), "vtest.avi": (0, 120, [])}
"""opencv-doc: first frame, frame after the last, and the frames of the part with which a new scene begins,
marked by eye.
"""
SCANS = {
    "box.png": (
        "Product of Italy Crisp Almond Cookies BASTONCINI PAN DUCALE ATRI Peso Netto 250 g NET WT 8.8 OZ"
    ),
    "LinuxLogo.jpg": "Linux",
}
"""opencv-doc: the words on its pictures, without those in ornate letters."""

DRAWS = range(4)
"""Draw 0 showed that flashes of two frames and fades were taken for cuts, draw 1 the same of pans by 9 % of
the width from frame to frame; since these were mended only draws 2 and 3 are held out.
"""

Camera = Callable[[float], tuple[float, float, float, float]]
"""Number of the frame to x and y of its centre, its width (0..1 of the photograph) and its roll in
degrees.
"""


def photographs(bsds: Path | None, draw: int) -> list[np.ndarray]:
    """The photographs of a draw, uint8 [H, W, 3]; of BSDS500 each draw has others."""
    paths = sorted((bsds / "images" / "test").glob("*.jpg"))[draw::4] if bsds else PACKAGED
    return [np.ascontiguousarray(load_image(path, 10**9, 10**9)) for path in paths]


# --- cuts
# -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenes:
    """A clip and the frames with which a new scene begins."""

    name: str
    frames: list[np.ndarray]
    cuts: list[int]


def shown(photograph: np.ndarray, camera: Camera, count: int = LENGTH) -> list[np.ndarray]:
    """What a camera that moves over a photograph sees, uint8 [240, 320, 3] each."""
    height, width = photograph.shape[:2]
    frames = []
    for number in range(count):
        x, y, share, roll = camera(number)
        scale = FRAME[0] / (share * width)
        matrix = cv2.getRotationMatrix2D((x * width, y * height), roll, scale)
        matrix[:, 2] += np.array(FRAME) / 2 - (x * width, y * height)
        frames.append(
            cv2.warpAffine(photograph, matrix, FRAME, flags=cv2.INTER_AREA, borderMode=cv2.BORDER_REFLECT_101)
        )
    return frames


def pan(step: float, share: float = 0.4, start: float = 0.1) -> Camera:
    """To the right by ``step`` of the frame's width from frame to frame."""
    return lambda n: (start + share * step * n, 0.5, share, 0.0)


def zoom(step: float, x: float = 0.5, share: float = 0.8) -> Camera:
    """Closer by ``step`` from frame to frame."""
    return lambda n: (x, 0.5, share * (1 - step) ** n, 0.0)


def roll(step: float) -> Camera:
    """Turned by ``step`` degrees from frame to frame."""
    return lambda n: (0.5, 0.5, 0.5, step * n)


def shake(step: float, seed: int) -> Camera:
    """Held by hand: each frame is up to ``step`` of its width beside its place."""
    offsets = np.random.default_rng(seed).uniform(-step, step, (1000, 2)) * 0.6
    return lambda n: (0.5 + offsets[int(n), 0], 0.5 + offsets[int(n), 1], 0.6, 0.0)


def with_cuts(pictures: list[np.ndarray], draw: int) -> Iterator[Scenes]:
    """Sixteen clips with one cut: other scenes, scenes in the most similar colours, and a close-up of the
    same scene.
    """
    rng = np.random.default_rng([18, draw])
    small = [
        cv2.resize(cv2.cvtColor(p, cv2.COLOR_RGB2LAB), (8, 6), interpolation=cv2.INTER_AREA) for p in pictures
    ]
    hues = np.stack([thumb.ravel() for thumb in small]).astype(int)
    cameras = [
        pan(0.02),
        zoom(0.01),
        shake(0.015, 1),
        pan(0.04),
        roll(0.7),
        zoom(0.02),
        pan(0.01),
        shake(0.03, 2),
    ]
    order = rng.permutation(len(pictures))
    for number in range(16):
        first = pictures[one := int(order[number % len(order)])]
        at = int(rng.integers(6, LENGTH - 5))
        camera = cameras[number % 8]
        if number < 8:
            kind = "another scene"
            second = pictures[order[(number + 1) % len(order)]]
            later = cameras[(number + 3) % 8]
        elif number < 12:
            distance = np.abs(hues - hues[one]).mean(1)
            distance[one] = np.inf
            kind = "alike in colours"
            second = pictures[int(distance.argmin())]
            later = cameras[(number + 3) % 8]
        else:
            kind, second, later = "close-up", first, zoom(0.01, x=0.3, share=0.3)
        yield Scenes(f"{kind} {number}", shown(first, camera, at) + shown(second, later, LENGTH - at), [at])


def without_cuts(pictures: list[np.ndarray], draw: int) -> Iterator[Scenes]:
    """Sixteen clips of one scene: a camera in fast motion, changing light, something that passes, noise, and
    hard coding.
    """
    rng = np.random.default_rng([19, draw])
    photo = iter([pictures[(3 * i + 1) % len(pictures)] for i in range(40)])
    for step in (0.02, 0.05, 0.09):
        yield Scenes(f"pan {step:.0%}", shown(next(photo), pan(step)), [])
    for step in (0.02, 0.04):
        yield Scenes(f"zoom {step:.0%}", shown(next(photo), zoom(step)), [])
    for degrees in (1.5, 4.0):
        yield Scenes(f"roll {degrees} degrees", shown(next(photo), roll(degrees)), [])
    yield Scenes("shake 4%", shown(next(photo), shake(0.04, 3 + draw)), [])
    for name, light in {
        "flash": lambda n: (1.0, 230.0 * (n == 9)),
        "flash of two frames": lambda n: (1.0, 200.0 * (n in (9, 10))),
        "fade to black and back": lambda n: (min(1.0, abs(n - 12) / 10), 0.0),
        "exposure": lambda n: ((1.0, 0.0), (0.45, 10.0))[n >= 10],
        "strobe": lambda n: ((1.0, 0.0), (0.25, 0.0))[n % 4 == 3],
    }.items():
        frames = shown(next(photo), pan(0.01))
        lit = [np.clip(f * light(n)[0] + light(n)[1], 0, 255).astype(np.uint8) for n, f in enumerate(frames)]
        yield Scenes(name, lit, [])
    one, other = shown(next(photo), pan(0.01)), shown(next(photo), zoom(0.01))
    shares = np.clip((np.arange(LENGTH) - 5) / 12, 0, 1)
    yield Scenes(
        "dissolve",
        [cv2.addWeighted(a, 1 - s, b, s, 0) for a, b, s in zip(one, other, shares, strict=True)],
        [],
    )
    passing, frames = cv2.resize(next(photo), (160, 240)), shown(next(photo), pan(0.01))
    for number, frame in enumerate(frames):
        left = -160 + 22 * number
        x0, x1 = max(0, left), min(FRAME[0], left + 160)
        if x0 < x1:
            frame[:, x0:x1] = passing[:, x0 - left : x1 - left]
    yield Scenes("half the frame is passed by", frames, [])
    frames = shown(next(photo), pan(0.02))
    yield Scenes(
        "grain", [np.clip(f + rng.normal(0, 22, f.shape), 0, 255).astype(np.uint8) for f in frames], []
    )


def footage(folder: Path | None) -> Iterator[Scenes]:
    """The parts FOOTAGE of opencv-doc's clips."""
    for name, (start, stop, cuts) in FOOTAGE.items():
        for path in sorted(folder.rglob(name))[:1] if folder else ():
            with av.open(str(path)) as container:
                frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
            yield Scenes(name, frames[start:stop], cuts)


def encoded(frames: list[np.ndarray]) -> bytes:
    """An mp4 with 25 frames a second as cameras and sites code it."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=25, options={"crf": "28", "preset": "veryfast"})
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()


def cuts(report: Report, photos: Path | None, bsds: Path | None, thin: int) -> None:
    """Report how many hard cuts `search_clip` finds to the frame, and how many it claims in clips of one
    scene.
    """
    groups: dict[str, list[Scenes]] = {"footage": list(footage(photos))[::thin]}
    for draw in DRAWS:
        pictures = photographs(bsds, draw)
        groups[f"composed, one cut each, draw {draw}"] = list(with_cuts(pictures, draw))[::thin]
        groups[f"composed, one scene each, draw {draw}"] = list(without_cuts(pictures, draw))[::thin]
    for group, clips in groups.items():
        true = hits = false = 0
        wrong, seconds = [], 0.0
        for item in clips:
            clip = open_clip(encoded(item.frames), ToolboxConfig())
            start = time.process_time()
            marked = [
                moment["frame"] for moment in call("search_clip", clip, "vid0", event="cut").data["moments"]
            ]
            seconds += time.process_time() - start
            true, hits = true + len(item.cuts), hits + len(set(marked) & set(item.cuts))
            false += len(set(marked) - set(item.cuts))
            if set(marked) != set(item.cuts):
                wrong.append(f"{item.name}: {marked} for {item.cuts}")
        frames = sum(len(item.frames) for item in clips)
        if frames:
            note = f"{len(clips)} clips, {1e3 * seconds / frames:.1f} ms of CPU a frame; {'; '.join(wrong)}"
            report.row(f"cuts: {group}", f"{hits} of {true}, {false} false", "all, 0 false", note)


# --- reading
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """A picture and the words on it."""

    kind: str
    picture: np.ndarray
    words: list[str]


@functools.cache
def prose() -> list[str]:
    """The words of scikit-learn's descriptions of data sets: at least three letters, no markup."""
    folder = Path(sklearn.datasets.__file__).parent / "descr"
    text = " ".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.rst")))
    return [
        word for word in text.split() if len(word) > 2 and word.strip(".,;()").isalnum() and word.isascii()
    ]


def face(name: str, size: int) -> ImageFont.FreeTypeFont:
    """A font of matplotlib's."""
    return ImageFont.truetype(str(DATA / "fonts" / "ttf" / f"{name}.ttf"), size)


def signs(photograph: np.ndarray, rng: np.random.Generator) -> Written:
    """A photograph of at least 960 columns with up to six plates of words in perspective."""
    scale = max(1.0, 960 / photograph.shape[1])
    picture = cv2.resize(photograph, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
    height, width = picture.shape[:2]
    words: list[str] = []
    for cell in rng.permutation(6):
        size = int(rng.integers(16, 44))
        text = [str(word) for word in rng.choice(prose(), int(rng.integers(1, 4)))]
        letters = face(str(rng.choice(FACES)), size)
        x0, y0, x1, y1 = (int(v) for v in letters.getbbox(" ".join(text)))
        dark = rng.random() < 0.5
        ground = rng.integers(0, 70, 3) if dark else rng.integers(180, 256, 3)
        ink = rng.integers(190, 256, 3) if dark else rng.integers(0, 80, 3)
        plate = Image.new("RGB", (x1 - x0 + size, y1 - y0 + size), tuple(map(int, ground)))
        ImageDraw.Draw(plate).text(
            (size // 2 - x0, size // 2 - y0), " ".join(text), font=letters, fill=tuple(map(int, ink))
        )
        cell_width, cell_height = width // 2, height // 3
        if plate.width + 60 > cell_width or plate.height + 40 > cell_height:
            continue
        left = (cell % 2) * cell_width + int(rng.integers(20, cell_width - plate.width - 20))
        top = (cell // 2) * cell_height + int(rng.integers(10, cell_height - plate.height - 10))
        corners = np.array(
            [[0, 0], [plate.width, 0], [plate.width, plate.height], [0, plate.height]], np.float32
        )
        moved = corners + (left, top) + rng.uniform(-0.25, 0.25, (4, 2)) * plate.height
        matrix = cv2.getPerspectiveTransform(corners, moved.astype(np.float32))
        warped = cv2.warpPerspective(np.asarray(plate), matrix, (width, height), flags=cv2.INTER_LINEAR)
        cover = cv2.warpPerspective(
            np.full((plate.height, plate.width), 1.0, np.float32), matrix, (width, height)
        )[..., None]
        picture = (warped * cover + picture * (1 - cover)).astype(np.uint8)
        words += text
    return Written("signs", _compressed(picture, int(rng.integers(45, 90))), words)


def scan(rng: np.random.Generator) -> Written:
    """A page of prose, skewed, unevenly lit, blurred, grainy, compressed."""
    size = int(rng.integers(15, 24))
    letters = face(str(rng.choice(FACES)), size)
    image, lines, words = Image.new("RGB", (900, 620), (250, 248, 240)), 600 // int(1.7 * size) - 3, []
    pen, first = ImageDraw.Draw(image), int(rng.integers(0, len(prose()) - 600))
    source = iter(prose()[first:])
    for line in range(lines):
        text = ""
        while letters.getlength(text) < 680:
            words.append(next(source))
            text += words[-1] + " "
        pen.text((50, 40 + int(1.7 * size) * line), text, font=letters, fill=(40, 38, 45))
    pixels: np.ndarray = np.asarray(image).astype(np.float32)
    turn = cv2.getRotationMatrix2D((450, 310), float(rng.uniform(-2, 2)), 1.0)
    pixels = cv2.warpAffine(pixels, turn, (900, 620), borderMode=cv2.BORDER_REPLICATE)
    light = np.linspace(1, rng.uniform(0.6, 0.9), 900)[None, :, None]
    pixels = cv2.GaussianBlur(pixels * light, (0, 0), float(rng.uniform(0.4, 0.9))) + rng.normal(
        0, 7, pixels.shape
    )
    return Written(
        "scans", _compressed(np.clip(pixels, 0, 255).astype(np.uint8), int(rng.integers(35, 75))), words
    )


def table(rng: np.random.Generator) -> Written:
    """A table of names and numbers with or without rules."""
    size, columns, rows = int(rng.integers(13, 20)), int(rng.integers(3, 6)), int(rng.integers(5, 11))
    letters, bold = face(str(rng.choice(FACES)), size), face("STIXGeneralBol", size)
    cells = [[str(w).strip(".,;()")[:11].title() for w in rng.choice(prose(), columns)]]
    for _ in range(rows):
        numbers = [
            f"{rng.uniform(0, 10 ** rng.integers(1, 5)):.{rng.integers(0, 3)}f}" for _ in range(columns - 1)
        ]
        cells.append([str(rng.choice(prose())).strip(".,;()")[:11], *numbers])
    step = 9 * size
    image = Image.new("RGB", (columns * step + 30, (rows + 1) * 2 * size + 30), "white")
    pen, ruled = ImageDraw.Draw(image), rng.random() < 0.5
    for r, row in enumerate(cells):
        y = 15 + 2 * r * size
        if ruled or r == 1:
            pen.line((10, y - size // 3, image.width - 10, y - size // 3), fill=(120, 120, 120))
        for c, text in enumerate(row):
            pen.text((20 + c * step, y), text, font=letters if r else bold, fill="black")
    return Written("tables", np.asarray(image), [text for row in cells for text in row])


def chart(rng: np.random.Generator) -> Written:
    """A plot with title, labels, ticks and a legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [str(word).strip(".,;()") for word in rng.choice(prose(), 8, replace=False)]
    family = str(rng.choice(["STIXGeneral", "cmss10", "DejaVu Sans Mono"]))
    with matplotlib.rc_context({"font.family": family, "font.style": "normal", "axes.unicode_minus": False}):
        figure = Figure(figsize=(6.4, 4.4), dpi=int(rng.integers(80, 130)))
        axes = figure.subplots()
        for name in names[:3]:
            axes.plot(np.arange(20), rng.normal(0, 1, 20).cumsum() + 12, label=name)
        axes.set_title(" ".join(names[3:5]))
        axes.set_xlabel(names[5])
        axes.set_ylabel(names[6])
        axes.legend()
        years, amounts = [f"{1990 + 7 * i}" for i in range(5)], [f"{125 * i}" for i in range(1, 6)]
        axes.set_xticks(np.linspace(1, 18, 5), years)
        axes.set_yticks(np.linspace(*axes.get_ylim(), 5), amounts)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    pixels = np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])
    return Written("charts", pixels, [*names[:7], *years, *amounts])


def screen(rng: np.random.Generator) -> Written:
    """A dialogue with small light letters on dark panels, and buttons."""
    image, words = Image.new("RGB", (800, 480), (24, 26, 32)), []
    pen, letters = ImageDraw.Draw(image), face(str(rng.choice(FACES)), int(rng.integers(12, 17)))
    for row in range(9):
        y = 20 + 50 * row
        pen.rectangle((15, y, 560, y + 38), fill=tuple(map(int, rng.integers(30, 80, 3))))
        text = [str(word) for word in rng.choice(prose(), int(rng.integers(2, 6)))]
        pen.text((28, y + 10), " ".join(text), font=letters, fill=(205, 210, 220))
        pen.rounded_rectangle((600, y, 780, y + 38), 8, fill=tuple(map(int, rng.integers(60, 190, 3))))
        button = str(rng.choice(prose())).strip(".,;()")[:12].title()
        pen.text((620, y + 10), button, font=letters, fill="white")
        words += [*text, button]
    return Written("screens", np.asarray(image), words)


def _compressed(picture: np.ndarray, quality: int) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file))


def texts(photos: Path | None, bsds: Path | None, draw: int) -> list[Written]:
    """Thirty-six composed pictures, and with ``photos`` the SCANS."""
    rng, pictures = np.random.default_rng([36, draw]), photographs(bsds, draw)
    written = [signs(pictures[(2 * i) % len(pictures)], rng) for i in range(12)]
    written += [scan(rng) for _ in range(8)]
    for make in (table, chart, screen):
        written += [make(rng) for _ in range(6 if make is not screen else 4)]
    for name, text in SCANS.items():
        if photos is not None and (picture := sets.find_photo(name, photos)) is not None:
            written.append(Written("photographs", picture, text.split()))
    return written


def reading(report: Report, photos: Path | None, bsds: Path | None, thin: int) -> None:
    """Report the share of words that `read_text` and rapidocr alone read, with intervals over pictures, and
    their CPU time.
    """
    import rapidocr

    threads = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
    engine: Any = rapidocr.RapidOCR(
        params={"Global.log_level": "critical", "Global.use_cls": False, **threads}
    )
    counts, kinds = list[list[int]](), list[str]()
    seconds = [0.0, 0.0]
    call("read_text", np.full((64, 64, 3), 255, np.uint8))
    for item in texts(photos, bsds, 0)[::thin]:
        words = [word for word in item.words if sets.plain(word)]
        start = time.process_time()
        ours = call("read_text", item.picture).data["lines"]
        middle = time.process_time()
        plain = engine(np.ascontiguousarray(item.picture[..., ::-1])).txts or ()
        seconds = [seconds[0] + middle - start, seconds[1] + time.process_time() - middle]
        read = (
            sets.recall(words, " ".join(line["text"] for line in ours)),
            sets.recall(words, " ".join(plain)),
        )
        counts.append([*read, len(words)])
        kinds.append(item.kind)
    table_of = np.array(counts, float)
    for kind in dict.fromkeys(kinds):
        part = table_of[[k == kind for k in kinds]]
        note = (
            f"{len(part)} pictures, {part[:, 2].sum():.0f} words; rapidocr "
            f"{part[:, 1].sum() / part[:, 2].sum():.3f}"
        )
        report.row(f"reading: {kind}", float(part[:, 0].sum() / part[:, 2].sum()), "", note)
    draws = np.random.default_rng(0).integers(0, len(counts), (2000, len(counts)))
    sums = table_of[draws].sum(1)
    shares = np.stack(
        [sums[:, 0] / sums[:, 2], sums[:, 1] / sums[:, 2], (sums[:, 0] - sums[:, 1]) / sums[:, 2]]
    )
    total = table_of.sum(0)
    means = total[0] / total[2], total[1] / total[2], (total[0] - total[1]) / total[2]
    for name, mean, sample, goal in zip(
        ("read_text", "rapidocr alone", "difference"), means, shares, (">= .88", "", ">= 0"), strict=True
    ):
        low, high = np.quantile(sample, [0.025, 0.975])
        report.row(
            f"reading: all, {name}", f"{mean:.3f} [{low:.3f}, {high:.3f}]", goal, f"{len(counts)} pictures"
        )
    report.row(
        "reading: CPU time / rapidocr alone",
        seconds[0] / seconds[1],
        "<= 1.2",
        f"{seconds[0] / len(counts):.2f} s each",
    )


def run(report: Report, photos: Path | None, bsds: Path | None, thin: int) -> None:
    """Measure every ``thin``-th clip and picture."""
    cv2.setNumThreads(1)
    cuts(report, photos, bsds, thin)
    reading(report, photos, bsds, thin)
