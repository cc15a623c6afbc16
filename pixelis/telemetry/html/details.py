"""Values of an observation as text: objects, read lines, tracks and properties."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pixelis.records import Observation
from pixelis.telemetry.html.filters import fact, number, thousands

MAX_LINES = 60
MAX_VALUES = 8
DECIDES = 1.0
"""Causal use in nats from which on an observation decided the answer."""
OBVIOUS_UNITS = ("", "ratio", "bool", "name", "names", "count", "1")
"""Units that add nothing to the value."""
MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Errors of reading the data of a user's own operation, which may have any form."""


@dataclass(frozen=True)
class Details:
    """Objects, lines with their confidence, and groups of named values, as text."""

    objects: list[str]
    lines: list[tuple[str, str]]
    groups: list[tuple[str, list[tuple[str, str]]]]


def details_of(observation: Observation) -> Details | None:
    """None if there is nothing that can be shown."""
    data = observation.data
    try:
        lines, groups = [], []
        for line in data.get("lines", [])[:MAX_LINES]:
            confidence = number(line["confidence"], share=True) if "confidence" in line else ""
            lines.append((str(line.get("text", "")), confidence))
        for track in data.get("tracks", []):
            first, last = min(track["frames"]), max(track["frames"])
            title = f"Track {track['id']}: {track['status']} over frames {first} to {last}"
            groups.append((title, _values(track.get("statistics", {}))))
        groups += [(str(name), _values(values)) for name, values in data.get("properties", {}).items()]
        objects = [_object(item) for item in data.get("objects", []) if item.get("kind") != "track"]
    except MALFORMED:
        return None
    return Details(objects, lines, groups) if objects or lines or groups else None


def use_of(observation: Observation) -> str:
    """What the answer owes to an observation, where that was measured (docs/looking.md)."""
    if (use := observation.causal_use) is None:
        return ""
    if use < DECIDES:
        return "The answer hardly depends on this."
    times = f"{math.exp(use):.0f}" if use < math.log(1000) else "over 1000"
    return f"This decided the answer: {times} times likelier than without it."


def _object(item: Mapping[str, Any]) -> str:
    notes = [f"Object {item['id']}"]
    if "area" in item:
        notes.append(f"{thousands(item['area'])} pixels")
    if item.get("score") is not None:
        notes.append(f"score {item['score']:.2f}")
    if "method" in item:
        notes.append(f"by {item['method']}")
    return ", ".join(notes)


def _values(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    shown = []
    for name, value in values.items():
        unit = ""
        if isinstance(value, Mapping):
            value, unit = value["value"], value.get("unit", "")
        text = _value(value) + (f" {unit}" if unit not in OBVIOUS_UNITS else "")
        shown.append((name.replace("_", " "), text))
    return shown


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        if np.ndim(value) > 1 or len(value) > MAX_VALUES:
            return f"{np.size(value)} values"
        return ", ".join(map(_value, value)) or "none"
    return number(value) if isinstance(value, int) else fact(value)
