"""Rewards coherent sequences of operations and penalises misuse. Source: Pixelis, arXiv 2603.25091."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from pixelis.errors import DataFailure
from pixelis.records import Action, Question, Trajectory

SEGMENT = "segment_object_at"
READ = "read_text"
PROPERTIES = "get_properties"
TRACK = "track_object"
ZOOM = "zoom_in"

GOOD = {(SEGMENT, PROPERTIES), (ZOOM, READ), (SEGMENT, TRACK)}
THOUGHTFUL = {READ, PROPERTIES}
"""A thought after one of these operations is a good sequence."""
BAD = {(TRACK, TRACK), (ZOOM, ZOOM), (PROPERTIES, SEGMENT)}
REPETITION, BONUS, BAD_PAIR, CONTRADICTION = -0.5, 0.2, -0.3, -0.3

CAPS = {TRACK: 5, PROPERTIES: 10, READ: 15, ZOOM: 3, SEGMENT: 10}
"""Uses of an operation that cost nothing."""
PENALTIES = {
    "overuse": -0.1,
    "missing_prerequisite": -0.1,
    "track_on_static_image": -0.2,
    "out_of_bounds_coordinates": -0.05,
}
PENALTIES |= {"missing_answer": -0.1, "invalid_operation": -0.5}
OUTSIDE = {"out_of_range", "bad_box", "bad_point"}
INVALID = {"bad_json", "unknown_op", "bad_arguments", "bad_target", "unknown_object", "limit"}


def coherence(
    trajectory: Trajectory, states: Sequence[Sequence[float]] | None = None
) -> tuple[float, Counter[str]]:
    """(mean of the findings in -1..1, 0 without findings; counts of findings by name).

    Findings: adjacent calls and thoughts; with ``states``, the mean cosine of adjacent ones; segmenting a
    place again; properties or tracks of an object neither segmented nor given as a region.
    """
    turns = trajectory.replies
    findings: list[float] = []
    counts: Counter[str] = Counter()

    def add(name: str, value: float) -> None:
        findings.append(value)
        counts[name] += 1

    steps = [(turn, action) for turn in turns for action in (turn.actions or (None,))]
    for (turn, before), (next_turn, after) in pairwise(steps):
        if before is None:
            continue
        if before.op in THOUGHTFUL and next_turn is not turn:
            thought, closing, _ = next_turn.text.partition("</think>")
            if closing and thought.replace("<think>", "").strip():
                add("good_sequences", BONUS)
        if after is None:
            continue
        pair = (before.op, after.op)
        if before == after:
            add("repetitions", REPETITION)
        if pair in GOOD:
            add("good_sequences", BONUS)
        if pair in BAD:
            add("bad_sequences", BAD_PAIR)
    if states is not None and len(states) > 1 and len(turns) > 1:
        similarity = sum(_cosine(a, b) for a, b in pairwise(states)) / (len(states) - 1)
        if 0.3 <= similarity <= 0.7:
            add("good_similarity", 0.3)
        elif similarity > 0.9:
            add("stuck", -0.2)
        elif similarity < 0.1:
            add("jumping", -0.3)
    if contradictions := _contradictions(trajectory.actions):
        findings.append(CONTRADICTION * contradictions)
        counts["contradictions"] = contradictions
    value = math.fsum(findings) / len(findings) if findings else 0.0
    return max(-1.0, min(1.0, value)), counts


def violations(trajectory: Trajectory, question: Question) -> Counter[str]:
    """Counts of misuses by name, such as ``overuse_zoom_in`` and ``missing_prerequisite_get_properties``."""
    counts: Counter[str] = Counter()
    uses: Counter[str] = Counter()
    static = bool(question.media) and all(media.kind != "video" for media in question.media)
    segmented = False
    for i, turn in enumerate(trajectory.turns):
        if not turn.is_policy:
            continue
        for number, action in enumerate(turn.actions or (None,), i + 1):
            reply = trajectory.turns[number].observation if number < len(trajectory.turns) else None
            failed = reply is not None and reply.status == "error"
            code = turn.error or (reply.code if reply is not None and failed else None)
            counts["out_of_bounds_coordinates"] += code in OUTSIDE
            counts["invalid_operation"] += code in INVALID
            if action is None:
                continue
            uses[action.op] += 1
            if uses[action.op] > CAPS.get(action.op, len(trajectory.turns)):
                counts[f"overuse_{action.op}"] += 1
            if action.op in (TRACK, PROPERTIES) and not segmented and not _has_region(action):
                counts[f"missing_prerequisite_{action.op}"] += 1
            if action.op == TRACK and (static or code == "not_a_video"):
                counts["track_on_static_image"] += 1
            segmented = segmented or (action.op == SEGMENT and not failed and turn.error is None)
    counts["missing_answer"] += trajectory.answer is None
    return +counts


def misuse(violations: Counter[str]) -> float:
    return sum(
        count * next(v for kind, v in PENALTIES.items() if name.startswith(kind))
        for name, count in violations.items()
    )


def _contradictions(actions: Sequence[Action]) -> int:
    count, places = 0, set[str]()
    for action in actions:
        if action.op == SEGMENT:
            place = json.dumps([action.target, action.arguments], sort_keys=True)
            count += place in places
            places.add(place)
        elif action.op in (PROPERTIES, TRACK):
            count += not places and not _has_region(action)
    return count


def _has_region(action: Action) -> bool:
    """Whether a call names its own region and so needs no segmented object."""
    return "box" in action.arguments or "point" in action.arguments


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) != len(b):
        raise DataFailure(f"states of {len(a)} and {len(b)} numbers", code="bad_states")
    norms = math.hypot(*a) * math.hypot(*b)
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else 0.0
