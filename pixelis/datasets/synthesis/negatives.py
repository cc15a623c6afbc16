"""Makes demonstrations that are wrong on purpose from right ones: only the answer, the place looked at, or the last inference.

Each is verified: the question's own scorer refuses the answer, and whatever was looked at was really executed. They are never
imitated; they weigh as hard negatives, stay out of the loss, or pair with the right one. Source: Pixelis, arXiv 2603.25091.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from pixelis.config import RewardsConfig
from pixelis.datasets.synthesis.checking import is_right, is_wrong, wrong_answer
from pixelis.datasets.synthesis.evidence import Look, conclude, looks
from pixelis.datasets.synthesis.executor import Session, renamed
from pixelis.datasets.synthesis.phrases import mistakes
from pixelis.datasets.synthesis.places import from_root, moved, near_miss, other_frames, place_of, root_of, same_place
from pixelis.errors import DataFailure, PixelisError
from pixelis.records import Box, Demonstration, Line, Provenance, Question, Region, SampleKind, Step
from pixelis.rewards.scorers import box_iou, canonical, case_of, letter, number

LOOKS = 5
"""Other places that are tried for a perceptual trap."""
MOST_IOU = 0.1
"""IoU up to which an annotated thing counts as another one."""


def make_mistake(
    kind: SampleKind, golden: Demonstration, session: Session, rng: np.random.Generator, rewards: RewardsConfig | None = None
) -> Demonstration:
    """A demonstration of ``kind`` (outcome_negative, trap_perceptual, trap_logical) from a golden one.

    ``room`` is any room of the question; its media are used, its turns are not. DataFailure ``no_place``, ``no_conclusion``,
    ``no_alternative``, ``no_room`` when the demonstration does not lend itself, ``not_golden`` when it is not right itself.
    """
    if kind not in MAKERS:
        raise DataFailure(f"no mistake is called {kind}", code="unknown_kind")
    if golden.final is None or not is_right(golden, golden.final, rewards):
        raise DataFailure(f"{golden.id} does not arrive at the truth itself", code="not_golden")
    result = MAKERS[kind](golden, session, rng, rewards)
    if result.final is None or not is_wrong(golden, result.final, rewards):
        raise DataFailure(f"{golden.id}: {result.final!r} is not wrong for the scorer {golden.scorer}", code="not_wrong")
    return result


def outcome_negative(
    golden: Demonstration, session: Session, rng: np.random.Generator, rewards: RewardsConfig | None = None
) -> Demonstration:
    """Only the answer is another one, of the same type and from the same picture where that is possible."""
    answer, origin = wrong_answer(golden, str(golden.final), rng, rewards)
    turns = [*golden.turns[:-1], golden.turns[-1].model_copy(update={"answer": answer})]
    return _changed(golden, turns, "outcome_negative", {"answer": answer, "truth": golden.final, "origin": origin})


def trap_logical(
    golden: Demonstration, session: Session, rng: np.random.Generator, rewards: RewardsConfig | None = None
) -> Demonstration:
    """The observations are right, the last thought does not follow from them and leads to a wrong answer."""
    answer, origin = wrong_answer(golden, str(golden.final), rng, rewards)
    fallacy = _fallacy(golden, origin)
    think = mistakes().fallacies[fallacy].pick(rng, answer=answer.rstrip("."))
    turns = [*golden.turns[:-1], golden.turns[-1].model_copy(update={"answer": answer, "think": think})]
    injected = {"fallacy": fallacy, "answer": answer, "truth": golden.final, "origin": origin}
    return _changed(golden, turns, "trap_logical", injected)


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
    """The operation is executed at a near miss (a nearby thing, a cut box, other frames) and the conclusion follows from that."""
    first = session.again()
    first.replay(golden.turns)
    before = looks(first.steps, first.images, golden.annotations)
    if not before:
        raise DataFailure(f"{golden.id} looks at no place", code="no_place")
    causes: list[str] = []

    def took(text: str) -> bool:
        return is_right(golden, text, rewards)

    for attempt in _attempts(golden, first, before, rng):
        try:
            other, injected, by_counting = attempt()
            after = looks(other.steps, other.images, golden.annotations)
            found = None
            if by_counting:
                found = (str(int(number(_spelt(golden)) or 0) + by_counting), "count")
            elif len(after) == len(before):
                found = conclude(golden.question, _spelt(golden), before, after, took)
            found = _as_option(golden, found)
            if found is None or not is_wrong(golden, found[0], rewards):
                causes.append("no_conclusion")
                continue
        except PixelisError as failure:  # this near miss cannot be executed or shows nothing; the next one may
            causes.append(failure.code)
            continue
        answer, by = found
        turns = _restated(other.steps, int(injected["turn"]), rng)
        turns.append(Step(think=mistakes().misperceptions.pick(rng, answer=answer.rstrip(".")), answer=answer))
        injected |= {"answer": answer, "truth": golden.final, "by": by}
        return _changed(golden, turns, "trap_perceptual", injected)
    code = max(set(causes), key=causes.count) if causes else "no_place"
    raise DataFailure(f"{golden.id}: no near miss leads to another answer", code=code)


def _spelt(golden: Demonstration) -> str:
    """The golden answer, or the text of the option that its letter names."""
    options = case_of(golden, None, golden.answers or []).options
    named = letter(str(golden.final), options) if golden.scorer == "mc_letter" else None
    return options[ord(named) - ord("A")] if named and ord(named) - ord("A") < len(options) else str(golden.final)


def _as_option(golden: Demonstration, found: tuple[str, str] | None) -> tuple[str, str] | None:
    """The letter of the option that a question of choice has for what was found; None when it has no such option."""
    options = [canonical(option) for option in case_of(golden, None, golden.answers or []).options]
    if found is None or golden.scorer != "mc_letter":
        return found
    return (chr(ord("A") + options.index(canonical(found[0]))), found[1]) if canonical(found[0]) in options else None


Attempt = Callable[[], tuple[Session, dict[str, Any], int]]


def _attempts(golden: Demonstration, session: Session, before: list[Look], rng: np.random.Generator) -> Iterator[Attempt]:
    """Near misses to try, best first: one more thing counted, a nearby annotated thing, a cut line, other frames, beside."""
    segmented = [look for look in before if look.step.op == "segment_object_at"]
    spelt = _spelt(golden)
    if segmented and number(spelt) == len(segmented) and "." not in spelt:  # with decimals it is measured, not counted
        for other in _others(golden, segmented[-1], [look.place for look in segmented if look.place]):
            yield partial(_counted, golden, session, segmented[-1], other, rng)
        if len(segmented) > 1:
            yield partial(_overlooked, golden, session, segmented[int(rng.integers(len(segmented)))])
        return
    order = [before[i] for i in np.argsort(rng.random(len(before)) - np.arange(len(before)))]
    for look in order:
        if look.step.op == "select_frames":
            yield from [partial(_reselected, golden, session, look, rng)] * LOOKS
            continue
        if place_of(str(look.step.op), look.step.arguments) is None or look.place is None:
            continue
        for other in _others(golden, look, [place for past in before if (place := past.place) and past is not look]):
            yield partial(_elsewhere, golden, session, look, other.box, other)
        if look.step.op == "read_text":
            yield partial(_elsewhere, golden, session, look, _cut(look, rng), None)
        with contextlib.suppress(DataFailure):
            yield partial(_elsewhere, golden, session, look, near_miss(_ground(look), rng, MOST_IOU), None)


def _others(golden: Demonstration, look: Look, avoid: Sequence[Box]) -> list[Any]:
    """Annotated things beside what was looked at, the nearest first, none of them at a place in ``avoid``."""
    if golden.annotations is None or look.place is None:
        return []
    known = golden.annotations
    kind: Sequence[Region | Line] = known.lines if isinstance(look.subject, Line) else known.regions
    x, y = _ground(look)[:2]
    near: list[tuple[float, int, Any]] = []
    for number_, thing in enumerate(kind):
        if thing.box is None or thing.media != look.root or (thing.frame or 0) != (look.frame or 0) or thing is look.subject:
            continue
        if all(box_iou(thing.box, place) <= MOST_IOU for place in (_ground(look), *avoid)):
            near.append((abs(thing.box[0] - x) + abs(thing.box[1] - y), number_, thing))
    return [thing for *_, thing in sorted(near)[:LOOKS]]


def _ground(look: Look) -> Box:
    """What was looked at: the annotated thing, or the place of the call itself."""
    subject = look.subject.box if look.subject is not None else None
    place = subject or look.place
    assert place is not None
    return place


def _elsewhere(
    golden: Demonstration, first: Session, look: Look, to: Box, thing: Region | Line | None
) -> tuple[Session, dict[str, Any], int]:
    """The demonstration with every call that points at the subject of ``look`` pointed at ``to`` instead."""
    of, session, names, stray, begun = _ground(look), first.again(), dict[str, str](), set[str](), -1
    for place, (step, executed) in enumerate(zip(golden.turns, first.steps, strict=True)):
        if step.op is None:
            continue
        arguments = dict(step.arguments)
        box = place_of(step.op, arguments)
        if box is not None and step.target not in stray:
            target = str(executed.target)
            root, frame, whole = root_of(first.images, target, box)
            same = root == look.root and (frame == look.frame or frame is None)
            if same and (box_iou(whole, of) >= MOST_IOU or _holds(whole, of)):
                arguments = moved(arguments, from_root(session.images, renamed(target, names), same_place(whole, of, to)))
                begun = place if begun < 0 else begun
        changed = executed.model_copy(update={"think": step.think, "arguments": arguments})
        names = session.replay([changed], names)
        if arguments != step.arguments or step.target in stray:
            stray.add(str(executed.observation.id) if executed.observation else "")
    if begun < 0:
        raise DataFailure(f"{golden.id}: no call points at the place", code="no_place")
    injected = {"turn": begun, "way": "nearby" if thing is not None else "beside", "place": list(to), "instead_of": list(of)}
    if thing is not None:
        injected["looked_at"] = thing.label if isinstance(thing, Region) else thing.text
    return session, injected, 0


def _holds(outer: Box, inner: Box) -> bool:
    """True for a place in the middle of ``inner`` (a point on it) that is no view of much more."""
    x, y = (outer[0] + outer[2]) / 2, (outer[1] + outer[3]) / 2
    small = (outer[2] - outer[0]) <= 2 * (inner[2] - inner[0]) and (outer[3] - outer[1]) <= 2 * (inner[3] - inner[1])
    return small and inner[0] <= x <= inner[2] and inner[1] <= y <= inner[3]


def _cut(look: Look, rng: np.random.Generator) -> Box:
    """The region without its end or its beginning: what is read there is a part."""
    x0, y0, x1, y1 = _ground(look)
    share = float(rng.uniform(0.45, 0.7))
    return (x0, y0, x0 + share * (x1 - x0), y1) if rng.random() < 0.5 else (x1 - share * (x1 - x0), y0, x1, y1)


def _reselected(
    golden: Demonstration, first: Session, look: Look, rng: np.random.Generator
) -> tuple[Session, dict[str, Any], int]:
    """The demonstration with other frames of the clip; calls about frames that were shown before point at the new ones."""
    session, names, begun = first.again(), dict[str, str](), -1
    for place, executed in enumerate(first.steps):
        if executed.op is None:
            continue
        changed = executed
        if executed is look.step:
            clip = session.media[look.root]
            old = [frame["index"] for frame in (executed.observation.data["frames"] if executed.observation else [])]
            frames = other_frames(old, len(clip.times), rng)  # type: ignore[union-attr]
            changed, begun = executed.model_copy(update={"arguments": {"frames": frames}}), place
        names = session.replay([changed], names)
    injected = {"turn": begun, "way": "frames", "frames": session.steps[begun].arguments["frames"], "instead_of": old}
    return session, injected, 0


def _counted(
    golden: Demonstration, first: Session, last: Look, other: Region, rng: np.random.Generator
) -> tuple[Session, dict[str, Any], int]:
    """The demonstration with one more thing segmented, which is another one: it is counted too."""
    session, names = first.again(), dict[str, str]()
    for place, executed in enumerate(first.steps):
        if executed.op is None:
            continue
        names = session.replay([executed], names)
        if executed is last.step:
            target = renamed(str(executed.target), names)
            arguments = moved(executed.arguments, from_root(session.images, target, other.box))
            session.call(mistakes().recounts.pick(rng), "segment_object_at", target, **arguments)
            begun = place + 1
    injected = {"turn": begun, "way": "counted", "looked_at": other.label, "place": list(other.box)}
    return session, injected, 1


def _overlooked(golden: Demonstration, first: Session, missed: Look) -> tuple[Session, dict[str, Any], int]:
    """The demonstration without one of the things: it is overlooked, and the count is one less."""
    session, names = first.again(), dict[str, str]()
    for place, executed in enumerate(first.steps):
        if executed.op is None:
            continue
        if executed is missed.step:
            begun = place - 1
            continue
        names = session.replay([executed], names)
    return session, {"turn": begun, "way": "overlooked", "missed": missed.name, "place": list(_ground(missed))}, -1


def _restated(steps: Sequence[Step], since: int, rng: np.random.Generator) -> list[Step]:
    """The turns; a thought after turn ``since`` that quotes a number of the old observations becomes one without."""

    def quotes(place: int, step: Step) -> bool:
        return place > since and any(sign.isdigit() for sign in step.think or "")

    return [
        step.model_copy(update={"think": mistakes().continuations.pick(rng)}) if quotes(place, step) else step
        for place, step in enumerate(steps)
    ]


def _changed(golden: Demonstration, turns: list[Step], kind: SampleKind, injected: dict[str, Any]) -> Demonstration:
    source = golden.provenance or Provenance(source="", original_id=golden.id, method="templates")
    provenance = source.model_copy(update={"parent": golden.id, "injected": {"kind": kind, **injected}})
    values = {name: getattr(golden, name) for name in Question.model_fields}
    return Demonstration(**{**values, "id": f"{golden.id}-{kind}", "turns": turns, "kind": kind, "provenance": provenance})


MAKERS: dict[str, Callable[..., Demonstration]] = {
    "outcome_negative": outcome_negative,
    "trap_perceptual": trap_perceptual,
    "trap_logical": trap_logical,
}
