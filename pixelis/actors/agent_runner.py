"""The AgentRunner actor: runs the function of an outside agent, one call an episode."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import openai
import ray
from PIL import Image

from pixelis.config import ToolboxConfig
from pixelis.config.references import load_reference
from pixelis.datasets.media import open_media
from pixelis.errors import BadConfig, BadInput
from pixelis.operations.image import png_url
from pixelis.records import Media, Question

CONCURRENT_EPISODES = 256
"""Episodes of one process: an agent waits for the policy most of the time."""

Outcome = float | Mapping[str, float] | None
"""A reward, reward terms by name, or None: the run's own rewards, or the vote, decide."""


@dataclass(frozen=True)
class AgentQuestion:
    """What an agent learns of a question: its text, and its pictures (uint8 [h, w, 3]) by id.

    ``answers``, where the data has them, are for the reward and must not reach the policy.
    """

    id: str
    text: str
    views: Mapping[str, np.ndarray] = field(default_factory=dict)
    answers: list[str] | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, question: Question, settings: ToolboxConfig) -> AgentQuestion:
        """Raises BadImage for damaged pictures, BadInput for clips."""
        views = {media.id: _picture(media, settings) for media in question.media}
        return cls(question.id, question.question, views, question.answers, question.meta)

    @cached_property
    def pictures(self) -> dict[str, str]:
        """The pictures as PNG data URLs by id."""
        return {name: png_url(view, compress_level=1) for name, view in self.views.items()}

    @property
    def content(self) -> list[dict[str, Any]]:
        """The parts of a user message of OpenAI's chat API: the pictures, then the text.

        A picture is named as a file that the episode has, so that no request carries it.
        """
        parts: list[dict[str, Any]] = [{"type": "file", "file": {"file_id": name}} for name in self.views]
        return [*parts, {"type": "text", "text": self.text}]

    def image(self, name: str = "img0") -> Image.Image:
        """A picture of the question at full resolution."""
        return Image.fromarray(self.views[name])


def _picture(media: Media, settings: ToolboxConfig) -> np.ndarray:
    pixels = open_media(media, settings)
    if not isinstance(pixels, np.ndarray):
        raise BadInput(f"{media.id} is a clip, which an outside agent cannot get", code="agent_clip")
    return pixels


def as_terms(outcome: Outcome) -> dict[str, float] | None:
    """What an agent's function returned as reward terms. Raises TypeError or ValueError for anything else."""
    if outcome is None:
        return None
    terms = dict(outcome) if isinstance(outcome, Mapping) else {"reward": outcome}
    values = {str(name): float(value) for name, value in terms.items()}
    if not all(map(math.isfinite, values.values())):
        raise ValueError(f"the agent's reward {outcome!r} is not finite")
    return values or None


Agent = Callable[[AgentQuestion, openai.AsyncOpenAI], Awaitable[Outcome]]


def load_agent(reference: str) -> Agent:
    """The function ``rft.agent`` names. Raises BadConfig."""
    agent = load_reference(reference, "rft.agent")
    if not inspect.iscoroutinefunction(agent):
        raise BadConfig(
            f"rft.agent: {reference} is no async function", fix="write `async def run(question, client)`"
        )
    return agent


@ray.remote(max_restarts=-1, max_task_retries=0, max_concurrency=CONCURRENT_EPISODES)
class AgentRunner:
    """Runs episodes of an agent's function. What the function raises is raised to the caller."""

    def __init__(self, reference: str):
        self.agent = load_agent(reference)
        self.client: openai.AsyncOpenAI | None = None

    async def play(
        self, question: AgentQuestion, base_url: str, key: str, timeout_s: float
    ) -> dict[str, float] | None:
        """The reward terms of an episode at ``base_url``. Raises TimeoutError."""
        if self.client is None:  # one for all episodes: its connections are slow to set up
            self.client = openai.AsyncOpenAI(api_key=key, base_url=base_url)
        async with asyncio.timeout(timeout_s):
            client = self.client.with_options(base_url=base_url, timeout=timeout_s)
            return as_terms(await self.agent(question, client))
