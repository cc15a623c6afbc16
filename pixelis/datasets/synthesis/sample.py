"""One demonstration under construction: annotations, the session that executes operations, and the wording of thoughts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from pixelis.datasets.synthesis import grounding
from pixelis.datasets.synthesis.executor import Executor, Session, sample_name
from pixelis.datasets.synthesis.narrator import Narrator, Style, capitalised
from pixelis.datasets.synthesis.phrases import choose, questions
from pixelis.errors import DataFailure
from pixelis.operations import colours, geometry, masks
from pixelis.operations.segment_object_at import percent
from pixelis.operations.video import Clip
from pixelis.records import Annotations, Box, Demonstration, Level, Observation, Provenance, Question, Region
from pixelis.rewards.scorers import box_iou

T = TypeVar("T")
VERSION = "1"

ALIKE = 0.7
"""IoU of a found outline with the annotated one, below which they contradict each other."""
ALIKE_BOX = 0.6
"""The same for boxes, of things that are annotated by a box alone."""
BY_POINT = 0.25
"""Share of objects that are pointed at rather than boxed."""
CLEAR_COLOUR = 0.6
"""Share of a thing's pixels that must be of one colour for it to be the thing's."""
FILLS = 0.3
"""Share of a view's width or height that a thing takes up when it is close enough to be judged."""
NAMED = ("A", "B", "C", "D", "E", "F")


class Sample:
    """The question being made from annotated media: picks, executes, checks, and is closed by ``done``."""

    def __init__(self, question: Question, rng: np.random.Generator, executor: Executor, style: Style, task: str, form: str):
        self.question, self.rng, self.executor, self.task, self.form = question, rng, executor, task, form
        self.notes = question.annotations or Annotations()
        self.narrator = Narrator(rng, style)
        self.topic, self.slots = "", dict[str, object]()
        self.grid = 0.001 if style == "full" else 0.02
        self.level: Level | None = question.meta.get("level")

    @cached_property
    def session(self) -> Session:
        """Opened when the first operation is called: choosing what to ask decodes nothing."""
        return self.executor.open(self.question)

    def ask(self, form: str = "", /, **slots: object) -> str:
        """A question of this form, or of another ``form`` of the task; sets the topic of the thoughts."""
        self.phrases = questions()[self.task][form or self.form]
        self.slots, self.topic = slots, self.phrases.topic.format(**slots)
        return capitalised(choose(self.phrases.questions, self.rng).format(**slots)) if self.phrases.questions else ""

    # Choosing

    def need(self, holds: object) -> None:
        """DataFailure ``unsuitable`` unless ``holds``: another form may fit."""
        if not holds:
            raise DataFailure(f"{self.question.id}: {self.form} has nothing to ask about", code="unsuitable")

    def agree(self, holds: object, code: str) -> None:
        """DataFailure with a code unless what was executed agrees with what is annotated."""
        if not holds:
            raise DataFailure(f"{self.question.id}: {self.form}: the operations say something else", code=code)

    def pick(self, options: Sequence[T]) -> T:
        """One of them; ``unsuitable`` when there is none."""
        self.need(len(options))
        return options[int(self.rng.integers(len(options)))]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        """All of them in an order that ``rng`` gives."""
        return [options[int(i)] for i in self.rng.permutation(len(options))]

    def chance(self, share: float) -> bool:
        """True in this share of the samples."""
        return bool(self.rng.random() < share)

    @cached_property
    def regions(self) -> list[Region]:
        """The annotated things of the first picture, without those that stand for a crowd; ``unsuitable`` for a clip."""
        pictures = [item.id for item in self.question.media if item.kind == "image"]
        self.need(pictures)
        own = [r for r in self.notes.regions if r.media == pictures[0] and r.frame is None]
        return [r for r in own if not r.attributes.get("iscrowd") and r.label.strip()]

    @cached_property
    def partial(self) -> frozenset[str]:
        """Labels of which there may be more than the regions: crowds, missed things; all where annotations were dropped."""
        dropped = bool(self.question.meta.get("dropped"))
        labels = {r.label for r in self.notes.regions if dropped or r.attributes.get("iscrowd")}
        return frozenset((*self.question.meta.get("not_exhaustive", ()), *labels))

    @cached_property
    def names(self) -> dict[str, str]:
        """What the regions are called, by id, where that picks out one."""
        return grounding.describe(self.regions, self.partial)

    @cached_property
    def named(self) -> list[Region]:
        """Regions that can be spoken of."""
        return [region for region in self.regions if region.id in self.names]

    # Executing

    def think(self, aim: str, what: str, *, where: str = "", **slots: object) -> str:
        """The thought before the next operation; the first thought frames the question."""
        return self.narrator.think(aim, what, self.topic if not self.session.steps else "", where, **slots)

    def conclude(self, case: str = "default", **results: object) -> str | None:
        """The thought before the answer, from the conclusion that the form has for this case; None in the terse style."""
        return self.narrator.conclude(self.phrases.conclusions[case].format(**self.slots, **results))

    def zoom(self, box: Box, think: str, target: str, about: Box) -> tuple[str, float]:
        """Zoom to a box of ``target``; ``about``, 0..1 of the whole picture, must then be in view whole.

        Returns the view's id and how much of its width or height the thing takes up. ``not_shown`` where it is cut.
        """
        observation = self.session.call(think, "zoom_in", target=target, box=box)
        name = str(observation.images[0].id)
        shown = geometry.to_root(geometry.chain(self.session.images, name))
        self.agree(grounding.covered(about, shown) > 0.95, "not_shown")
        return name, max((about[2] - about[0]) / (shown[2] - shown[0]), (about[3] - about[1]) / (shown[3] - shown[1]))

    def within(self, name: str, box: Box) -> Box:
        """A box of the whole picture as one of a view, inside 0..1."""
        return geometry.clamp(geometry.relative(geometry.to_root(geometry.chain(self.session.images, name)), box))

    def outline(self, region: Region, think: str) -> dict[str, Any]:
        """Segment an annotated thing and compare; the record of what was found. ``outline_differs`` where that is not it."""
        picture = self.session.media[region.media]
        assert not isinstance(picture, Clip)
        truth = grounding.outline(region, *picture.shape[:2])
        place: dict[str, Any] = {"box": grounding.outward(grounding.grown(region.box, 0.04), self.grid)}
        if truth is not None and self.chance(BY_POINT):
            place = {"point": tuple(round(v, 3) for v in grounding.inner_point(truth))}
        observation = self.session.call(think, "segment_object_at", target=region.media, **place)
        result = observation.data["objects"][0]
        if truth is not None:
            self.agree(grounding.overlap(masks.decode(result["mask"]).full(), truth) >= ALIKE, "outline_differs")
        else:
            self.agree(box_iou(result["box"], region.box) >= ALIKE_BOX, "outline_differs")
        share = percent(result["area"] / (picture.shape[0] * picture.shape[1]))
        self.narrator.remark("outlined", what=self.called(region), share=share, id=result["id"])
        return result

    def called(self, region: Region) -> str:
        """What a region is called, by its label where it has no name of its own."""
        return self.names.get(region.id, f"the {grounding.noun(region.label)} in the {grounding.place(region.box)}")

    def somewhere(self, region: Region) -> str:
        """The part of the picture that a region is in; nothing where its name says so."""
        return "" if " in the " in self.called(region) else grounding.place(region.box)

    def colour(self, region: Region) -> str | None:
        """The annotated colour, or that of most of the pixels inside of the annotated outline; None without a clear one."""
        if result := grounding.colour_of(region):
            return result
        picture = self.session.media[region.media]
        assert not isinstance(picture, Clip)
        mask = grounding.outline(region, *picture.shape[:2])
        if mask is None or np.count_nonzero(mask) < 64:
            return None
        _, name, share = colours.dominant(picture[mask][:: max(1, np.count_nonzero(mask) // 20_000)])
        return name if share >= CLEAR_COLOUR else None

    def measure(self, found: Mapping[str, Any], region: Region, groups: list[str], quality: str) -> dict[str, Any]:
        """Ask for properties of an object that was found; values by ``group.name``."""
        think = self.think("measure", self.called(region), quality=quality)
        observation = self.session.call(think, "get_properties", target=region.media, object=found["id"], groups=groups)
        return properties(observation)

    # Closing

    def done(
        self,
        text: str,
        answer: str,
        think: str | None,
        scorer: str = "exact",
        wrong: Sequence[str] = (),
        also: Sequence[str] = (),
        truth: str | None = None,
        **meta: Any,
    ) -> Demonstration:
        """The demonstration with this question and answer; ``also`` are other accepted truths.

        ``truth`` is what is annotated where the answer is what was measured, close enough for the scorer.
        With ``wrong`` answers it becomes a question of choice, with the letter of the right option for an answer.
        """
        truths, options = list(dict.fromkeys([truth or answer, *also])), {}
        if wrong:
            choices = self.shuffled([answer, *wrong])
            text += "".join(f"\n{letter}. {choice}" for letter, choice in zip(NAMED, choices, strict=False))
            answer = NAMED[choices.index(answer)]
            truths, scorer, options = [answer], "mc_letter", {"options": choices}
        self.session.answer(think, answer)
        actions = [(step.op, step.target, step.arguments) for step in self.session.steps]
        source = str(self.question.meta.get("source", ""))
        original = str(self.question.meta.get("original_id", self.question.id))
        return self.session.demonstration(
            id=sample_name(self.task, self.question.id, text, actions),
            question=text,
            answers=truths,
            scorer=scorer,
            task=self.task,
            level=self.level,
            meta={**self.question.meta, **options, **meta},
            provenance=Provenance(
                source=source, original_id=original, method=f"{self.task}/{self.form}", version=VERSION, writer="template"
            ),
        )


Form = Callable[[Sample], Demonstration]
"""Makes one kind of question; raises DataFailure."""


def properties(observation: Observation) -> dict[str, Any]:
    """What get_properties measured, by ``group.name``."""
    groups = observation.data["properties"]
    return {f"{group}.{name}": entry["value"] for group, values in groups.items() for name, entry in values.items()}
