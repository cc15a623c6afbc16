"""Tasks about one object in a picture: a detail that zooming reveals, and attributes that are measured."""

from __future__ import annotations

import itertools
from collections import Counter

from pixelis.datasets.synthesis import grounding
from pixelis.datasets.synthesis.sample import FILLS, Form, Sample
from pixelis.records import Box, Demonstration, Region

LARGEST = 0.12
"""Share of the picture beyond which a thing needs no closer look."""
NEAR, WIDE = 1.25, 4.2
"""Sides of a good zoom and of one that is too wide, in those of the thing."""
AIM = 0.008
"""How far a zoom may be aimed beside the middle of a thing, 0..1 of the picture."""
HARD = 0.25
"""Share of samples without a level that zoom twice."""


# Details


def _approach(sample: Sample, region: Region, what: str, last: bool = True, twice: bool | None = None) -> None:
    """Zoom to a thing, where ``twice`` in two steps, the first of which is too wide."""
    target, side = region.media, max(region.box[2] - region.box[0], region.box[3] - region.box[1])
    where = "" if " in the " in what else sample.somewhere(region)
    near = _view(sample, region.box, NEAR * side, AIM)
    if sample.chance(HARD) and WIDE * side < 1 if twice is None else twice:
        wide = _view(sample, region.box, WIDE * side, 0.25 * side)
        target, share = sample.zoom(wide, sample.think("zoom", what, where=where), target, region.box)
        sample.agree(share < FILLS, "not_shown")
        sample.narrator.remark("small", what=what)
        near = grounding.outward(sample.within(target, near), sample.grid)
        think = sample.think("again", what)
    else:
        think = sample.think("zoom", what, where=where)
    _, share = sample.zoom(near, think, target, region.box)
    sample.agree(share >= FILLS, "not_shown")
    if last:
        sample.narrator.remark("clear", what=what)


def _view(sample: Sample, box: Box, side: float, spread: float) -> Box:
    x, y = sample.rng.uniform(-spread, spread, 2)
    view = grounding.around(box, side, sample.grid, (float(x), float(y)))
    if grounding.covered(box, view) < 1:  # aimed too far beside
        view = grounding.around(box, side, sample.grid)
    return view


def _digits(sample: Sample) -> list[Region]:
    """Cards with a digit whose colour tells them apart."""
    colours = Counter(grounding.colour_of(region) for region in sample.regions)
    cards = [r for r in sample.regions if isinstance(r.attributes.get("digit"), str) and grounding.colour_of(r)]
    return [card for card in cards if colours[grounding.colour_of(card)] == 1]


def digit(sample: Sample) -> Demonstration:
    """What is written on a card; at once when the picture shows nothing else, else after one or two zooms."""
    several = len({region.attributes["digit"] for region in _digits(sample)}) > 1
    sample.need(sample.level != "hard" or not several or sample.chance(0.5))
    region = sample.pick(_digits(sample))
    colour, value = grounding.colour_of(region), str(region.attributes["digit"])
    what, question = f"the {colour} frame", sample.ask(colour=colour)
    if sample.level != "simple":
        twice = None if sample.level is None else sample.level == "hard"
        _approach(sample, region, what, twice=twice)
    return sample.done(question, value, sample.conclude(value=value))


def larger_digit(sample: Sample) -> Demonstration:
    """Which of two cards shows the larger digit."""
    sample.need(sample.level in (None, "hard"))
    pairs = list(itertools.permutations(_digits(sample), 2))
    pair = sample.pick([two for two in pairs if two[0].attributes["digit"] != two[1].attributes["digit"]])
    values = [int(str(region.attributes["digit"])) for region in pair]
    a, b = (str(grounding.colour_of(region)) for region in pair)
    question = sample.ask(a=a, b=b)
    for region, colour, value in zip(pair, (a, b), values, strict=True):
        what = f"the {colour} frame"
        _approach(sample, region, what, last=False, twice=False)
        sample.narrator.remark("measured", what=what, quality="digit", value=value)
    best = str(max(values))
    return sample.done(question, best, sample.conclude(best=best))


def _small(sample: Sample, regions: list[Region]) -> list[Region]:
    return [region for region in regions if 0 < grounding.area(region.box) <= LARGEST]


def what_is_there(sample: Sample) -> Demonstration:
    """The label of the only thing in a part of the picture."""
    sample.need(not _digits(sample))
    cells = [grounding.place(region.box) for region in sample.regions]
    alone = [r for r, cell in zip(sample.regions, cells, strict=True) if cells.count(cell) == 1 and _only(sample, r)]
    unsaid = sample.partial | grounding.NAMELESS
    region = sample.pick([r for r in _small(sample, alone) if r.label not in unsaid])
    where = grounding.place(region.box)
    question, what = sample.ask(where=where), f"the thing in the {where}"
    wrong = _wrong_labels(sample, region)
    _approach(sample, region, what)
    think = sample.conclude(thing=grounding.article(grounding.noun(region.label)))
    return sample.done(question, region.label, think, wrong=wrong if sample.chance(0.4) else ())


def _only(sample: Sample, region: Region) -> bool:
    """No other annotated thing reaches into the middle of this one or is in the way."""
    return all(grounding.covered(region.box, other.box) < 0.1 for other in sample.regions if other is not region)


def _wrong_labels(sample: Sample, region: Region) -> list[str]:
    here = dict.fromkeys(r.label for r in sample.regions if r.label != region.label)
    more = [label for label in ("bottle", "chair", "bird", "clock", "shoe", "kite", "lamp", "plate") if label not in here]
    return sample.shuffled([label for label in (*here, *more[:3]) if label != region.label])[:3]


def detail_colour(sample: Sample) -> Demonstration:
    """The colour of a small thing, seen in the zoom."""
    sample.need(not _digits(sample))
    region, value = _coloured(sample, _small(sample, sample.named))
    what = sample.names[region.id]
    question = sample.ask(what=what)
    _approach(sample, region, what)
    others = _wrong_colours(sample, value) if sample.chance(0.3) else ()
    return sample.done(question, value, sample.conclude(value=value), wrong=others)


def _coloured(sample: Sample, regions: list[Region]) -> tuple[Region, str]:
    """One of a few of the things that has a clear colour, which its name does not give away."""
    for region in sample.shuffled([r for r in regions if "digit" not in r.attributes])[:5]:
        value = sample.colour(region)
        if value and value not in sample.names[region.id].split():
            return region, value
    sample.need(False)
    raise AssertionError


def _wrong_colours(sample: Sample, value: str) -> list[str]:
    taken = {value, grounding.SAME_COLOUR.get(value, value)}
    names = ("red", "green", "blue", "yellow", "brown", "black", "white", "orange", "purple")
    return sample.shuffled([name for name in names if name not in taken])[:3]


# Attributes


def colour(sample: Sample) -> Demonstration:
    """The colour of a thing, measured inside of its outline."""
    region, value = _coloured(sample, sample.named)
    what = sample.names[region.id]
    right = sample.chance(0.5)
    claimed = value if right else _wrong_colours(sample, value)[0]
    asked = sample.chance(0.35)
    question = sample.ask("is_colour", what=what, claimed=claimed) if asked else sample.ask(what=what)
    found = sample.outline(region, sample.think("segment", what, where=sample.somewhere(region)))
    name = str(sample.measure(found, region, ["color"], "colour")["color.name"])
    sample.agree(name == grounding.SAME_COLOUR.get(value, value), "measure_differs")
    sample.narrator.remark("measured", what=what, quality="colour", value=name)
    if asked:
        answer = "yes" if right else "no"
        return sample.done(question, answer, sample.conclude(answer, value=value))
    also = [name] if name != value else []
    wrong = _wrong_colours(sample, value) if sample.chance(0.3) else ()
    think = sample.conclude("default" if name == value else "renamed", value=value, measured=name)
    return sample.done(question, value, think, also=also, wrong=wrong)


def quadrant(sample: Sample) -> Demonstration:
    """The quarter of the picture that a thing's middle is in."""
    region = sample.pick([r for r in sample.named if _quarter(r)])
    what, value = sample.names[region.id], str(_quarter(region))
    question = sample.ask(what=what)
    found = sample.outline(region, sample.think("segment", what))
    measured = sample.measure(found, region, ["position"], "position")
    sample.agree(measured["position.quadrant"] == value, "measure_differs")
    x, y = measured["position.normalised"]
    sample.narrator.remark("placed", what=what, x=x, y=y)
    others = [name for name in ("upper left", "upper right", "lower left", "lower right") if name != value]
    think = sample.conclude(value=value)
    return sample.done(question, value, think, wrong=others if sample.chance(0.4) else ())


def _quarter(region: Region) -> str | None:
    x, y = grounding.middle(region.box)
    across, down = grounding.side(x, "left", "right", 0.08), grounding.side(y, "upper", "lower", 0.08)
    return f"{down} {across}" if across and down else None


def wider(sample: Sample) -> Demonstration:
    """Whether a thing is wider than high, in pixels."""
    region = sample.pick(sample.named)
    what, question = sample.names[region.id], sample.ask(what=sample.names[region.id])
    height, width = sample.session.media[region.media].shape[:2]  # type: ignore[union-attr]
    ratio = (region.box[2] - region.box[0]) * width / ((region.box[3] - region.box[1]) * height)
    sample.need(not 0.85 < ratio < 1.18)
    found = sample.outline(region, sample.think("segment", what))
    measured = sample.measure(found, region, ["size"], "size")
    w, h = measured["size.bbox_width"], measured["size.bbox_height"]
    sample.agree((w > h) == (ratio > 1), "measure_differs")
    sample.narrator.remark("measured", what=what, quality="extent", value=f"{w} by {h} pixels")
    answer = "yes" if ratio > 1 else "no"
    return sample.done(question, answer, sample.conclude(answer))


def share(sample: Sample) -> Demonstration:
    """How much of the picture a thing covers, in per cent."""
    region = sample.pick([r for r in sample.named if r.mask is not None or r.outline])
    what, question = sample.names[region.id], sample.ask(what=sample.names[region.id])
    truth = grounding.outline(region, *sample.session.media[region.media].shape[:2])  # type: ignore[union-attr]
    # Outlines that are found are seldom as exact as this takes: asked less often.
    sample.need(truth is not None and truth.mean() > 0.005 and sample.chance(0.3))
    assert truth is not None
    found = sample.outline(region, sample.think("segment", what))
    value = 100 * sample.measure(found, region, ["size"], "relative size")["size.relative_size"]
    exact = 100 * float(truth.mean())
    sample.agree(abs(value - exact) <= 0.045 * exact, "measure_differs")
    sample.narrator.remark("measured", what=what, quality="relative size", value=f"{value:.2f} %")
    answer = f"{value:.2f}"
    return sample.done(question, answer, sample.conclude(value=answer), scorer="numeric_band", truth=f"{exact:.4g}")


def corners(sample: Sample) -> Demonstration:
    """How many corners a drawn shape has."""
    counts = {"triangle": 3, "rectangle": 4, "square": 4, "pentagon": 5, "hexagon": 6, "circle": 0}
    region = sample.pick([r for r in sample.regions if r.label in counts and grounding.colour_of(r)])
    same = [r for r in sample.regions if grounding.colour_of(r) == grounding.colour_of(region)]
    sample.need(len(same) == 1)
    what, value = f"the {grounding.colour_of(region)} shape", counts[region.label]
    sample.names[region.id] = what
    question = sample.ask(what=what)
    found = sample.outline(region, sample.think("segment", what, where=sample.somewhere(region)))
    measured = sample.measure(found, region, ["shape"], "shape")
    sample.agree(measured["shape.corners"] == value, "measure_differs")
    sample.narrator.remark("measured", what=what, quality="number of corners", value=value)
    return sample.done(question, str(value), sample.conclude(value=value), scorer="count")


DETAILS: dict[str, Form] = {
    "digit": digit,
    "larger_digit": larger_digit,
    "what_is_there": what_is_there,
    "detail_colour": detail_colour,
}
ATTRIBUTES: dict[str, Form] = {"colour": colour, "quadrant": quadrant, "wider": wider, "share": share, "corners": corners}
