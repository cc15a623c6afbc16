"""What a pixel operation is: a name, checked arguments, and a pure function of the full-resolution picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from pixelis.dialogue.pixels import PixelBudget
from pixelis.errors import OperationError
from pixelis.records import Box, ImageView


class OperationArguments(BaseModel):
    """Base of an operation's canonical arguments: unknown keys and wrong types are errors, nothing is coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclass(slots=True)
class Result:
    """What an operation gives back: text, views with their box 0..1 of the target, and plain data for the log."""

    text: str = ""
    images: list[tuple[Box, np.ndarray]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


class Operation:
    """Base of the operations. They are pure: the same arguments and pixels give the same result, so a log can be replayed."""

    name: ClassVar[str]
    description: ClassVar[str]
    Arguments: ClassVar[type[OperationArguments]]

    @classmethod
    def check(cls, arguments: Mapping[str, Any]) -> OperationArguments:
        """Validated canonical arguments; OperationError ``bad_arguments`` (or ``bad_box``) names the first thing wrong."""
        try:
            return cls.Arguments.model_validate(dict(arguments))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "arguments"
            problem = {"missing": "is missing", "extra_forbidden": "is unknown"}.get(first["type"], first["msg"])
            raise OperationError(f"{where[:40]} {problem}", code="bad_arguments") from None

    @classmethod
    def run(
        cls, arguments: Any, target: Sequence[ImageView], picture: np.ndarray, budget: PixelBudget, multiple: int
    ) -> Result:
        """Carry it out.

        ``target`` is the chain of views from the question's picture to the one operated on, ``picture`` the uint8 [H, W, 3]
        pixels of the first in full resolution. Views come back fit to ``budget`` with sides in steps of ``multiple`` pixels.
        Raises OperationError.
        """
        raise NotImplementedError
