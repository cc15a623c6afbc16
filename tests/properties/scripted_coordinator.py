"""A Coordinator and its router on one event loop, with scripted generators and scorers and without Ray."""

from __future__ import annotations

import asyncio
import functools
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError

from pixelis.actors import coordinator as coordinators
from pixelis.actors.coordinator import Coordinator
from pixelis.actors.generator_router import RolloutRequest, RouterTimeouts
from pixelis.config import Config, DataConfig, parse
from pixelis.datasets.questions import read_questions
from pixelis.errors import DataFailure
from pixelis.records import Group, Question, Trajectory
from pixelis.rewards.grader import Advance

REAL: Any = Coordinator.__ray_metadata__.modified_class


class Method:
    """`handle.method.remote(...)` on this event loop."""

    def __init__(self, call: Any):
        self.call = call

    def options(self, num_returns: int) -> Method:
        return self

    def remote(self, *arguments: Any) -> Any:
        return self.call(*arguments)


@dataclass
class Generator:
    """Answers after a while; now and then it dies with work in flight and comes back without its version."""

    chance: random.Random
    deaths: float = 0.0
    refused: float = 0.0
    version: int = -1
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rollout = Method(self._rollout)
        self.load = Method(self._load)
        self.health = Method(lambda: asyncio.sleep(0))

    async def _load(self, version: int) -> int:
        await asyncio.sleep(self.chance.random() * 0.002)
        self.version = version
        return version

    def _rollout(self, request: RolloutRequest) -> tuple[Any, ...]:
        views = [{} for _ in (request.question.media if request.views else ())]
        group = self._group(request.question, request.group_id, request.samples)
        return (asyncio.ensure_future(group), {}, *views)

    async def _group(self, question: Question, group_id: str, n: int) -> Group:
        version = self.version
        await asyncio.sleep(self.chance.random() * (0.004 if self.chance.random() < 0.9 else 0.03))
        if self.chance.random() < self.deaths:
            self.version = -1
            raise ActorUnavailableError("it died", None)
        if random.Random(question.id).random() < self.refused:
            raise DataFailure("not this one", code="over_context")
        self.done[question.id] += 1
        episode = Trajectory(question_id=question.id, group_id=group_id, policy_version=version)
        result = [episode.model_copy() for _ in range(n)]
        return Group(id=group_id, question=question, trajectories=result, policy_version=version)


class Scorer:
    """Rewards that differ within a group."""

    def __init__(self) -> None:
        self.score, self.advance, self.load = Method(self._score), Method(self._advance), Method(self._load)

    async def _load(self, state: bytes | None) -> None:
        pass

    async def _advance(self, step: int, is_last: bool = False) -> Advance:
        return Advance()

    async def _score(self, group: Group, step: int | None) -> Group:
        await asyncio.sleep(0)
        scored = [
            t.model_copy(update={"reward": float(i % 2), "rewards": {"accuracy": 1.0}})
            for i, t in enumerate(group.trajectories)
        ]
        return group.model_copy(update={"trajectories": scored})


def on_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Runs a test on an event loop: questions without Ray Data, actors that are objects of this process."""

    def plain(data: DataConfig, seed: int, start: int, *_: Any) -> Iterator[Question]:
        return read_questions(data.train, seed=seed, start=start, limit=data.limit)

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coordinators, "question_stream", plain)
            patch.setattr(coordinators, "actor_handle", lambda actor: actor)
            quick = RouterTimeouts(60.0, 60.0, retry_pause_s=0.001)
            patch.setattr(coordinators.RouterTimeouts, "of", lambda _: quick)
            patch.setattr(ray, "cancel", lambda call: call.cancel())
            asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


RUN = tempfile.TemporaryDirectory(prefix="pixelis-coordinator-")


def settings_of(sections: dict[str, dict[str, Any]] | None = None, **rft: Any) -> Config:
    run = {"dir": RUN.name, **(sections or {}).get("run", {})}
    return parse({"policy": {"model": "none"}, **(sections or {}), "run": run, "rft": rft})
