"""Clips with masks over time: YouTube-VOS (arXiv 1809.03327) and VISOR.

VISOR: a sequence in which the objects stay the same is one clip, and its frames are not evenly spaced.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pixelis.datasets.annotation_geometry import image_size, mask_rle
from pixelis.datasets.fields import RowError, need, optional, text, whole
from pixelis.datasets.readers.base import (
    AnnotationFile,
    DatasetRoot,
    Rows,
    Size,
    below,
    clip,
    read_json_row,
    tracked,
)
from pixelis.errors import OperationError
from pixelis.operations.masks import Mask, decode
from pixelis.records import Annotations, Question, Region, Relation

VISOR_SIZE = (1920, 1080)


def youtube_vos(root: DatasetRoot) -> Rows:
    file = root.file("{split}/meta.json")
    frames_folder, masks_folder = root.path("{split}/JPEGImages"), root.path("{split}/Annotations")

    def question(key: str, video: Any) -> Question:
        below(frames_folder, key, "videos")
        objects = {whole(number, "objects", 1): row for number, row in need(video, "objects", dict).items()}
        names = sorted({str(name) for row in objects.values() for name in need(row, "frames", list)})
        if not names:
            raise RowError("frames", "empty", "no object is in any frame")
        regions = []
        size: Size = (None, None)
        for frame, name in enumerate(names):
            with file.collect_errors(f"{key}, frame {name}"):
                numbers = _object_numbers(Path(below(masks_folder, f"{key}/{name}.png", "frames")))
                size = (numbers.shape[1], numbers.shape[0])
                for number, row in objects.items():
                    if (inside := numbers == number).any():
                        mask, label = Mask.of(inside), text(row, "category").replace("_", " ")
                        regions.append(tracked(number, frame, label, mask.box, mask=mask.encode()))
        frames = [below(frames_folder, f"{key}/{name}.jpg", "frames") for name in names]
        return file.question(key, clip(frames=frames, fps=6, size=size), Annotations(regions=regions))

    yield from file.each_entry(file.items("videos", dict), question)


def _object_numbers(path: Path) -> np.ndarray:
    try:
        with Image.open(path, formats=("PNG",)) as palette:
            image_size(palette.width, palette.height)
            if palette.mode not in ("P", "L"):
                raise RowError("Annotations", "bad_mask", f"{path} is not a palette image")
            return np.asarray(palette)
    except (OSError, SyntaxError, ValueError) as error:
        code = "missing_file" if isinstance(error, FileNotFoundError) else "bad_mask"
        raise RowError("Annotations", code, f"{path}: {error}") from None


def visor(root: DatasetRoot) -> Rows:
    base = "GroundTruth-SparseAnnotations/"
    frames_folder = root.path(base + "rgb_frames/{split}")
    for path in root.paths(base + "annotations/{split}/*.json", base + "annotations/{split}/P01_01.json"):
        file, sequences = AnnotationFile(root, path), defaultdict(list)
        with file.collect_errors("video_annotations"):
            for i, frame in enumerate(need(read_json_row(path), "video_annotations", list)):
                with file.collect_errors(f"video_annotations[{i}]"):
                    row = need(frame, "image", dict)
                    sequences[text(row, "subsequence")].append((text(row, "name"), frame))
        yield from file.take_errors()
        for name, frames in sequences.items():
            frames.sort(key=lambda named: named[0])
            yield from file.convert(name, _visor_sequence, file, frames_folder, name, frames)


def _visor_sequence(file: AnnotationFile, folder: Path, name: str, frames: list[tuple[str, Any]]) -> Question:
    video, paths = file.path.stem, list[str]()
    regions, relations = list[Region](), list[Relation]()
    for number, (frame_name, frame) in enumerate(frames):
        paths.append(below(folder, f"{video.split('_')[0]}/{video}/{frame_name}", "name"))
        by_id, contacts = {}, {}
        for i, annotation in enumerate(need(frame, "annotations", list)):
            with file.collect_errors(f"{frame_name}, annotations[{i}]"):
                region = _visor_region(annotation, number)
                by_id[region.id] = region
                contacts[region.id] = optional(annotation, "in_contact_object", str)
        regions += by_id.values()
        # Other values: a hand touches nothing, something without a segment, or it is unclear
        touching = ((hand, thing) for hand, thing in contacts.items() if thing in by_id)
        relations += [
            Relation(subject=hand, predicate="in contact with", object=thing) for hand, thing in touching
        ]
    media, notes = (
        clip(frames=paths, fps=1, size=VISOR_SIZE),
        Annotations(regions=regions, relations=relations),
    )
    return file.question(f"{video}-{name.removeprefix(video + '_')}", media, notes, video=video, even=False)


def _visor_region(annotation: Any, frame: int) -> Region:
    name = text(annotation, "name")
    code = mask_rle(need(annotation, "segments", list), *VISOR_SIZE, "segments")
    try:
        box = decode(code).box
    except OperationError as error:
        raise RowError("segments", "empty_mask", error.message) from None
    attributes = {
        key: annotation[key] for key in ("class_id", "exhaustive") if annotation.get(key) is not None
    }
    return Region(
        id=text(annotation, "id"),
        label=name,
        box=box,
        media="vid0",
        mask=code,
        frame=frame,
        track=name,
        attributes=attributes,
    )
