"""Ray Data streams of training samples, prepared beside the learner."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
from ray.actor import ActorHandle

from pixelis.config import Config
from pixelis.datasets import token_parts
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.demonstration_checks import check_demonstration
from pixelis.datasets.demonstration_store import BatchSampler, DemonstrationStore
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.execution import stream_context
from pixelis.datasets.questions import BadRowBudget, read_demonstrations, read_rows
from pixelis.dialogue.dialects import offered
from pixelis.errors import BadInput, DataFailure
from pixelis.operations.environment import select_environments
from pixelis.policy.model_path import resolve
from pixelis.policy.samples import TrainSample
from pixelis.records import Demonstration

CPUS = 0.25
"""Of a preparing process; it shares its core with its learner."""
CACHE_BYTES = 128 * 2**20
"""Of the samples that a preparing process keeps for later epochs: executing their operations is slow."""
Prepared = tuple[bytes, bytes, bytes, bytes, bytes, str]
"""Tokens, mask, weights, views, shapes and error of a sample, as in the columns of `Prepare`."""


def demonstrations(
    config: Config,
    source: str,
    count: int,
    player: Player | None = None,
    on_bad_row: Callable[[BadRow], None] | None = None,
) -> Iterator[Demonstration]:
    """The first ``data.limit`` demonstrations of a source in its own order; ``count`` of them from `cards:`.

    Rows that fail `check_demonstration` are bad rows. A ``player`` also plays the first ``data.probe_rows``.
    """
    data = config.data
    if source.startswith("cards:"):
        yield from read_demonstrations(source, data.limit or count, config.run.seed, data.direct_share)
        return
    budget = BadRowBudget(source, data.max_bad_rows, on_bad_row)
    operations = {operation.name: operation for operation in offered(config)}
    environments = select_environments(config.toolbox)
    usable = 0
    for row in read_rows(source, Demonstration):
        bad = row if isinstance(row, BadRow) else None
        if isinstance(row, Demonstration) and row.kind in config.sft.kinds:
            bad = check_demonstration(row, source, operations, environments)
            if bad is None and player is not None and usable < data.probe_rows:
                bad = player.problem(row, source)
        budget.add(bad)
        if isinstance(row, Demonstration) and bad is None:
            yield row
            usable += 1
            if usable == data.limit:
                break
    budget.check()


def fill_store(config: Config, folder: Path) -> DemonstrationStore:
    rows = demonstrations(config, config.data.demonstrations, config.sft.steps * config.sft.batch)
    return DemonstrationStore.fill(folder, rows, config.sft.kinds, store_settings(config))


def store_settings(config: Config) -> dict[str, Any]:
    """The settings that determine which demonstrations are stored."""
    return {
        "data.demonstrations": config.data.demonstrations,
        "data.limit": config.data.limit,
        "sft.kinds": config.sft.kinds,
    }


def batch_sampler(config: Config, store: DemonstrationStore) -> BatchSampler:
    shuffle = not config.data.demonstrations.startswith("cards:")  # those are independent of each other
    return BatchSampler(store, config.sft, config.run.seed, shuffle)


def demonstration_stream(
    config: Config, store: Path, start: int, steps: int, rank: int = 0, schedule: ActorHandle | None = None
) -> ray.data.Dataset:
    """One learner's share of the batches from step ``start`` to ``steps``, in order, one row per sample.

    Every step is a block of its own, as it may have to wait for the evaluation of the one before.
    """
    arguments = (config, str(resolve(config.policy.model)), str(store), start, rank, schedule)
    with ray.data.DataContext.current(stream_context()):
        # One task at a time: Ray would start a process for each CPU, only to count.
        blocks = ray.data.range(steps - start, override_num_blocks=max(1, steps - start), concurrency=1)
        return blocks.map_batches(
            Prepare,
            fn_constructor_args=arguments,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=1),
            num_cpus=CPUS,
        )


class Prepare:
    """Draws and plays the demonstrations of steps.

    Columns: id, level, tokens int32, mask bool, weights float32 (empty: 1 each), views (raw bytes), shapes
    (heights and widths), and error: the BadRow as JSON of a row whose other columns are empty. ``schedule``
    returns the mixture of a step.
    """

    def __init__(
        self,
        config: Config,
        model_folder: str,
        store: str,
        start: int = 0,
        rank: int = 0,
        schedule: ActorHandle | None = None,
    ):
        self.config, self.start, self.schedule = config, start, schedule
        self.share = rank // config.learner.sequence_parallel
        self.shares = config.learner.shares(config.learner.workers)
        self.player = Player(config, model_folder)
        self.store = DemonstrationStore(store)
        self.sampler = batch_sampler(config, self.store)
        self.cache, self.cache_bytes = dict[int, Prepared](), 0

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        names = ("id", "level", "tokens", "mask", "weights", "views", "shapes", "error")
        columns: dict[str, list] = {name: [] for name in names}
        for step in (batch["id"] + self.start).tolist():
            mixture = ray.get(self.schedule.mixture.remote(step)) if self.schedule is not None else None
            for number in self.sampler.share(step, mixture, self.share, self.shares):
                row = self.store[number]
                prepared = self.cache.get(number) or self._prepare(row)
                self._keep(number, prepared)
                for name, value in zip(names, (row.id, row.level or "", *prepared), strict=True):
                    columns[name].append(value)
        return columns

    def _keep(self, number: int, prepared: Prepared) -> None:
        *_, error = prepared
        size = sum(map(len, prepared))
        if not error and number not in self.cache and self.cache_bytes + size <= CACHE_BYTES:
            self.cache[number] = prepared
            self.cache_bytes += size

    def _prepare(self, row: Demonstration) -> Prepared:
        try:
            sample = train_sample(self.player, row)
        except (DataFailure, BadInput) as error:
            bad = BadRow.of_error(row, self.config.data.demonstrations, error)
            return b"", b"", b"", b"", b"", json.dumps(bad)
        return (
            sample.tokens.astype(np.int32).tobytes(),
            sample.mask.astype(np.uint8).tobytes(),
            b"" if sample.weights is None else sample.weights.tobytes(),
            b"".join(view.tobytes() for view in sample.views),
            np.asarray([view.shape[:2] for view in sample.views], np.int32).tobytes(),
            "",
        )


def train_sample(player: Player, row: Demonstration) -> TrainSample:
    trajectory, views = player.play(row)
    part_weights = player.config.sft.weights
    weights = token_parts.weights(trajectory, row.turns, player.renderer.tokenizer, part_weights)
    tokens = np.asarray(trajectory.token_ids(), np.int64)
    return _sample(tokens, np.asarray(trajectory.loss_mask(), bool), views, row.id, weights)


def _sample(
    tokens: np.ndarray, mask: np.ndarray, views: list[np.ndarray], id: str, weights: np.ndarray | None
) -> TrainSample:
    log_probs = np.zeros(len(tokens), np.float32)
    return TrainSample(tokens, mask, log_probs, advantage=1.0, views=views, id=id, weights=weights)


def samples_of(batch: dict[str, np.ndarray]) -> list[TrainSample]:
    """The training samples in a batch of ``Prepare``, without those with an error; views share its memory."""
    samples = []
    for i in np.flatnonzero(batch["error"] == "").tolist():
        tokens = np.frombuffer(batch["tokens"][i], np.int32).astype(np.int64)
        mask = np.frombuffer(batch["mask"][i], np.uint8).astype(bool)
        weights = np.frombuffer(batch["weights"][i], np.float32)
        sizes = np.frombuffer(batch["shapes"][i], np.int32).reshape(-1, 2)
        parts = np.split(np.frombuffer(batch["views"][i], np.uint8), np.cumsum(sizes.prod(1) * 3))
        views = [part.reshape(h, w, 3) for part, (h, w) in zip(parts, sizes.tolist(), strict=False)]
        samples.append(_sample(tokens, mask, views, str(batch["id"][i]), weights if len(weights) else None))
    return samples
