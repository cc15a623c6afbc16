"""Parses an operation's arguments in the form name=value and explains errors in them."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pixelis.operations import Operation, Scene

EXAMPLE = {4: "for example {}=0.1,0.2,0.4,0.5", 2: "for example {}=0.5,0.6"}


class Usage(Exception):
    """Error in the command line. The message names the correct form."""


def described_arguments(operation: type[Operation]) -> list[str]:
    """One line for each argument: name, form, default, meaning."""
    from pixelis.operations.scale import PLACES

    schema = operation.Arguments.model_json_schema()
    required, out = set(schema.get("required", [])), []
    for name, field in schema.get("properties", {}).items():
        if (place := PLACES.get(name)) is not None:
            form = "x0,y0,x1,y1" if place.count == 4 else "x,y"
            form += f";{form};..." if place.many else ""
        else:
            form = _form(field)
        default = field.get("default")
        status = "required" if name in required else "optional" if default is None else f"default {json.dumps(default)}"
        meaning = f": {field['description']}" if "description" in field else ""
        out.append(f"    {name}={form} ({status}){meaning}")
    return out


def _form(schema: Mapping[str, Any]) -> str:
    kinds = [k for k in schema.get("anyOf", [schema]) if k.get("type") != "null"]
    names = {"integer": "N", "number": "X", "string": "TEXT", "boolean": "true|false", "array": "A,B,...", "object": "{...}"}
    return "|".join("|".join(map(str, k["enum"])) if "enum" in k else names.get(k.get("type", ""), "VALUE") for k in kinds)


def unknown_argument(name: str, operation: type[Operation]) -> str:
    """Message for an argument that the operation does not have."""
    fields = operation.Arguments.model_fields
    from pixelis.operations.scale import PLACES

    aliases = {"bbox": "box", "region": "box", **{place.wire: field for field, place in PLACES.items()}}
    near = [aliases[name]] if aliases.get(name) in fields else difflib.get_close_matches(name, fields, n=1)
    suggestion = f"did you mean {near[0]}? " if near else ""
    known = "\n".join(described_arguments(operation)) or "    none"
    return f"{operation.name} has no argument {name}; {suggestion}It takes\n{known}"


def read_arguments(operation: type[Operation], texts: Mapping[str, str], scene: Scene, target: str) -> dict[str, Any]:
    """Parse the arguments. Raises Usage for missing ones and for coordinates outside 0..1."""
    from pixelis.operations.scale import PLACES, image_of

    schema = operation.Arguments.model_json_schema()
    missing = [name for name in schema.get("required", []) if name not in texts]
    if missing:
        raise Usage(f"{operation.name} needs {', '.join(missing)}; it takes\n" + "\n".join(described_arguments(operation)))
    values: dict[str, Any] = {}
    for name, text in texts.items():
        place = PLACES.get(name)
        if place is None:
            values[name] = _value(text, schema["properties"].get(name, {}))
            continue
        image = image_of(place, texts, target)
        parts = [part for part in text.split(";") if part.strip()] if place.many else [text]
        places = [_value(part, {"type": "array"}) for part in parts]
        for part, value in zip(parts, places, strict=True):
            _check_coordinates(name, place.count, part, value, scene, image)
        values[name] = places if place.many else places[0]
    return values


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    kinds = {str(kind.get("type")): kind for kind in schema.get("anyOf", [schema])}
    if "array" in kinds and ("," in text or "string" not in kinds):
        are_strings = kinds["array"].get("items", {}).get("type") == "string"
        items = [item.strip() for item in text.strip().strip("[]()").split(",")]
        return [item if are_strings else _scalar(item) for item in items if item]
    return text if "string" in kinds else _scalar(text)


def _scalar(text: str) -> Any:
    if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+)", text):  # .5 and 5. are numbers, but not of JSON
        return float(text)
    try:
        return json.loads(text)
    except ValueError:
        return text


def _check_coordinates(name: str, count: int, text: str, value: Any, scene: Scene, target: str) -> None:
    """Raise Usage for wrong coordinates; suggests corrected ones for pixels, 0..1000 or left, top, width, height."""
    if not isinstance(value, list) or len(value) != count or not all(type(v) in (int, float) for v in value):
        raise Usage(f"{name}={text}: write {count} numbers 0..1 with commas and no spaces, " + EXAMPLE[count].format(name))
    view = scene.target(target)
    if view.is_clip:
        width, height = view.clip.width, view.clip.height
    else:
        left, top, right, bottom = view.pixels()
        width, height = right - left, bottom - top
    if max(value) > 1:
        fits = all(v <= extent for v, extent in zip(value, (width, height) * 2, strict=False))
        suggestion = ""
        if max(value) > 2 and (fits or max(value) <= 1000):
            extents = (width, height) * 2 if fits else (1000,) * 4
            numbers = ",".join(f"{v / extent:.4g}" for v, extent in zip(value, extents, strict=False))
            suggestion = f"; if these are {'pixels' if fits else '0..1000'}, write {name}={numbers}"
        raise Usage(f"{name}={text}: coordinates are 0..1 of the picture, which is {width}x{height} pixels{suggestion}")
    if count == 4 and (value[0] >= value[2] or value[1] >= value[3]):
        suggestion = ""
        if 0 < value[2] <= 1 - value[0] and 0 < value[3] <= 1 - value[1]:
            numbers = ",".join(f"{v:.4g}" for v in (value[0], value[1], value[0] + value[2], value[1] + value[3]))
            suggestion = f"; if these are left, top, width, height, write {name}={numbers}"
        raise Usage(f"{name}={text}: a box is left,top,right,bottom{suggestion}")
