"""Pictures and clips with captions: Flickr30k (with the boxes of Flickr30k Entities), Unsplash Lite, MSR-VTT.

Flickr30k, https://shannon.cs.illinois.edu/DenotationGraph: ``results_20130124.token``, a line ``NAME.jpg#0<tab>caption``, five a
picture. Entities, https://github.com/BryanPlummer/flickr30k_entities: phrases marked ``[/EN#12/people a man]`` in
``Sentences/ID.txt`` and their boxes in ``Annotations/ID.xml``. Unsplash, https://github.com/unsplash/datasets: a table of
photographs that are fetched by their URL. MSR-VTT (CVPR 2016): one JSON file of ``videos`` and ``sentences``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from pixelis.datasets.annotation_geometry import box, sides
from pixelis.datasets.fields import RowError, need, text, whole
from pixelis.datasets.readers.base import Checker, DatasetReader, DatasetRoot, Rows, below, read_json, table
from pixelis.records import Annotations, Media, Question, Region

_PHRASE = re.compile(r"\[/EN#(\d+)/(\S+) ([^\]]+)\]")
_TOKEN = re.compile(r"(\S+)#\d+\t(.+)")


def _flickr30k(place: DatasetRoot) -> Rows:
    path = place.path("results_20130124.token", "results.token")
    folder = place.path("flickr30k-images", "flickr30k_images")
    kept = set(place.path("{split}.txt", "Entities/{split}.txt").read_text().split()) if place.split else None
    entities = place.path("Annotations", "Entities/Annotations").parent if place.flag("boxes") else None
    rows = Checker(path)

    def question(name: str, said: list[str]) -> Question:
        key = rows.unique(Path(name).stem, "name")
        regions, size = _entities(entities, key, rows) if entities else ([], (None, None))
        media = Media(id="img0", uri=below(folder, name, "name"), width=size[0], height=size[1])
        return place.question(key, media, Annotations(regions=regions, captions=said), dropped=rows.pending)

    def lines() -> Iterator[tuple[str, str]]:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                with rows.row(f"line {number}"):
                    match = _TOKEN.fullmatch(line.strip())
                    if not match:
                        raise RowError("all", "wrong_type", f"{line.strip()!r:.60} is not NAME.jpg#0, a tab and a caption")
                    yield match[1], match[2].strip()

    for name, group in itertools.groupby(lines(), key=lambda pair: pair[0]):
        said = [caption for _, caption in group]
        yield from rows.take()
        if kept is None or Path(name).stem in kept:
            yield from rows.one(name, question, name, said)
    yield from rows.take()


def _entities(folder: Path, key: str, rows: Checker) -> tuple[list[Region], tuple[int, int]]:
    """The regions of a picture and its size; a region is called what the first caption that mentions it calls it."""
    annotation, sentences = Path(below(folder, f"Annotations/{key}.xml", "name")), folder / "Sentences" / f"{key}.txt"
    try:
        tree = ElementTree.parse(annotation).getroot()
        mentions = _PHRASE.findall(sentences.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RowError("boxes", "missing_file", f"no {error.filename}") from None
    except (ElementTree.ParseError, UnicodeDecodeError) as error:
        raise RowError("boxes", "not_xml", f"{annotation.name}: {error}") from None
    phrases: dict[str, tuple[str, str]] = {}
    for chain, kinds, phrase in mentions:
        phrases.setdefault(chain, (phrase, kinds))
    width, height = sides(*(whole(tree.findtext(f"size/{side}", ""), side) for side in ("width", "height")))
    regions = []
    for position, item in enumerate(tree.iter("object")):
        corners = item.find("bndbox")
        if corners is None:
            continue  # a scene, or a thing that cannot be boxed
        with rows.row(f"{annotation.name}, object {position}"):
            ends = [whole(corners.findtext(side, ""), side) for side in ("xmin", "ymin", "xmax", "ymax")]
            place = box([ends[0] - 1, ends[1] - 1, ends[2], ends[3]], width, height, "bndbox")  # pixels from 1, both ends inside
            for chain in (name.text or "" for name in item.iter("name")):
                phrase, kinds = phrases.get(chain, ("", ""))
                if phrase:
                    told = {"entity": chain, "kinds": kinds.split("/")}
                    regions.append(Region(id=f"{chain}.{position}", label=phrase, box=place, attributes=told))
    return regions, (width, height)


def _unsplash(place: DatasetRoot) -> Rows:
    path, folder = place.path("photos.tsv000", "photos.tsv"), place.path("photos")
    rows = Checker(path)

    def question(row: dict[str, Any]) -> Question:
        key = rows.unique(text(row, "photo_id"), "photo_id")
        width, height = sides(whole(row["photo_width"], "photo_width"), whole(row["photo_height"], "photo_height"))
        said = [words.strip() for words in (row["photo_description"], row["ai_description"]) if words and words.strip()]
        media = Media(id="img0", uri=below(folder, f"{key}.jpg", "photo_id"), width=width, height=height)
        return place.question(key, media, Annotations(captions=said), url=row.get("photo_image_url"))

    columns = ("photo_id", "photo_width", "photo_height", "photo_description", "ai_description")
    for number, row in table(path, columns, "\t"):
        yield from rows.one(f"line {number}", question, row)


def _msrvtt(place: DatasetRoot) -> Rows:
    test = place.split == "test"
    path = place.path("test_videodatainfo.json" if test else "train_val_videodatainfo.json")
    folder = place.path("TestVideo" if test else "TrainValVideo")
    data, rows = read_json(path), Checker(path)
    said: dict[str, list[str]] = {}
    for position, sentence in enumerate(rows.items(data, "sentences")):
        with rows.row(f"sentences[{position}]"):
            said.setdefault(text(sentence, "video_id"), []).append(text(sentence, "caption"))
    yield from rows.take()

    def question(video: dict[str, Any]) -> Question:
        key = rows.unique(text(video, "video_id"), "video_id")
        media = Media(id="vid0", kind="video", uri=below(folder, f"{key}.mp4", "video_id"))
        return place.question(key, media, Annotations(captions=said.pop(key, [])), category=video.get("category"))

    for position, video in enumerate(rows.items(data, "videos")):
        with rows.row(f"videos[{position}]"):
            if need(video, "split", str) == place.split:
                yield from rows.one(f"videos[{position}]", question, video)
        yield from rows.take()


_FAMILIES = (
    DatasetReader(
        "flickr30k",
        "captions",
        _flickr30k,
        "ROOT/results_20130124.token, ROOT/flickr30k-images/1000092795.jpg; for split= ROOT/SPLIT.txt and for boxes=yes "
        "ROOT/Annotations/1000092795.xml and ROOT/Sentences/1000092795.txt, all of Flickr30k Entities (or in ROOT/Entities/)",
        "https://github.com/BryanPlummer/flickr30k_entities",
        {"split": "", "boxes": "no"},
    ),
    DatasetReader(
        "unsplash",
        "captions",
        _unsplash,
        "ROOT/photos.tsv000 and, fetched from the URLs in it, ROOT/photos/PHOTO_ID.jpg",
        "https://github.com/unsplash/datasets/blob/master/DOCS.md",
        {"split": ""},
    ),
    DatasetReader(
        "msrvtt",
        "captions",
        _msrvtt,
        "ROOT/train_val_videodatainfo.json, ROOT/TrainValVideo/video0.mp4 (splits train and validate); "
        "ROOT/test_videodatainfo.json, ROOT/TestVideo/video7010.mp4 (split test)",
        "MSR-VTT: A Large Video Description Dataset for Bridging Video and Language, CVPR 2016, and its releases",
    ),
)
READERS = {reader.name: reader for reader in _FAMILIES}
