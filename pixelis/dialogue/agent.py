"""The agent loop: the policy speaks, operations answer, until it answers or a limit is reached.

One episode is one coroutine; engines and tools batch over the many that run at once. Whatever goes wrong inside an episode is its
stop reason or an observation, never an exception that would take its neighbours along.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pixelis.config import DialogueConfig
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import Completion, SamplingParams, Session
from pixelis.errors import DeadlineExceeded, InfraFailure, PixelisError
from pixelis.records import Action, ImageView, Observation, Question, StopReason, Trajectory, Turn, new_id

log = logging.getLogger(__name__)

Watch = Callable[[Turn, list[np.ndarray]], None]
"""Told of each turn after the prompt as soon as it is part of the episode, with the views that it adds."""


class Tools(Protocol):
    """Runs pixel operations for the agent."""

    async def execute(
        self, action: Action, images: list[ImageView], objects: dict[str, dict[str, Any]]
    ) -> tuple[Observation, list[np.ndarray]]:
        """Result of an action on the views so far and the objects found so far.

        Returns an observation without ids, and the uint8 views of its images.
        """
        ...


@dataclass(frozen=True)
class Limits:
    """What one episode may use: policy turns, tokens of a turn, tokens and images of the whole."""

    max_turns: int
    max_turn_tokens: int
    max_context: int
    max_images: int

    @classmethod
    def of(cls, config: DialogueConfig, test: bool = False) -> Limits:
        """The limits of the configuration, for training or (``test``) for evaluation and serving."""
        turns = config.max_turns_test if test else config.max_turns
        return cls(turns, config.max_turn_tokens, config.max_context, config.max_images)


@dataclass
class Episode:
    """A trajectory and the uint8 [h, w, 3] views of its ``images``, in the same order."""

    trajectory: Trajectory
    views: list[np.ndarray] = field(default_factory=list)


async def run_episode(
    session: Session,
    renderer: Renderer,
    question: Question,
    images: Sequence[ImageView],
    views: Sequence[np.ndarray],
    tools: Tools | None,
    limits: Limits,
    sampling: SamplingParams,
    group_id: str,
    policy_version: int,
    trajectory_id: str | None = None,
    watch: Watch | None = None,
) -> Episode:
    """Let the policy answer a question; closes the session.

    ``images`` and ``views`` are the question's pictures, described and as uint8 arrays. Without ``tools`` no operations are
    offered and a call gets an ``unknown_op`` observation. A call in the last allowed turn is not executed (over_turn); an
    observation that would not fit is not appended (over_context, over_images); a prompt that would not fit leaves an episode
    without turns or images. Failures of the engine end it with ``error`` or ``deadline`` and their code in ``unscored``; only
    cancellation is raised. ``watch`` is told of the turns as they happen.
    """
    trajectory = Trajectory(
        id=trajectory_id or new_id("traj"),
        question_id=question.id,
        group_id=group_id,
        dialect=renderer.dialect.name,
        images=[image.model_copy() for image in images],
        policy_version=policy_version,
    )
    episode = Episode(trajectory, list(views))
    started = time.perf_counter()
    try:
        trajectory.stop_reason = await _play(session, renderer, question, episode, tools, limits, sampling, watch)
        _check_views(renderer, episode)
    except (TimeoutError, DeadlineExceeded):
        trajectory.stop_reason, trajectory.unscored = StopReason.DEADLINE, "deadline_exceeded"
    except Exception as error:  # one broken episode must not end the others in this process
        log.warning("episode %s of question %s failed", trajectory.id, question.id, exc_info=True)
        trajectory.stop_reason = StopReason.ERROR
        trajectory.unscored = error.code if isinstance(error, PixelisError) else "crashed"
    finally:
        try:
            session.close()
        except Exception:
            log.warning("session of episode %s did not close", trajectory.id, exc_info=True)
    if trajectory.stop_reason is not StopReason.ANSWER:
        trajectory.answer = None
    if not trajectory.turns:
        trajectory.images, episode.views = [], []
    trajectory.seconds = time.perf_counter() - started
    return episode


async def _play(
    session: Session,
    renderer: Renderer,
    question: Question,
    episode: Episode,
    tools: Tools | None,
    limits: Limits,
    sampling: SamplingParams,
    watch: Watch | None,
) -> StopReason:
    trajectory = episode.trajectory
    if len(trajectory.images) > limits.max_images:
        return StopReason.OVER_IMAGES
    _check_views(renderer, episode)
    prompt = renderer.prompt(question, trajectory.images, operations=tools is not None)
    used = sum(len(turn.tokens) for turn in prompt)
    if used >= limits.max_context:
        return StopReason.OVER_CONTEXT
    trajectory.turns += prompt
    tokens, views = [token for turn in prompt for token in turn.tokens], list(episode.views)
    for number in range(limits.max_turns):
        room = min(limits.max_turn_tokens, limits.max_context - used)
        completion = await session.generate(tokens, views, dataclasses.replace(sampling, max_tokens=room))
        _check_completion(completion, renderer, room)
        turn, reply = renderer.read(completion.tokens, completion.log_probs, trajectory.images, operations=tools is not None)
        trajectory.turns.append(turn)
        used += len(turn.tokens)
        if turn.error == "bad_token":
            raise InfraFailure(f"the engine sampled a token it must not: {turn.text[-200:]!r}", code="bad_token")
        if watch is not None:
            watch(turn, [])
        if completion.finish == "length":
            return StopReason.LENGTH if room == limits.max_turn_tokens else StopReason.OVER_CONTEXT
        if reply.answer is not None:
            trajectory.answer = reply.answer
            return StopReason.ANSWER
        if reply.action is None and reply.error is None:
            return StopReason.NO_ACTION
        if number == limits.max_turns - 1:
            return StopReason.OVER_TURN
        if reply.action is not None and tools is not None:
            observation, views = await _operate(tools, reply.action, trajectory)
        else:
            assert reply.error is not None
            observation = Observation(status="error", code=reply.error.code, text=reply.error.message)
            views = []
        if len(trajectory.images) + len(views) > limits.max_images:
            return StopReason.OVER_IMAGES
        answer = renderer.observation(observation, len(trajectory.images))
        if used + len(answer.tokens) >= limits.max_context:
            return StopReason.OVER_CONTEXT
        trajectory.turns.append(answer)
        trajectory.images += observation.images
        episode.views += views
        if watch is not None:
            watch(answer, views)
        tokens, used = answer.tokens, used + len(answer.tokens)
    raise AssertionError("the last turn returns")


async def _operate(tools: Tools, action: Action, trajectory: Trajectory) -> tuple[Observation, list[np.ndarray]]:
    """Run an action; on success give the observation and its images their ids. A failure of the tool is an observation."""
    try:
        observation, views = await tools.execute(action, list(trajectory.images), trajectory.objects)
        if observation.status == "error":
            return observation.model_copy(update={"id": None, "images": []}), []
        if [view.shape for view in views] != [(i.view_size[1], i.view_size[0], 3) for i in observation.images]:
            raise ValueError("the views are not those the observation describes")
    except (TimeoutError, DeadlineExceeded):
        return Observation(status="error", code="timeout", text=f"{action.op} took too long"), []
    except Exception as error:
        log.warning("operation %s of episode %s failed", action.op, trajectory.id, exc_info=True)
        return Observation(status="error", code="crashed", text=f"{action.op} failed: {type(error).__name__}"), []
    data = {**observation.data, "op": action.op, "target": action.target}
    return name_observation(observation.model_copy(update={"data": data}), trajectory.operations_ok), views


def name_observation(observation: Observation, successes: int) -> Observation:
    """The observation with its id (obs1, obs2, ... after ``successes`` earlier ones) on itself and its images."""
    name = f"obs{successes + 1}"
    ids = [name] if len(observation.images) == 1 else [f"{name}.{i}" for i in range(len(observation.images))]
    images = [image.model_copy(update={"id": i}) for image, i in zip(observation.images, ids, strict=True)]
    return observation.model_copy(update={"id": name, "images": images})


def _check_completion(completion: Completion, renderer: Renderer, room: int) -> None:
    """InfraFailure when an engine breaks its word: wrong counts, non-finite log-probs, a stop without the stop token."""
    tokens, log_probs = completion.tokens, completion.log_probs
    if len(tokens) != len(log_probs) or len(tokens) > room:
        problem = f"{len(log_probs)} log-probs and room {room} for {len(tokens)} tokens"
    elif not all(math.isfinite(p) for p in log_probs):
        problem = "log-probs that are not finite"
    elif completion.finish == "stop" and tokens and tokens[-1] != renderer.spec.stop:
        problem = f"a stop at token {tokens[-1]}"
    else:
        return
    raise InfraFailure(f"the engine returned {problem}", code="bad_completion")


def _check_views(renderer: Renderer, episode: Episode) -> None:
    """InfraFailure unless views, their descriptions and the image tokens of the turns agree: a mismatch would break training."""
    trajectory = episode.trajectory
    described = [(image.view_size[1], image.view_size[0], 3) for image in trajectory.images]
    if [view.shape for view in episode.views] != described:
        raise InfraFailure("views and images of the episode differ", code="bad_views")
    expected = sum(renderer.spec.image_tokens(*view.shape[:2]) for view in episode.views)
    pads = sum(turn.tokens.count(renderer.spec.image_token) for turn in trajectory.turns)
    if trajectory.turns and pads != expected:
        raise InfraFailure(f"{pads} image tokens for {expected} image features", code="bad_views")
