"""The EpisodeService actor: holds the open episodes of a service, whose gateways may die meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

import ray
from ray.actor import ActorHandle

from pixelis.actors.cluster import actor_handle
from pixelis.actors.episode_outcomes import EpisodeOutcomes
from pixelis.actors.episodes import Episodes, OutsideEpisode
from pixelis.actors.evolution_monitor import log_failures, repeat
from pixelis.actors.generator_router import GeneratorRouter, RouterTimeouts
from pixelis.actors.generator_scaler import POLL_S, follow
from pixelis.actors.memory import Memory
from pixelis.actors.rollout_messages import TextUpdate, TurnUpdate
from pixelis.config import Config
from pixelis.dialogue.session import SamplingParams
from pixelis.protocol.completion import Completion
from pixelis.protocol.episodes import EpisodeRequest, EpisodeStatus
from pixelis.protocol.errors import ApiError
from pixelis.protocol.messages import Message
from pixelis.protocol.tools import Toolset
from pixelis.records import Question, new_id
from pixelis.rewards.scorers import find_scorer
from pixelis.telemetry import logs

SWEEP_S = 1.0
"""Seconds between searches for expired episodes."""


@dataclass
class EpisodeGroup:
    """Episodes of a key that share an advantage: ``samples`` of them, or those opened until all have ended."""

    name: str
    owner: str
    seed: int
    samples: int = 1
    id: str = field(default_factory=lambda: new_id("group"))
    episodes: list[OutsideEpisode] = field(default_factory=list)
    settling: asyncio.Lock = field(default_factory=asyncio.Lock)
    complete: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether none is open, and none will be opened: missing ones are awaited until the last expiry."""
        whole = len(self.episodes) >= self.samples or time.time() >= max(e.expires_at for e in self.episodes)
        return whole and all(episode.ended.is_set() for episode in self.episodes)


@ray.remote(num_cpus=0, max_restarts=-1)
class EpisodeService(Episodes):
    """Opens, completes and ends episodes for all gateways; a restarted one has forgotten them.

    ``generators``, ``scaler``, ``evolution`` and ``memory`` are names of actors.
    """

    def __init__(
        self,
        config: Config,
        generators: Sequence[str],
        scaler: str | None = None,
        evolution: str | None = None,
        memory: Sequence[str] = (),
    ):
        logs.start(config, "episodes")
        router = GeneratorRouter(generators, RouterTimeouts.serving(config), follows=True, attempts=2)
        super().__init__(config, router, config.dialogue.max_turns_test, config.serve.augmentations)
        self.scaler = scaler
        self.groups: dict[str, EpisodeGroup] = {}
        namespace = ray.get_runtime_context().namespace

        async def learner() -> ActorHandle:
            return await asyncio.to_thread(actor_handle, evolution, namespace)

        shards = Memory(memory, namespace, config.memory) if memory else None
        self.outcomes = EpisodeOutcomes(config, learner if evolution is not None else None, shards)
        self.background: list[asyncio.Task[None]] = []

    async def health(self) -> dict[str, int]:
        self._start()
        return {"open": len(self.by_id), "groups": len(self.groups)}

    async def open(self, owner: str, body: EpisodeRequest, sampling: SamplingParams) -> EpisodeStatus:
        """Open an episode. Raises ApiError 429 above the cap of the key."""
        self._start()
        limits = self.config.serve.episodes
        if len(self._own(owner)) >= limits.max_open:
            message = f"{limits.max_open} episodes of this key are open: end them with a reward"
            raise ApiError(429, message, "too_many_episodes", retry_after_s=10.0)
        if body.scorer is not None:
            find_scorer(body.scorer)  # raises BadInput
        question = Question(
            id=new_id("q"),
            question=body.question or "",
            answers=body.answers,
            scorer=body.scorer or "exact",
            meta=dict(body.metadata or {}),
            task="serve",
            split="serve",
        )
        group = self._group(owner, body.group) or EpisodeGroup(body.group or "", owner, sampling.seed)
        self.groups[group.id] = group
        group.samples = max(group.samples, body.samples or 1)
        episode = self.begin(
            question,
            group.id,
            replace(sampling, seed=group.seed),
            body.expires_s or limits.expires_s,
            sample=len(group.episodes),
            owner=owner,
        )
        group.episodes.append(episode)
        return self.shown(episode)

    @ray.method(num_returns="streaming")
    async def complete(
        self,
        owner: str,
        id: str,
        messages: Sequence[Message],
        tools: Toolset,
        sampling: SamplingParams,
        seeded: bool,
        stream: bool,
    ) -> AsyncIterator[TextUpdate | TurnUpdate | Completion]:
        """The next reply in an episode; without an ``id``, of one that ends with it and teaches nothing.

        ``seeded``: whether the seed is the request's, not the episode's. Views are left out.
        """
        self._start()
        if id:
            episode = self.get(owner, id)
            self._require_room(owner)
            if not seeded:
                sampling = replace(sampling, seed=episode.sampling.seed)
        else:
            question = Question(id=new_id("q"), question="", task="serve", split="serve")
            timeout_s = self.config.serve.timeout_s
            episode = self.begin(question, new_id("group"), sampling, timeout_s, owner=owner)
        try:
            async with aclosing(self.reply(episode, messages, tools, sampling, stream)) as pieces:
                async for piece in pieces:
                    yield replace(piece, views=[]) if isinstance(piece, TurnUpdate) else piece
        finally:
            if not id:
                del self.by_id[episode.id]

    async def next(self, owner: str, wait_s: float) -> NoReturn:
        raise ApiError(404, "a service has no questions: POST /v1/episodes opens an episode", "no_questions")

    async def settle(self, episode: OutsideEpisode) -> None:
        """Store what has ended of an episode's group, and learn from a complete one, which is forgotten."""
        group = self.groups.get(episode.group_id)
        if group is None:
            return
        async with group.settling:
            group.complete = group.complete or group.has_ended
            ended = [episode for episode in group.episodes if episode.ended.is_set()]
            if ended:
                await self.outcomes.ended(ended, group.complete)
            if group.complete and self.groups.pop(group.id, None) is not None:
                for episode in ended:
                    self.close(episode)

    def shown(self, episode: OutsideEpisode) -> EpisodeStatus:
        """With the key's name of the group."""
        group, shown = self.groups.get(episode.group_id), super().shown(episode)
        return shown.model_copy(update={"group": group.name}) if group is not None and group.name else shown

    def _group(self, owner: str, name: str | None) -> EpisodeGroup | None:
        """The open group that a key calls so."""
        mine = [g for g in self.groups.values() if (g.owner, g.name) == (owner, name)]
        return next((group for group in mine if not group.complete), None)

    def _own(self, owner: str) -> list[OutsideEpisode]:
        return [e for group in self.groups.values() if group.owner == owner for e in group.episodes]

    def _require_room(self, owner: str) -> None:
        """Raises ApiError 429 if the messages of a key are larger than ``serve.episodes.max_bytes``."""
        limit = self.config.serve.episodes.max_bytes
        branches = [b for episode in self._own(owner) for b in episode.branches.branches.values()]
        messages = [message for branch in branches for message in branch.messages]
        # Branches share the messages that they have in common
        texts = {id(text): len(text) for m in messages for text in (m.text, *m.media)}
        if sum(texts.values()) > limit:
            message = f"the messages of this key's open episodes have more than {limit} characters"
            raise ApiError(429, message, "too_many_bytes", retry_after_s=10.0)

    def _start(self) -> None:
        if self.background:
            return
        self.background.append(
            asyncio.create_task(repeat(SWEEP_S, self._sweep, "expired episodes could not be ended"))
        )
        if self.scaler is not None:
            list_them = partial(follow, self.router, self.scaler)
            following = repeat(POLL_S, list_them, "the generators could not be listed")
            self.background.append(asyncio.create_task(following))

    async def _sweep(self) -> None:
        now = time.time()
        for group in list(self.groups.values()):
            for episode in group.episodes:
                answering = any(line.answered.locked() for line in episode.lines.values())
                if episode.expires_at <= now and not answering and episode.end():
                    episode.expired = True
            with log_failures("the episodes of a group could not be stored"):
                if group.has_ended:
                    await self.settle(group.episodes[-1])
