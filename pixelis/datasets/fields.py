"""Checked access to the fields of a row, one at a time: one unusable annotation does not cost the others."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from pixelis.rewards.notation import unboxed

Kind = type | tuple[type, ...]
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class RowError(Exception):
    """Why a row cannot be used; ``column`` and ``code`` become those of its ``BadRow``."""

    def __init__(self, column: str, code: str, message: str):
        super().__init__(message)
        self.column, self.code, self.message = column, code, message


def need(row: Any, column: str, kind: Kind) -> Any:
    if not isinstance(row, Mapping):
        raise _wrong_type(column, dict, row)
    value = row.get(column)
    if value is None:
        raise RowError(column, "missing_column", "is missing")
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _wrong_type(column, kind, value)
    return value


def optional(row: Any, column: str, kind: Kind, default: Any = None) -> Any:
    return default if isinstance(row, Mapping) and row.get(column) is None else need(row, column, kind)


def text(row: Any, column: str) -> str:
    value = need(row, column, str).strip()
    if not value:
        raise RowError(column, "empty", "the text is empty")
    return value


def number(value: Any, column: str) -> float:
    """A finite number, or its text."""
    try:
        result = (
            float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
        )
    except (ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise RowError(column, "not_a_number", f"{value!r:.60} is not a finite number")
    return result


def whole(value: Any, column: str, least: int = 0) -> int:
    """A whole number of at least ``least``, or its text."""
    result = number(value, column)
    if result != int(result) or result < least:
        raise RowError(column, "not_a_number", f"{value!r:.60} is not a whole number of at least {least}")
    return int(result)


def identifier(row: Mapping[str, Any], *columns: str) -> str | None:
    """The first of ``columns`` that holds text or a whole number, as text; None if all are empty."""
    for column in columns:
        value = row.get(column)
        if isinstance(value, bool) or not isinstance(value, str | int | None):
            raise RowError(
                column, "wrong_type", f"an id is text or a whole number, not {type(value).__name__}"
            )
        if value is not None and str(value).strip():
            return str(value)
    return None


def answers(row: Mapping[str, Any], column: str) -> list[str]:
    """One or several accepted answers, inside ``<answer>`` or a box if there; RowError ``no_label``."""
    if column not in row:
        raise RowError(column, "missing_column", "is missing")
    value = row[column]
    result = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, float) and (not math.isfinite(item) or item.is_integer()):
            item = int(item) if math.isfinite(item) else None
        if item is None or item == "":
            continue
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise RowError(column, "wrong_type", f"an answer is text or a number, not {type(item).__name__}")
        tagged = _ANSWER.findall(str(item))
        if answer := unboxed(tagged[-1] if tagged else str(item)).strip():
            result.append(answer)
    if not result:
        raise RowError(column, "no_label", "the row has no answer")
    return result


def objects(row: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    value = need(row, column, list)
    if not all(isinstance(item, dict) for item in value):
        raise RowError(column, "wrong_type", "expected a list of objects")
    return value


def parse_json(value: str, column: str, kind: type = dict) -> Any:
    try:
        result = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(column, "not_json", f"not JSON: {error}") from None
    if not isinstance(result, kind):
        raise _wrong_type(column, kind, result)
    return result


def _wrong_type(column: str, kind: Kind, value: Any) -> RowError:
    names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
    return RowError(column, "wrong_type", f"expected {names}, not {type(value).__name__}")
