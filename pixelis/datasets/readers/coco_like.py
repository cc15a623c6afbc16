"""COCO's format for images and clips (COCO, LVIS, PartImageNet, YouTube-VIS, UVO), and SA-1B.

In PartImageNet (arXiv 2112.00933) a category is a part of a super-category. YouTube-VIS (arXiv 1905.04804)
has every fifth frame of 30 a second, UVO all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pixelis.datasets.annotation_geometry import box_xywh, image_size, mask_rle
from pixelis.datasets.fields import RowError, need, number, optional, text, whole
from pixelis.datasets.readers.base import (
    AnnotationFile,
    DatasetRoot,
    Rows,
    below,
    clip,
    image,
    read_json_row,
    tracked,
)
from pixelis.records import Annotations, Question, Region

Categories = dict[Any, dict[str, Any]]


def _categories(file: AnnotationFile, attribute: str = "") -> Categories:
    result: Categories = {}
    for i, row in enumerate(file.items("categories")):
        with file.collect_errors(f"categories[{i}]"):
            category = {"name": text(row, "name").replace("_", " ")}
            if isinstance(row.get(attribute), str):
                category[attribute] = row[attribute]
            result[need(row, "id", int)] = category
    return result


def _category(annotation: Any, categories: Categories) -> dict[str, Any]:
    category = need(annotation, "category_id", int)
    if category not in categories:
        raise RowError("category_id", "unknown_id", f"{category} is not among the categories")
    return categories[category]


def _annotations_by(file: AnnotationFile, key: str, owners: str) -> dict[Any, list[Any]]:
    ids = [row.get("id") for row in file.items(owners) if isinstance(row, dict)]
    groups: dict[Any, list[Any]] = {id: [] for id in ids if isinstance(id, (int, str))}
    annotations = file.items("annotations")
    for i, annotation in enumerate(annotations):
        with file.collect_errors(f"annotations[{i}]"):
            owner = need(annotation, key, (int, str))
            if owner not in groups:
                raise RowError(key, "unknown_id", f"{owner!r} is not among the {owners}")
            groups[owner].append(annotation)
    annotations.clear()  # the groups free the annotations of each image that was read
    return groups


# Images


def _images(
    *annotations: str, images: str = "{split}", category_attribute: str = "supercategory"
) -> Callable[[DatasetRoot], Rows]:
    def read(root: DatasetRoot) -> Rows:
        file, folder = root.file(*annotations), root.path(images)
        categories = _categories(file, category_attribute)
        groups = _annotations_by(file, "image_id", "images")

        def names_of(row: dict[str, Any], column: str) -> list[str]:
            ids = [id for id in optional(row, column, list, []) if isinstance(id, int)]
            return [categories[id]["name"] for id in ids if id in categories]

        def question(row: dict[str, Any]) -> Question:
            key = need(row, "id", (int, str))
            size = image_size(row.get("width"), row.get("height"))
            if "file_name" in row:
                path = below(folder, text(row, "file_name"), "file_name")
            else:  # LVIS: .../train2017/000000391895.jpg
                path = below(root.folder, "/".join(text(row, "coco_url").split("/")[-2:]), "coco_url")
            regions = []
            for annotation in groups.pop(key, []):
                with file.collect_errors(f"annotation {annotation.get('id')}"):
                    category = _category(annotation, categories)
                    attributes = {name: value for name, value in category.items() if name != "name"}
                    if annotation.get("iscrowd"):
                        attributes["iscrowd"] = True
                    region = Region(
                        id=str(need(annotation, "id", (int, str))),
                        label=category["name"],
                        box=box_xywh(need(annotation, "bbox", list), *size),
                        mask=mask_rle(annotation.get("segmentation"), *size),
                        attributes=attributes,
                    )
                    regions.append(region)
            # LVIS: categories that the image lacks, and of which it may show more than is annotated
            meta: dict[str, Any] = {
                "absent": names_of(row, "neg_category_ids"),
                "not_exhaustive": names_of(row, "not_exhaustive_category_ids"),
            }
            return file.question(key, image(path, size), Annotations(regions=regions), **meta)

        yield from file.take_errors()
        yield from file.each_item("images", question)

    return read


# Clips


def _videos(*annotations: str, frames: str, fps: float) -> Callable[[DatasetRoot], Rows]:
    def read(root: DatasetRoot) -> Rows:
        file, folder = root.file(*annotations), root.path(frames)
        categories, groups = _categories(file), _annotations_by(file, "video_id", "videos")

        def question(video: dict[str, Any]) -> Question:
            key = need(video, "id", (int, str))
            size = image_size(video.get("width"), video.get("height"))
            paths = [below(folder, str(name), "file_names") for name in need(video, "file_names", list)]
            regions: list[Region] = []
            for annotation in groups.pop(key, []):
                with file.collect_errors(f"annotation {annotation.get('id')}"):
                    label = _category(annotation, categories)["name"]
                    regions += _track(annotation, label, file, len(paths), *size)
            return file.question(key, clip(frames=paths, fps=fps, size=size), Annotations(regions=regions))

        yield from file.take_errors()
        yield from file.each_item("videos", question)

    return read


def _track(
    annotation: Any, label: str, file: AnnotationFile, frames: int, width: int, height: int
) -> list[Region]:
    track = str(need(annotation, "id", (int, str)))
    masks, boxes = need(annotation, "segmentations", list), need(annotation, "bboxes", list)
    # UVO may annotate an object from a later frame on.
    first = whole(annotation.get("start_idx", 0), "start_idx") if len(masks) < frames else 0
    if len(masks) != len(boxes) or first + len(masks) > frames:
        message = f"{len(masks)} masks and {len(boxes)} boxes from frame {first} on of {frames} frames"
        raise RowError("segmentations", "bad_length", message)
    regions = []
    for frame, (mask, sides) in enumerate(zip(masks, boxes, strict=True), first):
        if mask is None or sides is None:
            continue
        with file.collect_errors(f"annotation {track}, frame {frame}"):
            box = box_xywh(sides, width, height, "bboxes")
            code = mask_rle(mask, width, height, "segmentations")
            attributes = {"iscrowd": True} if annotation.get("iscrowd") else {}
            regions.append(tracked(track, frame, label, box, mask=code, attributes=attributes))
    return regions


# SA-1B


def sa1b(root: DatasetRoot) -> Rows:
    """Masks below the thresholds are left out."""
    options = {"area": "area", "predicted_iou": "iou", "stability_score": "stability"}
    thresholds = {name: root.number(option) for name, option in options.items()}

    def question(file: AnnotationFile) -> Question:
        data = read_json_row(file.path)
        row = need(data, "image", dict)
        size = image_size(row.get("width"), row.get("height"))
        media = image(below(file.path.parent, text(row, "file_name"), "file_name"), size)
        (width, height), regions, left_out = size, [], 0
        for i, annotation in enumerate(need(data, "annotations", list)):
            with file.collect_errors(f"annotations[{i}]"):
                scores = {name: number(need(annotation, name, (int, float)), name) for name in thresholds}
                if any(score < thresholds[name] for name, score in scores.items()):
                    left_out += 1
                    continue
                pairs = optional(annotation, "point_coords", list, [])
                points = [
                    [number(x, "point_coords") / width, number(y, "point_coords") / height] for x, y in pairs
                ]
                region = Region(
                    id=str(need(annotation, "id", (int, str))),
                    label="object",
                    box=box_xywh(need(annotation, "bbox", list), *size),
                    mask=mask_rle(need(annotation, "segmentation", dict), *size),
                    attributes={**scores, **({"points": points} if points else {})},
                )
                regions.append(region)
        key = need(row, "image_id", (int, str))
        return file.question(key, media, Annotations(regions=regions), left_out=left_out or None)

    path = None
    for path in _json_files(root.path("")):
        file = AnnotationFile(root, path)
        yield from file.convert("image", question, file)
    if path is None:
        root.path("sa_000000/sa_1.json")  # raises MissingFile


def _json_files(folder: Path) -> Iterator[Path]:
    """JSON files below a folder in order, listing one folder at a time: there are 11 million."""
    with os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir():
            yield from _json_files(Path(entry.path))
        elif entry.name.endswith(".json"):
            yield Path(entry.path)


# Data sets

coco = _images("annotations/instances_{split}.json")
lvis = _images(
    "annotations/lvis_v1_{split}.json", "lvis_v1_{split}.json", images="", category_attribute="frequency"
)
partimagenet = _images(
    "annotations/{split}.json", "annotations/{split}/{split}.json", "{split}.json", images="images/{split}"
)
youtube_vis = _videos(
    "{split}.json", "{split}/instances.json", "instances_{split}.json", frames="{split}/JPEGImages", fps=6
)
uvo = _videos(
    "VideoDenseSet/UVO_video_{split}_dense_with_label.json",
    "VideoDenseSet/UVO_video_{split}_dense.json",
    frames="uvo_videos_dense_frames",
    fps=30,
)
