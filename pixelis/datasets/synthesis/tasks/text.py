"""Tasks about text: a region is zoomed into and read, and the reading must equal the annotation."""

from __future__ import annotations

import re
from typing import Any

from pixelis.datasets.synthesis import geometry, naming
from pixelis.datasets.synthesis.sample import Sample, forms
from pixelis.operations import read_text
from pixelis.records import Box, Demonstration, Line

ZOOM_SHARE = 0.7
"""Share of samples that zoom in before they read."""
IMPAIRED_ZOOM_SHARE = 0.4
"""The same where the text must be turned, mirrored or brightened first."""
MIN_BRIGHTENING = 3.0
"""Spread of the brightness after brightening, relative to that before, from which on it shows more."""
MAX_CHARACTERS = 80
"""Length up to which a text is asked for."""

Place = tuple[Line, Box, str]
"""A line that can be asked for, its box, and the name of its ninth of the picture."""


def normalised(text: str) -> str:
    """Letters and digits only, case folded: equal for two readings of the same writing."""
    return re.sub(r"[\W_]", "", text).casefold()


def all_lines(sample: Sample) -> list[tuple[Line, Box]]:
    """The lines of the first picture, legible or not, or else its words."""
    media = sample.first_media("image")
    texts = [line for line in sample.annotations.lines if line.media == media and line.frame is None]
    level = "line" if any(line.level == "line" for line in texts) else "word"
    return [(line, line.box) for line in texts if line.level == level and line.box is not None]


def suitable(line: Line) -> bool:
    return bool(normalised(line.text)) and len(line.text) <= MAX_CHARACTERS


def _lines(sample: Sample) -> list[tuple[Line, Box]]:
    return [(line, box) for line, box in all_lines(sample) if suitable(line)]


def _isolated(sample: Sample) -> list[Place]:
    """Lines that can be asked for, alone in their ninth of the picture."""
    lines = [(line, box, naming.position(box)) for line, box in all_lines(sample)]
    cells = [cell for *_, cell in lines]
    return [item for item in lines if cells.count(item[2]) == 1 and suitable(item[0])]


def _read(sample: Sample, line: Line, box: Box) -> None:
    """Zoom in, in most samples, and read; ``text_differs`` when the reading is not the annotation."""
    what, view = f"the text in the {naming.position(box)}", _around(sample, box)
    target, region = line.media, view
    if sample.chance(ZOOM_SHARE):
        margin = float(sample.rng.uniform(0.1, 0.8))
        wide = geometry.outward(geometry.grown(view, margin), sample.grid)
        target, _ = sample.zoom(wide, sample.think("zoom", what), line.media, box)
        sample.narrator.remark("clear", what=what)
        region = geometry.outward(sample.within(target, view), sample.grid)
    read_line(sample, line, target, region, what)


def read_line(sample: Sample, line: Line, target: str, region: Box, what: str) -> None:
    """Read a region; ``text_differs`` when the reading is not the annotation."""
    data = sample.session.call(sample.think("read", what), "read_text", target=target, box=region).data
    text = " ".join(str(item["text"]) for item in data["lines"])
    sample.check(normalised(text) == normalised(line.text), "text_differs")
    sample.narrator.remark("read", text=text)


def _around(sample: Sample, box: Box) -> Box:
    return geometry.outward(geometry.grown(geometry.grown(box, 0.04), 0.1), sample.grid)


def text_done(sample: Sample, line: Line) -> Demonstration:
    return sample.done(line.text, scorer="anls" if " " in line.text else "exact", value=line.text)


def at_place(sample: Sample) -> Demonstration:
    """The text in a part of the picture."""
    return _read_at(sample, sample.pick(_isolated(sample)))


def _read_at(sample: Sample, place: Place) -> Demonstration:
    line, box, where = place
    sample.ask(where=where)
    _read(sample, line, box)
    return text_done(sample, line)


def extreme(sample: Sample) -> Demonstration:
    """The topmost, lowest, leftmost or rightmost text."""
    lines = all_lines(sample)
    sample.require(len(lines) >= 2)
    axis, sign, which = sample.pick(
        [(1, 1, "topmost"), (1, -1, "lowest"), (0, 1, "leftmost"), (0, -1, "rightmost")]
    )
    (line, box), *others = sorted(lines, key=lambda pair: sign * pair[1][axis + (0 if sign > 0 else 2)])
    middle = geometry.middle(box)[axis]
    clear = all(sign * (geometry.middle(other)[axis] - middle) > 0.05 for _, other in others)
    sample.require(suitable(line) and clear)
    sample.ask(which=which)
    _read(sample, line, box)
    return text_done(sample, line)


def next_word(sample: Sample) -> Demonstration:
    """The word after another word of the same line."""
    words = [normalised(word) for line, _ in all_lines(sample) for word in line.text.split()]
    pairs = [
        (line, box, before, after)
        for line, box in _lines(sample)
        for before, after in zip(line.text.split(), line.text.split()[1:], strict=False)
        if words.count(normalised(before)) == 1 and normalised(before) and normalised(after)
    ]
    line, box, before, after = sample.pick(pairs)
    sample.ask(word=before)
    _read(sample, line, box)
    return sample.done(after, value=after)


def ordinal(sample: Sample) -> Demonstration:
    """The first, second, third, fourth, fifth or last word of a text."""
    line, box, where = sample.pick([item for item in _isolated(sample) if len(item[0].text.split()) >= 2])
    words = line.text.split()
    index = int(sample.rng.integers(len(words)))
    sample.require(index < 5 or index == len(words) - 1)
    nth = "last" if index == len(words) - 1 else ("first", "second", "third", "fourth", "fifth")[index]
    sample.ask(nth=nth, where=where)
    _read(sample, line, box)
    return sample.done(words[index], value=words[index])


def number(sample: Sample) -> Demonstration:
    """A number in a part of the picture."""
    numbers = [item for item in _isolated(sample) if re.fullmatch(r"\d+(\.\d+)?", item[0].text)]
    return _read_at(sample, sample.pick(numbers))


def says(sample: Sample) -> Demonstration:
    """Whether a text is the one that the question names, which may be another text of the picture."""
    line, box, where = sample.pick(_isolated(sample))
    others = [other.text for other, _ in _lines(sample) if normalised(other.text) != normalised(line.text)]
    right = sample.chance(0.5)
    sample.ask(where=where, text=line.text if right else sample.pick(others))
    _read(sample, line, box)
    return sample.done_yes_no(right)


def heading(sample: Sample) -> Demonstration:
    """The first line of a page that is annotated without positions: the whole page is read."""
    media = sample.first_media("image")
    lines = [line for line in sample.annotations.lines if line.level == "line" and line.media == media]
    sample.require(lines and not any(line.box for line in lines))
    sample.ask()
    observation = sample.session.call(sample.think("read", "the page"), "read_text", target=media)
    reading = [str(line["text"]) for line in observation.data["lines"]]
    sample.check(reading and normalised(reading[0]) == normalised(lines[0].text), "text_differs")
    sample.narrator.remark("read", text=" ".join(reading[:2]))
    return text_done(sample, lines[0])


def given(sample: Sample) -> Demonstration:
    """The question that came with the picture, if exactly one annotated line contains an accepted answer."""
    truths = sample.question.answers or []
    sample.require(sample.question.question)

    def words(text: str) -> str:
        return f" {' '.join(map(normalised, text.split()))} "

    matches = [
        (line, box, truth)
        for line, box in _lines(sample)
        for truth in truths
        if truth.strip() and words(truth) in words(line.text)
    ]
    sample.require(len({box for _, box, _ in matches}) == 1)
    line, box, truth = matches[0]
    sample.ask()
    _read(sample, line, box)
    return sample.done(truth, scorer=sample.question.scorer, also=truths, value=truth)


# Text that must be changed before it can be read


def _show(sample: Sample, shift: str, aim: str, op: str, **arguments: Any) -> Demonstration:
    """Show text with this shift by an operation, perhaps after a zoom; its view must be legible."""
    sample.require(sample.question.meta.get("shift") == shift)
    line, box, where = sample.pick(_isolated(sample))
    sample.ask(where=where)
    what, view = f"the text in the {where}", _around(sample, box)
    target = line.media
    if sample.chance(IMPAIRED_ZOOM_SHARE):
        target, _ = sample.zoom(view, sample.think("zoom", what), target, box)
    else:
        arguments["box"] = view
    observation = sample.session.call(sample.think(aim, what), op, target=target, **arguments)
    pixels = sample.session.view(str(observation.images[0].id))
    lines, _ = read_text.read(pixels, (0, 0, pixels.shape[1], pixels.shape[0]))
    upright = [
        item.text
        for item in lines
        if item.quad[1][0] - item.quad[0][0] > abs(item.quad[1][1] - item.quad[0][1])
    ]
    sample.check(normalised(" ".join(upright)) == normalised(line.text), "text_differs")
    sample.narrator.remark("legible", what=what)
    if shift == "dark":
        data = observation.data
        sample.check(data["spread_after"] >= MIN_BRIGHTENING * data["spread_before"], "not_shown")
    return text_done(sample, line)


def turned(sample: Sample) -> Demonstration:
    """Text in a picture that was turned by quarter turns, read in a view that is turned back."""
    return _show(sample, "turned", "turn", "rotate", angle=float(360 - sample.question.meta.get("turned", 0)))


def mirrored(sample: Sample) -> Demonstration:
    """Text in a mirrored picture, read in a view that is flipped back."""
    return _show(sample, "mirrored", "flip", "flip", direction="horizontal")


def dark(sample: Sample) -> Demonstration:
    """Text in a picture that is almost black, read in a brightened view."""
    return _show(sample, "dark", "brighten", "enhance", method="brighten")


def text_beside(sample: Sample) -> Demonstration:
    """The text in a part of the picture, then the one above, below or beside it."""
    pairs = []
    for place in _isolated(sample):
        others = [item for item in all_lines(sample) if item[0] is not place[0]]
        height, width = sample.picture(place[0]).shape[:2]
        beside = geometry.neighbours(place[1], [box for _, box in others], width, height)
        pairs += [(place, side, *others[i]) for side, i in beside.items() if suitable(others[i][0])]
    first, side, line, box = sample.pick(pairs)
    sample.follow("targeted_ocr", "at_place", lambda earlier: _read_at(earlier, first))
    sample.ask(side=naming.SIDES[side])
    _read(sample, line, box)
    return text_done(sample, line)


IMPAIRED = forms(turned, mirrored, dark)
FOLLOW_UPS = forms(text_beside)
READING = forms(at_place, extreme, next_word, ordinal, number, says, heading, given)
