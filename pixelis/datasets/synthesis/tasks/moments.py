"""Tasks about moments of a clip that a search finds: a cut between scenes, and when something moves."""

from __future__ import annotations

from pixelis.datasets.synthesis.sample import Form, Sample
from pixelis.operations.video import Clip
from pixelis.records import Demonstration, Event

SPAN_MARGIN = 0.2
"""Seconds between a span of time in which something happens and a wrong one."""


def _search(sample: Sample, event: str) -> tuple[Event, list[float]]:
    """Search for the annotated event; the times of the moments, the best first."""
    media = sample.first_media("video")
    sample.require(sample.question.meta.get("event") == event)
    annotated = sample.pick([e for e in sample.annotations.events if e.media == media])
    sample.ask()
    observation = sample.session.call(sample.think(event, "the clip"), "search_clip", target=media, event=event)
    times = [float(moment["time"]) for moment in observation.data["moments"]]
    sample.check(times, "not_shown")
    return annotated, times


def cut(sample: Sample) -> Demonstration:
    """The second at which one scene gives way to another."""
    event, times = _search(sample, "cut")
    sample.check(len(times) == 1 and abs(times[0] - event.start) <= 0.04 * event.start, "not_shown")
    answer = f"{times[0]:.2f}"
    sample.narrator.remark("cut", time=answer)
    return sample.done(answer, scorer="numeric_band", truth=f"{event.start:.2f}", value=answer)


def motion(sample: Sample) -> Demonstration:
    """In which of several spans of time something moves."""
    event, times = _search(sample, "motion")
    sample.check(event.start <= times[0] <= event.end, "not_shown")
    sample.narrator.remark("motion", time=f"{times[0]:.2f}")
    clip, length = sample.session.media[event.media], event.end - event.start
    assert isinstance(clip, Clip)
    starts = [float(time) for time in clip.times if time + length <= clip.end]
    apart = [s for s in starts if s + length <= event.start - SPAN_MARGIN or s >= event.end + SPAN_MARGIN]
    chosen = [event.start]
    for start in sample.shuffled(apart):
        if all(abs(start - other) >= 2 * SPAN_MARGIN for other in chosen):
            chosen.append(start)
    sample.require(len(chosen) > 1)
    right, *wrong = [f"{start:.1f} to {start + length:.1f} s" for start in chosen[:4]]
    return sample.done(right, wrong=wrong, value=right)


SEARCH: dict[str, Form] = {"cut": cut, "motion": motion}
