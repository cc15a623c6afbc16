"""Demonstrations that make a mistake and correct it: executed calls without loss before the golden ones.

The thought after a mistake names it; the golden turns and answer follow unchanged. Sources: Pixelis, arXiv
2603.25091 (self-correction), and Pixel-Reasoner, arXiv 2505.15966 (recrop once and twice).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pixelis.datasets.synthesis import naming
from pixelis.datasets.synthesis.executor import Session, altered_demonstration
from pixelis.datasets.synthesis.geometry import (
    from_root,
    holds_middle,
    near_miss,
    other_frames,
    oversized,
    place_of,
    pointed_at,
    root_of,
)
from pixelis.datasets.synthesis.phrases import mistakes
from pixelis.errors import DataFailure, PixelisError
from pixelis.operations.geometry import WHOLE
from pixelis.operations.video import Clip
from pixelis.records import Annotations, Box, Demonstration, Step
from pixelis.rewards.scorers import box_iou

MAX_IOU = 0.3
"""IoU of a mistaken place with the right one, at most."""
REFUSED_LAST_SHARE = 0.6
"""Share of samples in which a refused call is tried last."""


@dataclass(frozen=True)
class MistakenCall:
    """A call before a golden step, the notice that follows it, and what is wrong with it."""

    op: str
    target: str
    arguments: dict[str, Any]
    notice: str
    wrong: str
    label: str = ""
    refused: bool = False


@dataclass(frozen=True)
class Place:
    """A golden step to precede with mistakes: the ``session`` has executed the steps before it."""

    golden: Demonstration
    session: Session
    step: Step
    rng: np.random.Generator

    @property
    def op(self) -> str:
        return str(self.step.op)

    @property
    def target(self) -> str:
        return str(self.step.target)

    def require_op(self, *ops: str) -> None:
        if self.op not in ops:
            raise no_distractor(f"the step calls {self.op}")

    @property
    def box(self) -> Box:
        """The region of the step, 0..1 of its target."""
        box = place_of(self.op, self.step.arguments)
        if box is None:
            raise no_distractor("the call is about no region")
        return box

    def call_at(self, box: Box, notice: str, wrong: str, label: str = "") -> MistakenCall:
        return MistakenCall(self.op, self.target, pointed_at(self.step.arguments, box), notice, wrong, label)


def no_distractor(message: str) -> DataFailure:
    return DataFailure(message, code="no_distractor")


def make_correction(
    golden: Demonstration, session: Session, rng: np.random.Generator, ways: Sequence[str] = ()
) -> Demonstration:
    """A self-correction of a right demonstration by one of ``ways``, names in ``WAYS`` (default: any)."""
    allowed = list(ways or WAYS)
    calls = [i for i, step in enumerate(golden.turns) if step.op is not None]
    order = [allowed[i] for i in rng.permutation(len(allowed)).tolist()]
    # It fits every call and would crowd out the others
    if "repaired_call" in order and rng.random() < REFUSED_LAST_SHARE:
        order.append(order.pop(order.index("repaired_call")))
    for way in order:
        for index in [calls[i] for i in rng.permutation(len(calls)).tolist()]:
            try:
                return _corrected(golden, session.restarted(), index, way, rng)
            except PixelisError:  # this step does not permit this mistake; the next one may
                continue
    raise no_distractor(f"{golden.id}: no step permits a mistake by {' or '.join(allowed)}")


def _corrected(
    golden: Demonstration, session: Session, index: int, way: str, rng: np.random.Generator
) -> Demonstration:
    names = session.replay(golden.turns[:index])
    right = golden.turns[index]
    target = names.get(str(right.target), right.target) or session.target
    place = Place(golden, session, right.model_copy(update={"target": target}), rng)
    injected: list[dict[str, Any]] = []
    notice = ""
    for call in WAYS[way](place):
        if not call.refused:
            _check_differs(call, place)
        think = " ".join(filter(None, (notice, mistakes().attempts.pick(rng))))
        observation = session.call(
            think, call.op, call.target, learn=False, allow_error=call.refused, **call.arguments
        )
        if call.refused != (observation.status == "error"):
            outcome = "executed" if call.refused else "refused"
            raise no_distractor(f"{golden.id}: the mistaken {call.op} call was {outcome}")
        reason = (observation.text or observation.code or "").rstrip(".")
        notice = mistakes().notices[call.notice].pick(rng, label=call.label, reason=reason)
        record = {"turn": len(session.steps) - 1, "wrong": call.wrong, "op": call.op, "target": call.target}
        injected.append({**record, "arguments": call.arguments})
    think = f"{notice} {right.think}" if right.think else notice
    session.replay([right.model_copy(update={"think": think}), *golden.turns[index + 1 :]], names)
    details = {"way": way, "corrected_turn": injected[-1]["turn"] + 1, "distractors": injected}
    return altered_demonstration(golden, "self_correction", session.steps, **details)


def _check_differs(call: MistakenCall, place: Place) -> None:
    right, images = place.step, place.session.images
    boxes = place_of(call.op, call.arguments), place_of(place.op, right.arguments)
    if boxes[0] is not None and boxes[1] is not None:
        root, frame, mistaken_box = root_of(images, call.target, boxes[0])
        right_root, right_frame, right_box = root_of(images, place.target, boxes[1])
        if (root, frame) == (right_root, right_frame) and box_iou(mistaken_box, right_box) > MAX_IOU:
            raise no_distractor("the mistaken call looks at the right place")
    if (call.op, call.target, call.arguments) == (right.op, right.target, right.arguments):
        raise no_distractor("the mistaken call equals the right one")


# Ways to make a mistake


def recrop_once(place: Place) -> list[MistakenCall]:
    place.require_op("zoom_in")
    box = near_miss(place.box, place.rng, MAX_IOU / 2)
    return [place.call_at(box, "recrop", "the crop lies beside the region")]


def recrop_twice(place: Place) -> list[MistakenCall]:
    first = recrop_once(place)
    before = place_of("zoom_in", first[0].arguments)
    assert before is not None
    for _ in range(8):
        box = near_miss(place.box, place.rng, MAX_IOU)
        if box_iou(box, before) <= MAX_IOU:
            return [*first, place.call_at(box, "recrop_again", "the second crop lies beside the region too")]
    raise no_distractor("there is no room for a second crop")


def oversized_zoom(place: Place) -> list[MistakenCall]:
    place.require_op("zoom_in")
    box = oversized(place.box, place.rng, MAX_IOU)
    if box == WHOLE:
        raise no_distractor("the crop would be the whole picture")
    arguments = {"box": [round(v, 4) for v in box]}
    wrong = "the crop is too large to see the details"
    return [MistakenCall("zoom_in", place.target, arguments, "oversized", wrong)]


def reselect_frames(place: Place) -> list[MistakenCall]:
    place.require_op("select_frames")
    clip = place.session.media[place.target]
    assert isinstance(clip, Clip)
    observation = place.session.restarted().execute("select_frames", place.target, **place.step.arguments)
    shown = [frame["index"] for frame in observation.data["frames"]]
    arguments = {"frames": other_frames(shown, len(clip.times), place.rng)}
    wrong = "the frames are of another moment"
    return [MistakenCall("select_frames", place.target, arguments, "frames", wrong)]


def wrong_object(place: Place) -> list[MistakenCall]:
    """The operation at a neighbouring annotated thing that no step is about, or else beside the object."""
    place.require_op("segment_object_at", "read_text", "track_object", "get_properties")
    target, box = place.target, place.box
    root, frame, whole = root_of(place.session.images, target, box)
    if place.op == "track_object":
        frame = int(place.step.arguments.get("start") or frame or 0)
    relevant = [whole, *_relevant_places(place, root)]
    annotations = place.golden.annotations or Annotations()
    regions = [r for r in annotations.regions if r.media == root and (r.frame or 0) == (frame or 0)]
    for other in sorted(regions, key=lambda r: abs(r.box[0] - whole[0]) + abs(r.box[1] - whole[1])):
        if any(box_iou(other.box, b) > MAX_IOU / 2 or holds_middle(other.box, b) for b in relevant):
            continue
        elsewhere = from_root(place.session.images, target, other.box)
        label = other.label
        if max(regions, key=lambda region: box_iou(region.box, whole)).label == label:
            return [place.call_at(elsewhere, "thing", "it is not the object asked about")]
        named = label if label.startswith(("the ", "a ", "an ")) else naming.article(label)
        return [place.call_at(elsewhere, "object", f"it is another object, {label}", named)]
    beside = near_miss(box, place.rng, MAX_IOU / 2)
    _, _, seen = root_of(place.session.images, target, beside)
    if any(box_iou(seen, right) > MAX_IOU / 2 or holds_middle(right, seen) for right in relevant):
        raise no_distractor("the question is also about what lies beside the object")
    return [place.call_at(beside, "thing", "it is not the object asked about")]


def _relevant_places(place: Place, root: str) -> list[Box]:
    session = place.session.restarted()
    session.replay(place.golden.turns)
    calls = [(step, place_of(str(step.op), step.arguments)) for step in session.calls if step.op != "zoom_in"]
    roots = [root_of(session.images, str(step.target), box) for step, box in calls if box is not None]
    return [box for name, _, box in roots if name == root]


def repaired_call(place: Place) -> list[MistakenCall]:
    """A call that is refused, for example with an unknown argument or an object that was never found."""
    op, target, right = place.op, place.target, place.step.arguments
    broken: list[tuple[str, dict[str, Any], str]] = []
    if op == "zoom_in" and "box" in right:
        broken.append((op, {**right, "factor": 2.0}, "a box and a factor exclude each other"))
        broken.append((op, {"factor": 2.0}, "a zoom needs a region"))
    if op == "read_text":
        broken.append((op, {**right, "language": "en"}, "read_text has no such argument"))
    if op == "segment_object_at":
        both = {**right, "box": [0.1, 0.1, 0.3, 0.3], "point": [0.2, 0.2]}
        broken.append((op, both, "a point or a box, not both"))
    if op in ("get_properties", "track_object") and "object" in right:
        broken.append((op, {**right, "object": "obj1"}, "no object of this id was found before"))
    if op == "select_frames" and isinstance(clip := place.session.media.get(target), Clip):
        beyond = {"frames": [len(clip.times) + int(place.rng.integers(1, 50))]}
        broken.append((op, beyond, "the clip has no such frame"))
    broken = broken or [("crop_image", dict(right), "there is no such operation")]
    name, arguments, wrong = broken[int(place.rng.integers(len(broken)))]
    return [MistakenCall(name, target, arguments, "refused", wrong, refused=True)]


WAYS: dict[str, Callable[[Place], list[MistakenCall]]] = {
    "recrop_once": recrop_once,
    "recrop_twice": recrop_twice,
    "oversized_zoom": oversized_zoom,
    "reselect_frames": reselect_frames,
    "wrong_object": wrong_object,
    "repaired_call": repaired_call,
}
