"""Clips with events: DiDeMo, ActivityNet Captions, Assembly101, STAR, TVQA.

DiDeMo's spans count chunks of 5 s, both ends included; the most frequent one counts. STAR's objects and
relations are class numbers, its boxes x0, y0, x1, y1 in pixels.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from pixelis.datasets.annotation_geometry import box_xyxy, header_size, time_span
from pixelis.datasets.fields import RowError, need, number, optional, text, whole
from pixelis.datasets.readers.base import DatasetRoot, Rows, below, clip, frames_in, index_of, read_json
from pixelis.errors import BadInput
from pixelis.records import Annotations, Event, Question, Region, Relation

DIDEMO_CHUNK = 5
ASSEMBLY101_FPS = 30
TVQA_SHOWS = ("castle", "friends", "grey", "house", "met")
"""By the beginning of a clip's name; one without is of the Big Bang Theory."""


# Descriptions


def didemo(root: DatasetRoot) -> Rows:
    file, folder = root.file("{split}_data.json", "data/{split}_data.json"), root.path("videos")
    by_video = file.group(read_json(file.path, list), "video")
    yield from file.take_errors()

    def event(row: dict[str, Any]) -> Event:
        spans = [(whole(first, "times"), whole(last, "times")) for first, last in need(row, "times", list)]
        if not spans:
            raise RowError("times", "empty", "no annotator marked a span")
        first, last = Counter(spans).most_common(1)[0][0]
        duration = DIDEMO_CHUNK * whole(row.get("num_segments", 6), "num_segments", 1)
        seconds = DIDEMO_CHUNK * first, DIDEMO_CHUNK * (last + 1)
        return time_span(text(row, "description"), *seconds, duration, "times")

    def question(video: str, rows: list[tuple[str, Any]]) -> Question:
        media, events = clip(below(folder, video + root.options["suffix"], "video")), list[Event]()
        for name, row in rows:
            with file.collect_errors(name):
                events.append(event(row))
        return file.question(video, media, Annotations(events=events))

    yield from file.each_entry(by_video, question)


def activitynet(root: DatasetRoot) -> Rows:
    file, folder = root.file("{split}.json", "captions/{split}.json"), root.path("videos")

    def question(key: str, row: Any) -> Question:
        duration = number(need(row, "duration", (int, float)), "duration")
        events: list[Event] = []
        spans = zip(need(row, "timestamps", list), need(row, "sentences", list), strict=True)
        for i, (span, sentence) in enumerate(spans):
            with file.collect_errors(f"{key}[{i}]"):
                start, end = need({"timestamps": span}, "timestamps", list)
                events.append(time_span(text({"sentences": sentence}, "sentences"), start, end, duration))
        media = clip(below(folder, key + root.options["suffix"], "video"))
        return file.question(key, media, Annotations(events=events), duration=duration)

    yield from file.each_entry(file.data, question)


def assembly101(root: DatasetRoot) -> Rows:
    file, folder = root.file("fine-grained-annotations/{split}.csv", "{split}.csv"), root.path("recordings")
    if root.split == "test":
        fix = "use split=train or split=validation"
        raise BadInput("assembly101: the actions of its test split are not public", fix=fix)
    segments = defaultdict[str, list[Event]](list)
    for name, row in file.table_rows(("video", "start_frame", "end_frame", "action_cls")):
        with file.collect_errors(name):
            frames = whole(row["start_frame"], "start_frame"), whole(row["end_frame"], "end_frame")
            start, end = (frame / ASSEMBLY101_FPS for frame in frames)
            event = time_span(text(row, "action_cls"), start, end, column="start_frame")
            segments[text(row, "video")].append(event)
    yield from file.take_errors()

    def question(video: str) -> Question:
        events = sorted(segments.pop(video), key=lambda event: (event.start, event.end))
        return file.question(video, clip(below(folder, video, "video")), Annotations(events=events))

    for video in list(segments):
        yield from file.convert(video, question, video)


# Questions


def star(root: DatasetRoot) -> Rows:
    file, folder = root.file("STAR_{split}.json"), root.path("Charades_v1_480")
    situations = root.flag("situations")
    names = {}
    for kind in ("object", "relationship") if situations else ():
        path = root.path(f"STAR_classes/{kind}_classes.txt", f"classes/{kind}_classes.txt")
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            class_number, _, name = line.strip().partition(" ")
            names[class_number] = name.replace("_", " ")
    frames_folder = root.path("frames") if situations else folder

    def question(row: dict[str, Any]) -> Question:
        key, video, prompt = text(row, "question_id"), text(row, "video_id"), text(row, "question")
        options = [text(choice, "choice") for choice in need(row, "choices", list)]
        answer = optional(row, "answer", str)
        annotations = Annotations()
        with file.collect_errors(f"{key}, span"):
            label = f"{prompt} {answer}" if answer else prompt
            annotations.events.append(time_span(label, row.get("start"), row.get("end"), column="start"))
        for frame, graph in need(row, "situations", dict).items() if situations else ():
            with file.collect_errors(f"{key}, frame {frame}"):
                path = Path(below(frames_folder, f"{video}.mp4/{frame}.png", "situations"))
                regions, relations = _star_graph(frame, graph, path, names)
                annotations.regions += regions
                annotations.relations += relations
        index = None if answer is None else index_of(answer, options)
        media = clip(below(folder, f"{video}.mp4", "video_id"))
        program = row.get("question_program")
        return file.choice(key, media, prompt, options, index, annotations=annotations, program=program)

    yield from file.each_row(question)


def _star_graph(
    frame: str, graph: Any, picture: Path, names: dict[str, str]
) -> tuple[list[Region], list[Relation]]:
    size, number = header_size(picture), whole(frame, "situations", 1) - 1
    regions = [
        Region(
            id=f"{frame}.{label}",
            label=names.get(str(label), str(label)),
            box=box_xyxy(corners, *size),
            media="vid0",
            frame=number,
        )
        for corners, label in zip(need(graph, "bbox", list), need(graph, "bbox_labels", list), strict=True)
        if corners is not None
    ]
    ids = {region.id for region in regions}
    relations = []
    pairs, predicates = optional(graph, "rel_pairs", list, []), optional(graph, "rel_labels", list, [])
    for pair, predicate in zip(pairs, predicates, strict=False):
        ends = [f"{frame}.{end}" for end in pair] if isinstance(pair, list) else []
        if len(ends) == 2 and ids.issuperset(ends):
            name = names.get(str(predicate), str(predicate))
            relations.append(Relation(subject=ends[0], predicate=name, object=ends[1]))
    return regions, relations


def tvqa(root: DatasetRoot) -> Rows:
    file = root.file("tvqa_{split}.jsonl", "tvqa_qa_release/tvqa_{split}.jsonl")
    folder = root.path("frames_hq")

    def question(row: dict[str, Any]) -> Question:
        key, name, prompt = need(row, "qid", (int, str)), text(row, "vid_name"), text(row, "q")
        options = [text(row, f"a{i}") for i in range(5)]
        answer = None if row.get("answer_idx") is None else whole(row["answer_idx"], "answer_idx")
        show = next((show for show in TVQA_SHOWS if name.startswith(f"{show}_")), "bbt")
        frames = frames_in(Path(below(folder, f"{show}_frames/{name}", "vid_name")), "vid_name")
        events: list[Event] = []
        if row.get("ts") is not None:
            with file.collect_errors(f"{key}, span"):
                start, end = text(row, "ts").split("-")
                label = prompt if answer is None else f"{prompt} {row.get(f'a{answer}', '')}"
                events.append(time_span(label, start, end, column="ts"))
        media, meta = clip(frames=frames, fps=3), {"show": row.get("show_name")}
        return file.choice(
            key, media, prompt, options, answer, "answer_idx", Annotations(events=events), **meta
        )

    return file.each_row(question)
