"""Dialects: the wire formats of actions and answers, and their conversion to and from the canonical Action."""

from __future__ import annotations

from pixelis.config import Config
from pixelis.dialogue.dialects.base import Dialect, Piece, Reply, Tag, default_target
from pixelis.dialogue.dialects.dapo import Dapo
from pixelis.dialogue.dialects.deepeyes import DeepEyes
from pixelis.dialogue.dialects.mini_o3 import MiniO3
from pixelis.dialogue.dialects.pixel_reasoner import PixelReasoner
from pixelis.dialogue.dialects.plain import Plain
from pixelis.dialogue.dialects.qwen import Qwen
from pixelis.dialogue.dialects.strict import strict_json
from pixelis.operations import Operation, select

__all__ = ["DIALECTS", "Dialect", "Piece", "Reply", "Tag", "default_target", "offered", "strict_json"]

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect for dialect in (Qwen(), MiniO3(), PixelReasoner(), DeepEyes(), Plain(), Dapo())
}
"""Dialects by name, as stored in trajectories."""


def offered(config: Config) -> list[type[Operation]]:
    """The operations of toolbox.operations that dialogue.dialect supports. Raises BadConfig for unknown names."""
    dialect = DIALECTS[config.dialogue.dialect]
    return [operation for operation in select(config.toolbox.operations) if dialect.offers(operation)]
