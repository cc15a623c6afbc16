"""Context of the training loop: the learner's job, its checkpoints and its log."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pixelis.actors.batch_sources import BatchSource
from pixelis.config import Config, CriticConfig, LossConfig
from pixelis.dialogue.dialects import offered
from pixelis.policy import checkpoint
from pixelis.policy.adapters import load_adapter
from pixelis.policy.distributed import sum_over_workers
from pixelis.policy.samples import LearnerBatch
from pixelis.telemetry import events, lineage
from pixelis.telemetry.diagnosis import Alarms
from pixelis.telemetry.events import STAGE, EventLog, mark_replayed
from pixelis.telemetry.metrics import publish
from pixelis.telemetry.trackers import Tracker

if TYPE_CHECKING:
    from ray.train import PreemptionInfo

    from pixelis.policy.train_step import Trainer


@dataclass
class TrainJob:
    """Job of every learner worker.

    ``temperature`` is that of the rollouts; ``ema`` the decay of the published weight average; ``lr``
    overrides ``learner.lr``; ``critic`` is that of PPO; ``background``: others on the machine come first.
    """

    config: Config
    source: BatchSource
    loss: LossConfig = field(default_factory=LossConfig)
    temperature: float = 1.0
    ema: float = 0.0
    lr: float | None = None
    critic: CriticConfig | None = None
    background: bool = False

    def start_or_resume(self) -> tuple[Trainer, dict[str, Any]]:
        """Trainer at the last complete checkpoint, if there is one, and the source state from it."""
        config, latest = self.config, checkpoint.latest_of_workers(self.config.run.dir)
        batches = checkpoint.step_of(latest) if latest is not None else 0
        self.source.prepare(batches)
        stages = EventLog(config.run.dir)
        stages.write(STAGE, name="importing torch and DeepSpeed")
        from pixelis.policy.train_step import Trainer

        stages.write(STAGE, name=f"loading {config.policy.model}")

        r, learner = config.rft, config.learner
        minibatches, epochs = (r.minibatches, r.epochs_per_batch) if self.source.kind == "policy" else (1, 1)
        trainer = Trainer(
            config.policy,
            learner.model_copy(update={"lr": self.lr or learner.lr}),
            self.loss,
            total_steps=self.source.steps * minibatches * epochs,
            seed=config.run.seed,
            temperature=self.temperature,
            adapter=load_adapter(config.policy.adapter) if config.policy.adapter else None,
            label_smoothing=config.sft.label_smoothing,
            ema=self.ema,
            minibatches=minibatches,
            epochs=epochs,
            critic=self.critic,
        )
        state = trainer.restore(latest, verify=False) if latest is not None else {}
        trainer.batches = batches
        if trainer.is_first:
            mark_replayed(config.run.dir, batches)
        stages.write(STAGE, name="waiting for the first batch")
        stages.close()
        return trainer, state


class Checkpoints:
    """Writes ``run.dir/checkpoints`` every ``learner.checkpoint_every`` batches, at the end, and when Ray announces
    that a learner's node will be taken away. Collective.

    Writing overlaps with the next batches; its failure ends the run at the next checkpoint. The one with the
    best evaluation is kept and linked as ``run.dir/best``.
    """

    def __init__(self, job: TrainJob, trainer: Trainer):
        self.config, self.source, self.trainer = job.config, job.source, trainer
        self.saved = trainer.batches
        self.state: dict[str, Any] = {}
        self.leaving: PreemptionInfo | None = None
        """The first announcement of a node's end, after which Ray Train starts the workers anew."""

    def save_if_due(self, batch: LearnerBatch, boundary: str | None) -> None:
        """Save after ``batch`` if due. ``boundary`` names an additional checkpoint in ``run.dir/phases``."""
        self.state = batch.state
        if self.trainer.batches % self.config.learner.checkpoint_every == 0 or self._node_leaves():
            self._save(self.config.run.dir)
            self.saved = self.trainer.batches
        if sum_over_workers([float(boundary is not None)])[0]:
            self._save(str(Path(self.config.run.dir) / "phases" / (boundary or "")))

    def _node_leaves(self) -> bool:
        """Whether a learner's node is drained or reclaimed, as spot capacity is; True only once."""
        from ray.train import get_preemption_info

        if self.leaving is None:
            self.leaving = get_preemption_info()
            return self.leaving is not None
        return False

    def save_last(self) -> None:
        if self.trainer.batches > self.saved:
            self._save(self.config.run.dir)
        self.trainer.writer.wait()
        if self.trainer.is_first:
            self._link_best()

    def _save(self, folder: str) -> None:
        state = self.state | (self.source.state() if self.trainer.is_first else {})
        best = self._link_best() if self.trainer.is_first else None
        origin = lineage.of_checkpoint(folder)
        self.trainer.save(folder, state, name=self.trainer.batches, lineage=origin, best=best, wait=False)

    def _link_best(self) -> int | None:
        best = best_step(self.config.run.dir)
        if best is not None:
            checkpoint.link_best(self.config.run.dir, best)
        return best


def best_step(run_dir: str) -> int | None:
    """Step of the newest checkpoint with the highest accuracy, or else the lowest loss, in an evaluation."""
    saved, scores = checkpoint.steps(run_dir), dict[str, dict[int, float]](accuracy={}, loss={})
    for event in events.read(run_dir, "evaluation") + events.read(run_dir, "step/sft"):
        for name, values in scores.items():
            value = event.get(f"evaluate/{name}")
            if isinstance(value, int | float) and event["step"] in saved:
                values[event["step"]] = value if name == "accuracy" else -value
    values = scores["accuracy"] or scores["loss"]
    return max(values, key=lambda step: (values[step], step), default=None)


class StepLog:
    """Writes the metrics of the learner's steps to the run's events, trackers and gauges, on the first worker."""

    def __init__(self, job: TrainJob, trainer: Trainer):
        self.trainer, self.kind, self.run = trainer, job.source.kind, job.config.run.name
        self.events = EventLog(job.config.run.dir) if trainer.is_first else None
        self.tracker = Tracker(job.config, trainer.batches) if trainer.is_first else None
        self.alarms = Alarms(operations=bool(offered(job.config)))

    def write(self, metrics: dict[str, float]) -> None:
        if self.events is None or self.tracker is None:
            return
        step = self.trainer.batches
        self.events.write(f"step/{self.kind}", step=step, **metrics)
        for text in self.alarms.check(step, metrics):
            self.events.write(events.ALARM, step=step, text=text)
        self.tracker.log(step, metrics)
        publish(metrics, {"run": self.run})

    def close(self) -> None:
        if self.events is not None and self.tracker is not None:
            self.events.close()
            self.tracker.close()
