"""Requests of which every sample fails."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dialogue_models import ScriptedSession, image_view, pixels, renderer

from pixelis.actors.generator_router import RolloutRequest, RolloutResult
from pixelis.config import DialogueConfig, load
from pixelis.dialogue.agent import Limits, run_episode
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import MIN_TEMPERATURE, SamplingParams
from pixelis.errors import DeadlineExceeded, InfraFailure, PixelisError
from pixelis.families import FAMILIES
from pixelis.families.family import Family
from pixelis.operations import select
from pixelis.records import Exchange, Group
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import AgentQuery, Answer, Backends, Pictures
from pixelis.serve.protocol.agent import AgentRequest
from pixelis.serve.protocol.question import agent_query
from pixelis.serve.responses import api_error

ANSWER = "<answer>7</answer>"
LIMITS = Limits(max_turns=2, max_turn_tokens=64, max_context=2048, max_images=4)


class Generators:
    """A router whose one generator plays each sample with the engine that its lines script."""

    def __init__(self, *lines: str | BaseException, dialect: str = "qwen", **spec: Family):
        base = renderer("nano")
        model = dataclasses.replace(base.spec, **spec)
        self.renderer = Renderer(base.tokenizer, model, DialogueConfig(dialect=dialect), select(["zoom_in"]))
        self.lines, self.images = lines, [image_view("nano")] if spec else []

    async def episodes(self, request: RolloutRequest, stream: bool) -> Any:
        views = [pixels(image) for image in self.images]
        asked = request.question, self.images, views, None, LIMITS, request.sampling, request.group_id, 0
        played = [
            await run_episode(ScriptedSession(self.renderer, [line]), self.renderer, *asked)
            for line in self.lines
        ]
        trajectories = [episode.trajectory for episode in played]
        group = Group(id=request.group_id, question=request.question, trajectories=trajectories)
        yield RolloutResult(group, SimpleNamespace())  # type: ignore[arg-type]


def answer(generators: Generators, history: list[Exchange] | None = None) -> Answer:
    async def run() -> Answer:
        agent = Agent(load(None, []), Backends(("generator",), "pixelis"))
        agent.router = generators  # type: ignore[assignment]
        samples = len(generators.lines)
        query = AgentQuery(
            "Which digit?", [], samples, SamplingParams(), operations=False, history=history or []
        )
        return await agent.answer(query, Pictures([], {}, list[np.ndarray](), []))

    return asyncio.run(run())


@pytest.mark.parametrize(
    "lines",
    [
        [InfraFailure("the engine is gone"), RuntimeError("CUDA error: device-side assert triggered")],
        [DeadlineExceeded("too late")] * 2,
        [DeadlineExceeded("too late"), InfraFailure("the engine is gone")],
    ],
)
def test_an_engine_that_fails_every_sample_is_a_503(lines: list[PixelisError]) -> None:
    with pytest.raises(InfraFailure, match="all samples failed") as caught:
        answer(Generators(*lines))
    error = api_error(caught.value)
    assert (error.status, error.code, error.retry_after_s is None) == (503, "unavailable", False)


def test_one_sample_that_was_played_suffices() -> None:
    failed = InfraFailure("the engine is gone")
    assert answer(Generators(failed, ANSWER)).verdict.answer == "7"
    assert answer(Generators(failed, "I do not know.")).verdict.answer is None


@pytest.mark.parametrize(("dialect", "earlier"), [("dapo", "7\n8"), ("pixel_reasoner", "{7")])
def test_an_earlier_answer_that_the_dialect_cannot_write_is_a_400(dialect: str, earlier: str) -> None:
    history = [Exchange(question="Is there a frame?", answer=earlier)]
    with pytest.raises(PixelisError) as caught:
        answer(Generators(ANSWER, ANSWER, dialect=dialect), history)
    error = api_error(caught.value)
    assert (error.status, error.code) == (400, "unsupported_conversation")
    assert dialect in error.message


def test_a_picture_for_a_model_of_text_is_a_400() -> None:
    with pytest.raises(PixelisError) as caught:
        answer(Generators(ANSWER, family=FAMILIES["qwen2"]))
    error = api_error(caught.value)
    assert (error.status, error.code) == (400, "no_vision")


def test_a_temperature_that_no_engine_samples_at_is_raised() -> None:
    def temperature(sent: float | None, *options: str) -> float:
        request = AgentRequest(question="Which digit?", temperature=sent)
        return agent_query(load(None, list(options)), request, request.conversation()).sampling.temperature

    expected = [0, MIN_TEMPERATURE, MIN_TEMPERATURE, 0.5, 2]
    assert [temperature(sent) for sent in (0, 1e-38, 0.001, 0.5, 2)] == expected
    assert temperature(None, "serve.sampling.temperature=0.7") == 0.7
