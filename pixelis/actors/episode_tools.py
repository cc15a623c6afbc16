"""The tools of an episode on a toolbox pool, as `dialogue.agent` calls them."""

from __future__ import annotations

from pixelis.actors.toolbox import Call, Objects, Outcome
from pixelis.actors.toolbox_pool import ToolboxPool
from pixelis.actors.toolbox_work import Opened
from pixelis.errors import InfraFailure
from pixelis.records import Action, ImageView, Question, new_id
from pixelis.telemetry import tracing


class BoundTools:
    """The operations on the opened media of one question."""

    def __init__(self, pool: ToolboxPool, opened: Opened):
        self.pool, self.opened = pool, opened

    async def execute(self, action: Action, images: list[ImageView], objects: Objects) -> Outcome:
        with tracing.span(action.op, target=action.target) as span:
            observation, views = await self.pool.execute(action, images, objects, self.opened)
            if observation.status == "error":
                tracing.failed(span, observation.code or "")
            return observation, views


class EnvironmentTools:
    """The environment of one episode. It lives in one process and ends with it.

    Raises InfraFailure with a code `environment_...` when it is lost, takes too long, or fails itself.
    """

    def __init__(self, pool: ToolboxPool, opened: Opened, question: Question):
        self.pool, self.opened, self.question = pool, opened, question
        self.worker, self.episode = pool.environment_worker(), new_id("environment")
        self.worker.environments.add(self.episode)

    async def reset(self) -> Outcome:
        self.worker.environments.add(self.episode)
        return await self._call(
            Call(Action(op="reset", target=""), [], {}, episode=self.episode, question=self.question)
        )

    async def execute(self, action: Action, images: list[ImageView], objects: Objects) -> Outcome:
        if self.episode not in self.worker.environments:
            raise InfraFailure("the process of the environment ended", code="environment_lost")
        return await self._call(Call(action, images, objects, episode=self.episode))

    async def _call(self, call: Call) -> Outcome:
        with tracing.span(call.action.op, environment=self.question.environment) as span:
            observation, views = await self.pool.execute_on(self.worker, call, self.opened)
            if observation.status == "error":
                tracing.failed(span, observation.code or "")
        if (observation.code or "").startswith("environment_"):
            raise InfraFailure(observation.text, code=observation.code)
        return observation, views

    def close(self) -> None:
        if self.episode in self.worker.environments:
            self.worker.environments.discard(self.episode)
            self.worker.handle.release.remote(self.episode)
