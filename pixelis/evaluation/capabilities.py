"""How well a policy uses each operation, by the ``meta.expected_calls`` of its questions."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError
from rapidfuzz.distance import LCSseq, Levenshtein

from pixelis.errors import BadInput, OperationError
from pixelis.evaluation.metrics import interval_of
from pixelis.evaluation.tracking import TrackingScores
from pixelis.operations import masks
from pixelis.operations.geometry import place_of
from pixelis.operations.operation import MADE
from pixelis.records import Action, Box, Group, Observation, Record, Trajectory
from pixelis.rewards.scorers import box_iou

MIN_COVERED = 0.95
"""Share of a thing that a view must contain to show it."""
MIN_VIEW_SHARE = 0.3
"""Share of a view's width or height that a thing must take up to be judged."""
MIN_OBJECT_IOU = 0.5
"""IoU from which on a segmented object is the expected one."""
BOUNDARY = 0.008
"""Distance, as a share of the diagonal, up to which boundaries agree (DAVIS, Perazzi et al. 2016)."""


class ExpectedCall(Record):
    """A call that a question needs, and the truth about what it should show.

    ``box`` (0..1) and ``mask`` (COCO run lengths) are in the picture ``media``, or in ``frame`` of a clip;
    ``track`` is its box by frame, ``frames`` the numbers to select.
    """

    op: str
    media: str = "img0"
    frame: int | None = None
    box: Box | None = None
    mask: dict[str, Any] | None = None
    text: str | None = None
    track: dict[int, Box] | None = None
    frames: list[int] | None = None


_EXPECTED = TypeAdapter(list[ExpectedCall])


@dataclass(frozen=True)
class Call:
    """An executed call of an episode; ``images`` are all of the episode's."""

    action: Action
    observation: Observation
    trajectory: Trajectory


def expected_calls(group: Group) -> list[ExpectedCall]:
    """The calls that the group's question needs, in order; BadInput for malformed ones."""
    try:
        return _EXPECTED.validate_python(group.question.meta.get("expected_calls", ()))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise BadInput(
            f"{group.question.id}: meta.expected_calls: {where}: {problem['msg']}", fix="correct the row"
        ) from None


def executed_calls(trajectory: Trajectory) -> list[Call]:
    return [Call(*executed, trajectory) for executed in trajectory.executed]


# Scores of one call


def shown_place(call: Call) -> tuple[str, int | None, Box] | None:
    """Media id, frame and box of the first view of a call; None without a view of a picture."""
    if not call.observation.images or call.observation.images[0].parent == MADE:
        return None
    try:
        return place_of(call.trajectory.images, call.observation.images[0].id)
    except OperationError:
        return None


def shows(place: tuple[str, int | None, Box] | None, truth: ExpectedCall) -> bool:
    """Whether a view of this place contains the thing, and large enough to judge it."""
    if place is None or truth.box is None or place[:2] != (truth.media, truth.frame):
        return False
    (x0, y0, x1, y1), (a, b, c, d) = truth.box, place[2]
    inside = max(0.0, min(x1, c) - max(x0, a)) * max(0.0, min(y1, d) - max(y0, b))
    share = max((x1 - x0) / (c - a), (y1 - y0) / (d - b))
    return inside > MIN_COVERED * (x1 - x0) * (y1 - y0) and share >= MIN_VIEW_SHARE


def object_iou(record: Mapping[str, Any], truth: ExpectedCall) -> float:
    """IoU of a segmented object's mask with the true one, or of the boxes where either has no mask."""
    if (record.get("root"), record.get("frame")) != (truth.media, truth.frame):
        return 0.0
    if truth.mask is None or record.get("mask") is None:
        return box_iou(record["box"], truth.box) if truth.box is not None else 0.0
    one, other = masks.decode(record["mask"]).full(), masks.decode(truth.mask).full()
    return float((one & other).sum() / (one | other).sum()) if one.shape == other.shape else 0.0


def error_rate(reading: Sequence[str], truth: Sequence[str]) -> float:
    """Edits from the truth by its length, at most 1: of characters or of words."""
    return min(1.0, Levenshtein.distance(reading, truth) / max(1, len(truth)))


def boundary_f1(mask: np.ndarray, truth: np.ndarray) -> float:
    """F1 of the boundary of bool [height, width] masks, 0..1 (DAVIS, Perazzi et al. 2016)."""
    from scipy import ndimage  # takes a fifth of a second to import

    outlines = [(m & ~ndimage.binary_erosion(m, border_value=0)) for m in (mask, truth)]
    if not all(outline.any() for outline in outlines):
        return 0.0
    tolerance = BOUNDARY * math.hypot(*truth.shape)
    near = [ndimage.distance_transform_edt(~outline) <= tolerance for outline in outlines]
    precision, recall = near[1][outlines[0]].mean(), near[0][outlines[1]].mean()
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def _zoom_score(calls: Sequence[Call], truth: ExpectedCall) -> float:
    return float(any(shows(shown_place(call), truth) for call in calls))


def _objects(calls: Sequence[Call]) -> list[Mapping[str, Any]]:
    return [record for call in calls for record in call.observation.data.get("objects", [])]


def _segment_score(calls: Sequence[Call], truth: ExpectedCall) -> float:
    return max((object_iou(record, truth) for record in _objects(calls)), default=0.0)


def _boundary_score(calls: Sequence[Call], truth: ExpectedCall) -> float | None:
    """`boundary_f1` of the object with the largest IoU; None without a mask of the truth."""
    if truth.mask is None:
        return None
    best = max(_objects(calls), key=lambda record: object_iou(record, truth), default=None)
    if best is None or best.get("mask") is None or not object_iou(best, truth):
        return 0.0
    return boundary_f1(masks.decode(best["mask"]).full(), masks.decode(truth.mask).full())


def _properties_score(calls: Sequence[Call], truth: ExpectedCall) -> float:
    objects = [call.trajectory.objects.get(str(call.action.arguments.get("object"))) for call in calls]
    return float(any(record and object_iou(record, truth) >= MIN_OBJECT_IOU for record in objects))


def _readings(calls: Sequence[Call]) -> list[str]:
    """Every line that was read, and the lines of each call together."""
    readings = [[str(line["text"]) for line in call.observation.data.get("lines", [])] for call in calls]
    return [text for lines in readings for text in (*lines, " ".join(lines))]


def _character_error_rate(calls: Sequence[Call], truth: ExpectedCall) -> float:
    return min((error_rate(text, truth.text or "") for text in _readings(calls)), default=1.0)


def _word_error_rate(calls: Sequence[Call], truth: ExpectedCall) -> float:
    expected = (truth.text or "").split()
    return min((error_rate(text.split(), expected) for text in _readings(calls)), default=1.0)


def _read_score(calls: Sequence[Call], truth: ExpectedCall) -> float:
    return 1 - _character_error_rate(calls, truth)


def _frames_score(calls: Sequence[Call], truth: ExpectedCall) -> float:
    images = [image for call in calls for image in call.observation.images if image.parent == truth.media]
    selected = {image.frame for image in images if image.frame is not None}
    expected = set(truth.frames or ())
    return 2 * len(selected & expected) / max(1, len(selected) + len(expected))


def _track_score(calls: Sequence[Call], truth: ExpectedCall) -> float:
    """Mean IoU of the best track over the frames of the true one."""
    tracks = [track for call in calls for track in tracks_of(call, truth.media)]
    boxes = truth.track or {}
    overlaps = [
        statistics.fmean(box_iou(track[f], box) if f in track else 0.0 for f, box in boxes.items())
        for track in tracks
    ]
    return max(overlaps, default=0.0)


def tracks_of(call: Call, media: str) -> list[dict[int, Box]]:
    """The boxes by frame of each track of a call in this clip."""
    tracks = [track for track in call.observation.data.get("tracks", []) if track.get("root") == media]
    return [dict(zip(track["frames"], track["boxes"], strict=True)) for track in tracks]


SCORES: dict[str, tuple[str, Callable[[Sequence[Call], ExpectedCall], float]]] = {
    "zoom_in": ("shown", _zoom_score),
    "segment_object_at": ("iou", _segment_score),
    "get_properties": ("right_object", _properties_score),
    "read_text": ("read", _read_score),
    "select_frames": ("frames_f1", _frames_score),
    "track_object": ("track_iou", _track_score),
}
"""Name and function of the score 0..1 of an operation: what the successful calls of an episode show of what
is expected.
"""

DETAILS: dict[str, dict[str, Callable[[Sequence[Call], ExpectedCall], float | None]]] = {
    "segment_object_at": {"boundary_f1": _boundary_score},
    "read_text": {"cer": _character_error_rate, "wer": _word_error_rate},
}
"""Further figures by operation, as means over what they can be measured on."""
TRACKING_SCORES = ("hota", "idf1", "mota", "motp", "switches")


# Scores of episodes


def capabilities(groups: Sequence[Group], bars: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Scores by operation over the questions that name their ``expected_calls``; empty without any.

    - ``operations``: by expected operation the ``n`` expectations, the ``calls``, the share ``used`` with
      success, the mean score (`SCORES`), 0 where unused, and the `DETAILS`; for track_object also HOTA, IDF1,
      MOTA, MOTP and the number of identity switches.
    - ``order``: share of episodes whose successful calls contain the expected operations in order.
    - ``unnecessary``: mean number of calls beyond those; the last of those, too, if its measured causal use is below
      the bar of its operation in ``bars`` (`evaluation.looking`). ``calls``: mean number of calls.
    """
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    used, calls_by_op = defaultdict[str, list[float]](list), defaultdict[str, int](int)
    order, unnecessary, numbers = defaultdict[str, list[float]](list), list[float](), list[float]()
    details: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    tracking, questions = TrackingScores(), 0
    for group in groups:
        expected = expected_calls(group)
        questions += bool(expected)
        for trajectory in group.trajectories if expected else ():
            calls = executed_calls(trajectory)
            right = [call for call in calls if call.observation.status == "ok"]
            for truth in expected:
                of_op = [call for call in right if call.action.op == truth.op]
                used[truth.op].append(float(bool(of_op)))
                if truth.op in SCORES:
                    scores[truth.op][group.question.id].append(SCORES[truth.op][1](of_op, truth))
                for name, measure in DETAILS.get(truth.op, {}).items():
                    if (value := measure(of_op, truth)) is not None:
                        details[truth.op][name].append(value)
            for call in calls:
                calls_by_op[call.action.op] += 1
            names = [truth.op for truth in expected]
            common = [
                right[number]
                for block in LCSseq.opcodes(names, [call.action.op for call in right])
                if block.tag == "equal"
                for number in range(block.dest_start, block.dest_end)
            ]
            order[group.question.id].append(float(len(common) == len(names)))
            use = common[-1].observation.causal_use if common else None
            is_unused = use is not None and use < (bars or {}).get(common[-1].action.op, -math.inf)
            unnecessary.append(float(len(calls) - len(common) + is_unused))
            numbers.append(float(len(calls)))
            if truths := [truth for truth in expected if truth.track]:
                tracked = [call for call in right if call.action.op == "track_object"]
                tracks = [track for call in tracked for track in tracks_of(call, truths[0].media)]
                tracking.add([truth.track or {} for truth in truths], tracks)
    if not questions:
        return {}
    by_operation: dict[str, dict[str, Any]] = {}
    for op, values in sorted(used.items()):
        by_operation[op] = {"n": len(values), "calls": calls_by_op[op], "used": statistics.fmean(values)}
        if op in scores:
            mean = statistics.fmean(score for of_question in scores[op].values() for score in of_question)
            by_operation[op] |= {"score": SCORES[op][0], "mean": mean, "ci95": list(interval_of(scores[op]))}
        by_operation[op] |= {name: statistics.fmean(values) for name, values in details[op].items()}
    if tracking.hota_counts:
        by_operation["track_object"] |= {name: getattr(tracking, name) for name in TRACKING_SCORES}
    in_order = statistics.fmean(value for of_question in order.values() for value in of_question)
    return {
        "questions": questions,
        "operations": by_operation,
        "order": {"mean": in_order, "ci95": list(interval_of(order))},
        "unnecessary": statistics.fmean(unnecessary),
        "calls": statistics.fmean(numbers),
    }
