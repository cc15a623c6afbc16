"""Tasks about clips: when something happens, found in chosen frames, and how something moves, found by tracking."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pixelis.datasets.synthesis import grounding
from pixelis.datasets.synthesis.sample import ALIKE_BOX, Form, Sample
from pixelis.operations.video import Clip
from pixelis.records import Box, Demonstration, Event, Region

FOLLOWED = 0.5
"""Mean IoU of a track with the annotated boxes, below which it went astray; its last box may be off a little more."""
LAST = 0.4
OUTLINED = 0.25
"""Share of tracks that begin with an outline in the first frame instead of a box."""
LONGEST = 100
"""Most frames that are followed."""
MOVED, STILL = 0.1, 0.012
"""Displacement in diagonals of the frame from which on a thing has moved, and up to which it has not."""
GREW = 1.35
"""Ratio of areas from which on a thing gets larger."""
EDGE = 0.04
"""Seconds that a frame must keep from the ends of an event to count as inside or outside of it."""


# Frames


def _clip(sample: Sample) -> str:
    clips = [item.id for item in sample.question.media if item.kind == "video"]
    sample.need(clips)
    return clips[0]


def _opened(sample: Sample) -> Clip:
    clip = sample.session.media[_clip(sample)]
    assert isinstance(clip, Clip)
    return clip


def _events(sample: Sample) -> list[Event]:
    name = _clip(sample)
    events = [event for event in sample.notes.events if event.media == name and event.end > event.start and event.text.strip()]
    texts = Counter(event.text for event in events)
    return [event for event in events if texts[event.text] == 1]


def _inside(event: Event, time: float) -> bool:
    return event.start - 1e-6 <= time < event.end - 1e-6


def _clear(event: Event, time: float) -> bool:
    return min(abs(time - event.start), abs(time - event.end)) >= EDGE


def _look(sample: Sample, times: Sequence[float]) -> list[float]:
    """Have frames shown; the times of those that came."""
    clip = _opened(sample)
    frames = sorted({clip.at(time) for time in times})
    what = grounding.listed([f"{clip.times[frame]:.2f} s" for frame in frames])
    think = sample.think("frames", f"the frames at {what}" if len(frames) > 1 else f"the frame at {what}")
    if sample.chance(0.5):
        observation = sample.session.call(think, "select_frames", target=_clip(sample), frames=frames)
    else:
        asked = [math.ceil(1000 * float(clip.times[frame]) - 1e-3) / 1000 for frame in frames]
        observation = sample.session.call(think, "select_frames", target=_clip(sample), times=asked)
    shown = [float(frame["time"]) for frame in observation.data["frames"]]
    sample.agree([clip.at(time) for time in shown] == frames, "not_shown")
    return shown


def _tell(sample: Sample, event: Event, shown: Sequence[float]) -> None:
    """Remark in which of the frames an event is."""
    yes = [f"{time:.2f} s" for time in shown if _inside(event, time)]
    no = [f"{time:.2f} s" for time in shown if not _inside(event, time)]
    if yes and no:
        sample.narrator.remark("holds", event=event.text, present=grounding.listed(yes), absent=grounding.listed(no))
    else:
        kind = "holds_everywhere" if yes else "holds_nowhere"
        sample.narrator.remark(kind, event=event.text, times=grounding.listed(yes or no))


def begins(sample: Sample) -> Demonstration:
    """When an event begins: a coarse look, then a fine one between the last frame without and the first with it."""
    event = sample.pick([event for event in _events(sample) if event.start >= 0.5])
    question, clip = sample.ask(event=event.text), _opened(sample)
    most = min(sample.executor.toolbox.max_frames, 8)
    low, high = float(clip.times[0]), float(clip.times[-1])
    for _ in range(4):
        times = [low + (high - low) * i / (most - 1) for i in range(most)]
        shown = _look(sample, times)
        _tell(sample, event, shown)
        within = [time for time in shown if _inside(event, time)]
        sample.agree(within and within[0] > shown[0], "not_shown")
        low, high = shown[shown.index(within[0]) - 1], within[0]
        if clip.at(high) - clip.at(low) <= 1 or high - low <= 0.02 * high:
            break
    sample.agree(abs(high - event.start) <= 0.04 * event.start, "not_shown")
    answer = f"{high:.2f}"
    return sample.done(question, answer, sample.conclude(value=answer), scorer="numeric_band", truth=f"{event.start:.2f}")


def first(sample: Sample) -> Demonstration:
    """Which of two events begins earlier."""
    one, other = (
        sorted(sample.shuffled(_events(sample))[:2], key=lambda event: event.start) if len(_events(sample)) > 1 else (None, None)
    )
    sample.need(one is not None and other is not None and other.start - one.start >= 0.4)
    assert one is not None
    assert other is not None
    question, clip = sample.ask(), _opened(sample)
    before = min(other.start, one.end)
    early = float(sample.rng.uniform(one.start + 0.3 * (before - one.start), one.start + 0.7 * (before - one.start)))
    late = float(sample.rng.uniform(other.start + 0.1, min(other.end, float(clip.times[-1])) - 0.05))
    shown = _look(sample, [early, late])
    sample.agree(
        len(shown) == 2 and _inside(one, shown[0]) and not _inside(other, shown[0]) and _inside(other, shown[1]), "not_shown"
    )
    _tell(sample, one, shown)
    _tell(sample, other, shown)
    think = sample.conclude(earlier=one.text, later=other.text)
    return sample.done(question, one.text, think, wrong=[other.text])


def choose(sample: Sample) -> Demonstration:
    """Which of four moments shows an event."""
    event, clip = sample.pick(_events(sample)), _opened(sample)
    steps = [float(time) for time in clip.times if _clear(event, float(time))]
    yes, no = [t for t in steps if _inside(event, t)], [t for t in steps if not _inside(event, t)]
    sample.need(yes and len(no) >= 8)
    right = sample.pick(yes)
    wrong = [float(v) for v in sample.rng.choice(no, 3, replace=False)]
    texts = [f"{time:.2f} s" for time in (right, *wrong)]
    sample.need(len(set(texts)) == 4)
    question = sample.ask(event=event.text)
    shown = _look(sample, [right, *wrong])
    _tell(sample, event, shown)
    sample.agree([time for time in shown if _inside(event, time)] == [right], "not_shown")
    return sample.done(question, texts[0], sample.conclude(value=texts[0]), wrong=texts[1:])


def holds(sample: Sample) -> Demonstration:
    """Whether an event is going on at a moment."""
    event, clip = sample.pick(_events(sample)), _opened(sample)
    steps = [float(time) for time in clip.times if _clear(event, round(float(time), 1))]
    yes = sample.chance(0.5)
    time = round(sample.pick([t for t in steps if _inside(event, t) == yes and _inside(event, round(t, 1)) == yes]), 1)
    question = sample.ask(event=event.text, time=time)
    shown = _look(sample, [time])
    sample.agree(_inside(event, shown[0]) == yes, "not_shown")
    _tell(sample, event, shown)
    answer = "yes" if yes else "no"
    return sample.done(question, answer, sample.conclude(answer))


def happens(sample: Sample) -> Demonstration:
    """Which of the annotated events is going on at a moment."""
    events, clip = _events(sample), _opened(sample)
    sample.need(len(events) >= 2)
    moments = [round(float(t), 1) for t in clip.times if all(_clear(event, round(float(t), 1)) for event in events)]
    only = [t for t in moments if sum(_inside(event, t) for event in events) == 1]
    time = sample.pick(only)
    event = next(event for event in events if _inside(event, time))
    question = sample.ask(time=time)
    shown = _look(sample, [time])
    sample.agree([e for e in events if _inside(e, shown[0])] == [event], "not_shown")
    _tell(sample, event, shown)
    wrong = sample.shuffled([e.text for e in events if e is not event])[:3]
    return sample.done(question, event.text, sample.conclude(event=event.text), wrong=wrong)


# Tracks


@dataclass(frozen=True)
class Course:
    """An annotated track: its name in words and its boxes, in each frame from the first to the last it is followed to.

    ``cut``: the track goes on after that, so that a question about its end has to say where to stop.
    """

    what: str
    regions: list[Region]
    clip: str
    cut: bool = False

    @property
    def boxes(self) -> list[Box]:
        """0..1 of the frame."""
        return [region.box for region in self.regions]

    @property
    def frames(self) -> list[int]:
        """Frame numbers, rising."""
        return [int(region.frame or 0) for region in self.regions]


def _courses(sample: Sample) -> list[Course]:
    """Tracks of ten frames and more that can be spoken of: by their label, or by where they are in their first frame."""
    name = _clip(sample)
    tracks: dict[str, list[Region]] = {}
    for region in sample.notes.regions:
        if region.media == name and region.frame is not None and region.track is not None and region.label.strip():
            tracks.setdefault(region.track, []).append(region)
    labels = Counter(members[0].label for members in tracks.values())
    result = []
    for members in tracks.values():
        members = sorted(members, key=lambda region: int(region.frame or 0))
        start = members[0]
        whole = len(members)
        members = [region for region in members if int(region.frame or 0) < int(start.frame or 0) + LONGEST]
        if len(members) < 10:
            continue
        what = f"the {grounding.noun(start.label)}"
        if labels[start.label] > 1 or start.label in sample.partial:
            cell = grounding.place(start.box)
            beside = [r for r in sample.notes.regions if r.frame == start.frame and r.label == start.label and r.media == name]
            if sum(grounding.place(r.box) == cell for r in beside) > 1:
                continue
            what = f"the {grounding.noun(start.label)} that is in the {cell} in frame {start.frame}"
        result.append(Course(what, members, name, cut=len(members) < whole))
    return result


def _ask(sample: Sample, *courses: Course, **slots: object) -> str:
    """The question of the form; it names the frames to follow where a track is used in part only."""
    limits = [f" Follow {c.what} from frame {c.frames[0]} to frame {c.frames[-1]} only." for c in courses if c.cut]
    return sample.ask(**slots) + "".join(limits)


def _follow(sample: Sample, course: Course) -> tuple[dict[str, Any], list[Box]]:
    """Look at the first frame and track to the last; the track's entry and its boxes at the annotated frames.

    ``track_differs`` when it is lost or is somewhere else.
    """
    start, end = course.frames[0], course.frames[-1]
    think = sample.think("frames", f"frame {start}, where {course.what} is first seen")
    view = sample.session.call(think, "select_frames", target=course.clip, frames=[start])
    sample.narrator.remark("in_frame", what=course.what, frame=start, where=grounding.place(course.boxes[0]))
    box = grounding.outward(course.boxes[0], sample.grid)
    how: dict[str, Any] = {"box": box, "start": start}
    if sample.chance(OUTLINED):
        image = str(view.images[0].id)
        seen = sample.session.call(sample.think("segment", course.what), "segment_object_at", target=image, box=box)
        found = seen.data["objects"][0]
        sample.agree(grounding.track_overlap([found["box"]], [course.boxes[0]])[0] >= ALIKE_BOX, "outline_differs")
        how = {"object": found["id"]}
    think = sample.think("track", course.what, start=start)
    entry = sample.session.call(think, "track_object", target=course.clip, end=end, **how).data["tracks"][0]
    sample.agree(entry["status"] == "completed" and entry["frames"][-1] == end, "track_differs")
    boxes = [entry["boxes"][entry["frames"].index(frame)] for frame in course.frames]
    alike = grounding.track_overlap(boxes, course.boxes)
    sample.agree(float(np.mean(alike)) >= FOLLOWED and alike[-1] >= LAST, "track_differs")
    first, last = grounding.place(boxes[0]), grounding.place(boxes[-1])
    sample.narrator.remark("tracked" if first != last else "tracked_in_place", what=course.what, first=first, last=last)
    return entry, boxes


def _moved(sample: Sample, boxes: Sequence[Box]) -> tuple[float, float, float]:
    """Displacement from the first to the last box: x, y in pixels, and its length in diagonals of the frame."""
    clip = _opened(sample)
    (x, y), (u, v) = grounding.middle(boxes[0]), grounding.middle(boxes[-1])
    dx, dy = (u - x) * clip.width, (v - y) * clip.height
    return dx, dy, math.hypot(dx, dy) / math.hypot(clip.width, clip.height)


def direction(sample: Sample) -> Demonstration:
    """The way a thing goes from the first to the last frame."""
    course = sample.pick(_courses(sample))
    dx, dy, far = _moved(sample, course.boxes)
    sample.need(far >= MOVED and grounding.heading(dx, dy))
    name, question = str(grounding.heading(dx, dy)), _ask(sample, course, what=course.what)
    _, boxes = _follow(sample, course)
    dx, dy, _ = _moved(sample, boxes)
    sample.agree(grounding.heading(dx, dy, 45) == name, "measure_differs")
    think = sample.conclude(pixels=round(math.hypot(dx, dy)), value=name)
    others = [other for other in ("left", "right", "up", "down") if other != name]
    return sample.done(question, name, think, wrong=others if sample.chance(0.35) else ())


def ends(sample: Sample) -> Demonstration:
    """The ninth of the frame where a thing is at the end."""
    course = sample.pick(_courses(sample))
    value, question = grounding.place(course.boxes[-1]), _ask(sample, course, what=course.what)
    _, boxes = _follow(sample, course)
    sample.agree(grounding.place(boxes[-1]) == value, "measure_differs")
    cells = ("upper left", "upper right", "lower left", "lower right", "centre", "middle left", "middle right", "upper middle")
    wrong = sample.shuffled([cell for cell in cells if cell != value])[:3]
    think = sample.conclude(value=value)
    return sample.done(question, value, think, wrong=wrong if sample.chance(0.5) else ())


def moves(sample: Sample) -> Demonstration:
    """Whether a thing moves at all."""
    courses = [(course, _moved(sample, course.boxes)[2]) for course in _courses(sample)]
    course, far = sample.pick([pair for pair in courses if pair[1] >= MOVED or _still(sample, pair[0])])
    question, value = _ask(sample, course, what=course.what), "moves" if far >= MOVED else "stays"
    entry, _ = _follow(sample, course)
    path = float(entry["statistics"]["displacement"]["value"])
    diagonal = math.hypot(_opened(sample).width, _opened(sample).height)
    sample.agree((path / diagonal >= 0.5 * MOVED) == (value == "moves"), "measure_differs")
    return sample.done(question, value, sample.conclude(pixels=round(path), value=value))


def _still(sample: Sample, course: Course) -> bool:
    return max(_moved(sample, [course.boxes[0], box])[2] for box in course.boxes) <= STILL


def grows(sample: Sample) -> Demonstration:
    """Whether a thing gets larger or smaller."""
    course = sample.pick(_courses(sample))
    change = grounding.area(course.boxes[-1]) / grounding.area(course.boxes[0])
    sample.need(change >= GREW or change <= 1 / GREW or 0.93 < change < 1.08)
    value, question = _size(change, GREW), _ask(sample, course, what=course.what)
    _, boxes = _follow(sample, course)
    measured = grounding.area(boxes[-1]) / grounding.area(boxes[0])
    sample.agree(_size(measured, 1.2) == value, "measure_differs")
    return sample.done(question, value, sample.conclude(value, ratio=measured))


def _size(change: float, clear: float) -> str:
    return "larger" if change >= clear else "smaller" if change <= 1 / clear else "same"


def half(sample: Sample) -> Demonstration:
    """Whether a thing ends in a half of the frame."""
    course = sample.pick(_courses(sample))
    x, y = grounding.middle(course.boxes[-1])
    axis = int(sample.rng.integers(2))
    here = grounding.side((x, y)[axis], ("left", "upper")[axis], ("right", "lower")[axis], 0.06)
    sample.need(here)
    asked = sample.pick(("left", "right") if axis == 0 else ("upper", "lower"))
    question = _ask(sample, course, what=course.what, half=asked)
    _, boxes = _follow(sample, course)
    found = grounding.side(grounding.middle(boxes[-1])[axis], ("left", "upper")[axis], ("right", "lower")[axis], 0.0)
    sample.agree(found == here, "measure_differs")
    think = sample.conclude(value=here)
    return sample.done(question, "yes" if asked == here else "no", think)


def farther(sample: Sample) -> Demonstration:
    """Which of two things ends farther from where it began."""
    pair = sample.shuffled(_courses(sample))[:2]
    sample.need(len(pair) == 2)
    truth = [_moved(sample, course.boxes)[2] for course in pair]
    sample.need(max(truth) >= MOVED and max(truth) >= 1.5 * min(truth))
    question = _ask(sample, *pair, a=pair[0].what, b=pair[1].what)
    far = []
    for course in pair:
        entry, _ = _follow(sample, course)
        value = float(entry["statistics"]["displacement"]["value"])
        sample.narrator.remark("measured", what=course.what, quality="displacement", value=f"{value:.0f} pixels")
        far.append(value)
    sample.agree((far[0] > far[1]) == (truth[0] > truth[1]), "measure_differs")
    best, rest = pair if truth[0] > truth[1] else pair[::-1]
    think = sample.conclude(best=best.what, rest=rest.what)
    wrong = [rest.what] if sample.chance(0.4) else ()
    return sample.done(question, best.what, think, wrong=wrong, also=[best.what.removeprefix("the ")])


FRAMES: dict[str, Form] = {"begins": begins, "first": first, "choose": choose, "holds": holds, "happens": happens}
TRACKING: dict[str, Form] = {
    "direction": direction,
    "ends": ends,
    "moves": moves,
    "grows": grows,
    "half": half,
    "farther": farther,
}
