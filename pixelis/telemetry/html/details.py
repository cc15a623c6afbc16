"""Values of an observation as plain text: objects, read lines, tracks and properties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pixelis.records import Observation
from pixelis.telemetry.events import as_number
from pixelis.telemetry.html.filters import number, thousands

MAX_LINES = 60
MAX_VALUES = 8
MAX_OBJECTS = 12
MAX_PROPERTIES = 40
OBVIOUS_UNITS = ("", "ratio", "bool", "name", "names", "count", "1")
"""Units that add nothing to the value."""


@dataclass(frozen=True)
class Value:
    """A named value with its unit; ``colour`` (`230,144,54`) when the value is an RGB colour."""

    name: str
    text: str
    unit: str = ""
    colour: str = ""


@dataclass(frozen=True)
class Details:
    """The content of an observation. Lines have a confidence or ````; ``more_lines`` were left out."""

    objects: list[tuple[str, list[str]]]
    lines: list[tuple[str, str]]
    more_lines: int
    tracks: list[tuple[str, str, str, list[Value]]]
    properties: list[tuple[str, list[Value]]]


def details_of(observation: Observation) -> Details | None:
    data = observation.data
    lines = mappings(data.get("lines"))
    groups = data["properties"] if isinstance(data.get("properties"), Mapping) else {}
    details = Details(
        objects=[
            _object(item)
            for item in mappings(data.get("objects"))[:MAX_OBJECTS]
            if item.get("kind") != "track"
        ],
        lines=[(str(line.get("text", "")), _confidence(line)) for line in lines[:MAX_LINES]],
        more_lines=max(0, len(lines) - MAX_LINES),
        tracks=[_track(track) for track in mappings(data.get("tracks"))],
        properties=[
            (str(group), _values(values))
            for group, values in groups.items()
            if isinstance(values, Mapping) and values
        ],
    )
    return details if details.objects or details.lines or details.tracks or details.properties else None


def _object(item: Mapping[str, Any]) -> tuple[str, list[str]]:
    notes = []
    if (area := as_number(item.get("area"))) is not None:
        notes.append(f"{thousands(area)} pixels")
    if (score := as_number(item.get("score"))) is not None:
        notes.append(f"score {score:.2f}")
    if item.get("method"):
        notes.append(f"by {item['method']}")
    return str(item.get("id", "")), notes


def _track(track: Mapping[str, Any]) -> tuple[str, str, str, list[Value]]:
    frames = [index for n in as_list(track.get("frames")) if (index := as_index(n)) is not None]
    span = f" over frames {min(frames)} to {max(frames)}" if frames else ""
    statistics = track.get("statistics")
    values = _values(statistics) if isinstance(statistics, Mapping) else []
    return str(track.get("id", "")), str(track.get("status", "")), span, values


def _values(values: Mapping[Any, Any]) -> list[Value]:
    result = []
    for name, value in list(values.items())[:MAX_PROPERTIES]:
        unit = ""
        if isinstance(value, Mapping) and "value" in value:
            unit, value = str(value.get("unit") or ""), value["value"]
        label = str(name).replace("_", " ")
        shown_unit = "" if unit in OBVIOUS_UNITS else unit.replace("^2", "²")
        colour = ""
        if unit in ("0..255", "RGB 0..255") and isinstance(value, (list, tuple)) and len(value) == 3:
            channels = [round(c) for v in value if (c := as_number(v)) is not None and 0 <= c <= 255]
            colour = ",".join(map(str, channels)) if len(channels) == 3 else ""
        result.append(Value(label, _value(value), shown_unit, colour))
    return result


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if (plain := as_number(value)) is not None:
        return number(plain)
    if isinstance(value, (list, tuple)):
        if len(value) > MAX_VALUES or any(isinstance(v, (list, tuple, Mapping)) for v in value):
            return f"{_leaves(value)} values"
        return ", ".join(map(_value, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(v)}" for name, v in list(value.items())[:MAX_VALUES])
    return str(value)


def _leaves(value: Any, depth: int = 0) -> int:
    return sum(_leaves(v, depth + 1) for v in value) if isinstance(value, (list, tuple)) and depth < 4 else 1


def _confidence(line: Mapping[str, Any]) -> str:
    confidence = as_number(line.get("confidence"))
    return "" if confidence is None else number(min(max(confidence, 0.0), 1.0), share=True)


def as_index(value: Any) -> int | None:
    """The value if it is a frame number, otherwise None."""
    return value if type(value) is int and value >= 0 else None


def as_list(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else []


def mappings(values: Any) -> list[Mapping[str, Any]]:
    return [value for value in as_list(values) if isinstance(value, Mapping)]
