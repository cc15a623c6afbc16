"""The base of every part of the configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every part of the configuration: unknown keys and infinite numbers are errors, values are fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``top`` over it, section by section."""
    out = dict(base)
    for key, value in top.items():
        out[key] = merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def fill_in(values: Any, key: str, table: Mapping[str, dict[str, Any]]) -> Any:
    """The given values over what the name under ``key`` sets in ``table``, so that the printed configuration is the resolved one.

    Anything but a name leaves the values as they are; raises ValueError for a name that the table lacks.
    """
    name = values.get(key) if isinstance(values, dict) else None
    if not isinstance(name, str):
        return values
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"one of {', '.join(table)}"
        raise ValueError(f"no {key} `{name}` ({hint})")
    given = {k: v.model_dump(exclude_unset=True) if isinstance(v, Section) else v for k, v in values.items()}
    return merge(table[name], given)
