"""Tasks about text: a region is zoomed into and read, and the reading must equal the annotation."""

from __future__ import annotations

import re

from pixelis.datasets.synthesis import grounding
from pixelis.datasets.synthesis.sample import Form, Sample
from pixelis.records import Box, Demonstration, Line

ZOOMED = 0.7
"""Share of samples that zoom in before they read."""
LONGEST = 80
"""Characters of a text that is asked for."""


def plain(text: str) -> str:
    """Letters and digits only, case folded: what two readings of the same writing share."""
    return re.sub(r"[\W_]", "", text).casefold()


def _written(sample: Sample) -> list[tuple[Line, Box]]:
    """All writing of the first picture, readable or not: lines, or words where no lines are annotated; with their boxes."""
    pictures = [item.id for item in sample.question.media if item.kind == "image"]
    sample.need(pictures)
    own = [line for line in sample.notes.lines if line.media == pictures[0] and line.frame is None]
    lines = [line for line in own if line.level == "line"] or [line for line in own if line.level == "word"]
    return [(line, line.box) for line in lines if line.box is not None]


def _readable(line: Line) -> bool:
    return bool(plain(line.text)) and len(line.text) <= LONGEST


def _lines(sample: Sample) -> list[tuple[Line, Box]]:
    """What of it can be asked for."""
    return [(line, box) for line, box in _written(sample) if _readable(line)]


def _alone(sample: Sample) -> list[tuple[Line, Box, str]]:
    """Lines that can be asked for and stand alone in their ninth of the picture, with its name."""
    lines = _written(sample)
    cells = [grounding.place(box) for _, box in lines]
    alone = [(line, box, cell) for (line, box), cell in zip(lines, cells, strict=True) if cells.count(cell) == 1]
    return [item for item in alone if _readable(item[0])]


def _read(sample: Sample, line: Line, box: Box, where: str) -> None:
    """Zoom in, in most samples, and read. DataFailure ``text_differs`` when that is not what is annotated."""
    what = f"the text in the {where}"
    view = grounding.outward(grounding.grown(grounding.grown(box, 0.04), 0.1), sample.grid)
    target, region = line.media, view
    if sample.chance(ZOOMED):
        more = float(sample.rng.uniform(0.1, 0.8))
        wide = grounding.outward(grounding.grown(view, more), sample.grid)
        target, _ = sample.zoom(wide, sample.think("zoom", what), line.media, box)
        sample.narrator.remark("clear", what=what)
        region = grounding.outward(sample.within(target, view), sample.grid)
    think = sample.think("read", what)
    observation = sample.session.call(think, "read_text", target=target, box=region)
    text = " ".join(str(found["text"]) for found in observation.data["lines"])
    sample.agree(plain(text) == plain(line.text), "text_differs")
    sample.narrator.remark("read", text=text)


def _scorer(text: str) -> str:
    return "anls" if " " in text else "exact"


def at_place(sample: Sample) -> Demonstration:
    """What is written in a part of the picture."""
    line, box, where = sample.pick(_alone(sample))
    question = sample.ask(where=where)
    _read(sample, line, box, where)
    return sample.done(question, line.text, sample.conclude(), scorer=_scorer(line.text))


def extreme(sample: Sample) -> Demonstration:
    """The topmost, lowest, leftmost or rightmost text."""
    lines = _written(sample)
    sample.need(len(lines) >= 2)
    axis, sign, which = sample.pick([(1, 1, "topmost"), (1, -1, "lowest"), (0, 1, "leftmost"), (0, -1, "rightmost")])
    order = sorted(lines, key=lambda pair: sign * pair[1][axis + (0 if sign > 0 else 2)])
    (line, box), *others = order
    here = grounding.middle(box)[axis]
    sample.need(_readable(line) and all(sign * (grounding.middle(other)[axis] - here) > 0.05 for _, other in others))
    question = sample.ask(which=which)
    _read(sample, line, box, grounding.place(box))
    return sample.done(question, line.text, sample.conclude(), scorer=_scorer(line.text))


def next_word(sample: Sample) -> Demonstration:
    """The word after another one of the same line."""
    lines = _lines(sample)
    seen = [plain(word) for line, _ in _written(sample) for word in line.text.split()]
    found = [
        (line, box, before, after)
        for line, box in lines
        for before, after in zip(line.text.split(), line.text.split()[1:], strict=False)
        if seen.count(plain(before)) == 1 and plain(before) and plain(after)
    ]
    line, box, before, after = sample.pick(found)
    question = sample.ask(word=before)
    _read(sample, line, box, grounding.place(box))
    return sample.done(question, after, sample.conclude(value=after))


def ordinal(sample: Sample) -> Demonstration:
    """The first, second, third or last word of a text."""
    line, box, where = sample.pick([item for item in _alone(sample) if len(item[0].text.split()) >= 2])
    words = line.text.split()
    number = int(sample.rng.integers(len(words)))
    nth = "last" if number == len(words) - 1 else ("first", "second", "third", "fourth", "fifth")[min(number, 4)]
    sample.need(number < 5 or nth == "last")
    question = sample.ask(nth=nth, where=where)
    _read(sample, line, box, where)
    return sample.done(question, words[number], sample.conclude(value=words[number]))


def number(sample: Sample) -> Demonstration:
    """A number that stands in a part of the picture."""
    numbers = [item for item in _alone(sample) if re.fullmatch(r"\d+(\.\d+)?", item[0].text)]
    line, box, where = sample.pick(numbers)
    question = sample.ask(where=where)
    _read(sample, line, box, where)
    return sample.done(question, line.text, sample.conclude(value=line.text))


def says(sample: Sample) -> Demonstration:
    """Whether a text is what somebody says it is; where it is not, another text of the picture is named."""
    line, box, where = sample.pick(_alone(sample))
    others = [other.text for other, _ in _lines(sample) if plain(other.text) != plain(line.text)]
    right = sample.chance(0.5)
    question = sample.ask(where=where, text=line.text if right else sample.pick(others))
    _read(sample, line, box, where)
    answer = "yes" if right else "no"
    return sample.done(question, answer, sample.conclude(answer))


def heading(sample: Sample) -> Demonstration:
    """The first line of a page whose lines are known without their places: all of it is read."""
    pictures = [item.id for item in sample.question.media if item.kind == "image"]
    lines = [line for line in sample.notes.lines if line.level == "line" and pictures and line.media == pictures[0]]
    sample.need(lines and not any(line.box for line in lines))
    question = sample.ask()
    observation = sample.session.call(sample.think("read", "the page"), "read_text", target=pictures[0])
    found = [str(line["text"]) for line in observation.data["lines"]]
    sample.agree(found and plain(found[0]) == plain(lines[0].text), "text_differs")
    sample.narrator.remark("read", text=" ".join(found[:2]))
    return sample.done(question, lines[0].text, sample.conclude(), scorer=_scorer(lines[0].text))


def given(sample: Sample) -> Demonstration:
    """A question that came with the picture, whose accepted answer stands in one of the annotated lines."""
    asked, truths = sample.question.question, sample.question.answers or []
    sample.need(asked and truths)
    hits = [(line, box, truth) for line, box in _lines(sample) for truth in truths if _stands_in(truth, line.text)]
    sample.need(len({hit[1] for hit in hits}) == 1)
    line, box, truth = hits[0]
    sample.ask()
    _read(sample, line, box, grounding.place(box))
    return sample.done(
        asked, truth, sample.conclude(value=truth), scorer=sample.question.scorer, also=[t for t in truths if t != truth]
    )


def _stands_in(truth: str, text: str) -> bool:
    wanted, words = [plain(word) for word in truth.split()], [plain(word) for word in text.split()]
    return bool(wanted) and any(words[i : i + len(wanted)] == wanted for i in range(len(words) - len(wanted) + 1))


READING: dict[str, Form] = {
    "at_place": at_place,
    "extreme": extreme,
    "next_word": next_word,
    "ordinal": ordinal,
    "number": number,
    "says": says,
    "heading": heading,
    "given": given,
}
