"""Makes demonstrations with Ray Data: attempts in, demonstrations out in order, by a pool of actors."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray.data

from pixelis.config import Config
from pixelis.datasets.questions import read_demonstrations
from pixelis.datasets.synthesis.quota_scheduler import SourceRows
from pixelis.datasets.synthesis.sample_builder import Attempt, SampleBuilder
from pixelis.errors import BadConfig, PixelisError
from pixelis.records import Demonstration, Question

BATCH = 8
"""Attempts that an actor takes at a time, about."""
AHEAD_BYTES = 64 << 20
"""Samples that may wait for the driver, in the object store."""


def maker(config: Config) -> SampleBuilder:
    """The maker of a job; BadConfig or MissingFile for what cannot be used: a driver asks before it starts a cluster."""
    s, shown = config.synthesis, list[Demonstration]()
    if s.method == "imitation" and s.imitation.demonstrations:
        shown = read_demonstrations(s.imitation.demonstrations, s.imitation.shots, config.run.seed, 0.0)
    folder = Path(config.run.dir)
    return SampleBuilder(s, config.run.seed, config.toolbox, config.dialogue, config.rewards, shown, folder)


class Make:
    """Columns attempt and question (JSON) to sample (JSON, empty for none) and cause."""

    def __init__(self, config: Config):
        self.maker = maker(config)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        samples, causes = [], []
        for attempt, question in zip(batch["attempt"], batch["question"], strict=True):
            try:
                made = self.maker.build(Attempt(*json.loads(attempt)), Question.model_validate_json(question))
                samples.append(made.model_dump_json())
                causes.append("")
            except BadConfig:  # a wrong key or address: nothing that follows would fare better
                raise
            except PixelisError as error:
                samples.append("")
                causes.append(error.code)
        return {"sample": samples, "cause": causes}


def outcomes(config: Config, attempts: Sequence[Attempt], rows: SourceRows) -> Iterator[tuple[Demonstration | None, str]]:
    """What comes of the attempts, in their order, as it is made; an actor that dies is replaced and its batch done again."""
    items = [
        {"attempt": json.dumps([a.task, a.kind, a.source, a.row, a.draw]), "question": rows.get(a.source, a.row)}
        for a in attempts
    ]
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ray.data.ExecutionResources.for_limits(object_store_memory=AHEAD_BYTES)
    with ray.data.DataContext.current(context):
        blocks = max(min(config.synthesis.workers, len(items)), len(items) // BATCH)
        made = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
            Make,
            fn_constructor_args=(config,),
            batch_size=None,
            compute=ray.data.ActorPoolStrategy(size=config.synthesis.workers),
            num_cpus=config.synthesis.cpus,
        )
    for batch in made.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        for sample, cause in zip(batch["sample"].to_pylist(), batch["cause"].to_pylist(), strict=True):
            yield (Demonstration.model_validate_json(sample) if sample else None), cause
