"""Synthesizes demonstrations with Ray Data: a pool of actors turns attempts into them, in order."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray.data

from pixelis.config import Config
from pixelis.datasets.execution import stream_context
from pixelis.datasets.questions import read_demonstrations
from pixelis.datasets.synthesis.quota_scheduler import SourceRows
from pixelis.datasets.synthesis.sample_builder import Attempt, SampleBuilder
from pixelis.errors import BadConfig, PixelisError
from pixelis.records import Demonstration, Question

BATCH = 8
CPUS = 0.5
"""CPUs that each worker reserves: it often waits for a model or a disk."""
AHEAD_BYTES = 64 << 20
"""Limit on samples in the object store that the driver has not read yet."""


def sample_builder(config: Config) -> SampleBuilder:
    """Raises BadConfig and MissingFile, so that a driver can check a job before starting a cluster."""
    s, examples = config.synthesis, list[Demonstration]()
    if s.method == "imitation" and s.teacher.demonstrations:
        examples = read_demonstrations(s.teacher.demonstrations, s.teacher.shots, config.run.seed, 0.0)
    settings = config.toolbox, config.dialogue, config.rewards
    return SampleBuilder(s, config.run.seed, *settings, examples, Path(config.run.dir))


class BuildSamples:
    """Maps attempt and question (JSON) to sample (JSON, empty if rejected) and cause (empty for one)."""

    def __init__(self, config: Config):
        self.builder = sample_builder(config)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        samples, causes = [], []
        for attempt, question in zip(batch["attempt"], batch["question"], strict=True):
            try:
                row = Question.model_validate_json(question)
                sample = self.builder.build(Attempt(*json.loads(attempt)), row).model_dump_json()
                cause = ""
            except BadConfig:  # would fail for every attempt
                raise
            except PixelisError as error:
                sample, cause = "", error.code
            samples.append(sample)
            causes.append(cause)
        return {"sample": samples, "cause": causes}


def outcomes(
    config: Config, attempts: Sequence[Attempt], rows: SourceRows
) -> Iterator[tuple[Demonstration | None, str]]:
    items = []
    for a in attempts:
        attempt = json.dumps([a.task, a.kind, a.source, a.row, a.draw])
        items.append({"attempt": attempt, "question": rows.get(a.source, a.row)})
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    with ray.data.DataContext.current(stream_context(AHEAD_BYTES)):
        blocks = max(min(config.synthesis.workers, len(items)), len(items) // BATCH)
        samples = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
            BuildSamples,
            fn_constructor_args=(config,),
            batch_size=None,
            compute=ray.data.ActorPoolStrategy(size=config.synthesis.workers),
            num_cpus=CPUS,
        )
    for batch in samples.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        for sample, cause in zip(batch["sample"].to_pylist(), batch["cause"].to_pylist(), strict=True):
            yield (Demonstration.model_validate_json(sample) if sample else None), cause
