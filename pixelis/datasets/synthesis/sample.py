"""A demonstration under construction: annotations, the session that executes operations, and the wording."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, UInt8

from pixelis.datasets.synthesis import geometry, naming
from pixelis.datasets.synthesis.executor import Executor, Session, sample_id
from pixelis.datasets.synthesis.narrator import Narrator, Style, capitalised
from pixelis.datasets.synthesis.phrases import choose, questions
from pixelis.errors import DataFailure
from pixelis.operations import colours, masks
from pixelis.operations.geometry import chain, clamp, relative, to_root
from pixelis.operations.segment_object_at import percent
from pixelis.records import (
    Annotations,
    Box,
    Demonstration,
    Exchange,
    Level,
    Line,
    Point,
    Provenance,
    Question,
    Region,
)
from pixelis.rewards.scorers import box_iou

T = TypeVar("T")
VERSION = "2"

MIN_MASK_IOU, MIN_BOX_IOU = 0.7, 0.6
"""IoU of a segmented outline with the annotated one, or of their boxes, below which they contradict."""
TOLERANCE = 0.045
"""Relative error of a measured answer, of which the scorer ``numeric_band`` accepts 0.05."""
POINT_SHARE = 0.25
"""Share of objects that are segmented by a point instead of a box."""
MIN_COLOUR_SHARE = 0.6
"""Share of a thing's pixels that must have one colour for the thing to have it."""
MIN_VIEW_SHARE = 0.3
"""Share of a view's width or height from which on a thing is large enough to be judged."""
LETTERS = "ABCDEF"


class Sample:
    """A question being built: forms call ``ask``, execute operations and finish with ``done``."""

    def __init__(
        self,
        question: Question,
        rng: np.random.Generator,
        executor: Executor,
        style: Style,
        task: str,
        form: str,
    ):
        self.question, self.rng, self.executor, self.task, self.form = question, rng, executor, task, form
        self.annotations = question.annotations or Annotations()
        self.narrator = Narrator(rng, style)
        self.text, self.topic, self.slots = question.question, "", dict[str, object]()
        self.grid = 0.001 if style == "full" else 0.02
        self.level: Level | None = question.meta.get("level")
        self.history = list(question.history)

    @cached_property
    def session(self) -> Session:
        """Opened by the first operation: choosing a question decodes no media."""
        return self.executor.open(self.question)

    def ask(self, form: str = "", /, **slots: object) -> None:
        """Word a question of this form, or of another ``form`` of the task."""
        self.phrases = questions()[self.task][form or self.form]
        self.slots, self.topic = slots, self.phrases.topic.format(**slots)
        if self.phrases.questions:
            self.text = capitalised(choose(self.phrases.questions, self.rng).format(**slots))

    def follow(self, task: str, form: str, make: Form) -> None:
        """Put another question about the same media, which ``make`` builds, before this one."""
        self.require(not self.history)
        earlier = make(Sample(self.question, self.rng, self.executor, self.narrator.style, task, form))
        media = [item.id for item in self.question.media]
        self.history = [Exchange(question=earlier.question, answer=str(earlier.final), media=media)]

    # Choosing

    def unsuitable(self) -> DataFailure:
        """The failure of a form whose annotations do not fit: another form may."""
        return DataFailure(
            f"{self.question.id}: the annotations offer nothing to ask for {self.form}", code="unsuitable"
        )

    def require(self, condition: object) -> None:
        """DataFailure ``unsuitable`` unless the condition holds."""
        if not condition:
            raise self.unsuitable()

    def check(self, condition: object, code: str) -> None:
        """DataFailure with a code unless the executed operations agree with the annotations."""
        if not condition:
            raise DataFailure(
                f"{self.question.id}: {self.form}: the operations contradict the annotations", code=code
            )

    def pick(self, options: Sequence[T]) -> T:
        """One of the options; ``unsuitable`` when there are none."""
        self.require(len(options))
        return options[int(self.rng.integers(len(options)))]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        return [options[int(i)] for i in self.rng.permutation(len(options))]

    def chance(self, share: float) -> bool:
        """True in this share of the samples."""
        return bool(self.rng.random() < share)

    @cached_property
    def regions(self) -> list[Region]:
        """The annotated things of the first picture, without crowds; ``unsuitable`` for a clip."""
        media = self.first_media("image")
        regions = [r for r in self.annotations.regions if r.media == media and r.frame is None]
        return [r for r in regions if not r.attributes.get("iscrowd") and r.label.strip()]

    def first_media(self, kind: str) -> str:
        """The id of the first picture or clip; ``unsuitable`` when there is none."""
        ids = [item.id for item in self.question.media if item.kind == kind]
        self.require(ids)
        return ids[0]

    @cached_property
    def partial(self) -> frozenset[str]:
        """Labels that may have more instances than are annotated."""
        dropped = bool(self.question.meta.get("dropped"))
        labels = {r.label for r in self.annotations.regions if dropped or r.attributes.get("iscrowd")}
        return frozenset((*self.question.meta.get("not_exhaustive", ()), *labels))

    @cached_property
    def names(self) -> dict[str, str]:
        """Descriptions by region id, of the regions that have an unambiguous one."""
        return naming.describe(self.regions, self.partial)

    @cached_property
    def named(self) -> list[Region]:
        return [region for region in self.regions if region.id in self.names]

    # Executing

    def picture(self, region: Region | Line) -> UInt8[np.ndarray, "height width 3"]:
        picture = self.session.media[region.media]
        assert isinstance(picture, np.ndarray)
        return picture

    def mask(self, region: Region) -> Bool[np.ndarray, "height width"] | None:
        """The annotated mask of a region; None if it has only a box."""
        return geometry.region_mask(region, *self.picture(region).shape[:2])

    def think(self, aim: str, what: str, *, where: str = "", **slots: object) -> str:
        """The thought before the next operation; the first thought frames the question."""
        return self.narrator.think(aim, what, self.topic if not self.session.steps else "", where, **slots)

    def zoom(self, box: Box, think: str, target: str, about: Box) -> tuple[str, float]:
        """Zoom to a box of ``target`` that shows all of ``about``, 0..1 of the whole picture.

        Returns the view's id and the share of its width or height that ``about`` takes up.
        """
        observation = self.session.call(think, "zoom_in", target=target, box=box)
        view = str(observation.images[0].id)
        visible = to_root(chain(self.session.images, view))
        self.check(geometry.covered(about, visible) > 0.95, "not_shown")
        return view, max(
            (about[2] - about[0]) / (visible[2] - visible[0]),
            (about[3] - about[1]) / (visible[3] - visible[1]),
        )

    def within(self, view: str, box: Box) -> Box:
        """A box of the whole picture as a box of a view, inside 0..1."""
        return clamp(relative(to_root(chain(self.session.images, view)), box))

    def segment(
        self,
        region: Region,
        what: str = "",
        locate: bool = False,
        point: Point | None = None,
        aim: str = "segment",
    ) -> dict[str, Any]:
        """Segment an annotated thing, ``what``; ``outline_differs`` if the object is another one.

        At a ``point``, or in its box or a point of ours. The thought has an ``aim``.
        """
        description = self.description(region)
        think = self.think(aim, what or description, where=self.position(region) if locate else "")
        truth = self.mask(region)
        place: dict[str, Any] = {"box": geometry.outward(geometry.grown(region.box, 0.04), self.grid)}
        if point is None and truth is not None and self.chance(POINT_SHARE):
            x, y = geometry.inner_point(truth)
            point = round(x, 3), round(y, 3)
        if point is not None:
            place = {"point": point}
        data = self.session.call(think, "segment_object_at", target=region.media, **place).data
        result: dict[str, Any] = data["objects"][0]
        if truth is None:
            agrees = box_iou(result["box"], region.box) >= MIN_BOX_IOU
        else:
            agrees = geometry.mask_iou(masks.decode(result["mask"]).full(), truth) >= MIN_MASK_IOU
        self.check(agrees, "outline_differs")
        height, width = self.picture(region).shape[:2]
        share = percent(result["area"] / (height * width))
        self.narrator.remark("outlined", what=description, share=share, id=result["id"])
        return result

    def description(self, region: Region) -> str:
        """The name of a region, or its label and position if it has no unambiguous name."""
        return self.names.get(
            region.id, f"the {naming.noun(region.label)} in the {naming.position(region.box)}"
        )

    def position(self, region: Region) -> str:
        """The part of the picture that a region is in; empty if its description contains it."""
        return "" if " in the " in self.description(region) else naming.position(region.box)

    def colour(self, region: Region) -> str | None:
        """The annotated colour, or that of most pixels of the annotated mask; None without a clear one."""
        if result := naming.colour_of(region):
            return result
        mask = self.mask(region)
        if mask is None or np.count_nonzero(mask) < 64:
            return None
        _, name, share = colours.dominant(
            self.picture(region)[mask][:: max(1, np.count_nonzero(mask) // 20_000)]
        )
        return name if share >= MIN_COLOUR_SHARE else None

    def measure(self, region: Region, group: str, quality: str, locate: bool = False) -> dict[str, Any]:
        """Segment a thing and measure a group of properties; values by ``group.name``."""
        return self.properties(self.segment(region, locate=locate), region, group, quality)

    def properties(
        self, segmented: Mapping[str, Any], region: Region, group: str, quality: str
    ) -> dict[str, Any]:
        """Measure a group of properties of a segmented object; values by ``group.name``."""
        think = self.think("measure", self.description(region), quality=quality)
        observation = self.session.call(
            think, "get_properties", target=region.media, object=segmented["id"], groups=[group]
        )
        measured = observation.data["properties"][group]
        return {f"{group}.{name}": entry["value"] for name, entry in measured.items()}

    # Finishing

    def done(
        self,
        answer: str,
        case: str = "default",
        *,
        scorer: str = "exact",
        wrong: Sequence[str] = (),
        also: Sequence[str] = (),
        truth: str | None = None,
        **results: Any,
    ) -> Demonstration:
        """The demonstration with this answer, after the form's conclusion for ``case`` and ``results``.

        ``also``: other accepted truths; ``truth``: the annotated value of a measured answer. With ``wrong``
        answers the question becomes multiple choice.
        """
        think = self.narrator.conclude(self.phrases.conclusions[case].format(**{**self.slots, **results}))
        text, truths, options = self.text, list(dict.fromkeys([truth or answer, *also])), {}
        if wrong:
            choices = self.shuffled([answer, *wrong])
            text += "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
            answer = LETTERS[choices.index(answer)]
            truths, scorer, options = [answer], "mc_letter", {"options": choices}
        self.session.answer(think, answer)
        actions = [(step.op, step.target, step.arguments) for step in self.session.steps]
        return self.session.demonstration(
            id=sample_id(self.task, self.question.id, *(e.question for e in self.history), text, actions),
            question=text,
            history=self.history,
            answers=truths,
            scorer=scorer,
            task=self.task,
            level=self.level,
            meta={"category": self.form, **self.question.meta, **options},
            provenance=Provenance(
                source=str(self.question.meta.get("source", "")),
                original_id=str(self.question.meta.get("original_id", self.question.id)),
                method=f"{self.task}/{self.form}",
                version=VERSION,
                writer="template",
            ),
        )

    def done_yes_no(self, yes: bool, **results: Any) -> Demonstration:
        answer = "yes" if yes else "no"
        return self.done(answer, answer, **results)

    def done_count(self, number: int, **options: Any) -> Demonstration:
        case = "one" if number == 1 else "several"
        return self.done(str(number), case, scorer="count", number=number, **options)

    def done_measured(self, value: str, truth: str, **results: Any) -> Demonstration:
        """``done`` with a measured number, which must be close to the annotated one."""
        self.check(abs(float(value) - float(truth)) <= TOLERANCE * float(truth), "measure_differs")
        return self.done(value, scorer="numeric_band", truth=truth, value=value, **results)

    def done_better(self, best: str, rest: str, **results: Any) -> Demonstration:
        """``done`` with the name of one of two things, as multiple choice in some samples."""
        wrong = [rest] if self.chance(0.4) else ()
        return self.done(best, wrong=wrong, also=[best.removeprefix("the ")], best=best, rest=rest, **results)


Form = Callable[[Sample], Demonstration]
"""Builds one kind of question; raises DataFailure."""


def forms(*functions: Form, **named: Form) -> dict[str, Form]:
    """Forms by name, which is that of the function if no other is given."""
    return named | {function.__name__: function for function in functions}
