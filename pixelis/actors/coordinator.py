"""The Coordinator actor: admits questions, collects scored groups, hands batches to the learner, runs evaluations.

Staleness is bounded by admission: groups accepted or running never exceed ``(staleness + step + 1) * questions``, where
``step`` counts the batches whose weights the generators hold. With staleness 0 a batch is rolled out only after the
weights of the one before are loaded: exact on-policy.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from pixelis.actors.cluster import own_error
from pixelis.actors.fleet import Fleet
from pixelis.config import Config
from pixelis.datasets.questions import read_questions
from pixelis.engines import SamplingParams
from pixelis.errors import BadInput, DataFailure, PixelisError
from pixelis.evaluation.metrics import summarise
from pixelis.policy.advantages import group_advantages
from pixelis.records import Group, Question
from pixelis.telemetry.events import EventLog

MAX_GROUP_FAILURES = 0.5
"""Share of a batch's groups that may fail for data reasons before the run stops with an error."""


@dataclass
class Batch:
    """What the learner gets: groups with advantages, and beside them a reference to the views of each.

    ``cursor`` is the number of the next question, kept in checkpoints.
    """

    step: int
    groups: list[Group] = field(default_factory=list)
    views: list[ray.ObjectRef] = field(default_factory=list)
    cursor: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def share(self, rank: int, world: int) -> Batch:
        """Rank ``rank``'s part of ``world``: whole groups, round robin."""
        part = slice(rank, None, world)
        return Batch(self.step, self.groups[part], self.views[part], self.cursor, self.metrics)


@ray.remote(max_restarts=0, max_concurrency=1024)
class Coordinator:
    """Moves records and references only; pixels and tensors pass it by."""

    def __init__(self, config: Config, generators: list[ActorHandle], scorers: list[ActorHandle], store: ActorHandle):
        self.config, self.scorers, self.store = config, scorers, store
        self.fleet = Fleet(generators)
        self.scorer = itertools.cycle(scorers)
        self.step = 0
        self.cursor = 0
        self.ready: dict[int, Batch] = {}
        self.handed: Counter[int] = Counter()
        self.stopped = False
        self.error: PixelisError | None = None
        self.changed = asyncio.Condition()
        self.producer: asyncio.Task | None = None
        self.evaluated: Counter[str] = Counter()
        self.log = EventLog(config.run.dir)

    # -- training ---------------------------------------------------------------------------------------------------

    async def begin(self, step: int, cursor: int, version: int) -> None:
        """(Re)start production at ``step`` with question number ``cursor``; called by the learner when it starts."""
        if self.producer is not None:
            self.producer.cancel()
        self.step, self.cursor = step, cursor
        self.ready.clear()
        self.handed.clear()
        await self.fleet.load(version)
        self.producer = asyncio.get_running_loop().create_task(self._produce(step, cursor))
        self.producer.add_done_callback(self._producer_done)

    def _producer_done(self, task: asyncio.Task) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            cause = own_error(error) or PixelisError(f"rollouts stopped: {error!r}")
            self.failing = asyncio.get_running_loop().create_task(self._fail(cause))

    async def _fail(self, error: PixelisError) -> None:
        async with self.changed:
            self.error = error
            self.changed.notify_all()

    async def _produce(self, step: int, cursor: int) -> None:
        """Roll out batch after batch, as far ahead as the staleness bound allows."""
        questions = read_questions(self.config.data.train, seed=self.config.run.seed, start=cursor, limit=self.config.data.limit)
        async with asyncio.TaskGroup() as batches:
            for number in range(step, self.config.rft.steps):
                async with self.changed:
                    await self.changed.wait_for(lambda n=number: n <= self.step + self.config.rft.staleness)  # type: ignore[misc]
                batches.create_task(self._roll_batch(number, questions))

    async def _roll_batch(self, number: int, questions: Any) -> None:
        """One batch: its own questions, replaced when a group cannot be used, so that group integrity is by construction."""
        r = self.config.rft
        start, failures = time.monotonic(), Counter[str]()
        wanted, groups, cursor = r.questions, [], self.cursor
        while wanted:
            chosen = list(itertools.islice(questions, wanted))
            if cursor == self.cursor:  # else a later batch has drawn: a run resumed here draws the replacements again
                cursor += len(chosen)
            self.cursor += len(chosen)
            if not chosen:
                raise DataFailure(f"{self.config.data.train} gave no question", fix="check data.train and data.limit")
            results = await asyncio.gather(*(self._group(q, number) for q in chosen))
            groups += [result for result in results if not isinstance(result, str)]
            failures.update(result for result in results if isinstance(result, str))
            wanted = r.questions - len(groups)
            if sum(failures.values()) > max(r.questions * MAX_GROUP_FAILURES, 4):
                raise DataFailure(f"too many unusable groups in step {number}: {dict(failures)}", fix="look at events.jsonl")
        batch = Batch(step=number, groups=[g for g, _ in groups], views=[v for _, v in groups], cursor=cursor)
        seconds = time.monotonic() - start
        total = sum(len(t.token_ids()) for g in batch.groups for t in g.trajectories)
        batch.metrics = {
            **batch_metrics(batch.groups),
            "rollout/seconds": seconds,
            "rollout/tokens_per_s": total / seconds,
            "rollout/unusable_groups": float(sum(failures.values())),
            "rollout/staleness": float(number - self.step),
        }
        self._keep(batch)
        async with self.changed:
            self.ready[number] = batch
            self.changed.notify_all()

    def _keep(self, batch: Batch) -> None:
        """Append a few whole groups to ``run.dir/rollouts.jsonl``, for people who want to read what the policy does."""
        chosen = batch.groups[: self.config.telemetry.rollouts]
        with (Path(self.config.run.dir) / "rollouts.jsonl").open("a", encoding="utf-8") as lines:
            lines.writelines(group.model_dump_json() + "\n" for group in chosen)

    async def _group(self, question: Question, number: int) -> tuple[Group, ray.ObjectRef] | str:
        """A scored group with advantages and the reference to its views, or the name of why it cannot be used."""
        r = self.config.rft
        seed = (self.config.run.seed * 1_000_003 + number) & 0x7FFFFFFF
        sampling = SamplingParams(r.sampling.temperature, r.sampling.top_p, self.config.dialogue.max_turn_tokens, seed)
        group_id = f"s{number:06d}-{question.id}"
        try:
            group, views = await self.fleet.rollout(
                question, group_id, r.group, sampling, bool(self.config.toolbox.operations), self.config.dialogue.max_turns
            )
            group = await next(self.scorer).score.remote(group)
        except (DataFailure, BadInput) as error:
            return (own_error(error) or error).code
        advantages = group_advantages([t.reward for t in group.trajectories], r.advantage)
        if all(a is None for a in advantages):
            return group.trajectories[0].unscored or "group_too_small"
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            trajectory.advantage = advantage
        return group, views

    async def next_batch(self, rank: int, world: int, step: int) -> Batch | None:
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
            self.handed[step] += 1
            if self.handed[step] >= world:
                del self.ready[step], self.handed[step]
        return whole.share(rank, world)

    async def stepped(self, step: int, version: int) -> dict[str, float]:
        """The learner finished batch ``step`` and published ``version``: load it everywhere and go on.

        Returns the metrics of a held-out evaluation when ``rft.evaluate_every`` says that one is due.
        """
        await self.fleet.load(version)
        found = {}
        every = self.config.rft.evaluate_every
        if every and (step + 1) % every == 0:
            groups, _ = await self.evaluate(
                self.config.data.evaluate, self.config.evaluate.questions, version, self.config.evaluate.operations
            )
            summary = summarise(groups)
            found = {f"evaluate/{key}": summary[key] for key in ("accuracy", "rapr", "tool_error_rate", "turns")}
        async with self.changed:
            self.step = step + 1
            self.changed.notify_all()
        return found

    async def stop(self) -> None:
        """End production; the learner gets None and writes its last checkpoint."""
        async with self.changed:
            self.stopped = True
            self.changed.notify_all()
        if self.producer is not None:
            self.producer.cancel()

    async def progress(self) -> dict[str, Any]:
        """Steps done, episodes of each evaluation and fleet statistics."""
        return {"step": self.step, "evaluated": dict(self.evaluated), **self.fleet.stats()}

    # -- evaluation -------------------------------------------------------------------------------------------------

    async def evaluate(
        self, source: str, count: int, version: int, operations: bool, name: str = "evaluate", seed: int | None = None
    ) -> tuple[list[Group], list[ray.ObjectRef]]:
        """One episode per question of ``source`` with ``version``; scored groups and, beside them, references to their views.

        Raises InfraFailure when the fleet cannot; a question that cannot be used raises too: a held-out set has no holes.
        """
        e, d = self.config.evaluate, self.config.dialogue
        sampling = SamplingParams(e.sampling.temperature, e.sampling.top_p, d.max_turn_tokens, self.config.run.seed)
        if version != self.fleet.version:
            await self.fleet.load(version)
        gate = asyncio.Semaphore(self.config.engine.max_rows * len(self.fleet.members))
        self.evaluated[name] = 0

        async def one(question: Question) -> tuple[Group, ray.ObjectRef]:
            async with gate:
                group, views = await self.fleet.rollout(
                    question, f"{name}-{question.id}", 1, sampling, operations, d.max_turns_test
                )
                group = await next(self.scorer).score.remote(group)
                self.evaluated[name] += 1
                return group, views

        questions = list(itertools.islice(read_questions(source, seed=seed, epochs=1), count))
        if not questions:
            raise DataFailure(f"{source} holds no question", fix="check data.evaluate")
        results = await asyncio.gather(*(one(q) for q in questions))
        return [g for g, _ in results], [v for _, v in results]


def batch_metrics(groups: list[Group]) -> dict[str, float]:
    """What happened in a batch of groups: reward terms, rate of pixel reasoning, stop reasons, uniform groups."""
    trajectories = [t for g in groups for t in g.trajectories]
    summary = summarise(trajectories)
    out = {
        "train/accuracy": summary["accuracy"],
        "rollout/rapr": summary["rapr"],
        "rollout/tool_error_rate": summary["tool_error_rate"],
        "rollout/turns": summary["turns"],
    }
    for reason, count in summary["stop_reasons"].items():
        out[f"stop/{reason}"] = count / len(trajectories)
    scored = [t for t in trajectories if t.reward is not None]
    if scored:
        out["reward/total"] = sum(t.reward or 0.0 for t in scored) / len(scored)
        for term in scored[0].rewards:
            out[f"reward/{term}"] = sum(t.rewards[term] for t in scored) / len(scored)
    uniform = [g for g in groups if len({t.reward for t in g.trajectories}) == 1]
    out["group/uniform"] = len(uniform) / len(groups)
    return out
