"""Tasks about several objects in a picture: comparisons of measures, counting, and relations in space."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from pixelis.datasets.synthesis import geometry, naming
from pixelis.datasets.synthesis.sample import MIN_BOX_IOU, Form, Sample, forms
from pixelis.operations import shapes
from pixelis.records import Demonstration, Region
from pixelis.rewards.scorers import box_iou

MIN_RATIO = 1.15
"""Ratio of annotated sizes from which on their difference can be asked for."""
MIN_CIRCULARITY_DIFFERENCE = 0.06
"""Difference of circularity, 0..1, from which on it can be asked for."""
MAX_COUNT = 8
MIN_LINE, MIN_ANGLE = 0.15, 30.0
"""Shortest measured line, relative to the longer side of the picture, and smallest angle in degrees."""
MIN_DISTANCE = 0.06
"""Distance along one side of the picture, 0..1, from which on a thing lies beside another."""

OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}


# Geometry


def _true_value(sample: Sample, region: Region, measure: str) -> float | None:
    """Annotated measure in pixels; None if it requires a mask and only a box is annotated."""
    height, width = sample.picture(region).shape[:2]
    if measure == "size.bbox_width":
        return (region.box[2] - region.box[0]) * width
    if measure == "size.bbox_height":
        return (region.box[3] - region.box[1]) * height
    mask = sample.mask(region)
    if mask is None:
        return None
    if measure == "size.area_pixels":
        return float(np.count_nonzero(mask))
    rows, columns = np.nonzero(mask.any(1))[0], np.nonzero(mask.any(0))[0]
    values = shapes.measure(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
    return float(values["circularity"] or 0.0)


Clear = Callable[[float, float], bool]
"""Whether two annotated values differ clearly."""


def _clear_ratio(a: float, b: float) -> bool:
    return max(a, b) >= MIN_RATIO * min(a, b) > 0


def _clear_circularity(a: float, b: float) -> bool:
    return abs(a - b) >= MIN_CIRCULARITY_DIFFERENCE


def _pick_pair(sample: Sample, measure: str, clear: Clear) -> tuple[list[Region], list[float]]:
    """Two named things in random order, and their annotated values of a measure, which differ clearly."""
    sample.require(len(sample.named) >= 2)
    for pair in itertools.islice(itertools.combinations(sample.shuffled(sample.named), 2), 6):
        values = [value for region in pair if (value := _true_value(sample, region, measure)) is not None]
        if len(values) == 2 and clear(*values):
            return list(pair), values
    raise sample.unsuitable()


def _ask(sample: Sample, things: Sequence[Region]) -> list[str]:
    names = [sample.names[region.id] for region in things]
    sample.ask(**dict(zip("abc", names, strict=False)))
    return names


def _measure_pair(
    sample: Sample, pair: Sequence[Region], truth: Sequence[float], measure: str, quality: str, unit: str
) -> list[float]:
    """Measure both things; ``measure_differs`` if the values have another order than the annotated ones."""
    values = []
    for region in pair:
        value = sample.measure(region, measure.partition(".")[0], quality, locate=True)[measure]
        text = f"{value:.2f}" if isinstance(value, float) else f"{value}"
        sample.narrator.remark(
            "measured", what=sample.names[region.id], quality=quality, value=f"{text} {unit}".strip()
        )
        values.append(float(value))
    sample.check((values[0] > values[1]) == (truth[0] > truth[1]), "measure_differs")
    return values


def _comparison(measure: str, quality: str, unit: str, largest: bool = True) -> Form:
    def compare(sample: Sample) -> Demonstration:
        clear = _clear_circularity if measure == "shape.circularity" else _clear_ratio
        pair, truth = _pick_pair(sample, measure, clear)
        a, b = _ask(sample, pair)
        _measure_pair(sample, pair, truth, measure, quality, unit)
        return sample.done_better(*((a, b) if (truth[0] > truth[1]) == largest else (b, a)))

    return compare


def is_larger(sample: Sample) -> Demonstration:
    pair, truth = _pick_pair(sample, "size.area_pixels", _clear_ratio)
    _ask(sample, pair)
    _measure_pair(sample, pair, truth, "size.area_pixels", "area", "pixels")
    return sample.done_yes_no(truth[0] > truth[1])


def ratio(sample: Sample) -> Demonstration:
    sample.require(sample.chance(0.4))  # segmented outlines are seldom as exact as this form requires
    pair, truth = _pick_pair(
        sample, "size.area_pixels", lambda a, b: 1.3 * min(a, b) <= max(a, b) <= 9 * min(a, b)
    )
    if truth[0] < truth[1]:
        pair, truth = pair[::-1], truth[::-1]
    _ask(sample, pair)
    dividend, divisor = _measure_pair(sample, pair, truth, "size.area_pixels", "area", "pixels")
    return sample.done_measured(
        f"{dividend / divisor:.2f}", f"{truth[0] / truth[1]:.4g}", dividend=dividend, divisor=divisor
    )


# Counting


def _groups(sample: Sample) -> dict[str, list[Region]]:
    """The kinds of things that can be counted: of one label, and of one of several colours of a label."""
    excluded = sample.partial | naming.GENERIC_LABELS
    groups: dict[str, list[Region]] = {}
    for region in sample.regions:
        groups.setdefault(naming.noun(region.label), []).append(region)
    groups = {
        name: members
        for name, members in groups.items()
        if excluded.isdisjoint({name, *(r.label for r in members)})
    }
    coloured: dict[str, list[Region]] = {}
    for label, members in groups.items():
        colours = Counter(naming.colour_of(region) for region in members)
        for colour in colours:
            if colour and len(colours) > 1 and None not in colours:
                coloured[f"{colour} {label}"] = [r for r in members if naming.colour_of(r) == colour]
    # Things labelled "red cup" and cups that are red: neither is all of them
    ambiguous = groups.keys() & coloured.keys()
    return {name: members for name, members in {**groups, **coloured}.items() if name not in ambiguous}


def _pick_group(sample: Sample) -> tuple[str, list[Region]]:
    """A kind of thing, larger groups more often, and its members from left to right."""
    groups = {name: members for name, members in _groups(sample).items() if len(members) <= MAX_COUNT}
    name = sample.pick([name for name, members in groups.items() for _ in range(min(len(members), 4))])
    return name, sorted(groups[name], key=lambda region: region.box[0])


def _count(sample: Sample, name: str, members: Sequence[Region]) -> None:
    ids = set[str]()
    for number, region in enumerate(members, 1):
        segmented = sample.segment(region, f"the {name} in the {naming.position(region.box)}")
        sample.check(segmented["id"] not in ids, "outline_differs")
        ids.add(segmented["id"])
        sample.narrator.remark("counted", number=number)


def count(sample: Sample) -> Demonstration:
    return _count_group(sample, *_pick_group(sample))


def _count_group(sample: Sample, name: str, members: Sequence[Region]) -> Demonstration:
    sample.ask(things=naming.plural(name))
    _count(sample, name, members)
    return sample.done_count(len(members))


def another_count(sample: Sample) -> Demonstration:
    name, members = _pick_group(sample)
    other, others = _pick_group(sample)
    sample.require(name != other)
    sample.follow("counting", "count", lambda earlier: _count_group(earlier, name, members))
    return _count_group(sample, other, others)


def more_than(sample: Sample) -> Demonstration:
    name, members = _pick_group(sample)
    number = len(members)
    more = number > 1 and sample.chance(0.5)
    bound = int(sample.rng.integers(1, number)) if more else number + int(sample.rng.integers(0, 2))
    sample.ask(things=name if bound == 1 else naming.plural(name), bound=bound)
    _count(sample, name, members)
    return sample.done_yes_no(more, number=number)


def count_choice(sample: Sample) -> Demonstration:
    name, members = _pick_group(sample)
    number = len(members)
    sample.ask(things=naming.plural(name))
    _count(sample, name, members)
    wrong = sample.shuffled([str(n) for n in range(max(0, number - 2), number + 4) if n != number])[:3]
    return sample.done_count(number, wrong=wrong)


# Relations


def _direction(sample: Sample, pair: Sequence[Region], a: Sequence[float], b: Sequence[float]) -> str | None:
    """Where box ``a`` clearly lies from ``b``: beside it on one axis, closer on the other."""
    height, width = sample.picture(pair[0]).shape[:2]
    (x, y), (u, v) = geometry.middle(a), geometry.middle(b)
    name = geometry.heading((x - u) * width, (y - v) * height)
    beside = {"left": a[2] < b[2] and a[0] < b[0], "right": a[0] > b[0] and a[2] > b[2]}
    beside |= {"up": a[1] < b[1] and a[3] < b[3], "down": a[3] > b[3] and a[1] > b[1]}
    return name if name and max(abs(x - u), abs(y - v)) >= MIN_DISTANCE and beside[name] else None


def _pick_neighbours(sample: Sample) -> tuple[list[Region], str]:
    sample.require(len(sample.named) >= 2)
    for pair in itertools.islice(itertools.permutations(sample.shuffled(sample.named), 2), 12):
        if direction := _direction(sample, pair, pair[0].box, pair[1].box):
            return list(pair), direction
    raise sample.unsuitable()


def _locate(sample: Sample, region: Region, measured: bool = False) -> Sequence[float]:
    segmented = sample.segment(region)
    if measured:
        sample.properties(segmented, region, "position", "position")
    x, y = geometry.middle(segmented["box"])
    sample.narrator.remark("placed", what=sample.names[region.id], x=x, y=y)
    return segmented["box"]


def _check_direction(sample: Sample, pair: Sequence[Region], direction: str) -> None:
    """Segment both things; ``measure_differs`` if they lie otherwise than annotated."""
    measured = sample.chance(0.5)
    a, b = (_locate(sample, region, measured) for region in pair)
    sample.check(_direction(sample, pair, a, b) == direction, "measure_differs")


def where(sample: Sample) -> Demonstration:
    pair, direction = _pick_neighbours(sample)
    _, b = _ask(sample, pair)
    _check_direction(sample, pair, direction)
    relation = naming.PREPOSITIONS[direction]
    if sample.chance(0.4):
        wrong = [preposition for name, preposition in naming.PREPOSITIONS.items() if name != direction]
        return sample.done(relation, wrong=wrong, relation=relation)
    short = {"up": "above", "down": "below"}.get(direction, direction)
    return sample.done(short, also=[relation, f"{relation} {b}"], relation=relation)


def is_there(sample: Sample) -> Demonstration:
    pair, direction = _pick_neighbours(sample)
    a, b = (sample.names[region.id] for region in pair)
    right = sample.chance(0.5)
    claimed = naming.PREPOSITIONS[direction if right else OPPOSITE[direction]]
    sample.ask(a=a, b=b, relation=claimed)
    _check_direction(sample, pair, direction)
    return sample.done("yes" if right else "no", true_relation=naming.PREPOSITIONS[direction])


def nearer(sample: Sample) -> Demonstration:
    sample.require(len(sample.named) >= 3)
    a, b, c = things = sample.shuffled(sample.named)[:3]
    size = sample.picture(a).shape[1::-1]

    def distance(one: Sequence[float], other: Sequence[float]) -> float:
        return float(np.linalg.norm((np.asarray(geometry.middle(one)) - geometry.middle(other)) * size))

    truth = distance(a.box, c.box), distance(b.box, c.box)
    sample.require(max(truth) >= 1.25 * min(truth) > 0)
    names = _ask(sample, things)
    box_c, box_a, box_b = (_locate(sample, region) for region in (c, a, b))
    measured = distance(box_a, box_c), distance(box_b, box_c)
    sample.check((measured[0] < measured[1]) == (truth[0] < truth[1]), "measure_differs")
    best, rest = names[:2] if truth[0] < truth[1] else names[1::-1]
    return sample.done_better(best, rest, near=round(min(measured)), far=round(max(measured)))


def predicate(sample: Sample) -> Demonstration:
    by_id = {region.id: region for region in sample.named}
    pairs = Counter((r.subject, r.object) for r in sample.annotations.relations)
    relation = sample.pick(
        [
            r
            for r in sample.annotations.relations
            if pairs[r.subject, r.object] == 1 and {r.subject, r.object} <= by_id.keys()
        ]
    )
    pair = by_id[relation.subject], by_id[relation.object]
    a, b = _ask(sample, pair)
    boxes = np.asarray([region.box for region in pair])
    union = (*boxes[:, :2].min(0).tolist(), *boxes[:, 2:].max(0).tolist())
    view = geometry.outward(geometry.grown(union, 0.1), sample.grid)
    sample.zoom(view, sample.think("zoom", f"{a} and {b}"), pair[0].media, union)
    sample.narrator.remark("clear", what=b)
    return sample.done(relation.predicate, predicate=relation.predicate)


# Measuring between points, marking, comparing pictures


def _centres(sample: Sample, regions: Sequence[Region]) -> list[tuple[float, float]]:
    """Segment the things; the middles of the objects as written in calls."""
    boxes = [_locate(sample, region) for region in regions]
    return [(round(x, 3), round(y, 3)) for x, y in map(geometry.middle, boxes)]


def _pick_points(sample: Sample, number: int) -> tuple[list[Region], list[np.ndarray], float]:
    """Some named things, their middles in pixels, and the shortest line between these that is measured."""
    things = sample.shuffled(sample.named)[:number]
    sample.require(len(things) == number)
    shape = sample.picture(things[0]).shape
    return things, [np.asarray(geometry.middle(r.box)) * shape[1::-1] for r in things], MIN_LINE * max(shape)


def distance(sample: Sample) -> Demonstration:
    pair, (start, end), shortest = _pick_points(sample, 2)
    truth = float(np.linalg.norm(start - end))
    sample.require(truth >= shortest)
    a, b = _ask(sample, pair)
    first, second = _centres(sample, pair)
    think = sample.think("length", f"{a} and {b}")
    data = sample.session.call(think, "measure", target=pair[0].media, point=first, end_point=second).data
    value = f"{data['length']:.0f}"
    sample.narrator.remark("length", value=value)
    return sample.done_measured(value, f"{truth:.1f}")


def angle(sample: Sample) -> Demonstration:
    things, (a, b, c), shortest = _pick_points(sample, 3)
    arms = a - c, b - c
    lengths = [float(np.linalg.norm(arm)) for arm in arms]
    sample.require(min(lengths) >= shortest)
    truth = float(np.degrees(np.arccos(np.clip(np.dot(*arms) / (lengths[0] * lengths[1]), -1, 1))))
    sample.require(MIN_ANGLE <= truth <= 180 - MIN_ANGLE / 2)
    *_, corner = _ask(sample, things)
    first, second, vertex = _centres(sample, things)
    data = sample.session.call(
        sample.think("angle", corner),
        "measure",
        target=things[0].media,
        point=first,
        end_point=second,
        vertex=vertex,
    ).data
    value = f"{data['angle']:.1f}"
    sample.narrator.remark("angle", what=corner, value=value)
    return sample.done_measured(value, f"{truth:.2f}")


def marked(sample: Sample) -> Demonstration:
    name, members = _pick_group(sample)
    things = naming.plural(name)
    sample.ask(things=things)
    boxes = [list(geometry.outward(region.box, sample.grid)) for region in members]
    think = sample.think("mark", things)
    number = len(sample.session.call(think, "mark", target=members[0].media, boxes=boxes).data["boxes"])
    sample.narrator.remark("marked", number=number)
    return sample.done_count(number)


def found(sample: Sample) -> Demonstration:
    """The number of things of a kind that a detector finds, each of which must be an annotated one."""
    name, members = _pick_group(sample)
    sample.ask(things=naming.plural(name))
    think = sample.think("find", naming.plural(name))
    data = sample.session.call(think, "find", target=members[0].media, text=name).data
    overlaps = [[box_iou(o["box"], region.box) for region in members] for o in data["objects"]]
    one_each = sorted(row.index(max(row)) for row in overlaps) == list(range(len(members)))
    sample.check(one_each and min(map(max, overlaps)) >= MIN_BOX_IOU, "outline_differs")
    sample.narrator.remark("found", number=len(overlaps))
    return sample.done_count(len(overlaps))


def _compare_pictures(sample: Sample) -> tuple[list[Region], list[Sequence[float]]]:
    """Compare the two pictures; the changed thing in the first one, if any, and the places that differ."""
    ids = [item.id for item in sample.question.media if item.kind == "image"]
    sample.require(len(ids) == 2)
    first, second = ([r for r in sample.annotations.regions if r.media == name] for name in ids)
    sample.require(first and [r.box for r in first] == [r.box for r in second])
    changed = [
        a for a, b in zip(first, second, strict=True) if (a.label, a.attributes) != (b.label, b.attributes)
    ]
    sample.require(len(changed) <= 1 and (changed or sample.form == "same"))
    sample.ask()
    think = sample.think("compare", "the two pictures")
    boxes = sample.session.call(think, "compare", target=ids[0], other=ids[1]).data["boxes"]
    shown = [geometry.covered(boxes[0], geometry.grown(r.box, 0.05)) > 0.9 for r in changed if boxes]
    sample.check(shown == [True] if changed else not boxes, "measure_differs")
    return changed, boxes


def same(sample: Sample) -> Demonstration:
    changed, boxes = _compare_pictures(sample)
    if not changed:
        sample.narrator.remark("alike")
        return sample.done("yes", "yes")
    where = naming.position(boxes[0])
    sample.narrator.remark("differ", where=where)
    return sample.done("no", "no", where=where)


def difference(sample: Sample) -> Demonstration:
    (changed,), boxes = _compare_pictures(sample)
    where = naming.position(changed.box)
    sample.check(naming.position(boxes[0]) == where, "measure_differs")
    sample.narrator.remark("differ", where=where)
    others = dict.fromkeys(naming.position(region.box) for region in sample.regions)
    wrong = sample.shuffled([cell for cell in others if cell != where])[:3]
    return sample.done(where, wrong=wrong if sample.chance(0.5) else (), where=where)


MEASUREMENT = forms(distance, angle)
MARKING = forms(marked)
FINDING = forms(found)
COMPARISON = forms(same, difference)
GEOMETRY = forms(
    is_larger,
    ratio,
    larger=_comparison("size.area_pixels", "area", "pixels"),
    smaller=_comparison("size.area_pixels", "area", "pixels", largest=False),
    wider=_comparison("size.bbox_width", "width", "pixels"),
    taller=_comparison("size.bbox_height", "height", "pixels"),
    rounder=_comparison("shape.circularity", "circularity", ""),
)
COUNTING = forms(count, more_than, count_choice)
FOLLOW_UPS = forms(another_count)
RELATIONS = forms(where, is_there, nearer, predicate)
