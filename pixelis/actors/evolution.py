"""The Evolution actor: collects update tasks from traffic, hands batches to the learner, and judges what it learns.

It offers the learner what the Coordinator offers (``begin``, ``next_batch``, ``step_done``, ``stop``), so that one training loop
serves both sources. Records and references only; pixels and tensors pass it by.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from pixelis.actors.canary import Canary
from pixelis.actors.cluster import named
from pixelis.actors.evolution_monitor import EvolutionMonitor, log_failures, repeat
from pixelis.actors.generator_router import GeneratorRouter, RouterTimeouts
from pixelis.actors.memory import Memory
from pixelis.actors.promotion import Promotion
from pixelis.actors.review import Reviewing
from pixelis.actors.rollouts import RolloutBatch, StepResult
from pixelis.actors.update_queue import Tasks, Waiting, prompt_key, update_metrics
from pixelis.config import Config
from pixelis.errors import BadConfig, InfraFailure
from pixelis.evolution.collapse import Collapse
from pixelis.evolution.gate import Rate, drawn_for_review, learning_rate
from pixelis.evolution.guard import AdaptiveKLController
from pixelis.evolution.review_queue import ReviewQueue, State
from pixelis.evolution.vote import agrees
from pixelis.records import Feedback, PolicyVersion, Question, UpdateTask, Verdict

ENDS = ("handed", "refused", "paused", "collapsed", "withdrawn", "disowned", "private", "lost", "unusable", "left_over")
COUNTED = ("received", *ENDS)
"""What becomes of tasks, beside those that are dropped from a full queue, in review or learnt from."""


@ray.remote(num_cpus=0, max_restarts=-1)
class Evolution:
    """Holds at most ``evolution.queue`` tasks; gives the learner ``evolution.batch`` of them per step.

    ``generators`` are those that serve; ``store`` is the PolicyStore; ``canary`` a Generator actor that does not serve, needed
    with ``evolution.canary.enabled``: handles or, so that a restart does not depend on who placed them, names in this namespace,
    as in ``memory`` those of the shards. Reviews, audit and alerts are in ``run.dir``: an actor that starts again goes on with
    them, what was approved and the promoted version; other tasks and counts are gone, the learner begins at its checkpoint.
    """

    def __init__(
        self,
        config: Config,
        generators: Sequence[ActorHandle | str],
        store: ActorHandle | str,
        canary: ActorHandle | str | None = None,
        memory: Sequence[str] = (),
    ):
        e = config.evolution
        self.config, self.settings = config, e
        self.overseer = EvolutionMonitor(config, self._health)
        self.memory = Memory(memory, ray.get_runtime_context().namespace, config.memory) if memory else None
        self.reviewing = Reviewing(ReviewQueue(Path(config.run.dir) / "review.db", config.rewards), e.review.limit)
        if e.canary.enabled and canary is None:
            raise BadConfig("no generator for the canary", fix="place one, or set evolution.canary.enabled=false")
        judge = Canary(config, named(canary)) if e.canary.enabled and canary is not None else None
        router = GeneratorRouter([named(g) for g in generators], RouterTimeouts.serving(config))
        self.versions_of = Promotion(config, named(store), router, judge, self.overseer.note)
        self.counts: Counter[str] = Counter()
        self.queue = Tasks(e.queue, self.counts)
        self.rate, self.beta, self.collapse = Rate(e.per_minute), AdaptiveKLController(e.guard), Collapse(e.vote)
        self.updates_at: deque[float] = deque()
        self.forgotten: deque[str] = deque(maxlen=1000)
        self.step = self.life = 0
        self.failure = ""
        self.current: RolloutBatch | None = None
        self.tasks: list[UpdateTask] = []
        self.given: set[int] = set()
        self.hold = Path(config.run.dir) / "versions" / "paused"
        self.paused = self.hold.exists()
        self.learning = self.draining = self.stopped = False
        self.changed = asyncio.Condition()
        self.opening: asyncio.Task | None = None
        self.background: list[asyncio.Task] = []

    async def _open(self) -> None:
        """Once in the life of this process, by whoever calls first; again after a failure."""
        if self.opening is None or (self.opening.done() and self.opening.exception() is not None):
            self.opening = asyncio.create_task(self._start())
        await asyncio.shield(self.opening)

    async def _start(self) -> None:
        await self.versions_of.open()
        await self._forget_withdrawn()
        for task, views in await self.reviewing.approved():
            if not await self._push(task, views, approved=True):
                await self.reviewing.done([task])
        await self.overseer.note("start", "evolution", "start", "success", {"version": self.versions_of.served})
        every_s = self.settings.alerts.every_s
        due_s = min(self.settings.review.approve_after_s or every_s, every_s)
        loops = [self.overseer.run(), repeat(self.settings.canary.watch_s, self.look, "the watch failed")]
        loops.append(repeat(due_s, self._approve_due, "the reviews could not be looked at"))
        self.background = [asyncio.create_task(loop) for loop in loops]

    async def health(self) -> str:
        """Answers when alive and the generators hold what is promoted."""
        await self._open()
        return "ok"

    # -- from the gateways ------------------------------------------------------------------------------------------

    async def submit(
        self, task: UpdateTask, views: list[ray.ObjectRef], verdict: Verdict | None = None, question: Question | None = None
    ) -> bool:
        """Queue a task, or keep it for a person; ``views`` is ``[reference to {trajectory id: views}]``.

        ``verdict`` and ``question`` (without pictures inside) are needed for a review. False when nothing will come of it:
        paused, draining or stopped, the votes have collapsed, the policy that sampled it was withdrawn, or its views are lost.
        The views are stored again: an object dies with its owner, here a gateway's replica.
        """
        await self._open()
        if cause := self._refusal(task):
            self.counts[cause] += 1
            return False
        try:
            seen = await views[0]
        except RayError:
            self.counts["lost"] += 1
            return False
        if verdict is not None and self.collapse.seen(verdict, prompt_key(task, question, seen)):
            self.counts["collapsed"] += 1
            return False
        self.counts["received"] += 1
        drawn = verdict is not None and question is not None and drawn_for_review(task.id, self.settings)
        if verdict is not None and question is not None and drawn and not await self.reviewing.full():
            result = await self.reviewing.keep(task, verdict, question, seen)
            self.counts["reviewed" if result else "private"] += 1
            if task.experience_id in self.forgotten:  # while it was being kept
                await self.reviewing.forget([task.experience_id])
            return result
        return await self._push(task, seen)

    def _refusal(self, task: UpdateTask, approved: bool = False) -> str:
        """Why nothing will come of a task, empty when something will. What a person approved waits for the end of a pause."""
        if self.draining or self.stopped or task.experience_id in self.forgotten:
            return "refused"
        if self.paused and not approved:
            return "paused"
        return "withdrawn" if task.trajectories[0].policy_version in self.versions_of.withdrawn else ""

    async def _push(self, task: UpdateTask, seen: dict[str, Any], approved: bool = False) -> bool:
        views = ray.put(seen)
        async with self.changed:
            if cause := self._refusal(task, approved):  # it may have become one while the views travelled
                self.counts[cause] += 1
                return False
            self.queue.push(Waiting(task, views, approved))
            self.changed.notify_all()
            return True

    async def feedback(self, experience_id: str, feedback: Feedback) -> None:
        """Somebody's word on an answer: it teaches nothing, but what it calls wrong is not learnt from if it still waits."""
        wrong = feedback.correct is False
        async with self.changed:
            mine = [w.task for w in self.queue.items if w.task.experience_id == experience_id]
            if feedback.correct is None and feedback.answer is not None:
                wrong = any(not agrees(feedback.answer, task.pseudo_label) for task in mine)
            if wrong:
                self.counts["disowned"] += self.queue.discard(lambda task: task.experience_id == experience_id)
        if wrong:
            await self.reviewing.done(mine)
        about = {"experience": experience_id, "correct": feedback.correct, "answered": feedback.answer is not None}
        await self.overseer.note("feedback", "client", "feedback", "success", about)

    async def forget(self, experience_ids: list[str]) -> int:
        """Drop what waits of these experiences, in the queue or for a person, or is on its way; returns how many waited."""
        gone = set(experience_ids)
        self.forgotten.extend(gone - {""})
        async with self.changed:
            dropped = self.queue.discard(lambda task: task.experience_id in gone)
        return dropped + await self.reviewing.forget(experience_ids)

    async def told(self, metrics: dict[str, float], source: str = "") -> None:
        """Health metrics that only a gateway knows, such as p99_latency and faiss_failure_rate; ``source`` names the gateway."""
        self.overseer.told(metrics, source)

    # -- from the learner -------------------------------------------------------------------------------------------

    @ray.method(max_task_retries=-1)
    async def begin(self, step: int, state: dict[str, Any], version: int) -> int:
        """The learner (re)starts at ``step`` where ``version`` is promoted; an unfinished batch is given again.

        ``state`` is that of its last step (``StepResult.state``). Returns the life that later calls belong to.
        """
        await self._open()
        if "beta" in state and not self.beta.measured:
            self.beta.restore(state["beta"])
        await self.versions_of.begin(state.get("base"))
        async with self.changed:
            self.step, self.learning, self.life = step, True, random.getrandbits(48)
            self.failure = ""
            self.given.clear()
            if self.current is not None:
                self.current.step, self.current.restore = step, self.versions_of.restore
            self.changed.notify_all()
        await self.overseer.note("start", "learner", "begin", "success", {"step": step, "version": version})
        return self.life

    @ray.method(max_task_retries=-1)
    async def next_batch(self, rank: int, world: int, step: int, life: int | None = None) -> RolloutBatch | None:
        """Rank ``rank``'s share of update ``step``: whole groups, round robin; None when drained or stopped.

        Waits for ``evolution.batch`` tasks and for its turn; while draining a smaller last batch goes out, if every rank gets a
        group. Raises InfraFailure ``restarted`` to the learner of another ``life``.
        """
        await self._check(life)
        async with self.changed:
            while not (self.stopped or (step == self.step and self._ready(world))):
                with contextlib.suppress(TimeoutError):  # until something changes, or the next update is allowed
                    await asyncio.wait_for(self.changed.wait(), self.rate.wait_s(time.monotonic()) or None)
            # Once one rank has its share all must get theirs, or the optimizer step would wait for ever.
            if self.current is None or (self.stopped and not self.given):
                return None
            self.given.add(rank)
            whole = self.current
        return whole.share(rank, world)

    async def _check(self, life: int | None) -> None:
        """Raises InfraFailure for a learner that began with an earlier life of this actor: what its weights are is not known."""
        await self._open()
        if not self.learning or (life is not None and life != self.life):
            raise InfraFailure("the Evolution actor has started again", code="restarted", fix="begin again")

    def _ready(self, world: int) -> bool:
        """Form the batch of this step once: True when there is one, or when there will never be."""
        size, now = self.settings.batch, time.monotonic()
        while (
            self.current is None
            and not self.paused
            and (len(self.queue) >= size or (self.draining and len(self.queue) >= world))
            and self.rate.wait_s(now) == 0
        ):
            self.current = self._batch(world)
            if self.current is not None:
                self.rate.allow(now)
        if self.current is None and self.draining and len(self.queue) < world:
            self.counts["left_over"] += len(self.queue.take(len(self.queue)))
            return True
        return self.current is not None

    def _batch(self, world: int) -> RolloutBatch | None:
        made = self.queue.batch(self.settings.batch, world, self.config.rft.advantage, self.settings.objective)
        if made is None:
            return None
        batch, self.tasks = made
        metrics = update_metrics(batch.groups, self.tasks, self.versions_of.served)
        rate, beta = learning_rate(metrics["evolve/confidence"], self.settings), self.beta.beta
        batch.step, batch.restore = self.step, self.versions_of.restore
        batch.metrics = metrics | {"evolve/lr": rate, "evolve/beta": beta}
        batch.options = {"lr": rate, "kl_weight": beta, "kl_limit": 2 * self.settings.guard.target}
        return batch

    async def learner_failed(self, cause: str) -> None:
        """The learner ended for this reason: the service answers on, but nothing is learnt until one begins again."""
        await self._open()
        self.learning, self.failure = False, cause
        await self.overseer.note("stop", "learner", "fail", "failure", {"cause": cause})
        await self.overseer.alert({"learner_failed": 1.0})

    @ray.method(max_task_retries=-1)
    async def step_done(
        self, step: int, version: int | None, life: int | None = None, metrics: dict[str, float] | None = None
    ) -> StepResult:
        """The learner applied (or skipped) update ``step``; ``version`` is the candidate that it published, if it did.

        Returns when that candidate serves or is refused. Nothing happens for a learner of another ``life``: it hears of that with
        its next batch.
        """
        await self._open()
        if not self.learning or (life is not None and life != self.life):
            return StepResult()
        metrics, life = metrics or {}, self.life
        skipped = bool(metrics.get("evolve/skipped"))
        if "evolve/kl" in metrics:
            self.beta.update(metrics["evolve/kl"])
        if self.current is not None:
            self.versions_of.took_up(self.current.restore)
        names = ("evolve/kl", "evolve/lr", "evolve/beta", "evolve/confidence", "policy/loss", "policy/grad_norm")
        known = {name.partition("/")[2]: metrics[name] for name in names if name in metrics}
        about: dict[str, Any] = {name: value if math.isfinite(value) else None for name, value in known.items()}
        about |= {"step": step, "experiences": [task.experience_id or task.id for task in self.tasks]}
        await self.overseer.note("update", "learner", "step", "skipped" if skipped else "success", about)
        await self.reviewing.done(self.tasks)
        promoted = version is not None and await self.candidate(version)
        async with self.changed:
            self.counts["skipped" if skipped else "updates"] += 1
            self.updates_at.append(time.monotonic())
            if life == self.life:  # else that learner is gone, and its successor is elsewhere
                self.step, self.current, self.tasks = step + 1, None, []
                self.given.clear()
                self.changed.notify_all()
            elif promoted and self.versions_of.served == version:  # which went on from what served before
                self.versions_of.restore = version
        return StepResult(state=self._state())

    async def candidate(self, version: int) -> bool:
        """A published candidate: judged and promoted or refused; True when it serves now. Left as it is once stopped."""
        return not self.stopped and await self.versions_of.offer(version)

    def _state(self) -> dict[str, Any]:
        """For a checkpoint: where its weights come from (None: from what was refused), and the KL guard."""
        versions = self.versions_of
        return {"base": versions.base if versions.restore is None else None, "beta": self.beta.state()}

    # -- from the job -----------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Take no more tasks; the learner gets what is queued, then None."""
        async with self.changed:
            self.draining = True
            self.changed.notify_all()

    async def stop(self) -> None:
        """End at once; queued tasks are given up and the learner gets None."""
        async with self.changed:
            self.stopped = True
            self.changed.notify_all()
        for task in self.background:
            task.cancel()
        await self.overseer.note("stop", "evolution", "stop", "success", {"version": self.versions_of.served})

    # -- from people ------------------------------------------------------------------------------------------------

    async def pause(self, by: str) -> None:
        """No task is taken and no update made until ``resume``, restarts or not."""
        await self._pause(by, True)

    async def resume(self, by: str) -> None:
        """Learn again, from tasks that come from now on; what votes were like before says nothing any more."""
        self.collapse.reset()
        await self._pause(by, False)

    async def _pause(self, by: str, paused: bool) -> None:
        async with self.changed:
            self.paused = paused
            if paused:
                self.hold.parent.mkdir(parents=True, exist_ok=True)
                self.hold.touch()
                self.counts["paused"] += self.queue.pause()
            else:
                self.hold.unlink(missing_ok=True)
            self.changed.notify_all()
        await self.overseer.note("pause", by, "pause" if paused else "resume", "success", {})

    async def promote(self, version: int, by: str, force: bool = False) -> dict[str, Any]:
        """Serve ``version`` if the canary does not refuse it; with ``force`` whatever it says, until the watch looks."""
        await self._open()
        result = await self.versions_of.promote(version, by, force)
        if result["promoted"]:
            await self._forget_withdrawn()
        return result

    async def roll_back(self, version: int | None, by: str) -> dict[str, Any]:
        """Serve an earlier promoted version again (None: the one before); later ones are withdrawn with what they sampled."""
        await self._open()
        served = await self.versions_of.roll_back(version, by, "ordered")
        await self._rolled_back()
        return {"version": served}

    async def look(self, by: str = "watch") -> bool:
        """Judge the served version now; True when it fell and was rolled back."""
        await self._open()
        fell = await self.versions_of.look(by)
        if fell:
            await self._rolled_back()
        return fell

    async def _rolled_back(self) -> None:
        self.collapse.reset()
        await self._forget_withdrawn()
        await self.overseer.alert({"rollback": 1.0})

    async def _forget_withdrawn(self) -> None:
        gone = self.versions_of.withdrawn

        async with self.changed:
            theirs = [w.task for w in self.queue.items if w.task.trajectories[0].policy_version in gone]
            self.counts["withdrawn"] += self.queue.discard(lambda task: task.trajectories[0].policy_version in gone)
        await self.reviewing.done(theirs)
        if self.memory is not None:
            self.memory.withdraw(sorted(gone))

    async def reviews(self, state: State | None = "waiting", limit: int = 100) -> list[dict[str, Any]]:
        """Updates in this state of review, without tokens and pictures."""
        return await self.reviewing.show(state, limit)

    async def review(self, id: str) -> dict[str, Any] | None:
        """One of them, with ``pictures``: PNG bytes by image id of its trajectory; None for an unknown id."""
        return await self.reviewing.show_one(id)

    async def decide(self, id: str, approve: bool, by: str, comment: str = "", answer: str | None = None) -> dict[str, Any]:
        """Approve (learn from it, with ``answer`` as its label if that is given) or reject an update; once.

        ``queued`` is False when nothing will be learnt: rejected, approved before, or the policy that sampled it was withdrawn.
        Raises BadInput for an unknown one or one that was decided otherwise, InfraFailure for an approval after the last update.
        """
        await self._open()
        if approve and (self.draining or self.stopped):  # a decision stands, and this one could not be acted upon
            raise InfraFailure("no update is made any more", code="ending", fix="approve it when the service runs again")
        decided = await self.reviewing.decide(id, approve, by, comment, answer)
        queued = decided is not None and await self._push(*decided, approved=True)
        state = "approved" if approve else "rejected"
        self.counts[state] += 1
        await self.overseer.note("review", by, state, "success", {"task": id, "corrected": answer is not None, "queued": queued})
        return {"state": state, "queued": queued}

    async def audit(self, event: str, actor: str, action: str, result: str = "success", details: dict | None = None) -> None:
        """Write an event of somebody else's, such as a deletion, into the audit log."""
        await self.overseer.note(event, actor, action, result, details or {})

    # -- what is known ----------------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, int]:
        """Version served, whether a learner is there, updates applied, and tasks by what became of them."""
        await self._open()
        return {
            "version": self.versions_of.served,
            "learning": int(self.learning),
            "updates": self.counts["updates"],
            "skipped": self.counts["skipped"],
            "queue": len(self.queue),
            "dropped": self.queue.dropped,
            "rollbacks": self.versions_of.rollbacks,
            **{name: self.counts[name] for name in COUNTED},
        }

    async def status(self) -> dict[str, Any]:
        """All there is to say in numbers; lists have methods of their own."""
        counts, versions = await self.stats(), self.versions_of
        return {
            "enabled": self.settings.enabled,
            "paused": self.paused,
            "learning": self.learning,
            "learner_failure": self.failure,
            "served": versions.served,
            "candidate": versions.candidate,
            "restoring": versions.restore,
            "updates": counts["updates"],
            "queue": counts["queue"],
            "beta": self.beta.beta,
            "mean_kl": self.beta.mean_kl,
            "collapse": self.collapse.stats(),
            "review": await self.reviewing.stats(),
            "generators": versions.router.stats(),
            "health": self._health(),
            "counts": counts,
        }

    async def versions(self) -> list[PolicyVersion]:
        """All policy versions, oldest first."""
        return await self.versions_of.store.list.remote()

    async def canary_curve(self) -> list[dict[str, Any]]:
        """Judgements, oldest first: version, time, accuracy, reference_accuracy, mean, se, decision, reason."""
        return self.versions_of.curve

    async def recent_audit(self, n: int = 50) -> list[dict[str, Any]]:
        """The newest audit events."""
        return self.overseer.recent_audit(n)

    async def alerts(self, n: int = 50) -> list[dict[str, Any]]:
        """The newest alerts, newest first."""
        return [{**asdict(alert), "message": alert.message} for alert in self.overseer.alerter.recent(n)]

    # -- by itself --------------------------------------------------------------------------------------------------

    def _health(self) -> dict[str, float]:
        """What thresholds are compared with. No update is no alarm where none is wanted."""
        minute = time.monotonic() - 60.0
        while self.updates_at and self.updates_at[0] < minute:
            self.updates_at.popleft()
        result = {
            "queue_size": float(len(self.queue)),
            "queue_fill": len(self.queue) / self.settings.queue,
            "vote_collapsed": float(self.collapse.collapsed),
        }
        if self.learning and not self.paused and len(self.queue) >= self.settings.batch:
            result["update_rate"] = float(len(self.updates_at))
        if self.beta.mean_kl is not None:
            result["mean_kl"] = self.beta.mean_kl
        return result

    async def _approve_due(self) -> None:
        """Take what waited long enough for a person, where that is wanted."""
        after = self.settings.review.approve_after_s
        if after is not None and not (self.paused or self.draining):
            for id in await self.reviewing.due(time.time(), after):
                with log_failures("a review could not be taken"):
                    await self.decide(id, True, "timeout")
