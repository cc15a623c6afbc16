"""Entries of ``toolbox.environments`` for environments of other systems, and what their adapters share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pydantic import ValidationError

from pixelis.config import ToolboxConfig
from pixelis.errors import BadConfig, InfraFailure, PixelisError, first_problem
from pixelis.operations.function import FunctionOperation, function_operation
from pixelis.records import Function

SHARE = 0.75
"""Part of toolbox.timeout_s that a server may take: after all of it the toolbox ends, with all its episodes."""


@dataclass(frozen=True)
class Entry:
    """An entry, whose first word names its adapter: ``rest`` follows it.

    ``timeout_s``: for each answer of a server. ``limits``: bytes and pixels of a picture.
    """

    source: str
    rest: str
    timeout_s: float
    limits: tuple[int, int]

    @classmethod
    def of(cls, kind: str, rest: str, settings: ToolboxConfig) -> Entry:
        limits = settings.max_image_bytes, settings.max_image_pixels
        return cls(f"toolbox.environments: {kind}{rest}", rest, SHARE * settings.timeout_s, limits)

    def url(self) -> SplitResult:
        """The address of ``KIND+https://...``, or ``KIND+http://...`` on this machine. Raises BadConfig."""
        url = urlsplit(self.rest.removeprefix("+"))
        host = url.hostname or ""
        if url.scheme not in ("http", "https") or not host:
            raise BadConfig(f"{self.source} has no URL", fix="write +https://HOST/PATH after its first word")
        is_here = host in ("localhost", "::1") or host.startswith("127.")
        if url.scheme == "http" and not is_here:
            raise BadConfig(
                f"{self.source} is not encrypted", fix="use https: http is for this machine alone"
            )
        return url

    def action(self, name: str, description: str, schema: dict[str, Any]) -> type[FunctionOperation]:
        """An action with the schema of its arguments. Raises BadConfig for one that a policy cannot use."""
        try:
            function = Function(name=name, description=description, parameters=schema)
        except ValidationError as error:
            problem = first_problem(error).message
            raise BadConfig(f"{self.source}: {name[:80]!r}: {problem}", fix="correct the server") from None
        return function_operation(function)

    @contextmanager
    def connection(self) -> Iterator[None]:
        """What fails in the block is a server that is lost or late: InfraFailure ``environment_...``."""
        try:
            yield
        except PixelisError:
            raise
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            is_late = isinstance(error, TimeoutError)
            problem = f"no answer in {self.timeout_s:g} s" if is_late else f"{type(error).__name__}: {error}"
            raise InfraFailure(
                f"{self.source}: {problem}",
                code="environment_timeout" if is_late else "environment_lost",
                fix="run the server by itself, and see what it writes in the log of the toolbox",
            ) from error
