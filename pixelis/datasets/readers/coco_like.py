"""Pictures with segmented things: COCO, LVIS, PartImageNet, SA-1B.

COCO: one file with ``images``, ``categories`` and ``annotations`` (polygons, or run lengths for crowds; ``bbox`` x, y, w, h);
https://cocodataset.org/#format-data. LVIS v1 adds to each category its ``frequency`` (r, c, f), names pictures by ``coco_url``
and tells per picture which categories are absent or not annotated exhaustively; https://www.lvisdataset.org/dataset.
PartImageNet in COCO's format (arXiv 2112.00933): a category is a part of a super-category. SA-1B: one JSON file beside each
picture; https://github.com/facebookresearch/segment-anything#dataset.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pixelis.datasets.annotation_geometry import box_xywh, mask_code, sides
from pixelis.datasets.fields import RowError, need, number, optional, text
from pixelis.datasets.readers.base import Checker, DatasetReader, DatasetRoot, Rows, below, read_json, small_json
from pixelis.records import Annotations, Media, Question, Region


def categories_of(data: Any, rows: Checker, kept: tuple[str, ...] = ()) -> dict[Any, dict[str, Any]]:
    """COCO's categories by id: ``name`` and those of the fields ``kept`` that they have."""
    result: dict[Any, dict[str, Any]] = {}
    for number_, row in enumerate(rows.items(data, "categories")):
        with rows.row(f"categories[{number_}]"):
            fields = {key: row[key] for key in kept if isinstance(row.get(key), str)} if isinstance(row, dict) else {}
            result[need(row, "id", int)] = {"name": text(row, "name").replace("_", " "), **fields}
    return result


def grouped(data: Any, key: str, rows: Checker) -> dict[Any, list[Any]]:
    """COCO's annotations by the id of what they belong to; those of nothing known are faults."""
    owners = {"image_id": "images", "video_id": "videos"}[key]
    known = {row["id"] for row in rows.items(data, owners) if isinstance(row, dict) and isinstance(row.get("id"), (int, str))}
    groups: dict[Any, list[Any]] = defaultdict(list)
    for position, annotation in enumerate(rows.items(data, "annotations")):
        with rows.row(f"annotations[{position}]"):
            owner = need(annotation, key, (int, str))
            if owner not in known:
                raise RowError(key, "unknown_id", f"{owner!r} is not among the {owners}")
            groups[owner].append(annotation)
    data["annotations"].clear()  # so that what was read can be forgotten
    return groups


def _pictures(
    *files: str, pictures: str = "{split}", kept: tuple[str, ...] = ("supercategory",)
) -> Callable[[DatasetRoot], Rows]:
    """A reader of COCO's format: ``files`` are where annotations may lie, ``pictures`` the folder that file names start in."""

    def read(place: DatasetRoot) -> Rows:
        path = place.path(*files)
        folder = place.path(pictures)
        data, rows = read_json(path), Checker(path)
        categories, groups = categories_of(data, rows, kept), grouped(data, "image_id", rows)

        def question(image: dict[str, Any]) -> Question:
            key = rows.unique(need(image, "id", (int, str)), "id")
            width, height = sides(image.get("width"), image.get("height"))
            media = Media(id="img0", uri=_file(place.root, folder, image), width=width, height=height)
            regions = []
            for annotation in groups.pop(key, []):
                with rows.row(f"annotation {annotation.get('id')}"):
                    regions.append(_region(annotation, categories, width, height))
            # LVIS: what is known not to be there, and what may be there more often than it is annotated.
            meta: dict[str, Any] = {
                name: [categories[c]["name"] for c in optional(image, column, list, []) if isinstance(c, int) and c in categories]
                for name, column in (("absent", "neg_category_ids"), ("not_exhaustive", "not_exhaustive_category_ids"))
            }
            return place.question(key, media, Annotations(regions=regions), dropped=rows.pending, **meta)

        yield from rows.take()
        for position, image in enumerate(rows.items(data, "images")):
            yield from rows.one(f"images[{position}]", question, image)

    return read


def _file(root: Path, folder: Path, image: dict[str, Any]) -> str:
    if "file_name" in image:
        return below(folder, text(image, "file_name"), "file_name")
    return below(root, "/".join(text(image, "coco_url").split("/")[-2:]), "coco_url")  # .../train2017/000000391895.jpg


def _region(annotation: dict[str, Any], categories: dict[Any, dict[str, Any]], width: int, height: int) -> Region:
    category = need(annotation, "category_id", int)
    if category not in categories:
        raise RowError("category_id", "unknown_id", f"{category} is not among the categories")
    fields = {key: value for key, value in categories[category].items() if key != "name"}
    crowd = {"iscrowd": True} if annotation.get("iscrowd") else {}
    return Region(
        id=str(need(annotation, "id", (int, str))),
        label=categories[category]["name"],
        box=box_xywh(need(annotation, "bbox", list), width, height),
        mask=mask_code(annotation.get("segmentation"), width, height),
        attributes={**fields, **crowd},
    )


def _anything(place: DatasetRoot) -> Rows:
    """SA-1B: one JSON file a picture, found and read one after the other; masks below the thresholds are left out."""
    least = {"area": place.number("area"), "predicted_iou": place.number("iou"), "stability_score": place.number("stability")}

    def question(path: Path, rows: Checker) -> Question:
        data = small_json(path)
        image = need(data, "image", dict)
        width, height = sides(image.get("width"), image.get("height"))
        media = Media(id="img0", uri=below(path.parent, text(image, "file_name"), "file_name"), width=width, height=height)
        regions, left_out = [], 0
        for position, annotation in enumerate(need(data, "annotations", list)):
            with rows.row(f"annotations[{position}]"):
                if any(number(need(annotation, name, (int, float)), name) < value for name, value in least.items()):
                    left_out += 1
                else:
                    regions.append(_masklet(annotation, width, height))
        key = need(image, "image_id", (int, str))
        return place.question(key, media, Annotations(regions=regions), dropped=rows.pending, left_out=left_out or None)

    empty = True
    for path in _walk(place.path("")):
        empty, rows = False, Checker(path)
        yield from rows.one("image", question, path, rows)
    if empty:
        place.path("sa_000000/sa_1.json")


def _walk(folder: Path) -> Iterator[Path]:
    """JSON files below a folder in the order of their names, a folder at a time."""
    with os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir():
            yield from _walk(Path(entry.path))
        elif entry.name.endswith(".json"):
            yield Path(entry.path)


def _masklet(annotation: dict[str, Any], width: int, height: int) -> Region:
    points = [[number(x, "point_coords") / width, number(y, "point_coords") / height] for x, y in _pairs(annotation)]
    return Region(
        id=str(need(annotation, "id", (int, str))),
        label="object",  # SA-1B names nothing
        box=box_xywh(need(annotation, "bbox", list), width, height),
        mask=mask_code(need(annotation, "segmentation", dict), width, height),
        attributes={
            "area": annotation["area"],
            "predicted_iou": annotation["predicted_iou"],
            "stability_score": annotation["stability_score"],
            **({"points": points} if points else {}),
        },
    )


def _pairs(annotation: dict[str, Any]) -> list[list[Any]]:
    points = optional(annotation, "point_coords", list, [])
    if not all(isinstance(point, list) and len(point) == 2 for point in points):
        raise RowError("point_coords", "wrong_type", "is no list of points")
    return points


_FAMILIES = (
    DatasetReader(
        "coco",
        "segmentation",
        _pictures("annotations/instances_{split}.json"),
        "ROOT/annotations/instances_SPLIT.json, ROOT/SPLIT/000000000009.jpg",
        "https://cocodataset.org/#format-data",
        {"split": "train2017"},
        exhaustive=True,
    ),
    DatasetReader(
        "lvis",
        "segmentation",
        _pictures("annotations/lvis_v1_{split}.json", "lvis_v1_{split}.json", pictures="", kept=("frequency",)),
        "ROOT/annotations/lvis_v1_SPLIT.json (or ROOT/lvis_v1_SPLIT.json), ROOT/train2017/ and ROOT/val2017/ of COCO",
        "https://www.lvisdataset.org/dataset",
        exhaustive=True,
    ),
    DatasetReader(
        "partimagenet",
        "segmentation",
        _pictures("annotations/{split}.json", "annotations/{split}/{split}.json", "{split}.json", pictures="images/{split}"),
        "ROOT/annotations/SPLIT.json (or ROOT/annotations/SPLIT/SPLIT.json), ROOT/images/SPLIT/n01440764_1234.JPEG",
        "https://github.com/TACJu/PartImageNet",
        exhaustive=True,
    ),
    DatasetReader(
        "sa1b",
        "segmentation",
        _anything,
        "ROOT/sa_000000/sa_1.json with sa_1.jpg beside it, ... (the unpacked archives, each in a folder or all in one)",
        "https://github.com/facebookresearch/segment-anything#dataset",
        {"split": "", "area": "100", "iou": "0.5", "stability": "0.5"},
    ),
)
READERS = {reader.name: reader for reader in _FAMILIES}
