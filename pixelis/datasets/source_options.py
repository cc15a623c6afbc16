"""Parses the options of a source, ``NAME?key=value&...``."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from urllib.parse import parse_qsl

from pixelis.errors import BadInput


def parse_options(source: str, allowed: Collection[str]) -> tuple[str, dict[str, str]]:
    """What stands before the ``?`` of a source, and its options; BadInput for one that is not ``allowed``."""
    name, _, query = source.partition("?")
    options = dict(parse_qsl(query.replace("+", "%2B"), keep_blank_values=True))
    if unknown := [key for key in options if key not in allowed]:
        fix = f"options are {', '.join(allowed)}" if allowed else "leave it out"
        raise BadInput(f"{source}: unknown option {unknown[0]!r}{suggest(unknown[0], allowed)}", fix=fix)
    return name, options


def whole_option(source: str, options: Mapping[str, str], key: str, default: int) -> int:
    """An option that is a whole number of at least 0. BadInput."""
    text = options.get(key, str(default))
    if not text.isdecimal():
        raise BadInput(f"{source}: {key}={text} is not a whole number of at least 0")
    return int(text)


def suggest(word: str, allowed: Collection[str]) -> str:
    """The end of an error message about an unknown word: the known one that is most like it."""
    close = difflib.get_close_matches(word, allowed, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def share_option(source: str, options: Mapping[str, str], key: str) -> float:
    """An option between 0 and 1, by default 0. BadInput."""
    try:
        value = float(options.get(key, 0))
    except ValueError as error:
        raise BadInput(f"{source}: {error}") from None
    if not 0 <= value <= 1:
        raise BadInput(f"{key} is {value}: it must lie between 0 and 1")
    return value
