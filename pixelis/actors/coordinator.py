"""The Coordinator actor: admits questions, collects scored groups, hands batches to the learner, runs evaluations.

Staleness is bounded by admission: groups accepted or running never exceed ``(staleness + step + 1) * questions``, where
``step`` counts the batches whose weights the generators hold. With staleness 0 a batch is rolled out only after the
weights of the one before are loaded: exact on-policy.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from pixelis.actors import report
from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.generator_router import Fleet
from pixelis.actors.rollouts import Prompts, RolloutBatch, Rollouts, StepResult
from pixelis.config import Config
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.questions import asked, read_questions
from pixelis.datasets.stream import question_stream
from pixelis.dialogue.dialects import offered
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import DataFailure, PixelisError
from pixelis.evaluation.metrics import summarise
from pixelis.records import Group, Question
from pixelis.telemetry.events import EventLog

__all__ = ["Coordinator", "RolloutBatch", "StepResult"]


@ray.remote(max_restarts=0, max_concurrency=1024)
class Coordinator:
    """Moves records and references only; pixels and tensors pass it by."""

    def __init__(
        self,
        config: Config,
        generators: list[ActorHandle],
        scorers: list[ActorHandle],
        embedder: ActorHandle | None = None,
    ):
        self.config, self.scorers = config, scorers
        self.fleet = Fleet(generators)
        self.rollouts = Rollouts(config, self.fleet, scorers, embedder)
        self.step = 0
        self.consumed = Consumed()
        self.made_at: dict[int, int] = {}  # version -> the step after which it was published
        self.ready: dict[int, RolloutBatch] = {}
        self.handed: Counter[int] = Counter()
        self.stopped = False
        self.error: PixelisError | None = None
        self.changed = asyncio.Condition()
        self.producer: asyncio.Task | None = None
        self.evaluated: Counter[str] = Counter()
        self.bad_rows: Counter[str] = Counter()
        self.log = EventLog(config.run.dir)

    # -- training ---------------------------------------------------------------------------------------------------

    async def begin(self, step: int, state: dict[str, Any], version: int) -> None:
        """(Re)start production at ``step`` from the state of a checkpoint; called by the learner when it starts."""
        if self.producer is not None:
            self.producer.cancel()
            await asyncio.wait([self.producer])  # or a batch that was just done would be taken for one of this production
        self.step, self.consumed = step, Consumed.of(state)
        self.bad_rows.clear()
        self.made_at = {version: step}
        self.ready.clear()
        self.handed.clear()
        if kept := state.get("rewards"):
            await asyncio.gather(*(scorer.load.remote(base64.b64decode(kept)) for scorer in self.scorers))
        prompts = Prompts(self._questions(), self.config.data.train)
        try:
            await self.fleet.load(version)
        except BaseException:
            prompts.close()
            raise
        self.producer = asyncio.get_running_loop().create_task(self._produce(step, prompts))
        self.producer.add_done_callback(self._producer_done)
        self.producer.add_done_callback(lambda _: prompts.close())

    def _producer_done(self, task: asyncio.Task) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            cause = unwrap_ray_error(error) or PixelisError(f"rollouts stopped: {error!r}")
            self.failing = asyncio.get_running_loop().create_task(self._fail(cause))

    async def _fail(self, error: PixelisError) -> None:
        async with self.changed:
            self.error = error
            self.changed.notify_all()

    async def _produce(self, step: int, prompts: Prompts) -> None:
        """Roll out batch after batch, as far ahead as the staleness bound allows."""
        async with asyncio.TaskGroup() as batches:
            for number in range(step, self.config.rft.steps):
                async with self.changed:
                    await self.changed.wait_for(lambda n=number: n <= self.step + self.config.rft.max_off_policy_steps)  # type: ignore[misc]
                batches.create_task(self._roll(number, prompts))

    def _questions(self) -> Iterator[tuple[int, Question]]:
        """The questions that no batch has learnt from, with their numbers in the stream."""
        start, ahead = self.consumed.cursor, set(self.consumed.ahead)
        questions = question_stream(self.config.data, self.config.run.seed, start, self._skipped)
        return ((number, question) for number, question in enumerate(questions, start) if number not in ahead)

    def _skipped(self, row: BadRow) -> None:
        """A row that cannot be used, within ``data.max_bad_rows``."""
        self.bad_rows[row.code] += 1
        self.log.write("bad_row", **row._asdict())

    async def _roll(self, number: int, prompts: Prompts) -> None:
        batch = await self.rollouts.batch(number, prompts)
        ages = [number - self.made_at.get(g.policy_version, number) for g in batch.groups]
        batch.metrics |= {"rollout/staleness": float(max(ages)), "rollout/staleness_mean": sum(ages) / len(ages)}
        if self.bad_rows:
            batch.metrics["rollout/bad_rows"] = float(self.bad_rows.total())
        if offered(self.config) and batch.metrics.get("rollout/calls") == 0:
            self.log.write("alarm", step=number, text="no episode of this batch called an operation")
        self._keep(batch)
        async with self.changed:
            self.ready[number] = batch
            self.changed.notify_all()

    def _keep(self, batch: RolloutBatch) -> None:
        """Append a few whole groups to ``run.dir/rollouts.jsonl``, for people who want to read what the policy does."""
        chosen = batch.groups[: self.config.telemetry.rollouts]
        with (Path(self.config.run.dir) / "rollouts.jsonl").open("a", encoding="utf-8") as lines:
            lines.writelines(group.model_dump_json() + "\n" for group in chosen)

    def _consume(self, batch: RolloutBatch) -> None:
        """Note what the learner is handed: in the state of its checkpoints, and by id in ``run.dir/consumed.jsonl``."""
        self.consumed.add(batch.numbers)
        batch.state = {"questions": self.consumed.state()}
        row = {"step": batch.step, "numbers": batch.numbers, "ids": [group.question.id for group in batch.groups]}
        with (Path(self.config.run.dir) / "consumed.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")

    async def next_batch(self, rank: int, world: int, step: int) -> RolloutBatch | None:
        """Rank ``rank``'s share of batch ``step``: whole groups, round robin; None when the run is over.

        Raises the error that stopped production, if one did.
        """
        if step >= self.config.rft.steps:
            return None
        async with self.changed:
            await self.changed.wait_for(lambda: step in self.ready or self.stopped or self.error is not None)
            # Once one rank has its share all must get theirs, or the optimizer step would wait for ever.
            if not self.handed[step]:
                if self.error is not None:
                    raise self.error
                if self.stopped:
                    return None
            whole = self.ready[step]
            if not self.handed[step]:
                self._consume(whole)
            self.handed[step] += 1
            if self.handed[step] >= world:
                del self.ready[step], self.handed[step]
        return whole.share(rank, world)

    async def stepped(self, step: int, version: int) -> StepResult:
        """The learner finished batch ``step`` and published ``version``: load it everywhere and go on.

        Returns what the rewards tell, and the metrics of a held-out evaluation when ``rft.evaluate_every`` says that one is due.
        """
        self.made_at[version] = step + 1
        await self.fleet.load(version)
        told = await asyncio.gather(*(scorer.advance.remote(step) for scorer in self.scorers))
        found = {name: value for advance in told for name, value in advance.metrics.items()}
        boundary = next((advance.boundary for advance in told if advance.boundary), None)
        every = self.config.rft.evaluate_every
        if every and (step + 1) % every == 0:
            groups, views = await self.evaluate(
                self.config.data.evaluate, self.config.evaluate.questions, version, self.config.evaluate.operations
            )
            summary = summarise(groups)
            found |= {f"evaluate/{key}": summary[key] for key in ("accuracy", "rapr", "tool_error_rate", "turns")}
            page = report.sample(self.config, step + 1, summary, groups, views)
            if page is not None and step + 1 == self.config.rft.steps:
                await asyncio.gather(page, return_exceptions=True)  # a task ends with the actor that started it
        async with self.changed:
            self.step = step + 1
            self.changed.notify_all()
        return StepResult(found, boundary)

    async def keep(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the questions: the running state of the rewards, when they have one."""
        if not self.config.rewards.stateful:
            return {}
        return {"rewards": base64.b64encode(await self.scorers[0].state.remote()).decode()}

    async def stop(self) -> None:
        """End production; the learner gets None and writes its last checkpoint."""
        async with self.changed:
            self.stopped = True
            self.changed.notify_all()
        if self.producer is not None:
            self.producer.cancel()

    async def progress(self) -> dict[str, Any]:
        """Steps done, episodes of each evaluation, rows skipped by cause and fleet statistics."""
        counts = {"evaluated": dict(self.evaluated), "bad_rows": dict(self.bad_rows)}
        return {"step": self.step, **counts, **self.fleet.stats()}

    # -- evaluation -------------------------------------------------------------------------------------------------

    async def evaluate(
        self,
        source: str,
        count: int,
        version: int,
        operations: bool,
        name: str = "evaluate",
        seed: int | None = None,
        samples: int = 1,
    ) -> tuple[list[Group], list[ray.ObjectRef]]:
        """``samples`` episodes per question of ``source`` with ``version``: scored groups, and references to their views.

        Raises InfraFailure when the fleet cannot; a question that cannot be used raises too: a held-out set has no holes.
        """
        e, d = self.config.evaluate, self.config.dialogue
        sampling = SamplingParams(e.sampling.temperature, e.sampling.top_p, d.max_turn_tokens, self.config.run.seed)
        if version != self.fleet.version:
            await self.fleet.load(version)
        gate = asyncio.Semaphore(self.config.engine.max_num_seqs * len(self.fleet.members))
        self.evaluated[name] = 0

        async def one(question: Question) -> tuple[Group, ray.ObjectRef]:
            async with gate:
                group_id = f"{name}-{question.id}"
                rolled = await self.rollouts.episodes(question, group_id, samples, sampling, None, operations, d.max_turns_test)
                self.evaluated[name] += 1
                return rolled.group, rolled.views

        rows = itertools.islice(read_questions(source, seed=seed, epochs=1), count)
        held_out = (asked(question, source) for question in rows)
        questions = await asyncio.to_thread(list, held_out)
        if not questions:
            raise DataFailure(f"{source} holds no question", fix="check data.evaluate")
        results = await asyncio.gather(*(one(q) for q in questions))
        return [g for g, _ in results], [v for _, v in results]


class Consumed:
    """Numbers of the questions that were learnt from: all below ``cursor``, and those ``ahead`` of it."""

    def __init__(self, cursor: int = 0, ahead: set[int] | None = None):
        self.cursor, self.ahead = cursor, ahead or set()

    @classmethod
    def of(cls, state: dict[str, Any]) -> Consumed:
        """As a checkpoint kept it."""
        kept = state.get("questions") or {}
        return cls(kept.get("cursor", 0), set(kept.get("ahead", [])))

    def add(self, numbers: list[int]) -> None:
        """Batches in flight draw from one stream, so what one has used need not be in one piece."""
        self.ahead.update(number for number in numbers if number >= self.cursor)
        while self.cursor in self.ahead:
            self.ahead.remove(self.cursor)
            self.cursor += 1

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"cursor": self.cursor, "ahead": sorted(self.ahead)}
