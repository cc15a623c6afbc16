"""Extracts named facts from executed calls: from what the operation returned and what is annotated in that place.

The same names in a golden demonstration and in one that looked elsewhere make it possible to say what the other place shows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pixelis.datasets.synthesis import grounding
from pixelis.datasets.synthesis.places import place_of, root_of
from pixelis.operations.geometry import WHOLE
from pixelis.records import Annotations, Box, ImageView, Line, Region, Step
from pixelis.rewards.scorers import box_iou, canonical, number

SAME = 0.3
"""IoU from which on a call is about an annotated thing; below it the smallest annotated thing that holds the place counts."""
INSIDE = 0.8
"""Share of an annotated thing inside the place of the call, from which on the call shows it."""


@dataclass
class Look:
    """One executed call: where it looked (0..1 of the whole picture or frame) and what it tells, as {name: value}.

    ``name`` is what the subject is called in the question: ``the red cup``, the text of a line, or nothing.
    """

    step: Step
    root: str = ""
    frame: int | None = None
    place: Box | None = None
    subject: Region | Line | None = None
    name: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def looks(steps: Sequence[Step], images: Sequence[ImageView], known: Annotations | None) -> list[Look]:
    """A ``Look`` for every call that went well; ``images`` are those of the room in which the steps were executed.

    A call about an object found before looks where that object was found.
    """
    out: list[Look] = []
    names = grounding.describe([region for region in known.regions if region.frame is None]) if known else {}
    objects: dict[str, Look] = {}
    for step in steps:
        observation = step.observation
        if step.op is None or observation is None or observation.status != "ok":
            continue
        look = Look(step, str(step.target))
        earlier = objects.get(str(step.arguments.get("object")))
        box = place_of(step.op, step.arguments)
        if earlier is not None:
            look.root, look.frame, look.place = earlier.root, earlier.frame, earlier.place
        elif box is not None:
            look.root, look.frame, look.place = root_of(images, str(step.target), box)
        elif step.target is not None and any(image.id == step.target for image in images):
            look.root, look.frame, look.place = root_of(images, step.target, WHOLE)
        if step.op == "track_object":
            look.frame = int(step.arguments.get("start") or look.frame or 0)
        look.subject = _subject(look, known or Annotations(), earlier)
        if isinstance(look.subject, Region):
            look.name = names.get(look.subject.id, look.subject.label)
        elif look.subject is not None:
            look.name = look.subject.text
        look.facts = {**_annotated(look.subject), **_event(observation.data, known), **measured(observation.data)}
        for found in observation.data.get("objects", []):
            objects[str(found["id"])] = look
        out.append(look)
    return out


def _subject(look: Look, known: Annotations, earlier: Look | None) -> Region | Line | None:
    """The annotated thing that the call is about: the most alike in place, or the one thing that the place shows whole."""
    if earlier is not None:
        return earlier.subject
    if look.place is None:
        return None
    things: list[Region | Line] = [r for r in known.regions if r.media == look.root and (r.frame or 0) == (look.frame or 0)]
    things += [line for line in known.lines if line.media == look.root and (line.frame or 0) == (look.frame or 0)]
    at = [(thing, thing.box) for thing in things if thing.box is not None]
    alike, best = max(((box_iou(box, look.place), thing) for thing, box in at), key=lambda pair: pair[0], default=(0.0, None))
    if alike >= SAME:
        return best
    shown = [thing for thing, box in at if _share(box, look.place) >= INSIDE]
    if shown:
        return shown[0] if len(shown) == 1 else None
    x, y = _middle(look.place)
    holding = [(_area(box), thing) for thing, box in at if box[0] <= x <= box[2] and box[1] <= y <= box[3]]
    return min(holding, key=lambda pair: pair[0])[1] if holding else None


def _annotated(subject: Region | Line | None) -> dict[str, Any]:
    if isinstance(subject, Region):
        return {"label": subject.label, **{f"attribute.{key}": value for key, value in subject.attributes.items()}}
    return {"text": subject.text} if subject is not None else {}


def _event(data: Mapping[str, Any], known: Annotations | None) -> dict[str, Any]:
    """The one annotated event that all the frames shown lie in; for every event when it is shown first and last, if it is."""
    times = [frame["time"] for frame in data.get("frames", [])]
    events = {e.text: [t for t in times if e.start <= t <= e.end] for e in (known.events if known else []) if times}
    whole = [text for text, shown in events.items() if len(shown) == len(times)]
    facts: dict[str, Any] = {"event": whole[0]} if len(whole) == 1 else {}
    for text, shown in events.items():
        facts |= {f"shown.{text}": bool(shown)}
        facts |= {f"first.{text}": min(shown), f"last.{text}": max(shown)} if shown else {}
    return facts


def measured(data: Mapping[str, Any]) -> dict[str, Any]:
    """Plain facts of an operation's ``data``: text read, properties measured, the object's area, the track's motion."""
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
    for found in data.get("objects", [])[:1]:
        x0, y0, x1, y1 = found["box"]
        facts.update({"object.area": found["area"], "object.x": (x0 + x1) / 2, "object.y": (y0 + y1) / 2})
    for track in data.get("tracks", [])[:1]:
        facts.update({f"track.{name}": entry["value"] for name, entry in track["statistics"].items()})
        facts["track.status"] = track["status"]
        (a, b), (c, d) = (_middle(track["boxes"][0]), _middle(track["boxes"][-1]))
        facts["track.dx"], facts["track.dy"] = c - a, d - b
    return facts


# -- what follows ---------------------------------------------------------------------------------------------------

SIDES = (
    (("left", "right"), 0),
    (("upper", "lower"), 1),
    (("above", "below"), 1),
    (("top", "bottom"), 1),
    (("up", "down"), 1),
    (("upwards", "downwards"), 1),
    (("upward", "downward"), 1),
)
"""Words for a negative and a positive difference along x (0) and y (1)."""


MEASURED = (
    (
        r"large|small|area|bigger|cover|size|fit into|part of|per ?cent|share|fill|takes? up",
        "size.area_pixels size.percent",
    ),
    (r"wide|width|left to right", "size.bbox_width"),
    (r"tall|height|higher|top to bottom", "size.bbox_height"),
    (r"round|circle|circular", "shape.circularity"),
    (r"bright|dark|light", "color.brightness"),
    (r"\bway\b|path|travel", "track.path_length"),
    (r"far|displace|distance", "track.displacement"),
    (r"fast|slow|speed|quick", "track.average_speed track.average_velocity"),
    (r"\bleft\b|\bright\b", "object.x"),
    (r"above|below|higher|lower", "object.y"),
)
"""Words of a question and the measures that it is then about: no other measure explains an answer."""


def _asked(question: str, key: str) -> bool:
    """True when the question is about this measure, or about the event that the fact belongs to."""
    kind, _, event = key.partition(".")
    if kind in ("first", "last", "shown"):
        return event in question
    return any(re.search(words, question.casefold()) and key in keys.split() for words, keys in MEASURED)


def conclude(
    question: str, answer: str, before: Sequence[Look], after: Sequence[Look], took: Callable[[str], bool]
) -> tuple[str, str] | None:
    """(what the other looks give in place of ``answer``, by which fact), when it can be said how ``answer`` followed before.

    ``before`` and ``after`` belong together one by one. ``took`` says whether a text is as good as the answer. Ways, in
    order: a fact is the answer itself; the answer names the subject with most or least of a measure; it says whether one has more
    than another, whether an event that the question names is shown, or how many times more; it is a side or a direction. None
    when no way explains the answer, or when the looks give the same again.
    """
    found = _fact(question, answer, before, after, took) or _extreme(question, answer, before, after)
    found = found or _order(question, answer, before, after) or _shown(question, answer, before, after)
    return found or _ratio(question, answer, before, after, took) or _side(answer, before, after)


def _fact(
    question: str, answer: str, before: Sequence[Look], after: Sequence[Look], took: Callable[[str], bool]
) -> tuple[str, str] | None:
    several = len({look.name for look in before if look.name}) > 1
    for old, new in reversed(list(zip(before, after, strict=True))):
        for name, value in old.facts.items():
            if several and name == "label":
                continue  # the answer chooses among the subjects: what it is called is not what was found out
            if _is_number(value) and not name.startswith("attribute.") and not _asked(question, name):
                continue
            said, seen = written(value, answer), written(new.facts.get(name), answer)
            if said is not None and seen and took(said) and canonical(seen) != canonical(said):
                return seen, name
    return None


def _extreme(question: str, answer: str, before: Sequence[Look], after: Sequence[Look]) -> tuple[str, str] | None:
    """Of several subjects the answer names the one with most (or least) of something; elsewhere another has."""
    if len(before) < 2:
        return None
    names = [look.name.removeprefix("the ") for look in before]
    for key in dict.fromkeys(key for look in reversed(before) for key in look.facts):
        rows = [i for i, look in enumerate(before) if _is_number(look.facts.get(key)) and names[i] and _asked(question, key)]
        if len({names[i] for i in rows}) < 2 or any(not _is_number(after[i].facts.get(key)) for i in rows):
            continue
        for best in (max, min):
            was = best(rows, key=lambda i: float(before[i].facts[key]))
            now = best(rows, key=lambda i: float(after[i].facts[key]))
            if _names(answer, names[was]) and not _names(answer, names[now]):
                return re.sub(re.escape(names[was]), names[now], answer, count=1, flags=re.IGNORECASE), key
    return None


def _measures(question: str, before: Sequence[Look], after: Sequence[Look]) -> Iterator[tuple[str, float, float, float, float]]:
    """Measures that the question is about, of the first and the last subject: name, both values before, both after."""
    named = [i for i, look in enumerate(before) if look.name]
    for key in dict.fromkeys(key for look in reversed(before) for key in look.facts):
        rows = [i for i in named if _is_number(before[i].facts.get(key)) and _is_number(after[i].facts.get(key))]
        if _asked(question, key) and len(rows) >= 2 and before[rows[0]].name != before[rows[-1]].name:
            first, last = rows[0], rows[-1]
            values = (before[first].facts[key], before[last].facts[key], after[first].facts[key], after[last].facts[key])
            yield (key, *(float(value) for value in values))  # type: ignore[misc]


def _order(question: str, answer: str, before: Sequence[Look], after: Sequence[Look]) -> tuple[str, str] | None:
    """Yes or no to whether one subject has more than the other: no or yes when the order turns round elsewhere."""
    if canonical(answer) not in ("yes", "no"):
        return None
    for key, a, b, c, d in _measures(question, before, after):
        if (a - b) * (c - d) < 0:
            return ("no" if canonical(answer) == "yes" else "yes"), key
    return None


def _shown(question: str, answer: str, before: Sequence[Look], after: Sequence[Look]) -> tuple[str, str] | None:
    """Yes or no to whether the frames show an event that the question names."""
    named = [key for key in before[-1].facts if key.startswith("shown.") and key.removeprefix("shown.") in question]
    for key in named:
        old, new = before[-1].facts[key], after[-1].facts.get(key)
        if new is not None and new != old and canonical(answer) == ("yes" if old else "no"):
            return ("yes" if new else "no"), key
    return None


def _ratio(
    question: str, answer: str, before: Sequence[Look], after: Sequence[Look], took: Callable[[str], bool]
) -> tuple[str, str] | None:
    """How many times one subject has what the other has: the ratio of what was measured elsewhere."""
    if number(answer) is None:
        return None
    for key, a, b, c, d in _measures(question, before, after):
        for old, new in (((a, b), (c, d)), ((b, a), (d, c))):
            if old[1] and new[1] and took(str(written(old[0] / old[1], answer))):
                return str(written(new[0] / new[1], answer)), key
    return None


def _side(answer: str, before: Sequence[Look], after: Sequence[Look]) -> tuple[str, str] | None:
    """A side word that fits how the first subject lies to the second, or how a track goes; elsewhere the other word fits."""
    words = set(re.findall(r"[a-z]+", canonical(answer)))
    for pair, axis in SIDES:
        if len(words & set(pair)) != 1:
            continue
        for key, old, new in _differences(before, after, axis):
            said = pair[int(old > 0)]
            if said in words and old * new < 0:
                other = pair[int(new > 0)]
                return re.sub(rf"\b{said}\b", other, answer, flags=re.IGNORECASE), key
    return None


def _differences(before: Sequence[Look], after: Sequence[Look], axis: int) -> list[tuple[str, float, float]]:
    key = ("dx", "dy")[axis]
    out = [
        (f"track.{key}", float(old.facts[f"track.{key}"]), float(new.facts.get(f"track.{key}", 0)))
        for old, new in zip(before, after, strict=True)
        if f"track.{key}" in old.facts
    ]
    places = [(old, new) for old, new in zip(before, after, strict=True) if old.place and new.place]
    if len(places) >= 2:
        (a, c), (b, d) = places[0], places[-1]
        middles = [_middle(look.place or WHOLE)[axis] for look in (a, b, c, d)]
        out.append((f"place.{key}", middles[0] - middles[1], middles[2] - middles[3]))
    return out


def written(value: Any, like: str) -> str | None:
    """A fact as the answer would be written: with as many decimals as ``like`` for numbers; None for lists and yes or no."""
    if value is None or isinstance(value, (bool, list, dict)):
        return None
    if isinstance(value, (int, float)):
        if number(like) is None or not math.isfinite(value):
            return None
        digits = len(match[1]) if (match := re.search(r"\.(\d+)", like)) else 0
        return f"{value:.{digits}f}"
    return str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _names(answer: str, name: str) -> bool:
    return bool(name) and re.search(rf"\b{re.escape(canonical(name))}\b", canonical(answer)) is not None


def _middle(box: Sequence[float]) -> tuple[float, float]:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _share(box: Box, of: Box) -> float:
    """Share of ``box`` that lies inside ``of``."""
    width, height = min(box[2], of[2]) - max(box[0], of[0]), min(box[3], of[3]) - max(box[1], of[1])
    return max(width, 0.0) * max(height, 0.0) / max(_area(box), 1e-9)
