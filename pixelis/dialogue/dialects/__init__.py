"""How actions and answers are written: one dialect per wire format, between text and the canonical Action."""

from __future__ import annotations

from pixelis.config import Config
from pixelis.dialogue.dialects.base import Dialect, Piece, Reply, Tag, default_target
from pixelis.dialogue.dialects.deepeyes import DeepEyes
from pixelis.dialogue.dialects.mini_o3 import MiniO3
from pixelis.dialogue.dialects.pixel_reasoner import PixelReasoner
from pixelis.dialogue.dialects.plain import Plain
from pixelis.dialogue.dialects.qwen import Qwen
from pixelis.dialogue.dialects.strict import strict_json
from pixelis.operations import Operation, select

__all__ = ["DIALECTS", "Dialect", "Piece", "Reply", "Tag", "default_target", "offered", "strict_json"]

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (Qwen(), MiniO3(), PixelReasoner(), DeepEyes(), Plain())}
"""Dialects by the name a trajectory carries."""


def offered(config: Config) -> list[type[Operation]]:
    """The operations of toolbox.operations that dialogue.dialect has a form for; BadConfig for names that do not exist."""
    dialect = DIALECTS[config.dialogue.dialect]
    return [operation for operation in select(config.toolbox.operations) if dialect.offers(operation)]
