"""Benchmarks: V*, HR-Bench, CV-Bench, TallyQA, Super-CLEVR, POPE, MVBench, VSI-Bench and the test sets of Reason-RFT."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from pixelis.datasets.annotation_geometry import box_xywh, header_size, time_span
from pixelis.datasets.fields import RowError, answers, need, optional, text, whole
from pixelis.datasets.formats.base import scorer_of
from pixelis.datasets.readers.base import (
    DatasetRoot,
    Rows,
    below,
    clip,
    frames_in,
    image,
    index_of,
    read_json,
    read_json_row,
)
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
"""Reason-RFT's test sets by split."""
_STAR, _CLEVRER, _PERCEPTION = "star/Charades_v1_480", "clevrer/video_validation", "perception/videos"
MVBENCH = {
    "action_sequence": _STAR,
    "action_prediction": _STAR,
    "action_antonym": "ssv2_video",
    "fine_grained_action": "Moments_in_Time_Raw/videos",
    "unexpected_action": "FunQA_test/test",
    "object_existence": _CLEVRER,
    "object_interaction": _STAR,
    "object_shuffle": _PERCEPTION,
    "moving_direction": _CLEVRER,
    "action_localization": "sta/sta_video",
    "scene_transition": "scene_qa/video",
    "action_count": _PERCEPTION,
    "moving_count": _CLEVRER,
    "moving_attribute": _CLEVRER,
    "state_change": _PERCEPTION,
    "fine_grained_pose": "nturgbd",
    "character_order": _PERCEPTION,
    "egocentric_navigation": "vlnqa",
    "episodic_reasoning": "tvqa/frames_fps3_hq",
    "counterfactual_inference": _CLEVRER,
}
"""MVBench's 20 tasks and the folders of their clips."""
MVBENCH_SPANS = (
    "action_sequence",
    "action_prediction",
    "object_interaction",
    "action_localization",
    "episodic_reasoning",
)
"""Those whose questions are about a part of the clip."""
MVBENCH_FPS = 3
"""Of the clips of episodic_reasoning, which are folders of frames."""
MAX_INDEX_CHARACTERS = 64
"""Longer values of HR-Bench's column ``image`` are images."""


def vstar(root: DatasetRoot) -> Rows:
    file = root.file("test_questions.jsonl")

    def question(row: dict[str, Any]) -> Question:
        key, category = need(row, "question_id", (int, str)), text(row, "category")
        path = Path(below(root.folder, text(row, "image"), "image"))
        size, regions = header_size(path), list[Region]()
        with file.collect_errors(f"question {key}, boxes"):
            data = read_json_row(path.with_suffix(".json"))
            objects = zip(need(data, "target_object", list), need(data, "bbox", list), strict=True)
            for i, (name, sides) in enumerate(objects):
                regions.append(Region(id=f"target{i}", label=str(name), box=box_xywh(sides, *size)))
        key, media, annotations = f"{category}-{key}", image(str(path), size), Annotations(regions=regions)
        prompt, answers = text(row, "text"), [text(row, "label")]
        return file.question(key, media, annotations, prompt, answers, "mc_letter", category=category)

    return file.each_row(question)


def hrbench(root: DatasetRoot) -> Rows:
    file, media_root = root.file("hr_bench_{split}.tsv"), root.media_root()
    images: dict[str, str] = {}

    def question(row: dict[str, Any]) -> Question:
        key, value = text(row, "index"), text(row, "image")
        if len(value) > MAX_INDEX_CHARACTERS:
            images[key] = media_root.reference("image", base64.b64decode(value, validate=True))
        elif value not in images:
            raise RowError("image", "unknown_id", f"no earlier row {value!r} has an image")
        uri = images.get(key) or images[value]
        options = [text(row, letter) for letter in "ABCD" if (row.get(letter) or "").strip()]
        answer = index_of(text(row, "answer").upper(), list("ABCD"))
        media, prompt = image(uri, header_size(Path(uri))), text(row, "question")
        category, cycle = row.get("category"), row.get("cycle_category")
        return file.choice(key, media, prompt, options, answer, category=category, cycle=cycle)

    for name, row in file.table_rows(("index", "question", "image", "answer", "A", "B"), "\t"):
        yield from file.convert(name, question, row)


def cvbench(root: DatasetRoot) -> Rows:
    file, media_root = root.file("test_{split}.parquet"), root.media_root()

    def question(row: dict[str, Any]) -> Question:
        return file.question(
            need(row, "idx", (int, str)),
            image(media_root.reference("image", row.get("image"))),
            question=text(row, "prompt"),
            answers=[text(row, "answer").strip("()")],
            scorer="mc_letter",
            category=[text(row, "task"), text(row, "source")],
        )

    return file.each_row(question)


def tallyqa(root: DatasetRoot) -> Rows:
    file = root.file("{split}.json")

    def question(row: dict[str, Any]) -> Question:
        return file.question(
            need(row, "question_id", (int, str)),
            image(below(root.folder, text(row, "image"), "image")),
            question=text(row, "question"),
            answers=[str(whole(row.get("answer"), "answer"))],
            scorer="count",
            category={"True": "simple", "False": "complex"}.get(str(row.get("issimple"))),
            data_source=row.get("data_source"),
        )

    return file.each_row(question)


def superclevr(root: DatasetRoot) -> Rows:
    file, folder = root.file("superCLEVR_questions_30k.json"), root.path("images")

    def question(row: dict[str, Any]) -> Question:
        key = need(row, "question_index", (int, str))
        if not isinstance(answer := row.get("answer"), str | int):
            raise RowError("answer", "no_label", f"{answer!r:.60} is not an answer")
        return file.question(
            key,
            image(below(folder, text(row, "image_filename"), "image_filename")),
            question=text(row, "question"),
            answers=[str(answer)],
            scorer="count" if type(answer) is int else "exact",
        )

    return file.each_item("questions", question)


def pope(root: DatasetRoot) -> Rows:
    file = root.file("coco_pope_{split}.json", "output/coco/coco_pope_{split}.json")
    folder = root.path("val2014")

    def question(row: dict[str, Any]) -> Question:
        label = text(row, "label").lower()
        if label not in ("yes", "no"):
            raise RowError("label", "no_label", f"{label!r:.60} is neither yes nor no")
        return file.question(
            need(row, "question_id", (int, str)),
            image(below(folder, text(row, "image"), "image")),
            question=f"{text(row, 'text')} Answer yes or no.",
            answers=[label],
            scorer="exact",
            category=label,  # accuracy by truth: of "yes" it is the recall
        )

    return file.each_row(question)


def mvbench(root: DatasetRoot) -> Rows:
    task = root.options["task"]
    if task != "all" and task not in MVBENCH:
        raise BadInput(f"mvbench: no task {task!r}", fix=f"all, or one of {', '.join(MVBENCH)}")
    for name in MVBENCH if task == "all" else (task,):
        yield from _mvbench_task(root, name)


def _mvbench_task(root: DatasetRoot, task: str) -> Rows:
    file = root.file(f"json/{task}.json", f"{task}.json")
    folder = root.path(f"video/{MVBENCH[task]}", MVBENCH[task])

    def question(number: int, row: dict[str, Any]) -> Question:
        options = [str(option) for option in need(row, "candidates", list)]
        answer = index_of(str(need(row, "answer", (str, int))), options)
        path = Path(below(folder, text(row, "video"), "video"))
        media = clip(str(path))
        if path.is_dir():
            media = clip(frames=frames_in(path, "video"), fps=MVBENCH_FPS)
        if task in MVBENCH_SPANS:
            span = time_span(task, row.get("start"), row.get("end"), column="start")
            media.spans = [(span.start, span.end)]
        return file.choice(f"{task}-{number}", media, text(row, "question"), options, answer, category=task)

    for number, row in enumerate(read_json(file.path, list)):
        yield from file.convert(f"[{number}]", question, number, row)


def vsibench(root: DatasetRoot) -> Rows:
    full = ("test.jsonl", "test-00000-of-00001.parquet")
    file = root.file(*(full if root.split == "full" else ("test_{split}.parquet",)))

    def question(row: dict[str, Any]) -> Question:
        kind, clips = text(row, "question_type"), below(root.folder, text(row, "dataset"), "dataset")
        options = [str(option) for option in optional(row, "options", list, [])]
        return file.question(
            need(row, "id", (int, str)),
            clip(below(Path(clips), f"{text(row, 'scene_name')}.mp4", "scene_name")),
            question="\n".join([text(row, "question"), *options]),
            answers=[str(need(row, "ground_truth", (str, int, float)))],
            scorer="mc_letter" if options else "mean_relative_accuracy",
            category=re.sub("_(easy|medium|hard)$", "", kind),
        )

    return file.each_row(question)


def reason_rft(root: DatasetRoot) -> Rows:
    if root.split not in REASON_RFT:
        raise BadInput(f"reason_rft_tests: no split {root.split!r}", fix=f"one of {', '.join(REASON_RFT)}")
    file, folder = root.file(*REASON_RFT[root.split]), root.path("image", "images")

    def question(row: dict[str, Any]) -> Question:
        truths = answers(row, "answer" if row.get("answer") is not None else "solution")
        paths = [row["image"]] if isinstance(row.get("image"), str) else need(row, "image", list)
        media = [image(below(folder, str(path), "image"), id=f"img{i}") for i, path in enumerate(paths)]
        transformation = root.split.startswith("transformation")
        scorer = "func_seq_eval" if transformation else scorer_of(truths, "math")
        key, prompt = need(row, "id", (int, str)), text(row, "problem")
        return file.question(key, media, question=prompt, answers=truths, scorer=scorer)

    return file.each_row(question)
