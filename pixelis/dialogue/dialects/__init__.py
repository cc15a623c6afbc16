"""Dialects: the wire formats of actions and answers."""

from __future__ import annotations

from collections.abc import Mapping

from pixelis.config import Config
from pixelis.config.references import Registry
from pixelis.dialogue.dialects.base import Dialect, Piece, Reply, Tag, default_target
from pixelis.dialogue.dialects.qwen import Qwen
from pixelis.dialogue.dialects.strict import strict_json
from pixelis.operations import Operation, select

__all__ = ["DIALECTS", "Dialect", "Piece", "Reply", "Tag", "default_target", "offered", "strict_json"]

DIALECTS: Mapping[str, Dialect] = Registry(
    "dialogue.dialect",
    {
        "qwen": Qwen(),
        "qwen_xml": "pixelis.dialogue.dialects.qwen_xml:QwenXml",
        "qwen_zoom": "pixelis.dialogue.dialects.qwen_zoom:QwenZoom",
        "qwen_zoom_xml": "pixelis.dialogue.dialects.qwen_zoom:QwenZoomXml",
        "mini_o3": "pixelis.dialogue.dialects.mini_o3:MiniO3",
        "pixel_reasoner": "pixelis.dialogue.dialects.pixel_reasoner:PixelReasoner",
        "deepeyes": "pixelis.dialogue.dialects.deepeyes:DeepEyes",
        "plain": "pixelis.dialogue.dialects.plain:Plain",
        "dapo": "pixelis.dialogue.dialects.dapo:Dapo",
    },
    make=lambda dialect: dialect(),
)
"""Dialects by name, as stored in trajectories. All but the first load on use."""


def offered(config: Config) -> list[type[Operation]]:
    """The operations of toolbox.operations that dialogue.dialect supports."""
    dialect = DIALECTS[config.dialogue.dialect]
    return [operation for operation in select(config.toolbox.operations) if dialect.offers(operation)]
