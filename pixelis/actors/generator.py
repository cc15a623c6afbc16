"""The Generator actor: one engine, one policy version, many episodes at once."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from pixelis.actors.toolbox import Call
from pixelis.config import Config
from pixelis.dialogue.agent import Limits, run_episode
from pixelis.dialogue.render import Renderer
from pixelis.engines import SamplingParams
from pixelis.errors import DeadlineExceeded
from pixelis.operations import select
from pixelis.records import Action, Group, ImageView, Observation, Question

Views = dict[str, list[np.ndarray]]
"""Trajectory id -> the uint8 views of its images, in the order of ``Trajectory.images``."""

Objects = dict[str, dict[str, Any]]
"""What earlier operations of an episode found, by id."""


@ray.remote(max_restarts=-1, max_task_retries=0, max_concurrency=1024, concurrency_groups={"health": 2})
class Generator:
    """Runs episodes of the current policy; never decodes a picture itself."""

    def __init__(self, config: Config, store: str, toolboxes: list[str], index: int = 0):
        # Names, not handles: a handle among its arguments would live in the object store and could make a restart impossible.
        self.config, self.store, self.index = config, ray.get_actor(store), index
        from pixelis.engines.hf import HfEngine
        from pixelis.policy.model import resolve

        folder = resolve(config.policy.model)
        self.engine = HfEngine(folder, config.policy, config.engine, seed=config.run.seed + index)
        operations = select(config.toolbox.operations)
        self.renderer = Renderer(self.engine.tokenizer, self.engine.spec, config.dialogue, operations)
        self.tools = RemoteTools(
            [ray.get_actor(name) for name in toolboxes],
            self.engine.spec.multiple,
            self.renderer.coordinates,
            config.toolbox.deadline_s,
        )
        self.started, self.loading = False, asyncio.Lock()

    async def _start(self) -> None:
        """A fresh (or restarted) generator serves the promoted version, never the bare model by accident."""
        if not self.started:
            async with self.loading:
                if not self.started:
                    await self._load(await self.store.promoted.remote())

    async def _load(self, version: int) -> None:
        (ref,) = await self.store.get.remote(version)
        await self.engine.load(version, await ref)
        self.started = True

    async def load(self, version: int) -> int:
        """Switch to ``version`` once no episode is running; returns the version now loaded."""
        async with self.loading:
            # A fresh engine calls its bare model version 0, which may be the name of an adapter.
            if not self.started or self.engine.version != version:
                await self._load(version)
            return self.engine.version

    @ray.method(concurrency_group="health")
    async def health(self) -> dict[str, Any]:
        """The engine's version and load; answers while the engine is busy."""
        return {
            "index": self.index,
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            **(await self.engine.health()),
        }

    @ray.method(num_returns=2)
    async def rollout(
        self,
        question: Question,
        group_id: str,
        n: int,
        sampling: SamplingParams,
        operations: bool = True,
        max_turns: int | None = None,
    ) -> tuple[Group, Views]:
        """``n`` episodes of one question: the group's record, and beside it the views (the caller owns both)."""
        await self._start()
        d = self.config.dialogue
        limits = Limits(max_turns or d.max_turns, d.max_turn_tokens, d.max_context, d.max_images)
        sessions = [await self.engine.open(group_id) for _ in range(n)]
        try:
            version = self.engine.version
            pictures, (images, views) = await self.tools.open(question)
            episodes = await asyncio.gather(
                *(
                    run_episode(
                        session,
                        self.renderer,
                        question,
                        images,
                        views,
                        self.tools.bound(pictures) if operations else None,
                        limits,
                        SamplingParams(sampling.temperature, sampling.top_p, d.max_turn_tokens, sampling.seed + i),
                        group_id=group_id,
                        policy_version=version,
                    )
                    for i, session in enumerate(sessions)
                )
            )
        finally:
            for session in sessions:
                session.close()
        group = Group(id=group_id, question=question, trajectories=[e.trajectory for e in episodes], policy_version=version)
        return group, {e.trajectory.id: e.views for e in episodes}


class RemoteTools:
    """Toolbox actors as the agent's tools; calls made in the same tick of the event loop travel together."""

    def __init__(self, toolboxes: list[ActorHandle], multiple: int, kind: str, deadline_s: float):
        self.toolboxes, self.multiple, self.kind, self.deadline_s = toolboxes, multiple, kind, deadline_s
        self.turn = 0
        self.waiting: list[tuple[Action, list[ImageView], Objects, ray.ObjectRef, asyncio.Future]] = []

    def _next(self) -> ActorHandle:
        self.turn += 1
        return self.toolboxes[self.turn % len(self.toolboxes)]

    async def open(self, question: Question) -> tuple[ray.ObjectRef, Any]:
        """Reference to the full-resolution pictures, and their (images, views)."""
        pictures, views = self._next().open.options(num_returns=2).remote(question.media, self.multiple)
        try:
            return pictures, await asyncio.wait_for(_result(views), self.deadline_s)
        except TimeoutError:
            raise DeadlineExceeded(f"no toolbox opened the pictures of {question.id} in {self.deadline_s:g} s") from None

    def bound(self, pictures: ray.ObjectRef) -> BoundTools:
        """The tools of one group of episodes."""
        return BoundTools(self, pictures)

    async def submit(
        self, action: Action, images: list[ImageView], objects: Objects, pictures: ray.ObjectRef
    ) -> tuple[Observation, list[np.ndarray]]:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        if not self.waiting:
            loop.call_soon(self._flush)
        self.waiting.append((action, images, objects, pictures, done))
        return await done

    def _flush(self) -> None:
        batch, self.waiting = self.waiting, []
        share = max(1, -(-len(batch) // len(self.toolboxes)))
        for start in range(0, len(batch), share):
            task = asyncio.get_running_loop().create_task(self._execute(batch[start : start + share]))
            task.add_done_callback(lambda t: t.cancelled() or t.exception())

    async def _execute(self, batch: list[tuple[Action, list[ImageView], Objects, ray.ObjectRef, asyncio.Future]]) -> None:
        groups: dict[ray.ObjectRef, int] = {}
        calls = [Call(action, images, objects, groups.setdefault(ref, len(groups))) for action, images, objects, ref, _ in batch]
        futures = [entry[4] for entry in batch]
        try:
            reply = self._next().execute.remote(calls, self.multiple, self.kind, *groups)
            results = await asyncio.wait_for(_result(reply), self.deadline_s)
        except TimeoutError:
            text = f"the operation took longer than {self.deadline_s:g} s"
            results = [(Observation(status="error", code="timeout", text=text), [])] * len(batch)
        except ray.exceptions.RayError:
            results = [(Observation(status="error", code="crashed", text="the operation crashed"), [])] * len(batch)
        for future, result in zip(futures, results, strict=True):
            if not future.done():
                future.set_result(result)


class BoundTools:
    """What an episode sees as its tools: the operations on its own pictures."""

    def __init__(self, tools: RemoteTools, pictures: ray.ObjectRef):
        self.tools, self.pictures = tools, pictures

    async def execute(self, action: Action, images: list[ImageView], objects: Objects) -> tuple[Observation, list[np.ndarray]]:
        """Run one operation on the Toolbox pool; every failure is an error observation."""
        return await self.tools.submit(action, images, objects, self.pictures)


async def _result(ref: ray.ObjectRef) -> Any:
    return await ref
