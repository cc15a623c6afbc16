"""CPU time of the operations against direct calls of their libraries on the same pixels, with one thread."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import av
import cv2
import numpy as np
from PIL import Image

from benchmarks import operation_datasets as sets
from benchmarks.harness import Report, compare
from benchmarks.operation_quality import call
from pixelis.config import ToolboxConfig
from pixelis.operations import Scene, execute, masks, ocr, video
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.operations.video import open_clip
from pixelis.records import Action, ImageView

VIEW = (640, 360)


def run(report: Report, turns: int) -> None:
    """Report the ratio of each operation to the direct call of its library. 1 means no overhead."""
    cv2.setNumThreads(1)
    zoom(report, turns)
    read(report, turns)
    track(report, min(turns, max(3, turns // 2)))
    properties(report, turns)
    frames(report, turns)


def _row(
    report: Report, name: str, ours: Callable[[], object], bare: Callable[[], object], turns: int, note: str
) -> None:
    ratio = compare(ours, bare, turns, clock=time.process_time)
    report.row(f"speed: {name}, ours / bare", ratio, "near 1", note)


def zoom(report: Report, turns: int) -> None:
    """Report `zoom_in` from a quarter of a 1080p photo to 640 x 360, with checks and description."""
    picture = np.asarray(Image.fromarray(sets.photo("astronaut")).resize((1920, 1080)))
    image, box = Image.fromarray(picture), [0.25, 0.25, 0.75, 0.75]
    size = (picture.shape[1], picture.shape[0])
    pixels = VIEW[0] * VIEW[1]
    view = [ImageView(id="img0", source_size=size, view_size=size)]
    scene = Scene({"img0": picture}, view, budget=PixelBudget(pixels // 2, pixels), multiple=8)
    action = Action(op="zoom_in", arguments={"box": box})
    assert execute(action, scene)[1][0].shape[:2] == VIEW[::-1]

    def ours() -> None:
        for _ in range(20):
            execute(action, scene)

    def bare() -> None:
        for _ in range(20):
            np.asarray(image.crop((480, 270, 1440, 810)).resize(VIEW, Image.Resampling.BICUBIC))

    _row(
        report, "zoom_in 20 x 960x540 to 640x360", ours, bare, turns, "bare: PIL crop, bicubic resize, array"
    )


def read(report: Report, turns: int) -> None:
    """Report `read_text` on a page, a photo with words and one cropped word against rapidocr's own
    pipeline.
    """
    import rapidocr

    threads = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
    engine = rapidocr.RapidOCR(params={"Global.log_level": "critical", "Global.use_cls": False, **threads})
    ocr.engine()
    photo, words = sets.rendered("astronaut", 0)
    word, (x0, y0, x1, y1) = words[0]
    for name, picture in (
        ("scanned page", sets.photo("page")),
        ("photo with words", photo),
        (f"cut-out {word}", np.ascontiguousarray(photo[y0:y1, x0:x1])),
    ):
        bgr = np.ascontiguousarray(picture[..., ::-1])
        bare_lines = engine(bgr).txts or ()
        lines = call("read_text", picture).data["lines"]
        note = f"{len(lines)} lines, bare {len(bare_lines)}; {picture.shape[1]}x{picture.shape[0]}"
        _row(
            report,
            f"read_text {name}",
            lambda p=picture: call("read_text", p),
            lambda b=bgr: engine(b),
            turns,
            note,
        )


def track(report: Report, turns: int) -> None:
    """Report `track_object` over forty frames against a CSRT loop that decodes the same frames."""
    data, truth = sets.moving("shrinking cat", 41)
    clip = open_clip(data, ToolboxConfig())
    first = truth[0]
    assert first is not None
    box = [first[0] / clip.width, first[1] / clip.height, first[2] / clip.width, first[3] / clip.height]

    def ours() -> None:
        video._FRAMES.__init__()  # type: ignore[misc]
        call("track_object", clip, "vid0", box=box)

    def bare() -> None:
        tracker = cv2.TrackerCSRT_create() if hasattr(cv2, "TrackerCSRT_create") else cv2.TrackerCSRT.create()
        with av.open(io.BytesIO(data)) as container:
            for number, frame in enumerate(container.decode(video=0)):
                pixels = frame.to_ndarray(format="bgr24")
                if number:
                    tracker.update(pixels)
                else:
                    tracker.init(pixels, (first[0], first[1], first[2] - first[0], first[3] - first[1]))

    _row(
        report,
        "track_object 40 frames",
        ours,
        bare,
        turns,
        f"{clip.width}x{clip.height}; bare: PyAV decode + CSRT updates",
    )


def properties(report: Report, turns: int) -> None:
    """Report `get_properties` (shape, size, position) against regionprops with the same properties."""
    from skimage.measure import label, regionprops

    outlined = sets.outlined(sets.IN_SAMPLE, None)[4]
    mask = masks.encode(outlined.mask)
    names = (
        "area",
        "perimeter",
        "solidity",
        "eccentricity",
        "orientation",
        "centroid",
        "bbox",
        "equivalent_diameter_area",
    )

    def ours() -> None:
        call("get_properties", outlined.picture, mask=mask, groups=["shape", "size", "position"])

    def bare() -> None:
        region = regionprops(label(outlined.mask), intensity_image=outlined.picture)[0]
        for name in names:
            getattr(region, name)

    _row(
        report, "get_properties shape, size, position", ours, bare, turns, "bare: skimage label + regionprops"
    )


def frames(report: Report, turns: int) -> None:
    """Report `select_frames` for eight frames of an open 720p clip against PyAV decoding up to the last, and
    opening a clip.
    """
    import clips

    data = clips.BUNNY.read_bytes()
    clip = open_clip(data, ToolboxConfig())
    numbers = [i * (len(clip.times) - 1) // 7 for i in range(8)]

    def ours() -> None:
        video._FRAMES.__init__()  # type: ignore[misc]
        call("select_frames", clip, "vid0", frames=numbers)

    def bare() -> None:
        with av.open(io.BytesIO(data)) as container:
            for number, frame in enumerate(container.decode(video=0)):
                if number in numbers:
                    frame.to_ndarray(format="rgb24")

    _row(
        report,
        f"select_frames 8 of {len(clip.times)} frames 720p",
        ours,
        bare,
        turns,
        "bare: PyAV decodes all, converts 8",
    )

    def open_data() -> None:
        open_clip(data, ToolboxConfig())

    def demux() -> None:
        with av.open(io.BytesIO(data)) as container:
            sum(1 for _ in container.demux(video=0))

    _row(
        report,
        "opening a clip",
        open_data,
        demux,
        turns,
        f"{len(data) / 1e6:.1f} MB; bare: PyAV demux without decoding",
    )
