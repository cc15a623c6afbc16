"""How right the operations are: on real pictures, on drawn ones with exact truth, on clips with a known motion."""

from __future__ import annotations

import contextlib
import io
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np

from benchmarks import operation_sets as sets
from benchmarks.harness import Report
from pixelis.config import ToolboxConfig
from pixelis.operations import Scene, execute, masks
from pixelis.operations.video import open_clip
from pixelis.records import Action, ImageView, Observation


def call(op: str, media: Any, target: str = "img0", settings: ToolboxConfig | None = None, **arguments: Any) -> Observation:
    """One operation on a picture (uint8 [H, W, 3]) or a clip, whole."""
    views = []
    if isinstance(media, np.ndarray):
        size = (media.shape[1], media.shape[0])
        views = [ImageView(id=target, source_size=size, view_size=size)]
    scene = Scene({target: media}, views, settings=settings or ToolboxConfig())
    return execute(Action(op=op, target=target, arguments=arguments), scene)[0]


def shares(edges: tuple[float, float, float, float], picture: np.ndarray) -> list[float]:
    """Pixels as 0..1 of the picture, held inside it."""
    height, width = picture.shape[:2]
    return [min(1.0, max(0.0, v)) for v in (edges[0] / width, edges[1] / height, edges[2] / width, edges[3] / height)]


def _share(good: float, count: int) -> str:
    return f"{good / max(1, count):.3f} ({good:.0f} of {count})"


# --- read_text ------------------------------------------------------------------------------------------------------------------


def text(report: Report, photos: Path | None, thin: int) -> None:
    """Word recall of whole pictures, of each word cut out alone, and of its box within the picture."""
    _written(report, photos, thin)
    _rendered(report, thin)
    grounds = list(sets.false_text(max(1, 15 // thin), seed=1))
    seen = [said for picture in grounds if (said := _said(picture))]
    report.row("read_text: textures that read as letters", _share(len(seen), len(grounds)), "few", " ".join(seen)[:60])


def _said(picture: np.ndarray, box: list[float] | None = None) -> str:
    observation = call("read_text", np.ascontiguousarray(picture), **({} if box is None else {"box": box}))
    return " ".join(line["text"] for line in observation.data.get("lines", []))


def _written(report: Report, photos: Path | None, thin: int) -> None:
    whole: Counter[str] = Counter()
    pictures = {name: words for name in sets.WRITTEN if (words := sets.WRITTEN[name].split())}
    for name, words in pictures.items():
        picture = sets.photo(name, photos)
        if picture is None:
            continue
        words = [word for word in words if sets.plain(word)]
        observation = call("read_text", picture)
        lines = observation.data["lines"]
        whole["pictures"] += 1
        whole["words"] += len(words)
        whole["read"] += sets.recall(words, " ".join(line["text"] for line in lines))
        wanted = Counter(map(sets.plain, words))
        found = [word for line in lines for word in line["words"] if wanted[sets.plain(word["text"])] > 0]
        for word in found[:: thin if len(found) > 20 else 1]:
            key, box = sets.plain(word["text"]), word["box"]
            if not key:
                continue
            height, width = picture.shape[:2]
            crop = picture[round(box[1] * height) : round(box[3] * height), round(box[0] * width) : round(box[2] * width)]
            if min(crop.shape[:2]) < 4:
                continue
            whole["cut"] += 1
            whole["alone"] += key in sets.plain(_said(crop))
            whole["boxed"] += key in sets.plain(_said(picture, box))
    note = f"{whole['pictures']} pictures" + ("" if photos else "; more with --photos")
    report.row("read_text: real pictures, whole", _share(whole["read"], whole["words"]), ">= 0.9", note)
    report.row("read_text: real words cut out alone", _share(whole["alone"], whole["cut"]), ">= 0.9", "words found above")
    report.row("read_text: real words, tight box", _share(whole["boxed"], whole["cut"]), ">= 0.9")


def _rendered(report: Report, thin: int) -> None:
    got: Counter[str] = Counter()
    seconds: list[float] = []
    for seed, name in enumerate(sets.GROUNDS[::thin]):
        picture, words = sets.rendered(name, seed)
        start = time.process_time()
        said = _said(picture)
        seconds.append(time.process_time() - start)
        got["words"] += len(words)
        got["read"] += sets.recall([word for word, _ in words], said)
        for word, (x0, y0, x1, y1) in words[::thin]:
            got["cut"] += 1
            crop = picture[max(0, y0 - 1) : y1 + 1, max(0, x0 - 1) : x1 + 1]
            got["alone"] += sets.plain(word) in sets.plain(_said(crop))
            got["boxed"] += sets.plain(word) == sets.plain(_said(picture, shares((x0, y0, x1, y1), picture)))
    note = f"{len(seconds)} photos, {np.mean(seconds):.2f} s of CPU each"
    report.row("read_text: words over photos, whole", _share(got["read"], got["words"]), ">= 0.9", note)
    report.row("read_text: words over photos, cut out alone", _share(got["alone"], got["cut"]), ">= 0.9")
    report.row("read_text: words over photos, tight box", _share(got["boxed"], got["cut"]), ">= 0.9", "nothing else read")


# --- track_object ---------------------------------------------------------------------------------------------------------------


def track(report: Report, thin: int) -> None:
    """Mean overlap with the true box over all frames after the first that show the object; a frame without a box counts 0."""
    import clips

    total = []
    for name in list(sets.MOTIONS)[::thin]:
        data, truth = sets.moving(name, max(12, 110 // thin))
        clip = open_clip(data, ToolboxConfig())
        first = truth[0]
        assert first is not None
        box = [first[0] / clip.width, first[1] / clip.height, first[2] / clip.width, first[3] / clip.height]
        start = time.process_time()
        observation = call("track_object", clip, "vid0", box=box)
        spent = time.process_time() - start
        entry = observation.data["tracks"][0]
        size = np.array([clip.width, clip.height] * 2)
        found = {number: np.array(b) * size for number, b in zip(entry["frames"], entry["boxes"], strict=True)}
        shown = [(number, b) for number, b in enumerate(truth) if b is not None and number]
        overlaps = [clips.overlap(found[number], b) if number in found else 0.0 for number, b in shown]
        total.append(float(np.mean(overlaps)))
        note = f"{entry['status']}, {1e3 * spent / len(entry['frames']):.0f} ms of CPU a frame, {clip.width}x{clip.height}"
        report.row(f"track_object: {name}, mean IoU", total[-1], ">= 0.65", note)
    report.row("track_object: mean over clips", float(np.mean(total)), ">= 0.65")


# --- segment_object_at ----------------------------------------------------------------------------------------------------------


def segment(report: Report, photos: Path | None, sam: str | None, thin: int) -> None:
    """Mean IoU by point and by box of each method."""
    objects = {
        "hand outlines, in-sample": sets.outlined(sets.IN_SAMPLE, photos)[::thin],
        "hand outlines, held out": sets.outlined(sets.HELD_OUT, photos)[::thin],
        "coins, in-sample": sets.coins()[::thin],
        "cut-outs on photos, in-sample": sets.composites()[::thin],
        "easy-vqa drawings, in-sample": _drawings(max(1, 30 // thin)),
    }
    for method in filter(None, ("grabcut", sam)):
        settings, name = ToolboxConfig(segmenter=method), "grabcut" if method == "grabcut" else "sam"
        for group, things in objects.items():
            for way in ("point", "box"):
                scores, spent = [], time.process_time()
                for thing in things:
                    scores.append(_overlap(thing, way, settings))
                spent = (time.process_time() - spent) / max(1, len(things))
                worst = ", ".join(
                    f"{t.name} {s:.2f}" for s, t in sorted(zip(scores, things, strict=True), key=lambda p: p[0])[:3]
                )
                note = f"{len(things)} objects, {1e3 * spent:.0f} ms of CPU each; worst {worst}"
                report.row(f"segment {name} by {way}: {group}, mIoU", float(np.mean(scores)), "", note)


def _drawings(count: int) -> list[sets.Outlined]:
    try:
        return sets.vqa(count)
    except ImportError:
        return []


def _overlap(thing: sets.Outlined, way: str, settings: ToolboxConfig) -> float:
    height, width = thing.mask.shape
    place = (
        {"point": [(thing.point[0] + 0.5) / width, (thing.point[1] + 0.5) / height]}
        if way == "point"
        else {"box": shares(thing.box, thing.picture)}
    )
    observation = call("segment_object_at", thing.picture, settings=settings, **place)
    if observation.status != "ok":
        return 0.0
    found = masks.decode(observation.data["objects"][0]["mask"]).full()
    return float((found & thing.mask).sum() / (found | thing.mask).sum())


# --- get_properties -------------------------------------------------------------------------------------------------------------


def properties(report: Report) -> None:
    """Largest relative error against closed forms over discs, ellipses and rectangles at many sizes and angles."""
    # Of small shapes it is mostly the pixels' own rounding: 35 x 50 at 45 degrees is off by 1 % once it is drawn.
    for name, sizes in (
        ("", ((40, 40), (120, 120), (240, 240), (200, 80), (100, 40), (150, 90))),
        ("small: ", ((12, 12), (40, 25), (30, 15))),
    ):
        _errors(report, name, sizes)


def _errors(report: Report, group: str, sizes: tuple[tuple[int, int], ...]) -> None:
    worst: dict[str, float] = {}
    count = 0
    for inside, truth in _shapes(sizes):
        picture = np.where(inside[..., None], np.uint8(200), np.uint8(30)).repeat(3, 2)
        observation = call("get_properties", picture, mask=masks.encode(inside), groups=["shape", "size"])
        groups = observation.data["properties"]
        found = {name: entry["value"] for group in groups.values() for name, entry in group.items()}
        count += 1
        for name, value in truth.items():
            error = abs(found[name] - value) / value if value else abs(found[name])
            worst[name] = max(worst.get(name, 0.0), error)
    for name, error in worst.items():
        goal = "" if group else "<= 1 %"
        report.row(f"get_properties: {group}{name}, largest error", f"{100 * error:.2f} %", goal, f"{count} shapes")


def _shapes(sizes: tuple[tuple[int, int], ...]) -> Iterator[tuple[np.ndarray, dict[str, float]]]:
    side = 500
    rows, columns = np.mgrid[:side, :side] + 0.5
    for a, b in sizes:
        for degrees in (0,) if a == b else (0, 17, 45, 117):
            turn = math.radians(degrees)
            u = (columns - 250.2) * math.cos(turn) + (249.7 - rows) * math.sin(turn)
            v = (249.7 - rows) * math.cos(turn) - (columns - 250.2) * math.sin(turn)
            h = ((a - b) / (a + b)) ** 2
            length = math.pi * (a + b) * (1 + 3 * h / (10 + math.sqrt(4 - 3 * h)))  # Ramanujan
            truth = {
                "area_pixels": math.pi * a * b,
                "equivalent_diameter": 2 * math.sqrt(a * b),
                "perimeter": length,
                "circularity": 4 * math.pi * math.pi * a * b / length**2,
                "solidity": 1.0,
                "rotated_aspect_ratio": a / b,
            }
            yield (u / a) ** 2 + (v / b) ** 2 <= 1, truth | ({"eccentricity": math.sqrt(1 - (b / a) ** 2)} if a > b else {})
            if 2 * max(a, b) > 300:
                continue
            long, wide = 2 * a, 2 * b
            yield (
                (abs(u) < a) & (abs(v) < b),
                {
                    "area_pixels": float(long * wide),
                    "perimeter": 2.0 * (long + wide),
                    "circularity": math.pi * long * wide / (long + wide) ** 2,
                    "solidity": 1.0,
                    "rotated_length": float(long),
                    "rotated_width": float(wide),
                    "rotated_aspect_ratio": long / wide,
                },
            )


# --- select_frames --------------------------------------------------------------------------------------------------------------


def frames(report: Report, thin: int) -> None:
    """Every frame in a shuffled order against one straight decode, and against decord in both orders."""
    import clips

    from pixelis.operations import video

    names = list(clips.CONTAINERS)[::thin]
    exact, straight, sequential, wrong = 0, 0, [], {}
    for name in names:
        data = clips.CONTAINERS[name]()
        with av.open(io.BytesIO(data)) as container:
            expected = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        clip = open_clip(data, ToolboxConfig())
        order = [int(i) for i in np.random.default_rng(0).permutation(len(expected))]
        video._FRAMES.__init__()  # type: ignore[misc]  # what is remembered must not answer
        exact += len(clip.times) == len(expected) and all(np.array_equal(clip.frame(i), expected[i]) for i in order)
        straight += len(expected)
        first, shuffled = _decord(data, expected, order)
        if first:
            sequential.append(f"{name} {first}")
        if shuffled:
            wrong[name] = shuffled
    report.row("select_frames: containers bit-equal to straight decoding", _share(exact, len(names)), "1", f"{straight} frames")
    equal = len(names) - len(sequential)
    note = "unequal frames: " + "; ".join(sequential)
    report.row("select_frames: bit-equal to decord's sequential read", _share(equal, len(names)), "", note)
    lost = sum(wrong.values())
    note = "why PyAV alone decodes: " + "; ".join(f"{name} {count}" for name, count in wrong.items())
    report.row("decord: wrong frames on random access", f"{lost} in {len(wrong)} of {len(names)}", "", note)


def _decord(data: bytes, expected: list[np.ndarray], order: list[int]) -> tuple[int, int]:
    """Frames that decord gives otherwise, first to last and shuffled; all of them where it cannot open the clip."""
    try:
        import decord
    except ImportError:
        return 0, 0
    counts = []
    for numbers in (range(len(expected)), order):
        with _quiet():
            try:
                reader = decord.VideoReader(io.BytesIO(data), num_threads=1)
                counts.append(sum(not _equal(reader, i, expected[i]) for i in numbers))
            except Exception:  # decord's own error type, and whatever its callbacks raise
                counts.append(len(expected))
    return counts[0], counts[1]


def _equal(reader: Any, number: int, expected: np.ndarray) -> bool:
    try:
        return np.array_equal(reader[number].asnumpy(), expected)
    except Exception:  # as above
        return False


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """FFmpeg inside decord writes to the process's own stderr."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def run(report: Report, photos: Path | None, sam: str | None, thin: int) -> None:
    """All of them; on every ``thin``-th part of each set."""
    cv2.setNumThreads(1)
    text(report, photos, thin)
    track(report, thin)
    segment(report, photos, sam, thin)
    properties(report)
    frames(report, thin)
