"""Reinforcement fine-tuning: rollouts with pixel operations, group-relative advantages, small policy updates.

    Coordinator -> Generator (+ Toolbox) -> Scorer -> advantages -> Learner -> PolicyStore -> Generator -> ...

Result: checkpoints and policy versions in run.dir, every step in run.dir/events.jsonl. Re-running resumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pixelis.actors import learner, placement
from pixelis.actors.batch_sources import RolloutSource
from pixelis.actors.train_job import TrainJob
from pixelis.actors.weights import publisher_for
from pixelis.config import Config, from_command_line
from pixelis.config.rewards import LABELLED
from pixelis.datasets.labels import drop_labels
from pixelis.datasets.questions import count_questions
from pixelis.errors import BadConfig
from pixelis.jobs.driver import driver, latest_step, require_checkpoint, run_folder, stop_s, watch
from pixelis.jobs.dry_run import checks

SHOWN = ("reward/total", "train/accuracy", "rollout/rapr", "rollout/calls", "rollout/seconds", "learner/seconds")


def run(config: Config, actors: placement.Actors, should_stop: Callable[[], bool] = lambda: False) -> Path:
    """Train on placed actors to ``rft.steps`` or until stopped; returns the last checkpoint.

    ``should_stop`` is polled every second; True ends the run after the current step.
    """
    source = RolloutSource(config, actors.coordinator, publisher_for(config, actors.store, "rft"))
    critic = config.rft.critic if config.rft.advantage.baseline == "critic" else None
    job = TrainJob(config, source, loss=config.rft.loss, temperature=config.rft.sampling.temperature, critic=critic)

    def poll() -> tuple[int, dict[str, Any]]:
        if should_stop():
            actors.coordinator.stop.remote(evaluations=False)
        return latest_step(Path(config.run.dir), "step/policy", SHOWN)

    return require_checkpoint(
        watch(
            config,
            "rft",
            config.rft.steps,
            lambda: learner.fit(job, name=actors.name),
            poll,
            stop=actors.coordinator.stop.remote,
            grace_s=stop_s(),
        )
    )


def require_filter_key(config: Config) -> Config:
    """Return the configuration; BadConfig if groups are filtered by true answers although no reward uses any.

    They are cut off at the reader then, so that every group would lack the key.
    """
    if config.rft.filter.key in LABELLED and not config.rewards.labelled:
        raise BadConfig(
            f"rft.filter.key={config.rft.filter.key} needs true answers, which are cut off because no reward uses them",
            fix="set rft.filter.key=majority_vote or rft.filter.key=none, or reward them (rewards.weights.accuracy)",
        )
    return config


def with_steps(config: Config) -> Config:
    """Convert ``rft.epochs`` to ``rft.steps`` by counting the questions. Raises BadConfig for an endless source."""
    rft = config.rft
    if not rft.epochs:
        return config
    on_labels = None if config.rewards.labelled else drop_labels
    questions = count_questions(config.data.train, config.data.limit, config.data.max_bad_rows, on_labels)
    steps = math.ceil(rft.epochs * questions / rft.prompts_per_step)
    print(f"rft.epochs={rft.epochs:g}: {steps} steps of {rft.prompts_per_step} from {questions} questions")
    return config.model_copy(update={"rft": rft.model_copy(update={"steps": steps})})


def main() -> None:
    """Entry point of `python -m pixelis.jobs.rft`."""
    config = from_command_line(
        __doc__, "rft", default="configs/nano/rft.yaml", check=lambda c: checks("rft")(require_filter_key(c))
    )
    with (
        driver("rft"),
        run_folder(require_filter_key(config), config.data.train),
        placement.placed(planned := with_steps(config), initial=config.policy.adapter) as actors,
    ):
        print(f"checkpoint: {run(planned, actors)}")


if __name__ == "__main__":
    main()
