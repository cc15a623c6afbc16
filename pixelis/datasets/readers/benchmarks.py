"""Sets that agents which look closer are measured on: V* Bench, HR-Bench, TallyQA, Super-CLEVR.

V*, https://huggingface.co/datasets/craigwu/vstar_bench: questions with options in their text; beside each picture a JSON file
with the boxes (x, y, w, h in pixels) of what is asked for. HR-Bench, https://huggingface.co/datasets/DreamMr/HR-Bench: a table
that carries its pictures in base64, each question with its options in several orders; a short ``image`` is the ``index`` of the
row that has it. TallyQA, https://github.com/manoja328/TallyQA_dataset: counts. Super-CLEVR, https://github.com/Lizw14/Super-CLEVR.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from pyarrow import fs

from pixelis.datasets.annotation_geometry import box_xywh, header_size
from pixelis.datasets.fields import RowError, need, text, whole
from pixelis.datasets.media_root import MediaRoot
from pixelis.datasets.readers.base import Checker, DatasetReader, DatasetRoot, Rows, below, each_row, read_json, small_json, table
from pixelis.datasets.readers.temporal import choices
from pixelis.records import Annotations, Media, Question, Region


def _vstar(place: DatasetRoot) -> Rows:
    def question(row: dict[str, Any], rows: Checker) -> Question:
        key = rows.unique(need(row, "question_id", (int, str)), "question_id")
        category, picture = text(row, "category"), Path(below(place.root, text(row, "image"), "image"))
        width, height = header_size(picture)
        regions = []
        with rows.row(f"question {key}, boxes"):
            data = small_json(picture.with_suffix(".json"))
            names, boxes = need(data, "target_object", list), need(data, "bbox", list)
            if len(names) != len(boxes):
                raise RowError("bbox", "bad_length", f"{len(boxes)} boxes for {len(names)} things")
            for position, (name, corners) in enumerate(zip(names, boxes, strict=True)):
                regions.append(Region(id=f"target{position}", label=str(name), box=box_xywh(corners, width, height)))
        return place.question(
            f"{category}-{key}",
            Media(id="img0", uri=str(picture), width=width, height=height),
            Annotations(regions=regions),
            question=text(row, "text"),
            answers=[text(row, "label")],
            scorer="mc_letter",
            dropped=rows.pending,
            category=category,
        )

    yield from each_row(place.path("test_questions.jsonl"), question)


def _hrbench(place: DatasetRoot) -> Rows:
    path = place.path("hr_bench_{split}.tsv")
    root, rows = MediaRoot(fs.LocalFileSystem(), str(place.root), place.options["cache"] or None), Checker(path)
    pictures: dict[str, str] = {}

    def question(row: dict[str, Any]) -> Question:
        key, image = rows.unique(text(row, "index"), "index"), text(row, "image")
        if len(image) > 64:
            try:
                pictures[key] = root.reference("image", base64.b64decode(image, validate=True))
            except (binascii.Error, ValueError):
                raise RowError("image", "bad_media", "is no base64") from None
        elif image not in pictures:
            raise RowError("image", "unknown_id", f"{image!r} is no earlier row with a picture")
        uri = pictures.get(key) or pictures[image]
        width, height = header_size(Path(uri))
        options = [text(row, letter) for letter in "ABCD" if (row.get(letter) or "").strip()]
        answer = text(row, "answer").upper()
        if len(answer) != 1 or not 0 <= ord(answer) - ord("A") < len(options):
            raise RowError("answer", "no_label", f"{answer!r:.60} is no letter of {len(options)} options")
        return place.question(
            key,
            Media(id="img0", uri=uri, width=width, height=height),
            Annotations(),
            question=choices(text(row, "question"), options),
            answers=[answer],
            scorer="mc_letter",
            options=options,
            category=row.get("category"),
            cycle=row.get("cycle_category"),
        )

    for line, row in table(path, ("index", "question", "image", "answer", "A", "B"), "\t"):
        yield from rows.one(f"line {line}", question, row)


def _tallyqa(place: DatasetRoot) -> Rows:
    def question(row: dict[str, Any], rows: Checker) -> Question:
        key = rows.unique(need(row, "question_id", (int, str)), "question_id")
        return place.question(
            key,
            Media(id="img0", uri=below(place.root, text(row, "image"), "image")),
            Annotations(),
            question=text(row, "question"),
            answers=[str(whole(row.get("answer"), "answer"))],
            scorer="count",
            simple=row.get("issimple"),
            data_source=row.get("data_source"),
        )

    yield from each_row(place.path("{split}.json"), question)


def _superclevr(place: DatasetRoot) -> Rows:
    path, folder = place.path("superCLEVR_questions_30k.json"), place.path("images")
    rows = Checker(path)

    def question(row: dict[str, Any]) -> Question:
        key, answer = rows.unique(need(row, "question_index", int), "question_index"), row.get("answer")
        if answer is None or not isinstance(answer, (str, int, bool)):
            raise RowError("answer", "no_label", f"{answer!r:.60} is no answer")
        counts = isinstance(answer, int) and not isinstance(answer, bool)
        return place.question(
            key,
            Media(id="img0", uri=below(folder, text(row, "image_filename"), "image_filename")),
            Annotations(),
            question=text(row, "question"),
            answers=[str(answer)],
            scorer="count" if counts else "exact",
        )

    for position, row in enumerate(rows.items(read_json(path), "questions")):
        yield from rows.one(f"questions[{position}]", question, row)


_FAMILIES = (
    DatasetReader(
        "vstar",
        "qa",
        _vstar,
        "ROOT/test_questions.jsonl, ROOT/direct_attributes/sa_4690.jpg and sa_4690.json, ROOT/relative_position/...",
        "https://huggingface.co/datasets/craigwu/vstar_bench",
        {"split": "test"},
    ),
    DatasetReader(
        "hrbench",
        "qa",
        _hrbench,
        "ROOT/hr_bench_SPLIT.tsv (4k, 8k)",
        "https://huggingface.co/datasets/DreamMr/HR-Bench",
        {"split": "4k", "cache": ""},
    ),
    DatasetReader(
        "tallyqa",
        "qa",
        _tallyqa,
        "ROOT/SPLIT.json (train, test), and as `image` says ROOT/VG_100K/, ROOT/VG_100K_2/, ROOT/train2014/, ROOT/val2014/",
        "https://github.com/manoja328/TallyQA_dataset",
        {"split": "test"},
    ),
    DatasetReader(
        "superclevr",
        "qa",
        _superclevr,
        "ROOT/superCLEVR_questions_30k.json, ROOT/images/superCLEVR_new_000000.png",
        "https://github.com/Lizw14/Super-CLEVR",
        {"split": "test"},
    ),
)
READERS = {reader.name: reader for reader in _FAMILIES}
