"""The four layouts in which the published Pixelis wrote its trajectories.

Steps have ``action`` and ``parameters``, ``operation`` and ``arguments``, or ``name`` and ``parameters``; the
fourth has the lists ``chain_of_thought`` and ``visual_operations``. Coordinates are 0..1 if no number is
above 1, or else pixels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, get_args

from pixelis.datasets import fields
from pixelis.datasets.annotation_geometry import header_size
from pixelis.datasets.fields import RowError
from pixelis.datasets.formats.base import Format, Row, first_column, other_columns, question_text
from pixelis.datasets.media_root import MediaRoot
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
COORDINATES = {
    **dict.fromkeys(("box", "bbox", "region", "init_bbox", "bounding_box", "bbox_2d"), "box"),
    **dict.fromkeys(("point", "coordinates", "position"), "point"),
    "center": "center",
}
OBJECTS = ("object_id", "object", "mask")
FRAMES = ("frames", "frame_indices", "indices", "frame_index")
IGNORED = (
    "image image_path video_path target_size enhance maintain_aspect interpolation language threshold "
    "return_scores return_confidence return_boxes return_masks confidence_threshold properties max_frames "
    "track_id thought content"
)
"""Parameters that the configuration sets today, or that named objects in memory."""
KINDS = {"positive": "golden", "golden_positive": "golden", "trap_sample": "trap_perceptual"}


class _Step(NamedTuple):
    action: str
    parameters: dict[str, Any]
    thought: Any
    result: Any
    column: str


def _read_trajectory(row: Row, name: str, root: MediaRoot) -> Demonstration:
    value = row.get("trajectory")
    value = (value.get("actions") or value.get("steps")) if isinstance(value, dict) else value
    steps = list[_Step]()
    for i, step in enumerate(fields.objects({"trajectory": value}, "trajectory")):
        column = f"trajectory.{i}"
        layouts = [key for key in ("action", "operation", "name") if isinstance(step.get(key), str)]
        if len(layouts) > 1:
            raise RowError(column, "ambiguous_step", f"the step has {' and '.join(layouts)}")
        action = step[layouts[0]] if layouts else step.get("type")
        parameters = step.get("parameters", step.get("arguments", step.get("params"))) or {}
        if not isinstance(action, str) or not isinstance(parameters, dict):
            raise RowError(column, "wrong_type", "expected `action`, `operation` or `name`, and parameters")
        thoughts = (part.get(key) for part in (step, parameters) for key in ("thought", "content"))
        result = step.get("result", step.get("output"))
        steps.append(_Step(action, parameters, next(filter(None, thoughts), None), result, column))
    return _demonstration(row, name, root, steps)


def _read_chain(row: Row, name: str, root: MediaRoot) -> Demonstration:
    lists = {column: row.get(column) or [] for column in ("chain_of_thought", "visual_operations")}
    thoughts = [item.get("thought") for item in fields.objects(lists, "chain_of_thought")]
    operations, steps = fields.objects(lists, "visual_operations"), list[_Step]()
    for i, operation in enumerate(operations):
        column, action = f"visual_operations.{i}", operation.get("operation") or operation.get("op")
        parameters = operation.get("params", operation.get("parameters", {}))
        if not isinstance(action, str) or not isinstance(parameters, dict):
            raise RowError(column, "wrong_type", "`operation` is text and `params` an object")
        thought = thoughts[i] if i < len(thoughts) else None
        steps.append(_Step(action, parameters, thought, operation.get("output"), column))
    later = thoughts[len(operations) :]
    steps += [_Step("THINK", {}, thought, None, "chain_of_thought") for thought in later]
    return _demonstration(row, name, root, steps)


def _demonstration(row: Row, name: str, root: MediaRoot, steps: list[_Step]) -> Demonstration:
    media = root.media(row, first_column(row, ("image_path", "image", "images")), "video_path")
    answers = fields.answers(row, "answer")
    turns, thoughts, final, boxes = list[Step](), list[str](), answers[0], dict[str, Any]()
    for action, parameters, thought, result, column in steps:
        kind = action.upper().removeprefix("VISUAL_OPERATION.")
        if kind in THOUGHTS:
            thought = thought or parameters.get("text") or result
        elif kind in ANSWERS:
            written = result if isinstance(result, str) else final
            final = str(parameters.get("answer", parameters.get("text", written)))
        elif kind not in OPERATIONS:
            message = f"no operation {action[:40]!r}; known are {', '.join(OPERATIONS)}"
            raise RowError(column, "unknown_op", message)
        thoughts += [thought] if isinstance(thought, str) and thought else []
        if kind in OPERATIONS:
            arguments = _arguments(OPERATIONS[kind], parameters, media, boxes, column)
            turns.append(Step(think="\n".join(thoughts) or None, op=OPERATIONS[kind], arguments=arguments))
            thoughts = []
            if isinstance(result, dict) and result.get("object_id") and result.get("bbox"):
                boxes[str(result["object_id"])] = result["bbox"]
    turns.append(Step(think="\n".join(thoughts) or None, answer=final))
    own_id = fields.identifier(row, "sample_id", "id") or name
    truth = row.get("ground_truth")
    truth = truth.get("answer") if isinstance(truth, dict) else truth
    return Demonstration(
        id=own_id,
        question=question_text(fields.text(row, "question"), "question", media)
        if row.get("question")
        else "",
        media=media,
        answers=[str(truth)] if isinstance(truth, str | int | float) and truth != "" else answers,
        task=fields.identifier(row, "task_type", "task") or "qa",
        turns=turns,
        **_sample_fields(row, own_id),
    )


def _sample_fields(row: Row, own_id: str) -> dict[str, Any]:
    kind = fields.identifier(row, "sample_type", "type") or "golden"
    if KINDS.get(kind, kind) not in get_args(SampleKind):
        raise RowError("sample_type", "unknown_kind", f"no kind of sample {kind!r}")
    columns = {"difficulty": "difficulty_score", "quality": "quality_score", "weight": "sampling_weight"}
    numbers = {field: fields.optional(row, column, (int, float)) for field, column in columns.items()}
    origin = row["provenance"] if isinstance(row.get("provenance"), dict) else {}
    provenance = Provenance(
        source=str(origin.get("source_dataset", "pixelis")),
        original_id=str(origin.get("original_sample_id", own_id)),
        method=str(origin.get("synthesis_method", "published")),
        version=str(origin.get("synthesis_version", "")),
    )
    level = row.get("difficulty")
    return {
        "kind": KINDS.get(kind, kind),
        "provenance": provenance,
        "level": level if level in get_args(Level) else None,
        "meta": other_columns(row["metadata"]) if isinstance(row.get("metadata"), dict) else {},
        **{field: number for field, number in numbers.items() if number is not None},
    }


def _arguments(
    op: str, parameters: dict[str, Any], media: list[Media], boxes: dict[str, Any], column: str
) -> dict[str, Any]:
    """Today's arguments of an operation; ``boxes`` are those of earlier objects by id."""
    result: dict[str, Any] = {}
    for key, value in parameters.items():
        name, place = f"{column}.{key}", COORDINATES.get(key)
        if place is not None:
            result[place] = _fractions(value, 4 if place == "box" else 2, media, column, name)
        elif key in OBJECTS and op in ("get_properties", "track_object"):
            if str(value) not in boxes:
                raise RowError(name, "unknown_object", "no earlier step returned the bbox of this object")
            result["box"] = _fractions(boxes[str(value)], 4, media, column, name)
        elif key in FRAMES and op == "select_frames":
            result["frames"] = [value] if isinstance(value, int) else value
        elif key in ("x", "y") and op == "segment_object_at":
            result["point"] = _fractions(parameters, 2, media, column, name)
        elif key in ("zoom_factor", "factor") and op == "zoom_in":
            result["factor"] = value
        elif key in ("start", "start_frame", "end", "end_frame") and op == "track_object":
            result[key.removesuffix("_frame")] = value
        elif key not in IGNORED.split():
            raise RowError(name, "unknown_argument", f"{op} has no such argument")
    return result


def _fractions(value: Any, count: int, media: list[Media], step: str, column: str) -> list[float]:
    """A box (``count`` 4) or point (2) in 0..1 or in pixels -> 0..1."""
    if isinstance(value, dict):
        value = [value.get(key) for key in (("x1", "y1", "x2", "y2") if count == 4 else ("x", "y"))]
    if not isinstance(value, list) or len(value) != count or not all(type(v) in (int, float) for v in value):
        raise RowError(column, "bad_box" if count == 4 else "bad_point", f"expected {count} numbers")
    if max(value) > 1:
        path = next(((m.frames or [m.uri])[0] for m in media if m.kind == "image" or m.frames), None)
        if path is None:
            raise RowError(step, "unknown_size", "pixels of a clip of unknown size")
        width, height = header_size(Path(path), step)
        value = [v / (height if i % 2 else width) for i, v in enumerate(value)]
    inside = all(0 <= v <= 1 for v in value)  # false for NaN
    if not inside or (count == 4 and (value[0] >= value[2] or value[1] >= value[3])):
        raise RowError(column, "out_of_range", "the coordinates are outside the image")
    return [float(v) for v in value]


TRAJECTORY, CHAIN = Format(_read_trajectory), Format(_read_chain)
