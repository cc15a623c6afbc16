"""SFT's batch source: demonstrations by Ray Data, evaluation during training, and the curriculum's mixture.

A batch depends only on the seed, its step and the mixture, which the Schedule chooses after each evaluation,
so a resumed run gets the same batches.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.actor import ActorHandle

from pixelis.actors.batch_sources import BatchSource
from pixelis.actors.rollouts import StepResult
from pixelis.actors.weights import WeightPublisher
from pixelis.config import Config
from pixelis.datasets.bad_rows import BAD_ROW, BadRow
from pixelis.datasets.curriculum import LEVELS, Curriculum, Event, Mixture
from pixelis.errors import DataFailure
from pixelis.policy.distributed import sum_over_workers
from pixelis.policy.model_path import resolve
from pixelis.policy.samples import LearnerBatch, TrainSample
from pixelis.telemetry import events

if TYPE_CHECKING:
    from pixelis.actors.placement import Actors
    from pixelis.policy.train_step import Trainer

EXAMPLES = 5
"""Unusable demonstrations listed in the error about too many of them."""


@ray.remote(num_cpus=0, max_concurrency=64)
class Schedule:
    """The curriculum of a run, and the mixture after each evaluation."""

    def __init__(self, config: Config):
        self.settings, self.every = config.sft.curriculum, config.sft.evaluate_every
        self.curriculum = Curriculum(self.settings)
        self.mixtures: dict[int, Mixture] = {}
        self.changed = asyncio.Condition()

    async def begin(self, step: int, state: dict[str, Any]) -> dict[str, float]:
        self.curriculum = Curriculum(self.settings)
        self.curriculum.load_state_dict(state)
        async with self.changed:
            self.mixtures = {k: mixture for k, mixture in self.mixtures.items() if k < step // self.every}
            self.mixtures[step // self.every] = self.curriculum.mixture
            self.changed.notify_all()
        return self.curriculum.metrics()

    async def mixture(self, step: int) -> Mixture:
        """Mixture of batch `step`. Waits for the evaluation that determines it."""
        number = step // self.every
        async with self.changed:
            await self.changed.wait_for(lambda: number in self.mixtures)
            return self.mixtures[number]

    async def evaluated(
        self, step: int, loss: float, accuracy: float | None
    ) -> tuple[Event | None, dict[str, float]]:
        event = self.curriculum.evaluated(step, loss, accuracy)
        async with self.changed:
            self.mixtures[step // self.every] = self.curriculum.mixture
            self.changed.notify_all()
        return event, self.curriculum.metrics(event)

    async def state(self) -> dict[str, Any]:
        return self.curriculum.state_dict()


class DemonstrationSource(BatchSource):
    """Batches of demonstrations by Ray Data; start: step of the dataset's first batch."""

    kind: Literal["sft", "policy"] = "sft"

    def __init__(
        self,
        config: Config,
        start: int,
        steps: int,
        schedule: ActorHandle | None = None,
        actors: Actors | None = None,
    ):
        self.config, self.start, self.steps, self.schedule = config, start, steps, schedule
        store = actors.store if actors is not None else None
        self.weights = WeightPublisher(store, "sft", every=config.sft.evaluate_every or 1)
        self.evaluation = HeldOut(config, actors.coordinator if actors is not None else None)
        self.curriculum: dict[str, float] = {}
        self.unusable, self.log = 0, events.EventLog(config.run.dir)

    def prepare(self, step: int) -> None:
        """Start preparing this worker's first batch; a restarted worker skips those before `step`."""
        import ray.train

        context = ray.train.get_context()
        batches = ray.train.get_dataset_shard(f"train-{context.get_world_rank()}").iter_batches(
            batch_size=self.config.sft.batch // self.config.learner.shares(context.get_world_size()),
            batch_format="numpy",
            # With a schedule, prefetching would wait for a batch whose mixture depends on an evaluation after
            # the current batch.
            prefetch_batches=0 if self.schedule is not None else 1,
        )
        self.batches = itertools.islice(batches, step - self.start, None)
        self.first: Future | None = ThreadPoolExecutor(1).submit(next, self.batches, None)

    def begin(self, state: dict[str, Any]) -> None:
        self.unusable = state.get("unusable", 0)
        if self.rank == 0:
            events.drop_steps(Path(self.config.run.dir) / "consumed.jsonl", self.trainer.batches)
        if self.schedule is not None and self.rank == 0:
            position = self.trainer.batches, state.get("curriculum", {})
            self.curriculum = ray.get(self.schedule.begin.remote(*position))
        version = self.weights.publish(self.trainer, {}, restart=True)
        if version is not None:
            ray.get(version)
        if self.config.sft.evaluate_every:
            self.evaluation.load(self.share, self.shares)

    def next(self) -> LearnerBatch | None:
        """The next batch, None at the end. Raises DataFailure beyond `data.max_bad_rows`."""
        from pixelis.datasets.demonstration_stream import samples_of

        if (step := self.trainer.batches) >= self.steps:
            return None
        rows, self.first = self.first.result() if self.first is not None else next(self.batches, None), None
        if rows is None:
            return None
        levels = Counter(rows["level"].tolist())
        errors = [BadRow(*json.loads(text)) for text in rows["error"] if text]
        own = [*(float(levels[level]) for level in LEVELS), float(len(errors))]
        *counts, failed = self.trainer.model.sequence.sum(own)
        self.unusable += int(failed)
        for error in errors:
            self.log.write(BAD_ROW, **error._asdict())
        limit = self.config.data.max_bad_rows
        if self.unusable > (limit if limit >= 1 else limit * self.steps * self.config.sft.batch):
            examples = "; ".join(map(str, errors[:EXAMPLES])) or "on another learner"
            raise DataFailure(
                f"{self.unusable} demonstrations cannot be played, data.max_bad_rows={limit:g}: {examples}",
                code=errors[0].code if errors else "unusable",
                fix="correct or remove them, or raise data.max_bad_rows",
            )
        metrics = {**self.curriculum, "data/unusable": float(self.unusable)}
        if any(counts):
            metrics |= {f"curriculum/count_{level}": n for level, n in zip(LEVELS, counts, strict=True)}
        if self.rank == 0:
            with (Path(self.config.run.dir) / "consumed.jsonl").open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"step": step, "ids": rows["id"].tolist()}) + "\n")
        return LearnerBatch(step, samples_of(rows), "sft", metrics, {"unusable": self.unusable})

    def done(
        self, batch: LearnerBatch, version: ray.ObjectRef | None, metrics: dict[str, float]
    ) -> StepResult:
        steps, every = batch.step + 1, self.config.sft.evaluate_every
        if not every or steps % every:
            return StepResult()
        results = self.evaluation.loss(self.trainer)
        if self.rank:
            return StepResult()
        if version is not None:
            results |= self.evaluation.episodes(steps, ray.get(version), last=steps == self.steps)
        if self.schedule is not None:
            loss, accuracy = results["evaluate/loss"], results.get("evaluate/accuracy")
            event, curriculum = ray.get(self.schedule.evaluated.remote(steps, loss, accuracy))
            self.curriculum = {**curriculum, "curriculum/event": 0.0}
            results |= {"curriculum/event": curriculum["curriculum/event"]} if event else {}
        return StepResult(results)

    def state(self) -> dict[str, Any]:
        return {"curriculum": ray.get(self.schedule.state.remote())} if self.schedule is not None else {}


class HeldOut:
    """Loss on held-out demonstrations and, with a Coordinator, accuracy of episodes."""

    def __init__(self, config: Config, coordinator: ActorHandle | None):
        self.config, self.coordinator = config, coordinator
        self.samples: list[tuple[str, TrainSample]] = []

    def load(self, share: int, shares: int) -> None:
        from pixelis.datasets.demonstration_stream import demonstrations, train_sample
        from pixelis.datasets.demonstrations import Player

        player = Player(self.config, str(resolve(self.config.policy.model)))
        count = self.config.sft.validation_size
        source = demonstrations(self.config, self.config.sft.validation, count)
        rows = itertools.islice((row for row in source if row.kind in self.config.sft.kinds), count)
        own = itertools.islice(rows, share, None, shares)
        self.samples = [(row.level or "", train_sample(player, row)) for row in own]

    def loss(self, trainer: Trainer) -> dict[str, float]:
        """Mean negative log-likelihood of the held-out tokens, over all and by level. Collective."""
        names = ["", *LEVELS]
        nll, tokens = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        log_probs = trainer.model.log_probs([sample for _, sample in self.samples])
        for (level, _), values in zip(self.samples, log_probs, strict=True):
            for name in {"", level}:
                nll[name] -= float(values.sum(dtype="float64"))
                tokens[name] += len(values)
        flat = sum_over_workers([*nll.values(), *tokens.values()])
        totals = zip(names, flat[: len(names)], flat[len(names) :], strict=True)
        means = {f"evaluate/loss_{name}".rstrip("_"): total / count for name, total, count in totals if count}
        if not means:
            message = f"{self.config.sft.validation} gave no demonstration to evaluate on"
            raise DataFailure(message, fix="set sft.validation")
        return means

    def episodes(self, step: int, version: int, last: bool) -> dict[str, float]:
        if self.coordinator is None:
            return {}
        request = (step, version, self.config.sft.evaluate_episodes, LEVELS)
        metrics = ray.get(self.coordinator.evaluate_held_out.remote(*request))
        if last:  # the page is written in the background
            ray.get(self.coordinator.finish.remote())
        return metrics
