"""Exams and free questions about pictures: MMMU, ScienceQA, MM-Vet."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from pixelis.datasets.fields import RowError, need, optional, text, whole
from pixelis.datasets.formats.base import choices
from pixelis.datasets.media_root import MediaRoot
from pixelis.datasets.readers.base import AnnotationFile, DatasetRoot, Rows, below, image, read_json
from pixelis.errors import BadInput
from pixelis.records import Question
from pixelis.rewards.mmmu import list_text

DISCIPLINES = {
    "Art and Design": ("Art", "Art_Theory", "Design", "Music"),
    "Business": ("Accounting", "Economics", "Finance", "Manage", "Marketing"),
    "Science": ("Biology", "Chemistry", "Geography", "Math", "Physics"),
    "Health and Medicine": (
        "Basic_Medical_Science",
        "Clinical_Medicine",
        "Diagnostics_and_Laboratory_Medicine",
        "Pharmacy",
        "Public_Health",
    ),
    "Humanities and Social Science": ("History", "Literature", "Psychology", "Sociology"),
    "Tech and Engineering": (
        "Agriculture",
        "Architecture_and_Engineering",
        "Computer_Science",
        "Electronics",
        "Energy_and_Power",
        "Materials",
        "Mechanical_Engineering",
    ),
}
IMAGES = 7
SUBJECTS = {"natural science": "NAT", "social science": "SOC", "language science": "LAN"}
"""ScienceQA's subjects and their names in its tables."""
MIDDLE_GRADE = 6
_SHOWN = re.compile(r"<image (\d)>")


def mmmu(root: DatasetRoot) -> Rows:
    names = [name for group in DISCIPLINES.values() for name in group]
    if (subject := root.options["subject"]) != "all":
        if subject not in names:
            raise BadInput(f"mmmu: no subject {subject!r}", fix=f"all, or one of {', '.join(names)}")
        names = [subject]
    folders = [name for name in names if (root.folder / name).is_dir()]
    media_root = root.media_root()
    for folder in folders or [root.path("data", names[0]).name]:
        for path in root.paths(f"{folder}/{{split}}-*.parquet", f"{folder}/{{split}}-00000-of-00001.parquet"):
            file = AnnotationFile(root, path)
            yield from file.each_row(functools.partial(_mmmu_question, file, media_root, subject))


def _mmmu_question(
    file: AnnotationFile, media_root: MediaRoot, only: str, row: dict[str, Any]
) -> Question | None:
    key, prompt, answer = text(row, "id"), text(row, "question"), text(row, "answer")
    subject = key.partition("_")[2].rpartition("_")[0]  # of the id validation_Art_Theory_1
    if only not in ("all", subject):
        return None
    if (options := list_text(need(row, "options", str))) is None:
        raise RowError("options", "wrong_type", f"{row['options']!r:.60} is no list of texts")
    if options:
        prompt = choices(prompt, options)
    names = [f"image_{i}" for i in range(1, IMAGES + 1) if row.get(f"image_{i}") is not None]
    shown = [f"image_{number}" for number in _SHOWN.findall(prompt)]
    if sorted(shown) == names:  # each picture is shown at its mark
        names, prompt = shown, _SHOWN.sub("<image>", prompt)
    media = [image(media_root.reference(name, row[name]), id=f"img{i}") for i, name in enumerate(names)]
    if not media:
        raise RowError("image_1", "no_media", "the row has no picture")
    # The answers of the test split are hidden
    truths = None if answer == "?" else list_text(answer) or [answer]
    if options and not set(truths or ()) <= set(ascii_uppercase[: len(options)]):
        raise RowError("answer", "no_label", f"{answer!r:.60} is no letter of {len(options)} options")
    return file.question(
        key,
        media,
        question=prompt,
        answers=truths,
        scorer="mmmu_choice" if options else "mmmu_open",
        options=options,
        category=[*(name for name, subjects in DISCIPLINES.items() if subject in subjects), subject],
        difficulty=row.get("topic_difficulty"),
    )


def scienceqa(root: DatasetRoot) -> Rows:
    file = root.file("problems.json")
    splits = read_json(root.path("pid_splits.json"))
    if not isinstance(keys := splits.get(root.split), list):
        raise BadInput(f"scienceqa: no split {root.split!r}", fix=f"one of {', '.join(map(str, splits))}")

    def question(key: str) -> Question:
        row = need(file.data, key, dict)
        options = [str(option) for option in need(row, "choices", list)]
        hint, prompt = (optional(row, "hint", str) or "").strip(), text(row, "question")
        media = []
        if picture := optional(row, "image", str):
            # Each split has a folder, also for the questions of its small copies, such as minitest.
            name = f"{text(row, 'split')}/{key}/{picture}"
            places = [Path(below(root.folder / place, name, "image")) for place in (".", "images")]
            media.append(image(str(next((place for place in places if place.is_file()), places[0]))))
        context = [*(["TXT"] if hint else []), *(["IMG"] if media else [])] or ["NO"]
        grade = whole(text(row, "grade").removeprefix("grade"), "grade")
        years = "G1-6" if grade <= MIDDLE_GRADE else "G7-12"
        return file.choice(
            key,
            media,
            f"Context: {hint}\n{prompt}" if hint else prompt,
            options,
            whole(need(row, "answer", int), "answer"),
            category=[*filter(None, [SUBJECTS.get(str(row.get("subject")))]), *context, years],
            **{name: row.get(name) for name in ("topic", "skill", "lecture", "solution")},
        )

    for key in map(str, keys):
        yield from file.convert(key, question, key)


def mmvet(root: DatasetRoot) -> Rows:
    file, folder = root.file("mm-vet.json"), root.path("images")

    def question(key: str, row: Any) -> Question:
        return file.question(
            key,
            image(below(folder, text(row, "imagename"), "imagename")),
            question=text(row, "question"),
            answers=[text(row, "answer")],
            scorer="mm_vet",
            category=sorted(str(name) for name in need(row, "capability", list)),
        )

    yield from file.each_entry(file.data, question)
