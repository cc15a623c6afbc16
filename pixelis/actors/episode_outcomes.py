"""Stores the ended episodes of outside agents, and makes update tasks of what their groups teach."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle

from pixelis.actors.background_work import BackgroundWork
from pixelis.actors.episodes import OutsideEpisode
from pixelis.actors.experience_store import YES, ExperienceStore, Stored
from pixelis.actors.group_views import GroupViews
from pixelis.actors.memory import Memory
from pixelis.actors.update_sender import UpdateSender
from pixelis.config import Config
from pixelis.errors import InfraFailure
from pixelis.evolution.episode_groups import asks_the_same, experience_verdict, lesson
from pixelis.evolution.privacy import redact_record
from pixelis.evolution.traffic_questions import MIN_CONFIDENCE
from pixelis.evolution.updates import priority, unlabelled
from pixelis.operations.image import load_image
from pixelis.records import Experience, Media, UpdateTask, Verdict

MAX_LEARNT = 100_000
"""Latest episodes whose repeated end is ignored."""


@dataclass
class EndedEpisode:
    """An experience, not yet redacted, with the views of its trajectory.

    ``alone``: the client said nothing after its question, so that the canary can ask it again.
    """

    experience: Experience
    views: GroupViews
    alone: bool
    storing: asyncio.Task[Stored]


class EpisodeOutcomes:
    """``evolution`` returns the actor's handle, None without learning; without a ``memory`` nothing is stored.

    ``counts`` has the experiences, and ``episodes_CAUSE`` of the groups that teach nothing.
    """

    def __init__(
        self,
        config: Config,
        evolution: Callable[[], Awaitable[ActorHandle]] | None,
        memory: Memory | None,
    ):
        self.config, self.counts = config, Counter[str]()
        read_only = config.serve.read_only
        self.memory = memory if config.memory.enabled and not read_only else None
        learns = evolution is not None and config.evolution.enabled and not read_only
        self.updates = UpdateSender(evolution, self.counts) if evolution is not None and learns else None
        self.store = ExperienceStore(config.memory.pictures, self.counts)
        self.background = BackgroundWork(self.counts)
        self.waiting: dict[str, EndedEpisode] = {}
        """By the id of the episode, until its group is complete."""
        self.learnt: dict[str, None] = {}

    async def ended(self, episodes: Sequence[OutsideEpisode], complete: bool = True) -> None:
        """Store ended episodes of a group and, once it is ``complete``, learn from all of them. Idempotent.

        Returns when they are on disk, before anybody is told of their reward. Raises InfraFailure
        ``not_stored`` if they are not within ``memory.write_timeout_s``: the same call may follow.
        """
        new = [
            episode
            for episode in episodes
            if episode.id in self.waiting or (episode.id not in self.learnt and _is_played(episode))
        ]
        for episode in new:
            known = self.waiting.get(episode.id)
            if known is None or (known.storing.done() and not self._is_stored(known)):
                self.waiting[episode.id] = self._store(episode)
        ended = [self.waiting[episode.id] for episode in new]
        if ended:
            writes = [one.storing for one in ended]
            await asyncio.wait(writes, timeout=self.config.memory.write_timeout_s)
        if not all(map(self._is_stored, ended)):
            self.counts["not_remembered"] += 1
            raise InfraFailure("the episode is not stored yet", code="not_stored", fix="send it again")
        # Another call may have been faster while this one waited
        if complete and (ready := [e for e in new if self.waiting.pop(e.id, None) is not None]):
            self._forget_old([episode.id for episode in ready])
            if self.updates is not None:
                self.background.start(ready[0].id, self._learn(self.updates, ended, ready[0].owner))

    async def drain(self, timeout_s: float) -> None:
        await self.background.drain(timeout_s)

    def _is_stored(self, one: EndedEpisode) -> bool:
        if not one.storing.done():
            return False
        stored = one.storing.result()
        return stored.redacted is not None and (self.memory is None or stored.outcome == YES)

    def _forget_old(self, new: Sequence[str]) -> None:
        self.learnt |= dict.fromkeys(new)
        for id in list(self.learnt)[: max(0, len(self.learnt) - MAX_LEARNT)]:
            del self.learnt[id]

    def _store(self, episode: OutsideEpisode) -> EndedEpisode:
        trajectory, views = episode.record()
        line, now = episode.lines[episode.chosen], time.time()
        assert views is not None
        question = unlabelled(line.question).model_copy(update={"id": episode.question.id})
        verdict = experience_verdict(trajectory, question, self.config.evolution, now)
        experience = Experience(
            id=experience_id(episode.id),
            question=question,
            trajectory=trajectory,
            verdict=verdict,
            policy_version=trajectory.policy_version,
            created_at=now,
            user=episode.owner or None,
            status="failed" if episode.cause else "pending",
            priority=priority(verdict),
        )
        self.counts[f"episodes_{episode.status}"] += 1
        storing = self.store.put(lambda: experience, trajectory, views, self.memory)
        alone = len(line.turns) == 1 and sum(turn.role == "user" for turn in trajectory.turns) == 1
        return EndedEpisode(experience, views, alone, asyncio.create_task(storing))

    async def _learn(self, updates: UpdateSender, ended: Sequence[EndedEpisode], owner: str) -> None:
        c, experiences = self.config, [one.experience for one in ended]
        if self.memory is not None and await self.memory.size() < c.evolution.cold_start:
            self.counts["episodes_cold_start"] += 1
            return
        found = await asyncio.to_thread(lesson, experiences, c.evolution, c.rewards, owner, time.time())
        if found.task is None or found.verdict is None:
            self.counts[f"episodes_{found.cause}"] += 1
            if found.gated:
                updates.gated(owner)
            return
        await self.background.count("update_sent", self._send(updates, found.task, found.verdict, ended))

    async def _send(
        self, updates: UpdateSender, task: UpdateTask, verdict: Verdict, ended: Sequence[EndedEpisode]
    ) -> bool:
        """False if Evolution refuses the task. Raises RayError if the views are lost."""
        arrays: dict[str, Any] = {}
        for one in ended:
            arrays |= await one.views.get()
        views = GroupViews(ray.put({t.id: arrays[t.id] for t in task.trajectories}))
        experiences = [one.experience for one in ended]
        teacher = next(e for e in experiences if e.id == task.experience_id)
        originals: Mapping[str, ray.ObjectRef] | None = None
        if task.confidence >= MIN_CONFIDENCE and asks_the_same(experiences) and all(o.alone for o in ended):
            originals = await asyncio.to_thread(self._originals, teacher.question.media)
        verdict, question = await asyncio.to_thread(
            lambda: (redact_record(verdict), redact_record(teacher.question))
        )
        return await updates.send(task, views, verdict, question, originals)

    def _originals(self, media: Sequence[Media]) -> dict[str, ray.ObjectRef]:
        """The decoded pictures of a question by id, which the canary may ask."""
        caps = self.config.toolbox
        return {
            m.id: ray.put(load_image(m.uri, caps.max_image_bytes, caps.max_image_pixels))
            for m in media
            if m.kind == "image"
        }


def experience_id(episode_id: str) -> str:
    return f"exp_{episode_id.removeprefix('ep_')}"


def _is_played(episode: OutsideEpisode) -> bool:
    """Whether the branch that counts has a turn of the policy."""
    line = episode.lines.get(episode.chosen)
    return line is not None and line.views is not None
