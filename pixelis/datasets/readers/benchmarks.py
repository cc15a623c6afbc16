"""Benchmarks of agents that zoom and count: V* Bench, HR-Bench, TallyQA, Super-CLEVR, and Reason-RFT's test sets.

V*, https://huggingface.co/datasets/craigwu/vstar_bench: questions with options in their text; a JSON file beside each image has
the boxes (x, y, w, h in pixels) of the objects in question. HR-Bench, https://huggingface.co/datasets/DreamMr/HR-Bench: a table
with images in base64, and each question with its options in several orders; a short ``image`` is the ``index`` of the row that
has it. TallyQA, https://github.com/manoja328/TallyQA_dataset: counts. Super-CLEVR, https://github.com/Lizw14/Super-CLEVR.
Reason-RFT, https://github.com/tanhuajie/Reason-RFT: the folder of its benchmarks, one JSON file a set and all images in
``image``.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from pixelis.datasets.annotation_geometry import box_xywh, header_size
from pixelis.datasets.choices import option_seed, shuffle_options
from pixelis.datasets.fields import RowError, answers, need, text, whole
from pixelis.datasets.formats.base import scorer_of
from pixelis.datasets.readers.base import DatasetRoot, Rows, below, choices, image, read_json_row
from pixelis.errors import BadInput
from pixelis.records import Annotations, Question, Region

REASON_RFT = {
    "counting_id": ("visual_counting/clevr_math.json",),
    "counting_ood": ("visual_counting/super_clevr.json",),
    "structure_id": ("structure_perception/geomath.json",),
    "structure_ood": ("structure_perception/geometry3k.json",),
    "transformation_id": ("spatial_transformation/trance.json",),
    "transformation_left": ("spatial_transformation/trance_left.json", "trance/trance_left.json"),
    "transformation_right": ("spatial_transformation/trance_right.json", "trance/trance_right.json"),
}
"""Reason-RFT's test sets by split: in and out of the distribution of its training sets, TRANCE seen from the left and right."""
MAX_INDEX_CHARACTERS = 64
"""Longer values of HR-Bench's column ``image`` are images."""


def _vstar(root: DatasetRoot) -> Rows:
    file, seed = root.file("test_questions.jsonl"), option_seed(root.options["shuffle_options"])

    def question(row: dict[str, Any]) -> Question:
        key, category = file.unique_id(row, "question_id"), text(row, "category")
        path = Path(below(root.folder, text(row, "image"), "image"))
        size = header_size(path)
        regions = []
        with file.collect_errors(f"question {key}, boxes"):
            data = read_json_row(path.with_suffix(".json"))
            names, boxes = need(data, "target_object", list), need(data, "bbox", list)
            if len(names) != len(boxes):
                raise RowError("bbox", "bad_length", f"{len(boxes)} boxes for {len(names)} objects")
            for i, (name, sides) in enumerate(zip(names, boxes, strict=True)):
                regions.append(Region(id=f"target{i}", label=str(name), box=box_xywh(sides, *size)))
        result = file.question(
            f"{category}-{key}",
            image(str(path), size),
            Annotations(regions=regions),
            text(row, "text"),
            [text(row, "label")],
            "mc_letter",
            category=category,
        )
        return result if seed is None else shuffle_options(result, seed)

    return file.each_row(question)


def _hrbench(root: DatasetRoot) -> Rows:
    file, media_root = root.file("hr_bench_{split}.tsv"), root.media_root()
    images: dict[str, str] = {}

    def question(row: dict[str, Any]) -> Question:
        key, value = file.unique(text(row, "index"), "index"), text(row, "image")
        if len(value) > MAX_INDEX_CHARACTERS:
            try:
                images[key] = media_root.reference("image", base64.b64decode(value, validate=True))
            except (binascii.Error, ValueError):
                raise RowError("image", "bad_media", "is not base64") from None
        elif value not in images:
            raise RowError("image", "unknown_id", f"no earlier row {value!r} has an image")
        uri = images.get(key) or images[value]
        options = [text(row, letter) for letter in "ABCD" if (row.get(letter) or "").strip()]
        answer = text(row, "answer").upper()
        if len(answer) != 1 or not 0 <= ord(answer) - ord("A") < len(options):
            raise RowError("answer", "no_label", f"{answer!r:.60} is not the letter of one of {len(options)} options")
        return file.question(
            key,
            image(uri, header_size(Path(uri))),
            question=choices(text(row, "question"), options),
            answers=[answer],
            scorer="mc_letter",
            options=options,
            category=row.get("category"),
            cycle=row.get("cycle_category"),
        )

    for name, row in file.table_rows(("index", "question", "image", "answer", "A", "B"), "\t"):
        yield from file.convert(name, question, row)


def _tallyqa(root: DatasetRoot) -> Rows:
    file = root.file("{split}.json")

    def question(row: dict[str, Any]) -> Question:
        return file.question(
            file.unique_id(row, "question_id"),
            image(below(root.folder, text(row, "image"), "image")),
            question=text(row, "question"),
            answers=[str(whole(row.get("answer"), "answer"))],
            scorer="count",
            simple=row.get("issimple"),
            data_source=row.get("data_source"),
        )

    return file.each_row(question)


def _superclevr(root: DatasetRoot) -> Rows:
    file, folder = root.file("superCLEVR_questions_30k.json"), root.path("images")

    def question(row: dict[str, Any]) -> Question:
        key, answer = file.unique_id(row, "question_index"), row.get("answer")
        if not isinstance(answer, (str, int)):
            raise RowError("answer", "no_label", f"{answer!r:.60} is not an answer")
        counting = isinstance(answer, int) and not isinstance(answer, bool)
        return file.question(
            key,
            image(below(folder, text(row, "image_filename"), "image_filename")),
            question=text(row, "question"),
            answers=[str(answer)],
            scorer="count" if counting else "exact",
        )

    return file.each_item("questions", question)


def _reason_rft(root: DatasetRoot) -> Rows:
    if root.split not in REASON_RFT:
        raise BadInput(f"reason_rft_tests: no split {root.split!r}", fix=f"one of {', '.join(REASON_RFT)}")
    file, folder = root.file(*REASON_RFT[root.split]), root.path("image", "images")

    def question(row: dict[str, Any]) -> Question:
        key, own_answers = file.unique_id(row, "id"), answers(row, "answer" if row.get("answer") is not None else "solution")
        paths = row.get("image")
        paths = [paths] if isinstance(paths, str) else paths
        if not isinstance(paths, list) or not paths:
            raise RowError("image", "no_media", "the row names no image")
        media = [image(below(folder, str(path), "image")) for path in paths]
        scorer = "func_seq_eval" if root.split.startswith("transformation") else scorer_of(own_answers, "math")
        record = file.question(key, media[0], question=text(row, "problem"), answers=own_answers, scorer=scorer)
        named = [item.model_copy(update={"id": f"img{i}"}) for i, item in enumerate(media)]
        return record.model_copy(update={"media": named})

    return file.each_row(question)


READERS = {"vstar": _vstar, "hrbench": _hrbench, "tallyqa": _tallyqa, "superclevr": _superclevr, "reason_rft_tests": _reason_rft}
