"""Clips with things that happen in them: DiDeMo, ActivityNet Captions, Assembly101, and the questions of STAR and TVQA.

DiDeMo, https://github.com/LisaAnne/LocalizingMoments: spans ``times`` of several annotators in pieces of 5 s, from the first
piece to the last inclusive; the span most of them chose counts. ActivityNet Captions (arXiv 1705.00754): by video ``duration``,
``timestamps`` and ``sentences``. Assembly101, https://github.com/assembly-101/assembly101-annotations: a table of actions between
frames, 30 a second. STAR, https://github.com/csbobby/STAR_Benchmark: ``choices``, ``start``, ``end`` and, by frame, a graph of
things (``bbox`` in pixels x0, y0, x1, y1) and relations, all by class number. TVQA, https://tvqa.cs.unc.edu/download_tvqa.html:
five answers and a span ``ts`` in seconds of a clip of 3 frames a second.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from pixelis.datasets.annotation_geometry import box, event, header_size
from pixelis.datasets.fields import RowError, need, number, optional, text, whole
from pixelis.datasets.readers.base import Checker, DatasetReader, DatasetRoot, Rows, below, each_row, read_json, table
from pixelis.errors import BadInput
from pixelis.records import Annotations, Event, Media, Question, Region, Relation

PIECE = 5
"""Seconds of a piece of a DiDeMo clip."""
ASSEMBLY_RATE = 30
"""Frames a second that Assembly101 counts in."""
SHOWS = ("castle", "friends", "grey", "house", "met")
"""TVQA's shows by the beginning of a clip's name; a clip without one is of the Big Bang Theory."""


def choices(question: str, options: list[str]) -> str:
    """A question with its options as lines ``A. text``."""
    return "\n".join([question, *(f"{chr(ord('A') + i)}. {option}" for i, option in enumerate(options))])


def _told(question: str, answer: str | None) -> str:
    """What the span of a question shows: the question with its answer, where that is known."""
    return f"{question} {answer}" if answer else question


# -- descriptions ---------------------------------------------------------------------------------------------------


def _didemo(place: DatasetRoot) -> Rows:
    path, folder = place.path("{split}_data.json", "data/{split}_data.json"), place.path("videos")
    rows = Checker(path)
    groups: dict[str, list[tuple[int, Any]]] = {}
    for position, row in enumerate(read_json(path, list)):
        with rows.row(f"[{position}]"):
            groups.setdefault(text(row, "video"), []).append((position, row))
    yield from rows.take()

    def question(video: str, group: list[tuple[int, Any]]) -> Question:
        events: list[Event] = []
        for position, row in group:
            with rows.row(f"[{position}]"):
                times = [_span(span) for span in need(row, "times", list)]
                if not times:
                    raise RowError("times", "empty", "nobody marked a span")
                first, last = Counter(times).most_common(1)[0][0]
                length = PIECE * whole(row.get("num_segments", 6), "num_segments", 1)
                events.append(event(text(row, "description"), PIECE * first, PIECE * (last + 1), length, "times"))
        media = Media(id="vid0", kind="video", uri=below(folder, video + place.options["suffix"], "video"))
        return place.question(video, media, Annotations(events=events), dropped=rows.pending)

    for video, group in groups.items():
        yield from rows.one(video, question, video, group)


def _span(span: Any) -> tuple[int, int]:
    if not isinstance(span, list) or len(span) != 2:
        raise RowError("times", "wrong_type", f"{span!r:.60} is no pair of pieces")
    return whole(span[0], "times"), whole(span[1], "times")


def _activitynet(place: DatasetRoot) -> Rows:
    path, folder = place.path("{split}.json", "captions/{split}.json"), place.path("videos")
    rows = Checker(path)

    def question(key: str, row: Any) -> Question:
        duration = number(need(row, "duration", (int, float)), "duration")
        spans, sentences = need(row, "timestamps", list), need(row, "sentences", list)
        if len(spans) != len(sentences):
            raise RowError("timestamps", "bad_length", f"{len(spans)} spans for {len(sentences)} sentences")
        events: list[Event] = []
        for position, (span, sentence) in enumerate(zip(spans, sentences, strict=True)):
            with rows.row(f"{key}[{position}]"):
                if not isinstance(span, list) or len(span) != 2:
                    raise RowError("timestamps", "wrong_type", f"{span!r:.60} is no pair of seconds")
                events.append(event(text({"sentences": sentence}, "sentences"), span[0], span[1], duration))
        media = Media(id="vid0", kind="video", uri=below(folder, key + place.options["suffix"], "video"))
        return place.question(key, media, Annotations(events=events), dropped=rows.pending, duration=duration)

    for key, row in read_json(path).items():
        yield from rows.one(key, question, key, row)


def _assembly101(place: DatasetRoot) -> Rows:
    path, folder = place.path("fine-grained-annotations/{split}.csv", "{split}.csv"), place.path("recordings")
    if place.split == "test":
        raise BadInput("assembly101: the actions of its test split are kept back", fix="use split=train or split=validation")
    rows = Checker(path)
    videos: dict[str, list[tuple[int, str, str, str]]] = {}
    for line, row in table(path, ("video", "start_frame", "end_frame", "action_cls")):
        with rows.row(f"line {line}"):
            action = sys.intern(text(row, "action_cls"))
            videos.setdefault(text(row, "video"), []).append((line, row["start_frame"], row["end_frame"], action))
    yield from rows.take()

    def question(video: str, segments: list[tuple[int, str, str, str]]) -> Question:
        events: list[Event] = []
        for line, start, end, action in segments:
            with rows.row(f"line {line}"):
                first, last = whole(start, "start_frame"), whole(end, "end_frame")
                events.append(event(action, first / ASSEMBLY_RATE, last / ASSEMBLY_RATE, column="start_frame"))
        media = Media(id="vid0", kind="video", uri=below(folder, video, "video"))
        events.sort(key=lambda e: (e.start, e.end))
        return place.question(video, media, Annotations(events=events), dropped=rows.pending)

    for video in list(videos):
        yield from rows.one(video, question, video, videos.pop(video))


# -- questions ------------------------------------------------------------------------------------------------------


def _star(place: DatasetRoot) -> Rows:
    path, folder = place.path("STAR_{split}.json"), place.path("Charades_v1_480")
    graphs = place.flag("situations")
    names = _star_classes(place) if graphs else {}
    dump = place.path("frames") if graphs else None

    def question(row: dict[str, Any], rows: Checker) -> Question:
        key, video, asked = rows.unique(text(row, "question_id"), "question_id"), text(row, "video_id"), text(row, "question")
        options = [text(choice, "choice") for choice in need(row, "choices", list)]
        answer, known = optional(row, "answer", str), None
        if answer is not None:
            if answer not in options:
                raise RowError("answer", "no_label", f"{answer!r:.60} is none of the choices")
            known = [chr(ord("A") + options.index(answer))]
        regions: list[Region] = []
        relations: list[Relation] = []
        events: list[Event] = []
        with rows.row(f"{key}, span"):
            events.append(event(_told(asked, answer), row.get("start"), row.get("end"), column="start"))
        if dump is not None:
            for frame, graph in need(row, "situations", dict).items():
                with rows.row(f"{key}, frame {frame}"):
                    _situation(
                        frame, graph, Path(below(dump, f"{video}.mp4/{frame}.png", "situations")), names, regions, relations
                    )
        media = Media(id="vid0", kind="video", uri=below(folder, f"{video}.mp4", "video_id"))
        return place.question(
            key,
            media,
            Annotations(regions=regions, relations=relations, events=events),
            question=choices(asked, options),
            answers=known,
            scorer="mc_letter",
            dropped=rows.pending,
            options=options,
            program=row.get("question_program"),
        )

    yield from each_row(path, question)


def _star_classes(place: DatasetRoot) -> dict[str, str]:
    """Names of objects (o000) and relations (r000) by their class number: lines ``o000 person``."""
    names = {}
    for kind in ("object", "relationship"):
        path = place.path(f"STAR_classes/{kind}_classes.txt", f"classes/{kind}_classes.txt")
        for line in path.read_text(encoding="utf-8").splitlines():
            number_, _, name = line.strip().partition(" ")
            names[number_] = name.replace("_", " ")
    return names


def _situation(
    frame: str, graph: Any, picture: Path, names: dict[str, str], regions: list[Region], relations: list[Relation]
) -> None:
    """Adds the things and relations of one frame, numbered from 1 in the rate of the clip."""
    width, height = header_size(picture)
    boxes, labels = need(graph, "bbox", list), need(graph, "bbox_labels", list)
    if len(boxes) != len(labels):
        raise RowError("bbox", "bad_length", f"{len(boxes)} boxes for {len(labels)} labels")
    found = []
    for corners, label in zip(boxes, labels, strict=True):
        if corners is not None:
            place = box(corners, width, height)
            name = names.get(str(label), str(label))
            found.append(
                Region(id=f"{frame}.{label}", label=name, box=place, media="vid0", frame=whole(frame, "situations", 1) - 1)
            )
    known = {region.id for region in found}
    pairs, kinds = optional(graph, "rel_pairs", list, []), optional(graph, "rel_labels", list, [])
    for pair, kind in zip(pairs, kinds, strict=False):
        ends = [f"{frame}.{end}" for end in pair] if isinstance(pair, list) else []
        if len(ends) == 2 and known.issuperset(ends):
            relations.append(Relation(subject=ends[0], predicate=names.get(str(kind), str(kind)), object=ends[1]))
    regions += found


_SECONDS = re.compile(r"\s*(\S+)\s*-\s*(\S+)\s*")


def _tvqa(place: DatasetRoot) -> Rows:
    path, folder = place.path("tvqa_{split}.jsonl", "tvqa_qa_release/tvqa_{split}.jsonl"), place.path("frames_hq")

    def question(row: dict[str, Any], rows: Checker) -> Question:
        key, clip, asked = rows.unique(need(row, "qid", (int, str)), "qid"), text(row, "vid_name"), text(row, "q")
        options = [text(row, f"a{i}") for i in range(5)]
        known = None
        if row.get("answer_idx") is not None:
            index = whole(row["answer_idx"], "answer_idx")
            if index > 4:
                raise RowError("answer_idx", "no_label", f"{index} is none of five answers")
            known = [chr(ord("A") + index)]
        show = next((show for show in SHOWS if clip.startswith(f"{show}_")), "bbt")
        pictures = Path(below(folder, f"{show}_frames/{clip}", "vid_name"))
        frames = sorted(str(path) for path in pictures.glob("*.jpg"))
        if not frames:
            raise RowError("vid_name", "media_not_found", f"no frames in {pictures}")
        events: list[Event] = []
        if row.get("ts") is not None:
            with rows.row(f"{key}, span"):
                ends = _SECONDS.fullmatch(text(row, "ts"))
                if not ends:
                    raise RowError("ts", "wrong_type", f"{row['ts']!r:.60} is no span of seconds")
                answer = options[ord(known[0]) - ord("A")] if known else None
                events.append(event(_told(asked, answer), ends[1], ends[2], column="ts"))
        media = Media(id="vid0", kind="video", frames=frames, fps=3)
        return place.question(
            key,
            media,
            Annotations(events=events),
            question=choices(asked, options),
            answers=known,
            scorer="mc_letter",
            dropped=rows.pending,
            options=options,
            show=row.get("show_name"),
        )

    yield from each_row(path, question)


_FAMILIES = (
    DatasetReader(
        "didemo",
        "temporal",
        _didemo,
        "ROOT/SPLIT_data.json, ROOT/videos/ with the clips as `video` names them, plus what suffix= adds",
        "https://github.com/LisaAnne/LocalizingMoments",
        {"split": "train", "suffix": ""},
    ),
    DatasetReader(
        "activitynet",
        "temporal",
        _activitynet,
        "ROOT/SPLIT.json (train, val_1, val_2), ROOT/videos/v_QOlSCBRmfWY.mp4",
        "https://cs.stanford.edu/people/ranjaykrishna/densevid",
        {"split": "train", "suffix": ".mp4"},
    ),
    DatasetReader(
        "assembly101",
        "temporal",
        _assembly101,
        "ROOT/fine-grained-annotations/SPLIT.csv (train, validation), ROOT/recordings/SEQUENCE/C10404_rgb.mp4",
        "https://github.com/assembly-101/assembly101-annotations",
    ),
    DatasetReader(
        "star",
        "temporal",
        _star,
        "ROOT/STAR_SPLIT.json, ROOT/Charades_v1_480/6H78U.mp4; for situations=yes ROOT/STAR_classes/object_classes.txt and "
        "relationship_classes.txt, ROOT/frames/6H78U.mp4/000103.png (Action Genome's frame dump)",
        "https://github.com/csbobby/STAR_Benchmark",
        {"split": "train", "situations": "no"},
    ),
    DatasetReader(
        "tvqa",
        "temporal",
        _tvqa,
        "ROOT/tvqa_SPLIT.jsonl, ROOT/frames_hq/friends_frames/friends_s06e12_seg02_clip_16/00001.jpg",
        "https://tvqa.cs.unc.edu/download_tvqa.html",
    ),
)
READERS = {reader.name: reader for reader in _FAMILIES}
