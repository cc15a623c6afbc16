"""Demonstrations with one deliberate error, made from golden ones: the answer, the place, or the last inference.

The question's own scorer rejects each answer, and every call was executed. Source: Pixelis, arXiv 2603.25091.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from pixelis.config import RewardsConfig
from pixelis.datasets.synthesis.checking import is_right, is_wrong, wrong_answer
from pixelis.datasets.synthesis.evidence import Evidence, collect_evidence, derive_answer
from pixelis.datasets.synthesis.executor import Session, altered_demonstration, renamed
from pixelis.datasets.synthesis.geometry import (
    from_root,
    holds_middle,
    near_miss,
    other_frames,
    place_of,
    pointed_at,
    root_of,
    same_place,
)
from pixelis.datasets.synthesis.phrases import mistakes
from pixelis.errors import DataFailure, PixelisError
from pixelis.operations.video import Clip
from pixelis.records import Annotations, Box, Demonstration, Line, Region, SampleKind, Step
from pixelis.rewards.scorers import box_iou, canonical, case_of, letter, number

MAX_TRIES = 5
MAX_IOU = 0.1
"""IoU up to which an annotated thing counts as a different one."""


def make_negative(
    kind: SampleKind,
    golden: Demonstration,
    session: Session,
    rng: np.random.Generator,
    rewards: RewardsConfig | None = None,
) -> Demonstration:
    """A demonstration of ``kind`` made from a right one; DataFailure when that does not permit the error."""
    if kind == "trap_perceptual":
        return trap_perceptual(golden, session, rng, rewards)
    answer, origin = wrong_answer(golden, str(golden.final), rng, rewards)
    last: dict[str, Any] = {"answer": answer}
    injected = {"answer": answer, "truth": golden.final, "origin": origin}
    if kind == "trap_logical":  # the last thought does not follow from the observations
        fallacy = _fallacy(golden, origin)
        last["think"] = mistakes().fallacies[fallacy].pick(rng, answer=answer.rstrip("."))
        injected = {"fallacy": fallacy, **injected}
    turns = [*golden.turns[:-1], golden.turns[-1].model_copy(update=last)]
    return altered_demonstration(golden, kind, turns, **injected)


def _fallacy(golden: Demonstration, origin: str) -> str:
    if canonical(str(golden.final)) in ("yes", "no"):
        return "yes or no"
    if origin in ("option", "choice", "opposite"):
        return "choice"
    if (value := number(str(golden.final))) is not None:
        if golden.scorer == "count" or "how many" in golden.question.casefold():
            return "count"
        return "text" if value.is_integer() and abs(value) <= 9 else "number"
    return "text" if origin == "misread" or (golden.annotations and golden.annotations.lines) else "other"


def trap_perceptual(
    golden: Demonstration, session: Session, rng: np.random.Generator, rewards: RewardsConfig | None = None
) -> Demonstration:
    """Executes a near miss (a neighbour, a cut-off box, other frames) and concludes from what it shows."""
    original = session.restarted()
    original.replay(golden.turns)
    before = collect_evidence(original.steps, original.images, golden.annotations)
    if not before:
        raise DataFailure(f"{golden.id} looks at no place", code="no_place")
    answer, options = str(golden.final), case_of(golden, None, golden.answers or []).options
    if golden.scorer == "mc_letter":
        answer = options[ord(str(letter(answer, options))) - ord("A")]
    causes: list[str] = []
    for near_miss_variant in _variants(golden, answer, original, before, rng):
        try:
            variant, injected, difference = near_miss_variant()
            after = collect_evidence(variant.steps, variant.images, golden.annotations)
        except PixelisError as failure:  # this near miss cannot be executed; the next one may
            causes.append(failure.code)
            continue
        derived = None
        if difference:
            derived = str(int(number(answer) or 0) + difference), "count"
        elif len(after) == len(before):
            pairs = list(zip(before, after, strict=True))
            derived = derive_answer(
                golden.question, answer, pairs, lambda text: is_right(golden, text, rewards)
            )
        if derived is not None and golden.scorer == "mc_letter":  # the letter of its option, if it is one
            texts = list(map(canonical, options))
            text, fact = canonical(derived[0]), derived[1]
            derived = (chr(ord("A") + texts.index(text)), fact) if text in texts else None
        if derived is None or not is_wrong(golden, derived[0], rewards):
            causes.append("no_conclusion")
            continue
        wrong, fact = derived
        turns = list(variant.steps)
        # A thought that quotes a number is about the other place
        for index in range(int(injected["turn"]) + 1, len(turns)):
            if any(character.isdigit() for character in turns[index].think or ""):
                turns[index] = turns[index].model_copy(update={"think": mistakes().continuations.pick(rng)})
        turns.append(Step(think=mistakes().misperceptions.pick(rng, answer=wrong.rstrip(".")), answer=wrong))
        injected |= {"answer": wrong, "truth": golden.final, "by": fact}
        return altered_demonstration(golden, "trap_perceptual", turns, **injected)
    code = max(causes, key=causes.count, default="no_place")
    raise DataFailure(f"{golden.id}: no near miss leads to another answer", code=code)


Variant = tuple[Session, dict[str, Any], int]
"""A session with an executed near miss, the record of what was changed, and how much it changes a count."""


def _variants(
    golden: Demonstration, answer: str, session: Session, before: list[Evidence], rng: np.random.Generator
) -> Iterator[Callable[[], Variant]]:
    segmented, last = [item for item in before if item.step.op == "segment_object_at"], before[-1]
    annotations = golden.annotations or Annotations()
    # Decimals are measured, not counted
    if segmented and number(answer) == len(segmented) and "." not in answer:
        for other in _others(annotations, segmented[-1], [item.place for item in segmented if item.place]):
            yield partial(_count_another, session, segmented[-1], other, rng)
        if len(segmented) > 1:
            yield partial(_overlook, session, segmented[int(rng.integers(len(segmented)))])
        return
    regions = [r for r in annotations.regions if r.media == last.root and r.frame is None]
    if last.step.op == "mark":  # one mark more, on a thing of another kind, or one fewer
        boxes = [list(box) for box in last.step.arguments["boxes"]]
        for region in [r for r in regions if all(box_iou(r.box, box) <= MAX_IOU for box in boxes)][:1]:
            more = [*boxes, [round(v, 3) for v in region.box]]
            yield partial(
                _with_arguments, session, last, {"boxes": more}, 1, way="counted", looked_at=region.label
            )
        if boxes[1:]:
            yield partial(
                _with_arguments, session, last, {"boxes": boxes[1:]}, -1, way="overlooked", place=boxes[0]
            )
    elif last.step.op == "compare":  # a part of the pictures in place of all of them
        for region in regions[:MAX_TRIES]:
            box = [round(v, 3) for v in region.box]
            arguments = {**last.step.arguments, "box": box, "other_box": box}
            yield partial(_with_arguments, session, last, arguments, way="part", place=box)
    elif last.step.op == "search_clip":
        event = {"cut": "motion", "motion": "cut"}[last.step.arguments["event"]]
        yield partial(_with_arguments, session, last, {"event": event}, way="event", event=event)
    else:
        for index in np.argsort(rng.random(len(before)) - np.arange(len(before))):
            avoid = [past.place for past in before if past.place and past is not before[index]]
            yield from _elsewhere(golden, annotations, session, before[index], avoid, rng)


def _elsewhere(
    golden: Demonstration,
    annotations: Annotations,
    session: Session,
    item: Evidence,
    avoid: Sequence[Box],
    rng: np.random.Generator,
) -> Iterator[Callable[[], Variant]]:
    """Other frames or places for one call: neighbours, a cut line, and beside the subject."""
    if item.step.op == "select_frames":
        yield from [partial(_select_other_frames, session, item, rng)] * MAX_TRIES
    if place_of(str(item.step.op), item.step.arguments) is None or item.place is None:
        return
    for other in _others(annotations, item, avoid):
        yield partial(_look_elsewhere, golden, session, item, other.box, other)
    if item.step.op == "read_text":  # the text without its right or left end
        x0, y0, x1, y1 = item.subject_box
        length = float(rng.uniform(0.45, 0.7)) * (x1 - x0)
        part = (x0, y0, x0 + length, y1) if rng.random() < 0.5 else (x1 - length, y0, x1, y1)
        yield partial(_look_elsewhere, golden, session, item, part, None)
    with contextlib.suppress(DataFailure):
        yield partial(_look_elsewhere, golden, session, item, near_miss(item.subject_box, rng, MAX_IOU), None)


def _others(annotations: Annotations, item: Evidence, avoid: Sequence[Box]) -> list[Any]:
    """Annotated things beside the subject, the nearest first, none of them at a place in ``avoid``."""
    if item.place is None:
        return []
    candidates: Sequence[Region | Line] = (
        annotations.lines if isinstance(item.subject, Line) else annotations.regions
    )
    x, y = item.subject_box[:2]
    near: list[tuple[float, Region | Line]] = [
        (abs(candidate.box[0] - x) + abs(candidate.box[1] - y), candidate)
        for candidate in candidates
        if candidate.box is not None
        and candidate is not item.subject
        and (candidate.media, candidate.frame or 0) == (item.root, item.frame or 0)
        and all(box_iou(candidate.box, place) <= MAX_IOU for place in (item.subject_box, *avoid))
    ]
    return [candidate for _, candidate in sorted(near, key=lambda pair: pair[0])[:MAX_TRIES]]


def _look_elsewhere(
    golden: Demonstration, original: Session, item: Evidence, to: Box, candidate: Region | Line | None
) -> Variant:
    subject, session = item.subject_box, original.restarted()
    names, changed_views, start = dict[str, str](), set[str](), -1
    for index, (step, executed) in enumerate(zip(golden.turns, original.steps, strict=True)):
        if step.op is None:
            continue
        arguments = dict(step.arguments)
        box = place_of(step.op, arguments)
        if box is not None and step.target not in changed_views:
            target = str(executed.target)
            root, frame, whole = root_of(original.images, target, box)
            same_picture = root == item.root and (frame == item.frame or frame is None)
            (width, height), (own_width, own_height) = _sides(whole), _sides(subject)
            # A small place in the middle of the subject, such as a point on it, not a view of much more.
            part = width <= 2 * own_width and height <= 2 * own_height and holds_middle(subject, whole)
            if same_picture and (box_iou(whole, subject) >= MAX_IOU or part):
                moved = same_place(whole, subject, to)
                arguments = pointed_at(arguments, from_root(session.images, renamed(target, names), moved))
                start = index if start < 0 else start
        names = session.replay(
            [executed.model_copy(update={"think": step.think, "arguments": arguments})], names
        )
        if arguments != step.arguments or step.target in changed_views:
            changed_views.add(str(executed.observation.id) if executed.observation else "")
    if start < 0:
        raise DataFailure(f"{golden.id}: no call points at the place", code="no_place")
    way = "nearby" if candidate is not None else "beside"
    injected = {"turn": start, "way": way, "place": list(to), "instead_of": list(subject)}
    if candidate is not None:
        injected["looked_at"] = candidate.label if isinstance(candidate, Region) else candidate.text
    return session, injected, 0


def _sides(box: Box) -> tuple[float, float]:
    return box[2] - box[0], box[3] - box[1]


def _with_arguments(
    original: Session, item: Evidence, arguments: dict[str, Any], change: int = 0, **injected: Any
) -> Variant:
    """The demonstration with other arguments for one call; later calls refer to its new results."""
    session = original.restarted()
    changed = item.step.model_copy(update={"arguments": arguments})
    session.replay([changed if step is item.step else step for step in original.calls])
    return session, {"turn": original.calls.index(item.step), **injected}, change


def _select_other_frames(original: Session, item: Evidence, rng: np.random.Generator) -> Variant:
    clip, observation = original.media[item.root], item.step.observation
    assert isinstance(clip, Clip)
    assert observation is not None
    shown = [frame["index"] for frame in observation.data["frames"]]
    frames = other_frames(shown, len(clip.times), rng)
    return _with_arguments(original, item, {"frames": frames}, way="frames", frames=frames, instead_of=shown)


def _count_another(original: Session, last: Evidence, other: Region, rng: np.random.Generator) -> Variant:
    session, turn = original.restarted(), original.calls.index(last.step) + 1
    names = session.replay(original.calls[:turn])
    target = renamed(str(last.step.target), names)
    arguments = pointed_at(last.step.arguments, from_root(session.images, target, other.box))
    session.call(mistakes().recounts.pick(rng), "segment_object_at", target, **arguments)
    session.replay(original.calls[turn:], names)
    return session, {"turn": turn, "way": "counted", "looked_at": other.label, "place": list(other.box)}, 1


def _overlook(original: Session, missed: Evidence) -> Variant:
    session, turn = original.restarted(), original.calls.index(missed.step) - 1
    session.replay([step for step in original.calls if step is not missed.step])
    place = list(missed.subject_box)
    return session, {"turn": turn, "way": "overlooked", "missed": missed.name, "place": place}, -1
