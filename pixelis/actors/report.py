"""Ray tasks that write HTML reports with images, so that drivers never load pixels."""

from __future__ import annotations

import logging
import operator
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from pixelis.actors.group_views import GroupViews, Views, fetch_groups
from pixelis.config import Config, ToolboxConfig
from pixelis.datasets.media import open_media
from pixelis.errors import BadImage
from pixelis.operations.pixel_budget import shrink
from pixelis.operations.video import Clip
from pixelis.records import Group, Media, Trajectory
from pixelis.telemetry.html.drawings import frame_key, required_frames
from pixelis.telemetry.html.episode import EpisodePage
from pixelis.telemetry.html.report import write_report

log = logging.getLogger(__name__)

FRAME_PIXELS = 1280
"""Longest side of a clip's frame on a page. An episode may show dozens of frames."""
EXAMPLE_PIXELS = 360
Chosen = tuple[str, Group, GroupViews | None]
"""A title, and an episode as a group of one or the first of its group, with its views."""


def choose(
    arm: str,
    groups: Sequence[Group],
    views: Sequence[GroupViews | None],
    count: int,
    causes: Sequence[str | None] | None = None,
) -> list[Chosen]:
    """Up to ``count`` episodes: the first right and the first wrong ones, half of each if possible.

    ``causes``: why the first episode of each group is wrong, where known. They alternate, and the title names
    them.
    """
    right, wrong, seen = [], [], Counter[str | None]()
    for cause, group, refs in zip(causes or [None] * len(groups), groups, views, strict=True):
        row = (arm if cause is None else f"{arm}: {cause}", group, refs)
        if (group.trajectories[0].rewards.get("accuracy") or 0) > 0:
            right.append(row)
        else:
            wrong.append((seen[cause], row))
            seen[cause] += 1
    half = min(len(wrong), max(count // 2, count - len(right)))
    alternating = [row for _, row in sorted(wrong, key=operator.itemgetter(0))]
    return [*right[: count - half], *alternating[:half]][:count]


def choose_differing(
    policies: Mapping[str, tuple[Sequence[Group], Sequence[GroupViews]]], count: int
) -> list[list[Chosen]]:
    """For each of ``count`` questions the first episode of every policy, most disagreement about it first."""
    by_question: dict[str, list[Chosen]] = {}
    for name, (groups, views) in policies.items():
        for group, refs in zip(groups, views, strict=True):
            by_question.setdefault(group.question.id, []).append((name, group, refs))

    def disagreement(episodes: list[Chosen]) -> float:
        return statistics.pvariance(
            group.trajectories[0].rewards.get("accuracy") or 0.0 for _, group, _ in episodes
        )

    return sorted(by_question.values(), key=disagreement, reverse=True)[:count]


@ray.remote(num_cpus=0)
def write(
    config: Config,
    folder: str,
    summary: dict[str, Any],
    curves: list[dict[str, Any]],
    chosen: list[Chosen],
    examples: Mapping[str, Sequence[list[Chosen]]] | None = None,
    compared: Sequence[list[Chosen]] = (),
) -> str:
    wrong = {
        arm: [pages(config, of_cluster, EXAMPLE_PIXELS) for of_cluster in lists]
        for arm, lists in (examples or {}).items()
    }
    side_by_side = [pages(config, of_question) for of_question in compared]
    report = write_report(
        folder, summary, curves, pages(config, chosen), examples=wrong, compared=side_by_side
    )
    return str(report)


def sample(
    config: Config, step: int, summary: dict[str, Any], groups: list[Group], views: list[GroupViews]
) -> ray.ObjectRef | None:
    """Start a task that writes a page with `telemetry.trajectories` episodes of an evaluation, if any."""
    name = f"step {step}"
    if not (chosen := choose(name, groups, views, config.telemetry.trajectories)):
        return None
    title, facts = f"{config.run.name}, after {step} steps", {"arms": [{**summary, "name": name}]}
    return _write_sample.remote(config, f"step_{step:08d}.html", title, facts, chosen)


def show_trained(config: Config, step: int, chosen: list[Chosen]) -> ray.ObjectRef:
    """Start a task that writes a page with episodes that were learnt from in a step."""
    title = f"{config.run.name}, learnt in step {step}"
    return _write_sample.remote(config, f"trained_{step:08d}.html", title, {}, chosen)


@ray.remote(num_cpus=0)
def _write_sample(
    config: Config, file: str, title: str, summary: dict[str, Any], chosen: list[Any]
) -> str | None:
    folder = Path(config.run.dir) / "trajectories"
    try:
        return str(write_report(folder, summary, [], pages(config, chosen), title, file))
    except Exception:  # a missing page must not end the run
        log.warning("cannot write the page %s", file, exc_info=True)
        return None


def merge_views(groups: Sequence[GroupViews]) -> GroupViews:
    return GroupViews(_merge_views.remote(groups))


@ray.remote(num_cpus=0)
def _merge_views(groups: Sequence[GroupViews]) -> Views:
    return {id: pictures for views in fetch_groups(groups) for id, pictures in views.items()}


def pages(config: Config, chosen: Sequence[Chosen], longest: int | None = None) -> list[EpisodePage]:
    """The pages of episodes, without views those of their question's media alone."""
    episodes = []
    for title, group, refs in chosen:
        trajectory, pictures = group.trajectories[0], dict[str, np.ndarray]()
        if refs is not None:
            (views,) = fetch_groups([refs])
            pictures |= zip((image.id for image in trajectory.images), views[trajectory.id], strict=True)
        for media in group.question.media:
            pictures |= load_pictures(media, trajectory, config.toolbox)
        if longest is not None:
            pictures = {id: shrink(picture, longest) for id, picture in pictures.items()}
        page = EpisodePage(question=group.question, trajectory=trajectory, pictures=pictures, title=title)
        episodes.append(page)
    return episodes


def load_pictures(media: Media, trajectory: Trajectory, settings: ToolboxConfig) -> dict[str, np.ndarray]:
    """An image, or the frames of a clip that the page shows, by key; empty if it cannot be opened."""
    frames = required_frames(trajectory).get(media.id, [])
    if media.kind == "video" and not frames:
        return {}
    try:
        opened = open_media(media, settings)
        if not isinstance(opened, Clip):
            return {media.id: opened}
        numbers = [n for n in frames if n < len(opened.times)]
        pixels = zip(numbers, opened.frames(numbers), strict=True)
        return {frame_key(media.id, number): shrink(frame, FRAME_PIXELS) for number, frame in pixels}
    except BadImage as error:
        log.warning("the report leaves out %s: %s", media.id, error.message)
        return {}
