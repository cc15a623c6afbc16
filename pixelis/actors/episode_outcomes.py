"""Stores the ended episodes of outside agents, and makes update tasks of what their groups teach."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle

from pixelis.actors.after_episode import YES, AfterEpisode, Stored
from pixelis.actors.episodes import OutsideEpisode
from pixelis.actors.group_views import GroupViews, joined
from pixelis.actors.memory import Memory
from pixelis.config import Config
from pixelis.errors import InfraFailure
from pixelis.evolution.episode_groups import asks_the_same, experience_verdict, lesson
from pixelis.evolution.privacy import redact_record
from pixelis.evolution.traffic_questions import MIN_CONFIDENCE
from pixelis.evolution.updates import priority, unlabelled
from pixelis.operations.image import load_image
from pixelis.records import Experience, Media, UpdateTask, Verdict
from pixelis.rewards.vote import MIN_VOTES
from pixelis.telemetry.metrics import count


@dataclass
class EndedEpisode:
    """An experience, not yet redacted, with the views of its trajectory.

    ``alone``: the client said nothing after its question, so that the canary can ask it again.
    """

    experience: Experience
    views: GroupViews
    alone: bool
    storing: asyncio.Task[Stored]


class EpisodeOutcomes(AfterEpisode):
    """Without a ``memory`` nothing is stored.

    ``counts`` has the experiences, and ``groups_OUTCOME``: "task", or why a group teaches nothing.
    """

    def __init__(
        self,
        config: Config,
        evolution: Callable[[], Awaitable[ActorHandle]] | None,
        memory: Memory | None,
    ):
        super().__init__(config, evolution, Counter())
        self.memory = memory if config.remembers else None
        self.waiting: dict[str, EndedEpisode] = {}
        """By the id of the episode, until its group is complete."""

    async def ended(self, episodes: Sequence[OutsideEpisode], complete: bool = True) -> None:
        """Store ended episodes of a group, and learn from them if they are all of it. Idempotent.

        Raises InfraFailure ``not_stored`` if they are not on disk within ``memory.write_timeout_s``: nobody
        must be told of their reward, and the same call may follow.
        """
        ended = []
        for episode in episodes:
            known = self.waiting.get(episode.id)
            if known is None and not _is_played(episode):
                continue
            if known is None or (known.storing.done() and not self._is_stored(known)):
                known = self.waiting[episode.id] = self._store(episode)
            ended.append(known)
        if ended:
            await asyncio.wait([one.storing for one in ended], timeout=self.config.memory.write_timeout_s)
        if not all(map(self._is_stored, ended)):
            self.counts["not_remembered"] += 1
            raise InfraFailure("the episode is not stored yet", code="not_stored", fix="send it again")
        if complete:
            for episode in episodes:
                self.waiting.pop(episode.id, None)
            if ended and self.learns:
                self.start(ended[0].experience.id, self._learn(ended, episodes[0].owner))

    def _is_stored(self, one: EndedEpisode) -> bool:
        if not one.storing.done():
            return False
        stored = one.storing.result()
        return stored.redacted is not None and (self.memory is None or stored.outcome == YES)

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
        storing = self.store(lambda: experience, trajectory, views, self.memory)
        alone = len(line.turns) == 1 and sum(turn.role == "user" for turn in trajectory.turns) == 1
        return EndedEpisode(experience, views, alone, asyncio.create_task(storing))

    async def _learn(self, ended: Sequence[EndedEpisode], owner: str) -> None:
        c, experiences = self.config, [one.experience for one in ended]
        if self.memory is not None and await self.memory.size() < c.evolution.cold_start:
            self._count_group("cold_start")
            return
        decision = await asyncio.to_thread(lesson, experiences, c.evolution, c.rewards, owner, time.time())
        self._count_group(decision.cause or "task")
        if decision.task is not None and decision.verdict is not None:
            await self.count("update_sent", self._submit(decision.task, decision.verdict, ended))
        elif decision.verdict is not None and len(ended) >= MIN_VOTES:
            self.gated(owner)

    def _count_group(self, outcome: str) -> None:
        self.counts[f"groups_{outcome}"] += 1
        count("episodes/groups", tags={"outcome": outcome})

    async def _submit(self, task: UpdateTask, verdict: Verdict, ended: Sequence[EndedEpisode]) -> bool:
        """False if Evolution refuses the task. Raises RayError if the views are lost."""
        experiences, taught = [one.experience for one in ended], {t.id for t in task.trajectories}
        views = await joined(one.views for one in ended if one.experience.trajectory.id in taught)
        teacher = next(e for e in experiences if e.id == task.experience_id)
        originals: Mapping[str, ray.ObjectRef] | None = None
        if task.confidence >= MIN_CONFIDENCE and asks_the_same(experiences) and all(o.alone for o in ended):
            originals = await asyncio.to_thread(self._originals, teacher.question.media)
        verdict, question = await asyncio.to_thread(
            lambda: (redact_record(verdict), redact_record(teacher.question))
        )
        return await self.send(task, views, verdict, question, originals)

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
