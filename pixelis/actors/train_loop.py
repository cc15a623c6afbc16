"""The one training loop of the project: Ray Train runs it on every learner worker.

SFT, RFT, TTRL and evolution differ in the source of their batches and in what is done after each; see
``batch_sources``.
"""

from __future__ import annotations

from pixelis.actors.train_job import Checkpoints, StepLog, TrainJob


def train_loop(job: TrainJob) -> None:
    """Train to the end of ``job.source``, from the last complete checkpoint in ``run.dir``."""
    trainer, state = job.start_or_resume()
    checkpoints, log = Checkpoints(job, trainer), StepLog(job, trainer)
    # SFT: demonstrations; RFT, TTRL: rollouts; evolution: update tasks
    with job.source.open(trainer, state) as batches:
        for batch in batches:  # ends after the last step, or when asked to stop
            metrics = trainer.step(batch)  # mini-batches and epochs over the batch are the trainer's
            # Generators load it while the next batch is awaited
            version = job.source.weights.publish(trainer, metrics)
            # Admits new prompts; rewards advance; evaluation is started
            result = job.source.done(batch, version, metrics)
            log.write({**batch.metrics, **metrics, **result.metrics})
            checkpoints.save_if_due(batch, result.boundary)
    checkpoints.save_last()
    job.source.weights.close()
    log.close()
    trainer.close()
