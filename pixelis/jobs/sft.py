"""Supervised fine-tuning on demonstrations: Ray Data prepares them, Ray Train learns them.

Result: checkpoints in run.dir/checkpoints, each with the adapter (or the model) to start `rft` or `serve` from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.actor import ActorHandle

from pixelis.actors import cluster, learner, placement
from pixelis.actors.demonstrations import DemonstrationSource, Schedule
from pixelis.actors.train_job import TrainJob
from pixelis.config import Config, from_command_line
from pixelis.datasets.curriculum import LEVELS
from pixelis.datasets.demonstration_store import BatchSampler, DemonstrationStore
from pixelis.errors import BadConfig
from pixelis.jobs.driver import driver, latest_step, require_checkpoint, run_folder, watch
from pixelis.jobs.dry_run import checks
from pixelis.policy import checkpoint
from pixelis.telemetry.events import EventLog

STORE = "demonstrations"
"""Folder of a run with the rows it learns from."""
SHOWN = ("policy/loss", "evaluate/loss", "evaluate/accuracy", "curriculum/stage")


def run(config: Config) -> Path:
    """Train to ``sft.steps`` (or epochs) or to a stop; returns the last checkpoint."""
    from pixelis.datasets.demonstration_stream import demonstration_stream

    episodes = bool(config.sft.evaluate_every and config.sft.evaluate_episodes)
    questions = [config.data.evaluate] if episodes else []
    sources = {"demonstrations": config.data.demonstrations}
    if config.sft.evaluate_every:
        sources["validation"] = config.sft.validation
    with run_folder(config, *questions, **sources) as folder:
        latest = checkpoint.latest(folder)
        start = checkpoint.step_of(latest) if latest else 0
        draw = drawn(config, folder, resumed=latest is not None)
        steps = draw.steps(config.sft.epochs) if config.sft.epochs else config.sft.steps
        with placed(config, episodes) as actors, schedule(config) as decides:
            job = TrainJob(config, DemonstrationSource(config, start, steps, decides, actors))
            ranks, store = range(config.learner.workers if start < steps else 0), folder / STORE
            datasets = {f"train-{rank}": demonstration_stream(config, store, start, steps, rank, decides) for rank in ranks}
            return require_checkpoint(
                watch(
                    config,
                    "sft",
                    steps,
                    lambda: learner.fit(job, datasets),
                    lambda: latest_step(folder, "step/sft", SHOWN),
                )
            )


@contextmanager
def placed(config: Config, episodes: bool) -> Iterator[placement.Actors | None]:
    """A cluster, with the actors of episodes when the policy is evaluated by them."""
    if episodes:
        with placement.placed(config, initial=config.policy.adapter) as actors:
            yield actors
        return
    cluster.connect(config)
    placement.preflight(config, learner=True, rollouts=False)
    yield None


@contextmanager
def schedule(config: Config) -> Iterator[ActorHandle | None]:
    """The actor that decides about mixtures, None without a curriculum."""
    if not config.sft.curriculum.enabled:
        yield None
        return
    actor = cluster.spawn(Schedule, config)
    try:
        yield actor
    finally:
        ray.kill(actor)


def drawn(config: Config, folder: Path, resumed: bool) -> BatchSampler:
    """The demonstrations of the run: written down once, so that a resumed run finds the same, and is told when it wants others.

    Raises BadInput, before any actor is started, for demonstrations that cannot be read or lack a level that a stage draws.
    """
    from pixelis.datasets.demonstration_stream import batch_sampler, demonstrations, fill_store, store_settings

    endless = config.data.demonstrations.startswith("cards:")
    kept = resumed and not endless and (folder / STORE).is_dir()
    store = DemonstrationStore(folder / STORE) if kept else fill_store(config, folder / STORE)
    now = store_settings(config)
    if changed := [key for key, value in store.about.items() if value != now.get(key)]:
        raise BadConfig(
            f"{config.run.dir} holds a run with other demonstrations ({', '.join(changed)} changed)",
            fix="choose another run.dir, or start over with run.resume=false",
        )
    draw = batch_sampler(config, store)
    if config.sft.evaluate_every:
        next(demonstrations(config, config.sft.validation, 1), None)
    if config.sft.curriculum.enabled:
        draw.check(config.sft.curriculum.stages)
    levels = {level: len(pool) for level, pool in zip(LEVELS, draw.pools[1:], strict=True)}
    EventLog(folder).write("demonstrations", rows=len(store), used=len(draw), refused=store.refused, levels=levels)
    return draw


def main() -> None:
    """Entry point of `python -m pixelis.jobs.sft`."""
    config = from_command_line(__doc__, "sft", default="configs/nano/sft.yaml", check=checks("sft"))
    with driver("sft"):
        print(f"checkpoint: {run(config)}")


if __name__ == "__main__":
    main()
