"""Learner workers: Ray Train runs them, DeepSpeed updates the policy, a stream says what to learn from.

One loop for all streams: take a batch, make one optimizer step, publish the weights, now and then a checkpoint. A restarted
worker goes on from the last complete checkpoint in ``run.dir``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import ray
from ray.actor import ActorHandle

from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.rollouts import RolloutBatch, StepResult
from pixelis.config import Config, Evolution, Loss, Rft
from pixelis.errors import DataFailure, InfraFailure
from pixelis.evolution.updates import elected
from pixelis.policy import checkpoint
from pixelis.policy.adapters import load_adapter
from pixelis.policy.advantages import assign_advantages
from pixelis.policy.distributed import place, sum_over_workers
from pixelis.policy.samples import TrainSample, from_trajectory
from pixelis.records import Group
from pixelis.telemetry import lineage
from pixelis.telemetry.events import EventLog
from pixelis.telemetry.metrics import Tracker, publish

ENDLESS = 10**9
"""Steps of a stream that ends when its source says so."""


@dataclass
class Work:
    """One rank's samples of one optimizer step, what is known about them, and the stream's state to keep in a checkpoint."""

    samples: list[TrainSample]
    metrics: dict[str, float]
    state: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    """What ``Trainer.step`` is told beside the samples."""
    kind: Literal["sft", "policy"] | None = None
    """How they are learnt from, where that is not the stream's way."""


class Stream(Protocol):
    """Where a learner's batches come from and where its weights go."""

    kind: Literal["sft", "policy"]
    steps: int

    def open(self, step: int) -> None:
        """Called in every rank before the policy is loaded: what needs no weights begins meanwhile."""

    def begin(self, step: int, trainer: Any, state: dict[str, Any]) -> None:
        """Called once in every rank before step ``step``, with the state kept in the checkpoint."""

    def next(self, step: int) -> Work | None:
        """This rank's share of batch ``step``; None ends the run."""

    def done(self, step: int, trainer: Any, metrics: dict[str, float]) -> StepResult:
        """Called in every rank after the optimizer step that used batch ``step``; returns what else is known by then."""
        ...

    def keep(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the state of the last batch; asked of the first rank only."""
        ...


class GroupStream:
    """Groups of scored trajectories from an actor that hands out batches, such as the Coordinator.

    With ``rft`` a KL that it takes off the reward is measured here, where the reference weights are.
    """

    kind: Literal["sft", "policy"] = "policy"

    def __init__(self, source: ActorHandle, store: ActorHandle, stage: str, steps: int, rft: Rft | None = None):
        self.source, self.store, self.stage, self.steps, self.rft = source, store, stage, steps, rft

    def open(self, step: int) -> None:
        """Nothing: a batch is rolled out by the weights of its step."""

    def begin(self, step: int, trainer: Any, state: dict[str, Any]) -> None:
        """Publish what the checkpoint holds and let the source start there."""
        self.rank, self.world = place()
        self.trainer, adapter = trainer, trainer.adapter()
        if self.rank == 0:
            version = ray.get(self.store.publish.remote(adapter, self.stage, step, restart=True))
            ray.get(self.source.begin.remote(step, state, version))

    def next(self, step: int) -> Work | None:
        """This rank's groups of the batch, as samples whose views are read from the object store."""
        batch = ray.get(self.source.next_batch.remote(self.rank, self.world, step))
        if batch is None:
            return None
        self.take_up(batch.restore)
        views = ray.get(batch.views)
        samples = _samples(batch.groups, views)
        metrics = batch.metrics
        if self.rft is not None and (loss := self.rft.loss).kl > 0 and loss.kl_in == "reward":
            divergence = iter(self.trainer.kl_to_reference(samples))
            kl = [[(next(divergence) or 0.0) if t.advantage is not None else 0.0 for t in g.trajectories] for g in batch.groups]
            metrics = metrics | assign_advantages(
                batch.groups, self.rft.advantage, greedy=batch.greedy, kl=kl, kl_weight=loss.kl, sum_workers=sum_over_workers
            )
            samples = _samples(batch.groups, views)
        return self.work(batch, views, Work(samples, metrics, batch.state, batch.options))

    def work(self, batch: RolloutBatch, views: list[dict[str, Any]], work: Work) -> Work:
        """What becomes of a batch's samples before they are learnt from: nothing here."""
        return work

    def take_up(self, version: int | None) -> None:
        """Go on from the weights of ``version``, unless that is None. All ranks are told the same."""
        if version is not None:
            (ref,) = ray.get(self.store.get.remote(version))
            self.trainer.go_back(ray.get(ref))

    def done(self, step: int, trainer: Any, metrics: dict[str, float]) -> StepResult:
        """Publish the new weights and let the generators load them."""
        adapter = trainer.adapter()
        if self.rank:
            return StepResult()
        version = ray.get(self.store.publish.remote(adapter, self.stage, step + 1, metrics))
        return ray.get(self.source.stepped.remote(step, version))

    def keep(self) -> dict[str, Any]:
        """What the source adds to a checkpoint."""
        return ray.get(self.source.keep.remote())


class TrafficStream(GroupStream):
    """Groups from the Evolution actor, without end. Every ``every``-th update is published as a candidate; Evolution decides.

    What a checkpoint holds may have been refused or withdrawn since: a learner that starts says which promoted version its
    weights come from, and is sent back when another one is promoted by then.
    """

    def __init__(self, source: ActorHandle, store: ActorHandle, settings: Evolution):
        super().__init__(source, store, stage="evolve", steps=ENDLESS)
        self.settings = settings
        self.every = settings.canary.every if settings.canary.enabled else 1

    def begin(self, step: int, trainer: Any, state: dict[str, Any]) -> None:
        """Start from what is promoted; where nothing was learnt yet that is the starting policy, kept as a version."""
        self.rank, self.world = place()
        self.trainer, adapter, self.unpublished = trainer, trainer.served(), 0
        if self.rank == 0:
            version = ray.get(self.store.promoted.remote())
            if step == 0 and version == 0:
                version = ray.get(self.store.publish.remote(adapter, self.stage, step))
                state = {"base": version}
            ray.get(self.source.begin.remote(step, state, version))

    def take_up(self, version: int | None) -> None:
        """As for all streams; what was not published is gone then."""
        super().take_up(version)
        if version is not None:
            self.unpublished = 0

    def next(self, step: int) -> Work | None:
        """This rank's groups of the batch; at the end of the traffic what was learnt last is published as well."""
        work = super().next(step)
        if work is None and self.unpublished:
            version = self._publish(step, {})
            if self.rank == 0:
                ray.get(self.source.candidate.remote(version))
        return work

    def work(self, batch: RolloutBatch, views: list[dict[str, Any]], work: Work) -> Work:
        """With objective=answer: every episode with the elected answer at its end, weighted; what was written guards the step."""
        if self.settings.objective == "policy":
            return work
        samples = []
        for group, shown in zip(batch.groups, views, strict=True):
            for trajectory, agreed in elected(group.trajectories, group.question.meta["pseudo_label"]):
                sample = from_trajectory(trajectory, shown[trajectory.id])
                last = len(trajectory.turns[-1].tokens)
                sample.weights = sample.mask * np.float32(self.settings.call_weight * agreed)
                sample.weights[-last:] = sample.mask[-last:]
                samples.append(sample)
        return Work(samples, work.metrics, work.state, {**work.options, "wrote": work.samples}, kind="sft")

    def done(self, step: int, trainer: Any, metrics: dict[str, float]) -> StepResult:
        """Count the update and publish it when it is its turn.

        Also when one went too far to be taken: those before it take up the room that there is up to the served policy.
        """
        skipped = bool(metrics.get("evolve/skipped"))
        self.unpublished += not skipped
        due = self.unpublished >= self.every or (skipped and self.unpublished > 0)
        version = self._publish(step + 1, metrics) if due else None
        if self.rank:
            return StepResult()
        return ray.get(self.source.stepped.remote(step, version, metrics))

    def _publish(self, step: int, metrics: dict[str, float]) -> int | None:
        """The version that these weights become; None in all ranks but the first."""
        adapter, self.unpublished = self.trainer.served(), 0
        if self.rank:
            return None
        return ray.get(self.store.publish.remote(adapter, self.stage, step, metrics, promote=False))


def _samples(groups: list[Group], views: list[dict[str, Any]]) -> list[TrainSample]:
    """What is trained on: every trajectory that has an advantage."""
    return [
        from_trajectory(trajectory, shown[trajectory.id])
        for group, shown in zip(groups, views, strict=True)
        for trajectory in group.trajectories
        if trajectory.advantage is not None
    ]


def work(job: dict[str, Any]) -> None:
    """What every Ray Train worker runs; ``job`` holds ``config`` and ``stream``, and what its kind of learning sets."""
    config: Config = job["config"]
    stream: Stream = job["stream"]
    latest = checkpoint.latest(config.run.dir)
    step = saved = checkpoint.step_of(latest) if latest is not None else 0
    stream.open(step)
    from pixelis.policy.train_step import Trainer

    parts = config.rft.minibatches if stream.kind == "policy" else 1
    trainer = Trainer(
        config.policy,
        config.learner.model_copy(update={"lr": job["lr"]}),
        job["loss"],
        total_steps=stream.steps * parts,
        seed=config.run.seed,
        temperature=job["temperature"],
        adapter=load_adapter(config.policy.adapter) if config.policy.adapter else None,
        label_smoothing=config.sft.label_smoothing,
        ema=job["ema"],
    )
    state = trainer.restore(latest) if latest is not None else {}

    def save(folder: str) -> None:
        kept = stream.keep() if trainer.is_first else {}
        trainer.save(folder, {**state, **kept}, name=step, lineage=lineage.of_checkpoint(folder))

    log, tracker = EventLog(config.run.dir), Tracker(config) if trainer.is_first else None
    stream.begin(step, trainer, state)
    while not asked_to_stop(config) and (item := stream.next(step)) is not None:
        metrics = {**item.metrics, **learn(trainer, stream, item, parts)}
        state = item.state
        told = stream.done(step, trainer, metrics)
        metrics |= told.metrics
        step += 1
        if tracker is not None:
            log.write(f"step/{stream.kind}", step=step, **metrics)
            tracker.log(step, metrics)
            publish(metrics, {"run": config.run.name})
        if step % config.learner.checkpoint_every == 0:
            save(config.run.dir)
            saved = step
        if sum_over_workers([float(told.boundary is not None)])[0]:
            save(str(Path(config.run.dir) / "phases" / (told.boundary or "")))
    if step > saved:
        save(config.run.dir)
    log.close()
    if tracker is not None:
        tracker.close()
    trainer.close()


def learn(trainer: Any, stream: Stream, item: Work, parts: int) -> dict[str, float]:
    """One update from a batch; metrics. Traffic without a usable sample is skipped, in all ranks: it must not end a service."""
    try:
        return update(trainer, item.samples, item.kind or stream.kind, parts, item.options)
    except DataFailure as error:
        if error.code != "no_usable_sample" or not isinstance(stream, TrafficStream):
            raise
        return {"evolve/skipped": 1.0}


def update(
    trainer: Any, samples: list[TrainSample], kind: Literal["sft", "policy"], parts: int, options: dict[str, Any]
) -> dict[str, float]:
    """Learn from a batch in ``parts`` optimizer steps; the ratio of each is to the weights before the first. Metrics of all."""
    if parts == 1:
        return trainer.step(samples, kind, **options)
    old = trainer.log_probs(samples)
    found = []
    for part in range(parts):
        mine = slice(part, None, parts)
        if sum_over_workers([float(len(samples[mine]))])[0]:
            found.append(trainer.step(samples[mine], kind, old=old[mine], **options))
    return combined(found)


SUMMED = ("learner/tokens", "learner/sequences", "learner/trained_sequences", "learner/micro_batches", "learner/seconds")


def combined(found: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps as one: counts are summed, largest values and running counts stay, others are means.

    A step without a trained sample has fewer metrics and does not count in the means of those it lacks.
    """
    out = {}
    for name in {name: None for metrics in found for name in metrics}:
        values = [metrics[name] for metrics in found if name in metrics]
        if name in SUMMED or name.startswith("learner/dropped_"):
            out[name] = sum(values)
        elif name.endswith("_max") or name == "learner/skipped":
            out[name] = max(values)
        else:
            out[name] = sum(values) / len(values)
    return out


def asked_to_stop(config: Config) -> bool:
    """True in every rank once any of them sees the file ``run.dir/STOP``."""
    return sum_over_workers([float((Path(config.run.dir) / "STOP").exists())])[0] > 0


def fit(
    config: Config,
    stream: Stream,
    *,
    lr: float | None = None,
    loss: Loss | None = None,
    temperature: float = 1.0,
    ema: float = 0.0,
    datasets: dict[str, Any] | None = None,
) -> Path | None:
    """Run the learner to the end of its stream; returns the last checkpoint of the run, None when there is no step in it.

    ``temperature`` is the one the stream's rollouts are sampled at; ``loss`` is that of policy updates; ``ema`` the decay of the
    average of weights that is published.
    Raises the error that stopped it.
    """
    import ray.train
    from ray.data import ExecutionOptions
    from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    learner = config.learner
    done = checkpoint.latest(config.run.dir)
    if done is not None and checkpoint.step_of(done) >= stream.steps:
        return done
    trainer = TorchTrainer(
        work,
        train_loop_config={
            "config": config,
            "stream": stream,
            "lr": lr or learner.lr,
            "loss": loss or Loss(),
            "temperature": temperature,
            "ema": ema,
        },
        scaling_config=ScalingConfig(
            num_workers=learner.workers,
            use_gpu=learner.gpus > 0,
            resources_per_worker={"CPU": learner.cpus, **({"GPU": learner.gpus} if learner.gpus else {})},
        ),
        run_config=RunConfig(
            name="train",
            storage_path=str(Path(config.run.dir).resolve()),
            failure_config=FailureConfig(max_failures=learner.max_failures),
        ),
        torch_config=TorchConfig(backend="nccl" if learner.gpus else "gloo"),
        datasets=datasets or {},
        # Each worker has a dataset of its own, which is not split. Train does not take the options that it was made with;
        # resuming by number needs its order.
        dataset_config=DataConfig([], ExecutionOptions(preserve_order=True)),
    )
    try:
        trainer.fit()
    except ray.train.v2.api.exceptions.TrainingFailedError as error:
        found = unwrap_ray_error(error)
        if found is None:
            last = str(error).strip().splitlines()[-1]
            found = InfraFailure(f"training failed: {last}", fix="see the worker logs of the Ray session")
        raise found from error
    return checkpoint.latest(config.run.dir)
