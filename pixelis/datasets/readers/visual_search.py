"""Benchmarks of details in large pictures: MME-RealWorld, TreeBench, ZoomBench and O3-Bench."""

from __future__ import annotations

import base64
import itertools
from pathlib import Path
from typing import Any

from pixelis.datasets.annotation_geometry import box_xyxy, header_size
from pixelis.datasets.fields import need, parse_json, text, whole
from pixelis.datasets.formats.base import scorer_of
from pixelis.datasets.readers.base import AnnotationFile, DatasetRoot, Rows, Size, below, image
from pixelis.errors import BadInput
from pixelis.records import Annotations, Question, Region

MME_REALWORLD = {
    "en": ("MME_RealWorld.json",),
    "cn": ("MME_RealWorld_CN.json",),
    "lite": ("data/MME-RealWorld-Lite.json", "MME-RealWorld-Lite.json"),
}
"""Files of MME-RealWorld by split."""


def mme_realworld(root: DatasetRoot) -> Rows:
    if root.split not in MME_REALWORLD:
        raise BadInput(f"mme_realworld: no split {root.split!r}", fix=f"one of {', '.join(MME_REALWORLD)}")
    file = root.file(*MME_REALWORLD[root.split])
    folder = file.path.parent / "imgs" if root.split == "lite" else root.folder

    def question(row: dict[str, Any]) -> Question:
        options = "\n".join(str(option) for option in need(row, "Answer choices", list))
        return file.question(
            text(row, "Question_id"),
            image(below(folder, text(row, "Image"), "Image")),
            question=f"{text(row, 'Text')}\n{options}",
            answers=[text(row, "Ground truth")],
            scorer="mc_letter",
            category=[str(row[name]) for name in ("Task", "Subtask", "Category") if row.get(name)],
        )

    return file.each_row(question)


def treebench(root: DatasetRoot) -> Rows:
    file, media_root = root.file("TreeBench.tsv"), root.media_root()

    def question(row: dict[str, Any]) -> Question:
        key = text(row, "index")
        uri = media_root.reference("image", base64.b64decode(text(row, "image"), validate=True))
        size = header_size(Path(uri))
        boxes = parse_json(text(row, "target_instances"), "target_instances", list)
        return file.question(
            key,
            image(uri, size),
            _evidence(file, key, boxes, size),
            question=f"{text(row, 'question')}\n{text(row, 'multi-choice options')}",
            answers=[text(row, "answer")],
            scorer="mc_letter",
            category=text(row, "category").split("/"),
        )

    columns = ("index", "image", "question", "multi-choice options", "answer", "category", "target_instances")
    for name, row in file.table_rows(columns, "\t"):
        yield from file.convert(name, question, row)


def _evidence(file: AnnotationFile, key: str, boxes: list[Any], size: Size) -> Annotations:
    """The regions that a question is about, given as corners in pixels."""
    regions = list[Region]()
    for i, corners in enumerate(boxes):
        with file.collect_errors(f"question {key}, box {i}"):
            box = box_xyxy(corners, size[0] or 0, size[1] or 0)
            regions.append(Region(id=f"target{i}", label="target", box=box))
    return Annotations(regions=regions)


def zoombench(root: DatasetRoot) -> Rows:
    file, media_root = root.file("data/test.parquet"), root.media_root()
    column = "crop_image" if root.flag("crop") else "image"
    numbers = itertools.count()

    def question(row: dict[str, Any]) -> Question:
        number = next(numbers)
        # The columns were renamed after the first release, which has no ids.
        asked, answer = ("query", "response") if "query" in row else ("prompt", "answer")
        truths = [text(row, answer)]
        return file.question(
            row.get("id", number),
            image(media_root.reference(column, row.get(column))),
            question=text(row, asked),
            answers=truths,
            scorer=scorer_of(truths, "judge"),
            category=row.get("question_type"),
        )

    return file.each_row(question)


def o3bench(root: DatasetRoot) -> Rows:
    file = root.file("test/metadata.jsonl", "metadata.jsonl")
    numbers = itertools.count()

    def question(row: dict[str, Any]) -> Question:
        key = str(next(numbers))
        size = whole(row.get("img_width"), "img_width", 1), whole(row.get("img_height"), "img_height", 1)
        layouts, shown = need(row, "layout_infos", dict), need(row, "target_layouts", list)
        boxes = [(layouts.get(str(number)) or {}).get("bbox") for number in shown]
        return file.question(
            key,
            image(below(file.path.parent, text(row, "file_name"), "file_name"), size),
            _evidence(file, key, boxes, size),
            question=f"{text(row, 'question')}\n{text(row, 'options')}",
            answers=[text(row, "answer")],
            scorer="mc_letter",
            category=row.get("subset"),
        )

    return file.each_row(question)
