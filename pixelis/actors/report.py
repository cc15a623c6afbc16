"""Writes a run's report in a Ray task, next to the pixels, so that no driver holds them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import ray

from pixelis.config import Config, ToolboxConfig
from pixelis.datasets.media import open_media
from pixelis.errors import BadImage
from pixelis.operations.draw import shrink
from pixelis.operations.video import Clip
from pixelis.records import Group, Media, Trajectory
from pixelis.telemetry.html.drawings import frame_key, required_frames
from pixelis.telemetry.html.episode import EpisodePage
from pixelis.telemetry.html.report import write_report

log = logging.getLogger(__name__)

FRAME_PIXELS = 1280
"""Longest side of a frame that is kept for a page: an episode may show dozens."""


def choose(arm: str, groups: list[Group], views: list[ray.ObjectRef], count: int) -> list[tuple[str, Group, ray.ObjectRef]]:
    """Episodes worth looking at: the first right ones and the first wrong ones, half each where there are as many."""
    pairs = list(zip(groups, views, strict=True))
    right = [p for p in pairs if (p[0].trajectories[0].rewards.get("accuracy") or 0) > 0]
    wrong = [p for p in pairs if (p[0].trajectories[0].rewards.get("accuracy") or 0) <= 0]
    half = min(len(wrong), max(count // 2, count - len(right)))
    chosen = right[: count - half] + wrong[:half]
    return [(arm, group, ref) for group, ref in chosen[:count]]


@ray.remote(num_cpus=0)
def write(config: Config, folder: str, summary: dict[str, Any], curves: list[dict[str, Any]], chosen: list[Any]) -> str:
    """Write report.html with the chosen episodes; returns its path."""
    return str(write_report(Path(folder), summary, curves, _pages(config, chosen)))


def sample(
    config: Config, step: int, summary: dict[str, Any], groups: list[Group], views: list[ray.ObjectRef]
) -> ray.ObjectRef | None:
    """Start writing `run.dir/trajectories/step_NNNNNNNN.html` with some episodes of the evaluation after ``step`` steps.

    None when ``telemetry.trajectories`` is 0. The task never raises: a page that cannot be written is a warning.
    """
    name = f"step {step}"
    chosen = choose(name, groups, views, config.telemetry.trajectories)
    return _write_sample.remote(config, step, {"arms": [{**summary, "name": name}]}, chosen) if chosen else None


@ray.remote(num_cpus=0)
def _write_sample(config: Config, step: int, summary: dict[str, Any], chosen: list[Any]) -> str | None:
    folder, title = Path(config.run.dir) / "trajectories", f"{config.run.name}, after {step} steps"
    try:
        return str(write_report(folder, summary, [], _pages(config, chosen), title, f"step_{step:08d}.html"))
    except Exception:  # pages follow a run, they never decide about it
        log.warning("no page of the episodes after step %d", step, exc_info=True)
        return None


def _pages(config: Config, chosen: list[Any]) -> list[EpisodePage]:
    """The chosen episodes with their pixels."""
    episodes = []
    for title, group, ref in chosen:
        trajectory = group.trajectories[0]
        views: list[np.ndarray] = ray.get(ref)[trajectory.id]
        pictures = {image.id: view for image, view in zip(trajectory.images, views, strict=True)}
        for media in group.question.media:
            pictures |= _opened(media, trajectory, config.toolbox)
        episodes.append(EpisodePage(question=group.question, trajectory=trajectory, pictures=pictures, title=title))
    return episodes


def _opened(media: Media, trajectory: Trajectory, settings: ToolboxConfig) -> dict[str, np.ndarray]:
    """A picture in full, or of a clip those frames that the page shows; nothing when the source is gone, which the page says."""
    frames = required_frames(trajectory).get(media.id, [])
    if media.kind == "video" and not frames:
        return {}
    try:
        opened = open_media(media, settings)
        if not isinstance(opened, Clip):
            return {media.id: opened}
        known = [n for n in frames if n < len(opened.times)]
        shown = zip(known, opened.frames(known), strict=True)
        return {frame_key(media.id, number): shrink(frame, FRAME_PIXELS) for number, frame in shown}
    except BadImage as error:
        log.warning("the report goes without %s: %s", media.id, error.message)
        return {}
