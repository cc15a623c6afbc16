"""Tasks about one object in a picture: details that a zoom reveals, and attributes that are measured."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from pixelis.datasets.synthesis import geometry, naming
from pixelis.datasets.synthesis.sample import MIN_VIEW_SHARE, Sample, forms
from pixelis.records import Box, Demonstration, Region

MAX_AREA = 0.12
"""Share of the picture up to which a thing needs a closer look."""
NEAR, WIDE = 1.25, 4.2
"""Side of a good zoom and of one that is too wide, relative to the thing's longer side."""
AIM_SPREAD = 0.008
"""How far a zoom may miss the middle of a thing, 0..1 of the picture."""
COMMON_LABELS = ("bottle", "chair", "bird", "clock", "shoe", "kite", "lamp", "plate")
"""Wrong answers where the picture has too few other labels."""
CORNERS = {"triangle": 3, "rectangle": 4, "square": 4, "pentagon": 5, "hexagon": 6, "circle": 0}
TWO_ZOOMS_SHARE = 0.25
"""Share of samples without a level that zoom twice."""


# Details


def _approach(
    sample: Sample, region: Region, what: str, remark: bool = True, twice: bool | None = None
) -> None:
    """Zoom to a thing; if ``twice`` (None: at random), in two steps of which the first is too wide."""
    target, side = region.media, max(region.box[2] - region.box[0], region.box[3] - region.box[1])
    where = "" if " in the " in what else sample.position(region)
    near = near_view(sample, region)
    if sample.chance(TWO_ZOOMS_SHARE) and WIDE * side < 1 if twice is None else twice:
        wide = _view(sample, region.box, WIDE * side, 0.25 * side)
        target, share = sample.zoom(wide, sample.think("zoom", what, where=where), target, region.box)
        sample.check(share < MIN_VIEW_SHARE, "not_shown")
        sample.narrator.remark("small", what=what)
        near = geometry.outward(sample.within(target, near), sample.grid)
        think = sample.think("again", what)
    else:
        think = sample.think("zoom", what, where=where)
    _, share = sample.zoom(near, think, target, region.box)
    sample.check(share >= MIN_VIEW_SHARE, "not_shown")
    if remark:
        sample.narrator.remark("clear", what=what)


def near_view(sample: Sample, region: Region) -> Box:
    """A good zoom on a thing, which may miss its middle a little."""
    side = max(region.box[2] - region.box[0], region.box[3] - region.box[1])
    return _view(sample, region.box, NEAR * side, AIM_SPREAD)


def _view(sample: Sample, box: Box, side: float, spread: float) -> Box:
    """A square that shows all of a box, off its middle by up to ``spread``."""
    x, y = geometry.middle(box)
    dx, dy = sample.rng.uniform(-spread, spread, 2).tolist()
    view = geometry.square_around((x + dx, y + dy), side, sample.grid)
    return view if geometry.covered(box, view) >= 1 else geometry.square_around((x, y), side, sample.grid)


def _digits(sample: Sample) -> list[Region]:
    """Cards with a digit and a colour of their own."""
    colours = Counter(naming.colour_of(region) for region in sample.regions)
    cards = [r for r in sample.regions if isinstance(r.attributes.get("digit"), str) and naming.colour_of(r)]
    return [card for card in cards if colours[naming.colour_of(card)] == 1]


def digit(sample: Sample) -> Demonstration:
    """The digit on a card: answered at once at level simple, otherwise after one or two zooms."""
    several = len({region.attributes["digit"] for region in _digits(sample)}) > 1
    sample.require(sample.level != "hard" or not several or sample.chance(0.5))
    return _digit_of(sample, sample.pick(_digits(sample)))


def _digit_of(sample: Sample, region: Region) -> Demonstration:
    colour, value = naming.colour_of(region), str(region.attributes["digit"])
    sample.ask(colour=colour)
    if sample.level != "simple":
        twice = None if sample.level is None else sample.level == "hard"
        _approach(sample, region, f"the {colour} frame", twice=twice)
    return sample.done(value, value=value)


def larger_digit(sample: Sample) -> Demonstration:
    """The larger digit of two cards."""
    sample.require(sample.level in (None, "hard"))
    pairs = list(itertools.permutations(_digits(sample), 2))
    pair = sample.pick([two for two in pairs if two[0].attributes["digit"] != two[1].attributes["digit"]])
    values = [int(str(region.attributes["digit"])) for region in pair]
    a, b = (str(naming.colour_of(region)) for region in pair)
    sample.ask(a=a, b=b)
    for region, colour, value in zip(pair, (a, b), values, strict=True):
        what = f"the {colour} frame"
        _approach(sample, region, what, remark=False, twice=False)
        sample.narrator.remark("measured", what=what, quality="digit", value=value)
    best = str(max(values))
    return sample.done(best, best=best)


def _small(regions: list[Region]) -> list[Region]:
    return [region for region in regions if 0 < geometry.area(region.box) <= MAX_AREA]


def what_is_there(sample: Sample) -> Demonstration:
    """The label of the only thing in a part of the picture."""
    return _label_at(sample, sample.pick(_isolated(sample)), choices=True)


def _label_at(sample: Sample, region: Region, choices: bool = False) -> Demonstration:
    where = naming.position(region.box)
    sample.ask(where=where)
    wrong: list[str] = []
    if choices:
        here = dict.fromkeys(r.label for r in sample.regions if r.label != region.label)
        common = [label for label in COMMON_LABELS if label not in here]
        wrong = sample.shuffled([label for label in (*here, *common[:3]) if label != region.label])[:3]
    _approach(sample, region, f"the thing in the {where}")
    return _label_done(sample, region, wrong if choices and sample.chance(0.4) else ())


def _label_done(sample: Sample, region: Region, wrong: Sequence[str] = ()) -> Demonstration:
    return sample.done(region.label, wrong=wrong, thing=naming.article(naming.noun(region.label)))


def _isolated(sample: Sample) -> list[Region]:
    """Small things with a telling label that are the only one in their ninth of the picture."""
    sample.require(not _digits(sample))
    cells = [naming.position(region.box) for region in sample.regions]
    isolated = [r for r, cell in zip(sample.regions, cells, strict=True) if cells.count(cell) == 1]
    excluded = sample.partial | naming.GENERIC_LABELS
    return [
        region
        for region in _small(isolated)
        if region.label not in excluded
        and all(geometry.covered(region.box, r.box) < 0.1 for r in sample.regions if r is not region)
    ]


def detail_colour(sample: Sample) -> Demonstration:
    """The colour of a small thing, seen in the zoom."""
    sample.require(not _digits(sample))
    region, value = _coloured(sample, _small(sample.named))
    what = sample.names[region.id]
    sample.ask(what=what)
    _approach(sample, region, what)
    return sample.done(value, wrong=_wrong_colours(sample, value) if sample.chance(0.3) else (), value=value)


def _coloured(sample: Sample, regions: list[Region]) -> tuple[Region, str]:
    """A thing with a clear colour that its name does not mention; up to five are tried."""
    for region in sample.shuffled([r for r in regions if "digit" not in r.attributes])[:5]:
        value = sample.colour(region)
        if value and value not in sample.names[region.id].split():
            return region, value
    raise sample.unsuitable()


def _wrong_colours(sample: Sample, value: str) -> list[str]:
    excluded = {value, naming.COLOUR_SYNONYMS.get(value, value)}
    names = ("red", "green", "blue", "yellow", "brown", "black", "white", "orange", "purple")
    return sample.shuffled([name for name in names if name not in excluded])[:3]


# Attributes


def colour(sample: Sample) -> Demonstration:
    """The colour of a thing, measured inside its outline, or whether it has a named colour."""
    region, value = _coloured(sample, sample.named)
    what = sample.names[region.id]
    right = sample.chance(0.5)
    claimed = value if right else _wrong_colours(sample, value)[0]
    yes_no = sample.chance(0.35)
    if yes_no:
        sample.ask("is_colour", what=what, claimed=claimed)
    else:
        sample.ask(what=what)
    name = _measured_colour(sample, region, value)
    if yes_no:
        return sample.done_yes_no(right, value=value)
    wrong = _wrong_colours(sample, value) if sample.chance(0.3) else ()
    return _colour_done(sample, region, value, name, wrong)


def _measured_colour(sample: Sample, region: Region, value: str) -> str:
    name = str(sample.measure(region, "color", "colour", locate=True)["color.name"])
    sample.check(name == naming.COLOUR_SYNONYMS.get(value, value), "measure_differs")
    sample.narrator.remark("measured", what=sample.description(region), quality="colour", value=name)
    return name


def _colour_done(
    sample: Sample, region: Region, value: str, name: str, wrong: Sequence[str] = ()
) -> Demonstration:
    case, also = ("default", []) if name == value else ("renamed", [name])
    what = sample.description(region)
    return sample.done(value, case, also=also, wrong=wrong, what=what, value=value, measured=name)


def quadrant(sample: Sample) -> Demonstration:
    """The quarter of the picture that holds a thing's middle."""
    region = sample.pick([r for r in sample.named if _quarter(r)])
    what, value = sample.names[region.id], str(_quarter(region))
    sample.ask(what=what)
    measured = sample.measure(region, "position", "position")
    sample.check(measured["position.quadrant"] == value, "measure_differs")
    x, y = measured["position.normalised"]
    sample.narrator.remark("placed", what=what, x=x, y=y)
    others = [name for name in ("upper left", "upper right", "lower left", "lower right") if name != value]
    return sample.done(value, wrong=others if sample.chance(0.4) else (), value=value)


def _quarter(region: Region) -> str | None:
    x, y = geometry.middle(region.box)
    across, down = naming.half(x, "left", "right", 0.08), naming.half(y, "upper", "lower", 0.08)
    return f"{down} {across}" if across and down else None


def wider(sample: Sample) -> Demonstration:
    """Whether a thing is wider than it is tall, in pixels."""
    region = sample.pick(sample.named)
    what = sample.names[region.id]
    sample.ask(what=what)
    height, width = sample.picture(region).shape[:2]
    ratio = (region.box[2] - region.box[0]) * width / ((region.box[3] - region.box[1]) * height)
    sample.require(not 0.85 < ratio < 1.18)
    measured = sample.measure(region, "size", "size")
    w, h = measured["size.bbox_width"], measured["size.bbox_height"]
    sample.check((w > h) == (ratio > 1), "measure_differs")
    sample.narrator.remark("measured", what=what, quality="extent", value=f"{w} by {h} pixels")
    return sample.done_yes_no(ratio > 1)


def share(sample: Sample) -> Demonstration:
    """The percentage of the picture that a thing covers."""
    region = sample.pick([r for r in sample.named if r.mask is not None or r.outline])
    what, truth = sample.names[region.id], sample.mask(region)
    sample.ask(what=what)
    # Segmented outlines are seldom as exact as this form requires, so it is tried less often.
    sample.require(truth is not None and truth.mean() > 0.005 and sample.chance(0.3))
    assert truth is not None
    answer = f"{100 * sample.measure(region, 'size', 'relative size')['size.relative_size']:.2f}"
    sample.narrator.remark("measured", what=what, quality="relative size", value=f"{answer} %")
    return sample.done_measured(answer, f"{100 * float(truth.mean()):.4g}")


def corners(sample: Sample) -> Demonstration:
    """The number of corners of a drawn shape."""
    region = sample.pick([r for r in sample.regions if r.label in CORNERS and naming.colour_of(r)])
    sample.require(sum(naming.colour_of(r) == naming.colour_of(region) for r in sample.regions) == 1)
    what, value = f"the {naming.colour_of(region)} shape", CORNERS[region.label]
    sample.names[region.id] = what
    sample.ask(what=what)
    measured = sample.measure(region, "shape", "shape", locate=True)
    sample.check(measured["shape.corners"] == value, "measure_differs")
    sample.narrator.remark("measured", what=what, quality="number of corners", value=value)
    return sample.done(str(value), scorer="count", value=value)


# Follow-up questions


def another_digit(sample: Sample) -> Demonstration:
    """The digit on one card, then that on another."""
    cards = sample.shuffled(_digits(sample))[:2]
    sample.require(sample.level != "simple" and len(cards) == 2)
    first, second = cards
    sample.follow("detail_perception", "digit", lambda earlier: _digit_of(earlier, first))
    return _digit_of(sample, second)


def _next_to(sample: Sample, region: Region) -> dict[str, Region]:
    """The thing next to another by direction; none where things may be missing from the annotations."""
    others = [other for other in sample.regions if other is not region]
    height, width = sample.picture(region).shape[:2]
    beside = geometry.neighbours(region.box, [other.box for other in others], width, height)
    return {} if sample.partial else {side: others[index] for side, index in beside.items()}


def colour_beside(sample: Sample) -> Demonstration:
    """The colour of a thing, then that of the one next to it."""
    sample.require(not _digits(sample))
    first, first_colour = _coloured(sample, [region for region in sample.named if _next_to(sample, region)])
    side, second = sample.pick(list(_next_to(sample, first).items()))
    value = sample.colour(second)
    sample.require(value and value not in naming.noun(second.label).split())
    assert value is not None

    def ask_first(earlier: Sample) -> Demonstration:
        earlier.ask(what=earlier.names[first.id])
        return _colour_done(earlier, first, first_colour, _measured_colour(earlier, first, first_colour))

    sample.follow("attributes", "colour", ask_first)
    sample.ask(side=naming.SIDES[side])
    beside = f"{naming.PREPOSITIONS[side]} {sample.names[first.id]}"
    sample.names[second.id] = f"the {naming.noun(second.label)} {beside}"
    return _colour_done(sample, second, value, _measured_colour(sample, second, value))


def thing_beside(sample: Sample) -> Demonstration:
    """The label of the only thing in a part of the picture, then that of the one next to it."""
    isolated, small = _isolated(sample), {region.id for region in _small(sample.regions)}
    first, side, second = sample.pick(
        [
            (region, side, other)
            for region in isolated
            for side, other in _next_to(sample, region).items()
            if other.id in small and other.label not in naming.GENERIC_LABELS
        ]
    )
    sample.follow("detail_perception", "what_is_there", lambda earlier: _label_at(earlier, first))
    sample.ask(side=naming.SIDES[side])
    place = f"the {naming.noun(first.label)} in the {naming.position(first.box)}"
    _approach(sample, second, f"the thing {naming.PREPOSITIONS[side]} {place}")
    return _label_done(sample, second)


def colour_of_it(sample: Sample) -> Demonstration:
    """The label of the only thing in a part of the picture, then its colour."""
    region = sample.pick(_isolated(sample))
    value = sample.colour(region)
    sample.require(value and value not in naming.noun(region.label).split())
    assert value is not None
    sample.follow("detail_perception", "what_is_there", lambda earlier: _label_at(earlier, region))
    sample.ask()
    sample.names[region.id] = f"the {naming.noun(region.label)} in the {naming.position(region.box)}"
    return _colour_done(sample, region, value, _measured_colour(sample, region, value))


FOLLOW_UPS = forms(another_digit, colour_beside, thing_beside, colour_of_it)
DETAILS = forms(digit, larger_digit, what_is_there, detail_colour)
ATTRIBUTES = forms(colour, quadrant, wider, share, corners)
