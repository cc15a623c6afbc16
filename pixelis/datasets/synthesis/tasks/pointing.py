"""Tasks about what the user points at: a place in a picture, a box in a clip, or a moment of a clip.

The question says where to look; which operation shows the answer follows from what it asks for. Most words
are in the vocabulary of `mini`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pixelis.datasets.synthesis import geometry, naming
from pixelis.datasets.synthesis.sample import MIN_VIEW_SHARE, Sample, forms
from pixelis.datasets.synthesis.tasks import details, text, video
from pixelis.operations import colours, get_properties
from pixelis.operations.scale import Scale
from pixelis.operations.segment_object_at import percent
from pixelis.records import Box, Demonstration, Point, Region

QUARTERS: dict[str, Box] = {
    f"{down} {across}": (x, y, x + 0.5, y + 0.5)
    for down, y in (("upper", 0.0), ("lower", 0.5))
    for across, x in (("left", 0.0), ("right", 0.5))
}
T = TypeVar("T")
SIZES = ("tiny", "tiny", "small", "medium", "medium", "large")
COLOURS = tuple(name for name in colours.NAMES if name != "beige")
CORNERS = (0, 0, 0, 3, 3, 3, 3, 3, 4, 4)
"""Answers to draw from. Those that seldom can be asked for are drawn more often, so that no guess is right more often
than another: most things are small, and measured outlines of triangles seldom have the annotated corners."""
CLEAR = 1.2
"""Factor that a share of the picture is away from the next size."""


def _written(sample: Sample, name: str, place: Point | Box, target: str) -> str:
    """A place as the policy writes it in calls."""
    scale = Scale.of(sample.executor.coordinates, sample.session.images)
    return str(scale.write_argument(name, place, target))


# Pictures


def _segment(sample: Sample, region: Region, aim: str = "segment") -> dict[str, Any]:
    """Ask about a point of a thing, and segment what is there."""
    mask = sample.mask(region)
    sample.require(mask is not None)
    assert mask is not None
    x, y = (round(v, 3) for v in geometry.inner_point(mask))
    sample.ask(place=_written(sample, "point", (x, y), region.media))
    return sample.segment(region, "the object", point=(x, y), aim=aim)


def colour_at(sample: Sample) -> Demonstration:
    """The colour of the thing at a point, measured inside its outline."""
    region, value = _pick_evenly(sample, sample.regions, COLOURS, lambda region: _colour(sample, region))
    segmented = _segment(sample, region)
    measured = sample.properties(segmented, region, "color", "colour")["color.name"]
    sample.check(measured == value, "measure_differs")
    return sample.done(value, value=value)


def _colour(sample: Sample, region: Region) -> str | None:
    colour = sample.colour(region)
    return colour and naming.COLOUR_SYNONYMS.get(colour, colour)


def size_at(sample: Sample) -> Demonstration:
    """The size of the thing at a point."""
    region, size = _of_some_size(sample)
    segmented = _segment(sample, region)
    measured = sample.properties(segmented, region, "size", "size")["size.category"]
    sample.check(measured == size, "measure_differs")
    return sample.done(size, value=size)


def _of_some_size(sample: Sample) -> tuple[Region, str]:
    """A thing and its category of size."""
    return _pick_evenly(sample, sample.regions, SIZES, lambda region: _clear_size(_share(sample, region)))


def _share(sample: Sample, region: Region) -> float:
    """The share of the picture that a thing covers; 0 without a mask."""
    mask = sample.mask(region)
    return 0.0 if mask is None else float(mask.mean())


def _clear_size(share: float) -> str | None:
    """The category of a share, None near the limit of two."""
    size, other = (
        next(name for most, name in get_properties.CATEGORIES if value < most)
        for value in (share / CLEAR, share * CLEAR)
    )
    return size if size == other else None


def _pick_evenly(
    sample: Sample, regions: Sequence[Region], values: Sequence[T], value: Callable[[Region], T | None]
) -> tuple[Region, T]:
    """A region with its value, which is drawn first: rare answers are asked for more often than they occur."""
    target = sample.pick(values)
    return sample.pick([region for region in regions if value(region) == target]), target


def share_at(sample: Sample) -> Demonstration:
    """The percentage of the picture that the thing at a point covers."""
    region, _ = _of_some_size(sample)
    share = _share(sample, region)
    sample.require(share > 0.005)
    segmented, (height, width) = _segment(sample, region, "cover"), sample.picture(region).shape[:2]
    answer = percent(segmented["area"] / (height * width)).removesuffix(" %")
    return sample.done_measured(answer, f"{100 * share:.4g}")


def corners_at(sample: Sample) -> Demonstration:
    """The number of corners of the drawn shape at a point."""
    region, corners = _pick_evenly(
        sample, sample.regions, CORNERS, lambda region: details.CORNERS.get(region.label)
    )
    segmented = _segment(sample, region)
    measured = sample.properties(segmented, region, "shape", "corners")["shape.corners"]
    sample.check(measured == corners, "measure_differs")
    return sample.done(str(measured), scorer="count", value=measured)


def text_at(sample: Sample) -> Demonstration:
    """The only text in a quarter of the picture."""
    lines = text.all_lines(sample)
    alone = [
        (line, where)
        for where, quarter in QUARTERS.items()
        for line, box in lines
        if geometry.covered(box, quarter) >= 1
        and sum(geometry.covered(other, quarter) > 0 for _, other in lines) == 1
    ]
    line, where = sample.pick(alone)
    sample.require(text.suitable(line))
    sample.ask(where=where)
    text.read_line(sample, line, line.media, QUARTERS[where], f"the text in the {where}")
    return text.text_done(sample, line)


# Clips


def digit_at(sample: Sample) -> Demonstration:
    """The digit on a card at a moment of a clip: in the selected frame, or in a zoom into it."""
    media = sample.first_media("video")
    cards = [r for r in sample.annotations.regions if r.media == media and "digit" in r.attributes]
    frames = sorted({int(card.frame or 0) for card in cards})
    # One frame of the clip is shown at first: the middle one
    card = sample.pick([card for card in cards if card.frame != frames[len(frames) // 2]])
    colour, second = naming.colour_of(card), int(card.frame or 0)
    sample.ask(colour=colour, second=second)
    think = sample.think("frames", "the frame")
    view = sample.session.call(think, "select_frames", target=media, frames=[second])
    if max(card.box[2] - card.box[0], card.box[3] - card.box[1]) < MIN_VIEW_SHARE:
        box = details.near_view(sample, card)
        sample.zoom(box, sample.think("zoom", f"the {colour} frame"), str(view.images[0].id), card.box)
    return sample.done(str(card.attributes["digit"]), value=card.attributes["digit"])


def _follow(sample: Sample, track: video.Track) -> dict[str, Any]:
    """Ask about the box of a thing in the first frame, and follow it."""
    sample.require(track.frames[0] == 0)
    box = geometry.outward(track.boxes[0])
    sample.ask(place=_written(sample, "box", box, track.media))
    think = sample.think("track", "the object")
    data = sample.session.call(think, "track_object", target=track.media, box=box).data
    result: dict[str, Any] = data["tracks"][0]
    return result


def goes(sample: Sample) -> Demonstration:
    """The direction in which the thing in a box of the first frame goes."""
    track = sample.pick(video.tracks_of(sample))
    dx, dy, distance = video.displacement(sample, track.boxes)
    heading = geometry.heading(dx, dy, 20)
    # The tracked part of what leaves the picture heads elsewhere
    sample.require(
        distance >= video.MOVED and heading and track.frames[-1] == len(video.clip_of(sample).times) - 1
    )
    record = _follow(sample, track)
    dx, dy, _ = video.displacement(sample, record["boxes"])
    sample.check(geometry.heading(dx, dy, 22) == heading, "measure_differs")
    return sample.done(str(heading), value=heading)


def stays(sample: Sample) -> Demonstration:
    """Whether the thing in a box of the first frame is still in view at the end."""
    track = sample.pick(video.tracks_of(sample))
    last = len(video.clip_of(sample).times) - 1
    sample.require(track.frames[-1] in (last, *range(last - 5)))
    present = track.frames[-1] == last
    record = _follow(sample, track)
    sample.check((record["status"] != "lost") == present, "track_differs")
    return sample.done_yes_no(present)


POINTING = forms(colour_at, size_at, share_at, corners_at, text_at, digit_at, goes, stays)
