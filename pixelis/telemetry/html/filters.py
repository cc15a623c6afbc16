"""Template filters: values of a page as short text, escaped text or data URLs."""

from __future__ import annotations

import base64
import io
import json
import re
import time
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

MAX_TEXT = 20_000
INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, marks that change the direction of text, lone surrogates."""
PADS = re.compile(r"(?:<\|(?:image|video)_pad\|>)+")
PAGE_PIXELS = 640
"""Longest side of a picture on a page."""
LOSSLESS_PIXELS = 128
"""Pictures up to this side are stored as PNG: they show exactly what the policy saw."""


def clean(value: Any) -> Any:
    """Replace invisible characters of a text; other values and markup pass unchanged."""
    return (
        INVISIBLE.sub("\ufffd", value) if isinstance(value, str) and not isinstance(value, Markup) else value
    )


def text(value: object, limit: int = MAX_TEXT) -> Markup:
    """Escaped text of at most ``limit`` characters in an element that isolates its direction."""
    raw = str(value)
    rest = f" … ({len(raw) - limit} more characters)" if len(raw) > limit else ""
    return Markup("<bdi>{}</bdi>").format(clean(raw[:limit]) + rest)


def transcript(value: str) -> str:
    """The text of a turn; each run of picture placeholders becomes one short note."""
    return PADS.sub(
        lambda run: f"[picture: {run.group().count('_pad|>')} tokens]", value[: 50 * MAX_TEXT]
    ).strip()


def as_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False)


def fact(value: Any) -> str:
    """A value in a table of facts: floats shortened, texts and integers as they are, others as JSON."""
    if isinstance(value, float):
        return number(value)
    return str(value) if isinstance(value, (str, int)) else json.dumps(value)


def number(value: float, share: bool = False) -> str:
    """`84.5 %` with ``share``, else `0.0012`, `12k`, `3`."""
    if share:
        return f"{value * 100:.3g} %" if value < 0.9995 else "100 %"
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    if abs(value) >= 1e4:
        return f"{value / 1000:.3g}k"
    return f"{value:.4g}"


def age(seconds: float) -> str:
    """`5 min ago`, for a time in seconds since the epoch."""
    past = max(0.0, time.time() - seconds)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if past >= size:
            return f"{past / size:.0f} {unit} ago"
    return f"{past:.0f} s ago"


def percent(share: float | None) -> str:
    """`84.5 %`; a dash when unknown."""
    return "–" if share is None else f"{share * 100:.1f} %"


def points(share: float | None) -> str:
    """A difference of shares: `+71.4 points`; a dash when unknown."""
    return "–" if share is None else f"{share * 100:+.1f} points"


def thousands(value: float) -> str:
    """`12 345`."""
    return f"{value:,.0f}".replace(",", " ")


def data_url(picture: np.ndarray, longest: int = PAGE_PIXELS) -> str:
    """A uint8 picture [height, width, 3], reduced to ``longest``, as a data URL: PNG or JPEG by size."""
    image = Image.fromarray(np.ascontiguousarray(picture))
    image.thumbnail((longest, longest), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    if max(image.size) <= LOSSLESS_PIXELS:
        image.save(buffer, "PNG", optimize=True)
        kind = "png"
    else:
        image.save(buffer, "JPEG", quality=85)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
