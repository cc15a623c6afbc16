"""Referring expressions: RefCOCO, RefCOCO+ and RefCOCOg."""

from __future__ import annotations

from typing import Any, get_args

from pyarrow import fs

from pixelis.datasets.annotation_geometry import box_xyxy, image_size
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.fields import need, objects, parse_json, text
from pixelis.datasets.files import Part, read_part
from pixelis.datasets.readers.base import AnnotationFile, DatasetRoot, Rows, below, image
from pixelis.errors import BadInput
from pixelis.operations.scale import Scale
from pixelis.records import Annotations, Box, Coordinates, Question, Region

COLUMNS = ["image_path", "raw_image_info", "bbox", "sentences"]
RANGES = {
    "thousand": "from 0 to 1000 of the picture's width and height",
    "unit": "from 0 to 1 of the picture's width and height",
    "pixels": "in pixels",
}
"""How a question names its coordinates."""


def refcoco(root: DatasetRoot) -> Rows:
    """One question for each expression; its truth is written in the option ``coordinates``."""
    if (coordinates := root.options["coordinates"]) not in RANGES:
        message = f"{root.reader.name}: coordinates={coordinates} is no scale"
        raise BadInput(message, fix=f"one of {', '.join(get_args(Coordinates))}")
    for path in root.paths("data/{split}-*.parquet", "data/{split}-00000-of-00001.parquet"):
        file = AnnotationFile(root, path)
        for row in read_part(fs.LocalFileSystem(), Part(str(path)), COLUMNS):
            if isinstance(row, BadRow):
                yield row
                continue
            sentences = list[dict[str, Any]]()
            with file.collect_errors(row.number):
                sentences = objects(row.values, "sentences")
            yield from file.take_errors()
            for sentence in sentences:
                yield from file.convert(row.number, _question, file, coordinates, row.values, sentence)


def _question(
    file: AnnotationFile, coordinates: Coordinates, row: dict[str, Any], sentence: dict[str, Any]
) -> Question:
    about = parse_json(text(row, "raw_image_info"), "raw_image_info")
    size = image_size(about.get("width"), about.get("height"))
    box, phrase = box_xyxy(need(row, "bbox", list), *size), text(sentence, "sent")
    region = Region(id="target0", label=phrase, box=box)
    return file.question(
        need(sentence, "sent_id", int),
        image(below(file.root.folder, text(row, "image_path"), "image_path"), size),
        Annotations(regions=[region]),
        question=f'Where is "{phrase}"? Answer with its box [x0, y0, x1, y1], {RANGES[coordinates]}.',
        answers=[str(_written(box, coordinates, size))],
        scorer="iou_50",
    )


def _written(box: Box, coordinates: Coordinates, size: tuple[int, int]) -> list[float]:
    """The box in this scale, not rounded to its steps: half a step can decide an IoU of a small box."""
    extent = Scale(coordinates, {"img0": size}).extent("img0")
    return [round(side * extent[i % 2], 4) for i, side in enumerate(box)]
