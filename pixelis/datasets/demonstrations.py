"""Plays demonstrations into trajectories whose observations come from executing the operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from pixelis.config import Config
from pixelis.datasets.media import open_media
from pixelis.dialogue.agent import name_observation
from pixelis.dialogue.dialects import default_target
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.spec import ModelSpec, load_tokenizer
from pixelis.errors import DataFailure
from pixelis.operations import Scene, execute, select
from pixelis.operations.media import first_look
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.records import Action, Demonstration, ImageView, Observation, StopReason, Trajectory


class Player:
    """Plays demonstrations into trajectories and views."""

    def __init__(self, config: Config, model_folder: str):
        self.config, tokenizer = config, load_tokenizer(model_folder)
        self.spec = ModelSpec.load(model_folder, tokenizer)
        self.renderer = Renderer(tokenizer, self.spec, config.dialogue, select(config.toolbox.operations))

    def play(self, question: Demonstration) -> tuple[Trajectory, list[np.ndarray]]:
        """The trajectory of a demonstration and the views of its images, uint8 [h, w, 3].

        A refused call gives an error observation in a turn with ``learn`` False, as in an episode, and DataFailure in any other
        turn. DataFailure also if the trajectory is too long.
        """
        media = {item.id: open_media(item, self.config.toolbox) for item in question.media}
        images, views = first_look(media, self.config.dialogue, self.spec.multiple)
        turns, dialect, offered = (
            self.renderer.prompt(question, images),
            self.renderer.dialect.name,
            self.renderer.offered(question),
        )
        trajectory = Trajectory(question_id=question.id, dialect=dialect, turns=turns, images=images)
        successes = 0
        for step in question.turns:
            if step.answer is not None:
                trajectory.turns.append(self.renderer.assistant(step.answer, step.think, images))
                trajectory.answer, trajectory.stop_reason = step.answer, StopReason.ANSWER
                continue
            action = Action(op=step.op or "", target=step.target or default_target(media), arguments=step.arguments)
            turn = self.renderer.assistant(action, step.think, images)
            # Parsed from its tokens, with coordinates on the dialect's grid: a policy's call must have the same result.
            read, reply = self.renderer.read(turn.tokens, [0.0] * len(turn.tokens), images, offered)
            trajectory.turns.append(turn.model_copy(update={"learn": step.learn, "action": read.action, "error": read.error}))
            if reply.action is None:
                code, text = (reply.error.code, reply.error.message) if reply.error else ("bad_json", "no call was found")
                observation, new_views = Observation(status="error", code=code, text=text), list[np.ndarray]()
            else:
                action = reply.action
                observation, new_views = execute(action, self.scene(media, trajectory.objects, images), offered)
            if observation.status != "ok":
                if step.learn:
                    code = observation.code or "operation"
                    raise DataFailure(f"{question.id}: {action.op} failed: {observation.text}", code=code)
                trajectory.turns.append(self.renderer.observation(observation, len(images)))
                continue
            data = {**observation.data, "op": action.op, "target": action.target}
            observation = name_observation(observation.model_copy(update={"data": data}), successes)
            successes += 1
            trajectory.turns.append(self.renderer.observation(observation, len(images)))
            images += observation.images
            views += new_views
        trajectory.images = images
        if len(trajectory.token_ids()) > self.config.dialogue.max_context:
            raise DataFailure(f"{question.id} is longer than dialogue.max_context", code="over_context")
        return trajectory, views

    def scene(self, media: dict[str, Any], objects: dict[str, dict[str, Any]], images: list[ImageView]) -> Scene:
        """The media, images and objects of an episode as operations access them."""
        d = self.config.dialogue
        return Scene(
            media=media,
            images=images,
            objects=objects,
            budget=PixelBudget(d.crop.min_pixels, d.crop.max_pixels),
            frame_budget=PixelBudget(d.frame.min_pixels, d.frame.max_pixels),
            multiple=self.spec.multiple,
            kind=self.renderer.coordinates,
            settings=self.config.toolbox,
        )
