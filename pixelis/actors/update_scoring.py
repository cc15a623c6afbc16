"""Scores update tasks whose rewards need a Scorer actor: one with a state, or with vectors of the embedder."""

from __future__ import annotations

import asyncio
import logging

from ray.exceptions import RayError

from pixelis.actors.cluster import actor_handle, unwrap_ray_error
from pixelis.actors.evolution_monitor import log_failures
from pixelis.actors.group_views import GroupViews, Views
from pixelis.config import Config
from pixelis.errors import BadConfig
from pixelis.evolution.updates import as_question_group
from pixelis.records import Question, UpdateTask

log = logging.getLogger(__name__)


class UpdateScoring:
    """``names``: of the Scorer and of the Embedder of its states. Raises BadConfig without those that the rewards need.

    Without ``rewards.needs_scorer`` tasks arrive scored and are returned as they are.
    """

    def __init__(self, config: Config, names: tuple[str, str] | None):
        self.rewards = config.rewards
        if config.rewards.needs_scorer and names is None:
            raise BadConfig("these rewards need a Scorer actor", fix="name one, or set rewards.preset=null")
        self.names = names if config.rewards.needs_scorer else None

    async def score(self, task: UpdateTask, views: GroupViews | Views, question: Question | None, step: int | None) -> UpdateTask:
        """The task scored against its label; unscored if that fails.

        ``views`` are the arrays by trajectory id, or references to them. With ``step`` the rewards learn from the task.
        """
        if self.names is None:
            return task
        group = as_question_group(task, question)
        try:
            scorer, embedder = [await asyncio.to_thread(actor_handle, name) for name in self.names]
            states = embedder.states.remote(group, views) if self.rewards.needs_states else None
            scored = await scorer.score.remote(group, step, states, [task.pseudo_label])
        except (RayError, ValueError) as error:  # ValueError: no actor of this name runs
            log.warning("an update task cannot be scored: %s", unwrap_ray_error(error) or error)
            return task
        return task.model_copy(update={"trajectories": scored.trajectories})

    async def advance(self, step: int) -> None:
        """Let the rewards learn from the tasks of update ``step``."""
        if self.names is not None and self.rewards.stateful:
            with log_failures("the rewards did not learn from an update"):
                await (await asyncio.to_thread(actor_handle, self.names[0])).advance.remote(step)
