"""The base of every part of the configuration."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every part of the configuration: unknown keys are errors, values are fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``top`` over it, section by section."""
    out = dict(base)
    for key, value in top.items():
        out[key] = merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out
