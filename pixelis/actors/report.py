"""Writing a run's report in a Ray task, beside the pixels, so that no driver ever holds one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import ray

from pixelis.config import Config
from pixelis.operations.media import load_image
from pixelis.records import Group
from pixelis.telemetry.report import EpisodePage, write_report


def choose(arm: str, groups: list[Group], views: list[ray.ObjectRef], count: int) -> list[tuple[str, Group, ray.ObjectRef]]:
    """Episodes worth looking at: the first right ones and the first wrong ones, about half each."""
    pairs = list(zip(groups, views, strict=True))
    right = [p for p in pairs if (p[0].trajectories[0].rewards.get("accuracy") or 0) > 0]
    wrong = [p for p in pairs if (p[0].trajectories[0].rewards.get("accuracy") or 0) <= 0]
    half = min(len(wrong), count // 2)
    chosen = right[: count - half] + wrong[:half]
    return [(arm, group, ref) for group, ref in chosen[:count]]


@ray.remote(num_cpus=0)
def write(config: Config, folder: str, summary: dict[str, Any], curves: list[dict[str, Any]], chosen: list[Any]) -> str:
    """Write report.html with the chosen episodes; returns its path."""
    episodes = []
    for title, group, ref in chosen:
        trajectory = group.trajectories[0]
        views: list[np.ndarray] = ray.get(ref)[trajectory.id]
        pictures = {image.id: view for image, view in zip(trajectory.images, views, strict=True)}
        for media in group.question.media:
            pictures[media.id] = load_image(media.uri, config.toolbox.max_image_bytes, config.toolbox.max_image_pixels)
        episodes.append(EpisodePage(question=group.question, trajectory=trajectory, pictures=pictures, title=title))
    return str(write_report(Path(folder), summary, curves, episodes))
