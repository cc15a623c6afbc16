"""How actions and answers are written: one dialect per wire format, between text and the canonical Action."""

from __future__ import annotations

from pixelis.dialogue.dialects.base import Dialect, Piece, Reply, Tag, default_target
from pixelis.dialogue.dialects.deepeyes import DeepEyes
from pixelis.dialogue.dialects.mini_o3 import MiniO3
from pixelis.dialogue.dialects.pixel_reasoner import PixelReasoner
from pixelis.dialogue.dialects.plain import Plain
from pixelis.dialogue.dialects.qwen import Qwen
from pixelis.dialogue.dialects.strict import strict_json

__all__ = ["DIALECTS", "Dialect", "Piece", "Reply", "Tag", "default_target", "strict_json"]

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (Qwen(), MiniO3(), PixelReasoner(), DeepEyes(), Plain())}
"""Dialects by the name a trajectory carries."""
