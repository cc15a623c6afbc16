"""The layouts that the published Pixelis wrote its trajectories in, into ``Demonstration``.

There are four: steps of ``action`` and ``parameters`` (its generators), of ``operation`` and ``arguments`` (its engine), of
``type``, ``name`` and ``parameters`` (its documents), and two lists ``chain_of_thought`` and ``visual_operations``. Each is read
by its own names, so that no step comes out blank. Places are 0..1 when no number is above 1, else pixels of the picture.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from pixelis.datasets.fields import Fields, RowError
from pixelis.datasets.readers.places import header_size
from pixelis.records import Demonstration, Level, Media, Provenance, SampleKind, Step

OPERATIONS = {
    "SEGMENT_OBJECT_AT": "segment_object_at",
    "SEGMENT": "segment_object_at",
    "GET_PROPERTIES": "get_properties",
    "PROPERTIES": "get_properties",
    "READ_TEXT": "read_text",
    "TRACK_OBJECT": "track_object",
    "TRACK": "track_object",
    "ZOOM_IN": "zoom_in",
    "ZOOM": "zoom_in",
    "SELECT_FRAME": "select_frames",
    "SELECT_FRAMES": "select_frames",
}
THOUGHTS = ("THINK", "REASONING", "CORRECTION")
ANSWERS = ("ANSWER", "FINAL_ANSWER")
PLACES = {
    **dict.fromkeys(("box", "bbox", "region", "init_bbox", "bounding_box", "bbox_2d"), "box"),
    **dict.fromkeys(("point", "coordinates", "position"), "point"),
    "center": "center",
}
FRAMES = ("frames", "frame_indices", "indices", "frame_index")
DROPPED = frozenset(
    (
        *("image", "image_path", "video_path", "target_size", "enhance", "maintain_aspect", "interpolation", "language"),
        *("threshold", "return_scores", "return_confidence", "return_boxes", "return_masks", "confidence_threshold"),
        *("properties", "max_frames", "track_id", "thought", "content"),
    )
)
"""Settings of the old operations that ours take from the configuration, or that name what was in memory then."""
KINDS = {"positive": "golden", "golden_positive": "golden", "golden": "golden", "trap_sample": "trap_perceptual"}

Written = tuple[str, dict[str, Any], str | None, Any]
"""Of one step: the name of what is done, its parameters, its thought and its result."""


def read_trajectory(row: Fields, name: str) -> Demonstration:
    """A row with a list ``trajectory``: the layouts of the generators, the engine and the documents."""
    steps = row.get("trajectory")
    if isinstance(steps, dict):
        steps = steps.get("actions") or steps.get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise RowError("trajectory", "wrong_type", "a list of steps is wanted")
    written = [_written(step, f"trajectory.{i}") for i, step in enumerate(steps)]
    return _demonstration(row, name, written, "trajectory")


def read_chain(row: Fields, name: str) -> Demonstration:
    """A row with the lists ``chain_of_thought`` and ``visual_operations``: a thought before each operation, the rest last."""
    thoughts = [item.get("thought") for item in _objects(row, "chain_of_thought")]
    operations = _objects(row, "visual_operations")
    written: list[Written] = []
    for i, operation in enumerate(operations):
        done = operation.get("operation") or operation.get("op")
        parameters = operation.get("params", operation.get("parameters", {}))
        if not isinstance(done, str) or not isinstance(parameters, dict):
            raise RowError(f"visual_operations.{i}", "wrong_type", "`operation` is text and `params` an object")
        written.append((done, parameters, thoughts[i] if i < len(thoughts) else None, operation.get("output")))
    written += [("THINK", {}, thought, None) for thought in thoughts[len(operations) :]]
    return _demonstration(row, name, written, "visual_operations")


def _written(step: dict[str, Any], column: str) -> Written:
    layouts = [key for key in ("action", "operation", "name") if isinstance(step.get(key), str) and step[key]]
    if len(layouts) > 1:
        raise RowError(column, "ambiguous_step", f"the step has {' and '.join(f'`{key}`' for key in layouts)}")
    parameters = step.get("parameters", step.get("arguments", step.get("params"))) or {}
    done = step[layouts[0]] if layouts else step.get("type")
    if not isinstance(done, str) or not isinstance(parameters, dict):
        raise RowError(column, "wrong_type", "a step has `action`, `operation` or `name`, and an object of parameters")
    thought = step.get("thought") or step.get("content") or parameters.get("thought") or parameters.get("content")
    return done, parameters, thought if isinstance(thought, str) else None, step.get("result", step.get("output"))


def _demonstration(row: Fields, name: str, written: list[Written], column: str) -> Demonstration:
    media = row.media(next((c for c in ("image_path", "image", "images") if c in row), None), "video_path")
    answers = row.answers("answer")
    turns, pending, final, found = list[Step](), list[str](), answers[0], dict[str, Any]()
    for i, (done, parameters, thought, result) in enumerate(written):
        place, kind = f"{column}.{i}", done.upper().removeprefix("VISUAL_OPERATION.")
        said = thought or (parameters.get("text") if kind in THOUGHTS else None) or (result if kind in THOUGHTS else None)
        if kind in THOUGHTS:
            pending += [said] if isinstance(said, str) else []
        elif kind in ANSWERS:
            given = parameters.get("answer", parameters.get("text", result if isinstance(result, str) else None))
            final, pending = (str(given) if given is not None else final), pending + ([said] if said else [])
        elif kind in OPERATIONS:
            arguments = _arguments(OPERATIONS[kind], parameters, media, found, place)
            think = "\n".join([*pending, *([said] if said else [])]) or None
            turns.append(Step(think=think, op=OPERATIONS[kind], arguments=arguments))
            pending = []
            if isinstance(result, dict) and (known := result.get("object_id")) and result.get("bbox"):
                found[str(known)] = result["bbox"]
        else:
            raise RowError(place, "unknown_op", f"no operation {done[:40]!r}; known are {', '.join(OPERATIONS)}")
    turns.append(Step(think="\n".join(pending) or None, answer=final))
    own = row.name("sample_id", "id") or name
    truths = row.values.get("ground_truth")
    truth = truths.get("answer") if isinstance(truths, dict) else truths
    return Demonstration(
        id=own,
        question=row.question(row.text("question"), "question", media) if "question" in row else "",
        media=media,
        answers=[str(truth)] if isinstance(truth, str | int | float) and str(truth) else answers,
        task=row.name("task_type", "task") or "qa",
        turns=turns,
        **_about(row, own),
    )


def _about(row: Fields, own: str) -> dict[str, Any]:
    kind = row.name("sample_type", "type") or "golden"
    if KINDS.get(kind, kind) not in get_args(SampleKind):
        raise RowError("sample_type", "unknown_kind", f"no kind of sample {kind!r}")
    told = row.values.get("provenance")
    origin = told if isinstance(told, dict) else {}
    out: dict[str, Any] = {"kind": KINDS.get(kind, kind), "difficulty": _number(row, "difficulty_score")}
    if (weight := _number(row, "sampling_weight")) is not None:
        out["weight"] = weight
    out["quality"] = _number(row, "quality_score")
    if (level := row.values.get("difficulty")) in get_args(Level):
        out["level"] = level
    out["provenance"] = Provenance(
        source=str(origin.get("source_dataset", "pixelis")),
        original_id=str(origin.get("original_sample_id", own)),
        method=str(origin.get("synthesis_method", "published")),
        version=str(origin.get("synthesis_version", "")),
    )
    if isinstance(row.values.get("metadata"), dict):
        out["meta"] = row.section("metadata").rest()
    return out


def _arguments(op: str, parameters: dict[str, Any], media: list[Media], found: dict[str, Any], column: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    size = _sizes(media, column)
    for key, value in parameters.items():
        if key in PLACES:
            out[PLACES[key]] = _place(value, 4 if PLACES[key] == "box" else 2, size, f"{column}.{key}")
        elif key in ("object_id", "object", "mask") and op in ("get_properties", "track_object"):
            if str(value) not in found:
                raise RowError(f"{column}.{key}", "unknown_object", "no earlier step found this object and told its bbox")
            out["box"] = _place(found[str(value)], 4, size, f"{column}.{key}")
        elif key in FRAMES and op == "select_frames":
            out["frames"] = [value] if isinstance(value, int) else value
        elif key in ("x", "y") and op == "segment_object_at":
            out["point"] = _place([parameters.get("x"), parameters.get("y")], 2, size, f"{column}.{key}")
        elif key in ("zoom_factor", "factor") and op == "zoom_in":
            out["factor"] = value
        elif key in ("start", "start_frame", "end", "end_frame") and op == "track_object":
            out[key.removesuffix("_frame")] = value
        elif key not in DROPPED:
            raise RowError(f"{column}.{key}", "unknown_argument", f"{op} has nothing like it")
    return out


def _place(value: Any, count: int, size: Callable[[], tuple[int, int]], column: str) -> list[float]:
    if isinstance(value, dict):
        value = [value.get(key) for key in (("x1", "y1", "x2", "y2") if count == 4 else ("x", "y"))]
    if not isinstance(value, list) or len(value) != count or not all(type(v) in (int, float) for v in value):
        raise RowError(column, "bad_box" if count == 4 else "bad_point", f"{count} numbers are wanted")
    if max(value) > 1:
        width, height = size()
        value = [v / (height if i % 2 else width) for i, v in enumerate(value)]
    inside = all(0 <= v <= 1 for v in value)  # NaN is not
    if not inside or (count == 4 and (value[0] >= value[2] or value[1] >= value[3])):
        raise RowError(column, "out_of_range", "the place is not inside the picture")
    return [float(v) for v in value]


def _sizes(media: list[Media], column: str) -> Callable[[], tuple[int, int]]:
    def size() -> tuple[int, int]:
        item = next((m for m in media if m.kind == "image" or m.frames), None)
        if item is None:
            raise RowError(column, "unknown_size", "a place in pixels of a clip whose size is not known")
        return header_size(Path(item.frames[0] if item.frames else item.uri), column)

    return size


def _objects(row: Fields, column: str) -> list[dict[str, Any]]:
    value = row.values.get(column) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RowError(column, "wrong_type", "a list of objects is wanted")
    return value


def _number(row: Fields, column: str) -> float | None:
    value = row.values.get(column)
    if value is None or type(value) in (int, float):
        return value
    raise RowError(column, "wrong_type", f"a number is wanted, not {type(value).__name__}")
