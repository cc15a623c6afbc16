"""Images and clips with captions: Flickr30k, with the boxes of Entities, Unsplash, MSR-VTT."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree  # nosec B405

from pixelis.datasets.annotation_geometry import box_xyxy, image_size
from pixelis.datasets.fields import RowError, need, text, whole
from pixelis.datasets.readers.base import AnnotationFile, DatasetRoot, Rows, Size, below, clip, image
from pixelis.records import Annotations, Question, Region

_PHRASE = re.compile(r"\[/EN#(\d+)/(\S+) ([^\]]+)\]")
_CAPTION = re.compile(r"(\S+)#\d+\t(.+)")


def flickr30k(root: DatasetRoot) -> Rows:
    file = root.file("results_20130124.token", "results.token")
    folder = root.path("flickr30k-images", "flickr30k_images")
    names = root.path("{split}.txt", "Entities/{split}.txt") if root.split else None
    in_split = set(names.read_text(encoding="utf-8", errors="replace").split()) if names else None
    entities = root.path("Annotations", "Entities/Annotations").parent if root.flag("boxes") else None

    def question(name: str, captions: list[str]) -> Question:
        key, media = Path(name).stem, below(folder, name, "name")
        regions, size = _entities(entities, key, file) if entities else ([], (None, None))
        return file.question(key, image(media, size), Annotations(regions=regions, captions=captions))

    def named_captions() -> Iterator[tuple[str, str]]:
        with file.path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                with file.collect_errors(f"line {number}"):
                    if not (match := _CAPTION.fullmatch(line.strip())):
                        message = f"{line.strip()!r:.60} is not NAME.jpg#0, a tab and a caption"
                        raise RowError("all", "wrong_type", message)
                    yield match[1], match[2].strip()

    for name, group in itertools.groupby(named_captions(), key=lambda pair: pair[0]):
        captions = [caption for _, caption in group]
        yield from file.take_errors()
        if in_split is None or Path(name).stem in in_split:
            yield from file.convert(name, question, name, captions)
    yield from file.take_errors()


def _entities(folder: Path, key: str, file: AnnotationFile) -> tuple[list[Region], Size]:
    annotation = Path(below(folder, f"Annotations/{key}.xml", "name"))
    sentences = folder / "Sentences" / f"{key}.txt"
    try:
        document = annotation.read_text(encoding="utf-8")
        if "<!DOCTYPE" in document:  # its entities can expand without bound, or name other files
            raise RowError("boxes", "not_xml", f"{annotation.name} declares a document type")
        tree = ElementTree.fromstring(document)  # nosec B314
        mentions = _PHRASE.findall(sentences.read_text(encoding="utf-8"))
    except (FileNotFoundError, ElementTree.ParseError, UnicodeDecodeError) as error:
        code = "missing_file" if isinstance(error, FileNotFoundError) else "not_xml"
        raise RowError("boxes", code, f"{annotation.name}: {error}") from None
    phrases: dict[str, tuple[str, str]] = {}
    for chain, kinds, phrase in mentions:
        phrases.setdefault(chain, (phrase, kinds))
    size = image_size(*(whole(tree.findtext(f"size/{side}", ""), side) for side in ("width", "height")))
    regions = []
    for i, item in enumerate(tree.iter("object")):
        if (bounds := item.find("bndbox")) is None:
            continue  # a scene, or an object without a box
        with file.collect_errors(f"{annotation.name}, object {i}"):
            sides = ("xmin", "ymin", "xmax", "ymax")
            left, top, right, bottom = (whole(bounds.findtext(side, ""), side) for side in sides)
            # Pixels are counted from 1, and the last one is inside.
            box = box_xyxy([left - 1, top - 1, right, bottom], *size, "bndbox")
            for chain in (name.text or "" for name in item.iter("name")):
                if chain in phrases:
                    phrase, kinds = phrases[chain]
                    attributes = {"entity": chain, "kinds": kinds.split("/")}
                    regions.append(Region(id=f"{chain}.{i}", label=phrase, box=box, attributes=attributes))
    return regions, size


def unsplash(root: DatasetRoot) -> Rows:
    file, folder = root.file("photos.tsv000", "photos.tsv"), root.path("photos")
    columns = ("photo_id", "photo_width", "photo_height", "photo_description", "ai_description")

    def question(row: dict[str, Any]) -> Question:
        key = text(row, "photo_id")
        size = image_size(*(whole(row[column], column) for column in ("photo_width", "photo_height")))
        captions = [row[column].strip() for column in ("photo_description", "ai_description")]
        media = image(below(folder, f"{key}.jpg", "photo_id"), size)
        notes = Annotations(captions=[caption for caption in captions if caption])
        return file.question(key, media, notes, url=row.get("photo_image_url"))

    for name, row in file.table_rows(columns, "\t"):
        yield from file.convert(name, question, row)


def msrvtt(root: DatasetRoot) -> Rows:
    test = root.split == "test"
    file = root.file("test_videodatainfo.json" if test else "train_val_videodatainfo.json")
    folder = root.path("TestVideo" if test else "TrainValVideo")
    captions = file.group(file.items("sentences"), "video_id", "sentences")
    yield from file.take_errors()

    def question(video: dict[str, Any]) -> Question | None:
        if need(video, "split", str) != root.split:
            return None
        key, texts = text(video, "video_id"), []
        for name, sentence in captions.pop(key, []):
            with file.collect_errors(name):
                texts.append(text(sentence, "caption"))
        media = clip(below(folder, f"{key}.mp4", "video_id"))
        return file.question(key, media, Annotations(captions=texts), category=video.get("category"))

    yield from file.each_item("videos", question)
