"""Supervised fine-tuning on demonstrations, prepared by Ray Data and trained on with Ray Train.

Result: checkpoints in run.dir/checkpoints, each with an adapter (or model) for `rft` and `serve`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.actor import ActorHandle

from pixelis.actors import cluster, learner, placement, reservations
from pixelis.actors.demonstrations import DemonstrationSource, Schedule
from pixelis.actors.train_job import TrainJob
from pixelis.config import Config
from pixelis.datasets.curriculum import LEVELS
from pixelis.datasets.demonstration_store import BatchSampler, DemonstrationStore
from pixelis.datasets.demonstrations import Player
from pixelis.errors import BadConfig, BadInput
from pixelis.jobs import dry_run
from pixelis.jobs.driver import job, run_folder
from pixelis.jobs.watch import latest_step, require_checkpoint, say, stop_s, watch
from pixelis.policy import checkpoint
from pixelis.policy.model_path import resolve
from pixelis.telemetry.events import EventLog

STORE = "demonstrations"
CHECKED_ROWS = 1000
"""Most demonstrations that a dry run reads, and whose turns are measured before training."""
SHOWN = ("policy/loss", "evaluate/loss", "evaluate/accuracy", "curriculum/stage")


def run(config: Config) -> Path:
    """Train to ``sft.steps`` (or epochs) or until stopped; returns the last checkpoint."""
    from pixelis.datasets.demonstration_stream import demonstration_stream

    episodes = has_episodes(config)
    questions = list(config.held_out.values()) if episodes else []
    sources = {"demonstrations": config.data.demonstrations}
    if config.sft.evaluate_every:
        sources["validation"] = config.sft.validation
    with run_folder(config, held_out=questions, sources=sources) as folder:
        latest = checkpoint.latest(folder)
        start = checkpoint.step_of(latest) if latest else 0
        sampler = prepare(config, folder, resumed=latest is not None)
        steps = sampler.steps(config.sft.epochs) if config.sft.epochs else config.sft.steps
        with placed(config, episodes) as actors, schedule(config) as mixture:
            train_job = TrainJob(config, DemonstrationSource(config, start, steps, mixture, actors))
            datasets = {
                f"train-{rank}": demonstration_stream(config, folder / STORE, start, steps, rank, mixture)
                for rank in range(config.learner.workers if start < steps else 0)
            }
            return require_checkpoint(
                watch(
                    config,
                    "sft",
                    steps,
                    lambda: learner.fit(train_job, datasets),
                    lambda: latest_step(folder, "step/sft", SHOWN),
                    grace_s=stop_s(),
                )
            )


@contextmanager
def placed(config: Config, episodes: bool) -> Iterator[placement.Actors | None]:
    """The actors of evaluation episodes, if training includes any, on a cluster with room for the learners."""
    if episodes:
        with placement.placed(config, initial=config.policy.adapter) as actors:
            yield actors
        return
    cluster.connect(config)
    reservations.preflight(config, learner=True, rollouts=False)
    yield None


@contextmanager
def schedule(config: Config) -> Iterator[ActorHandle | None]:
    if not config.sft.curriculum.enabled:
        yield None
        return
    actor = cluster.spawn(Schedule, config)
    try:
        yield actor
    finally:
        ray.kill(actor)


def prepare(config: Config, folder: Path, resumed: bool) -> BatchSampler:
    """Store the demonstrations of the run, so that a resumed run uses the same; returns their sampler.

    BadInput for unreadable ones or a missing curriculum level, BadConfig if a resumed run names others.
    """
    from pixelis.datasets.demonstration_stream import (
        batch_sampler,
        demonstrations,
        fill_store,
        store_settings,
    )

    endless = config.data.demonstrations.startswith("cards:")
    reuse = resumed and not endless and (folder / STORE).is_dir()
    store = DemonstrationStore(folder / STORE) if reuse else fill_store(config, folder / STORE)
    settings = store_settings(config)
    if changed := [key for key, value in store.about.items() if value != settings.get(key)]:
        raise BadConfig(
            f"{config.run.dir} has a run with other demonstrations ({', '.join(changed)} changed)",
            fix="choose another run.dir, or start over with run.resume=false",
        )
    sampler = batch_sampler(config, store)
    if config.sft.evaluate_every:
        next(demonstrations(config, config.sft.validation, 1), None)
    if config.sft.curriculum.enabled:
        sampler.check(config.sft.curriculum.stages)
    levels = {level: len(pool) for level, pool in zip(LEVELS, sampler.pools[1:], strict=True)}
    EventLog(folder).write(
        "demonstrations", rows=len(store), used=len(sampler), refused=store.refused, levels=levels
    )
    warn_of_long_turns(config, store, sampler)
    return sampler


def warn_of_long_turns(config: Config, store: DemonstrationStore, sampler: BatchSampler) -> None:
    """Say how many turns, in at most CHECKED_ROWS rows, are longer than a policy's turns may be."""
    player, limit = Player(config, str(resolve(config.policy.model))), config.dialogue.max_turn_tokens
    rows = sampler.pools[0][:: -(-len(sampler) // CHECKED_ROWS)].tolist()
    lengths = [length for row in rows for length in player.turn_lengths(store[row])]
    if long := [length for length in lengths if length > limit]:
        say(
            f"warning: {len(long)} of {len(lengths)} turns have up to {max(long)} tokens, but a policy's turns "
            f"are cut off after dialogue.max_turn_tokens={limit}\n"
            "  raise it, also for rft, evaluate and serve, or shorten the turns"
        )


def has_episodes(config: Config) -> bool:
    return bool(config.sft.evaluate_every and config.sft.evaluate_episodes)


def needs(config: Config) -> list[reservations.Need]:
    return reservations.needs(config, learner=True, rollouts=has_episodes(config))


def inputs(config: Config) -> Iterator[dry_run.Input]:
    player = dry_run.player_of(config)
    yield from dry_run.policy_inputs(config, trains=True)
    if has_episodes(config):
        yield from dry_run.held_out_inputs(config, config.held_out, player)
    read = functools.partial(_read_demonstrations, config, player)
    yield dry_run.Input("data.demonstrations", config.data.demonstrations, read)
    if config.sft.evaluate_every:
        yield dry_run.Input("sft.validation", config.sft.validation, read)


def _read_demonstrations(config: Config, player: Player | None, source: str) -> None:
    from pixelis.datasets.demonstration_stream import demonstrations

    rows = demonstrations(config, source, 1, player, dry_run.note if config.data.max_bad_rows else None)
    if not sum(1 for _ in itertools.islice(rows, CHECKED_ROWS)):
        raise BadInput("has no demonstrations", fix="see docs/data.md for the row format")


def check(config: Config) -> None:
    dry_run.check("sft", config, inputs(config), dry_run.findings(config, "sft", needs(config)))


def main() -> None:
    with job("sft", __doc__, check) as config:
        print(f"checkpoint: {run(config)}")


if __name__ == "__main__":
    main()
