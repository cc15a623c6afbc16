"""Rewards sensible sequences of operations and penalises misuse. Source: Pixelis, arXiv 2603.25091."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from pixelis.errors import DataFailure
from pixelis.records import Action, Question, Trajectory, Turn

SEGMENT, READ, PROPERTIES, TRACK, ZOOM = "segment_object_at", "read_text", "get_properties", "track_object", "zoom_in"

GOOD = {(SEGMENT, PROPERTIES), (ZOOM, READ), (SEGMENT, TRACK)}
THOUGHTFUL = {READ, PROPERTIES}
"""Operations after which a thought is a good sequence."""
BAD = {(TRACK, TRACK), (ZOOM, ZOOM), (PROPERTIES, SEGMENT)}
REPETITION, BONUS, BAD_PAIR, CONTRADICTION = -0.5, 0.2, -0.3, -0.3

CAPS = {TRACK: 5, PROPERTIES: 10, READ: 15, ZOOM: 3, SEGMENT: 10}
"""Uses of an operation beyond which each costs."""
PENALTIES = {"overuse": -0.1, "missing_prerequisite": -0.1, "track_on_static_image": -0.2, "out_of_bounds_coordinates": -0.05}
PENALTIES |= {"missing_answer": -0.1, "invalid_operation": -0.5}
OUTSIDE = {"out_of_range", "bad_box", "bad_point"}
INVALID = {"bad_json", "unknown_op", "bad_arguments", "bad_target", "unknown_object", "limit"}


def coherence(trajectory: Trajectory, states: Sequence[Sequence[float]] | None = None) -> tuple[float, Counter[str]]:
    """(value in -1..1, what was found by name): the mean of all findings, 0 without any.

    Findings over adjacent turns: the same call again -0.5, a good pair +0.2, a bad pair -0.3; with ``states`` (vectors of the
    turns, at least two) their mean cosine between 0.3 and 0.7 is +0.3, above 0.9 -0.2, below 0.1 -0.3; all contradictions
    together -0.3 each: the same place segmented again, properties or tracks of something never segmented nor pointed at.
    """
    turns = [turn for turn in trajectory.turns if turn.is_policy]
    findings: list[float] = []
    names: Counter[str] = Counter()

    def found(name: str, value: float) -> None:
        findings.append(value)
        names[name] += 1

    for before, after in pairwise(turns):
        if before.action is None:
            continue
        if before.action.op in THOUGHTFUL and _thinks(after):
            found("good_sequences", BONUS)
        if after.action is None:
            continue
        pair = (before.action.op, after.action.op)
        if before.action == after.action:
            found("repetitions", REPETITION)
        if pair in GOOD:
            found("good_sequences", BONUS)
        if pair in BAD:
            found("bad_sequences", BAD_PAIR)
    if states is not None and len(states) > 1 and len(turns) > 1:
        similarity = sum(_cosine(a, b) for a, b in pairwise(states)) / (len(states) - 1)
        if 0.3 <= similarity <= 0.7:
            found("good_similarity", 0.3)
        elif similarity > 0.9:
            found("stuck", -0.2)
        elif similarity < 0.1:
            found("jumping", -0.3)
    if contradictions := _contradictions(trajectory.actions):
        findings.append(CONTRADICTION * contradictions)
        names["contradictions"] = contradictions
    value = math.fsum(findings) / len(findings) if findings else 0.0
    return max(-1.0, min(1.0, value)), names


def violations(trajectory: Trajectory, question: Question) -> Counter[str]:
    """Misuses of operations by name, such as ``overuse_zoom_in`` and ``missing_prerequisite_get_properties``; see ``misuse``."""
    found: Counter[str] = Counter()
    uses: Counter[str] = Counter()
    still = bool(question.media) and all(media.kind != "video" for media in question.media)
    segmented = False
    for i, turn in enumerate(trajectory.turns):
        if not turn.is_policy:
            continue
        reply = trajectory.turns[i + 1].observation if i + 1 < len(trajectory.turns) else None
        refused = reply is not None and reply.status == "error"
        code = turn.error or (reply.code if reply is not None and refused else None)
        if (action := turn.action) is not None:
            uses[action.op] += 1
            if uses[action.op] > CAPS.get(action.op, len(trajectory.turns)):
                found[f"overuse_{action.op}"] += 1
            if action.op in (TRACK, PROPERTIES) and not segmented and not _points(action):
                found[f"missing_prerequisite_{action.op}"] += 1
            if action.op == TRACK and (still or code == "not_a_video"):
                found["track_on_static_image"] += 1
            segmented = segmented or (action.op == SEGMENT and not refused and turn.error is None)
        found["out_of_bounds_coordinates"] += code in OUTSIDE
        found["invalid_operation"] += code in INVALID
    found["missing_answer"] += trajectory.answer is None
    return +found


def misuse(found: Counter[str]) -> float:
    """The sum of the penalties, at most 0: -0.1 for each use beyond the cap, missing prerequisite and missing answer, -0.2 for a
    track on a still picture, -0.05 for coordinates outside, -0.5 for an operation that is none.
    """
    total = 0.0
    for name, times in found.items():
        total += times * next(value for kind, value in PENALTIES.items() if name.startswith(kind))
    return total


def _contradictions(actions: Sequence[Action]) -> int:
    count, places = 0, set[str]()
    for action in actions:
        if action.op == SEGMENT:
            place = json.dumps([action.target, action.arguments], sort_keys=True)
            count += place in places
            places.add(place)
        elif action.op in (PROPERTIES, TRACK):
            count += not places and not _points(action)
    return count


def _points(action: Action) -> bool:
    """True for a call that brings its own region: it needs no object that was segmented before."""
    return "box" in action.arguments or "point" in action.arguments


def _thinks(turn: Turn) -> bool:
    thought, closing, _ = turn.text.partition("</think>")
    return bool(closing) and bool(thought.replace("<think>", "").strip())


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) != len(b):
        raise DataFailure(f"states of {len(a)} and {len(b)} numbers", code="bad_states")
    norms = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(x * x for x in b))
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else 0.0
