"""Qwen: any operation as ``{"name":..,"arguments":{..}}``, images by id, the model's own coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pixelis.dialogue.dialects.base import (
    ANSWER_RULE,
    SIGNATURES,
    Dialect,
    Piece,
    Tag,
    calls_allowed,
    checked_action,
    default_target,
    describe_view,
    function,
    numbers_schema,
    signatures,
)
from pixelis.dialogue.dialects.strict import named_call
from pixelis.errors import OperationError
from pixelis.operations.operation import Operation
from pixelis.operations.scale import MAX_PLACES, PLACES, Scale, image_of
from pixelis.records import Action, Coordinates, ImageView

TOOLS = f"""{ANSWER_RULE}

# Tools

{{calls}} Every result has its own id. \
The images of the question are: """
UNITS = {
    "thousand": "0 to 1000 of the image",
    "pixels": "pixels of the image as shown",
    "unit": "0 to 1 of the image",
}


class Qwen(Dialect):
    """An optional thought, then a call or an answer in tags.

    The argument ``target`` names the image; coordinates have the names of ``PLACES``, as ``bbox_2d`` for ``box``.
    """

    name = "qwen"
    functions = True
    signatures = SIGNATURES
    parallel_calls = True
    thinks = False

    def offers(self, operation: type[Operation]) -> bool:
        return True

    def schema(self, operation: type[Operation], kind: Coordinates) -> dict[str, Any]:
        if operation.parameters is not None:
            names = {"name": operation.name, "description": operation.description}
            return {"type": "function", "function": {**names, "parameters": operation.parameters}}
        schema = operation.Arguments.model_json_schema()
        properties = {}
        for name, described in schema.get("properties", {}).items():
            place = _place_schema(name, kind)
            if place and "description" in described:
                place["description"] = f"{described['description']}: {place['description']}"
            properties[_in_calls(name)] = place or _plain(described)
        required = [_in_calls(name) for name in schema.get("required", [])]
        if operation.targeted:
            properties["target"] = {
                "type": "string",
                "description": "id of the image or video: img0, obs1, vid0, ...; default: the first",
            }
        return function(operation.name, operation.description, properties, required)

    def system(
        self,
        views: Sequence[ImageView],
        operations: Mapping[str, type[Operation]],
        coordinates: Coordinates,
        max_calls: int = 1,
    ) -> list[Piece]:
        if not operations:
            return [Tag(ANSWER_RULE)]
        schemas = [self.schema(operation, coordinates) for operation in operations.values()]
        # Ids are part of the question, so they are plain text.
        rules = TOOLS.format(calls=calls_allowed(max_calls))
        pictures = ", ".join(describe_view(view) for view in views)
        return [Tag(rules), pictures or "none", Tag("\n\n"), *signatures(schemas, self.signatures)]

    def _write_call(self, action: Action, scale: Scale) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for key, value in action.arguments.items():
            if key in PLACES and action.target:
                image = image_of(PLACES[key], action.arguments, action.target)
                arguments[PLACES[key].wire] = scale.write_argument(key, value, image)
            else:
                arguments[key] = value
        if action.target and action.target != default_target(scale.sizes):
            arguments["target"] = action.target
        return {"name": action.op, "arguments": arguments}

    def _read_call(self, call: Any, operations: Mapping[str, type[Operation]], scale: Scale) -> Action:
        name, arguments = named_call(call, list(operations))
        if not operations[name].targeted:
            return checked_action(operations, name, "", arguments)
        target = arguments.pop("target", default_target(scale.sizes))
        if not isinstance(target, str):
            raise OperationError("target is the id of an image", code="bad_target")
        scale.extent(target)
        fields = operations[name].Arguments.model_fields
        for field_name, place in PLACES.items():
            if field_name in arguments:
                raise OperationError(f"{field_name} is unknown, write {place.wire}", code="bad_arguments")
            if field_name not in fields:
                continue
            if (value := arguments.pop(place.wire, None)) is not None:
                arguments[field_name] = scale.read_argument(
                    field_name, value, image_of(place, arguments, target)
                )
            elif fields[field_name].is_required():
                raise OperationError(f"{place.wire} is missing", code="bad_arguments")
        return checked_action(operations, name, target, arguments)


def _in_calls(name: str) -> str:
    return PLACES[name].wire if name in PLACES else name


def _place_schema(name: str, kind: Coordinates) -> dict[str, Any] | None:
    if name not in PLACES:
        return None
    place = PLACES[name]
    names = "left, top, right, bottom" if place.count == 4 else "x, y"
    shape = numbers_schema("number" if kind == "unit" else "integer", place.count)
    if place.many:
        shape = {"type": "array", "items": shape, "maxItems": MAX_PLACES}
    unit = (
        UNITS[kind]
        if place.image == "target"
        else UNITS[kind].replace("the image", f"the image `{place.image}`")
    )
    return {**shape, "description": f"{'each ' if place.many else ''}{names} in {unit}"}


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """A property without titles and the null of optional arguments."""
    schema = {key: value for key, value in schema.items() if key != "title"}
    kinds = [kind for kind in schema.get("anyOf", []) if kind.get("type") != "null"]
    if len(kinds) == 1 and len(kinds) < len(schema["anyOf"]):
        schema = {
            **kinds[0],
            **{key: value for key, value in schema.items() if key != "anyOf" and value is not None},
        }
    return schema
