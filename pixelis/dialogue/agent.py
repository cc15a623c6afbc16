"""The agent loop: the policy takes turns and operations are executed until it answers or reaches a limit.

An episode is a coroutine: engines and tools batch over concurrent ones. Its failures become stop reasons and
observations, never exceptions that would end others. A call of a client's function interrupts it
(`dialogue.resumption`).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pixelis.config import DialogueConfig
from pixelis.dialogue.dialects import Reply
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import SamplingParams, Session
from pixelis.errors import DeadlineExceeded, InfraFailure, PixelisError
from pixelis.records import Action, ImageView, Observation, Question, StopReason, Trajectory, Turn, new_id

log = logging.getLogger(__name__)

Outcome = tuple[Observation, list[np.ndarray]]
"""An observation and the uint8 [h, w, 3] views of its images."""
TurnCallback = Callable[[Turn, list[np.ndarray]], None]
"""Called with each turn after the prompt and the views that the turn adds."""
TextCallback = Callable[[str], None]
"""Called with the text of a policy turn as it is generated, piece by piece, before the turn itself."""


class Tools(Protocol):
    """Runs pixel operations for the agent."""

    async def execute(
        self, action: Action, images: list[ImageView], objects: dict[str, dict[str, Any]]
    ) -> Outcome:
        """Execute an action; the observation has no ids yet."""
        ...


@runtime_checkable
class StatefulTools(Tools, Protocol):
    """An environment for one episode; ``done`` in an observation ends it, and an error, unscored."""

    async def reset(self) -> Outcome:
        """The observation to show below the question, without ids."""
        ...


class Conversation(Protocol):
    """The policy's side of one episode: tokens of an engine's session, or the messages of a chat API."""

    def begin(
        self, question: Question, images: Sequence[ImageView], views: Sequence[np.ndarray]
    ) -> list[Turn] | StopReason:
        """The turns of the prompt, or the limit that it exceeds."""
        ...

    async def policy_turn(self, images: Sequence[ImageView]) -> tuple[Turn, Reply, StopReason | None]:
        """The policy's next turn after these views, what it says, and the limit that cut it off."""
        ...

    def observe(self, results: Sequence[Outcome], images_so_far: int) -> list[Turn] | StopReason:
        """The turns that show these observations, or the limit that they exceed."""
        ...


@dataclass(frozen=True)
class Limits:
    max_turns: int
    max_turn_tokens: int
    max_context: int
    max_images: int

    @classmethod
    def of(cls, config: DialogueConfig, test: bool = False) -> Limits:
        """The limits for training, or with ``test`` for evaluation and serving."""
        turns = config.max_turns_test if test else config.max_turns
        return cls(turns, config.max_turn_tokens, config.max_context, config.max_images)


@dataclass
class Episode:
    """A trajectory and the views (uint8 [h, w, 3]) of its ``images``, in the same order."""

    trajectory: Trajectory
    views: list[np.ndarray] = field(default_factory=list)


class Resumption(Protocol):
    """An episode with which its client goes on; see `dialogue.resumption`."""

    episode: Episode

    async def hear(
        self,
        conversation: TokenConversation,
        episode: Episode,
        tools: Tools | None,
        limits: Limits,
        on_turn: TurnCallback | None,
    ) -> StopReason | None:
        """Append what the client said, and what our operations of the same turns observe."""
        ...


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
    resume: Resumption | None = None,
) -> Episode:
    """Run one episode on an engine, and close its session; only cancellation is raised.

    A prompt that does not fit gives an episode without turns or images. Engine failures end the episode with
    ``error`` or ``deadline`` and their code in ``unscored``, as do replies of a client that do not fit the calls
    (``wrong_results``). With ``resume`` the episode goes on, in a copy, on a session that starts after it; it may
    end before another policy turn, at a limit. The engine may then keep what it computed.
    """
    if resume is not None and resume.episode.trajectory.turns:
        earlier = resume.episode.trajectory
        fresh: dict[str, Any] = {"turns": [*earlier.turns], "images": [*earlier.images], "answer": None}
        fresh["policy_version"] = min(earlier.policy_version, policy_version)
        episode = Episode(earlier.model_copy(update=fresh), [*resume.episode.views])
    else:
        trajectory = Trajectory(
            id=trajectory_id or new_id("traj"),
            question_id=question.id,
            group_id=group_id,
            dialect=renderer.dialect.name,
            images=[image.model_copy() for image in images],
            policy_version=policy_version,
        )
        episode = Episode(trajectory, list(views))
    trajectory = episode.trajectory
    started = time.perf_counter() - trajectory.seconds
    try:
        conversation = TokenConversation(session, renderer, tools is not None, limits, sampling, on_text)
        conversation.resume(question, episode)
        stop = await _begin(conversation, question, episode, tools) if not trajectory.turns else None
        if resume is not None:
            stop = stop or await resume.hear(conversation, episode, tools, limits, on_turn)
        stop = stop or await _take_turns(conversation, question, episode, tools, limits, on_turn)
        trajectory.stop_reason = stop
        _check_views(renderer, episode)
        if resume is not None:
            session.keep()
    except (TimeoutError, DeadlineExceeded):
        trajectory.stop_reason, trajectory.unscored = StopReason.DEADLINE, "deadline_exceeded"
    except Exception as error:  # one broken episode must not end the others in this process
        log.warning("episode %s of question %s failed", trajectory.id, question.id, exc_info=True)
        trajectory.stop_reason = StopReason.ERROR
        trajectory.unscored = error.code if isinstance(error, PixelisError) else "crashed"
    finally:
        try:
            session.close()
        except Exception:  # the episode is complete without it
            log.warning("session of episode %s did not close", trajectory.id, exc_info=True)
    if trajectory.stop_reason is not StopReason.ANSWER:
        trajectory.answer = None
    if not trajectory.turns:
        trajectory.images, episode.views = [], []
    trajectory.seconds = time.perf_counter() - started
    return episode


async def play(
    conversation: Conversation,
    question: Question,
    episode: Episode,
    tools: Tools | None,
    limits: Limits,
    on_turn: TurnCallback | None = None,
) -> StopReason:
    """Play an episode, which gets its turns, images and answer; returns why it stopped.

    Calls in the last allowed turn are not executed, and observations that do not fit are not appended.
    Failures of the policy are raised.
    """
    stop = await _begin(conversation, question, episode, tools)
    return stop or await _take_turns(conversation, question, episode, tools, limits, on_turn)


async def _begin(
    conversation: Conversation, question: Question, episode: Episode, tools: Tools | None
) -> StopReason | None:
    trajectory = episode.trajectory
    if isinstance(tools, StatefulTools):
        observation, views = await tools.reset()
        episode.views += views
        question = show_start(question, trajectory.images, observation)
    prompt = conversation.begin(question, trajectory.images, episode.views)
    if isinstance(prompt, StopReason):
        return prompt
    trajectory.turns += prompt
    return None


async def _take_turns(
    conversation: Conversation,
    question: Question,
    episode: Episode,
    tools: Tools | None,
    limits: Limits,
    on_turn: TurnCallback | None,
) -> StopReason:
    trajectory, functions = episode.trajectory, {function.name for function in question.functions}
    while True:
        turn, reply, limit = await conversation.policy_turn(trajectory.images)
        trajectory.turns.append(turn)
        if turn.error == "bad_token":
            raise InfraFailure(f"the engine sampled a banned token: {turn.text[-200:]!r}", code="bad_token")
        if on_turn is not None:
            on_turn(turn, [])
        if limit is not None:
            return limit
        if reply.answer is not None:
            trajectory.answer = reply.answer
            return StopReason.ANSWER
        if reply.action is None and reply.error is None:
            return StopReason.NO_ACTION
        if trajectory.policy_turns >= limits.max_turns:
            return StopReason.OVER_TURN
        if any(action.op in functions for action in turn.actions):
            return StopReason.CALL
        results = await operate_all(tools, turn.actions, trajectory)
        if not results:
            assert reply.error is not None
            results.append((Observation(status="error", code=reply.error.code, text=reply.error.message), []))
        turns = conversation.observe(results, len(trajectory.images))
        if (stop := show(episode, results, turns, limits, on_turn)) is not None:
            return stop


def show(
    episode: Episode,
    shown: Sequence[Outcome],
    turns: list[Turn] | StopReason,
    limits: Limits,
    on_turn: TurnCallback | None,
) -> StopReason | None:
    """Append the turns that show these observations, unless that exceeds a limit."""
    trajectory = episode.trajectory
    if len(trajectory.images) + sum(len(views) for _, views in shown) > limits.max_images:
        return StopReason.OVER_IMAGES
    if isinstance(turns, StopReason):
        return turns
    for turn, (observation, views) in zip(turns, shown, strict=True):
        trajectory.turns.append(turn)
        trajectory.images += observation.images
        episode.views += views
        if on_turn is not None:
            on_turn(turn, views)
    return StopReason.DONE if any(is_done(observation) for observation, _ in shown) else None


class TokenConversation:
    """A conversation in the tokens of an engine's session, which keeps those of earlier turns."""

    def __init__(
        self,
        session: Session,
        renderer: Renderer,
        operations: bool,
        limits: Limits,
        sampling: SamplingParams,
        on_text: TextCallback | None,
    ):
        self.session, self.renderer, self.operations, self.limits = session, renderer, operations, limits
        self.sampling, self.on_text = sampling, on_text
        self.used, self.open = 0, False
        self.tokens: list[int] = []
        self.views: list[np.ndarray] = []

    def resume(self, question: Question, episode: Episode) -> None:
        """Go on after the turns of an episode, which the session hears again."""
        self.offered = self.renderer.offered(question, self.operations)
        replies = episode.trajectory.replies
        if replies:
            self.tokens, self.views = episode.trajectory.token_ids(), list(episode.views)
            self.used, self.open = len(self.tokens), replies[-1].tokens[-1:] != [self.renderer.spec.stop]

    def begin(
        self, question: Question, images: Sequence[ImageView], views: Sequence[np.ndarray]
    ) -> list[Turn] | StopReason:
        if len(images) > self.limits.max_images:
            return StopReason.OVER_IMAGES
        if [view.shape for view in views] != _shapes(images):
            raise InfraFailure("the views and images of the question differ", code="bad_views")
        return self._send(self.renderer.prompt(question, images, self.operations), views)

    def _send(self, turns: list[Turn], views: Sequence[np.ndarray]) -> list[Turn] | StopReason:
        tokens = [token for turn in turns for token in turn.tokens]
        if self.used + len(tokens) >= self.limits.max_context:
            return StopReason.OVER_CONTEXT
        self.used += len(tokens)
        self.tokens += tokens
        self.views += views
        return turns

    async def policy_turn(self, images: Sequence[ImageView]) -> tuple[Turn, Reply, StopReason | None]:
        renderer, limits = self.renderer, self.limits
        room = min(limits.max_turn_tokens, limits.max_context - self.used)
        on_tokens = renderer.listener(self.on_text) if self.on_text is not None else None
        sampling = dataclasses.replace(self.sampling, max_tokens=room, stop=renderer.dialect.stop)
        completion = await self.session.generate(self.tokens, self.views, sampling, on_tokens)
        self.tokens, self.views = [], []
        tokens, log_probs = completion.tokens, completion.log_probs
        self.open = bool(tokens) and tokens[-1] != renderer.spec.stop
        # An engine with a fault must not train the policy
        if len(tokens) != len(log_probs) or len(tokens) > room or not all(map(math.isfinite, log_probs)):
            raise InfraFailure(
                "the engine returned too many tokens or wrong log-probs", code="bad_completion"
            )
        if completion.finish == "stop" and self.open and not renderer.dialect.stop:
            raise InfraFailure(f"the engine stopped at token {tokens[-1]}", code="bad_completion")
        turn, reply = renderer.read(tokens, log_probs, images, self.offered)
        turn.top_log_probs = completion.top_log_probs if turn.tokens else []
        self.used += len(turn.tokens)
        limit = StopReason.LENGTH if room == limits.max_turn_tokens else StopReason.OVER_CONTEXT
        return turn, reply, limit if completion.finish == "length" else None

    def quote(self, text: str, calls: Sequence[Action], images: Sequence[ImageView]) -> Turn:
        """What a client puts in the place of a policy turn."""
        turn = self.renderer.reply(text, calls, images)
        self.tokens += turn.tokens
        self.used, self.open = self.used + len(turn.tokens), False
        return turn

    def observe(
        self, results: Sequence[Outcome], images_so_far: int, message: Observation | None = None
    ) -> list[Turn] | StopReason:
        """message: the last of the results, if it is a further message of the user."""
        turns, count = list[Turn](), len(results) - (message is not None)
        for place, (observation, _) in enumerate(results[:count]):
            turns.append(
                self.renderer.observation(observation, images_so_far, place, count, opens=message is None)
            )
            images_so_far += len(observation.images)
        if message is not None:
            turns.append(self.renderer.message(message.text, message.images, bool(self.offered), not turns))
        if self.open:  # the end of the policy's turn was not sampled, and is not learnt
            turns[0].tokens.insert(0, self.renderer.spec.stop)
        return self._send(turns, [view for _, views in results for view in views])


def show_start(question: Question, images: list[ImageView], observation: Observation) -> Question:
    """The question with what its environment shows first; its images get new names in ``images``."""
    images += name_pictures(images, observation.images)
    text = "\n".join(filter(None, (question.question, observation.text)))
    return question.model_copy(update={"question": text})


def name_pictures(images: Sequence[ImageView], new: Sequence[ImageView]) -> list[ImageView]:
    """New images with the next free names, img1 and on."""
    used = {image.id for image in images}
    free = (name for name in (f"img{number}" for number in itertools.count()) if name not in used)
    return [image.model_copy(update={"id": next(free)}) for image in new]


def is_done(observation: Observation) -> bool:
    """Whether an environment ended the episode with this observation."""
    return observation.data.get("done") is True


async def operate_all(
    tools: Tools | None,
    actions: Sequence[Action],
    trajectory: Trajectory,
    functions: Collection[str] = (),
    theirs: Sequence[Outcome] = (),
) -> list[Outcome]:
    """The observations of calls in order; ``theirs``: those of the client's ``functions``."""
    results, successes, from_client = list[Outcome](), trajectory.operations_ok, iter(theirs)
    for action in actions:
        if action.op in functions:
            observation, views = next(from_client)
            data = {"op": action.op, "target": action.target, "client": True}
            observation = name_observation(observation.model_copy(update={"data": data}), successes)
        elif tools is not None:
            observation, views = await _operate(tools, action, trajectory, successes)
        else:
            break
        results.append((observation, views))
        successes += observation.status == "ok"
        if is_done(observation):
            break
    return results


async def _operate(tools: Tools, action: Action, trajectory: Trajectory, successes: int) -> Outcome:
    """A failure of the tool becomes an observation."""
    try:
        observation, views = await tools.execute(action, list(trajectory.images), trajectory.objects)
        if observation.status == "error":
            return observation.model_copy(update={"id": None, "images": []}), []
        if [view.shape for view in views] != _shapes(observation.images):
            raise ValueError("the views differ from the observation's images")
    except Exception as error:
        if isinstance(tools, StatefulTools):
            raise
        if isinstance(error, TimeoutError | DeadlineExceeded):
            return Observation(status="error", code="timeout", text=f"{action.op} took too long"), []
        log.warning("operation %s of episode %s failed", action.op, trajectory.id, exc_info=True)
        text = f"{action.op} failed: {type(error).__name__}"
        return Observation(status="error", code="crashed", text=text), []
    data = {**observation.data, "op": action.op, "target": action.target}
    return name_observation(observation.model_copy(update={"data": data}), successes), views


def name_observation(observation: Observation, successes: int) -> Observation:
    """Assign the next id, obs1 and on, to the observation and its images."""
    name = f"obs{successes + 1}"
    ids = [name] if len(observation.images) == 1 else [f"{name}.{i}" for i in range(len(observation.images))]
    images = [image.model_copy(update={"id": i}) for image, i in zip(observation.images, ids, strict=True)]
    return observation.model_copy(update={"id": name, "images": images})


def _shapes(images: Sequence[ImageView]) -> list[tuple[int, int, int]]:
    return [(image.view_size[1], image.view_size[0], 3) for image in images]


def _check_views(renderer: Renderer, episode: Episode) -> None:
    """InfraFailure unless views, image descriptions and image tokens agree, as training needs."""
    trajectory = episode.trajectory
    if [view.shape for view in episode.views] != _shapes(trajectory.images):
        raise InfraFailure("the views and images of the episode differ", code="bad_views")
    expected = sum(renderer.spec.image_tokens(*view.shape[:2]) for view in episode.views)
    pads = sum(turn.tokens.count(renderer.spec.image_token) for turn in trajectory.turns)
    if trajectory.turns and pads != expected:
        raise InfraFailure(f"{pads} image tokens for {expected} image features", code="bad_views")
