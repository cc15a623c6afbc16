"""The prompt of a teacher that sees what the policy does not: evidence, the answer, or a user's words.

The teacher scores the policy's own tokens after the same question, to which the user adds one more text. The
policy's trajectory is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from pydantic import ValidationError

from pixelis.dialogue.render import Renderer
from pixelis.errors import OperationError
from pixelis.records import Action, Group, ImageView, Question, Trajectory

Views = Sequence[np.ndarray]
Context = Literal["evidence", "answer", "feedback"]
Addition = tuple[str, list[ImageView], list[np.ndarray]]
"""What the user adds: a text, and views after it with their pixels."""

EVIDENCE, ANSWER, FEEDBACK = " Look closer: {}", " The answer is {}.", "\n{}"


def privileged(
    trajectory: Trajectory,
    group: Group,
    views: Mapping[str, Views],
    renderer: Renderer,
    context: Context,
) -> tuple[Trajectory, list[np.ndarray]] | None:
    """A copy of a trajectory with the addition in its prompt, and its views; None if it cannot be made.

    group: the scored rollouts of its question; views: of each, by trajectory id, in the order of its images.
    """
    start = next((i for i, turn in enumerate(trajectory.turns) if turn.is_policy), 0)
    question = group.question
    addition: Addition | None
    if context == "evidence":
        addition = _best_look(group, views, renderer) or _expected_look(trajectory, question, renderer)
    elif context == "answer":
        addition = (ANSWER.format(question.answers[0]), [], []) if question.answers else None
    else:
        words = question.meta.get("feedback")
        addition = (FEEDBACK.format(words), [], []) if isinstance(words, str) and words else None
    if addition is None or start == 0:
        return None
    text, images, pixels = addition
    before, (last, *after) = trajectory.turns[: start - 1], trajectory.turns[start - 1 :]
    continued = renderer.continued(last, text, images)
    if continued is None:
        return None
    shown = sum(len(turn.images) for turn in trajectory.turns[:start])
    changes = {
        "turns": [*before, continued, *after],
        "images": [*trajectory.images[:shown], *images, *trajectory.images[shown:]],
    }
    own = views[trajectory.id]
    return trajectory.model_copy(update=changes), [*own[:shown], *pixels, *own[shown:]]


def _best_look(group: Group, views: Mapping[str, Views], renderer: Renderer) -> Addition | None:
    """The last look at a medium of the question in the right rollout with the highest reward, and what it showed."""
    right = [t for t in group.trajectories if t.rewards.get("accuracy", 0.0) > 0.5 and t.id in views]
    for trajectory in sorted(right, key=lambda t: -(t.reward or 0.0)):
        media = {item.id for item in group.question.media}
        places = {image.id: place for place, image in enumerate(trajectory.images)}
        for action, observation in reversed(trajectory.executed):
            shown = [image for image in observation.images if image.id in places]
            if action.target in media and observation.status == "ok" and shown:
                pixels = [views[trajectory.id][places[image.id]] for image in shown]
                text = renderer.call_text(action, trajectory.images)
                return EVIDENCE.format(text), shown, pixels
    return None


def _expected_look(trajectory: Trajectory, question: Question, renderer: Renderer) -> Addition | None:
    """The box of a picture that `meta.expected_calls` has, as a call without its result."""
    try:
        for call in question.meta.get("expected_calls", ()):
            if call["op"] == "zoom_in" and "box" in call and "frame" not in call:
                action = Action(op="zoom_in", target=call["media"], arguments={"box": call["box"]})
                return EVIDENCE.format(renderer.call_text(action, trajectory.images)), [], []
    except (OperationError, ValidationError, KeyError, TypeError, ValueError):  # a user's row
        return None
    return None
