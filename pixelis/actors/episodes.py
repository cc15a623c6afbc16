"""Episodes whose agent owns the loop: each of its requests lets the policy's episode go on where it stopped.

The record is the one of our own loop (`dialogue.agent`), which a generator interrupts and resumes: tokens,
log-probs, masks and views are what the policy saw and sampled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from pixelis.actors.generator_router import GeneratorRouter, Reservation
from pixelis.actors.group_views import GroupViews
from pixelis.actors.rollout_messages import (
    ClientContent,
    ClientTurn,
    EpisodeSoFar,
    RolloutRequest,
    RolloutResult,
    TextUpdate,
)
from pixelis.config import Config
from pixelis.dialogue.agent import up_to
from pixelis.dialogue.dialects import DIALECTS
from pixelis.dialogue.session import SamplingParams
from pixelis.protocol.branches import Branches, Place
from pixelis.protocol.completion import Completion, CompletionRequest
from pixelis.protocol.errors import ApiError
from pixelis.protocol.messages import Call, Message
from pixelis.records import Action, Function, Media, Question, StopReason, Trajectory, new_id

MAX_OPEN = 10_000
"""Open episodes of a host."""
KEPT_S = 3600.0
"""Seconds for which an ended episode still answers its reward."""
CUT_OFF = (StopReason.LENGTH, StopReason.OVER_TURN, StopReason.OVER_CONTEXT, StopReason.OVER_IMAGES)
log = logging.getLogger(__name__)


@dataclass
class Line:
    """A branch of an episode: its record, and the completions by the number of messages that they answer."""

    trajectory: Trajectory
    views: GroupViews | None = None
    completions: dict[int, Completion] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class OutsideEpisode:
    """An episode of an outside agent, open until a reward, a failure or its expiry ends it.

    ``sample``: its number in its group. ``cause``: of a failure. ``outcome``: reward terms; None without a
    reward.
    """

    id: str
    question: Question
    group_id: str
    sampling: SamplingParams
    expires_at: float
    sample: int = 0
    reservation: Reservation | None = None
    owner: str = ""
    branches: Branches = field(default_factory=Branches)
    lines: dict[str, Line] = field(default_factory=dict)
    last: str = "main"
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    cause: str = ""
    chosen: str = ""
    outcome: dict[str, float] | None = None
    answer: str | None = None

    def end(
        self, outcome: Mapping[str, float] | None = None, answer: str | None = None, branch: str | None = None
    ) -> bool:
        """End the episode at ``branch``, by default the last; False if it has ended before, and stays so.

        Raises ApiError 400 for an unknown branch.
        """
        if branch is not None and branch not in self.lines:
            known = ", ".join(self.lines) or "none"
            raise ApiError(400, f"no branch {branch[:40]!r}; known: {known}", "unknown_branch", "branch")
        if self.ended.is_set():
            return False
        self.outcome = dict(outcome) if outcome is not None else None
        self.answer, self.chosen = answer, branch or self.last
        self.ended.set()
        return True

    def fail(self, cause: str) -> bool:
        """End the episode without a reward: the cause is counted, nothing is learnt."""
        if self.ended.is_set():
            return False
        self.cause, self.chosen = cause, self.last
        self.ended.set()
        return True

    def record(self) -> tuple[Trajectory, GroupViews | None]:
        """The trajectory of the branch that counts, as one of our own loop, and its views."""
        line = self.lines.get(self.chosen)
        if line is None:
            cause = self.cause or "agent_silent"  # it has not called the policy
            line = Line(Trajectory(question_id=self.question.id, dialect="", unscored=cause))
        t, update = line.trajectory, {"question_id": self.question.id, "group_id": self.group_id}
        update["outcome"] = self.outcome
        if self.cause:
            timed_out = self.cause == "agent_timeout"
            reason = StopReason.DEADLINE if timed_out else StopReason.ERROR
            update |= {"stop_reason": reason, "unscored": self.cause, "answer": None}
        elif t.turns and t.stop_reason not in CUT_OFF:
            answer = self.answer if self.answer is not None else line.last_text
            update |= {"answer": answer, "stop_reason": StopReason.ANSWER if answer else StopReason.DONE}
        return t.model_copy(update=update), line.views


class Episodes:
    """Holds the open episodes of outside agents, whose completions a router's generators make."""

    def __init__(self, config: Config, router: GeneratorRouter):
        self.config, self.router = config, router
        self.dialect = DIALECTS[config.dialogue.dialect]
        self.by_id: dict[str, OutsideEpisode] = {}
        self.offers: asyncio.Queue[OutsideEpisode] = asyncio.Queue()

    def open(
        self, question: Question, group_id: str, sampling: SamplingParams, expires_s: float, **details
    ) -> OutsideEpisode:
        """Raises ApiError 429 with too many open episodes."""
        self._sweep()
        if len(self.by_id) >= MAX_OPEN:
            raise ApiError(429, "too many episodes are open", "too_many_episodes", retry_after_s=10.0)
        episode = OutsideEpisode(
            new_id("ep"), question, group_id, sampling, time.monotonic() + expires_s, **details
        )
        self.by_id[episode.id] = episode
        return episode
