"""Episodes of an evaluation for its report: why they are wrong, clusters of them, pictures as files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from PIL import Image
from ray.actor import ActorHandle

from pixelis.actors.embedder import Parts
from pixelis.actors.group_views import GroupViews, fetch_groups
from pixelis.actors.report import Chosen, choose
from pixelis.config import Config
from pixelis.evaluation.causes import cause_of
from pixelis.evaluation.clusters import balanced_vectors, error_clusters, require_questions
from pixelis.evaluation.metrics import correctness
from pixelis.evaluation.outputs import file_name
from pixelis.records import Group

BATCH = 8


def choose_with_causes(
    arm: str, groups: Sequence[Group], views: Sequence[GroupViews | None], count: int
) -> list[Chosen]:
    return choose(arm, groups, views, count, [cause_of(group, group.trajectories[0]) for group in groups])


def choose_wrong(
    clusters: Sequence[dict[str, Any]], groups: Sequence[Group], views: Sequence[GroupViews]
) -> list[list[Chosen]]:
    """The first wrong episode of each example of each cluster; the title names its cause if known."""
    pairs = {group.question.id: (group, refs) for group, refs in zip(groups, views, strict=True)}

    def first_wrong(id: str) -> Chosen:
        group, refs = pairs[id]
        wrong = next(t for t in group.trajectories if t.rewards.get("accuracy", 1.0) <= 0.5)
        return cause_of(group, wrong) or "", group.model_copy(update={"trajectories": [wrong]}), refs

    return [[first_wrong(id) for id in cluster["examples"]] for cluster in clusters]


@ray.remote(num_cpus=0)
def save_images(folder: str, groups: list[Group], views: list[GroupViews]) -> dict[str, list[str]]:
    """Write what the policy saw as ``FOLDER/QUESTION/SAMPLE/ID.png``; returns the paths by trajectory.

    Beside them ``conversation.json`` has the turns: role, text and the files of the images that each shows.
    """
    paths: dict[str, list[str]] = {}
    for group, refs in zip(groups, views, strict=True):
        (by_trajectory,), question = fetch_groups([refs]), file_name(group.question.id)
        for number, trajectory in enumerate(group.trajectories):
            place = Path(folder) / question / str(number)
            place.mkdir(parents=True, exist_ok=True)
            files = [place / f"{file_name(image.id)}.png" for image in trajectory.images]
            for file, view in zip(files, by_trajectory[trajectory.id], strict=True):
                Image.fromarray(view).save(file)
            turns = [
                {"role": t.role, "text": t.text, "images": [f"{file_name(id)}.png" for id in t.images]}
                for t in trajectory.turns
            ]
            content = json.dumps(turns, indent=2, ensure_ascii=False)
            (place / "conversation.json").write_text(content, encoding="utf-8")
            paths[trajectory.id] = [str(file) for file in files]
    return paths


def find_clusters(
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
