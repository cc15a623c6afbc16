"""The Coordinator actor: admits questions, buffers scored groups, serves batches, runs evaluations.

Groups accepted or running never exceed ``(max_off_policy_steps + step + 1) * prompts_per_step``, where
``step`` counts the batches whose weights the generators have loaded. 0 is exactly on-policy.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from pixelis.actors.cluster import actor_handle, unwrap_ray_error
from pixelis.actors.evaluations import Evaluations
from pixelis.actors.generator_router import GeneratorRouter, RouterTimeouts
from pixelis.actors.group_views import GroupViews
from pixelis.actors.rollout_buffer import RolloutBuffer
from pixelis.actors.rollouts import Prompts, RolloutBatch, Rollouts, StepResult, abstains
from pixelis.actors.weights import arrange_stream
from pixelis.config import Config
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.stream import question_stream
from pixelis.errors import InfraFailure, PixelisError
from pixelis.policy.replay import informative
from pixelis.records import Group, Question
from pixelis.telemetry import events
from pixelis.telemetry.events import EventLog
from pixelis.telemetry.metrics import count, observe


@ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=1024)
class Coordinator:
    """Handles records and references only, never pixels or tensors.

    Generators named in ``elastic`` join when they have started. ``store``: name of the PolicyStore if
    versions are broadcast. A restarted Coordinator has no state: the learner notices the new ``incarnation``
    and starts it at its current batch, and groups in flight are rolled out again.
    """

    def __init__(
        self,
        config: Config,
        generators: Sequence[ActorHandle | str],
        scorers: Sequence[ActorHandle | str],
        embedder: ActorHandle | str | None = None,
        elastic: Sequence[str] = (),
        store: str | None = None,
    ):
        self.store = ray.get_actor(store) if store is not None else None
        self.elastic, self.joining = list(elastic), list[asyncio.Task]()
        self.config, self.scorers = config, [actor_handle(scorer) for scorer in scorers]
        self.router = GeneratorRouter([actor_handle(g) for g in generators], RouterTimeouts.of(config))
        self.rollouts = Rollouts(
            config, self.router, self.scorers, actor_handle(embedder) if embedder is not None else None
        )
        self.incarnation = 0
        self.step = 0
        self.consumed = Consumed()
        self.buffer = RolloutBuffer(config.rft, 0)
        self.step_of_version: dict[int, int] = {}  # version -> number of steps before it was published
        # Kept until the next batch, because calls may be retried
        self.current: tuple[int, RolloutBatch] | None = None
        self.first_started: float | None = None
        self.last_ready = 0.0
        self.stopped = False
        self.error: PixelisError | None = None
        self.changed = asyncio.Condition()
        self.switching = asyncio.Lock()
        self.learnt = -1  # last step whose weights the learner has published
        self.asleep_since = 0.0
        self.producer: asyncio.Task | None = None
        self.bad_rows: Counter[str] = Counter()
        self.log = EventLog(config.run.dir)
        self.evaluations = Evaluations(config, self.router, self.rollouts, self.log)

    # -- training

    async def begin(
        self, step: int, state: dict[str, Any], version: int, resumes_rewards: bool = True
    ) -> int:
        """(Re)start production at ``step`` with ``version`` loaded; returns the incarnation for later calls.

        ``state`` comes from a checkpoint, or from the last batch if only the Coordinator has restarted: then
        ``resumes_rewards`` is false. Raises InfraFailure ``restarted`` if another call overtakes it.
        """
        # Calls of the learner before, also waiting ones, change nothing
        incarnation = self.incarnation = random.getrandbits(48)
        async with self.changed:
            self.changed.notify_all()
        if self.producer is not None:
            self.producer.cancel()
            await asyncio.wait([self.producer])  # else a group that just finished would enter the new buffer
        self._check(incarnation)
        self.step, self.consumed, self.buffer = step, Consumed.of(state), RolloutBuffer(self.config.rft, step)
        self.bad_rows.clear()
        events.drop_steps(Path(self.config.run.dir) / "consumed.jsonl", step)
        self.step_of_version = {version: step}
        self.current, self.error, self.learnt = None, None, step - 1
        async with self.switching:  # after a sleep that the learner before has begun
            await self.router.wake()
        self._check(incarnation)
        if resumes_rewards:
            rewards = base64.b64decode(state["rewards"]) if state.get("rewards") else None
            await asyncio.gather(*(scorer.load.remote(rewards) for scorer in self.scorers))
        elif step:  # the previous incarnation may have ended before it advanced the scorers
            self.evaluations.metrics |= (await self._advance(step - 1)).metrics
        self._check(incarnation)
        prompts = Prompts(self._questions(), self.config.data.train)
        try:
            await self.router.load(version)
            self._check(incarnation)
        except BaseException:
            prompts.close()
            raise
        if step == 0 and self.config.rft.evaluate_first:
            self.evaluations.start(step, version)
        self.producer = asyncio.create_task(self._produce(prompts))
        self.producer.add_done_callback(lambda _: prompts.close())
        while self.elastic:
            self.joining.append(asyncio.create_task(self._join(self.elastic.pop())))
        return incarnation

    async def has_begun(self) -> bool:
        return self.incarnation != 0

    async def _join(self, name: str) -> None:
        while True:
            try:
                generator = await asyncio.to_thread(actor_handle, name)
                await generator.ready.remote()
                break
            except (InfraFailure, RayError):
                # Not created yet, or lost with its node: Ray starts it elsewhere.
                await asyncio.sleep(self.router.timeouts.retry_pause_s)
        self.router.join(generator)
        self.log.write(events.JOINED, generator=name, generators=len(self.router.members))

    async def _produce(self, prompts: Prompts) -> None:
        """Admit questions whenever the staleness bound allows it; the learner gets the error that ends this."""
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    async with self.changed:
                        await self.changed.wait_for(lambda: self.buffer.room(self.step) > 0)
                    for number, question in await prompts.take(self.buffer.room(self.step)):
                        groups.create_task(self._group(number, question, self.buffer.admit()))
        except Exception as caught:
            error: BaseException = caught
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            async with self.changed:
                self.error = unwrap_ray_error(error) or PixelisError(f"rollouts stopped: {error!r}")
                self.changed.notify_all()

    def _questions(self) -> Iterator[tuple[int, Question]]:
        def skipped(row: BadRow) -> None:  # within data.max_bad_rows
            self.bad_rows[row.code] += 1
            self.log.write("bad_row", **row._asdict())

        start, ahead = self.consumed.cursor, set(self.consumed.ahead)
        # A run that learns from no truth never has one.
        on_labels = None if self.config.labelled else self.rollouts.labels.__setitem__
        questions = question_stream(self.config.data, self.config.run.seed, start, skipped, on_labels)
        return ((number, question) for number, question in enumerate(questions, start) if number not in ahead)

    async def _group(self, number: int, question: Question, step: int) -> None:
        started = time.monotonic()
        result = await self.rollouts.group(question, step)
        async with self.changed:
            self.first_started = min(self.first_started or started, started)
            if isinstance(result, str):
                self.buffer.add_failed(number, result)
            else:
                result.number = number
                r = self.config.rft
                abstained = r.teacher.rewards and abstains(result.group)
                if abstained or (r.teacher.rewards and not informative(result.group, r)):
                    self.buffer.add_unusable(result, abstained)
                else:
                    self.buffer.add(result)
            outcome = result if isinstance(result, str) else result.outcome
            count("rollouts/groups", tags={"outcome": outcome})
            observe("rollouts/group_seconds", time.monotonic() - started)
            self.changed.notify_all()

    async def next_batch(
        self, rank: int, world: int, step: int, incarnation: int | None = None
    ) -> RolloutBatch | None:
        """Share of ``rank`` in batch ``step``: whole groups of about equally many tokens; None at the end.

        Raises the error that stopped production, and InfraFailure ``restarted`` for another ``incarnation``.
        """
        self._check(incarnation)
        if step >= self.config.rft.steps:
            return None
        async with self.changed:
            # A dead learner's call must not assemble a batch: the groups are the next one's.
            await self.changed.wait_for(
                lambda: (
                    self._outdated(incarnation) or self._ready(step) or self.stopped or self.error is not None
                )
            )
            self._check(incarnation)
            # If one rank has received its share, all must: the optimizer step is collective.
            if self.current is None or self.current[0] != step:
                if self.error is not None:
                    raise self.error
                return None
            _, batch = self.current
        if self.config.engine.colocate:  # leave the GPUs to the learner
            if step > self.learnt and self.router.awake.is_set():
                await self.evaluations.wait()
            async with self.switching:
                self._check(incarnation)
                if step > self.learnt and self.router.awake.is_set():
                    await self.router.sleep()
                    self.asleep_since = time.monotonic()
        return batch.share(rank, world)

    def _outdated(self, incarnation: int | None) -> bool:
        return incarnation is not None and incarnation != self.incarnation

    def _check(self, incarnation: int | None) -> None:
        if self._outdated(incarnation):
            raise InfraFailure("the Coordinator has restarted", code="restarted")

    def _ready(self, step: int) -> bool:
        """Assemble batch ``step`` if it is complete; returns whether it is available."""
        if self.current is not None and self.current[0] == step:
            return True
        if self.error is not None or self.stopped:
            return False
        admitted = self.buffer.admitted

        def age(group: Group) -> int:
            return step - self.step_of_version.get(group.policy_version, step)

        selection = self.buffer.take(lambda scored: age(scored.group))
        if self.buffer.admitted != admitted:
            self.changed.notify_all()  # dropped stale groups have made room
        if selection is None:
            return False
        try:
            batch = self.rollouts.assemble(step, selection)
        except PixelisError as error:
            self.error = error
            return False
        now = time.monotonic()
        # Since the previous batch, or since the batch's first question if that was later.
        seconds = now - max(self.last_ready, self.first_started or now)
        self.last_ready, self.first_started = now, None
        groups = [s.group for s in (*selection.chosen, *selection.uninformative, *selection.abstained)]
        ages = [age(group) for group in batch.groups]
        tokens = sum(t.tokens for g in groups for t in g.trajectories)
        batch.metrics |= {
            "rollout/seconds": seconds,
            "rollout/tokens_per_s": tokens / max(seconds, 1e-9),
            "rollout/staleness": float(max(ages)),
            "rollout/staleness_mean": sum(ages) / len(ages),
            "rollout/generators": self.router.stats()["generators/able"],
        }
        for group in (scored.group for scored in selection.stale):
            self.log.write("stale_group", step=step, id=group.question.id, group=group.id, age=age(group))
        self._account(batch)
        self.current = (step, batch)
        return True

    def _account(self, batch: RolloutBatch) -> None:
        """Record the batch: question numbers for checkpoints, ``consumed.jsonl`` and ``rollouts.jsonl``."""
        if self.bad_rows:
            batch.metrics["rollout/bad_rows"] = float(self.bad_rows.total())
        batch.metrics |= self.evaluations.take_metrics()
        self.consumed.add(batch.numbers)
        batch.state = {"questions": self.consumed.state()}
        folder, samples = Path(self.config.run.dir), batch.groups[: self.config.telemetry.rollouts]
        with (folder / "rollouts.jsonl").open("a", encoding="utf-8") as lines:
            lines.writelines(group.model_dump_json() + "\n" for group in samples)
        ids = [group.question.id for group in batch.groups]
        row = {"step": batch.step, "numbers": batch.numbers, "ids": ids}
        with (folder / "consumed.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")

    async def step_done(self, step: int, version: int, incarnation: int | None = None) -> StepResult:
        """Load ``version``, published after batch ``step``; admit questions; start an evaluation if due.

        Returns reward metrics after the generators have loaded it. Ignores calls of another ``incarnation``.
        """
        if self._outdated(incarnation):
            return StepResult()
        incarnation = self.incarnation
        self.step_of_version[version] = step + 1
        metrics = dict[str, float]()
        if self.config.engine.colocate:
            async with self.switching:
                if self._outdated(incarnation):
                    return StepResult()
                self.learnt = max(self.learnt, step)
                metrics["rollout/asleep_s"] = time.monotonic() - self.asleep_since
                await self.router.wake()
        if not self._outdated(incarnation):
            await self.router.load(
                version, functools.partial(arrange_stream, self.store, version) if self.store else None
            )
        if self._outdated(incarnation):  # the scorers have the next learner's state
            return StepResult()
        result = await self._advance(step, step + 1 == self.config.rft.steps)
        if self._outdated(incarnation):
            return StepResult()
        every = self.config.rft.evaluate_every
        if every and (step + 1) % every == 0:
            self.evaluations.start(step + 1, version)
        async with self.changed:
            loaded = self.router.version  # possibly a newer version
            self.step = max(self.step, self.step_of_version.get(version if loaded is None else loaded, 0))
            self.changed.notify_all()
        return StepResult(metrics | result.metrics, result.boundary)

    async def _advance(self, step: int, is_last: bool = False) -> StepResult:
        advances = await asyncio.gather(*(scorer.advance.remote(step, is_last) for scorer in self.scorers))
        return StepResult.merged(advances)

    async def reward_state(self) -> dict[str, Any]:
        if not self.config.rewards.stateful:
            return {}
        return {"rewards": base64.b64encode(await self.scorers[0].state.remote()).decode()}

    async def finish(self) -> dict[str, float]:
        await self.evaluations.wait()
        return self.evaluations.take_metrics()

    async def stop(self, evaluations: bool = True) -> None:
        async with self.changed:
            self.stopped = True
            self.changed.notify_all()
        for task in (self.producer, *(self.evaluations.running if evaluations else ())):
            if task is not None:
                task.cancel()

    async def progress(self) -> dict[str, Any]:
        counts = {"evaluated": dict(self.evaluations.finished), "bad_rows": dict(self.bad_rows)}
        return {"step": self.step, **counts, **self.router.stats()}

    # -- evaluation

    async def evaluate(
        self, source: str, count: int, version: int, operations: bool, **options: Any
    ) -> tuple[list[Group], list[GroupViews]]:
        """Scored groups of the first ``count`` questions (0: all) of ``source``, and their views.

        ``seed`` shuffles, ``samples`` are per question, ``seeds`` replace ``run.seed``, and ``share`` of the
        generators is reserved. Raises an error for an unusable question.
        """
        return await self.evaluations.evaluate(source, count, version, operations, **options)

    async def evaluate_held_out(
        self, step: int, version: int, count: int, levels: Sequence[str]
    ) -> dict[str, float]:
        return (await self.evaluations.held_out(step, version, count, levels=levels))[1]


class Consumed:
    """Numbers of the used questions: all below ``cursor``, and those in ``ahead``."""

    def __init__(self, cursor: int = 0, ahead: set[int] | None = None):
        self.cursor, self.ahead = cursor, ahead or set()

    @classmethod
    def of(cls, state: dict[str, Any]) -> Consumed:
        questions = state.get("questions") or {}
        return cls(questions.get("cursor", 0), set(questions.get("ahead", [])))

    def add(self, numbers: list[int]) -> None:
        """Add the questions of a batch, which need not be contiguous: batches in flight share one stream."""
        self.ahead.update(number for number in numbers if number >= self.cursor)
        while self.cursor in self.ahead:
            self.ahead.remove(self.cursor)
            self.cursor += 1

    def state(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "ahead": sorted(self.ahead)}
