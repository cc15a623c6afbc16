"""The failure taxonomy. Every error names the problem and its fix.

``BadInput``, an error of the caller, is reported and never retried. ``InfraFailure`` of a process, node,
device or deadline is retried under a budget on another actor. ``DataFailure`` drops one sample, which is
counted by cause.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self


def install_extra(extra: str) -> str:
    """Command that installs an optional part, without a package index: the name may be another's there."""
    if (Path(__file__).parents[1] / "pyproject.toml").is_file():
        return "make install-gpu" if extra == "gpu" else f"pip install -e '.[{extra}]' in the checkout"
    return f"pip install 'FILE.whl[{extra}]' with the wheel that Pixelis was installed from"


class PixelisError(Exception):
    """Base class: ``code`` is a stable machine-readable name; ``fix`` tells what to do."""

    code = "error"

    def __init__(self, message: str, *, code: str | None = None, fix: str | None = None):
        super().__init__(message, code, fix)
        self.message = message
        self.fix = fix
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message

    def about(self, place: str) -> Self:
        """The same error with the place that it is about before its message."""
        return type(self)(f"{place}: {self.message}", code=self.code, fix=self.fix)

    def __reduce__(self):
        return _rebuild, (type(self), self.message, self.code, self.fix)


def _rebuild(kind: type[PixelisError], message: str, code: str, fix: str | None) -> PixelisError:
    return kind(message, code=code, fix=fix)


class BadInput(PixelisError):
    """The caller's input cannot be used. ``place``: of the picture or clip in a request that is the cause."""

    code = "bad_input"
    place: str | None = None


class BadConfig(BadInput):
    """A configuration key is unknown, has the wrong type, or contradicts another."""

    code = "bad_config"


class BadImage(BadInput):
    """Bytes that are not an image or clip, or one outside the limits."""

    code = "bad_image"


class MissingFile(BadInput):
    """A model, checkpoint, data set or configuration file does not exist."""

    code = "missing_file"


class MissingDependency(BadInput):
    """An optional package or system tool is not installed."""

    code = "missing_dependency"


class InfraFailure(PixelisError):
    """A process, node, device or deadline failed; the work may be retried elsewhere."""

    code = "infra_failure"


class Overloaded(InfraFailure):
    """The queue is full: retry after ``retry_after_s`` seconds."""

    code = "overloaded"

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, code: str | None = None, fix: str | None = None
    ):
        super().__init__(message, code=code, fix=fix)
        self.retry_after_s = retry_after_s

    def __reduce__(self):
        return _rebuild_overloaded, (self.message, self.retry_after_s, self.code, self.fix)


def _rebuild_overloaded(message: str, retry_after_s: float, code: str, fix: str | None) -> Overloaded:
    return Overloaded(message, retry_after_s=retry_after_s, code=code, fix=fix)


class DeadlineExceeded(InfraFailure):
    """Work did not finish before its deadline."""

    code = "deadline_exceeded"


class DataFailure(PixelisError):
    """One sample cannot be used; it is dropped and counted by ``code``."""

    code = "data_failure"


class OperationError(DataFailure):
    """A pixel operation refused its arguments or failed; the model reads ``code`` and the message.

    Codes: bad_json, unknown_op, bad_arguments, bad_target, bad_box, bad_point, unknown_object,
    not_a_video, not_a_picture, nothing_found, out_of_range, too_small, limit, tool_error, timeout,
    out_of_memory, crashed, and the ``image_*`` and ``video_*`` codes of media that cannot be decoded.
    """

    code = "operation_error"


class Problem(NamedTuple):
    """The first problem of a value, and the ``path`` of its field."""

    path: str
    code: str
    message: str


_KINDS = {
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}
_BOUNDS = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}


def first_problem(error: Any, names: Iterable[str] = ()) -> Problem:
    """The first finding of a pydantic ValidationError; ``names``: candidates for misspelt fields."""
    finding = error.errors()[0]
    kind, context = finding["type"], finding.get("ctx") or {}
    path = ".".join(str(part) for part in finding["loc"])
    if kind == "missing":
        return Problem(path, "missing_column", "is missing")
    if kind == "extra_forbidden":
        similar = difflib.get_close_matches(path.rsplit(".", 1)[-1], list(names), n=1)
        hint = f": did you mean `{similar[0]}`?" if similar else ""
        return Problem(path, "unknown_column", f"is not a known field{hint}")
    if kind in _KINDS:
        message = f"{_KINDS[kind]}, not {str(finding['input'])[:40]!r}"
    elif kind in _BOUNDS:
        message = f"must be {_BOUNDS[kind]} {next(iter(context.values()))}, not {finding['input']!r}"
    elif kind == "literal_error":
        message = f"must be one of {context['expected']}, not {str(finding['input'])[:40]!r}"
    elif kind.endswith(("too_short", "too_long")):
        bound, side = ("min_length", "at least") if kind.endswith("short") else ("max_length", "at most")
        message = (
            f"must have {side} {context[bound]} {'characters' if kind.startswith('string') else 'entries'}"
        )
    else:
        message = finding["msg"].removeprefix("Value error, ")
    return Problem(path, "wrong_type", message)
