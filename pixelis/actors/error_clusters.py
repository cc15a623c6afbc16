"""Clusters the questions of an evaluation by features of the Embedder, in a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from pixelis.actors.embedder import Parts
from pixelis.actors.group_views import GroupViews
from pixelis.config import Config
from pixelis.evaluation.clusters import balanced_vectors, error_clusters, require_questions
from pixelis.evaluation.metrics import correctness
from pixelis.records import Group

BATCH = 8
"""Questions that are embedded at once."""


def find(
    config: Config, embedder: ActorHandle, groups: Sequence[Group], views: Sequence[GroupViews]
) -> list[dict[str, Any]]:
    """The `evaluate.clusters` clusters of the scored questions; BadInput for too few of them."""
    scored = [pair for pair in zip(groups, views, strict=True) if correctness(pair[0].trajectories)]
    require_questions(len(scored), config.evaluate.clusters, "the evaluation")
    batches = [zip(*scored[start : start + BATCH], strict=True) for start in range(0, len(scored), BATCH)]
    parts = [embedder.first_features.remote(*batch) for batch in batches]
    return ray.get(_cluster.remote(config, [group for group, _ in scored], *parts))


@ray.remote(num_cpus=0)
def _cluster(config: Config, groups: list[Group], *parts: Parts) -> list[dict[str, Any]]:
    vectors = balanced_vectors(
        [part for batch in parts for part in batch], (config.memory.visual, config.memory.text)
    )
    return error_clusters(groups, vectors, config.evaluate.clusters, config.run.seed)
