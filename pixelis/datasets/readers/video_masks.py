"""Clips with things segmented over time: YouTube-VIS, UVO, YouTube-VOS, EPIC-KITCHENS VISOR.

YouTube-VIS (arXiv 1905.04804) and UVO (https://sites.google.com/view/unidentified-video-object) are COCO files of ``videos``, an
annotation a thing with a mask and a box a frame, or null; YouTube-VIS has every fifth frame of 30 a second, UVO all.
YouTube-VOS (arXiv 1809.03327): ``meta.json`` names the things, palette pictures hold them by number.
VISOR, https://github.com/epic-kitchens/VISOR-VIS: one JSON file a video, polygons in 1920 x 1080 of few frames; a sequence in
which the things stay the same is a clip here, its frames not evenly spaced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pixelis.datasets.annotation_geometry import box_xywh, mask_code, sides
from pixelis.datasets.fields import RowError, need, optional, text, whole
from pixelis.datasets.readers.base import Checker, DatasetReader, DatasetRoot, Rows, below, read_json, small_json
from pixelis.datasets.readers.coco_like import categories_of, grouped
from pixelis.errors import OperationError
from pixelis.operations.masks import Mask, decode
from pixelis.records import Annotations, Media, Question, Region, Relation

VISOR_SIZE = (1920, 1080)
"""Width and height that VISOR's sparse polygons are drawn in."""


def _videos(files: tuple[str, ...], pictures: tuple[str, ...], fps: float) -> Callable[[DatasetRoot], Rows]:
    """A reader of COCO files of videos; ``pictures`` is the folder that the names of frames start in."""

    def read(place: DatasetRoot) -> Rows:
        path, folder = place.path(*files), place.path(*pictures)
        data, rows = read_json(path), Checker(path)
        categories, groups = categories_of(data, rows), grouped(data, "video_id", rows)

        def question(video: dict[str, Any]) -> Question:
            key = rows.unique(need(video, "id", (int, str)), "id")
            width, height = sides(video.get("width"), video.get("height"))
            names = need(video, "file_names", list)
            if not names or not all(isinstance(name, str) for name in names):
                raise RowError("file_names", "wrong_type", "is no list of names")
            regions = []
            for annotation in groups.pop(key, []):
                with rows.row(f"annotation {annotation.get('id')}"):
                    regions += _track(annotation, categories, rows, len(names), width, height)
            frames = [below(folder, name, "file_names") for name in names]
            media = Media(id="vid0", kind="video", frames=frames, fps=fps, width=width, height=height)
            return place.question(key, media, Annotations(regions=regions), dropped=rows.pending)

        yield from rows.take()
        for position, video in enumerate(rows.items(data, "videos")):
            yield from rows.one(f"videos[{position}]", question, video)

    return read


def _track(annotation: Any, categories: Any, rows: Checker, frames: int, width: int, height: int) -> list[Region]:
    """The regions of one thing, a frame each; a bad one of them is left out."""
    track, category = str(need(annotation, "id", (int, str))), need(annotation, "category_id", int)
    if category not in categories:
        raise RowError("category_id", "unknown_id", f"{category} is not among the categories")
    masks, boxes = need(annotation, "segmentations", list), need(annotation, "bboxes", list)
    # UVO: a thing may be annotated from a frame on, not over the whole clip.
    first = whole(annotation.get("start_idx", 0), "start_idx") if len(masks) < frames else 0
    if len(masks) != len(boxes) or first + len(masks) > frames:
        raise RowError(
            "segmentations", "bad_length", f"{len(masks)} masks and {len(boxes)} boxes from {first} on for {frames} frames"
        )
    regions = []
    crowd = {"iscrowd": True} if annotation.get("iscrowd") else {}
    for frame, (mask, corners) in enumerate(zip(masks, boxes, strict=True), first):
        if mask is None or corners is None:
            continue
        with rows.row(f"annotation {track}, frame {frame}"):
            place, code = box_xywh(corners, width, height, "bboxes"), mask_code(mask, width, height, "segmentations")
            label = categories[category]["name"]
            name = f"{track}.{frame}"
            region = Region(id=name, label=label, box=place, media="vid0", mask=code, frame=frame, track=track, attributes=crowd)
            regions.append(region)
    return regions


def _youtube_vos(place: DatasetRoot) -> Rows:
    path, pictures = place.path("{split}/meta.json"), place.path("{split}/JPEGImages")
    masks, rows = place.path("{split}/Annotations"), Checker(path)

    def question(key: str, video: Any) -> Question:
        below(pictures, key, "videos")
        things = {whole(number, "objects", 1): thing for number, thing in need(video, "objects", dict).items()}
        names = sorted({str(name) for thing in things.values() for name in need(thing, "frames", list)})
        if not names:
            raise RowError("frames", "empty", "no thing is in any frame")
        regions, size = [], (None, None)
        for frame, name in enumerate(names):
            with rows.row(f"{key}, frame {name}"):
                numbers = _palette(Path(below(masks, f"{key}/{name}.png", "frames")))
                size = (numbers.shape[1], numbers.shape[0])
                for number, thing in things.items():
                    inside = numbers == number
                    if inside.any():
                        mask = Mask.of(inside)
                        label, code, track = text(thing, "category").replace("_", " "), mask.encode(), str(number)
                        fields = {"id": f"{number}.{frame}", "label": label, "box": mask.box, "mask": code}
                        regions.append(Region(**fields, media="vid0", frame=frame, track=track))
        frames = [below(pictures, f"{key}/{name}.jpg", "frames") for name in names]
        media = Media(id="vid0", kind="video", frames=frames, fps=6, width=size[0], height=size[1])
        return place.question(key, media, Annotations(regions=regions), dropped=rows.pending)

    for key, video in need(read_json(path), "videos", dict).items():
        yield from rows.one(key, question, key, video)


def _palette(path: Path) -> np.ndarray:
    """The numbers of a palette picture, uint8 [height, width]: an annotation, not a picture to look at."""
    try:
        with Image.open(path, formats=("PNG",)) as image:
            sides(image.width, image.height)
            if image.mode not in ("P", "L"):
                raise RowError("Annotations", "bad_mask", f"{path} is no palette picture")
            return np.asarray(image)
    except FileNotFoundError:
        raise RowError("Annotations", "missing_file", f"no {path}") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise RowError("Annotations", "bad_mask", f"{path}: {error}") from None


def _visor(place: DatasetRoot) -> Rows:
    base = "GroundTruth-SparseAnnotations/"
    folder, pictures = place.path(base + "annotations/{split}"), place.path(base + "rgb_frames/{split}")
    files = sorted(folder.glob("*.json"))
    if not files:
        place.path(base + "annotations/{split}/P01_01.json")
    for path in files:
        rows, sequences = Checker(path), defaultdict(list)
        with rows.row("video_annotations"):
            for position, frame in enumerate(need(small_json(path), "video_annotations", list)):
                with rows.row(f"video_annotations[{position}]"):
                    image = need(frame, "image", dict)
                    sequences[text(image, "subsequence")].append((text(image, "name"), frame))
        yield from rows.take()
        for name, frames in sequences.items():
            yield from rows.one(name, _sequence, place, pictures, path.stem, name, sorted(frames, key=lambda f: f[0]), rows)


def _sequence(
    place: DatasetRoot, pictures: Path, video: str, name: str, frames: list[tuple[str, Any]], rows: Checker
) -> Question:
    regions: list[Region] = []
    relations: list[Relation] = []
    uris = []
    for number, (picture, frame) in enumerate(frames):
        uris.append(below(pictures, f"{video.split('_')[0]}/{video}/{picture}", "name"))
        found, hands = {}, {}
        for annotation in need(frame, "annotations", list):
            with rows.row(f"{picture}, annotation {annotation.get('id') if isinstance(annotation, dict) else ''}"):
                region = _thing(annotation, number)
                found[region.id] = region
                hands[region.id] = optional(annotation, "in_contact_object", str)
        regions += found.values()
        # Other values say that a hand touches nothing, something unsegmented, or that nobody knows.
        touched = ((hand, thing) for hand, thing in hands.items() if thing in found)
        relations += [Relation(subject=hand, predicate="in contact with", object=thing) for hand, thing in touched]
    media = Media(id="vid0", kind="video", frames=uris, fps=1, width=VISOR_SIZE[0], height=VISOR_SIZE[1])
    key = f"{video}-{name.removeprefix(video + '_')}"
    annotations = Annotations(regions=regions, relations=relations)
    return place.question(key, media, annotations, dropped=rows.pending, video=video, even=False)


def _thing(annotation: Any, frame: int) -> Region:
    name, width, height = text(annotation, "name"), *VISOR_SIZE
    code = mask_code(need(annotation, "segments", list), width, height, "segments")
    try:
        place = decode(code).box
    except OperationError as error:
        raise RowError("segments", "empty_mask", error.message) from None
    told = {"class_id": annotation.get("class_id"), "exhaustive": annotation.get("exhaustive")}
    told = {key: value for key, value in told.items() if value is not None}
    fields = {"id": text(annotation, "id"), "label": name, "box": place, "mask": code}
    return Region(**fields, media="vid0", frame=frame, track=name, attributes=told)


_VIS_LAYOUT = "ROOT/SPLIT.json (or ROOT/SPLIT/instances.json), ROOT/SPLIT/JPEGImages/0043f083b5/00000.jpg"
_FAMILIES = (
    DatasetReader(
        "youtube_vis",
        "tracking",
        _videos(("{split}.json", "{split}/instances.json", "instances_{split}.json"), ("{split}/JPEGImages",), 6),
        _VIS_LAYOUT,
        "https://youtube-vos.org/dataset/vis",
    ),
    DatasetReader(
        "uvo",
        "tracking",
        _videos(
            tuple(f"VideoDenseSet/UVO_video_{{split}}_dense{end}.json" for end in ("_with_label", "")),
            ("uvo_videos_dense_frames",),
            30,
        ),
        "ROOT/VideoDenseSet/UVO_video_SPLIT_dense.json (or ..._dense_with_label.json), ROOT/uvo_videos_dense_frames/YTID/0.png "
        "(frames as the kit's video2frames.py writes them)",
        "https://sites.google.com/view/unidentified-video-object/dataset",
    ),
    DatasetReader(
        "youtube_vos",
        "tracking",
        _youtube_vos,
        "ROOT/SPLIT/meta.json, ROOT/SPLIT/JPEGImages/003234408d/00000.jpg, ROOT/SPLIT/Annotations/003234408d/00000.png",
        "https://youtube-vos.org/dataset/vos",
    ),
    DatasetReader(
        "visor",
        "tracking",
        _visor,
        "ROOT/GroundTruth-SparseAnnotations/annotations/SPLIT/P01_01.json and, unpacked, "
        "ROOT/GroundTruth-SparseAnnotations/rgb_frames/SPLIT/P01/P01_01/P01_01_frame_0000000140.jpg",
        "https://epic-kitchens.github.io/VISOR",
    ),
)
READERS = {reader.name: reader for reader in _FAMILIES}
