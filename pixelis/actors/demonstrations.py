"""SFT's source of batches: demonstrations by Ray Data, evaluation during training, the mixture of the curriculum.

The learner evaluates, the Schedule decides, and whoever prepares the batches after it waits for the decision: a batch depends on
the seed, its step and the mixture in force alone, so that a resumed run sees the same ones.
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

from pixelis.actors import report
from pixelis.actors.batch_sources import BatchSource
from pixelis.actors.rollouts import StepResult
from pixelis.actors.weights import WeightPublisher
from pixelis.config import Config
from pixelis.datasets.curriculum import LEVELS, Curriculum, Event, Mixture
from pixelis.errors import DataFailure
from pixelis.evaluation.metrics import summarise
from pixelis.policy.distributed import sum_over_workers
from pixelis.policy.model_path import resolve
from pixelis.policy.samples import LearnerBatch, TrainSample

if TYPE_CHECKING:
    from pixelis.actors.placement import Actors
    from pixelis.policy.train_step import Trainer

NAMED = 5
"""Demonstrations that an error about too many unusable ones names."""


@ray.remote(num_cpus=0, max_concurrency=64)
class Schedule:
    """The curriculum of a run and the mixtures that were in force, by evaluation."""

    def __init__(self, config: Config):
        self.settings, self.every = config.sft.curriculum, config.sft.evaluate_every
        self.curriculum = Curriculum(self.settings)
        self.mixtures: dict[int, Mixture] = {}
        self.changed = asyncio.Condition()

    async def begin(self, step: int, state: dict[str, Any]) -> dict[str, float]:
        """(Re)start at ``step`` from the state of a checkpoint, empty for a new run."""
        self.curriculum = Curriculum(self.settings)
        self.curriculum.load_state_dict(state)
        async with self.changed:
            self.mixtures = {k: mixture for k, mixture in self.mixtures.items() if k < step // self.every}
            self.mixtures[step // self.every] = self.curriculum.mixture
            self.changed.notify_all()
        return self.curriculum.metrics()

    async def mixture(self, step: int) -> Mixture:
        """The mixture of batch ``step``, as soon as the evaluation that decides it is done."""
        number = step // self.every
        async with self.changed:
            await self.changed.wait_for(lambda: number in self.mixtures)
            return self.mixtures[number]

    async def evaluated(self, step: int, loss: float, accuracy: float | None) -> tuple[Event | None, dict[str, float]]:
        """An evaluation after ``step`` steps: what follows from it, and the metrics."""
        event = self.curriculum.evaluated(step, loss, accuracy)
        async with self.changed:
            self.mixtures[step // self.every] = self.curriculum.mixture
            self.changed.notify_all()
        return event, self.curriculum.metrics(event)

    async def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self.curriculum.state_dict()


class DemonstrationSource(BatchSource):
    """Batches of demonstrations by Ray Data, whose dataset begins with step ``start``.

    ``evaluation`` looks at the policy every ``sft.evaluate_every`` steps; ``schedule`` decides the mixture after each look.
    """

    kind: Literal["sft", "policy"] = "sft"

    def __init__(self, config: Config, start: int, steps: int, schedule: ActorHandle | None = None, actors: Actors | None = None):
        self.config, self.start, self.steps, self.schedule = config, start, steps, schedule
        store = actors.store if actors is not None else None
        self.weights = WeightPublisher(store, "sft", every=config.sft.evaluate_every or 1)
        self.evaluation = HeldOut(config, actors.coordinator if actors is not None else None)
        self.curriculum: dict[str, float] = {}
        self.unusable = 0

    def prepare(self, step: int) -> None:
        """Let this worker's first batch be prepared; one restarted within a run passes over what its checkpoint has learnt."""
        import ray.train

        context = ray.train.get_context()
        batches = ray.train.get_dataset_shard(f"train-{context.get_world_rank()}").iter_batches(
            batch_size=self.config.sft.batch // context.get_world_size(),
            batch_format="numpy",
            # What is fetched ahead is waited for, and after the last batch before an evaluation there is nothing yet.
            prefetch_batches=0 if self.schedule is not None else 1,
        )
        self.batches = itertools.islice(batches, step - self.start, None)
        self.first: Future | None = ThreadPoolExecutor(1).submit(next, self.batches, None)

    def begin(self, state: dict[str, Any]) -> None:
        """Tell the schedule where it stands, and publish the weights that episodes are answered with."""
        self.unusable = state.get("unusable", 0)
        if self.schedule is not None and self.rank == 0:
            self.curriculum = ray.get(self.schedule.begin.remote(self.trainer.batches, state.get("curriculum", {})))
        version = self.weights.publish(self.trainer, {}, restart=True)
        if version is not None:
            ray.get(version)
        if self.config.sft.evaluate_every:
            self.evaluation.load(self.rank, self.world)

    def next(self) -> LearnerBatch | None:
        """The demonstrations of this batch; DataFailure when more than ``data.max_bad_rows`` could not be played."""
        from pixelis.datasets.demonstration_stream import samples_of

        if (step := self.trainer.batches) >= self.steps:
            return None
        rows, self.first = self.first.result() if self.first is not None else next(self.batches, None), None
        if rows is None:
            return None
        levels = Counter(rows["level"].tolist())
        errors = [text for text in rows["error"] if text]
        *counts, failed = sum_over_workers([*(float(levels[level]) for level in LEVELS), float(len(errors))])
        self.unusable += int(failed)
        self._check(errors)
        metrics = {f"curriculum/count_{level}": n for level, n in zip(LEVELS, counts, strict=True)} if any(counts) else {}
        metrics |= {**self.curriculum, "data/unusable": float(self.unusable)}
        if self.rank == 0:
            with (Path(self.config.run.dir) / "consumed.jsonl").open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"step": step, "ids": rows["id"].tolist()}) + "\n")
        return LearnerBatch(step, samples_of(rows), "sft", metrics, {"unusable": self.unusable})

    def _check(self, errors: list[str]) -> None:
        most = self.config.data.max_bad_rows
        allowed = most if most >= 1 else most * self.steps * self.config.sft.batch
        if self.unusable > allowed:
            examples = "; ".join(text.partition("\n")[2] for text in errors[:NAMED]) or "on another learner"
            raise DataFailure(
                f"{self.unusable} demonstrations cannot be played, more than data.max_bad_rows={most:g}: {examples}",
                code=errors[0].partition("\n")[0] if errors else "unusable",
                fix="mend or remove them, or raise data.max_bad_rows",
            )

    def done(self, batch: LearnerBatch, version: ray.ObjectRef | None, metrics: dict[str, float]) -> StepResult:
        """Evaluate when it is due and let the schedule decide what comes next, which the batches after it wait for."""
        done, every = batch.step + 1, self.config.sft.evaluate_every
        if not every or done % every:
            return StepResult()
        results = self.evaluation.loss(self.trainer)
        if self.rank:
            return StepResult()
        if version is not None:
            results |= self.evaluation.episodes(done, ray.get(version), last=done == self.steps)
        if self.schedule is not None:
            decision = self.schedule.evaluated.remote(done, results["evaluate/loss"], results.get("evaluate/accuracy"))
            event, now = ray.get(decision)
            self.curriculum = {**now, "curriculum/event": 0.0}
            results |= {"curriculum/event": now["curriculum/event"]} if event else {}
        return StepResult(results)

    def state(self) -> dict[str, Any]:
        """The curriculum's state."""
        return {"curriculum": ray.get(self.schedule.state.remote())} if self.schedule is not None else {}


class HeldOut:
    """Evaluations during SFT: loss on held-out demonstrations, and with a Coordinator the accuracy of real episodes."""

    def __init__(self, config: Config, coordinator: ActorHandle | None):
        self.config, self.coordinator = config, coordinator
        self.samples: list[tuple[str, TrainSample]] = []

    def load(self, rank: int, world: int) -> None:
        """Read this worker's share of the validation demonstrations with their levels, of the kinds that are learnt."""
        from pixelis.datasets.demonstration_stream import demonstrations, played
        from pixelis.datasets.demonstrations import Player

        player, count = Player(self.config, str(resolve(self.config.policy.model))), self.config.sft.validation_size
        source = demonstrations(self.config, self.config.sft.validation, count)
        rows = itertools.islice((row for row in source if row.kind in self.config.sft.kinds), count)
        self.samples = [(row.level or "", played(player, row)) for row in itertools.islice(rows, rank, None, world)]

    def loss(self, trainer: Trainer) -> dict[str, float]:
        """Mean negative log-likelihood of the held-out tokens, of all and by level; called on all workers together."""
        sums = dict.fromkeys(["", *LEVELS], (0.0, 0))
        for (level, _), values in zip(self.samples, trainer.log_probs([sample for _, sample in self.samples]), strict=True):
            for name in {"", level}:
                sums[name] = (sums[name][0] - float(values.sum(dtype="float64")), sums[name][1] + len(values))
        flat = sum_over_workers([float(value) for pair in sums.values() for value in pair])
        means = {name: nll / tokens for name, nll, tokens in zip(sums, flat[::2], flat[1::2], strict=True) if tokens}
        if "" not in means:
            raise DataFailure(f"{self.config.sft.validation} gave no demonstration to evaluate on", fix="set sft.validation")
        return {f"evaluate/loss{'_' + name if name else ''}": mean for name, mean in means.items()}

    def episodes(self, step: int, version: int, last: bool) -> dict[str, float]:
        """Held-out questions answered by ``version``, operations executed: accuracy of all and by level."""
        config = self.config
        if self.coordinator is None:
            return {}
        request = (config.data.evaluate, config.sft.evaluate_episodes, version, config.evaluate.operations)
        groups, views = ray.get(self.coordinator.evaluate.remote(*request))
        summary = summarise(groups)
        page = report.sample(config, step, summary, groups, views)
        if page is not None and last:
            ray.wait([page])  # a task ends with the process that started it
        metrics = {f"evaluate/{key}": summary[key] for key in ("accuracy", "rapr", "tool_error_rate", "turns")}
        for level in LEVELS:
            of_level = summarise([group for group in groups if group.question.meta.get("level") == level])
            if of_level["accuracy"] is not None:
                metrics[f"evaluate/accuracy_{level}"] = of_level["accuracy"]
        return {name: value for name, value in metrics.items() if value is not None}
