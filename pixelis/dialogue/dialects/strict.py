"""Strict parsing of JSON calls."""

from __future__ import annotations

import json
import math
from typing import Any

from pixelis.errors import OperationError


def strict_json(text: str) -> Any:
    """Parse JSON; ``bad_json`` also for duplicate keys, infinities, lone surrogates and deep nesting."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            raise ValueError("a key stands twice")
        return out

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ValueError("a number is not finite")
        return value

    def constant(name: str) -> float:
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_float=number, parse_constant=constant)
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise OperationError("an escape is half a character", code="bad_json") from None
    except json.JSONDecodeError as error:
        raise OperationError(f"the call is not JSON at character {error.pos}", code="bad_json") from None
    except ValueError as error:
        reason = str(error) if len(str(error)) < 60 else "a number is too long"
        raise OperationError(reason, code="bad_json") from None
    except RecursionError:
        raise OperationError("the call is nested too deeply", code="bad_json") from None


def named_call(call: Any, names: list[str]) -> tuple[str, dict[str, Any]]:
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        raise OperationError('a call is {"name":...,"arguments":{...}}', code="bad_json")
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or name not in names:
        raise OperationError(
            f"use {', '.join(names)}" if names else "answer without operations", code="unknown_op"
        )
    if not isinstance(arguments, dict):
        raise OperationError("arguments is an object", code="bad_arguments")
    return name, dict(arguments)


def only(arguments: dict[str, Any], required: tuple[str, ...]) -> None:
    """``bad_arguments`` for keys that are missing or unknown."""
    for key in required:
        if key not in arguments:
            raise OperationError(f"{key} is missing", code="bad_arguments")
    for key in arguments:
        if key not in required:
            raise OperationError(f"{key[:40]} is unknown", code="bad_arguments")
