"""Sends update tasks to the Evolution actor."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle

from pixelis.actors.group_views import GroupViews
from pixelis.records import Question, UpdateTask, Verdict
from pixelis.telemetry import tracing

MAX_VOTERS = 10_000
EVOLUTION_TIMEOUT_S = 30.0
"""Timeout of calls to Evolution: calls that wait for its restart must not fill the background."""


class UpdateSender:
    """``evolution`` returns the actor's handle; ``counts`` gets the outcomes."""

    def __init__(self, evolution: Callable[[], Awaitable[ActorHandle]], counts: Counter[str]):
        self.evolution, self.counts = evolution, counts
        self.unclear: Counter[str] = Counter()
        """Verdicts below the gate by voter, since the voter's last task."""
        self.gated_in_a_row = 0

    async def call(self, method: str, *arguments: Any) -> Any:
        async with asyncio.timeout(EVOLUTION_TIMEOUT_S):
            return await getattr(await self.evolution(), method).remote(*arguments)

    def gated(self, voter: str) -> None:
        """Count a verdict below the gate."""
        self.counts["gated"] += 1
        self.gated_in_a_row += 1
        self.unclear[voter] += 1
        if len(self.unclear) > MAX_VOTERS:
            del self.unclear[next(iter(self.unclear))]

    async def send(
        self,
        task: UpdateTask,
        views: GroupViews,
        verdict: Verdict,
        question: Question,
        originals: Mapping[str, ray.ObjectRef] | None,
    ) -> bool:
        """See ``Evolution.submit``; verdict and question are redacted. False if Evolution refuses the task."""
        self.gated_in_a_row = 0
        unclear = self.unclear.pop(task.user, 0)
        try:
            task = task.model_copy(update={"trace": tracing.traceparent()})
            accepted = await self.call("submit", task, views, verdict, question, originals, unclear)
        except BaseException:
            if unclear:
                self.unclear[task.user] += unclear
            raise
        self.counts["update_refused"] += not accepted
        return bool(accepted)
