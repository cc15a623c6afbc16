"""Demonstrations become trajectories by being played: every observation in them is what the operation really returned."""

from __future__ import annotations

from typing import Any

import numpy as np

from pixelis.config import Config
from pixelis.dialogue.agent import name_observation
from pixelis.dialogue.pixels import PixelBudget
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.spec import ModelSpec
from pixelis.errors import DataFailure
from pixelis.operations import Scene, execute, select
from pixelis.operations.media import first_look, open_media
from pixelis.records import Action, ImageView, Question, StopReason, Trajectory


class Player:
    """Plays demonstration rows (a question's fields plus ``turns``) into trajectories and their views."""

    def __init__(self, config: Config, model_folder: str):
        from transformers import AutoTokenizer

        self.config = config
        self.spec = ModelSpec.load(model_folder)
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        self.renderer = Renderer(tokenizer, self.spec, config.dialogue, select(config.toolbox.operations))

    def play(self, row: dict[str, Any]) -> tuple[Trajectory, list[np.ndarray]]:
        """The trajectory of a row and the uint8 views of its images; DataFailure when an operation refuses or it is too long."""
        fields = {key: value for key, value in row.items() if key != "turns"}
        question = Question.model_validate(fields)
        media = {item.id: open_media(item, self.config.toolbox) for item in question.media}
        images, views = first_look(media, self.config.dialogue, self.spec.multiple)
        trajectory = Trajectory(question_id=question.id, turns=self.renderer.prompt(question, images), images=images)
        successes = 0
        for step in row["turns"]:
            if "answer" in step:
                trajectory.turns.append(self.renderer.assistant(str(step["answer"]), step.get("think"), images))
                trajectory.answer, trajectory.stop_reason = str(step["answer"]), StopReason.ANSWER
                continue
            action = _action(step)
            trajectory.turns.append(self.renderer.assistant(action, step.get("think"), images))
            observation, shown = execute(action, self._scene(media, trajectory, images), self.renderer.operations)
            if observation.status != "ok":
                raise DataFailure(f"{question.id}: {action.op} failed: {observation.text}", code=observation.code or "operation")
            data = {**observation.data, "op": action.op, "target": action.target}
            observation = name_observation(observation.model_copy(update={"data": data}), successes)
            successes += 1
            images += observation.images
            views += shown
            trajectory.turns.append(self.renderer.observation(observation))
        trajectory.images = images
        if len(trajectory.token_ids()) > self.config.dialogue.max_context:
            raise DataFailure(f"{question.id} is longer than dialogue.max_context", code="over_context")
        return trajectory, views

    def _scene(self, media: dict[str, Any], trajectory: Trajectory, images: list[ImageView]) -> Scene:
        d = self.config.dialogue
        return Scene(
            media=media,
            images=images,
            objects=trajectory.objects,
            budget=PixelBudget(d.crop.min_pixels, d.crop.max_pixels),
            frame_budget=PixelBudget(d.frame.min_pixels, d.frame.max_pixels),
            multiple=self.spec.multiple,
            kind=self.renderer.coordinates,
            settings=self.config.toolbox,
        )


def _action(step: dict[str, Any]) -> Action:
    arguments = {key: value for key, value in step.items() if key not in ("think", "op", "target")}
    return Action(op=step["op"], target=step.get("target", "img0"), arguments=arguments)
