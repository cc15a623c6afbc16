"""Evaluations of two policies and ratings of their episodes, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import skimage.data
from PIL import Image

from pixelis.evaluation.ratings import ItemRating, RatingFile, RatingKey, SideRating
from pixelis.records import (
    Action,
    Group,
    ImageView,
    Media,
    Observation,
    Question,
    StopReason,
    Trajectory,
    Turn,
)


def group(name: str, answer: str, media: str = "", zooms: bool = False) -> Group:
    """An episode, with a zoom to the middle or without; its views are files below ``images``."""
    pictures = [Media(id="img0", uri=media or "none.png")]
    question = Question(id=name, question=f"What is on {name}?", media=pictures, answers=["cat"])
    images = [ImageView(id="img0", uri=f"images/{name}/img0.png", source_size=(512, 512), view_size=(64, 64))]
    turns = [Turn(role="user", text=question.question, images=["img0"])]
    if zooms:
        box = (0.25, 0.25, 0.75, 0.75)
        uri, sizes = f"images/{name}/obs1.png", {"source_size": (256, 256), "view_size": (64, 64)}
        images.append(ImageView(id="obs1", uri=uri, parent="img0", box=box, **sizes))
        action = Action(op="zoom_in", target="img0", arguments={"box": box})
        seen = Observation(status="ok", id="obs1", images=images[1:])
        turns.append(Turn(role="assistant", text="look closer", action=action))
        turns.append(Turn(role="tool", images=["obs1"], observation=seen))
    turns.append(Turn(role="assistant", text=answer))
    trajectory = Trajectory(question_id=name, group_id=name, images=images, turns=turns, answer=answer)
    trajectory.stop_reason = StopReason.ANSWER
    return Group(id=name, question=question, trajectories=[trajectory])


def save_evaluation(folder: Path, answer: str, zooms: bool, questions: int = 4) -> Path:
    """Write the files of an evaluation with its pictures; returns the trajectories."""
    picture = Image.fromarray(skimage.data.astronaut())
    picture.save(folder.parent / "astronaut.png")
    groups = [group(f"q{i}", answer, str(folder.parent / "astronaut.png"), zooms) for i in range(questions)]
    for view in (view for g in groups for view in g.trajectories[0].images):
        path = folder / view.uri
        path.parent.mkdir(parents=True, exist_ok=True)
        part = picture if view.box is None else picture.crop(tuple(np.array(view.box) * 512))
        part.resize(view.view_size).save(path)
    file = folder / "trajectories-test.jsonl"
    file.write_text("".join(g.model_dump_json() + "\n" for g in groups))
    return file


def rating(
    key: RatingKey, item: str, preferred: str, points: tuple[int, int] = (5, 2), seconds: float = 60
) -> ItemRating:
    """Prefers arm ``preferred`` (`equal`: neither) and gives ``points`` to the arms a and b."""
    of = key.items[item]
    sides = {"a": points[0], "b": points[1]}
    left, right = (
        SideRating(correct=n > 3, coherence=n, efficiency=n, thoroughness=n)
        for n in (sides[of.left], sides[of.right])
    )
    side = "equal" if of.is_check or preferred == "equal" else "left" if of.left == preferred else "right"
    return ItemRating(item=item, left=left, right=right, preference=side, confidence=4, seconds=seconds)


def rate_all(
    key: RatingKey, rater: str, preferences: Sequence[str], points: tuple[int, int] = (5, 2)
) -> RatingFile:
    """Ratings of all items, in turn with these preferences."""
    pairs = zip(key.items, itertools.cycle(preferences), strict=False)
    ratings = [rating(key, item, preference, points) for item, preference in pairs]
    return RatingFile(page=key.page, rater=rater, ratings=ratings)
