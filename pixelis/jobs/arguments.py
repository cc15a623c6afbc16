"""Parses an operation's arguments as a person types them, name=value, and explains what is wrong with them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pixelis.operations import Operation, Scene

PLACES = ("box", "point", "center")
EXAMPLE = {4: "for example {}=0.1,0.2,0.4,0.5", 2: "for example {}=0.5,0.6"}


class Usage(Exception):
    """The command line cannot be carried out; the message says what to write instead."""


def described_arguments(operation: type[Operation]) -> list[str]:
    """One line for each argument: name, form, meaning, default."""
    schema = operation.Arguments.model_json_schema()
    required, out = set(schema.get("required", [])), []
    for name, described in schema.get("properties", {}).items():
        form = {"box": "x0,y0,x1,y1", "point": "x,y", "center": "x,y"}.get(name) or _form(described)
        default = described.get("default")
        need = "required" if name in required else "optional" if default is None else f"default {json.dumps(default)}"
        meaning = f": {described['description']}" if "description" in described else ""
        out.append(f"    {name}={form} ({need}){meaning}")
    return out


def _form(schema: Mapping[str, Any]) -> str:
    kinds = [k for k in schema.get("anyOf", [schema]) if k.get("type") != "null"]
    names = {"integer": "N", "number": "X", "string": "TEXT", "boolean": "true|false", "array": "A,B,...", "object": "{...}"}
    return "|".join("|".join(map(str, k["enum"])) if "enum" in k else names.get(k.get("type", ""), "VALUE") for k in kinds)


def unknown_argument(name: str, operation: type[Operation]) -> str:
    fields = operation.Arguments.model_fields
    wire = {"bbox_2d": "box", "bbox": "box", "region": "box", "point_2d": "point", "center_2d": "center"}
    near = [wire[name]] if wire.get(name) in fields else difflib.get_close_matches(name, fields, n=1)
    did = f"did you mean {near[0]}? " if near else ""
    known = "\n".join(described_arguments(operation)) or "    none"
    return f"{operation.name} has no argument {name}; {did}It takes\n{known}"


def read_arguments(operation: type[Operation], given: Mapping[str, str], scene: Scene, target: str) -> dict[str, Any]:
    """The arguments as values; Usage for missing ones and for places that are not 0..1."""
    schema = operation.Arguments.model_json_schema()
    missing = [name for name in schema.get("required", []) if name not in given]
    if missing:
        raise Usage(f"{operation.name} needs {', '.join(missing)}; it takes\n" + "\n".join(described_arguments(operation)))
    values: dict[str, Any] = {}
    for name, written in given.items():
        values[name] = _value(written, schema["properties"][name])
        if name in PLACES:
            _check_place(name, written, values[name], scene, target)
    return values


def _value(written: str, schema: Mapping[str, Any]) -> Any:
    kinds = {str(kind.get("type")): kind for kind in schema.get("anyOf", [schema])}
    if "array" in kinds and ("," in written or "string" not in kinds):
        texts = kinds["array"].get("items", {}).get("type") == "string"
        pieces = [piece.strip() for piece in written.strip().strip("[]()").split(",")]
        return [piece if texts else _scalar(piece) for piece in pieces if piece]
    return written if "string" in kinds else _scalar(written)


def _scalar(written: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        return written


def _check_place(name: str, written: str, value: Any, scene: Scene, target: str) -> None:
    """Usage that offers the right numbers for a place written in pixels, in 0..1000 or as left, top, width, height."""
    count = 4 if name == "box" else 2
    if not isinstance(value, list) or len(value) != count or not all(type(v) in (int, float) for v in value):
        raise Usage(f"{name}={written}: write {count} numbers 0..1 with commas and no spaces, " + EXAMPLE[count].format(name))
    about = scene.target(target)
    if about.is_clip:
        width, height = about.clip.width, about.clip.height
    else:
        left, top, right, bottom = about.pixels()
        width, height = right - left, bottom - top
    if max(value) > 1:
        fits = all(v <= extent for v, extent in zip(value, (width, height) * 2, strict=False))
        offer = ""
        if max(value) > 2 and (fits or max(value) <= 1000):
            extents = (width, height) * 2 if fits else (1000,) * 4
            numbers = ",".join(f"{v / extent:.4g}" for v, extent in zip(value, extents, strict=False))
            offer = f"; if these are {'pixels' if fits else '0..1000'}, write {name}={numbers}"
        raise Usage(f"{name}={written}: places are 0..1 of the picture, which is {width}x{height} pixels{offer}")
    if name == "box" and (value[0] >= value[2] or value[1] >= value[3]):
        offer = ""
        if 0 < value[2] <= 1 - value[0] and 0 < value[3] <= 1 - value[1]:
            numbers = ",".join(f"{v:.4g}" for v in (value[0], value[1], value[0] + value[2], value[1] + value[3]))
            offer = f"; if these are left, top, width, height, write box={numbers}"
        raise Usage(f"box={written}: a box is left,top,right,bottom{offer}")
