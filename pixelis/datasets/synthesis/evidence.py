"""Named facts of executed calls, and the answer that follows when a call looks elsewhere."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pixelis.datasets.synthesis import naming
from pixelis.datasets.synthesis.geometry import area, covered, holds_middle, middle, place_of, root_of
from pixelis.evaluation.capabilities import ExpectedCall
from pixelis.operations.geometry import WHOLE
from pixelis.records import Annotations, Box, Demonstration, ImageView, Line, Region, Step
from pixelis.rewards.scorers import box_iou, canonical, number

MIN_SUBJECT_IOU = 0.3
"""IoU from which on a call is about an annotated thing."""
MIN_VISIBLE = 0.8
"""Share of an annotated thing that must lie inside the place of a call for the call to show the thing."""


@dataclass
class Evidence:
    """One executed call: the place it looked at, 0..1 of the whole picture or frame, and its facts by name.

    ``name`` describes the subject as a question does.
    """

    step: Step
    root: str = ""
    frame: int | None = None
    place: Box | None = None
    subject: Region | Line | None = None
    name: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def subject_box(self) -> Box:
        """The box of the subject, or the place of the call, which must have either."""
        box = (self.subject.box if self.subject is not None else None) or self.place
        assert box is not None
        return box


Pairs = Sequence[tuple[Evidence, Evidence]]
"""The same call in the golden demonstration and in the one that looks elsewhere."""


def collect_evidence(
    steps: Sequence[Step], images: Sequence[ImageView], annotations: Annotations | None
) -> list[Evidence]:
    """The evidence of every successful call; ``images`` are those of the session."""
    annotations = annotations or Annotations()
    names = naming.describe([region for region in annotations.regions if region.frame is None])
    known_images = {image.id for image in images}
    result: list[Evidence] = []
    by_object: dict[str, Evidence] = {}
    for step in steps:
        observation = step.observation
        if step.op is None or observation is None or not step.succeeded:
            continue
        item = Evidence(step, str(step.target))
        earlier = by_object.get(str(step.arguments.get("object")))
        box = place_of(step.op, step.arguments)
        if earlier is not None:
            item.root, item.frame, item.place = earlier.root, earlier.frame, earlier.place
        elif box is not None or step.target in known_images:
            item.root, item.frame, item.place = root_of(images, str(step.target), box or WHOLE)
        if step.op == "track_object":
            item.frame = int(step.arguments.get("start") or item.frame or 0)
        item.subject = earlier.subject if earlier is not None else _subject(item, annotations)
        if isinstance(item.subject, Region):
            attributes = {f"attribute.{key}": value for key, value in item.subject.attributes.items()}
            item.name = names.get(item.subject.id, item.subject.label)
            item.facts = {"label": item.subject.label, **attributes}
        elif item.subject is not None:
            item.name = item.subject.text
            item.facts = {"text": item.subject.text}
        item.facts |= {
            **_event_facts(observation.data, annotations),
            **_measured_facts(observation.data),
        }
        if step.op == "python" and (printed := number(observation.text)) is not None:
            item.facts["code.printed"] = printed
        by_object.update({str(entry["id"]): item for entry in observation.data.get("objects", [])})
        result.append(item)
    return result


def with_expected_calls(demonstration: Demonstration) -> Demonstration:
    """The demonstration whose ``meta.expected_calls`` are its calls, with what the annotations say of their places."""
    images = [ImageView(id=media.id) for media in demonstration.media]
    images += [image for step in demonstration.steps if step.observation for image in step.observation.images]
    calls, notes = list[ExpectedCall](), demonstration.annotations or Annotations()
    for item in collect_evidence(demonstration.steps, images, notes):
        subject = item.subject
        call = ExpectedCall(op=str(item.step.op), media=item.root, frame=item.frame)
        assert item.step.observation is not None
        if call.op == "select_frames":
            frames = [frame["index"] for frame in item.step.observation.data["frames"]]
            call = ExpectedCall(op=call.op, media=item.root, frames=frames)
        elif call.op == "track_object" and isinstance(subject, Region):
            boxes = {int(r.frame or 0): r.box for r in notes.regions if r.track == subject.track}
            call = ExpectedCall(op=call.op, media=item.root, track=boxes)
        elif isinstance(subject, Region):
            call = call.model_copy(update={"box": subject.box, "mask": subject.mask})
        elif isinstance(subject, Line):
            call = call.model_copy(update={"box": subject.box, "text": subject.text})
        calls.append(call)
    expected = [call.model_dump(mode="json", exclude_none=True) for call in calls]
    return demonstration.model_copy(update={"meta": {**demonstration.meta, "expected_calls": expected}})


def _subject(item: Evidence, annotations: Annotations) -> Region | Line | None:
    """The annotated thing at the place, the only one that it shows, or the smallest one around it."""
    place = item.place
    if place is None:
        return None
    things: list[Region | Line] = [*annotations.regions, *annotations.lines]
    boxes = [
        (thing.box, thing)
        for thing in things
        if thing.box is not None and (thing.media, thing.frame or 0) == (item.root, item.frame or 0)
    ]
    best = max(boxes, key=lambda pair: box_iou(pair[0], place), default=None)
    if best is not None and box_iou(best[0], place) >= MIN_SUBJECT_IOU:
        return best[1]
    visible = _without_words([pair for pair in boxes if covered(pair[0], place) >= MIN_VISIBLE])
    if visible:
        return visible[0] if len(visible) == 1 else None
    around = [pair for pair in boxes if holds_middle(pair[0], place)]
    return min(around, key=lambda pair: area(pair[0]))[1] if around else None


def _without_words(shown: list[tuple[Box, Region | Line]]) -> list[Region | Line]:
    """The things, of lines of text without the words that are annotated beside them."""
    whole = list[tuple[Box, Region | Line]]()
    for box, thing in sorted(shown, key=lambda pair: -area(pair[0])):
        inside = any(
            isinstance(other, Line) and covered(box, around) >= MIN_VISIBLE for around, other in whole
        )
        if not (inside and isinstance(thing, Line)):
            whole.append((box, thing))
    return [thing for _, thing in whole]


def _event_facts(data: Mapping[str, Any], annotations: Annotations) -> dict[str, Any]:
    """The one event that all shown frames lie in; whether, and when first and last, each event is shown."""
    times = [frame["time"] for frame in data.get("frames", [])]
    if not times:
        return {}
    events = {e.text: [t for t in times if e.start <= t <= e.end] for e in annotations.events}
    continuous = [text for text, shown in events.items() if len(shown) == len(times)]
    facts: dict[str, Any] = {"event": continuous[0]} if len(continuous) == 1 else {}
    for text, shown in events.items():
        facts[f"shown.{text}"] = bool(shown)
        facts |= {f"first.{text}": min(shown), f"last.{text}": max(shown)} if shown else {}
    return facts


def _measured_facts(data: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if lines := data.get("lines"):
        facts["read"] = " ".join(str(line["text"]) for line in lines)
        words = facts["read"].split()
        facts |= {f"read.line.{i}": str(line["text"]) for i, line in enumerate(lines)}
        facts |= {"read.first_word": words[0], "read.last_word": words[-1]} if words else {}
    for group, values in data.get("properties", {}).items():
        facts.update({f"{group}.{name}": entry["value"] for name, entry in values.items()})
    if "size.relative_size" in facts:
        facts["size.percent"] = 100 * facts["size.relative_size"]
    for entry in data.get("objects", [])[:1]:
        facts["object.x"], facts["object.y"] = middle(entry["box"])
    if data.get("op") == "measure":
        facts |= {f"line.{name}": data[name] for name in ("length", "angle") if name in data}
    if data.get("op") == "search_clip" and data["moments"]:
        facts["moment.time"] = data["moments"][0]["time"]
    if data.get("op") == "compare":
        facts["pictures.same"] = "no" if data["boxes"] else "yes"
    for track in data.get("tracks", [])[:1]:
        facts.update({f"track.{name}": entry["value"] for name, entry in track["statistics"].items()})
        (a, b), (c, d) = middle(track["boxes"][0]), middle(track["boxes"][-1])
        facts["track.dx"], facts["track.dy"] = c - a, d - b
    return facts


# Deriving answers

SIDES = (
    (("left", "right"), 0),
    (("upper", "lower"), 1),
    (("above", "below"), 1),
    (("up", "down"), 1),
)
"""Words for a negative and a positive difference along x (0) and y (1)."""


MEASURES = (
    (
        r"large|small|area|bigger|cover|size|fit into|part of|per ?cent|fill|takes? up",
        "size.area_pixels size.percent",
    ),
    (r"wide|width|left to right", "size.bbox_width"),
    (r"tall|height|top to bottom", "size.bbox_height"),
    (r"round|circle", "shape.circularity"),
    (r"\bway\b|travel", "track.path_length"),
    (r"far|distance|pixels", "track.displacement line.length"),
    (r"angle|degrees", "line.angle"),
    (r"second|moment", "moment.time"),
    (r"\bmean\b", "code.printed"),
    (r"\bleft\b|\bright\b", "object.x"),
    (r"above|below|lower", "object.y"),
)
"""Words of a question, and the measures that may then explain its answer."""


def _concerns(question: str, key: str) -> bool:
    kind, _, event = key.partition(".")
    if kind in ("first", "last", "shown"):
        return event in question
    return any(re.search(words, question.casefold()) and key in keys.split() for words, keys in MEASURES)


def derive_answer(
    question: str, answer: str, pairs: Pairs, accepts: Callable[[str], bool]
) -> tuple[str, str] | None:
    """The answer that the other evidence gives, and the fact behind it; None if no fact explains ``answer``.

    The first explanation that fits counts.
    """
    return (
        _equal_fact(question, answer, pairs, accepts)
        or _extreme_subject(question, answer, pairs)
        or _order(question, answer, pairs)
        or _event_shown(question, answer, pairs)
        or _ratio(question, answer, pairs, accepts)
        or _side(answer, pairs)
    )


def _equal_fact(
    question: str, answer: str, pairs: Pairs, accepts: Callable[[str], bool]
) -> tuple[str, str] | None:
    several = len({old.name for old, _ in pairs if old.name}) > 1
    for old, new in reversed(pairs):
        for name, value in old.facts.items():
            if several and name == "label":
                continue  # the answer chooses among subjects, and a label is not what tells them apart
            if _is_number(value) and not name.startswith("attribute.") and not _concerns(question, name):
                continue
            before, after = format_like(value, answer), format_like(new.facts.get(name), answer)
            if before is not None and after and accepts(before) and canonical(after) != canonical(before):
                return after, name
    return None


def _extreme_subject(question: str, answer: str, pairs: Pairs) -> tuple[str, str] | None:
    """The answer names the subject with the largest or smallest value; elsewhere it is another subject."""
    if len(pairs) < 2:
        return None
    names = [old.name.removeprefix("the ") for old, _ in pairs]
    for key in _fact_names(pairs):
        rows = [i for i, (old, _) in enumerate(pairs) if _is_number(old.facts.get(key)) and names[i]]
        comparable = all(_is_number(pairs[i][1].facts.get(key)) for i in rows)
        if not comparable or len({names[i] for i in rows}) < 2 or not _concerns(question, key):
            continue
        values = [{i: float(pairs[i][side].facts[key]) for i in rows} for side in (0, 1)]
        for extreme in (max, min):
            old, new = (names[extreme(rows, key=by_row.__getitem__)] for by_row in values)
            if _named(old, answer) and not _named(new, answer):
                return re.sub(re.escape(old), new, answer, count=1, flags=re.IGNORECASE), key
    return None


def _named(name: str, answer: str) -> bool:
    return re.search(rf"\b{re.escape(canonical(name))}\b", canonical(answer)) is not None


def _fact_names(pairs: Pairs) -> Sequence[str]:
    """Facts of the golden evidence, the last call's first."""
    return list(dict.fromkeys(key for old, _ in reversed(pairs) for key in old.facts))


def _two_subjects(
    question: str, pairs: Pairs
) -> Iterator[tuple[str, tuple[float, float], tuple[float, float]]]:
    """Measures that the question is about: name, values of the first and last subject before and after."""
    for key in _fact_names(pairs):
        rows = [
            (o, n)
            for o, n in pairs
            if o.name and _is_number(o.facts.get(key)) and _is_number(n.facts.get(key))
        ]
        if _concerns(question, key) and len(rows) >= 2 and rows[0][0].name != rows[-1][0].name:
            (a, c), (b, d) = ([float(item.facts[key]) for item in row] for row in (rows[0], rows[-1]))
            yield key, (a, b), (c, d)


def _order(question: str, answer: str, pairs: Pairs) -> tuple[str, str] | None:
    if canonical(answer) not in ("yes", "no"):
        return None
    for key, (a, b), (c, d) in _two_subjects(question, pairs):
        if (a - b) * (c - d) < 0:
            return ("no" if canonical(answer) == "yes" else "yes"), key
    return None


def _event_shown(question: str, answer: str, pairs: Pairs) -> tuple[str, str] | None:
    old, new = pairs[-1]
    for key, before in old.facts.items():
        if key.startswith("shown.") and key.removeprefix("shown.") in question:
            after = new.facts.get(key)
            if after is not None and after != before and canonical(answer) == ("yes" if before else "no"):
                return ("yes" if after else "no"), key
    return None


def _ratio(
    question: str, answer: str, pairs: Pairs, accepts: Callable[[str], bool]
) -> tuple[str, str] | None:
    """How many times the value of one subject is that of the other: the ratio of the values elsewhere."""
    if number(answer) is None:
        return None
    for key, before, after in _two_subjects(question, pairs):
        for old, new in ((before, after), (before[::-1], after[::-1])):
            if old[1] and new[1] and accepts(str(format_like(old[0] / old[1], answer))):
                return str(format_like(new[0] / new[1], answer)), key
    return None


def _side(answer: str, pairs: Pairs) -> tuple[str, str] | None:
    """A side of the first subject from the last, or the direction of a track, if elsewhere it is opposite."""
    words = set(re.findall(r"[a-z]+", canonical(answer)))
    places = [(old.place, new.place) for old, new in pairs if old.place and new.place]
    for sides, axis in SIDES:
        if len(words & set(sides)) != 1:
            continue
        track = ("track.dx", "track.dy")[axis]
        differences = [
            (track, old.facts[track], new.facts.get(track, 0)) for old, new in pairs if track in old.facts
        ]
        if len(places) >= 2:
            before, after = (
                middle(places[0][side])[axis] - middle(places[-1][side])[axis] for side in (0, 1)
            )
            differences.append((("place.dx", "place.dy")[axis], before, after))
        for key, value, other in differences:
            word = sides[int(value > 0)]
            if word in words and value * other < 0:
                return re.sub(rf"\b{word}\b", sides[int(other > 0)], answer, flags=re.IGNORECASE), key
    return None


def format_like(value: Any, answer: str) -> str | None:
    """A fact as the answer would be written, numbers with as many decimals; None for lists and yes or no."""
    if value is None or isinstance(value, (bool, list, dict)):
        return None
    if isinstance(value, (int, float)):
        if number(answer) is None or not math.isfinite(value):
            return None
        digits = len(match[1]) if (match := re.search(r"\.(\d+)", answer)) else 0
        return f"{value:.{digits}f}"
    return str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
