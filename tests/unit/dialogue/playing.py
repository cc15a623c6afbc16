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
    """The operations of a renderer on opened media, with views of up to 16 tokens."""

    def __init__(self, media: dict[str, Any], r: Renderer, min_tokens: int = 16):
        self.media, self.r, self.min_tokens = media, r, min_tokens

    async def execute(self, action: Action, images: list[ImageView], objects: dict):
        step = self.r.spec.multiple
        budget = PixelBudget(step * step * self.min_tokens, step * step * 16)
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
