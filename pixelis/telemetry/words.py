"""Formats numbers and texts for a page. Texts from models, datasets and users are hostile until escaped."""

from __future__ import annotations

import re
from html import escape

MAX_TEXT = 20_000
"""Characters of a text that a page shows."""

INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, marks that turn the direction of text, lone surrogates."""


def text(value: object, limit: int = MAX_TEXT) -> str:
    """Hostile text made safe to show: escaped, control characters made visible, cut at `limit`, direction kept to itself."""
    return f"<bdi>{safe(value, limit)}</bdi>"


def safe(value: object, limit: int = MAX_TEXT) -> str:
    """`text` without the element that isolates its direction: for titles and attributes."""
    raw = str(value)
    cut = f" … ({len(raw) - limit} more characters)" if len(raw) > limit else ""
    return escape(INVISIBLE.sub("\ufffd", raw[:limit]) + cut)


def number(value: float, share: bool = False) -> str:
    """A value as short text: `84.5 %`, `0.0012`, `12k`, `3`."""
    if share:
        return f"{value * 100:.3g} %" if value < 0.9995 else "100 %"
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    if abs(value) >= 1e4:
        return f"{value / 1000:.3g}k"
    return f"{value:.4g}"
