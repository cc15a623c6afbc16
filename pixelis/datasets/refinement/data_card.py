"""The card of a data set: one HTML file with its content, what was left out and why, its gates, and examples."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pixelis.config import ToolboxConfig
from pixelis.datasets.media import open_media
from pixelis.errors import OperationError, PixelisError
from pixelis.operations import geometry
from pixelis.operations.draw import annotate
from pixelis.operations.media import segment_centers
from pixelis.operations.pixel_budget import shrink
from pixelis.operations.video import Clip
from pixelis.records import Demonstration, ImageView, Step, StopReason, Trajectory, Turn
from pixelis.telemetry.html.drawings import frame_key, required_frames
from pixelis.telemetry.html.episode import EpisodePage
from pixelis.telemetry.html.render import render, write_page

FILE = "card.html"
PICTURE_PIXELS = 1280
"""Longest side of a picture or frame that is kept for a card."""
MAX_BARS = 40
MAX_FAILURES = 200

DISTRIBUTIONS = ("kinds", "tasks", "operations", "lengths", "sources")


def write_card(
    folder: str | Path, facts: Mapping[str, Any], examples: Sequence[EpisodePage], title: str
) -> Path:
    return write_page(Path(folder) / FILE, render_card(facts, examples, title))


def render_card(facts: Mapping[str, Any], examples: Sequence[EpisodePage], title: str) -> str:
    """The document. ``facts``: content of ``summary.json``; ``examples``: of ``example``."""
    gates = facts.get("gates", [])
    brief = {**facts, "gates": [{k: v for k, v in gate.items() if k != "ids"} for gate in gates]}
    brief.pop("held_out", None)
    return render(
        "data_card.html",
        title=title,
        kept=facts.get("kept"),
        rows=facts.get("rows"),
        source=facts.get("source"),
        causes=_bars(Counter(facts.get("bad_rows", {})) + Counter(facts.get("dropped", {}))),
        gates=gates,
        max_failures=MAX_FAILURES,
        distributions={key: _bars(facts[key]) for key in DISTRIBUTIONS if facts.get(key)},
        levels=facts.get("levels", {}),
        sets={
            name: {**recipe, "left_out": _bars(recipe.get("left_out") or recipe.get("dropped") or {})}
            for name, recipe in facts.get("sets", {}).items()
        },
        examples=examples,
        summary=brief,
    )


def _bars(counts: Mapping[str, float]) -> list[tuple[str, float, float, float]]:
    items = list(counts.items())
    bars = items[:MAX_BARS] + (
        [("others", sum(n for _, n in items[MAX_BARS:]))] if len(items) > MAX_BARS else []
    )
    total, widest = sum(counts.values()) or 1.0, max(counts.values(), default=1.0) or 1.0
    return [(name, n, n / total, min(100.0, 100 * n / widest)) for name, n in bars]


# Examples


def example(demonstration: Demonstration, settings: ToolboxConfig, frames: int = 8) -> EpisodePage:
    """A demonstration with its pictures; the views of its operations are cut from them again.

    ``frames``: of a clip that the policy sees at first.
    """
    opened: dict[str, np.ndarray | Clip] = {}
    for media in demonstration.media:
        with contextlib.suppress(PixelisError):
            opened[media.id] = open_media(media, settings)
    first: list[ImageView] = []
    for name, item in opened.items():
        if isinstance(item, Clip):
            size = (item.width, item.height)
            first += [
                ImageView(
                    id=f"{name}.{i}",
                    parent=name,
                    frame=n,
                    time=float(item.times[n]),
                    source_size=size,
                    view_size=size,
                )
                for i, n in enumerate(segment_centers(len(item.times), frames))
            ]
        else:
            first.append(ImageView(id=name, source_size=(item.shape[1], item.shape[0])))
    trajectory = as_trajectory(demonstration, first)
    pictures: dict[str, np.ndarray] = {}
    for name, item in opened.items():
        if isinstance(item, Clip):
            numbers = [n for n in required_frames(trajectory).get(name, []) if n < len(item.times)]
            for n, frame in zip(numbers, item.frames(numbers), strict=True):
                pictures[frame_key(name, n)] = shrink(frame, PICTURE_PIXELS)
        else:
            pictures[name] = item
    data = {
        view.id: observation.data for observation in trajectory.observations for view in observation.images
    }
    for view in trajectory.images:
        if view.id in data and (crop := _crop(view, trajectory.images, pictures, data[view.id])) is not None:
            pictures[view.id] = crop
    small = {name: shrink(picture, PICTURE_PIXELS) for name, picture in pictures.items()}
    quality = "" if demonstration.quality is None else f"quality {demonstration.quality:.2f}"
    parts = (demonstration.kind, demonstration.task, demonstration.level, quality)
    return EpisodePage(
        demonstration, trajectory, small, " · ".join(part for part in parts if part), is_demonstration=True
    )


def as_trajectory(demonstration: Demonstration, first: Sequence[ImageView] = ()) -> Trajectory:
    """A demonstration as an episode without tokens that begins with the views ``first``."""
    media = [m.id for m in demonstration.media]
    images = list(first)
    turns = [Turn(role="user", text=demonstration.conversation, images=[view.id for view in first])]
    for step in demonstration.turns:
        if step.op is None:
            turns.append(Turn(role="assistant", text=_turn_text(step, step.answer or "")))
            continue
        action = step.calls(media[0] if media else "img0")[0]
        call = f"{step.op} {json.dumps({'target': action.target, **step.arguments}, ensure_ascii=False, default=str)}"
        note = "" if step.learn else "\n(a deliberate mistake: part of the context, excluded from the loss)"
        turns.append(
            Turn(role="assistant", text=_turn_text(step, call) + note, action=action, learn=step.learn)
        )
        if (observation := step.observation) is not None:
            views = [view.id for view in observation.images]
            turns.append(Turn(role="tool", text=observation.text, observation=observation, images=views))
            images += observation.images
    return Trajectory(
        question_id=demonstration.id,
        images=images,
        turns=turns,
        answer=demonstration.final,
        stop_reason=StopReason.ANSWER if demonstration.final is not None else StopReason.NO_ACTION,
    )


def _turn_text(step: Step, action: str) -> str:
    return f"{step.think}\n{action}" if step.think else action


def _crop(
    view: ImageView, images: Sequence[ImageView], pictures: Mapping[str, np.ndarray], data: Mapping[str, Any]
) -> np.ndarray | None:
    """The pixels of a view with the found objects drawn on them; None when its picture is missing."""
    try:
        links = geometry.chain(images, view.id)
        first = links[0]
        clip = first.frame is not None
        root = str(first.parent) if clip else first.id
        picture = pictures.get(frame_key(root, first.frame or 0) if clip else root)
        if picture is None:
            return None
        height, width = picture.shape[:2]
        left, top, right, bottom = geometry.to_pixels(geometry.to_root(links), width, height)
    except OperationError:
        return None
    part = shrink(picture[top:bottom, left:right], max(view.view_size) or PICTURE_PIXELS)
    if not any(data.get(key) for key in ("objects", "lines", "tracks")):
        return part
    return annotate(
        part, data, (left / width, top / height, right / width, bottom / height), first.frame, root
    )
