"""The Embedder actor: vectors of the frozen base model, of episodes for rewards and questions for memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray

from pixelis.actors.cluster import alone_on, freeze_gc, lower_priority, use_reserved_gpus
from pixelis.actors.group_views import GroupViews, Views, fetch_groups
from pixelis.config import Config
from pixelis.records import Group, Question

Parts = list[tuple[np.ndarray | None, np.ndarray | None]]
"""Vectors [hidden size] of pictures and text of each question; None where it has none."""


@ray.remote(max_restarts=-1, max_task_retries=2)
class Embedder:
    """The policy's base model without an adapter: its vectors stay while the policy learns."""

    def __init__(self, config: Config):
        gpus = use_reserved_gpus()
        import torch

        from pixelis.policy.model import load_model

        torch.set_num_threads(config.engine.threads)
        self.config = config
        lower_priority(config)
        with alone_on(gpus):
            self.model, self.tokenizer, self.spec = load_model(config.policy)
        self.spec.family.attend_packed(self.model)
        freeze_gc()

    def health(self) -> str:
        return "ok"

    def states(self, group: Group, views: GroupViews | Views) -> dict[str, list[list[float]]]:
        """Vectors by trajectory id, one more than policy turns; without those that the model cannot process."""
        from pixelis.policy.embed import turn_states

        if isinstance(views, GroupViews):
            (views,) = fetch_groups([views])
        images = [views[t.id] for t in group.trajectories]
        vectors = turn_states(
            self.model, self.spec, group.trajectories, images, self.config.learner.row_tokens
        )
        return {
            t.id: states.tolist()
            for t, states in zip(group.trajectories, vectors, strict=True)
            if states is not None
        }

    def first_features(self, groups: Sequence[Group], views: Sequence[GroupViews]) -> Parts:
        """Mean features of the pictures that each group's episodes began with, and of its question's text."""
        from pixelis.policy.embed import mean_feature

        shown = []
        for group, by_trajectory in zip(groups, fetch_groups(views), strict=True):
            trajectory = group.trajectories[0]
            turns = itertools.takewhile(lambda turn: not turn.is_policy, trajectory.turns)
            first = {id for turn in turns for id in turn.images}
            images = zip(trajectory.images, by_trajectory[trajectory.id], strict=True)
            shown.append([view for image, view in images if image.id in first])
        return self._parts([group.question for group in groups], shown, mean_feature)

    def question_vector(self, question: Question, views: list[np.ndarray]) -> np.ndarray:
        return self.question_vectors([question], [views])[0]

    def question_vectors(
        self, questions: Sequence[Question], views: Sequence[list[np.ndarray]]
    ) -> list[np.ndarray]:
        from pixelis.policy.embed import image_vector
        from pixelis.records.vectors import combine

        weights = self.config.memory.visual, self.config.memory.text
        return [combine(*parts, weights) for parts in self._parts(questions, views, image_vector)]

    def _parts(
        self, questions: Sequence[Question], views: Sequence[list[np.ndarray]], pool: Callable[..., Any]
    ) -> Parts:
        from pixelis.operations.pixel_budget import PixelBudget, fit
        from pixelis.policy.embed import question_vectors

        budget = PixelBudget(self.config.dialogue.input.min_pixels, self.config.dialogue.input.max_pixels)
        views = [[fit(view, budget, self.spec.multiple) for view in images] for images in views]
        texts = [self.tokenizer(q.conversation, add_special_tokens=False)["input_ids"] for q in questions]
        return question_vectors(self.model, self.spec, texts, views, pool)
