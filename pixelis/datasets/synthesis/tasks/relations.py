"""Tasks about several objects in a picture: which is larger, how many there are, how they relate in space."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pixelis.datasets.synthesis import grounding
from pixelis.datasets.synthesis.sample import Form, Sample
from pixelis.operations import shapes
from pixelis.records import Demonstration, Region

CLEAR = 1.15
"""Ratio from which on a difference of sizes can be asked about; the annotated and the measured one must both reach HALF_CLEAR."""
HALF_CLEAR = 1.05
CLEAR_ROUND = 0.06
"""Difference of circularity, 0..1, from which on it can be asked about."""
MOST = 8
"""Most things that are counted one by one."""
APART = 0.06
"""How much farther along one side of the picture a thing must be to lie beside another."""

RELATION = {
    "left": ("to the left of", "to the right of"),
    "right": ("to the right of", "to the left of"),
    "up": ("above", "below"),
    "down": ("below", "above"),
}
"""A direction's preposition and that of its opposite."""


# Geometry


def _truth(sample: Sample, region: Region, name: str) -> float | None:
    """A measure of an annotated thing in pixels; None where only a box is known and it takes an outline."""
    height, width = sample.session.media[region.media].shape[:2]  # type: ignore[union-attr]
    if name == "size.bbox_width":
        return (region.box[2] - region.box[0]) * width
    if name == "size.bbox_height":
        return (region.box[3] - region.box[1]) * height
    mask = grounding.outline(region, height, width)
    if mask is None:
        return None
    if name == "size.area_pixels":
        return float(np.count_nonzero(mask))
    rows, columns = np.nonzero(mask.any(1))[0], np.nonzero(mask.any(0))[0]
    found = shapes.measure(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
    return float(found["circularity"] or 0.0)


def _pair(sample: Sample, name: str, clear: Callable[[float, float], bool]) -> tuple[list[Region], list[float]]:
    """Two named things that differ clearly in a measure, in a random order, and their values."""
    sample.need(len(sample.named) >= 2)
    for one, other in itertools.islice(itertools.combinations(sample.shuffled(sample.named), 2), 6):
        values = [_truth(sample, region, name) for region in (one, other)]
        known = [value for value in values if value is not None]
        if len(known) == 2 and clear(*known):
            return [one, other], known
    sample.need(False)
    raise AssertionError


def _clear_ratio(a: float, b: float) -> bool:
    return max(a, b) >= CLEAR * min(a, b) > 0


def _measured(sample: Sample, pair: Sequence[Region], name: str, quality: str, unit: str) -> list[float]:
    """Segment and measure one thing after the other; the measured values."""
    values = []
    for region in pair:
        what = sample.names[region.id]
        found = sample.outline(region, sample.think("segment", what, where=sample.somewhere(region)))
        value = sample.measure(found, region, [name.partition(".")[0]], quality)[name]
        shown = f"{value:.2f}" if isinstance(value, float) else f"{value}"
        sample.narrator.remark("measured", what=what, quality=quality, value=f"{shown} {unit}".strip())
        values.append(float(value))
    return values


def _compared(name: str, quality: str, unit: str, most: bool = True) -> Form:
    """Which of two things has more (or less) of a measure."""

    def make(sample: Sample) -> Demonstration:
        rounder = name == "shape.circularity"
        pair, truth = _pair(sample, name, (lambda a, b: abs(a - b) >= CLEAR_ROUND) if rounder else _clear_ratio)
        a, b = (sample.names[region.id] for region in pair)
        question = sample.ask(a=a, b=b)
        values = _measured(sample, pair, name, quality, unit)
        ratio = max(values) / max(min(values), 1e-9)
        sample.agree((values[0] > values[1]) == (truth[0] > truth[1]), "measure_differs")
        sample.agree(rounder or ratio >= HALF_CLEAR, "measure_differs")
        best, rest = (a, b) if (truth[0] > truth[1]) == most else (b, a)
        think = sample.conclude(best=best, rest=rest)
        return sample.done(question, best, think, wrong=[rest] if sample.chance(0.4) else (), also=[best.removeprefix("the ")])

    return make


def is_larger(sample: Sample) -> Demonstration:
    """Whether one thing has a larger area than another."""
    pair, truth = _pair(sample, "size.area_pixels", _clear_ratio)
    a, b = (sample.names[region.id] for region in pair)
    question = sample.ask(a=a, b=b)
    values = _measured(sample, pair, "size.area_pixels", "area", "pixels")
    sample.agree((values[0] > values[1]) == (truth[0] > truth[1]), "measure_differs")
    answer = "yes" if truth[0] > truth[1] else "no"
    return sample.done(question, answer, sample.conclude(answer))


def ratio(sample: Sample) -> Demonstration:
    """How many times larger the area of one thing is than that of another."""
    sample.need(sample.chance(0.4))  # outlines that are found are seldom as exact as this takes
    pair, truth = _pair(sample, "size.area_pixels", lambda a, b: 1.3 * min(a, b) <= max(a, b) <= 9 * min(a, b))
    if truth[0] < truth[1]:
        pair, truth = pair[::-1], truth[::-1]
    a, b = (sample.names[region.id] for region in pair)
    question, exact = sample.ask(a=a, b=b), truth[0] / truth[1]
    values = _measured(sample, pair, "size.area_pixels", "area", "pixels")
    sample.agree(abs(values[0] / values[1] - exact) <= 0.045 * exact, "measure_differs")
    answer = f"{values[0] / values[1]:.2f}"
    think = sample.conclude(dividend=values[0], divisor=values[1], value=answer)
    return sample.done(question, answer, think, scorer="numeric_band", truth=f"{exact:.4g}")


# Counting


def _groups(sample: Sample) -> dict[str, list[Region]]:
    """What can be counted: things of one label, and of one label and colour where there are several colours."""
    unsure = sample.partial | grounding.NAMELESS
    groups: dict[str, list[Region]] = {}
    for region in sample.regions:
        groups.setdefault(grounding.noun(region.label), []).append(region)
    groups = {name: members for name, members in groups.items() if unsure.isdisjoint({name, *(r.label for r in members)})}
    coloured: dict[str, list[Region]] = {}
    for label, members in groups.items():
        colours = Counter(grounding.colour_of(region) for region in members)
        for colour in colours:
            if colour and len(colours) > 1 and None not in colours:
                coloured[f"{colour} {label}"] = [r for r in members if grounding.colour_of(r) == colour]
    both = groups.keys() & coloured.keys()  # what is labelled "red cup" and cups that are red: neither is all of them
    return {name: members for name, members in {**groups, **coloured}.items() if name not in both}


def _counted(sample: Sample) -> tuple[str, int, Callable[[], None]]:
    """What is counted, how many there are, and the turns that find them one by one from the left."""
    groups = _groups(sample)
    names = [name for name, members in groups.items() if len(members) <= MOST]
    weights = [min(len(groups[name]), 4) for name in names]
    name = sample.pick([name for name, weight in zip(names, weights, strict=True) for _ in range(weight)])
    members = sorted(groups[name], key=lambda region: region.box[0])

    def find() -> None:
        seen: list[Mapping[str, Any]] = []
        for number, region in enumerate(members, 1):
            cell = grounding.place(region.box)
            what = f"the {name} in the {cell}"
            found = sample.outline(region, sample.think("segment", what))
            sample.agree(all(found["id"] != other["id"] for other in seen), "outline_differs")
            seen.append(found)
            sample.narrator.remark("counted", number=number)

    return name, len(members), find


def count(sample: Sample) -> Demonstration:
    """How many things of a kind there are: each is outlined."""
    name, number, find = _counted(sample)
    question = sample.ask(things=grounding.plural(name))
    find()
    think = sample.conclude("one" if number == 1 else "several", number=number)
    return sample.done(question, str(number), think, scorer="count")


def more_than(sample: Sample) -> Demonstration:
    """Whether there are more than a number of things of a kind."""
    name, number, find = _counted(sample)
    yes = number > 1 and sample.chance(0.5)
    bound = int(sample.rng.integers(1, number)) if yes else number + int(sample.rng.integers(0, 2))
    question = sample.ask(things=name if bound == 1 else grounding.plural(name), bound=bound)
    find()
    answer = "yes" if yes else "no"
    return sample.done(question, answer, sample.conclude(answer, number=number))


def count_choice(sample: Sample) -> Demonstration:
    """How many things of a kind there are, with numbers to choose from."""
    name, number, find = _counted(sample)
    question = sample.ask(things=grounding.plural(name))
    find()
    near = [str(n) for n in range(max(0, number - 2), number + 4) if n != number]
    think = sample.conclude("one" if number == 1 else "several", number=number)
    return sample.done(question, str(number), think, wrong=sample.shuffled(near)[:3])


# Relations


def _direction(a: Sequence[float], b: Sequence[float], width: int, height: int) -> str | None:
    """Where a box lies from another, clearly: along one axis beside it and not more along the other."""
    (x, y), (u, v) = grounding.middle(a), grounding.middle(b)
    dx, dy = (x - u) * width, (y - v) * height
    name = grounding.heading(dx, dy)
    beside = {"left": a[2] < b[2] and a[0] < b[0], "right": a[0] > b[0] and a[2] > b[2]}
    beside |= {"up": a[1] < b[1] and a[3] < b[3], "down": a[3] > b[3] and a[1] > b[1]}
    far = max(abs(dx) / width, abs(dy) / height) >= APART
    return name if name and far and beside[name] else None


def _placed(sample: Sample) -> tuple[list[Region], str]:
    """Two named things and where the first lies from the second."""
    sample.need(len(sample.named) >= 2)
    for one, other in itertools.islice(itertools.permutations(sample.shuffled(sample.named), 2), 12):
        size = sample.session.media[one.media].shape[1::-1]  # type: ignore[union-attr]
        if name := _direction(one.box, other.box, *size):
            return [one, other], name
    sample.need(False)
    raise AssertionError


def _look_at_both(sample: Sample, pair: Sequence[Region], direction: str, measured: bool) -> None:
    """Outline both and compare their places; ``measure_differs`` when they lie otherwise."""
    boxes, names = [], [sample.names[region.id] for region in pair]
    for region, what in zip(pair, names, strict=True):
        found = sample.outline(region, sample.think("segment", what))
        if measured:
            sample.measure(found, region, ["position"], "position")
        x, y = grounding.middle(found["box"])
        sample.narrator.remark("placed", what=what, x=x, y=y)
        boxes.append(found["box"])
    size = sample.session.media[pair[0].media].shape[1::-1]  # type: ignore[union-attr]
    sample.agree(_direction(boxes[0], boxes[1], *size) == direction, "measure_differs")


def where(sample: Sample) -> Demonstration:
    """On which side of another a thing lies."""
    pair, direction = _placed(sample)
    a, b = (sample.names[region.id] for region in pair)
    question = sample.ask(a=a, b=b)
    _look_at_both(sample, pair, direction, sample.chance(0.5))
    said = RELATION[direction][0]
    think = sample.conclude(relation=said)
    short = {"up": "above", "down": "below"}.get(direction, direction)
    others = [words[0] for name, words in RELATION.items() if name != direction]
    wrong = others if sample.chance(0.4) else ()
    return sample.done(question, said if wrong else short, think, wrong=wrong, also=[] if wrong else [said, f"{said} {b}"])


def is_there(sample: Sample) -> Demonstration:
    """Whether a thing lies on a side of another."""
    pair, direction = _placed(sample)
    a, b = (sample.names[region.id] for region in pair)
    right = sample.chance(0.5)
    question = sample.ask(a=a, b=b, relation=RELATION[direction][0 if right else 1])
    _look_at_both(sample, pair, direction, sample.chance(0.5))
    think = sample.conclude(truth=RELATION[direction][0])
    return sample.done(question, "yes" if right else "no", think)


def nearer(sample: Sample) -> Demonstration:
    """Which of two things is closer to a third, by their middles."""
    sample.need(len(sample.named) >= 3)
    a, b, c = sample.shuffled(sample.named)[:3]
    size = sample.session.media[a.media].shape[1::-1]  # type: ignore[union-attr]

    def apart(one: Sequence[float], other: Sequence[float]) -> float:
        return float(np.linalg.norm((np.asarray(grounding.middle(one)) - grounding.middle(other)) * size))

    truth = apart(a.box, c.box), apart(b.box, c.box)
    sample.need(max(truth) >= 1.25 * min(truth) > 0)
    names = [sample.names[region.id] for region in (a, b, c)]
    question = sample.ask(a=names[0], b=names[1], c=names[2])
    boxes = []
    for region, what in zip((c, a, b), (names[2], *names[:2]), strict=True):
        found = sample.outline(region, sample.think("segment", what))
        x, y = grounding.middle(found["box"])
        sample.narrator.remark("placed", what=what, x=x, y=y)
        boxes.append(found["box"])
    found_apart = apart(boxes[1], boxes[0]), apart(boxes[2], boxes[0])
    sample.agree((found_apart[0] < found_apart[1]) == (truth[0] < truth[1]), "measure_differs")
    best, rest = names[:2] if truth[0] < truth[1] else names[1::-1]
    near, far = (round(distance) for distance in sorted(found_apart))
    think = sample.conclude(best=best, near=near, rest=rest, far=far)
    return sample.done(question, best, think, wrong=[rest] if sample.chance(0.4) else (), also=[best.removeprefix("the ")])


def predicate(sample: Sample) -> Demonstration:
    """An annotated relation between two things, seen in a view that holds both."""
    by_id = {region.id: region for region in sample.named}
    pairs = Counter((r.subject, r.object) for r in sample.notes.relations)
    told = [r for r in sample.notes.relations if pairs[r.subject, r.object] == 1 and {r.subject, r.object} <= set(by_id)]
    relation = sample.pick(told)
    one, other = by_id[relation.subject], by_id[relation.object]
    a, b = sample.names[one.id], sample.names[other.id]
    boxes = np.asarray([one.box, other.box])
    union = (*boxes[:, :2].min(0).tolist(), *boxes[:, 2:].max(0).tolist())
    question = sample.ask(a=a, b=b)
    both = f"{a} and {b}"
    view = grounding.outward(grounding.grown(union, 0.1), sample.grid)
    sample.zoom(view, sample.think("zoom", both), one.media, union)
    sample.narrator.remark("clear", what=b)
    return sample.done(question, relation.predicate, sample.conclude(predicate=relation.predicate))


GEOMETRY: dict[str, Form] = {
    "larger": _compared("size.area_pixels", "area", "pixels"),
    "smaller": _compared("size.area_pixels", "area", "pixels", most=False),
    "wider": _compared("size.bbox_width", "width", "pixels"),
    "taller": _compared("size.bbox_height", "height", "pixels"),
    "rounder": _compared("shape.circularity", "circularity", ""),
    "is_larger": is_larger,
    "ratio": ratio,
}
COUNTING: dict[str, Form] = {"count": count, "more_than": more_than, "count_choice": count_choice}
RELATIONS: dict[str, Form] = {"where": where, "is_there": is_there, "nearer": nearer, "predicate": predicate}
