"""The Coordinator actor: admits questions, buffers scored groups, serves batches to the learner, runs evaluations.

Admission bounds staleness: groups accepted or running never exceed ``(max_off_policy_steps + step + 1) * prompts_per_step``,
where ``step`` counts the batches whose weights the generators have loaded. With 0, a batch is rolled out only after the weights
of the previous one are loaded: exactly on-policy.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from pixelis.actors import report
from pixelis.actors.cluster import actor_handle, unwrap_ray_error
from pixelis.actors.generator_router import GeneratorRouter, Reservation, RolloutRequest, RouterTimeouts
from pixelis.actors.group_views import GroupViews
from pixelis.actors.rollout_buffer import RolloutBuffer, ScoredGroup
from pixelis.actors.rollouts import Prompts, RolloutBatch, Rollouts, StepResult, abstains
from pixelis.actors.weights import arrange_stream
from pixelis.config import Config
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.labels import Labels
from pixelis.datasets.questions import read_questions, require_text
from pixelis.datasets.stream import question_stream
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import DataFailure, InfraFailure, PixelisError
from pixelis.evaluation.metrics import evaluation_metrics, summarise
from pixelis.records import Group, Question
from pixelis.telemetry import diagnosis, events
from pixelis.telemetry.events import EventLog
from pixelis.telemetry.metrics import count, observe

__all__ = ["Coordinator", "RolloutBatch", "StepResult"]

EVALUATION_SHARE = 0.25
"""Share of the generators, at least one, that an evaluation reserves during training."""
SEED_STRIDE = 1_000_003
"""Distance of the seeds of an evaluation's runs, so that their samples never share one."""


@ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=1024)
class Coordinator:
    """Handles records and references only, never pixels or tensors.

    Generators, scorers and the embedder are actors or their names. Those named in ``elastic`` join when they have started.
    ``store``: name of the PolicyStore if the learner broadcasts its versions. A restarted Coordinator has no state: the learner
    notices the new ``incarnation`` and starts it at its current batch; groups in flight are rolled out again.
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
        self.rollouts = Rollouts(config, self.router, self.scorers, actor_handle(embedder) if embedder is not None else None)
        self.incarnation = 0
        self.step = 0
        self.consumed = Consumed()
        self.buffer = RolloutBuffer(config.rft, 0)
        self.step_of_version: dict[int, int] = {}  # version -> number of steps before it was published
        self.current: tuple[int, RolloutBatch] | None = None  # kept until the next batch, because calls may be retried
        self.first_started: float | None = None
        self.last_ready = 0.0
        self.stopped = False
        self.error: PixelisError | None = None
        self.changed = asyncio.Condition()
        self.switching = asyncio.Lock()
        self.learnt = -1  # last step whose weights the learner has published
        self.asleep_since = 0.0
        self.producer: asyncio.Task | None = None
        self.evaluating = asyncio.Lock()
        self.evaluations: set[asyncio.Task] = set()
        self.pending_metrics: dict[str, float] = {}
        """Metrics, for example of evaluations, that the learner receives with the next batch."""
        self.evaluated: Counter[str] = Counter()
        self.bad_rows: Counter[str] = Counter()
        self.log = EventLog(config.run.dir)

    # -- training ---------------------------------------------------------------------------------------------------

    async def begin(self, step: int, state: dict[str, Any], version: int, resumes_rewards: bool = True) -> int:
        """(Re)start production at ``step`` with ``version`` loaded; returns the incarnation, which later calls must pass.

        ``state`` comes from a checkpoint, or from the last batch if only the Coordinator has restarted. In the latter case the
        scorers keep their state (``resumes_rewards`` is false). Raises InfraFailure ``restarted`` if another call overtakes it.
        """
        incarnation = self.incarnation = random.getrandbits(48)  # calls of the learner before, also waiting ones, change nothing
        async with self.changed:
            self.changed.notify_all()
        if self.producer is not None:
            self.producer.cancel()
            await asyncio.wait([self.producer])  # otherwise a group that just finished would enter the new buffer
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
            advances = await asyncio.gather(*(scorer.advance.remote(step - 1) for scorer in self.scorers))
            self.pending_metrics |= {name: value for advance in advances for name, value in advance.metrics.items()}
        self._check(incarnation)
        prompts = Prompts(self._questions(), self.config.data.train)
        try:
            await self.router.load(version)
            self._check(incarnation)
        except BaseException:
            prompts.close()
            raise
        if step == 0 and self.config.rft.evaluate_first:
            self._start_evaluation(step, version)
        self.producer = asyncio.get_running_loop().create_task(self._produce(prompts))
        while self.elastic:
            self.joining.append(asyncio.get_running_loop().create_task(self._join(self.elastic.pop())))
        self.producer.add_done_callback(self._producer_done)
        self.producer.add_done_callback(lambda _: prompts.close())
        return incarnation

    async def has_begun(self) -> bool:
        """Whether a learner runs."""
        return self.incarnation != 0

    async def _join(self, name: str) -> None:
        """Give a generator work from when it has started."""
        while True:
            try:
                generator = await asyncio.to_thread(actor_handle, name)
                await generator.ready.remote()
                break
            except (ValueError, RayError):  # not created yet, or lost with its node: Ray starts it elsewhere
                await asyncio.sleep(self.router.timeouts.retry_pause_s)
        self.router.join(generator)
        self.log.write(events.JOINED, generator=name, generators=len(self.router.members))

    def _producer_done(self, task: asyncio.Task) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            cause = unwrap_ray_error(error) or PixelisError(f"rollouts stopped: {error!r}")
            self.failing = asyncio.get_running_loop().create_task(self._fail(cause))

    async def _fail(self, error: PixelisError) -> None:
        async with self.changed:
            self.error = error
            self.changed.notify_all()

    async def _produce(self, prompts: Prompts) -> None:
        """Admit questions whenever the staleness bound allows it."""
        async with asyncio.TaskGroup() as groups:
            while True:
                async with self.changed:
                    await self.changed.wait_for(lambda: self.buffer.room(self.step) > 0)
                for number, question in await prompts.take(self.buffer.room(self.step)):
                    groups.create_task(self._group(number, question, self.buffer.admit()))

    def _questions(self) -> Iterator[tuple[int, Question]]:
        """Questions that no batch has used yet, with their numbers in the stream."""
        start, ahead = self.consumed.cursor, set(self.consumed.ahead)
        # A run whose rewards use no truth never has one.
        on_labels = None if self.config.rewards.labelled else self.rollouts.labels.__setitem__
        questions = question_stream(self.config.data, self.config.run.seed, start, self._skipped, on_labels)
        return ((number, question) for number, question in enumerate(questions, start) if number not in ahead)

    def _skipped(self, row: BadRow) -> None:
        """Count and log an unusable row, within ``data.max_bad_rows``."""
        self.bad_rows[row.code] += 1
        self.log.write("bad_row", **row._asdict())

    async def _group(self, number: int, question: Question, step: int) -> None:
        """Roll out one question and add the result to the buffer."""
        started = time.monotonic()
        result = await self.rollouts.group(question, step)
        async with self.changed:
            self.first_started = min(self.first_started or started, started)
            if isinstance(result, str):
                self.buffer.add_failed(number, result)
                outcome = result
            else:
                result.number = number
                if (abstained := abstains(result.group)) or not self.rollouts.informative(result):
                    self.buffer.add_unusable(result, abstained)
                else:
                    self.buffer.add(result)
                outcome = result.outcome
            count("rollouts/groups", tags={"outcome": outcome})
            observe("rollouts/group_seconds", time.monotonic() - started)
            self.changed.notify_all()

    async def next_batch(self, rank: int, world: int, step: int, incarnation: int | None = None) -> RolloutBatch | None:
        """Share of ``rank`` in batch ``step``: whole groups of about equally many tokens; None at the end of the run.

        Raises the error that stopped production, and InfraFailure ``restarted`` for another ``incarnation``.
        """
        self._check(incarnation)
        if step >= self.config.rft.steps:
            return None
        async with self.changed:
            # A dead learner's call must not assemble a batch: the groups are the next one's.
            await self.changed.wait_for(
                lambda: self._outdated(incarnation) or self._ready(step) or self.stopped or self.error is not None
            )
            self._check(incarnation)
            # If one rank has received its share, all must: the optimizer step is collective.
            if self.current is None or self.current[0] != step:
                if self.error is not None:
                    raise self.error
                return None
            _, batch = self.current
        if self.config.engine.colocate:
            await self._leave_gpus_to_the_learner(step, incarnation)
        return batch.share(rank, world)

    async def _leave_gpus_to_the_learner(self, step: int, incarnation: int | None) -> None:
        """Let the generators sleep before the learner gets batch ``step``, once the evaluations have ended."""
        if step > self.learnt and self.router.awake.is_set():
            await asyncio.gather(*self.evaluations, return_exceptions=True)
        async with self.switching:
            self._check(incarnation)
            if step > self.learnt and self.router.awake.is_set():
                await self.router.sleep()
                self.asleep_since = time.monotonic()

    async def _wake_generators(self, step: int, incarnation: int) -> dict[str, float]:
        """Wake the generators after the learner's ``step``; returns how long they slept. Ignores another ``incarnation``."""
        async with self.switching:
            if self._outdated(incarnation):
                return {}
            self.learnt = max(self.learnt, step)
            asleep_s = time.monotonic() - self.asleep_since
            await self.router.wake()
        return {"rollout/asleep_s": asleep_s}

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
        selection = self.buffer.take(lambda scored: step - self.step_of_version.get(scored.group.policy_version, step))
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
        ages = [step - self.step_of_version.get(g.policy_version, step) for g in batch.groups]
        batch.metrics |= {
            "rollout/seconds": seconds,
            "rollout/tokens_per_s": sum(t.tokens for g in groups for t in g.trajectories) / max(seconds, 1e-9),
            "rollout/staleness": float(max(ages)),
            "rollout/staleness_mean": sum(ages) / len(ages),
            "rollout/generators": self.router.stats()["generators/able"],
        }
        for scored in selection.stale:
            age = step - self.step_of_version.get(scored.group.policy_version, step)
            self.log.write("stale_group", step=step, id=scored.group.question.id, group=scored.group.id, age=age)
        self._account(batch)
        self.current = (step, batch)
        return True

    def _account(self, batch: RolloutBatch) -> None:
        """Record the batch: question numbers for checkpoints, ids in ``consumed.jsonl``, sample groups in ``rollouts.jsonl``."""
        if self.bad_rows:
            batch.metrics["rollout/bad_rows"] = float(self.bad_rows.total())
        batch.metrics |= self.pending_metrics
        self.pending_metrics = {}
        self.consumed.add(batch.numbers)
        batch.state = {"questions": self.consumed.state()}
        folder, samples = Path(self.config.run.dir), batch.groups[: self.config.telemetry.rollouts]
        with (folder / "rollouts.jsonl").open("a", encoding="utf-8") as lines:
            lines.writelines(group.model_dump_json() + "\n" for group in samples)
        row = {"step": batch.step, "numbers": batch.numbers, "ids": [group.question.id for group in batch.groups]}
        with (folder / "consumed.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")

    async def step_done(self, step: int, version: int, incarnation: int | None = None) -> StepResult:
        """Load ``version``, which the learner published after batch ``step``; admit questions; start an evaluation if due.

        Returns reward metrics after the generators have loaded the version. Ignores calls of another ``incarnation``, and does
        nothing more once another learner has begun.
        """
        if self._outdated(incarnation):
            return StepResult()
        incarnation = self.incarnation
        self.step_of_version[version] = step + 1
        asleep = await self._wake_generators(step, incarnation) if self.config.engine.colocate else {}
        if not self._outdated(incarnation):
            await self.router.load(version, functools.partial(arrange_stream, self.store, version) if self.store else None)
        if self._outdated(incarnation):  # the scorers have the next learner's state
            return StepResult()
        is_last = step + 1 == self.config.rft.steps
        advances = await asyncio.gather(*(scorer.advance.remote(step, is_last) for scorer in self.scorers))
        if self._outdated(incarnation):
            return StepResult()
        every = self.config.rft.evaluate_every
        if every and (step + 1) % every == 0:
            self._start_evaluation(step + 1, version)
        async with self.changed:
            loaded = self.router.version  # possibly a newer version
            self.step = max(self.step, self.step_of_version.get(version if loaded is None else loaded, 0))
            self.changed.notify_all()
        metrics = asleep | {name: value for advance in advances for name, value in advance.metrics.items()}
        return StepResult(metrics, next((advance.boundary for advance in advances if advance.boundary), None))

    async def reward_state(self) -> dict[str, Any]:
        """Running state of the rewards for a checkpoint, if they have any."""
        if not self.config.rewards.stateful:
            return {}
        return {"rewards": base64.b64encode(await self.scorers[0].state.remote()).decode()}

    async def finish(self) -> dict[str, float]:
        """Wait for running evaluations; returns their metrics."""
        await asyncio.gather(*self.evaluations, return_exceptions=True)
        metrics, self.pending_metrics = self.pending_metrics, {}
        return metrics

    async def stop(self, evaluations: bool = True) -> None:
        """Stop production and, unless ``evaluations`` is false, evaluations. The learner then writes its last checkpoint."""
        async with self.changed:
            self.stopped = True
            self.changed.notify_all()
        for task in (self.producer, *(self.evaluations if evaluations else ())):
            if task is not None:
                task.cancel()

    async def progress(self) -> dict[str, Any]:
        """Finished steps, evaluated episodes, skipped rows by cause and the router's statistics."""
        counts = {"evaluated": dict(self.evaluated), "bad_rows": dict(self.bad_rows)}
        return {"step": self.step, **counts, **self.router.stats()}

    # -- evaluation -------------------------------------------------------------------------------------------------

    def _start_evaluation(self, step: int, version: int) -> None:
        task = asyncio.get_running_loop().create_task(self._evaluate(step, version))
        self.evaluations.add(task)
        task.add_done_callback(self.evaluations.discard)

    async def _evaluate(self, step: int, version: int) -> None:
        """Evaluate ``version`` during training. A failure is logged and does not end the run."""
        config = self.config
        async with self.evaluating:
            try:
                e = config.evaluate
                request = (e.questions, version, e.operations)
                results = {
                    name: await self.evaluate(source, *request, samples=e.samples, seeds=e.seeds, share=EVALUATION_SHARE)
                    for name, source in config.held_out.items()
                }
            except Exception as error:
                cause = unwrap_ray_error(error) or error
                self.log.write(events.ALARM, step=step, text=f"the evaluation failed: {cause}")
                return
            summaries = {name: summarise(groups) for name, (groups, _) in results.items()}
            for name, summary in summaries.items():
                if (problem := diagnosis.of_evaluation(summary)) is not None:
                    self.log.write(events.ALARM, step=step, text=f"the evaluation{f' of {name}' if name else ''}: {problem}")
            metrics = evaluation_metrics(summaries)
            self.log.write("evaluation", step=step, version=version, **metrics)
            self.pending_metrics |= {**metrics, "evaluate/step": float(step)}
            name, (groups, views) = next(iter(results.items()))
            if (page := report.sample(config, step, summaries[name], groups, views)) is not None:
                await asyncio.gather(page, return_exceptions=True)  # a Ray task ends with its caller

    async def evaluate(
        self,
        source: str,
        count: int,
        version: int,
        operations: bool,
        name: str = "evaluate",
        seed: int | None = None,
        samples: int = 1,
        share: float = 1.0,
        seeds: Sequence[int] = (),
    ) -> tuple[list[Group], list[GroupViews]]:
        """``samples`` episodes per question of ``source`` with ``version``; returns scored groups and references to their views.

        ``seed`` shuffles the questions. With ``seeds``, which replace ``run.seed`` for the answers, a group has ``samples``
        episodes of each in turn. Reserves ``share`` of the generators for ``version``. Raises InfraFailure if that fails, and an
        error for an unusable question, because a held-out set must be complete.
        """
        questions = await asyncio.to_thread(_evaluation_set, self.config, source, seed, count)
        if not questions:
            raise DataFailure(f"{source} has no questions", fix="check data.evaluate")
        self.evaluated[name] = 0
        async with self.router.reserve(version, share) as reserved:
            gate = asyncio.Semaphore(self.config.engine.max_num_seqs * len(self.router.members))
            streams = {f"{name}-seed{seed}": seed * SEED_STRIDE & 0x7FFFFFFF for seed in seeds} or {name: self.config.run.seed}
            shared = (gate, reserved, name, operations, samples)
            answers = [asyncio.ensure_future(self._answer(q, *shared, *stream)) for q in questions for stream in streams.items()]
            try:
                results = await asyncio.gather(*answers)
            finally:
                for answer in answers:  # after a failure the others would wait for a reservation that is released
                    answer.cancel()
        if len(streams) > 1:
            results = [_merged(name, results[i : i + len(streams)]) for i in range(0, len(results), len(streams))]
        return [scored.group for scored in results], [scored.views for scored in results]

    async def _answer(
        self,
        question: Question,
        gate: asyncio.Semaphore,
        reserved: Reservation,
        name: str,
        operations: bool,
        samples: int,
        label: str,
        seed: int,
    ) -> ScoredGroup:
        e, d = self.config.evaluate, self.config.dialogue
        sampling = SamplingParams(e.sampling.temperature, e.sampling.top_p, d.max_turn_tokens, seed)
        async with gate:
            request = RolloutRequest(question, f"{label}-{question.id}", samples, sampling, operations, d.max_turns_test)
            scored = await self.rollouts.episodes(request, reserved=reserved)
            self.evaluated[name] += 1
            return scored


class Consumed:
    """Numbers of the used questions: all below ``cursor``, and those in ``ahead``."""

    def __init__(self, cursor: int = 0, ahead: set[int] | None = None):
        self.cursor, self.ahead = cursor, ahead or set()

    @classmethod
    def of(cls, state: dict[str, Any]) -> Consumed:
        """Restore from a checkpoint's state."""
        questions = state.get("questions") or {}
        return cls(questions.get("cursor", 0), set(questions.get("ahead", [])))

    def add(self, numbers: list[int]) -> None:
        """Add the questions of a batch, which need not be contiguous: batches in flight share one stream."""
        self.ahead.update(number for number in numbers if number >= self.cursor)
        while self.cursor in self.ahead:
            self.ahead.remove(self.cursor)
            self.cursor += 1

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"cursor": self.cursor, "ahead": sorted(self.ahead)}


def _merged(name: str, same: Sequence[ScoredGroup]) -> ScoredGroup:
    """The episodes of several groups of a question as one group."""
    id = f"{name}-{same[0].group.question.id}"
    trajectories = [t.model_copy(update={"group_id": id}) for scored in same for t in scored.group.trajectories]
    group = same[0].group.model_copy(update={"id": id, "trajectories": trajectories})
    return replace(same[0], group=group, views=report.merge_views([scored.views for scored in same]))


def _evaluation_set(config: Config, source: str, seed: int | None, count: int) -> list[Question]:
    """The first questions of ``source``, all with a ``count`` of 0. Where rewards use no truth, rows may lack one."""
    cut: dict[str, Labels] = {}
    rows = read_questions(source, seed=seed, epochs=1, on_labels=None if config.rewards.labelled else cut.__setitem__)
    questions = [require_text(question, source) for question in itertools.islice(rows, count or None)]
    return [q.model_copy(update=cut[q.id]._asdict()) if q.id in cut else q for q in questions]
