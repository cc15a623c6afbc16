"""Tasks about clips: when something happens, in selected frames or by a search, and how a thing moves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pixelis.datasets.synthesis import geometry, naming
from pixelis.datasets.synthesis.sample import MIN_BOX_IOU, Sample, forms
from pixelis.operations.video import Clip
from pixelis.records import Box, Demonstration, Event, Region
from pixelis.rewards.scorers import box_iou

MIN_TRACK_IOU, MIN_LAST_IOU = 0.5, 0.4
"""Mean IoU of a track with the annotated boxes, and IoU of its last box, below which it is lost."""
SEGMENT_SHARE = 0.25
"""Share of tracks that begin with a segmented object in the first frame instead of a box."""
MAX_FRAMES = 100
"""Number of frames up to which a track is followed."""
MOVED, STILL = 0.1, 0.012
"""Displacement in diagonals of the frame: from MOVED on a thing moves, up to STILL it stays."""
MIN_GROWTH = 1.35
"""Ratio of areas from which on a thing gets larger."""
SPAN_MARGIN = 0.2
"""Seconds between a span of time in which something happens and a wrong one."""
EVENT_MARGIN = 0.04
"""Seconds that a frame must be away from the ends of an event to count as inside or outside."""
CELLS = (
    "upper left",
    "upper right",
    "lower left",
    "lower right",
    "centre",
    "middle left",
    "middle right",
    "upper middle",
)
"""Parts of the frame that are offered as wrong answers."""


# Frames


def clip_of(sample: Sample) -> Clip:
    clip = sample.session.media[sample.first_media("video")]
    assert isinstance(clip, Clip)
    return clip


def _events(sample: Sample) -> list[Event]:
    """The events whose texts are unique."""
    media = sample.first_media("video")
    events = [e for e in sample.annotations.events if e.media == media and e.end > e.start and e.text.strip()]
    texts = Counter(event.text for event in events)
    return [event for event in events if texts[event.text] == 1]


def _inside(event: Event, time: float) -> bool:
    return event.start - 1e-6 <= time < event.end - 1e-6


def _clear(event: Event, time: float) -> bool:
    return min(abs(time - event.start), abs(time - event.end)) >= EVENT_MARGIN


def _show_frames(sample: Sample, times: Sequence[float]) -> list[float]:
    """Select the frames at these times, by number or by time; the times of those shown."""
    clip = clip_of(sample)
    frames = sorted({clip.at(time) for time in times})
    moments = naming.listed([f"{clip.times[frame]:.2f} s" for frame in frames])
    think = sample.think("frames", f"the frame{'s' if len(frames) > 1 else ''} at {moments}")
    arguments: dict[str, Any] = {"frames": frames}
    if not sample.chance(0.5):
        arguments = {"times": [math.ceil(1000 * float(clip.times[frame]) - 1e-3) / 1000 for frame in frames]}
    observation = sample.session.call(think, "select_frames", target=sample.first_media("video"), **arguments)
    shown = [float(frame["time"]) for frame in observation.data["frames"]]
    sample.check([clip.at(time) for time in shown] == frames, "not_shown")
    return shown


def _remark_event(sample: Sample, event: Event, times: Sequence[float]) -> None:
    present = [f"{time:.2f} s" for time in times if _inside(event, time)]
    absent = [f"{time:.2f} s" for time in times if not _inside(event, time)]
    if present and absent:
        sample.narrator.remark(
            "holds", event=event.text, present=naming.listed(present), absent=naming.listed(absent)
        )
    else:
        kind = "holds_everywhere" if present else "holds_nowhere"
        sample.narrator.remark(kind, event=event.text, times=naming.listed(present or absent))


def begins(sample: Sample) -> Demonstration:
    """When an event begins: frames of the whole clip, then of the span in which it begins."""
    event = sample.pick([event for event in _events(sample) if event.start >= 0.5])
    sample.ask(event=event.text)
    clip = clip_of(sample)
    count = min(sample.executor.toolbox.max_frames, 8)
    low, high = float(clip.times[0]), float(clip.times[-1])
    for _ in range(4):
        shown = _show_frames(sample, [low + (high - low) * i / (count - 1) for i in range(count)])
        _remark_event(sample, event, shown)
        present = [time for time in shown if _inside(event, time)]
        sample.check(present and present[0] > shown[0], "not_shown")
        low, high = shown[shown.index(present[0]) - 1], present[0]
        if clip.at(high) - clip.at(low) <= 1 or high - low <= 0.02 * high:
            break
    return sample.done_measured(f"{high:.2f}", f"{event.start:.2f}")


def first(sample: Sample) -> Demonstration:
    """Which of two events begins earlier."""
    events = sample.shuffled(_events(sample))[:2]
    sample.require(len(events) == 2)
    earlier, later = sorted(events, key=lambda event: event.start)
    sample.require(later.start - earlier.start >= 0.4)
    sample.ask()
    clip, alone = clip_of(sample), min(later.start, earlier.end) - earlier.start
    early = float(sample.rng.uniform(earlier.start + 0.3 * alone, earlier.start + 0.7 * alone))
    late = float(sample.rng.uniform(later.start + 0.1, min(later.end, float(clip.times[-1])) - 0.05))
    shown = _show_frames(sample, [early, late])
    sample.check(
        [_inside(earlier, shown[0]), *(_inside(later, t) for t in shown)] == [True, False, True], "not_shown"
    )
    _remark_event(sample, earlier, shown)
    _remark_event(sample, later, shown)
    return sample.done(earlier.text, wrong=[later.text], earlier=earlier.text, later=later.text)


def choose(sample: Sample) -> Demonstration:
    """Which of four moments shows an event."""
    event, clip = sample.pick(_events(sample)), clip_of(sample)
    times = [float(time) for time in clip.times if _clear(event, float(time))]
    present, absent = [t for t in times if _inside(event, t)], [t for t in times if not _inside(event, t)]
    sample.require(present and len(absent) >= 8)
    right = sample.pick(present)
    wrong = [float(v) for v in sample.rng.choice(absent, 3, replace=False)]
    texts = [f"{time:.2f} s" for time in (right, *wrong)]
    sample.require(len(set(texts)) == 4)
    sample.ask(event=event.text)
    shown = _show_frames(sample, [right, *wrong])
    _remark_event(sample, event, shown)
    sample.check([time for time in shown if _inside(event, time)] == [right], "not_shown")
    return sample.done(texts[0], wrong=texts[1:], value=texts[0])


def holds(sample: Sample) -> Demonstration:
    """Whether an event is going on at a moment."""
    event, clip = sample.pick(_events(sample)), clip_of(sample)
    times = [float(time) for time in clip.times if _clear(event, round(float(time), 1))]
    present = sample.chance(0.5)
    rounded = [(round(t, 1), t) for t in times]
    time, _ = sample.pick([pair for pair in rounded if {_inside(event, t) for t in pair} == {present}])
    sample.ask(event=event.text, time=time)
    shown = _show_frames(sample, [time])
    sample.check(_inside(event, shown[0]) == present, "not_shown")
    _remark_event(sample, event, shown)
    return sample.done_yes_no(present)


def happens(sample: Sample) -> Demonstration:
    """Which of the annotated events is going on at a moment."""
    events, clip = _events(sample), clip_of(sample)
    sample.require(len(events) >= 2)
    times = [
        time
        for time in (round(float(t), 1) for t in clip.times)
        if all(_clear(e, time) for e in events) and sum(_inside(e, time) for e in events) == 1
    ]
    time = sample.pick(times)
    event = next(event for event in events if _inside(event, time))
    sample.ask(time=time)
    shown = _show_frames(sample, [time])
    sample.check([e for e in events if _inside(e, shown[0])] == [event], "not_shown")
    _remark_event(sample, event, shown)
    wrong = sample.shuffled([e.text for e in events if e is not event])[:3]
    return sample.done(event.text, wrong=wrong, event=event.text)


# Moments that a search finds


def _search(sample: Sample, event: str) -> tuple[Event, list[float]]:
    """The annotated event, and the times of the moments found, the best first."""
    media = sample.first_media("video")
    sample.require(sample.question.meta.get("event") == event)
    annotated = sample.pick([e for e in sample.annotations.events if e.media == media])
    sample.ask()
    think = sample.think(event, "the clip")
    data = sample.session.call(think, "search_clip", target=media, event=event).data
    times = [float(moment["time"]) for moment in data["moments"]]
    sample.check(times, "not_shown")
    return annotated, times


def cut(sample: Sample) -> Demonstration:
    """The second at which one scene gives way to another."""
    event, times = _search(sample, "cut")
    sample.check(len(times) == 1, "not_shown")
    answer = f"{times[0]:.2f}"
    sample.narrator.remark("cut", time=answer)
    return sample.done_measured(answer, f"{event.start:.2f}")


def motion(sample: Sample) -> Demonstration:
    """In which of several spans of time something moves."""
    event, times = _search(sample, "motion")
    sample.check(event.start <= times[0] <= event.end, "not_shown")
    sample.narrator.remark("motion", time=f"{times[0]:.2f}")
    clip, length = clip_of(sample), event.end - event.start
    starts = [float(time) for time in clip.times if time + length <= clip.end]
    apart = [s for s in starts if s + length <= event.start - SPAN_MARGIN or s >= event.end + SPAN_MARGIN]
    chosen = [event.start]
    for start in sample.shuffled(apart):
        if all(abs(start - other) >= 2 * SPAN_MARGIN for other in chosen):
            chosen.append(start)
    sample.require(len(chosen) > 1)
    right, *wrong = [f"{start:.1f} to {start + length:.1f} s" for start in chosen[:4]]
    return sample.done(right, wrong=wrong, value=right)


# Tracks


@dataclass(frozen=True)
class Track:
    """An annotated track; ``shortened``: it is longer, so that a question must say where to stop."""

    what: str
    regions: list[Region]
    media: str
    shortened: bool = False

    @property
    def boxes(self) -> list[Box]:
        """0..1 of the frame."""
        return [region.box for region in self.regions]

    @property
    def frames(self) -> list[int]:
        """Frame numbers in ascending order."""
        return [int(region.frame or 0) for region in self.regions]


def tracks_of(sample: Sample) -> list[Track]:
    """Tracks of ten frames or more that a label names, or the position in their first frame."""
    media = sample.first_media("video")
    regions = [r for r in sample.annotations.regions if r.media == media and r.frame is not None]
    by_track: dict[str, list[Region]] = {}
    for region in regions:
        if region.track is not None and region.label.strip():
            by_track.setdefault(region.track, []).append(region)
    labels = Counter(members[0].label for members in by_track.values())
    tracks = []
    for members in by_track.values():
        whole = Track("", sorted(members, key=lambda region: region.frame or 0), media)
        start, last = whole.regions[0], whole.frames[0] + MAX_FRAMES
        followed = [region for region, frame in zip(whole.regions, whole.frames, strict=True) if frame < last]
        if len(followed) < 10:
            continue
        what = f"the {naming.noun(start.label)}"
        if labels[start.label] > 1 or start.label in sample.partial:
            cell = naming.position(start.box)
            peers = [r for r in regions if (r.frame, r.label) == (start.frame, start.label)]
            if sum(naming.position(r.box) == cell for r in peers) > 1:
                continue
            what = f"{what} that is in the {cell} in frame {start.frame}"
        tracks.append(Track(what, followed, media, shortened=len(followed) < len(members)))
    return tracks


def _ask(sample: Sample, *tracks: Track, **slots: object) -> None:
    sample.ask(**slots)
    for track in tracks:
        if track.shortened:
            sample.text += (
                f" Follow {track.what} from frame {track.frames[0]} to frame {track.frames[-1]} only."
            )


def _follow(sample: Sample, track: Track) -> tuple[dict[str, Any], list[Box]]:
    """The record and the boxes of a track; ``track_differs`` if another thing is followed."""
    start, end = track.frames[0], track.frames[-1]
    think = sample.think("frames", f"frame {start}, where {track.what} is first seen")
    view = sample.session.call(think, "select_frames", target=track.media, frames=[start])
    sample.narrator.remark("in_frame", what=track.what, frame=start, where=naming.position(track.boxes[0]))
    box = geometry.outward(track.boxes[0], sample.grid)
    arguments: dict[str, Any] = {"box": box, "start": start}
    if sample.chance(SEGMENT_SHARE):
        think, image = sample.think("segment", track.what), str(view.images[0].id)
        data = sample.session.call(think, "segment_object_at", target=image, box=box).data
        segmented = data["objects"][0]
        sample.check(box_iou(segmented["box"], track.boxes[0]) >= MIN_BOX_IOU, "outline_differs")
        arguments = {"object": segmented["id"]}
    think = sample.think("track", track.what, start=start)
    data = sample.session.call(think, "track_object", target=track.media, end=end, **arguments).data
    record = data["tracks"][0]
    by_frame = dict(zip(record["frames"], record["boxes"], strict=True))
    complete = record["status"] == "completed" and by_frame.keys() >= set(track.frames)
    sample.check(complete, "track_differs")
    boxes = [by_frame[frame] for frame in track.frames]
    overlaps = geometry.track_overlap(boxes, track.boxes)
    sample.check(float(np.mean(overlaps)) >= MIN_TRACK_IOU and overlaps[-1] >= MIN_LAST_IOU, "track_differs")
    first, last = naming.position(boxes[0]), naming.position(boxes[-1])
    sample.narrator.remark(
        "tracked" if first != last else "tracked_in_place", what=track.what, first=first, last=last
    )
    return record, boxes


def displacement(sample: Sample, boxes: Sequence[Box]) -> tuple[float, float, float]:
    """From the first to the last box: x and y in pixels, and the length in diagonals of the frame."""
    clip = clip_of(sample)
    (x, y), (u, v) = geometry.middle(boxes[0]), geometry.middle(boxes[-1])
    dx, dy = (u - x) * clip.width, (v - y) * clip.height
    return dx, dy, math.hypot(dx, dy) / math.hypot(clip.width, clip.height)


def direction(sample: Sample) -> Demonstration:
    """The direction in which a thing moves from the first to the last frame."""
    return _direction_of(sample, sample.pick(tracks_of(sample)))


def _direction_of(sample: Sample, track: Track, choices: bool = True) -> Demonstration:
    dx, dy, distance = displacement(sample, track.boxes)
    heading = geometry.heading(dx, dy)
    sample.require(distance >= MOVED and heading)
    assert heading is not None
    _ask(sample, track, what=track.what)
    _, boxes = _follow(sample, track)
    dx, dy, _ = displacement(sample, boxes)
    sample.check(geometry.heading(dx, dy, 45) == heading, "measure_differs")
    others = [name for name in ("left", "right", "up", "down") if name != heading]
    pixels = round(math.hypot(dx, dy))
    return sample.done(
        heading, wrong=others if choices and sample.chance(0.35) else (), pixels=pixels, value=heading
    )


def ends(sample: Sample) -> Demonstration:
    """Ask where an object ends: its final position in the 3 x 3 grid of the frame."""
    track = sample.pick(tracks_of(sample))
    _ask(sample, track, what=track.what)
    value = _end_of(sample, track)
    wrong = sample.shuffled([cell for cell in CELLS if cell != value])[:3]
    return sample.done(value, wrong=wrong if sample.chance(0.5) else (), value=value)


def _end_of(sample: Sample, track: Track) -> str:
    value = naming.position(track.boxes[-1])
    _, boxes = _follow(sample, track)
    sample.check(naming.position(boxes[-1]) == value, "measure_differs")
    return value


def end_of_it(sample: Sample) -> Demonstration:
    """The direction in which a thing moves, then where it ends."""
    track = sample.pick([track for track in tracks_of(sample) if not track.shortened])
    sample.follow(
        "spatio_temporal_tracking", "direction", lambda earlier: _direction_of(earlier, track, choices=False)
    )
    sample.ask()
    value = _end_of(sample, track)
    return sample.done(value, what=track.what, value=value)


def moves(sample: Sample) -> Demonstration:
    """Whether a thing moves at all."""
    tracks = [(track, displacement(sample, track.boxes)[2]) for track in tracks_of(sample)]

    def still(track: Track) -> bool:
        return max(displacement(sample, [track.boxes[0], box])[2] for box in track.boxes) <= STILL

    track, distance = sample.pick([pair for pair in tracks if pair[1] >= MOVED or still(pair[0])])
    value = "moves" if distance >= MOVED else "stays"
    _ask(sample, track, what=track.what)
    record, _ = _follow(sample, track)
    pixels = float(record["statistics"]["displacement"]["value"])
    diagonal = math.hypot(clip_of(sample).width, clip_of(sample).height)
    sample.check((pixels / diagonal >= 0.5 * MOVED) == (value == "moves"), "measure_differs")
    return sample.done(value, pixels=round(pixels), value=value)


def grows(sample: Sample) -> Demonstration:
    """Whether a thing gets larger or smaller."""
    track = sample.pick(tracks_of(sample))
    growth = geometry.area(track.boxes[-1]) / geometry.area(track.boxes[0])
    sample.require(growth >= MIN_GROWTH or growth <= 1 / MIN_GROWTH or 0.93 < growth < 1.08)
    value = _size_change(growth, MIN_GROWTH)
    _ask(sample, track, what=track.what)
    _, boxes = _follow(sample, track)
    measured = geometry.area(boxes[-1]) / geometry.area(boxes[0])
    sample.check(_size_change(measured, 1.2) == value, "measure_differs")
    return sample.done(value, value, ratio=measured)


def _size_change(growth: float, clear: float) -> str:
    return "larger" if growth >= clear else "smaller" if growth <= 1 / clear else "same"


def half(sample: Sample) -> Demonstration:
    """Whether a thing ends in a half of the frame."""
    track = sample.pick(tracks_of(sample))
    axis = int(sample.rng.integers(2))
    low, high = ("left", "right") if axis == 0 else ("upper", "lower")
    truth = naming.half(geometry.middle(track.boxes[-1])[axis], low, high, 0.06)
    sample.require(truth)
    named = sample.pick((low, high))
    _ask(sample, track, what=track.what, half=named)
    _, boxes = _follow(sample, track)
    sample.check(naming.half(geometry.middle(boxes[-1])[axis], low, high, 0.0) == truth, "measure_differs")
    return sample.done("yes" if named == truth else "no", value=truth)


def farther(sample: Sample) -> Demonstration:
    """Which of two things ends farther from where it began."""
    pair = sample.shuffled(tracks_of(sample))[:2]
    sample.require(len(pair) == 2)
    truth = [displacement(sample, track.boxes)[2] for track in pair]
    sample.require(max(truth) >= MOVED and max(truth) >= 1.5 * min(truth))
    _ask(sample, *pair, a=pair[0].what, b=pair[1].what)
    distances = []
    for track in pair:
        record, _ = _follow(sample, track)
        distance = float(record["statistics"]["displacement"]["value"])
        sample.narrator.remark(
            "measured", what=track.what, quality="displacement", value=f"{distance:.0f} pixels"
        )
        distances.append(distance)
    sample.check((distances[0] > distances[1]) == (truth[0] > truth[1]), "measure_differs")
    best, rest = pair if truth[0] > truth[1] else pair[::-1]
    return sample.done_better(best.what, rest.what)


FOLLOW_UPS = forms(end_of_it)
SEARCH = forms(cut, motion)
FRAMES = forms(begins, first, choose, holds, happens)
TRACKING = forms(direction, ends, moves, grows, half, farther)
