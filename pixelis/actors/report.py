"""Ray tasks that write HTML reports with images, so that drivers never load pixels."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from PIL import Image

from pixelis.actors.group_views import GroupViews, Views, fetch_groups
from pixelis.config import Config, ToolboxConfig
from pixelis.datasets.media import open_media
from pixelis.errors import BadImage
from pixelis.evaluation.causes import cause_of, one_of_each
from pixelis.evaluation.outputs import file_name
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
"""Longest side of a picture of an example of a cluster."""

Chosen = tuple[str, Group, GroupViews | None]
"""A title, and an episode as a group of one or the first of its group, with its views."""


def choose(arm: str, groups: list[Group], views: Sequence[GroupViews | None], count: int) -> list[Chosen]:
    """Up to `count` episodes as (title, group, views): the first right and the first wrong ones, half of each if possible.

    Causes of errors alternate where they are known, and the title names them.
    """
    pairs = list(zip(groups, views, strict=True))
    right = [p for p in pairs if (p[0].trajectories[0].rewards.get("accuracy") or 0) > 0]
    wrong = [p for p in pairs if (p[0].trajectories[0].rewards.get("accuracy") or 0) <= 0]
    wrong = [wrong[position] for position in one_of_each([group for group, _ in wrong])]
    half = min(len(wrong), max(count // 2, count - len(right)))
    chosen = right[: count - half] + wrong[:half]
    causes = [cause_of(group, group.trajectories[0]) for group, _ in chosen]
    return [
        (arm if cause is None else f"{arm}: {cause}", group, refs)
        for cause, (group, refs) in zip(causes[:count], chosen[:count], strict=True)
    ]


def choose_wrong(clusters: Sequence[dict[str, Any]], groups: Sequence[Group], views: Sequence[GroupViews]) -> list[list[Chosen]]:
    """The first wrong episode of each of the examples of each cluster; the title names its cause if that is known."""
    pairs = {group.question.id: (group, refs) for group, refs in zip(groups, views, strict=True)}

    def first_wrong(id: str) -> Chosen:
        group, refs = pairs[id]
        wrong = next(t for t in group.trajectories if t.rewards.get("accuracy", 1.0) <= 0.5)
        return cause_of(group, wrong) or "", group.model_copy(update={"trajectories": [wrong]}), refs

    return [[first_wrong(id) for id in cluster["examples"]] for cluster in clusters]


@ray.remote(num_cpus=0)
def write(
    config: Config,
    folder: str,
    summary: dict[str, Any],
    curves: list[dict[str, Any]],
    chosen: list[Chosen],
    examples: Mapping[str, Sequence[list[Chosen]]] | None = None,
) -> str:
    """Write report.html with the chosen episodes, and examples of each cluster by arm; returns its path."""
    pages = {arm: [_pages(config, of_cluster, EXAMPLE_PIXELS) for of_cluster in lists] for arm, lists in (examples or {}).items()}
    return str(write_report(Path(folder), summary, curves, _pages(config, chosen), examples=pages))


def sample(
    config: Config, step: int, summary: dict[str, Any], groups: list[Group], views: list[GroupViews]
) -> ray.ObjectRef | None:
    """Start a task that writes `run.dir/trajectories/step_NNNNNNNN.html` with `telemetry.trajectories` episodes of an evaluation.

    Returns None if that number is 0. The task logs a warning if the page cannot be written, and never raises.
    """
    name = f"step {step}"
    chosen = choose(name, groups, views, config.telemetry.trajectories)
    return _write_sample.remote(config, step, {"arms": [{**summary, "name": name}]}, chosen) if chosen else None


@ray.remote(num_cpus=0)
def _write_sample(config: Config, step: int, summary: dict[str, Any], chosen: list[Any]) -> str | None:
    folder, title = Path(config.run.dir) / "trajectories", f"{config.run.name}, after {step} steps"
    try:
        return str(write_report(folder, summary, [], _pages(config, chosen), title, f"step_{step:08d}.html"))
    except Exception:  # a missing page must not end the run
        log.warning("cannot write the page with episodes after step %d", step, exc_info=True)
        return None


def merge_views(groups: Sequence[GroupViews]) -> GroupViews:
    """The views of several groups of the same question as those of one group."""
    return GroupViews(_merge_views.remote(groups))


@ray.remote(num_cpus=0)
def _merge_views(groups: Sequence[GroupViews]) -> Views:
    return {id: pictures for views in fetch_groups(groups) for id, pictures in views.items()}


@ray.remote(num_cpus=0)
def save_images(folder: str, groups: list[Group], views: list[GroupViews]) -> dict[str, list[str]]:
    """Write what the policy saw as ``FOLDER/QUESTION/SAMPLE/ID.png``; returns the paths by trajectory, in the order of images.

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
            names = dict(zip((image.id for image in trajectory.images), (file.name for file in files), strict=True))
            turns = [{"role": t.role, "text": t.text, "images": [names[id] for id in t.images]} for t in trajectory.turns]
            (place / "conversation.json").write_text(json.dumps(turns, indent=2, ensure_ascii=False), encoding="utf-8")
            paths[trajectory.id] = [str(file) for file in files]
    return paths


def _pages(config: Config, chosen: Sequence[Any], longest: int | None = None) -> list[EpisodePage]:
    """The episodes with their pictures, scaled down to ``longest`` if that is set."""
    episodes = []
    for title, group, refs in chosen:
        trajectory, (views,) = group.trajectories[0], fetch_groups([refs])
        pictures = {image.id: view for image, view in zip(trajectory.images, views[trajectory.id], strict=True)}
        for media in group.question.media:
            pictures |= load_pictures(media, trajectory, config.toolbox)
        if longest is not None:
            pictures = {id: shrink(picture, longest) for id, picture in pictures.items()}
        episodes.append(EpisodePage(question=group.question, trajectory=trajectory, pictures=pictures, title=title))
    return episodes


def load_pictures(media: Media, trajectory: Trajectory, settings: ToolboxConfig) -> dict[str, np.ndarray]:
    """An image, or the frames of a clip that the page shows, by key; empty if the source cannot be opened."""
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
