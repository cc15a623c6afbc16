"""Pictures with annotated writing: DocVQA, InfographicsVQA, TextCaps, HierText, ICDAR ArT.

DocVQA (task 1) and InfographicsVQA (task 3) of https://rrc.cvc.uab.es/?ch=17: ``{"data": [question, ...]}`` with the texts found
by Azure (``recognitionResults``, corners in pixels) and by Textract (``LINE``, ``WORD``, 0..1), a file a picture. Where the words
of an answer stand in these is in ``meta``. TextCaps, https://textvqa.org/textcaps/dataset: a row a caption; Rosetta's words,
0..1, their rotation not applied. HierText, https://github.com/google-research-datasets/hiertext: paragraphs, lines and words.
ArT, https://rrc.cvc.uab.es/?ch=14: polygons of words (Latin) and lines (Chinese); ``###`` and ``illegibility`` say unreadable.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pixelis.datasets.annotation_geometry import around, box, header_size, outline, sides
from pixelis.datasets.fields import RowError, need, number, optional, text
from pixelis.datasets.readers.base import Checker, DatasetReader, DatasetRoot, Rows, below, read_json, small_json
from pixelis.records import Annotations, Box, Line, Media, Question, Region

Size = tuple[int | None, int | None]
Found = tuple[list[Line], Size]
"""Texts found in a picture, and the picture's width and height where the same file tells them."""

_recognised = functools.lru_cache(maxsize=4)(small_json)  # the questions about one picture follow each other


# -- questions about documents --------------------------------------------------------------------------------------


def _documents(
    questions: tuple[str, ...], pictures: tuple[str, ...], found: tuple[str, ...], column: str, recogniser: Callable
) -> Callable[[DatasetRoot], Rows]:
    """A reader of questions with texts: ``column`` names the picture, ``recogniser`` reads the file of texts found in it."""

    def read(place: DatasetRoot) -> Rows:
        path, folder = place.path(*questions), place.path(*pictures)
        texts = place.path(*found) if place.flag("ocr") else None
        rows = Checker(path)

        def question(row: dict[str, Any]) -> Question:
            key = rows.unique(need(row, "questionId", (int, str)), "questionId")
            name = Path(text(row, column)).name
            uri = below(folder, name, column)
            answers = _answers(row)
            lines, (width, height) = [], (None, None)
            if texts is not None:
                with rows.row(f"question {key}, texts"):
                    file = Path(
                        below(texts, optional(row, "ocr_output_file", str) or f"{Path(name).stem}.json", "ocr_output_file")
                    )
                    lines, (width, height) = recogniser(_recognised(file), rows, file.name)
            return place.question(
                key,
                Media(id="img0", uri=uri, width=width, height=height),
                Annotations(lines=lines),
                question=text(row, "question"),
                answers=answers,
                scorer="anls",
                dropped=rows.pending,
                answer_boxes=_where(answers, lines),
                types=row.get("question_types") or row.get("answer_type"),
                operations=row.get("operation/reasoning") or row.get("operation"),
            )

        for row_number, row in enumerate(rows.items(read_json(path), "data")):
            yield from rows.one(f"data[{row_number}]", question, row)

    return read


def _answers(row: dict[str, Any]) -> list[str] | None:
    """Accepted answers; None where the split keeps them back. A label that is there and empty is a fault."""
    answers = optional(row, "answers", list)
    if answers is None:
        return None
    kept = [answer.strip() for answer in answers if isinstance(answer, str) and answer.strip()]
    if not kept:
        raise RowError("answers", "no_label", f"{answers!r:.60} holds no answer")
    return list(dict.fromkeys(kept))


def _where(answers: list[str] | None, lines: list[Line]) -> list[Box]:
    """Each place, 0..1, where the words of an accepted answer stand one after the other."""
    words = [line for line in lines if line.level == "word" and line.box]
    plain = [_plain(word.text) for word in words]
    found: dict[tuple[int, int], Box] = {}
    for answer in answers or []:
        wanted = [token for token in map(_plain, answer.split()) if token]
        for start in range(len(plain) - len(wanted) + 1 if wanted else 0):
            end = start + len(wanted)
            if plain[start:end] == wanted:
                lefts, tops, rights, bottoms = zip(*(word.box for word in words[start:end] if word.box), strict=True)
                found[start, end] = min(lefts), min(tops), max(rights), max(bottoms)
    return list(found.values())


def _plain(word: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKC", word).casefold() if c.isalnum())


def _azure(data: dict[str, Any], rows: Checker, name: str) -> Found:
    pages = need(data, "recognitionResults", list)
    if len(pages) != 1:
        raise RowError("recognitionResults", "wrong_type", f"{name} has {len(pages)} pages, a picture has one")
    width, height = sides(need(pages[0], "width", int), need(pages[0], "height", int))
    lines = []

    def read(item: Any, level: Any, where: str) -> None:
        with rows.row(f"{name}, {where}"):
            corners = outline(need(item, "boundingBox", list), width, height, "boundingBox")
            lines.append(Line(text=text(item, "text"), box=around(corners, column="boundingBox"), level=level))

    for i, line in enumerate(need(pages[0], "lines", list)):
        read(line, "line", f"lines[{i}]")
        for j, word in enumerate(line.get("words") or [] if isinstance(line, dict) else []):
            read(word, "word", f"lines[{i}].words[{j}]")
    return lines, (width, height)


def _textract(data: dict[str, Any], rows: Checker, name: str) -> Found:
    lines = []
    for kind, level in (("LINE", "line"), ("WORD", "word")):
        for i, block in enumerate(optional(data, kind, list, [])):
            with rows.row(f"{name}, {kind}[{i}]"):
                sizes = need(need(block, "Geometry", dict), "BoundingBox", dict)
                left, top, width, height = (number(sizes.get(key), key) for key in ("Left", "Top", "Width", "Height"))
                place = box([left, top, left + width, top + height], 1, 1, "BoundingBox")
                lines.append(Line(text=text(block, "Text"), box=place, level=level))
    return lines, (None, None)


# -- texts in pictures ----------------------------------------------------------------------------------------------


def _textcaps(place: DatasetRoot) -> Rows:
    path = place.path("TextCaps_0.1_{split}.json")
    folder = place.path("test_images" if place.split == "test" else "train_images")
    words: dict[str, list[Any]] = {}
    if place.flag("ocr"):
        found = place.path("TextVQA_Rosetta_OCR_v0.2_{split}.json")
        recognised = Checker(found)
        for position, row in enumerate(recognised.items(read_json(found), "data")):
            with recognised.row(f"data[{position}]"):
                words[text(row, "image_id")] = optional(row, "ocr_info", list, [])
        yield from recognised.take()
    rows = Checker(path)
    captions: dict[str, list[tuple[int, Any]]] = {}
    for position, row in enumerate(rows.items(read_json(path), "data")):
        with rows.row(f"data[{position}]"):
            captions.setdefault(text(row, "image_id"), []).append((position, row))
    yield from rows.take()

    def question(key: str, group: list[tuple[int, Any]]) -> Question:
        first = group[0][1]
        width, height = sides(first.get("image_width"), first.get("image_height"))
        said, lines = [], []
        for position, row in group:
            with rows.row(f"data[{position}]"):
                if place.split != "test" or row.get("caption_str"):
                    said.append(text(row, "caption_str"))
        for i, item in enumerate(words.get(key, [])):
            with rows.row(f"image {key}, ocr_info[{i}]"):
                b = need(item, "bounding_box", dict)
                left, top, w, h = (number(b.get(name), name) for name in ("top_left_x", "top_left_y", "width", "height"))
                lines.append(
                    Line(text=text(item, "word"), box=box([left, top, left + w, top + h], 1, 1, "bounding_box"), level="word")
                )
        media = Media(id="img0", uri=below(folder, f"{key}.jpg", "image_id"), width=width, height=height)
        return place.question(key, media, Annotations(lines=lines, captions=said), dropped=rows.pending)

    for key, group in captions.items():
        yield from rows.one(f"image {key}", question, key, group)


def _hiertext(place: DatasetRoot) -> Rows:
    """Lines in the order of the tree: a paragraph, its first line, the words of that, its next line, ..."""
    path = place.path("gt/{split}.jsonl", "gt/{split}.jsonl.gz")
    folder, rows = place.path("{split}"), Checker(path)

    def question(row: dict[str, Any]) -> Question:
        key = rows.unique(text(row, "image_id"), "image_id")
        width, height = sides(row.get("image_width"), row.get("image_height"))
        lines: list[Line] = []
        unreadable = 0

        def add(item: Any, level: Any, words: str, where: str) -> None:
            nonlocal unreadable
            with rows.row(f"image {key}, {where}"):
                if not words.strip():
                    unreadable += 1
                    return
                corners = outline(need(item, "vertices", list), width, height, "vertices")
                lines.append(Line(text=words.strip(), box=around(corners, column="vertices"), level=level))

        for i, paragraph in enumerate(need(row, "paragraphs", list)):
            inner = need(paragraph, "lines", list)
            add(paragraph, "paragraph", "\n".join(optional(line, "text", str, "") for line in inner), f"paragraphs[{i}]")
            for j, line in enumerate(inner):
                add(line, "line", optional(line, "text", str, ""), f"paragraphs[{i}].lines[{j}]")
                for k, word in enumerate(optional(line, "words", list, [])):
                    add(word, "word", optional(word, "text", str, ""), f"paragraphs[{i}].lines[{j}].words[{k}]")
        media = Media(id="img0", uri=below(folder, f"{key}.jpg", "image_id"), width=width, height=height)
        return place.question(key, media, Annotations(lines=lines), dropped=rows.pending, unreadable=unreadable or None)

    for position, row in enumerate(rows.items(read_json(path), "annotations")):
        yield from rows.one(f"annotations[{position}]", question, row)


def _art(place: DatasetRoot) -> Rows:
    path, folder = place.path("{split}_labels.json"), place.path("{split}_images")
    rows = Checker(path)

    def question(key: str, items: Any) -> Question:
        uri = below(folder, f"{key}.jpg", "image")
        width, height = header_size(Path(uri))
        lines, regions = [], []
        for position, item in enumerate(items if isinstance(items, list) else [items]):
            with rows.row(f"{key}[{position}]"):
                corners = outline(need(item, "points", list), width, height, "points")
                words, place_ = text(item, "transcription"), around(corners, column="points")
                readable = words != "###" and not item.get("illegibility")
                told = {"readable": readable, **({"language": item["language"]} if isinstance(item.get("language"), str) else {})}
                told |= {"text": words} if readable else {}
                label = "text" if readable else "unreadable text"
                regions.append(Region(id=f"text{position}", label=label, box=place_, outline=[corners], attributes=told))
                if readable:
                    lines.append(Line(text=words, box=place_, level="word" if told.get("language") == "Latin" else "line"))
        media = Media(id="img0", uri=uri, width=width, height=height)
        return place.question(key, media, Annotations(regions=regions, lines=lines), dropped=rows.pending)

    for key, items in read_json(path).items():
        yield from rows.one(key, question, key, items)


_OCR = {"split": "train", "ocr": "yes"}
_FAMILIES = (
    DatasetReader(
        "docvqa",
        "text",
        _documents(
            ("spdocvqa_qas/{split}_v1.0_withQT.json", "spdocvqa_qas/{split}_v1.0.json", "{split}/{split}_v1.0.json"),
            ("spdocvqa_images", "{split}/documents"),
            ("spdocvqa_ocr", "{split}/ocr_results"),
            "image",
            _azure,
        ),
        "ROOT/spdocvqa_qas/SPLIT_v1.0_withQT.json, ROOT/spdocvqa_images/xnbl0037_1.png, ROOT/spdocvqa_ocr/xnbl0037_1.json; "
        "or as first released: ROOT/SPLIT/SPLIT_v1.0.json, ROOT/SPLIT/documents/*.png, ROOT/SPLIT/ocr_results/*.json",
        "https://rrc.cvc.uab.es/?ch=17&com=downloads, task 1",
        _OCR,
    ),
    DatasetReader(
        "infographicsvqa",
        "text",
        _documents(
            tuple(f"infographicsvqa_qas/infographicsVQA_{{split}}_v1.0{end}.json" for end in ("_withQT", "")),
            ("infographicsvqa_images",),
            ("infographicsvqa_ocr",),
            "image_local_name",
            _textract,
        ),
        "ROOT/infographicsvqa_qas/infographicsVQA_SPLIT_v1.0.json (val: ..._withQT.json), "
        "ROOT/infographicsvqa_images/10002.jpeg, ROOT/infographicsvqa_ocr/10002.json",
        "https://rrc.cvc.uab.es/?ch=17&com=downloads, task 3",
        _OCR,
    ),
    DatasetReader(
        "textcaps",
        "text",
        _textcaps,
        "ROOT/TextCaps_0.1_SPLIT.json, ROOT/TextVQA_Rosetta_OCR_v0.2_SPLIT.json, "
        "ROOT/train_images/0054c91397f2fe05.jpg (train and val), ROOT/test_images/",
        "https://textvqa.org/textcaps/dataset",
        _OCR,
    ),
    DatasetReader(
        "hiertext",
        "text",
        _hiertext,
        "ROOT/gt/SPLIT.jsonl (or .jsonl.gz), ROOT/SPLIT/0001eab15ba8d5ff.jpg",
        "https://github.com/google-research-datasets/hiertext",
    ),
    DatasetReader(
        "art",
        "text",
        _art,
        "ROOT/SPLIT_labels.json, ROOT/SPLIT_images/gt_0.jpg",
        "https://rrc.cvc.uab.es/?ch=14&com=downloads",
    ),
)
READERS = {reader.name: reader for reader in _FAMILIES}
