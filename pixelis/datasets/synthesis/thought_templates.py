"""Words thoughts from templates: before a look, after it, and in conclusion.

A thought is put together from a framing of the question, a remark on what the last observation showed and an aim, each worded
by a narrator who is chosen once for a demonstration. Remarks about observations are only ever made after them: an aim speaks of
what is looked for and where, never of what will be found. ``terse`` is for models with a tiny vocabulary and context.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Style = Literal["full", "terse"]

FRAMINGS = (
    "The question is about {topic}.",
    "This is about {topic}.",
    "I am asked about {topic}.",
    "What matters here is {topic}.",
    "Everything hangs on {topic}.",
    "{Topic} decides this.",
    "To answer I need to know {topic}.",
    "The point is {topic}.",
    "So: {topic}.",
    "I need {topic}.",
    "The task is to find out {topic}.",
    "All that matters here is {topic}.",
    "I have to find out {topic}.",
    "Let me think about {topic}.",
    "The user wants to know {topic}.",
    "My job is to settle {topic}.",
    "It comes down to {topic}.",
    "This asks for {topic}.",
)
PLACES = (
    "{What} is in the {where}.",
    "I see {what} in the {where}.",
    "{What} appears in the {where} of the picture.",
    "Scanning the picture, I find {what} in the {where}.",
    "In the {where} there is {what}.",
    "The {where} is where {what} is.",
)
SMALL = (
    "At this size I cannot be sure.",
    "I cannot tell from here.",
    "It is too small to judge from the whole picture.",
    "A glance at the whole picture is not enough.",
    "Guessing is not good enough.",
    "I would rather check than guess.",
    "The overview alone is not enough.",
    "I need evidence.",
)
NARRATORS: dict[str, tuple[str, ...]] = {
    "plain": ("I will {aim}.", "I {aim}.", "Now I {aim}.", "I am going to {aim}."),
    "together": ("Let us {aim}.", "We should {aim}.", "We {aim}.", "Let us now {aim}."),
    "careful": (
        "To be safe, I {aim}.",
        "Before I say anything I should {aim}.",
        "I had better {aim}.",
        "To be sure, let me {aim}.",
    ),
    "brisk": ("Next: {aim}.", "Time to {aim}.", "Quickly, {aim}.", "Let us get to it: {aim}."),
    "methodical": ("The next step is to {aim}.", "The way to go is to {aim}.", "In order, I {aim}.", "A sensible step: {aim}."),
    "wondering": ("What if I {aim}?", "Shall I {aim}? Yes.", "It should help to {aim}.", "How can I tell? I {aim}."),
    "spoken": ("OK, let me {aim}.", "Right, I {aim}.", "Alright, let me {aim}.", "So let me {aim}."),
    "report": ("Plan: {aim}.", "Action: {aim}.", "To do: {aim}.", "Required now: {aim}."),
    "reasoned": (
        "It makes sense to {aim}.",
        "For that I need to {aim}.",
        "I will have the evidence once I {aim}.",
        "That is why I {aim}.",
    ),
    "teacher": ("Watch: I {aim}.", "Here we have to {aim}.", "The trick is to {aim}.", "A good habit is to {aim}."),
}
AIMS: dict[str, tuple[str, ...]] = {
    "zoom": (
        "zoom in on {what}",
        "take a closer look at {what}",
        "enlarge the part with {what}",
        "crop to {what}",
        "go closer to {what}",
        "look at {what} in full resolution",
        "bring {what} up close",
    ),
    "again": (
        "zoom in once more, tighter around {what}",
        "crop again, closer to {what}",
        "narrow the crop to {what}",
        "go even closer to {what}",
        "enlarge {what} a second time",
        "narrow the view to {what}",
    ),
    "segment": (
        "find the outline of {what}",
        "segment {what}",
        "mark {what} exactly",
        "get the mask of {what}",
        "cut out {what}",
        "trace {what}",
        "outline {what}",
    ),
    "measure": (
        "measure the {quality} of {what}",
        "get the {quality} of {what}",
        "check the {quality} of {what}",
        "take a measurement of the {quality} of {what}",
        "read off the {quality} of {what}",
        "determine the {quality} of {what}",
    ),
    "read": (
        "read what is written there",
        "read the text in {what}",
        "run text recognition on {what}",
        "read {what}",
        "get the letters in {what}",
        "decipher {what}",
    ),
    "frames": (
        "look at {what}",
        "pick out {what}",
        "open {what}",
        "sample {what}",
        "check {what}",
    ),
    "track": (
        "follow {what} through the clip",
        "track {what}",
        "keep an eye on {what} frame by frame",
        "trace where {what} goes",
        "let the tracker follow {what}",
        "see how {what} moves from frame {start} on",
    ),
}
REMARKS: dict[str, tuple[str, ...]] = {
    "clear": (
        "Now {what} is large enough.",
        "{What} can be seen well now.",
        "That shows {what} clearly.",
        "Here {what} fills the view.",
    ),
    "small": (
        "{What} is in the view, but still small.",
        "That was too wide: {what} takes up only a little of it.",
        "I can see where {what} is, but not the detail I need.",
        "The crop is too generous; {what} is hardly any larger.",
        "Better, but {what} is still far away.",
    ),
    "outlined": (
        "{What} covers {share} of the picture.",
        "I have the outline of {what}: {share} of the picture.",
        "{What} is marked as {id} and fills {share} of the picture.",
        "Got {what}: {share} of the picture.",
        "The mask of {what} covers {share} of the picture.",
    ),
    "measured": (
        "The {quality} of {what} is {value}.",
        "{What}: {quality} {value}.",
        "For {what} the {quality} comes out as {value}.",
        "{Quality} of {what}: {value}.",
        "Measured {quality} of {what}: {value}.",
    ),
    "read": (
        'It reads "{text}".',
        'The text there is "{text}".',
        'It says "{text}".',
        'Text recognition returns "{text}".',
        'Recognised text: "{text}".',
    ),
    "counted": (
        "That is number {number}.",
        "{number} so far.",
        "One more: {number} by now.",
        "This makes {number}.",
        "Counted: {number}.",
    ),
    "holds": (
        '"{event}" holds at {yes}, but not at {no}.',
        'At {yes} it is true that "{event}", at {no} it is not.',
        "It fits {yes} but not {no}.",
        "Yes at {yes}; no at {no}.",
        "{yes}: yes. {no}: no.",
    ),
    "holds_everywhere": ('"{event}" holds at {all}.', 'At {all} it is true that "{event}".', "{all}: yes, I can see that."),
    "holds_nowhere": ('"{event}" does not hold at {all}.', "There is no sign of that at {all}.", "{all}: no, I cannot see that."),
    "seen": (
        "{What} is there at {yes}.",
        "At {yes} {what} can be seen.",
        "{What} appears at {yes}.",
        "There it is at {yes}: {what}.",
    ),
    "tracked": (
        "{What} goes from the {first} to the {last}.",
        "The track of {what} begins in the {first} and ends in the {last}.",
        "{What} starts in the {first}; at the end it is in the {last}.",
        "From the {first} to the {last}: that is how {what} moves.",
    ),
    "placed": (
        "The centre of {what} is at {x:.0%} of the width and {y:.0%} of the height.",
        "{What} is centred {x:.0%} from the left and {y:.0%} from the top.",
        "Centre of {what}: x {x:.0%}, y {y:.0%}.",
        "{What} sits around x {x:.0%}, y {y:.0%}.",
    ),
}
CONCLUSIONS = (
    "So {so}.",
    "Therefore {so}.",
    "That means {so}.",
    "Hence {so}.",
    "It follows that {so}.",
    "From this, {so}.",
    "This tells me that {so}.",
    "I conclude that {so}.",
    "With that, {so}.",
    "The evidence shows that {so}.",
    "This settles it: {so}.",
    "Consequently {so}.",
)
TERSE: dict[str, tuple[str, ...]] = {
    "zoom": ("The {thing} is here", "Look at the {thing}", "Find the {thing}", "Look closer at the {thing}"),
    "again": ("It is too small", "Too small", "Look closer", "Look closer here", "Zoom in closer"),
    "segment": ("Point at the {thing}", "Find the {thing}"),
    "measure": ("See its value", "Look at its value"),
    "read": ("Read the text here", "Read it"),
    "frames": ("Look at the frame", "See the frame"),
    "track": ("Look at the {thing}", "See the {thing}"),
}


class Writer:
    """Words one demonstration: deterministic by ``rng``."""

    def __init__(self, rng: np.random.Generator, style: Style = "full"):
        self.rng, self.style = rng, style
        self.phrases = NARRATORS[list(NARRATORS)[int(rng.integers(len(NARRATORS)))]]
        self._remarks: list[str] = []
        self._phrase = ""

    def pick(self, options: tuple[str, ...] | list[str], **slots: object) -> str:
        """One of the options with its slots filled in; a slot with a capital starts with one."""
        text = options[int(self.rng.integers(len(options)))]
        capital = {key.capitalize(): _capital(str(value)) for key, value in slots.items()}
        return text.format(**slots, **capital)

    def saw(self, kind: str, **slots: object) -> None:
        """Remark on the last observation in the next thought."""
        if self.style == "full":
            self._remarks.append(self.pick(REMARKS[kind], **slots))

    def think(self, aim: str, what: str, topic: str = "", where: str = "", **slots: object) -> str:
        """The thought before an operation: the question framed where there is a ``topic``, remarks, then the aim."""
        if self.style == "terse":
            return self.pick(TERSE[aim], thing=what.removeprefix("the "))
        parts = [self.pick(FRAMINGS, topic=topic)] if topic and self.rng.random() < 0.75 else []
        parts += self._told()
        if where and self.rng.random() < 0.6:
            parts.append(self.pick(PLACES, what=what, where=where))
        if topic and self.rng.random() < 0.4:
            parts.append(self.pick(SMALL))
        others = [phrase for phrase in self.phrases if phrase != self._phrase]
        self._phrase = self.pick(others, aim="{aim}")
        parts.append(self._phrase.format(aim=self.pick(AIMS[aim], what=what, **slots)))
        return " ".join(_capital(part) for part in parts)

    def conclude(self, so: str, topic: str = "") -> str | None:
        """The thought before the answer: remarks and what follows from them; None in the terse style."""
        if self.style == "terse":
            return None
        parts = [self.pick(FRAMINGS, topic=topic)] if topic else []
        return " ".join(_capital(part) for part in [*parts, *self._told(), self.pick(CONCLUSIONS, so=so)])

    def _told(self) -> list[str]:
        result, self._remarks = self._remarks, []
        return result


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
