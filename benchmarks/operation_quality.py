"""Accuracy of the operations on real pictures, on rendered pictures with exact truth, and on clips with a
known motion.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
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

from benchmarks import operation_datasets as sets
from benchmarks import operation_published as published
from benchmarks.harness import Report
from pixelis.config import ToolboxConfig
from pixelis.operations import Scene, execute, masks
from pixelis.operations.segment_object_at import UNSURE
from pixelis.operations.video import open_clip
from pixelis.records import Action, ImageView, Observation


def call(
    op: str, media: Any, target: str = "img0", settings: ToolboxConfig | None = None, **arguments: Any
) -> Observation:
    """Execute one operation on a picture (uint8 [H, W, 3]) or a clip."""
    views = []
    if isinstance(media, np.ndarray):
        size = (media.shape[1], media.shape[0])
        views = [ImageView(id=target, source_size=size, view_size=size)]
    scene = Scene({target: media}, views, settings=settings or ToolboxConfig())
    return execute(Action(op=op, target=target, arguments=arguments), scene)[0]


def normalized(edges: tuple[float, float, float, float], picture: np.ndarray) -> list[float]:
    """Convert pixel edges to 0..1 of the picture, clipped to it."""
    height, width = picture.shape[:2]
    return [
        min(1.0, max(0.0, v))
        for v in (edges[0] / width, edges[1] / height, edges[2] / width, edges[3] / height)
    ]


def _share(good: float, count: int) -> str:
    return f"{good / max(1, count):.3f} ({good:.0f} of {count})"


# --- read_text
# ------------------------------------------------------------------------------------------------------------------


def text(report: Report, photos: Path | None, thin: int) -> None:
    """Report the word recall of whole pictures, of each word as a crop, and of the box of each word."""
    _real_text(report, photos, thin)
    _rendered_text(report, thin)
    textures = list(sets.textures(max(1, 15 // thin), seed=1))
    misread = [text for picture in textures if (text := _read(picture))]
    report.row(
        "read_text: textures that read as letters",
        _share(len(misread), len(textures)),
        "few",
        " ".join(misread)[:60],
    )


def _read(picture: np.ndarray, box: list[float] | None = None) -> str:
    arguments: dict[str, Any] = {} if box is None else {"box": box}
    observation = call("read_text", np.ascontiguousarray(picture), **arguments)
    return " ".join(line["text"] for line in observation.data.get("lines", []))


def _real_text(report: Report, photos: Path | None, thin: int) -> None:
    counts: Counter[str] = Counter()
    for name, text in sets.TEXTS.items():
        picture = sets.find_photo(name, photos)
        if picture is None:
            continue
        words = [word for word in text.split() if sets.plain(word)]
        observation = call("read_text", picture)
        lines = observation.data["lines"]
        counts["pictures"] += 1
        counts["words"] += len(words)
        counts["read"] += sets.recall(words, " ".join(line["text"] for line in lines))
        true_words = set(map(sets.plain, words))
        correct = [word for line in lines for word in line["words"] if sets.plain(word["text"]) in true_words]
        for word in correct[:: thin if len(correct) > 20 else 1]:
            key, box = sets.plain(word["text"]), word["box"]
            if not key:
                continue
            height, width = picture.shape[:2]
            crop = picture[
                round(box[1] * height) : round(box[3] * height), round(box[0] * width) : round(box[2] * width)
            ]
            if min(crop.shape[:2]) < 4:
                continue
            counts["crops"] += 1
            counts["in_crop"] += key in sets.plain(_read(crop))
            counts["in_box"] += key in sets.plain(_read(picture, box))
    note = f"{counts['pictures']} pictures" + ("" if photos else "; more with --photos")
    report.row("read_text: real pictures, whole", _share(counts["read"], counts["words"]), ">= 0.9", note)
    report.row(
        "read_text: real words, cropped",
        _share(counts["in_crop"], counts["crops"]),
        ">= 0.9",
        "words read above",
    )
    report.row("read_text: real words, tight box", _share(counts["in_box"], counts["crops"]), ">= 0.9")


def _rendered_text(report: Report, thin: int) -> None:
    counts: Counter[str] = Counter()
    seconds: list[float] = []
    for seed, name in enumerate(sets.BACKGROUNDS[::thin]):
        picture, words = sets.rendered(name, seed)
        start = time.process_time()
        text = _read(picture)
        seconds.append(time.process_time() - start)
        counts["words"] += len(words)
        counts["read"] += sets.recall([word for word, _ in words], text)
        for word, (x0, y0, x1, y1) in words[::thin]:
            counts["crops"] += 1
            crop = picture[max(0, y0 - 1) : y1 + 1, max(0, x0 - 1) : x1 + 1]
            counts["in_crop"] += sets.plain(word) in sets.plain(_read(crop))
            counts["in_box"] += sets.plain(word) == sets.plain(
                _read(picture, normalized((x0, y0, x1, y1), picture))
            )
    note = f"{len(seconds)} photos, {np.mean(seconds):.2f} s of CPU each"
    report.row("read_text: words over photos, whole", _share(counts["read"], counts["words"]), ">= 0.9", note)
    report.row("read_text: words over photos, cropped", _share(counts["in_crop"], counts["crops"]), ">= 0.9")
    report.row(
        "read_text: words over photos, tight box",
        _share(counts["in_box"], counts["crops"]),
        ">= 0.9",
        "nothing else read",
    )


# --- track_object
# ---------------------------------------------------------------------------------------------------------------


def track(report: Report, thin: int) -> None:
    """Report the mean IoU with the true box over all later frames that show the object; a missing box counts
    as 0.
    """
    import clips

    means = []
    for name in list(sets.MOTIONS)[::thin]:
        data, truth = sets.moving(name, max(12, 110 // thin))
        clip = open_clip(data, ToolboxConfig())
        first = truth[0]
        assert first is not None
        box = [first[0] / clip.width, first[1] / clip.height, first[2] / clip.width, first[3] / clip.height]
        start = time.process_time()
        observation = call("track_object", clip, "vid0", box=box)
        seconds = time.process_time() - start
        entry = observation.data["tracks"][0]
        size = np.array([clip.width, clip.height] * 2)
        boxes = {
            number: np.array(b) * size for number, b in zip(entry["frames"], entry["boxes"], strict=True)
        }
        visible = [(number, b) for number, b in enumerate(truth) if b is not None and number]
        overlaps = [clips.overlap(boxes[number], b) if number in boxes else 0.0 for number, b in visible]
        means.append(float(np.mean(overlaps)))
        note = (
            f"{entry['status']}, {1e3 * seconds / len(entry['frames']):.0f} ms of CPU a frame, "
            f"{clip.width}x{clip.height}"
        )
        report.row(f"track_object: {name}, mean IoU", means[-1], ">= 0.65", note)
    report.row("track_object: mean over clips", float(np.mean(means)), ">= 0.65")


# --- segment_object_at
# ----------------------------------------------------------------------------------------------------------


def segment(report: Report, args: argparse.Namespace, thin: int) -> None:
    """Report the mean IoU of each method by point and by box, with bootstrap intervals; on published masks
    also its score.
    """
    bsds, coco, photos = args.bsds, args.coco, args.photos
    groups = {
        "hand outlines, in-sample": sets.outlined(sets.IN_SAMPLE, photos)[::thin],
        "hand outlines, held out": sets.outlined(sets.HELD_OUT, photos)[::thin],
        "coins, in-sample": sets.coins()[::thin],
        "cut-outs on photos, in-sample": sets.composites()[::thin],
        "easy-vqa drawings, in-sample": _drawings(max(1, 30 // thin)),
    }
    published_objects = {
        "BSDS500 test, held out": published.bsds(bsds, "test", 60)[::thin] if bsds else [],
        "COCO128 odd, held out": published.coco(coco, odd=True, per_picture=1)[::thin] if coco else [],
    }
    groups |= {name: objects for name, objects in published_objects.items() if objects}
    for group, objects in published_objects.items():
        if objects:
            _plain_segments(report, group, objects)
    for method in filter(None, ("mobilenet", args.sam)):
        settings = ToolboxConfig(segmenter=method)
        name = method if method == "mobilenet" else "sam"
        for group, objects in groups.items():
            for prompt in ("point", "box"):
                start = time.process_time()
                scores = [_iou(item, prompt, settings) for item in objects]
                seconds = (time.process_time() - start) / max(1, len(objects))
                ranked = sorted(zip(scores, objects, strict=True), key=lambda pair: pair[0])
                worst = ", ".join(f"{item.name} {score:.2f}" for score, item in ranked[:3])
                note = f"{len(objects)} objects, {1e3 * seconds:.0f} ms of CPU each; worst {worst}"
                report.row(f"segment {name} by {prompt}: {group}, mIoU", _interval(scores), "", note)
        held_out = [item for objects in published_objects.values() for item in objects]
        if held_out:
            _calibration(report, name, held_out, settings, args.chart if name == "mobilenet" else None)


def _plain_segments(report: Report, group: str, objects: list[sets.Outlined]) -> None:
    from skimage.segmentation import felzenszwalb

    overlaps, start = [], time.process_time()
    for item in objects:
        labels = felzenszwalb(item.picture, scale=300, sigma=0.8, min_size=50)
        inside = labels == labels[item.point[1], item.point[0]]
        overlaps.append(float((inside & item.mask).sum() / (inside | item.mask).sum()))
    note = f"{len(objects)} objects, {1e3 * (time.process_time() - start) / len(objects):.0f} ms of CPU each"
    report.row(f"segment felzenszwalb by point: {group}, mIoU", _interval(overlaps), "", note)


def _calibration(
    report: Report, name: str, objects: list[sets.Outlined], settings: ToolboxConfig, chart: Path | None
) -> None:
    """Report how well the score of a point's mask predicts its IoU, and draw both into ``chart``."""
    pairs = []
    for item in objects:
        height, width = item.mask.shape
        point = [(item.point[0] + 0.5) / width, (item.point[1] + 0.5) / height]
        observation = call("segment_object_at", item.picture, settings=settings, point=point)
        if observation.status == "ok":
            record = observation.data["objects"][0]
            mask = masks.decode(record["mask"]).full()
            pairs.append((record["score"], float((mask & item.mask).sum() / (mask | item.mask).sum())))
    scores, overlaps = np.array(pairs).T
    draws = np.random.default_rng(0).integers(0, len(pairs), (2000, len(pairs)))
    sample = [np.corrcoef(scores[draw], overlaps[draw])[0, 1] for draw in draws]
    low, high = np.nanquantile(sample, [0.025, 0.975])
    correlation = f"{np.corrcoef(scores, overlaps)[0, 1]:.3f} [{low:.3f}, {high:.3f}]"
    report.row(
        f"segment {name}: correlation of score and IoU", correlation, ">= 0.6", f"{len(pairs)} objects"
    )
    edges = [0.0, 0.4, 0.5, 0.6, 0.7, 1.0]
    bins = [(low, high, (scores >= low) & (scores < high)) for low, high in itertools.pairwise(edges)]
    table = "; ".join(
        f"{low:.1f}-{high:.1f}: {overlaps[b].mean():.2f} ({b.sum()})" for low, high, b in bins if b.any()
    )
    report.row(
        f"segment {name}: mean error of the score",
        float(np.abs(scores - overlaps).mean()),
        "",
        f"mean IoU by score {table}",
    )
    if chart is not None:
        _draw_calibration(chart, scores, overlaps, correlation)


def _draw_calibration(chart: Path, scores: np.ndarray, overlaps: np.ndarray, correlation: str) -> None:
    """Write the picture of scores and IoUs: each mask, and the mean of each fifth of the scores with its
    interval.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 5.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1, label="perfectly calibrated")
    axes.axvline(UNSURE, color="0.6", linewidth=1, linestyle=":", label="unsure below")
    axes.scatter(scores, overlaps, s=12, alpha=0.45, label="a mask")
    for number, part in enumerate(np.array_split(np.argsort(scores), 5)):
        draws = np.random.default_rng(0).choice(overlaps[part], (2000, len(part))).mean(1)
        low, high = np.quantile(draws, [0.025, 0.975])
        at, mean = scores[part].mean(), overlaps[part].mean()
        label = None if number else "a fifth of the masks, mean and 95 % interval"
        axes.errorbar(at, mean, [[mean - low], [high - mean]], fmt="o", color="C1", capsize=3, label=label)
    axes.set(
        xlabel="score",
        ylabel="IoU with the published mask",
        xlim=(0, 1),
        ylim=(0, 1),
        title=f"correlation {correlation}",
    )
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(chart)


def _interval(values: list[float]) -> str:
    """Mean and its 95 % bootstrap interval over objects."""
    sample = np.random.default_rng(0).choice(np.array(values), (2000, len(values))).mean(1)
    low, high = np.quantile(sample, [0.025, 0.975])
    return f"{np.mean(values):.3f} [{low:.3f}, {high:.3f}]"


def _drawings(count: int) -> list[sets.Outlined]:
    try:
        return sets.vqa(count)
    except ImportError:
        return []


def _iou(item: sets.Outlined, prompt: str, settings: ToolboxConfig) -> float:
    height, width = item.mask.shape
    arguments = (
        {"point": [(item.point[0] + 0.5) / width, (item.point[1] + 0.5) / height]}
        if prompt == "point"
        else {"box": normalized(item.box, item.picture)}
    )
    observation = call("segment_object_at", item.picture, settings=settings, **arguments)
    if observation.status != "ok":
        return 0.0
    mask = masks.decode(observation.data["objects"][0]["mask"]).full()
    return float((mask & item.mask).sum() / (mask | item.mask).sum())


# --- get_properties
# -------------------------------------------------------------------------------------------------------------


def properties(report: Report) -> None:
    """Report the largest relative error against closed forms for discs, ellipses and rectangles of several
    sizes and angles.
    """
    # The error of small shapes is mostly due to rasterisation: 35 x 50 at 45 degrees differs by 1 % once it
    # is drawn.
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
        properties = observation.data["properties"].values()
        measured = {name: entry["value"] for entries in properties for name, entry in entries.items()}
        count += 1
        for name, value in truth.items():
            error = abs(measured[name] - value) / value if value else abs(measured[name])
            worst[name] = max(worst.get(name, 0.0), error)
    for name, error in worst.items():
        goal = "" if group else "<= 1 %"
        report.row(
            f"get_properties: {group}{name}, largest error", f"{100 * error:.2f} %", goal, f"{count} shapes"
        )


def _shapes(sizes: tuple[tuple[int, int], ...]) -> Iterator[tuple[np.ndarray, dict[str, float]]]:
    side = 500
    rows, columns = np.mgrid[:side, :side] + 0.5
    for a, b in sizes:
        for degrees in (0,) if a == b else (0, 17, 45, 117):
            angle = math.radians(degrees)
            u = (columns - 250.2) * math.cos(angle) + (249.7 - rows) * math.sin(angle)
            v = (249.7 - rows) * math.cos(angle) - (columns - 250.2) * math.sin(angle)
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
            yield (
                (u / a) ** 2 + (v / b) ** 2 <= 1,
                truth | ({"eccentricity": math.sqrt(1 - (b / a) ** 2)} if a > b else {}),
            )
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


# --- select_frames
# --------------------------------------------------------------------------------------------------------------


def frames(report: Report, thin: int) -> None:
    """Report frames read in shuffled order against one sequential decode, and decord's frames in both
    orders.
    """
    import clips

    from pixelis.operations import video

    names = list(clips.CONTAINERS)[::thin]
    exact, frame_count = 0, 0
    sequential: dict[str, int] = {}
    shuffled: dict[str, int] = {}
    for name in names:
        data = clips.CONTAINERS[name]()
        with av.open(io.BytesIO(data)) as container:
            expected = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        clip = open_clip(data, ToolboxConfig())
        order = [int(i) for i in np.random.default_rng(0).permutation(len(expected))]
        video._FRAMES.__init__()  # type: ignore[misc]  # clears the cache of frames
        exact += len(clip.times) == len(expected) and all(
            np.array_equal(clip.frame(i), expected[i]) for i in order
        )
        frame_count += len(expected)
        for wrong, count in zip((sequential, shuffled), _decord_errors(data, expected, order), strict=True):
            if count:
                wrong[name] = count
    name = "select_frames: containers bit-equal to sequential decoding"
    report.row(name, _share(exact, len(names)), "1", f"{frame_count} frames")
    note = "unequal frames: " + "; ".join(f"{name} {count}" for name, count in sequential.items())
    equal = len(names) - len(sequential)
    report.row("select_frames: bit-equal to decord's sequential read", _share(equal, len(names)), "", note)
    note = "the reason to decode with PyAV only: " + "; ".join(
        f"{name} {count}" for name, count in shuffled.items()
    )
    total = f"{sum(shuffled.values())} in {len(shuffled)} of {len(names)}"
    report.row("decord: wrong frames on random access", total, "", note)


def _decord_errors(data: bytes, expected: list[np.ndarray], order: list[int]) -> tuple[int, int]:
    """Count the frames that decord reads wrongly in sequence and in ``order``; all frames if it cannot open
    the clip.
    """
    try:
        import decord
    except ImportError:
        return 0, 0
    counts = []
    for numbers in (range(len(expected)), order):
        with _silent_stderr():
            try:
                reader = decord.VideoReader(io.BytesIO(data), num_threads=1)
                counts.append(sum(not _equal(reader, i, expected[i]) for i in numbers))
            except Exception:  # decord raises its own type and the errors of its callbacks
                counts.append(len(expected))
    return counts[0], counts[1]


def _equal(reader: Any, number: int, expected: np.ndarray) -> bool:
    try:
        return np.array_equal(reader[number].asnumpy(), expected)
    except Exception:  # as above
        return False


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Redirect the process's stderr, to which FFmpeg inside decord writes."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def run(report: Report, args: argparse.Namespace, thin: int) -> None:
    """Measure all operations on every ``thin``-th item of each set; ``args``: the options of
    `benchmarks.operations`.
    """
    cv2.setNumThreads(1)
    text(report, args.photos, thin)
    track(report, thin)
    segment(report, args, thin)
    properties(report)
    frames(report, thin)
