"""Mathematics in pictures: MathVista, MathVerse and MathVision."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from pixelis.datasets.fields import RowError, need, optional, text, whole
from pixelis.datasets.media_root import MediaRoot
from pixelis.datasets.readers.base import AnnotationFile, DatasetRoot, Rows, image, index_of
from pixelis.records import Question

IN_PICTURE = "Answer the question in the picture."
"""Question of MathVerse's version Vision Only."""
SCORERS = {"integer": "count", "float": "math", "list": "math", "text": "exact"}
"""By MathVista's types of answers."""
_MARK = re.compile(r"<image\d+>\s*")


def _tables(root: DatasetRoot, make: Callable[..., Question]) -> Rows:
    """The questions of ``make(file, media_root, row)`` in the tables of a split."""
    media_root = root.media_root()
    for path in root.paths("data/{split}-*.parquet", "data/{split}-00000-of-00001.parquet"):
        file = AnnotationFile(root, path)
        yield from file.each_row(functools.partial(make, file, media_root))


def mathvista(root: DatasetRoot) -> Rows:
    return _tables(root, _mathvista_question)


def _mathvista_question(file: AnnotationFile, media_root: MediaRoot, row: dict[str, Any]) -> Question:
    key, prompt, answer = text(row, "pid"), text(row, "question"), optional(row, "answer", str, "").strip()
    media = image(media_root.reference("decoded_image", row.get("decoded_image")))
    about = optional(row, "metadata", dict, {})
    category = [*filter(None, [about.get("task"), *(about.get("skills") or [])])]
    if text(row, "question_type") == "multi_choice":
        options = [str(choice) for choice in need(row, "choices", list)]
        index = index_of(answer, options) if answer else None  # the test split has no answers
        return file.choice(key, media, prompt, options, index, category=category)
    kind = text(row, "answer_type")
    if kind not in SCORERS:
        raise RowError("answer_type", "wrong_type", f"{kind!r:.60} is none of {', '.join(SCORERS)}")
    if unit := row.get("unit"):
        prompt += f" (Unit: {unit})"
    if kind == "float":
        places = whole(row.get("precision"), "precision")
        prompt += f" Round to {places} decimal place{'' if places == 1 else 's'}."
    answers = [answer] if answer else None
    return file.question(
        key, media, question=prompt, answers=answers, scorer=SCORERS[kind], category=category
    )


def mathverse(root: DatasetRoot) -> Rows:
    file, media_root = root.file("{split}.parquet"), root.media_root()

    def question(row: dict[str, Any]) -> Question:
        version = text(row, "problem_version")
        media = [] if version == "Text Only" else [image(media_root.reference("image", row.get("image")))]
        return file.question(
            text(row, "sample_index"),
            media,
            question=need(row, "question", str).strip() or IN_PICTURE,
            answers=[text(row, "answer")],
            scorer="mc_letter" if text(row, "question_type") == "multi-choice" else "math",
            category=[version, text(need(row, "metadata", dict), "subject")],
        )

    return file.each_row(question)


def mathvision(root: DatasetRoot) -> Rows:
    return _tables(root, _mathvision_question)


def _mathvision_question(file: AnnotationFile, media_root: MediaRoot, row: dict[str, Any]) -> Question:
    key, answer, prompt = text(row, "id"), text(row, "answer"), _MARK.sub("", text(row, "question")).strip()
    media = image(media_root.reference("decoded_image", row.get("decoded_image")))
    category = [text(row, "subject"), f"level {whole(row.get('level'), 'level')}"]
    if options := [str(option) for option in optional(row, "options", list, [])]:
        index = ord(answer) - ord("A") if len(answer) == 1 else -1
        return file.choice(key, media, prompt, options, index, category=category)
    return file.question(key, media, question=prompt, answers=[answer], scorer="math", category=category)
