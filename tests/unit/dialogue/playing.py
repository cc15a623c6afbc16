"""Whole episodes with a scripted engine and the real operations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from dialogue_models import ScriptedSession

from pixelis.dialogue.agent import Episode, Limits, run_episode
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import SamplingParams
from pixelis.operations import Scene, execute
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.records import Action, ImageView, Question


class RealTools:
    """The operations of a renderer on opened media, with views of 4 to 16 tokens."""

    def __init__(self, media: dict[str, Any], r: Renderer):
        self.media, self.r = media, r

    async def execute(self, action: Action, images: list[ImageView], objects: dict):
        step = self.r.spec.multiple
        budget = PixelBudget(step * step * 4, step * step * 16)
        scene = Scene(self.media, images, objects, budget, budget, step, self.r.coordinates)
        return execute(action, scene, self.r.operations)


def run(
    session: ScriptedSession,
    question: Question,
    images: Sequence[ImageView],
    views: Sequence[np.ndarray],
    tools: Any,
    limits: Limits,
    sampling: SamplingParams | None = None,
    **more: Any,
) -> Episode:
    """Plays the session's lines as an episode of group ``g`` and policy version 3."""
    fixed = (tools, limits, sampling or SamplingParams(), "g", 3)
    return asyncio.run(run_episode(session, session.renderer, question, images, views, *fixed, **more))
