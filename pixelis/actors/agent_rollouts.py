"""Groups of episodes that an outside agent plays: a user's function, or programs that take them over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import socket
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import ray
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pixelis.actors.agent_runner import AgentQuestion, AgentRunner
from pixelis.actors.episode_routes import EpisodeHost, Piece, episode_router
from pixelis.actors.episodes import Episodes, OutsideEpisode
from pixelis.actors.generator_member import root_cause
from pixelis.actors.generator_router import GeneratorRouter, Reservation
from pixelis.actors.group_views import joined
from pixelis.actors.rollout_messages import RolloutRequest, RolloutResult
from pixelis.config import Config
from pixelis.errors import BadInput, InfraFailure, PixelisError
from pixelis.files import replacing
from pixelis.protocol.episodes import EpisodeReply, EpisodeRequest, NextEpisodeReply
from pixelis.protocol.errors import ApiError, parse_body
from pixelis.protocol.messages import Message
from pixelis.protocol.request import CompletionBody
from pixelis.records import Group
from pixelis.telemetry.events import EventLog
from pixelis.telemetry.metrics import count

HTTP = "http"
"""Value of ``rft.agent`` for programs that take their questions themselves."""
ATTEMPTS = 2
"""Attempts of an episode whose agent's process dies or is late."""
MAX_BODY_BYTES = 256_000_000
GRACE_S = 10.0
"""Seconds after its timeout in which a function must end: its process is killed otherwise."""
FILE_URL = "data:image/png;file={};base64,"
"""Stands for a picture of the question that an agent names by its id, as a file."""
FILE = "episodes.json"
"""In ``run.dir``: ``url`` and ``key`` of the routes."""


class AgentRollouts(Episodes):
    """Rolls out requests as a `GeneratorRouter` does, but an outside agent owns the loop."""

    def __init__(self, config: Config, router: GeneratorRouter):
        super().__init__(config, router)
        self.timeout_s = config.rft.agent_timeout_s
        self.questions: dict[str, AgentQuestion] = {}
        """What the agents of open episodes are shown, by the id of the episode."""
        self.offers: asyncio.Queue[OutsideEpisode] = asyncio.Queue()
        self.events = EventLog(config.run.dir)
        self.key, self.url = secrets.token_urlsafe(24), ""
        self.starting = asyncio.Lock()
        self.server: asyncio.Task[None] | None = None
        self.runners = list[ActorHandle]()
        self.turn = itertools.count()

    async def rollout(self, request: RolloutRequest, reserved: Reservation | None = None) -> RolloutResult:
        """The group of a request. An episode whose agent fails is unscored, with the cause.

        Raises BadInput for a question that cannot be shown to an agent.
        """
        await self._start()
        question = await asyncio.to_thread(AgentQuestion.of, request.question, self.config.toolbox)
        shown = ray.put(question)  # once, for all samples
        played = await asyncio.gather(
            *(self._episode(request, i, reserved, question, shown) for i in range(request.samples))
        )
        records = [episode.record() for episode in played]
        trajectories = [trajectory for trajectory, _ in records]
        group = Group(
            id=request.group_id,
            question=request.question,
            trajectories=trajectories,
            policy_version=min(t.policy_version for t in trajectories),
        )
        for episode in played:
            self.close(episode)
        try:
            return RolloutResult(group, await joined(views for _, views in records if views is not None))
        except RayError:
            raise InfraFailure("the pictures of a group are lost", code="episode_lost") from None

    def close(self, episode: OutsideEpisode) -> None:
        super().close(episode)
        self.questions.pop(episode.id, None)

    async def _episode(
        self,
        request: RolloutRequest,
        sample: int,
        reserved: Reservation | None,
        question: AgentQuestion,
        shown: ray.ObjectRef,
    ) -> OutsideEpisode:
        for attempt in range(ATTEMPTS):
            episode = self.begin(
                request.question,
                request.group_id,
                request.sampling,
                self.timeout_s,
                sample=sample,
                reservation=reserved,
                own={FILE_URL.format(media.id): media for media in request.question.media},
            )
            self.questions[episode.id] = question
            try:
                await self._play(episode, shown)
            except RayActorError:
                episode.end(cause="agent_died")
            except TimeoutError:
                episode.end(cause="agent_timeout")
            except BaseException:  # of the run, as its cancellation
                episode.end(cause="cancelled")
                self.close(episode)
                raise
            count("rollouts/agent_episodes", tags={"outcome": episode.cause or "ended"})
            if episode.cause not in ("agent_died", "agent_timeout") or attempt == ATTEMPTS - 1:
                break
            self.close(episode)
        return episode

    async def _play(self, episode: OutsideEpisode, shown: ray.ObjectRef) -> None:
        """Return when the episode has ended. Raises RayActorError if the process of the agent dies."""
        if not self.runners:
            await self.offers.put(episode)
            async with asyncio.timeout(self.timeout_s):
                await episode.ended.wait()
            return
        runner = self.runners[next(self.turn) % len(self.runners)]
        url = f"{self.url}/v1/episodes/{episode.id}/v1"
        try:
            async with asyncio.timeout(self.timeout_s + GRACE_S):
                episode.end(await runner.play.remote(shown, url, self.key, self.timeout_s))
        except RayTaskError as error:
            # Whatever else an agent raises is its fault, not the question's
            if isinstance(cause := root_cause(error), TimeoutError):
                raise cause from None
            self.agent_failed(episode, f"{cause!r:.500}")
        except TimeoutError:  # its process hangs
            ray.kill(runner, no_restart=False)
            raise

    async def messages(self, episode: OutsideEpisode, body: CompletionBody) -> list[Message]:
        """The messages of a request, whose agent names the question's pictures as files, or sends them back."""
        body.use_files({media.id: FILE_URL.format(media.id) for media in episode.question.media})
        messages = body.normal_messages()
        urls = {url for message in messages if message.role == "user" for url in message.media}
        question = self.questions.get(episode.id)
        if question is not None and not urls <= episode.own.keys():
            pictures = await asyncio.to_thread(lambda: question.pictures)
            sent = {pictures[media.id]: media for media in episode.question.media}
            episode.own = {**episode.own, **sent}
        return messages

    def agent_failed(self, episode: OutsideEpisode, error: str) -> bool:
        """With an event of the run."""
        if ended := super().agent_failed(episode, error):
            self.events.write("agent_failed", question=episode.question.id, error=error[:500])
        return ended

    async def open(self, owner: str, body: EpisodeRequest) -> NoReturn:
        message = "a training run has its own questions: POST /v1/episodes/next"
        raise ApiError(403, message, "questions_of_run")

    async def next(self, owner: str, wait_s: float) -> NextEpisodeReply | None:
        """The next question, None if there is none in ``wait_s``."""
        try:
            async with asyncio.timeout(wait_s):
                episode = await self.offers.get()
                while episode.ended.is_set():  # it has expired
                    episode = await self.offers.get()
        except TimeoutError:
            return None
        question, shown = self.questions[episode.id], self.shown(episode)
        return NextEpisodeReply(
            **shown.model_dump(include=set(EpisodeReply.model_fields)),
            question=question.text,
            images=await asyncio.to_thread(lambda: list(question.pictures.values())),
            metadata=question.meta,
        )

    async def _start(self) -> None:
        """Serve the episode routes, and start the processes of a function. Idempotent."""
        async with self.starting:
            if self.server is not None:
                return
            host, _, port = self.config.rft.agent_address.rpartition(":")
            try:
                listener = socket.create_server((host, int(port)))
            except (OSError, ValueError) as error:
                problem = f"the episode routes cannot listen at {self.config.rft.agent_address}: {error}"
                raise InfraFailure(problem, fix="set rft.agent_address to HOST:PORT") from None
            everywhere = host in ("0.0.0.0", "::", "")
            shown = ray.util.get_node_ip_address() if everywhere else host
            self.url = f"http://{shown}:{listener.getsockname()[1]}"
            server = uvicorn.Server(uvicorn.Config(create_app(self), lifespan="off", log_level="warning"))
            self.server = asyncio.create_task(server.serve(sockets=[listener]))
            reference = self.config.rft.agent or HTTP
            if reference == HTTP:
                with replacing(Path(self.config.run.dir) / FILE) as out:
                    out.write(json.dumps({"url": self.url, "key": self.key}).encode())
                return
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            options: dict[str, Any] = {} if everywhere else {"scheduling_strategy": here}
            self.runners = [
                AgentRunner.options(num_cpus=0, **options).remote(reference)  # type: ignore[attr-defined]
                for _ in range(self.config.rft.agent_workers)
            ]


class RunHost(EpisodeHost):
    """The episodes of a training run, all for the holder of its key."""

    def __init__(self, rollouts: AgentRollouts):
        super().__init__(rollouts.config, Path(rollouts.config.policy.model).name)
        self.rollouts = rollouts

    async def call(self, method: str, *arguments: Any) -> Any:
        return await getattr(self.rollouts, method)("", *arguments)

    async def complete(self, id: str, body: CompletionBody) -> AsyncGenerator[Piece, None]:
        episode = self.rollouts.get("", id)
        sampling = episode.sampling
        if body.token_limit is not None:
            sampling = replace(sampling, max_tokens=min(body.token_limit, sampling.max_tokens))
        tools = body.toolset(self.operations)
        messages = await self.rollouts.messages(episode, body)
        return self.rollouts.reply(episode, messages, tools, sampling, bool(body.stream))


def create_app(rollouts: AgentRollouts) -> FastAPI:
    """The episode routes of a training run, for callers with its key."""
    app, host = FastAPI(openapi_url=None), RunHost(rollouts)

    async def host_of(request: Request) -> EpisodeHost:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(key.encode(), rollouts.key.encode()):
            raise ApiError(401, f"the key is missing or wrong: see {FILE} in run.dir", "invalid_api_key")
        return host

    def body_of(model: type[BaseModel]) -> Callable[..., Any]:
        async def read(request: Request) -> BaseModel:
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", "body_too_large")
            return parse_body(model, bytes(body) or b"{}")

        return read

    async def answer(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    app.include_router(episode_router(host_of, body_of, as_api_error))
    for kind in (ApiError, PixelisError, RayError):
        app.add_exception_handler(kind, answer)
    return app


def as_api_error(error: BaseException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadInput):
        return ApiError(400, error.message, error.code)
    return ApiError(503, "the policy cannot reply at the moment", "unavailable", retry_after_s=2.0)
