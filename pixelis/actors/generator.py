"""The Generator actor: an engine with one policy version that runs many episodes concurrently."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import RayError

from pixelis.actors.cluster import alone_on, freeze_gc, lower_priority, repeated_on_restart, use_reserved_gpus
from pixelis.actors.episode_tools import BoundTools, EnvironmentTools
from pixelis.actors.group_views import first_views
from pixelis.actors.rollout_messages import ClientContent, EpisodeSoFar, RolloutRequest
from pixelis.actors.toolbox import InitialViews, Outcome
from pixelis.actors.toolbox_pool import ToolboxPool
from pixelis.actors.toolbox_work import Opened
from pixelis.config import Config
from pixelis.dialogue.agent import Episode, Limits, run_episode
from pixelis.dialogue.augmentation import AugmentedSession, alternate
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.resumption import Resume, Said
from pixelis.dialogue.session import Completion, SamplingParams, Session, Start, TokenCallback
from pixelis.dialogue.shams import Shams
from pixelis.engines import start_engine
from pixelis.errors import BadInput
from pixelis.operations import select
from pixelis.operations.environment import PARENT, environment_of, select_environments
from pixelis.records import Group, Media, Observation, Question, Turn
from pixelis.telemetry import logs, tracing
from pixelis.telemetry.metrics import count, publish

if TYPE_CHECKING:
    from pixelis.policy.weight_stream import StreamPlace

TurnEvent = tuple[int, Turn, list[np.ndarray]]
"""Index of a sample, a turn without its tokens, and the uint8 views that the turn adds."""
TextEvent = tuple[int, str]
"""Index of a sample, and a piece of the text of its next turn."""
TurnCallback = Callable[[int, Turn, list[np.ndarray]], None]
AddedViews = dict[str, list[np.ndarray] | None]
"""Trajectory id -> uint8 views of its images after those of the question, None if it shows no image."""
FirstViews = list[np.ndarray] | None
"""uint8 views of a medium that the question starts with, None if the caller has them."""


@ray.remote(max_restarts=-1, max_task_retries=0, max_concurrency=1024, concurrency_groups={"health": 2})
class Generator:
    """Runs episodes of the current policy. Its own toolboxes decode images and run operations."""

    def __init__(self, config: Config, store: str, index: int = 0):
        # A name: a handle argument is kept in the object store, where its loss can make a restart impossible.
        self.config, self.store, self.index = config, ray.get_actor(store), index
        gpus = use_reserved_gpus()
        lower_priority(config)
        logs.start(config, "generator")
        from pixelis.policy.model_path import resolve

        with repeated_on_restart(), alone_on(gpus):
            self.engine = start_engine(config, resolve(config.policy.model), index)
        operations = select(config.toolbox.operations)
        environments = select_environments(config.toolbox)
        self.renderer = Renderer(
            self.engine.tokenizer, self.engine.spec, config.dialogue, operations, environments
        )
        self.shams = Shams(self.renderer)
        self.tools = ToolboxPool(config, self.engine.spec.multiple, self.renderer.coordinates)
        self.started, self.loading, self.running = False, asyncio.Lock(), 0
        self.room = asyncio.Semaphore(config.engine.max_num_seqs)
        freeze_gc()

    async def _load(self, version: int, weights: Any = None) -> None:
        if weights is None:
            (ref,) = await self.store.get.remote(version)
            weights = await ref
        await self.engine.load(version, weights)
        self.started = True

    async def load(self, version: int, place: StreamPlace | None = None) -> int:
        """Switch to `version` once no episode is running; returns the loaded version.

        place: in the broadcast of the version, which is received while the old one serves.
        """
        await self._exit_if_engine_died()
        weights = None
        if place is not None:
            from pixelis.policy.weight_stream import receive

            weights = await asyncio.to_thread(receive, place)
        async with self.loading:
            # A new engine reports its bare model as version 0, which may also be the version of an adapter.
            if not self.started or self.engine.version != version:
                await self._load(version, weights)
            return self.engine.version

    async def sleep(self) -> None:
        """Free the engine's GPU, once no episode is running; `load` and `rollout` wait for `wake`."""
        await self._exit_if_engine_died()
        await self.engine.sleep()

    async def wake(self) -> None:
        await self._exit_if_engine_died()
        await self.engine.wake()

    async def _exit_if_engine_died(self) -> None:
        """Ray then restarts this process, and the router repeats its requests."""
        if (await self.engine.health()).get("alive") is False:
            os._exit(1)

    async def ready(self) -> None:
        await self.tools.ready()

    @ray.method(concurrency_group="health")
    async def health(self) -> dict[str, Any]:
        """Version and load of the engine, and state of the toolboxes. Answers while the engine is busy."""
        return {
            "index": self.index,
            "started": self.started,
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "toolbox": self.tools.health(),
            **(await self.engine.health()),
        }

    @ray.method(concurrency_group="health")
    async def pieces(self, turns: list[list[int]]) -> list[list[bytes]]:
        """The UTF-8 bytes of each token of some turns. Answers while the engine is busy."""
        return [self.renderer.pieces(tokens) for tokens in turns]

    @ray.method(num_returns=2)
    async def rollout(self, request: RolloutRequest) -> tuple[Group | AddedViews | FirstViews, ...]:
        """The group of a request, the views that its episodes add, and the first views of each medium.

        Each is an object of its own, which the caller owns. Without `request.views` there are two.
        """
        group, added, first = await self._episodes(request)
        return group, added, *first

    @ray.method(num_returns="streaming")
    async def stream(
        self, request: RolloutRequest
    ) -> AsyncIterator[list[TurnEvent | TextEvent] | Group | AddedViews | FirstViews]:
        """Lists of new turns and text as they are generated, then the results of `rollout`.

        Cancelling the call or closing the stream ends the episodes and frees their rows in the engine.
        """
        events: list[TurnEvent | TextEvent] = []
        changed = asyncio.Event()

        def add(event: TurnEvent | TextEvent) -> None:
            events.append(event)
            changed.set()

        def watch(sample: int, turn: Turn, views: list[np.ndarray]) -> None:
            shown = turn.model_copy(update={"tokens": [], "log_probs": [], "top_log_probs": []})
            add((sample, shown, views))

        read = (lambda text: add((0, text))) if request.text else None
        episodes = asyncio.ensure_future(self._episodes(request, watch, read))
        episodes.add_done_callback(lambda _: changed.set())
        try:
            while events or not episodes.done():
                await changed.wait()
                changed.clear()
                pending, events[:] = events[:], []
                if pending:
                    yield pending
            group, added, first = await episodes
            for result in (group, added, *first):
                yield result
        finally:
            episodes.cancel()

    async def _episodes(
        self,
        request: RolloutRequest,
        watch: TurnCallback | None = None,
        read: Callable[[str], None] | None = None,
    ) -> tuple[Group, AddedViews, list[FirstViews]]:
        """The results of `rollout`. watch: called with each turn; read: with new text of the first sample."""
        if not self.started:  # a new or restarted process must not serve the bare model
            async with self.loading:
                if not self.started:
                    await self._load(await self.store.promoted.remote())
        await self._exit_if_engine_died()
        with tracing.span("group", request.trace, samples=request.samples, group=request.group_id):
            group, added, first = await self._group(request, watch, read)
        await self._exit_if_engine_died()  # episodes that the death of the engine cut off must not be used
        tags = {"generator": str(self.index)}
        publish({"engine/version": group.policy_version}, tags)
        count("engine/groups", tags=tags)
        count("engine/episodes", len(group.trajectories), tags)
        policy_turns = [turn for t in group.trajectories for turn in t.turns if turn.is_policy]
        count("engine/tokens", sum(len(turn.tokens) for turn in policy_turns), tags)
        return group, added, first

    async def _group(
        self, request: RolloutRequest, watch: TurnCallback | None, read: Callable[[str], None] | None
    ) -> tuple[Group, AddedViews, list[FirstViews]]:
        d, question, sampling = self.config.dialogue, request.question, request.sampling
        turn_tokens = min(sampling.max_tokens, d.max_turn_tokens)
        limits = Limits(request.max_turns or d.max_turns, turn_tokens, d.max_context, d.max_images)
        self.renderer.offered(question, request.operations)  # its errors are the caller's
        numbers = range(request.sample, request.sample + request.samples)
        augmentations = alternate(request.augmentations, numbers.stop)[numbers.start :]
        starts = [Start(number) for number in numbers]
        if request.resume:
            earlier = [so_far.trajectory for so_far in request.resume]
            starts = list(map(Start.after, earlier, numbers))
        sessions = list[Session]()
        tags = {"generator": str(self.index)}
        self.running += 1
        publish({"engine/running": self.running}, tags)
        try:
            for name, start in zip(augmentations, starts, strict=True):
                session = await self.engine.open(request.group_id, start)
                first = start.prompt[1] if start.turns else None
                sessions.append(session if name is None else AugmentedSession(session, name, first))
            version = self.engine.version
            opened, (images, views) = await self._open(question.media, request)
            resume = [await self._resume(so_far, views, request) for so_far in request.resume]
            plays = bool(request.operations and environment_of(question, self.renderer.environments))
            if plays and resume:
                raise BadInput("an environment cannot be left and resumed", code="environment_left")
            tools = BoundTools(self.tools, opened) if request.operations else None

            async def play(i: int, session: Session) -> Episode:
                async with self._environment(opened, question) if plays else nullcontext(tools) as own:
                    return await _traced_episode(
                        session,
                        self.renderer,
                        question,
                        images,
                        views,
                        own,
                        limits,
                        replace(sampling, max_tokens=turn_tokens, seed=sampling.seed + numbers[i]),
                        group_id=request.group_id,
                        policy_version=version,
                        trajectory_id=resume[i].episode.trajectory.id if resume else None,
                        resume=resume[i] if resume else None,
                        on_turn=partial(watch, i) if watch is not None else None,
                        on_text=read if i == 0 else None,
                    )

            episodes = await asyncio.gather(*(play(i, session) for i, session in enumerate(sessions)))
        finally:
            self.running -= 1
            publish({"engine/running": self.running}, tags)
            for session in sessions:
                session.close()
        trajectories = [e.trajectory for e in episodes]
        for trajectory, name in zip(trajectories, augmentations, strict=True):
            trajectory.augmentation = name
        if request.causal_use and tools is not None and not plays:
            self.shams.remember(episodes[0])
            score = partial(self._score, sampling.priority)
            await asyncio.gather(*(self.shams.measure(question, e, tools, score) for e in episodes))
        id = request.group_id
        group = Group(id=id, question=question, trajectories=trajectories, policy_version=version)
        if not request.views:
            return group, {}, []
        added = {e.trajectory.id: e.views[len(views) :] if e.trajectory.images else None for e in episodes}
        return group, added, await first_views(question.media, images, views, request.known)

    @asynccontextmanager
    async def _environment(self, opened: Opened, question: Question) -> AsyncIterator[EnvironmentTools]:
        """The environment of an episode, once fewer than engine.max_num_seqs are open."""
        async with self.room:
            environment = EnvironmentTools(self.tools, opened, question)
            try:
                yield environment
            finally:
                environment.close()

    async def _score(self, priority: int, tokens: list[int], views: list[np.ndarray], count: int) -> float:
        session = await self.engine.open()
        try:
            settings = SamplingParams(0.0, max_tokens=1, priority=priority, given_log_probs=count)
            return sum((await session.generate(tokens, views, settings)).given_log_probs)
        finally:
            session.close()

    async def _open(self, media: Sequence[Media], request: RolloutRequest) -> tuple[Opened, InitialViews]:
        pictures = {item.id: request.pictures[item.id] for item in media if item.id in request.pictures}
        return await self.tools.open(list(media), pictures)

    async def _resume(
        self, so_far: EpisodeSoFar, first: Sequence[np.ndarray], request: RolloutRequest
    ) -> Resume:
        """An episode with its views, which begin with the ``first``, and what its client said, with views."""
        trajectory, views = so_far.trajectory, list(first)
        if so_far.added is not None:
            try:
                (added,) = (await so_far.added).values()  # of one episode
                views += added or []
            except RayError:
                message = "the pictures of the episode are lost"
                raise BadInput(message, code="episode_lost", fix="begin it again") from None

        async def read(content: ClientContent) -> Outcome:
            if any(item.kind != "image" for item in content.media):
                raise BadInput("a client's reply has pictures, but no clips", code="no_clips")
            _, (images, shown) = await self._open(content.media, request)
            images = [image.model_copy(update={"id": "", "parent": PARENT}) for image in images]
            return Observation(status="ok", text=content.text, images=images), list(shown)

        said = [
            Said(
                results=[await read(content) for content in item.results],
                message=await read(item.message) if item.message is not None else None,
                reply=item.reply,
                calls=item.calls,
            )
            for item in so_far.said
        ]
        return Resume(Episode(trajectory, views[: len(trajectory.images)]), said)


async def _traced_episode(session: Session, *arguments: Any, **details: Any) -> Episode:
    with tracing.span("episode") as span:
        traced = TracedSession(session) if span.is_recording() else session
        episode = await run_episode(traced, *arguments, **details)
        t = episode.trajectory
        values = {"trajectory": t.id, "stop_reason": t.stop_reason.value, "version": t.policy_version}
        span.set_attributes({f"pixelis.{name}": value for name, value in values.items()})
        return episode


class TracedSession:
    """A session with a span for each generated turn."""

    def __init__(self, session: Session):
        self.session = session

    async def generate(
        self,
        tokens: Sequence[int],
        views: Sequence[np.ndarray],
        sampling: SamplingParams,
        on_tokens: TokenCallback | None = None,
    ) -> Completion:
        with tracing.span("generate", prompt_tokens=len(tokens), views=len(views)) as span:
            completion = await self.session.generate(tokens, views, sampling, on_tokens)
            span.set_attribute("pixelis.tokens", len(completion.tokens))
            return completion

    def keep(self) -> None:
        self.session.keep()

    def close(self) -> None:
        self.session.close()
