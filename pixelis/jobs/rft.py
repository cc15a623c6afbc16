"""Reinforcement fine-tuning: rollouts with pixel operations, group-relative advantages, small policy updates.

    Coordinator -> Generator (+ Toolbox) -> Scorer -> advantages -> Learner -> PolicyStore -> Generator -> ...

Result: checkpoints and policy versions in run.dir, every step in run.dir/events.jsonl. Re-running resumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pixelis.actors import learner, placement, reservations
from pixelis.actors.agent_rollouts import HTTP
from pixelis.actors.agent_runner import load_agent
from pixelis.actors.batch_sources import RolloutSource
from pixelis.actors.train_job import TrainJob
from pixelis.actors.weights import publisher_for
from pixelis.config import Config
from pixelis.config.rewards import LABELLED
from pixelis.datasets.labels import drop_labels
from pixelis.datasets.questions import count_questions
from pixelis.errors import BadConfig
from pixelis.jobs import dry_run
from pixelis.jobs.driver import job, run_folder
from pixelis.jobs.watch import latest_step, require_checkpoint, stop_s, watch

if TYPE_CHECKING:
    from pixelis.policy.estimate import Finding

SHOWN = (
    "reward/total",
    "train/accuracy",
    "rollout/rapr",
    "rollout/calls",
    "rollout/seconds",
    "learner/seconds",
    "teacher/seconds",
)


def run(config: Config, actors: placement.Actors, should_stop: Callable[[], bool] = lambda: False) -> Path:
    """Train to ``rft.steps`` or until ``should_stop``, polled every second; returns the last checkpoint."""
    publisher = publisher_for(config, actors.store, "rft")
    source = RolloutSource(config, actors.coordinator, publisher, actors.teachers)
    critic = config.rft.critic if config.rft.advantage.baseline == "critic" else None
    train_job = TrainJob(
        config, source, loss=config.rft.loss, temperature=config.rft.sampling.temperature, critic=critic
    )

    def poll() -> tuple[int, dict[str, Any]]:
        if should_stop():
            actors.coordinator.stop.remote(evaluations=False)
        return latest_step(Path(config.run.dir), "step/policy", SHOWN)

    return require_checkpoint(
        watch(
            config,
            "rft",
            config.rft.steps,
            lambda: learner.fit(train_job, name=actors.name),
            poll,
            stop=actors.coordinator.stop.remote,
            grace_s=stop_s(),
        )
    )


def checked(config: Config) -> Config:
    """The configuration; BadConfig for an agent that cannot be imported, or if groups are filtered by true answers,
    which are cut off as no reward uses any.
    """
    if config.rft.agent not in (None, HTTP):
        load_agent(config.rft.agent)
    if config.rft.filter.key in LABELLED and not config.labelled:
        raise BadConfig(
            f"rft.filter.key={config.rft.filter.key} needs true answers, which no reward uses",
            fix="set rft.filter.key=majority_vote or none, or reward them (rewards.weights.accuracy)",
        )
    return config


def with_steps(config: Config) -> Config:
    """Convert ``rft.epochs`` to ``rft.steps`` by counting the questions. BadConfig for an endless source."""
    rft = config.rft
    if not rft.epochs:
        return config
    on_labels = None if config.labelled else drop_labels
    questions = count_questions(config.data.train, config.data.limit, config.data.max_bad_rows, on_labels)
    steps = math.ceil(rft.epochs * questions / rft.prompts_per_step)
    print(f"rft.epochs={rft.epochs:g}: {steps} steps of {rft.prompts_per_step} from {questions} questions")
    return config.changed({"rft.steps": steps})


def needs(config: Config) -> list[reservations.Need]:
    return reservations.needs(config, learner=True, rollouts=True)


def inputs(config: Config) -> Iterator[dry_run.Input]:
    player = dry_run.player_of(config)
    yield from dry_run.policy_inputs(config, trains=True)
    yield from dry_run.teacher_inputs(config)
    yield dry_run.question_input(config, "data.train", config.data.train, player=player)
    if config.rft.evaluate_every or config.rft.evaluate_first:
        yield from dry_run.held_out_inputs(config, config.held_out, player)


def findings(config: Config) -> list[Finding]:
    from pixelis.jobs import plan

    estimated = dry_run.findings(config, "rft", needs(config), dry_run.prompts(config))
    return [*estimated, *plan.rewards(config)]


def check(config: Config) -> None:
    checked(config)
    dry_run.check("rft", config, inputs(config), findings(config))


def start(config: Config) -> Path:
    """Place the actors in run.dir and `run`; returns the last checkpoint."""
    with (
        run_folder(checked(config), config.data.train),
        placement.placed(planned := with_steps(config), initial=config.policy.adapter) as actors,
    ):
        return run(planned, actors)


def main() -> None:
    with job("rft", __doc__, check) as config:
        print(f"checkpoint: {start(config)}")


if __name__ == "__main__":
    main()
