"""A trainer of a tiny random model, and batches for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tiny_policy import Maker, policy

from pixelis import config
from pixelis.policy.samples import TrainSample
from pixelis.policy.train_step import Trainer

LEARNER = config.LearnerConfig(lr=3e-3, warmup=0.0, row_tokens=512, rows=2, keep=2)


SMALL = LEARNER.model_copy(update={"row_tokens": 128, "rows": 1})
"""Short rows: several micro-batches to one step."""


def learner_with(**values: object) -> config.LearnerConfig:
    return LEARNER.model_copy(update=values)


@contextmanager
def trainer(family: str = "qwen3_vl", **values: object) -> Iterator[Trainer]:
    settings = {"policy": policy(family), "learner": LEARNER, "total_steps": 10, "device": "cpu", **values}
    created = Trainer(**settings)  # type: ignore[arg-type]
    try:
        yield created
    finally:
        created.close()


def batch(n: int = 6, family: str = "qwen3_vl", seed: int = 0) -> list[TrainSample]:
    maker = Maker(family, seed)
    shared = maker.view()
    return [maker.sample(view=shared if i % 2 else None) for i in range(n)]
