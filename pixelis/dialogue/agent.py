"""The agent loop: generates turns and executes operations until the policy answers or reaches a limit.

An episode is a coroutine; engines and tools batch over concurrent episodes. A failure inside an episode becomes its stop reason
or an observation, never an exception that would end other episodes.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pixelis.config import DialogueConfig
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import Completion, SamplingParams, Session
from pixelis.errors import DeadlineExceeded, InfraFailure, PixelisError
from pixelis.records import Action, ImageView, Observation, Question, StopReason, Trajectory, Turn, new_id

log = logging.getLogger(__name__)

TurnCallback = Callable[[Turn, list[np.ndarray]], None]
"""Called with each turn after the prompt and the views that the turn adds."""
TextCallback = Callable[[str], None]
"""Called with the text of a policy turn as it is generated, piece by piece, before the turn itself."""


class Tools(Protocol):
    """Runs pixel operations for the agent."""

    async def execute(
        self, action: Action, images: list[ImageView], objects: dict[str, dict[str, Any]]
    ) -> tuple[Observation, list[np.ndarray]]:
        """Execute an action, given the episode's views and objects so far.

        Returns an observation without ids, and the uint8 views of its images.
        """
        ...


@runtime_checkable
class StatefulTools(Tools, Protocol):
    """An environment: tools with a state, for one episode.

    An observation with ``done`` in its data ends the episode. An error of ``reset`` or ``execute`` ends it too, unscored, because
    the state is lost.
    """

    async def reset(self) -> tuple[Observation, list[np.ndarray]]:
        """Start the episode. Returns the observation to show below the question, without ids, and its uint8 views."""
        ...


@dataclass(frozen=True)
class Limits:
    """Limits of an episode: policy turns, tokens per turn, tokens in total, images in total."""

    max_turns: int
    max_turn_tokens: int
    max_context: int
    max_images: int

    @classmethod
    def of(cls, config: DialogueConfig, test: bool = False) -> Limits:
        """The configured limits for training, or with ``test`` for evaluation and serving."""
        turns = config.max_turns_test if test else config.max_turns
        return cls(turns, config.max_turn_tokens, config.max_context, config.max_images)


@dataclass
class Episode:
    """A trajectory and the views (uint8 [h, w, 3]) of its ``images``, in the same order."""

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
    on_turn: TurnCallback | None = None,
    on_text: TextCallback | None = None,
) -> Episode:
    """Run one episode: let the policy answer a question. Closes the session.

    ``images`` and ``views`` are the descriptions and pixels of the question's pictures. Without ``tools``, or for a
    question whose own ``tools`` are an empty list, no operations are offered, and a call gets an ``unknown_op`` observation.
    ``tools`` may be an environment (``StatefulTools``). The calls of a turn with several are executed in order. A call in the
    last allowed turn is not executed (over_turn). An observation that does not fit is not appended (over_context, over_images).
    A prompt that does not fit gives an episode without turns or images. Engine failures end the episode with ``error`` or
    ``deadline`` and their code in ``unscored``; only cancellation is raised.
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
        trajectory.stop_reason = await _play(session, renderer, question, episode, tools, limits, sampling, on_turn, on_text)
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
    on_turn: TurnCallback | None,
    on_text: TextCallback | None,
) -> StopReason:
    trajectory, offered = episode.trajectory, renderer.offered(question, operations=tools is not None)
    if isinstance(tools, StatefulTools):
        question = await _reset(tools, question, episode)
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
        on_tokens = renderer.listener(on_text) if on_text is not None else None
        settings = dataclasses.replace(sampling, max_tokens=room, stop=renderer.dialect.stop)
        completion = await session.generate(tokens, views, settings, on_tokens)
        _check_completion(completion, renderer, room)
        turn, reply = renderer.read(completion.tokens, completion.log_probs, trajectory.images, offered)
        turn.top_log_probs = completion.top_log_probs if turn.tokens else []
        trajectory.turns.append(turn)
        used += len(turn.tokens)
        if turn.error == "bad_token":
            raise InfraFailure(f"the engine sampled a banned token: {turn.text[-200:]!r}", code="bad_token")
        if on_turn is not None:
            on_turn(turn, [])
        if completion.finish == "length":
            return StopReason.LENGTH if room == limits.max_turn_tokens else StopReason.OVER_CONTEXT
        if reply.answer is not None:
            trajectory.answer = reply.answer
            return StopReason.ANSWER
        if reply.action is None and reply.error is None:
            return StopReason.NO_ACTION
        if number == limits.max_turns - 1:
            return StopReason.OVER_TURN
        results = await operate_all(tools, turn.actions, trajectory)
        if not results:
            assert reply.error is not None
            results.append((Observation(status="error", code=reply.error.code, text=reply.error.message), []))
        if len(trajectory.images) + sum(len(views) for _, views in results) > limits.max_images:
            return StopReason.OVER_IMAGES
        tool_turns, shown = list[Turn](), len(trajectory.images)
        for place, (observation, _) in enumerate(results):
            tool_turns.append(renderer.observation(observation, shown, place, len(results)))
            shown += len(observation.images)
        if completion.tokens[-1] != renderer.spec.stop:  # the dialect's stop text ended the turn, so that its end is not sampled
            tool_turns[0].tokens.insert(0, renderer.spec.stop)
        tokens = [token for tool_turn in tool_turns for token in tool_turn.tokens]
        if used + len(tokens) >= limits.max_context:
            return StopReason.OVER_CONTEXT
        views, used = [view for _, new in results for view in new], used + len(tokens)
        for tool_turn, (observation, new) in zip(tool_turns, results, strict=True):
            trajectory.turns.append(tool_turn)
            trajectory.images += observation.images
            episode.views += new
            if on_turn is not None:
                on_turn(tool_turn, new)
        if any(is_done(observation) for observation, _ in results):
            return StopReason.DONE
    raise AssertionError("the last turn returns")


async def _reset(tools: StatefulTools, question: Question, episode: Episode) -> Question:
    """Start an environment; returns the question as the policy sees it, with the environment's text below."""
    observation, views = await tools.reset()
    episode.views += views
    return show_start(question, episode.trajectory.images, observation)


def show_start(question: Question, images: list[ImageView], observation: Observation) -> Question:
    """The question with what its environment shows first: its text below, its images appended to ``images`` under new names."""
    used = {image.id for image in images}
    free = (name for name in (f"img{number}" for number in itertools.count()) if name not in used)
    images += [image.model_copy(update={"id": next(free)}) for image in observation.images]
    text = "\n".join(part for part in (question.question, observation.text) if part)
    return question.model_copy(update={"question": text})


def is_done(observation: Observation) -> bool:
    """Whether an environment ended the episode with this observation."""
    return observation.data.get("done") is True


async def operate_all(
    tools: Tools | None, actions: Sequence[Action], trajectory: Trajectory
) -> list[tuple[Observation, list[np.ndarray]]]:
    """Execute the calls of a turn in order, up to one that ends the episode; no call without tools."""
    results = list[tuple[Observation, list[np.ndarray]]]()
    if tools is None:
        return results
    for action in actions:
        results.append(await _operate(tools, action, trajectory, [observation for observation, _ in results]))
        if is_done(results[-1][0]):
            break
    return results


async def _operate(
    tools: Tools, action: Action, trajectory: Trajectory, before: Sequence[Observation]
) -> tuple[Observation, list[np.ndarray]]:
    """Execute an action and assign ids to the observation and its images. A failure of the tool becomes an observation.

    ``before``: the observations of earlier calls of the same turn, which only their ids depend on.
    """
    try:
        observation, views = await tools.execute(action, list(trajectory.images), trajectory.objects)
        if observation.status == "error":
            return observation.model_copy(update={"id": None, "images": []}), []
        if [view.shape for view in views] != [(i.view_size[1], i.view_size[0], 3) for i in observation.images]:
            raise ValueError("the views differ from the observation's images")
    except Exception as error:
        if isinstance(tools, StatefulTools):
            raise
        if isinstance(error, TimeoutError | DeadlineExceeded):
            return Observation(status="error", code="timeout", text=f"{action.op} took too long"), []
        log.warning("operation %s of episode %s failed", action.op, trajectory.id, exc_info=True)
        return Observation(status="error", code="crashed", text=f"{action.op} failed: {type(error).__name__}"), []
    data = {**observation.data, "op": action.op, "target": action.target}
    successes = trajectory.operations_ok + sum(earlier.status == "ok" for earlier in before)
    return name_observation(observation.model_copy(update={"data": data}), successes), views


def name_observation(observation: Observation, successes: int) -> Observation:
    """Assign the id (obs1, obs2, ... after ``successes`` earlier ones) to the observation and its images."""
    name = f"obs{successes + 1}"
    ids = [name] if len(observation.images) == 1 else [f"{name}.{i}" for i in range(len(observation.images))]
    images = [image.model_copy(update={"id": i}) for image, i in zip(observation.images, ids, strict=True)]
    return observation.model_copy(update={"id": name, "images": images})


def _check_completion(completion: Completion, renderer: Renderer, room: int) -> None:
    """Raise InfraFailure for an invalid completion: wrong counts, non-finite log-probs, a stop without the stop token."""
    tokens, log_probs = completion.tokens, completion.log_probs
    if len(tokens) != len(log_probs) or len(tokens) > room:
        problem = f"{len(tokens)} tokens with {len(log_probs)} log-probs, at most {room} allowed"
    elif not all(math.isfinite(p) for p in log_probs):
        problem = "log-probs that are not finite"
    elif completion.finish == "stop" and tokens and tokens[-1] != renderer.spec.stop and not renderer.dialect.stop:
        problem = f"a stop at token {tokens[-1]}"
    else:
        return
    raise InfraFailure(f"the engine returned {problem}", code="bad_completion")


def _check_views(renderer: Renderer, episode: Episode) -> None:
    """Raise InfraFailure unless views, image descriptions and image tokens agree: a mismatch would break training."""
    trajectory = episode.trajectory
    described = [(image.view_size[1], image.view_size[0], 3) for image in trajectory.images]
    if [view.shape for view in episode.views] != described:
        raise InfraFailure("the views and images of the episode differ", code="bad_views")
    expected = sum(renderer.spec.image_tokens(*view.shape[:2]) for view in episode.views)
    pads = sum(turn.tokens.count(renderer.spec.image_token) for turn in trajectory.turns)
    if trajectory.turns and pads != expected:
        raise InfraFailure(f"{pads} image tokens for {expected} image features", code="bad_views")
