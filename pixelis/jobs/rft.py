"""Reinforcement fine-tuning: rollouts with pixel operations, group-relative advantages, small policy updates.

    Coordinator -> Generator (+ Toolbox) -> Scorer -> advantages -> Learner -> PolicyStore -> Generator -> ...

Result: checkpoints and policy versions in run.dir, every step in run.dir/events.jsonl. Re-running resumes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pixelis.actors import cluster, learner
from pixelis.config import Config, from_command_line
from pixelis.jobs.driver import driver, last_step, made_steps, run_folder, watch
from pixelis.jobs.dry_run import checks

SHOWN = ("reward/total", "train/accuracy", "rollout/rapr", "rollout/calls", "rollout/seconds", "learner/seconds")


def run(config: Config, actors: cluster.Actors, over: Callable[[], bool] = lambda: False) -> Path:
    """Train to ``rft.steps`` or to a stop, on actors that are already placed; returns the last checkpoint.

    ``over`` is asked every second: True ends the run after the step that is being made.
    """
    stream = learner.GroupStream(actors.coordinator, actors.store, "rft", config.rft.steps, config.rft)

    def poll() -> tuple[int, dict[str, Any]]:
        if over():
            actors.coordinator.stop.remote()
        return last_step(Path(config.run.dir), "step/policy", SHOWN)

    return made_steps(
        watch(
            config,
            "rft",
            config.rft.steps,
            lambda: learner.fit(config, stream, loss=config.rft.loss, temperature=config.rft.sampling.temperature),
            poll,
            stop=actors.coordinator.stop.remote,
        )
    )


def main() -> None:
    """Entry point of `python -m pixelis.jobs.rft`."""
    config = from_command_line(__doc__, "rft", default="configs/nano/rft.yaml", check=checks("rft"))
    with (
        driver("rft"),
        run_folder(config, config.data.train),
        cluster.placed(config, initial=config.policy.adapter) as actors,
    ):
        print(f"checkpoint: {run(config, actors)}")


if __name__ == "__main__":
    main()
