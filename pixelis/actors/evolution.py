"""The Evolution actor: gives update tasks from traffic to the learner, and judges and promotes its versions.

The path of a task: ``submit`` -> ``update_intake`` -> ``update_queue`` -> ``next_batch`` -> the learner ->
``step_done`` -> ``promotion``. The learner calls the same methods as on the Coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import ray
from ray.actor import ActorHandle

from pixelis.actors.canary import Canary
from pixelis.actors.cluster import actor_handle
from pixelis.actors.evolution_monitor import EvolutionMonitor, log_failures, repeat
from pixelis.actors.generator_router import GeneratorRouter, RouterTimeouts
from pixelis.actors.group_views import GroupViews, UpdatePictures
from pixelis.actors.memory import Memory
from pixelis.actors.promotion import Promotion
from pixelis.actors.rollouts import RolloutBatch, StepResult
from pixelis.actors.unlearning import Unlearning
from pixelis.actors.update_intake import UpdateIntake, UpdateScoring, representative
from pixelis.actors.update_queue import TASK_COUNTS, QueuedTask, Rehearsal, UpdateQueue
from pixelis.config import Config
from pixelis.errors import InfraFailure
from pixelis.evolution.gate import RateLimit
from pixelis.evolution.guard import AdaptiveKLController
from pixelis.evolution.privacy import redact
from pixelis.evolution.review_queue import Review, ReviewQueue, State, without_tokens
from pixelis.evolution.traffic_questions import TrafficQuestions
from pixelis.records import Feedback, PolicyVersion, Question, UpdateTask, Verdict
from pixelis.telemetry import logs, tracing

SAVE_S, EXPIRE_S = 10.0, 3600.0
"""Seconds between writes of the shares of users, and between deletions by ``memory.retention_days``."""


@ray.remote(num_cpus=0, max_restarts=-1)
class Evolution:
    """Queues at most ``evolution.queue`` tasks and gives the learner ``evolution.batch`` of them per step.

    ``canary``: a Generator that serves no requests; ``memory``: names of the shards. A restarted actor keeps
    what is on disk (reviews, approved tasks, audit log, alerts, versions, traffic questions, shares) and
    loses other tasks.
    """

    def __init__(
        self,
        config: Config,
        generators: Sequence[ActorHandle | str],
        store: ActorHandle | str,
        canary: ActorHandle | str | None = None,
        memory: Sequence[str] = (),
        scoring: tuple[str, str] | None = None,
    ):
        logs.start(config, "evolution")
        e = self.settings = config.evolution
        self.monitor = EvolutionMonitor(config, self._health)
        self.memory = Memory(memory, ray.get_runtime_context().namespace, config.memory) if memory else None
        self.review_queue = ReviewQueue(Path(config.run.dir) / "review.db", config.rewards)
        self.deciding = asyncio.Lock()
        pictures = UpdatePictures()
        judge = Canary(config, actor_handle(canary), pictures) if canary is not None else None
        router = GeneratorRouter([actor_handle(g) for g in generators], RouterTimeouts.serving(config))
        traffic = TrafficQuestions(e.canary, Path(config.run.dir) / "versions" / "traffic")
        self.promotion = Promotion(config, actor_handle(store), router, judge, self.monitor.note, traffic)
        self.counts: Counter[str] = Counter()
        self.queue = UpdateQueue(config, self.counts)
        self.scoring = UpdateScoring(config, scoring)
        self.intake = UpdateIntake(
            config, self.queue, self.promotion, traffic, self.review_queue, self.scoring, pictures
        )
        self.rehearsal = Rehearsal(e, self.memory, pictures)
        self.unlearning = None
        if e.unlearn_s is not None:
            self.unlearning = Unlearning(config, self.promotion, pictures, self.monitor.note)
        self.rate, self.beta = RateLimit(e.per_minute), AdaptiveKLController(e.guard)
        self.updates_at: deque[float] = deque(maxlen=1000)
        self.step = self.incarnation = 0
        self.failure, self.formed_at = "", 0.0
        self.current: RolloutBatch | None = None
        self.tasks: list[QueuedTask] = []
        self.rehearsed: list[QueuedTask] = []
        self.traces: deque[str] = deque(maxlen=1000)
        """Requests that the next candidate has learnt from."""
        self.ranks_served: set[int] = set()
        self.pause_file = Path(config.run.dir) / "versions" / "paused"
        self.intake.paused = self.pause_file.exists()
        self.learning, self.changed = False, self.queue.changed
        self.opening: asyncio.Task | None = None
        self.background: list[asyncio.Task] = []

    async def use_generators(self, names: Sequence[str]) -> None:
        await self.promotion.use_generators(names)

    async def _open(self) -> None:
        if self.opening is None or (self.opening.done() and self.opening.exception() is not None):
            self.opening = asyncio.create_task(self._start())
        await asyncio.shield(self.opening)

    async def _start(self) -> None:
        self.queue.restore_shares()
        await self.promotion.open()
        await self._drop_withdrawn()
        for id in await asyncio.to_thread(self.review_queue.approved):
            await self.intake.approve(id)
        await self.monitor.note("start", "evolution", "start", "success", {"version": self.promotion.served})
        e = self.settings
        due_s = min(e.review.approve_after_s or e.alerts.every_s, e.alerts.every_s)
        loops = [
            self.monitor.run(),
            repeat(e.canary.watch_s, self.check_served, "checking the served version failed"),
            repeat(SAVE_S, self.queue.save_shares, "saving the shares of users failed"),
            repeat(due_s, self._approve_due, "approving due reviews failed"),
            repeat(EXPIRE_S, self._expire, "deleting what is old failed"),
        ]
        self.background = [asyncio.create_task(loop) for loop in loops]

    async def health(self) -> str:
        """Answers once the generators have loaded the promoted version."""
        await self._open()
        return "ok"

    # -- from the gateways

    async def submit(
        self,
        task: UpdateTask,
        views: GroupViews,
        verdict: Verdict | None = None,
        question: Question | None = None,
        originals: dict[str, ray.ObjectRef] | None = None,
        unclear: int = 0,
    ) -> bool:
        """Queue a task for the learner or for review; False if dropped, which ``stats`` counts by cause.

        ``originals``: the question's pictures by media id, for a question of the canary, None if it cannot be
        asked again; ``unclear``: the user's verdicts below the gate since its last task. The pictures of
        ``views`` are copied, because an object dies with its owner, here a gateway's replica.
        """
        with tracing.span("submit", task.trace):
            await self._open()
            step = self.step if self.learning else None
            return await self.intake.submit(task, views, verdict, question, step, originals, unclear)

    async def feedback(self, experience_id: str, feedback: Feedback, by: str = "client") -> None:
        await self.intake.disown(experience_id, feedback)
        self.rehearsal.forget([experience_id])
        details = {
            "experience": experience_id,
            "correct": feedback.correct,
            "answered": feedback.answer is not None,
        }
        await self.monitor.note("feedback", by, "feedback", "success", details)

    async def forget(self, experience_ids: list[str]) -> int:
        self.rehearsal.forget(experience_ids)
        count = await self.intake.forget(experience_ids)
        if self.unlearning is not None:
            count += await asyncio.to_thread(self.unlearning.forget, experience_ids)
            async with self.changed:
                self.changed.notify_all()
        return count

    async def report_metrics(self, metrics: dict[str, float], source: str = "") -> None:
        self.monitor.report(metrics, source)

    # -- from the learner

    @ray.method(max_task_retries=-1)
    async def begin(self, step: int, state: dict[str, Any], version: int) -> int:
        """The learner (re)starts at ``step``; an unfinished batch is handed out again.

        ``state``: the ``StepResult.state`` of its last step. Returns the incarnation, which later calls must
        pass.
        """
        await self._open()
        if "beta" in state and not self.beta.measured:
            self.beta.restore(state["beta"])
        await self.promotion.begin(state.get("base"))
        async with self.changed:
            self.step, self.learning, self.incarnation = step, True, random.getrandbits(48)
            self.failure = ""
            self.ranks_served.clear()
            if self.unlearning is not None:
                await asyncio.to_thread(self.unlearning.begin, step)
                if self.current is not None and self.current.publish is not None:
                    self.current, self.tasks = None, []  # of a repetition, which begins anew
            if self.current is not None:
                self.current.step, self.current.restore = step, self.promotion.restore
            self.changed.notify_all()
        await self.monitor.note("start", "learner", "begin", "success", {"step": step, "version": version})
        return self.incarnation

    @ray.method(max_task_retries=-1)
    async def next_batch(
        self, rank: int, world: int, step: int, incarnation: int | None = None
    ) -> RolloutBatch | None:
        """Rank ``rank``'s share of update ``step``, within the rate limit; None when drained or stopped.

        Waits for ``evolution.batch`` tasks, while draining for one a rank. Raises InfraFailure ``restarted``
        for another ``incarnation``.
        """
        await self._open()
        if self._outdated(incarnation):  # the weights of a learner of an earlier incarnation are unknown
            raise InfraFailure("the Evolution actor was restarted", code="restarted", fix="call begin again")
        async with self.changed:
            while not (self.intake.stopped or (step == self.step and await self._ready(world))):
                # Until a change, until the rate limit allows an update, or until deletions are to be unlearnt
                waits = [self.rate.wait_s(time.monotonic()), self.unlearning and self.unlearning.wait_s()]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), min((w for w in waits if w), default=None))
            # Once one rank has its share all must get theirs, or the optimizer step would never end.
            if self.current is None or (self.intake.stopped and not self.ranks_served):
                return None
            self.ranks_served.add(rank)
            batch = self.current
        return batch.share(rank, world)

    async def _ready(self, world: int) -> bool:
        """Form the batch of this step if possible; True if there is one, or if there will be none."""
        now, draining = time.monotonic(), self.intake.draining
        may_form = self.current is None and not self.intake.paused and self.rate.wait_s(now) == 0
        if may_form and self.unlearning is not None:
            if not draining and (batch := await self.unlearning.next_batch(self.step)) is not None:
                self.current, self.tasks, self.rehearsed = batch, [], []
                return True
            may_form = not self.unlearning.is_unfinished
            if draining and not may_form:
                self.counts["left_over"] += len(self.queue.remove(lambda item: True))
                return True
        if may_form and (chosen := self.queue.ready(world if draining else self.settings.batch)):
            rehearsed = self.rehearsal.take(self.promotion.withdrawn, self.intake.forgotten)
            self.current, self.tasks = self.queue.batch(
                chosen, self.promotion.served, self.beta.beta, rehearsed
            )
            self.rehearsed = rehearsed
            self.rehearsal.prepare(self.queue.shares.user_cap(now))
            if self.unlearning is not None and self.unlearning.must_reset(self.step):
                self.promotion.restore = self.promotion.served
            self.current.step, self.current.restore = self.step, self.promotion.restore
            self.formed_at = time.time()
            self.rate.allow(now)
        elif self.current is None and draining and (may_form or len(self.queue) < world):
            self.counts["left_over"] += len(self.queue.remove(lambda item: True))
            return True
        return self.current is not None

    async def learner_failed(self, cause: str) -> None:
        await self._open()
        self.learning, self.failure = False, cause
        await self.monitor.note("stop", "learner", "fail", "failure", {"cause": cause})
        await self.monitor.alert({"learner_failed": 1.0})

    @ray.method(max_task_retries=-1)
    async def step_done(
        self,
        step: int,
        version: int | None,
        incarnation: int | None = None,
        metrics: dict[str, float] | None = None,
    ) -> StepResult:
        """The learner applied or skipped update ``step`` and published ``version``, if any.

        Returns when the candidate is promoted or refused. Ignored for another ``incarnation``.
        """
        await self._open()
        if self._outdated(incarnation):
            return StepResult()
        metrics, incarnation = metrics or {}, self.incarnation
        skipped = bool(metrics.get("evolve/skipped"))
        repeats = self.current is not None and self.current.publish is not None
        if "evolve/kl" in metrics and not repeats:
            self.beta.update(metrics["evolve/kl"])
            await self.monitor.alert({"update_kl": metrics["evolve/kl"]})
        if self.current is not None:
            self.promotion.learner_reset(self.current.restore)
        boundary = None
        if self.unlearning is not None and self.current is not None:
            new, rehearsed = self.tasks, self.rehearsed
            boundary = await self.unlearning.record(self.current, new, rehearsed, self.intake.forgotten)
        if self.unlearning is not None and repeats:
            promoted = await self.unlearning.advance(version)
        else:
            await self._learnt(step, metrics, skipped)
            promoted = version is not None and await self.candidate(version)
        async with self.changed:
            self.counts["skipped" if skipped else "updates"] += 1
            self.updates_at.append(time.monotonic())
            if incarnation == self.incarnation:  # else another learner has begun meanwhile
                self.step, self.current, self.tasks = step + 1, None, []
                self.ranks_served.clear()
                self.changed.notify_all()
            elif promoted and self.promotion.served == version:
                self.promotion.restore = version  # the new learner started from the version before
        base = self.promotion.base if self.promotion.restore is None else None
        return StepResult(boundary=boundary, state={"base": base, "beta": self.beta.state()})

    async def _learnt(self, step: int, metrics: dict[str, float], skipped: bool) -> None:
        """Note an update of the current tasks wherever it counts."""
        tasks, sources = [item.task for item in self.tasks], [item.source for item in self.tasks]
        await self.monitor.note_update(step, tasks, sources, metrics, skipped)
        traces = [task.trace for task in tasks]
        tracing.record("update", traces, self.formed_at, step=step, skipped=skipped)
        self.traces += [] if skipped else traces
        await asyncio.to_thread(self.review_queue.done, [task.id for task in tasks])
        if not skipped:
            self.queue.shares.learnt(sources)
            await self.queue.save_shares()
            if self.memory is not None:
                self.memory.learnt([task.experience_id for task in tasks if task.experience_id])
        await self.scoring.advance(step)

    def _outdated(self, incarnation: int | None) -> bool:
        return not self.learning or (incarnation is not None and incarnation != self.incarnation)

    async def candidate(self, version: int) -> bool:
        if self.intake.stopped:
            return False
        if self.unlearning is not None:
            await asyncio.to_thread(self.unlearning.publish, version)
        shares = self.queue.shares.published()
        await self.queue.save_shares()
        offered_at = time.time()
        promoted = await self.promotion.offer(version, asdict(shares))
        tracing.record("promotion", list(self.traces), offered_at, version=version, promoted=promoted)
        self.traces.clear()
        return promoted

    # -- from the job

    async def drain(self) -> None:
        async with self.changed:
            self.intake.draining = True
            self.changed.notify_all()

    async def stop(self) -> None:
        async with self.changed:
            self.intake.stopped = True
            self.changed.notify_all()
        for task in self.background:
            task.cancel()
        await self.monitor.note("stop", "evolution", "stop", "success", {"version": self.promotion.served})

    # -- from operators and reviewers

    async def pause(self, by: str) -> None:
        """Accept no task and make no update until ``resume``, also after a restart."""
        await self._pause(by, True)

    async def resume(self, by: str) -> None:
        await self._pause(by, False)

    async def _pause(self, by: str, paused: bool) -> None:
        async with self.changed:
            self.intake.paused = paused
            if paused:
                self.pause_file.parent.mkdir(parents=True, exist_ok=True)
                self.pause_file.touch()
                self.counts["paused"] += len(self.queue.remove(lambda item: not item.approved))
            else:
                self.pause_file.unlink(missing_ok=True)
            self.changed.notify_all()
        await self.monitor.note("pause", by, "pause" if paused else "resume", "success", {})

    async def promote(self, version: int, by: str, force: bool = False) -> dict[str, Any]:
        """Serve ``version`` unless the canary refuses it; ``force`` skips the canary until its next check."""
        await self._open()
        result = await self.promotion.promote(version, by, force)
        if result["promoted"]:
            await self._drop_withdrawn()
        return result

    async def roll_back(self, version: int | None, by: str) -> dict[str, Any]:
        """Serve an earlier promoted version (None: the previous one) and withdraw later ones and their tasks."""
        await self._open()
        served = await self.promotion.roll_back(version, by, "ordered")
        await self._rolled_back()
        return {"version": served}

    async def check_served(self, by: str = "watch") -> bool:
        await self._open()
        if fell := await self.promotion.check_served(by):
            await self._rolled_back()
        return fell

    async def _rolled_back(self) -> None:
        await self._drop_withdrawn()
        await self.monitor.alert({"rollback": 1.0})

    async def _drop_withdrawn(self) -> None:
        withdrawn = self.promotion.withdrawn
        async with self.changed:
            removed = self.queue.remove(lambda item: bool(item.task.policy_versions & withdrawn))
            self.counts["withdrawn"] += len(removed)
        await asyncio.to_thread(self.review_queue.done, [task.id for task in removed])
        if self.memory is not None:
            self.memory.withdraw(sorted(withdrawn))

    async def reviews(self, state: State | None = "waiting", limit: int = 100) -> list[dict[str, Any]]:
        return [_shown(review) for review in await asyncio.to_thread(self.review_queue.reviews, state, limit)]

    async def review(self, id: str) -> dict[str, Any] | None:
        review = await asyncio.to_thread(self.review_queue.get, id)
        if review is None:
            return None
        return {**_shown(review), "pictures": await asyncio.to_thread(self.review_queue.pictures, id)}

    async def decide(
        self,
        id: str,
        approve: bool,
        by: str,
        comment: str = "",
        answer: str | None = None,
        reviewer: str = "",
    ) -> dict[str, Any]:
        """Approve an update, with ``answer`` as its corrected label, or reject it. Idempotent.

        ``by`` sent the order for ``reviewer``. ``queued`` is False if nothing will be learnt. Raises BadInput
        for an unknown id or a contrary decision, InfraFailure ``ending`` while draining.
        """
        await self._open()
        if approve and (self.intake.draining or self.intake.stopped):  # it would never be learnt from
            raise InfraFailure("the service is ending", code="ending", fix="approve it when it runs again")
        state: Literal["approved", "rejected"] = "approved" if approve else "rejected"
        async with self.deciding:
            review = await asyncio.to_thread(self.review_queue.get, id)
            task = await asyncio.to_thread(
                self.review_queue.decide, id, state, reviewer or by, comment, answer
            )
        queued = task is not None and await self.intake.approve(id)
        if task is not None and answer and self.memory is not None:
            self.memory.correct(task.experience_id, redact(answer))
        if review is not None and review.state == "waiting":  # not a repetition
            self.counts[state] += 1
            details = {"task": id, "corrected": answer is not None, "queued": queued, "reviewer": reviewer}
            await self.monitor.note("review", by, state, "success", details)
        return {"state": state, "queued": queued}

    async def audit(
        self, event: str, actor: str, action: str, result: str = "success", details: dict | None = None
    ) -> None:
        await self.monitor.note(event, actor, action, result, details or {})

    # -- status

    async def stats(self) -> dict[str, int]:
        await self._open()
        return {
            "version": self.promotion.served,
            "learning": int(self.learning),
            "updates": self.counts["updates"],
            "skipped": self.counts["skipped"],
            "queue": len(self.queue),
            "dropped": self.queue.dropped,
            "rollbacks": self.promotion.rollbacks,
            **{name: self.counts[name] for name in TASK_COUNTS},
        }

    async def status(self) -> dict[str, Any]:
        counts, promotion = await self.stats(), self.promotion
        return {
            "enabled": self.settings.enabled,
            "paused": self.intake.paused,
            "learning": self.learning,
            "learner_failure": self.failure,
            "served": promotion.served,
            "candidate": promotion.candidate,
            "restoring": promotion.restore,
            "updates": counts["updates"],
            "queue": counts["queue"],
            "beta": self.beta.beta,
            "mean_kl": self.beta.mean_kl,
            "shares": self.queue.shares.stats(time.monotonic()),
            "unlearning": self.unlearning.stats() if self.unlearning is not None else {},
            "review": await asyncio.to_thread(self.review_queue.stats),
            "generators": promotion.router.stats(),
            "health": self._health(),
            "counts": counts,
        }

    async def versions(self) -> list[PolicyVersion]:
        return await self.promotion.store.list.remote()

    async def canary_curve(self) -> list[dict[str, Any]]:
        return self.promotion.curve

    async def recent_audit(self, n: int = 50) -> list[dict[str, Any]]:
        return [asdict(event) for event in self.monitor.log.recent(n)]

    async def alerts(self, n: int = 50) -> list[dict[str, Any]]:
        return [{**asdict(alert), "message": alert.message} for alert in self.monitor.alerter.recent(n)]

    # -- periodically

    def _health(self) -> dict[str, float]:
        """Metrics for the alert thresholds; ``update_rate`` only while updates are due."""
        result = {
            "queue_size": float(len(self.queue)),
            "queue_fill": len(self.queue) / self.settings.queue,
            "unusable_tasks": float(self.intake.unusable),
            "unclear_tasks": float(self.intake.unclear),
            "updates": float(self.counts["updates"]),
            "version": float(self.promotion.served),
        }
        if self.learning and not self.intake.paused and self.queue.ready(self.settings.batch):
            result["update_rate"] = float(sum(at > time.monotonic() - 60.0 for at in self.updates_at))
        if self.beta.mean_kl is not None:
            result["mean_kl"] = self.beta.mean_kl
        return result

    async def _expire(self) -> None:
        await self.intake.expire()
        if self.unlearning is not None:
            await asyncio.to_thread(self.unlearning.expire)

    async def _approve_due(self) -> None:
        after = self.settings.review.approve_after_s
        if after is not None and not (self.intake.paused or self.intake.draining):
            for id in await asyncio.to_thread(self.review_queue.due, time.time(), after):
                with log_failures("approving a due review failed"):
                    await self.decide(id, True, "timeout")


def _shown(review: Review) -> dict[str, Any]:
    return {
        **review.model_dump(mode="json", exclude={"task"}),
        "experience_id": review.task.experience_id,
        "pseudo_label": review.task.pseudo_label,
        "confidence": review.task.confidence,
        "trajectory": without_tokens(representative(review.task)).model_dump(mode="json"),
    }
