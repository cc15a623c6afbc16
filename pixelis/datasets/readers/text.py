"""Images with annotated text: DocVQA, InfographicsVQA, TextCaps, HierText, ArT.

The rotation of TextCaps' words is not applied; ``###`` and ``illegibility`` mark ArT's unreadable text.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pixelis.datasets.annotation_geometry import (
    box_xywh,
    enclosing_box,
    header_size,
    image_size,
    polygon_points,
)
from pixelis.datasets.fields import RowError, need, optional, text
from pixelis.datasets.readers.base import (
    AnnotationFile,
    DatasetRoot,
    Rows,
    Size,
    below,
    image,
    read_json_row,
)
from pixelis.records import Annotations, Box, Line, Question, Region

Level = Literal["word", "line", "paragraph"]
# The questions about one image follow each other
_read_recognised = functools.lru_cache(maxsize=4)(read_json_row)


def _add_line(
    lines: list[Line], item: Any, content: str, corners: str, size: tuple[int, int], level: Level
) -> None:
    points = polygon_points(need(item, corners, list), *size, corners)
    lines.append(Line(text=content, box=enclosing_box(points, corners), level=level))


# Questions about documents


def _documents(
    questions: tuple[str, ...],
    images: tuple[str, ...],
    recognised: tuple[str, ...],
    image_column: str,
    lines_of: Callable[[dict[str, Any], AnnotationFile, str], tuple[list[Line], Size]],
) -> Callable[[DatasetRoot], Rows]:
    def read(root: DatasetRoot) -> Rows:
        file, folder = root.file(*questions), root.path(*images)
        texts = root.path(*recognised) if root.flag("ocr") else None

        def question(row: dict[str, Any]) -> Question:
            key = need(row, "questionId", (int, str))
            name = Path(text(row, image_column)).name
            uri, answers = below(folder, name, image_column), optional(row, "answers", list)
            if answers is not None:  # some splits do not publish them
                written = (answer.strip() for answer in answers if isinstance(answer, str))
                answers = list(dict.fromkeys(filter(None, written)))
                if not answers:
                    raise RowError("answers", "no_label", "the row has no answer")
            lines: list[Line] = []
            size: Size = (None, None)
            if texts is not None:
                with file.collect_errors(f"question {key}, texts"):
                    text_name = optional(row, "ocr_output_file", str) or f"{Path(name).stem}.json"
                    path = Path(below(texts, text_name, "ocr_output_file"))
                    lines, size = lines_of(_read_recognised(path), file, path.name)
            return file.question(
                key,
                image(uri, size),
                Annotations(lines=lines),
                text(row, "question"),
                answers,
                "anls",
                answer_boxes=_answer_boxes(answers, lines),
                types=row.get("question_types") or row.get("answer_type"),
                operations=row.get("operation/reasoning") or row.get("operation"),
            )

        yield from file.each_item("data", question)

    return read


def _answer_boxes(answers: list[str] | None, lines: list[Line]) -> list[Box]:
    words = [(_letters(line.text), line.box) for line in lines if line.level == "word" and line.box]
    boxes: dict[tuple[int, int], Box] = {}
    for answer in answers or []:
        tokens = [token for token in map(_letters, answer.split()) if token]
        for start in range(len(words) - len(tokens) + 1 if tokens else 0):
            run = words[start : start + len(tokens)]
            if [word for word, _ in run] == tokens:
                lefts, tops, rights, bottoms = zip(*(box for _, box in run), strict=True)
                boxes[start, start + len(tokens)] = min(lefts), min(tops), max(rights), max(bottoms)
    return list(boxes.values())


def _letters(word: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKC", word).casefold() if c.isalnum())


def _azure_lines(data: dict[str, Any], file: AnnotationFile, name: str) -> tuple[list[Line], Size]:
    pages = need(data, "recognitionResults", list)
    if len(pages) != 1:
        raise RowError("recognitionResults", "wrong_type", f"{name} has {len(pages)} pages, expected 1")
    size = image_size(need(pages[0], "width", int), need(pages[0], "height", int))
    lines: list[Line] = []

    for i, line in enumerate(need(pages[0], "lines", list)):
        with file.collect_errors(f"{name}, lines[{i}]"):
            _add_line(lines, line, text(line, "text"), "boundingBox", size, "line")
        for j, word in enumerate(line.get("words") or [] if isinstance(line, dict) else []):
            with file.collect_errors(f"{name}, lines[{i}].words[{j}]"):
                _add_line(lines, word, text(word, "text"), "boundingBox", size, "word")
    return lines, size


def _textract_lines(data: dict[str, Any], file: AnnotationFile, name: str) -> tuple[list[Line], Size]:
    lines = []
    levels: dict[str, Level] = {"LINE": "line", "WORD": "word"}
    for kind, level in levels.items():
        for i, block in enumerate(optional(data, kind, list, [])):
            with file.collect_errors(f"{name}, {kind}[{i}]"):
                bounds = need(need(block, "Geometry", dict), "BoundingBox", dict)
                sides = [bounds.get(key) for key in ("Left", "Top", "Width", "Height")]
                lines.append(
                    Line(text=text(block, "Text"), box=box_xywh(sides, 1, 1, "BoundingBox"), level=level)
                )
    return lines, (None, None)


# Text in images


def textcaps(root: DatasetRoot) -> Rows:
    file = root.file("TextCaps_0.1_{split}.json")
    folder = root.path("test_images" if root.split == "test" else "train_images")
    words: dict[str, list[tuple[str, Any]]] = {}
    if root.flag("ocr"):
        recognised = root.file("TextVQA_Rosetta_OCR_v0.2_{split}.json")
        words = recognised.group(recognised.items("data"), "image_id", "data")
        yield from recognised.take_errors()
    by_image = file.group(file.items("data"), "image_id", "data")
    yield from file.take_errors()

    def question(key: str, rows: list[tuple[str, Any]]) -> Question:
        first = rows[0][1]
        size = image_size(first.get("image_width"), first.get("image_height"))
        captions, lines = [], []
        for name, row in rows:
            with file.collect_errors(name):
                if root.split != "test" or row.get("caption_str"):
                    captions.append(text(row, "caption_str"))
        items = [item for _, row in words.get(key, []) for item in optional(row, "ocr_info", list, [])]
        for i, item in enumerate(items):
            with file.collect_errors(f"image {key}, ocr_info[{i}]"):
                bounds = need(item, "bounding_box", dict)
                sides = [bounds.get(side) for side in ("top_left_x", "top_left_y", "width", "height")]
                box = box_xywh(sides, 1, 1, "bounding_box")
                lines.append(Line(text=text(item, "word"), box=box, level="word"))
        media = image(below(folder, f"{key}.jpg", "image_id"), size)
        return file.question(key, media, Annotations(lines=lines, captions=captions))

    yield from file.each_entry(by_image, question)


def hiertext(root: DatasetRoot) -> Rows:
    """Lines in the order of the tree: a paragraph, its first line, that line's words, its next line, ..."""
    file, folder = root.file("gt/{split}.jsonl", "gt/{split}.jsonl.gz"), root.path("{split}")

    def question(row: dict[str, Any]) -> Question:
        key = text(row, "image_id")
        size = image_size(row.get("image_width"), row.get("image_height"))
        items = list[tuple[Any, Level, str, str]]()
        for i, paragraph in enumerate(need(row, "paragraphs", list)):
            inner, place = need(paragraph, "lines", list), f"paragraphs[{i}]"
            content = "\n".join(optional(line, "text", str, "") for line in inner)
            items.append((paragraph, "paragraph", content, place))
            for j, line in enumerate(inner):
                items.append((line, "line", optional(line, "text", str, ""), f"{place}.lines[{j}]"))
                for k, word in enumerate(optional(line, "words", list, [])):
                    content = optional(word, "text", str, "")
                    items.append((word, "word", content, f"{place}.lines[{j}].words[{k}]"))
        lines = list[Line]()
        readable = [item for item in items if item[2].strip()]
        for item, level, content, place in readable:
            with file.collect_errors(f"image {key}, {place}"):
                _add_line(lines, item, content.strip(), "vertices", size, level)
        media = image(below(folder, f"{key}.jpg", "image_id"), size)
        unreadable = len(items) - len(readable)
        return file.question(key, media, Annotations(lines=lines), unreadable=unreadable or None)

    yield from file.each_item("annotations", question)


def art(root: DatasetRoot) -> Rows:
    file, folder = root.file("{split}_labels.json"), root.path("{split}_images")

    def question(key: str, items: Any) -> Question:
        uri = below(folder, f"{key}.jpg", "image")
        size = header_size(Path(uri))
        lines, regions = [], []
        for i, item in enumerate(items if isinstance(items, list) else [items]):
            with file.collect_errors(f"{key}[{i}]"):
                points = polygon_points(need(item, "points", list), *size, "points")
                content, box = text(item, "transcription"), enclosing_box(points, "points")
                readable = content != "###" and not item.get("illegibility")
                attributes: dict[str, Any] = {"readable": readable}
                if isinstance(language := item.get("language"), str):
                    attributes["language"] = language
                if readable:
                    attributes["text"] = content
                    level: Level = "word" if language == "Latin" else "line"
                    lines.append(Line(text=content, box=box, level=level))
                label = "text" if readable else "unreadable text"
                regions.append(
                    Region(id=f"text{i}", label=label, box=box, outline=[points], attributes=attributes)
                )
        return file.question(key, image(uri, size), Annotations(regions=regions, lines=lines))

    yield from file.each_entry(file.data, question)


docvqa = _documents(
    ("spdocvqa_qas/{split}_v1.0_withQT.json", "spdocvqa_qas/{split}_v1.0.json", "{split}/{split}_v1.0.json"),
    images=("spdocvqa_images", "{split}/documents"),
    recognised=("spdocvqa_ocr", "{split}/ocr_results"),
    image_column="image",
    lines_of=_azure_lines,
)
infographicsvqa = _documents(
    tuple(f"infographicsvqa_qas/infographicsVQA_{{split}}_v1.0{end}.json" for end in ("_withQT", "")),
    images=("infographicsvqa_images",),
    recognised=("infographicsvqa_ocr",),
    image_column="image_local_name",
    lines_of=_textract_lines,
)
