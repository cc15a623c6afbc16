"""Supervised fine-tuning on demonstrations: Ray Data prepares them, Ray Train learns them.

Result: checkpoints in run.dir/checkpoints, each with the adapter (or the model) to start `rft` or `serve` from.
"""

from __future__ import annotations

from pathlib import Path

from pixelis.actors import cluster, learner
from pixelis.config import Config, from_command_line
from pixelis.jobs.driver import driver, last_step, made_steps, run_folder, watch
from pixelis.jobs.dry_run import checks
from pixelis.policy import checkpoint


def run(config: Config) -> Path:
    """Train to ``sft.steps`` or to a stop; returns the last checkpoint."""
    from pixelis.datasets.demonstration_stream import demonstration_stream

    with run_folder(config, learns_from=config.data.demonstrations) as folder:
        cluster.connect(config)
        cluster.preflight(config, learner=True, rollouts=False)
        latest = checkpoint.latest(folder)
        start = checkpoint.step_of(latest) if latest else 0
        datasets = {"train": demonstration_stream(config, start)}
        return made_steps(
            watch(
                config,
                "sft",
                config.sft.steps,
                lambda: learner.fit(config, learner.DemonstrationStream(config, start), datasets=datasets),
                lambda: last_step(folder, "step/sft", ("policy/loss",)),
            )
        )


def main() -> None:
    """Entry point of `python -m pixelis.jobs.sft`."""
    config = from_command_line(__doc__, "sft", default="configs/nano/sft.yaml", check=checks("sft"))
    with driver("sft"):
        print(f"checkpoint: {run(config)}")


if __name__ == "__main__":
    main()
