"""Demonstrations that go wrong at first and notice: mistaken calls, executed for real and out of the loss, then the right ones.

Mistaken turns have ``learn`` False; the thought of the turn after them names what was wrong; the golden steps follow untouched
and the answer is the golden one. Source: Pixelis, arXiv 2603.25091 (self-correction), and Pixel-Reasoner's error-induced
trajectories (recrop once and twice), arXiv 2505.15966.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pixelis.config import RewardsConfig
from pixelis.datasets.synthesis.checking import is_right
from pixelis.datasets.synthesis.executor import Session
from pixelis.datasets.synthesis.phrases import mistakes
from pixelis.datasets.synthesis.places import from_root, moved, near_miss, other_frames, oversized, place_of, root_of
from pixelis.errors import DataFailure, PixelisError
from pixelis.operations.geometry import WHOLE
from pixelis.operations.video import Clip
from pixelis.records import Box, Demonstration, Provenance, Question, Step
from pixelis.rewards.scorers import box_iou

MOST_IOU = 0.3
"""IoU of a distracting place with the right one, at most."""

SELDOM = 0.6
"""Share of samples in which a refused call is the last resort."""


@dataclass(frozen=True)
class Distractor:
    """A mistaken call before a golden step: what to write, which notice follows, and what is wrong about it."""

    op: str
    target: str
    arguments: dict[str, Any]
    notice: str
    wrong: str
    label: str = ""
    refused: bool = False


def make_correction(
    golden: Demonstration,
    session: Session,
    rng: np.random.Generator,
    ways: Sequence[str] = (),
    rewards: RewardsConfig | None = None,
    most_iou: float = MOST_IOU,
) -> Demonstration:
    """A self-correction made from a golden demonstration; ``ways`` are those of ``WAYS`` to choose from, all by default.

    ``room`` is any room of the question; its media are used. DataFailure ``no_distractor`` when no step can be got wrong this
    way, ``not_golden`` when the demonstration is not right itself.
    """
    if golden.final is None or not is_right(golden, golden.final, rewards):
        raise DataFailure(f"{golden.id} does not arrive at the truth itself", code="not_golden")
    allowed = list(ways or WAYS)
    places = [i for i, step in enumerate(golden.turns) if step.op is not None]
    order = [allowed[i] for i in rng.permutation(len(allowed)).tolist()]
    if "repaired_call" in order and rng.random() < SELDOM:  # it fits every call and would crowd out the others
        order.append(order.pop(order.index("repaired_call")))
    for name in order:
        for place in [places[i] for i in rng.permutation(len(places)).tolist()]:
            try:
                return _corrected(golden, session.again(), place, name, rng, most_iou)
            except PixelisError:  # this step does not lend itself to this mistake; the next one may
                continue
    raise DataFailure(f"{golden.id}: no step can be got wrong by {' or '.join(allowed)}", code="no_distractor")


def _corrected(
    golden: Demonstration, session: Session, place: int, way: str, rng: np.random.Generator, most_iou: float
) -> Demonstration:
    names = session.replay(golden.turns[:place])
    right = golden.turns[place]
    here = right.model_copy(update={"target": names.get(str(right.target), right.target) or session.target})
    injected: list[dict[str, Any]] = []
    notice = ""
    for distractor in WAYS[way](golden, session, here, rng, most_iou):
        _check_differs(distractor, here, session, most_iou)
        think = " ".join(filter(None, (notice, mistakes().attempts.pick(rng))))
        observation = session.call(
            think, distractor.op, distractor.target, learn=False, allow_error=distractor.refused, **distractor.arguments
        )
        if distractor.refused != (observation.status == "error"):
            raise DataFailure(f"{golden.id}: the distracting call went otherwise than meant", code="no_distractor")
        reason = (observation.text or observation.code or "").rstrip(".")
        notice = mistakes().notices[distractor.notice].pick(rng, label=distractor.label, reason=reason)
        injected.append(
            {
                "turn": len(session.steps) - 1,
                "wrong": distractor.wrong,
                "op": distractor.op,
                "target": distractor.target,
                "arguments": distractor.arguments,
            }
        )
    think = f"{notice} {right.think}" if right.think else notice
    session.replay([right.model_copy(update={"think": think}), *golden.turns[place + 1 :]], names)
    source = golden.provenance or Provenance(source="", original_id=golden.id, method="templates")
    record = {"kind": "self_correction", "way": way, "corrected_turn": injected[-1]["turn"] + 1, "distractors": injected}
    provenance = source.model_copy(update={"parent": golden.id, "injected": record})
    values = {name: getattr(golden, name) for name in Question.model_fields}
    fields = {"id": f"{golden.id}-self_correction", "kind": "self_correction", "provenance": provenance}
    return Demonstration(**{**values, "turns": session.steps, **fields})


def _check_differs(distractor: Distractor, right: Step, session: Session, most_iou: float) -> None:
    """DataFailure ``no_distractor`` for a mistaken call that looks at what the right one looks at."""
    if distractor.refused:
        return
    mine, other = (
        _seen(session, distractor.op, distractor.target, distractor.arguments),
        _seen(session, str(right.op), str(right.target), right.arguments),
    )
    if mine is not None and other is not None and mine[0] == other[0] and box_iou(mine[1], other[1]) > most_iou:
        raise DataFailure("the mistaken call looks at the right place", code="no_distractor")
    if (distractor.op, distractor.target, distractor.arguments) == (right.op, right.target, right.arguments):
        raise DataFailure("the mistaken call is the right one", code="no_distractor")


def _seen(session: Session, op: str, target: str, arguments: dict[str, Any]) -> tuple[tuple[str, int | None], Box] | None:
    box = place_of(op, arguments)
    if box is None:
        return None
    root, frame, whole = root_of(session.images, target, box)
    return (root, frame), whole


# -- ways to get a step wrong ---------------------------------------------------------------------------------------


def _place(step: Step) -> Box:
    box = place_of(str(step.op), step.arguments)
    if box is None:
        raise DataFailure("the call points at no place", code="no_distractor")
    return box


def _recrop_once(
    golden: Demonstration, session: Session, step: Step, rng: np.random.Generator, most_iou: float
) -> list[Distractor]:
    if step.op != "zoom_in":
        raise DataFailure("no crop", code="no_distractor")
    box = near_miss(_place(step), rng, most_iou / 2)
    return [Distractor("zoom_in", str(step.target), moved(step.arguments, box), "recrop", "the crop lies beside the region")]


def _recrop_twice(
    golden: Demonstration, session: Session, step: Step, rng: np.random.Generator, most_iou: float
) -> list[Distractor]:
    first = _recrop_once(golden, session, step, rng, most_iou)
    before = place_of("zoom_in", first[0].arguments)
    assert before is not None
    for _ in range(8):
        box = near_miss(_place(step), rng, most_iou)
        if box_iou(box, before) <= most_iou:
            wrong = "the second crop lies beside the region too"
            return [*first, Distractor("zoom_in", str(step.target), moved(step.arguments, box), "recrop_again", wrong)]
    raise DataFailure("no room for a second crop", code="no_distractor")


def _oversized_zoom(
    golden: Demonstration, session: Session, step: Step, rng: np.random.Generator, most_iou: float
) -> list[Distractor]:
    if step.op != "zoom_in":
        raise DataFailure("no crop", code="no_distractor")
    box = oversized(_place(step), rng, most_iou)
    if box == WHOLE:
        raise DataFailure("the crop would be the picture", code="no_distractor")
    arguments = {"box": [round(v, 4) for v in box]}
    return [Distractor("zoom_in", str(step.target), arguments, "oversized", "the crop is too large to see the details")]


def _reselect_frames(
    golden: Demonstration, session: Session, step: Step, rng: np.random.Generator, most_iou: float
) -> list[Distractor]:
    clip = session.media.get(str(step.target))
    if step.op != "select_frames" or not isinstance(clip, Clip):
        raise DataFailure("no frames", code="no_distractor")
    shown = session.again().execute("select_frames", str(step.target), **step.arguments)
    frames = other_frames([frame["index"] for frame in shown.data["frames"]], len(clip.times), rng)
    return [Distractor("select_frames", str(step.target), {"frames": frames}, "frames", "the frames are of another moment")]


def _wrong_object(
    golden: Demonstration, session: Session, step: Step, rng: np.random.Generator, most_iou: float
) -> list[Distractor]:
    """The same operation at a nearby annotated thing that no step is about, or beside the object where there is none."""
    if step.op not in ("segment_object_at", "read_text", "track_object", "get_properties"):
        raise DataFailure("no object", code="no_distractor")
    target, box = str(step.target), _place(step)
    root, frame, whole = root_of(session.images, target, box)
    if step.op == "track_object":
        frame = int(step.arguments.get("start") or frame or 0)
    asked = [whole, *_asked(golden, session, root)]
    known = golden.annotations
    things = [(r.box, r.label) for r in known.regions if r.media == root and (r.frame or 0) == (frame or 0)] if known else []
    for other, label in sorted(things, key=lambda thing: abs(thing[0][0] - whole[0]) + abs(thing[0][1] - whole[1])):
        if any(box_iou(other, place) > most_iou / 2 or _on(place, other) for place in asked):
            continue
        arguments = moved(step.arguments, from_root(session.images, target, other))
        wanted = max(things, key=lambda thing: box_iou(thing[0], whole))[1]
        if wanted == label:
            return [Distractor(str(step.op), target, arguments, "thing", "it is not the object asked about")]
        article = "an" if label[:1].lower() in "aeiou" else "a"
        named = label if label.startswith(("the ", "a ", "an ")) else f"{article} {label}"
        return [Distractor(str(step.op), target, arguments, "object", f"it is another object, {label}", named)]
    miss = near_miss(box, rng, most_iou / 2)
    _, _, seen = root_of(session.images, target, miss)
    if any(box_iou(seen, place) > most_iou / 2 or _on(seen, place) for place in asked):
        raise DataFailure("what lies beside the object is asked about too", code="no_distractor")
    return [Distractor(str(step.op), target, moved(step.arguments, miss), "thing", "it is not the object asked about")]


def _asked(golden: Demonstration, session: Session, root: str) -> list[Box]:
    """Where the right calls look for objects and text in a picture or clip, 0..1 of it: what the question is about."""
    played = session.again()
    played.replay(golden.turns)
    calls = [(step, place_of(str(step.op), step.arguments)) for step in played.steps if step.op not in (None, "zoom_in")]
    places = [root_of(played.images, str(step.target), place) for step, place in calls if place is not None]
    return [box for name, _, box in places if name == root]


def _on(point: Box, box: Box) -> bool:
    x, y = (point[0] + point[2]) / 2, (point[1] + point[3]) / 2
    return box[0] <= x <= box[2] and box[1] <= y <= box[3]


def _repaired_call(
    golden: Demonstration, session: Session, step: Step, rng: np.random.Generator, most_iou: float
) -> list[Distractor]:
    """A call that is refused: an argument the operation does not have, an object nobody found, a frame the clip does not have."""
    op, target = str(step.op), str(step.target)
    broken: list[tuple[str, dict[str, Any], str]] = [("crop_image", dict(step.arguments), "there is no such operation")]
    if op == "zoom_in" and "box" in step.arguments:
        broken.append((op, {**step.arguments, "factor": 2.0}, "a box and a factor exclude each other"))
        broken.append((op, {"factor": 2.0}, "a zoom needs a region"))
    if op == "read_text":
        broken.append((op, {**step.arguments, "language": "en"}, "read_text has no such argument"))
    if op == "segment_object_at":
        broken.append((op, {**step.arguments, "box": [0.1, 0.1, 0.3, 0.3], "point": [0.2, 0.2]}, "a point or a box, not both"))
    if op in ("get_properties", "track_object") and "object" in step.arguments:
        broken.append((op, {**step.arguments, "object": "obj1"}, "no object of this id was found before"))
    if op == "select_frames" and isinstance(clip := session.media.get(target), Clip):
        broken.append((op, {"frames": [len(clip.times) + int(rng.integers(1, 50))]}, "the clip has no such frame"))
    chosen, arguments, wrong = broken[int(rng.integers(1, len(broken))) if len(broken) > 1 else 0]
    return [Distractor(chosen, target, arguments, "refused", wrong, refused=True)]


WAYS: dict[str, Callable[[Demonstration, Session, Step, np.random.Generator, float], list[Distractor]]] = {
    "recrop_once": _recrop_once,
    "recrop_twice": _recrop_twice,
    "oversized_zoom": _oversized_zoom,
    "reselect_frames": _reselect_frames,
    "wrong_object": _wrong_object,
    "repaired_call": _repaired_call,
}
"""Kinds of self-correction by name."""
