"""Groups of episodes that an outside agent plays: a user's function, or programs that take them over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import socket
from dataclasses import replace
from pathlib import Path

import ray
import uvicorn
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pixelis.actors.agent_runner import AgentRunner, Outcome
from pixelis.actors.episodes import Episodes, OutsideEpisode
from pixelis.actors.generator_router import GeneratorRouter, Reservation
from pixelis.actors.report import merge_views
from pixelis.actors.rollout_messages import RolloutRequest, RolloutResult
from pixelis.config import Config
from pixelis.errors import InfraFailure
from pixelis.files import replacing
from pixelis.records import Group
from pixelis.telemetry.metrics import count

HTTP = "http"
"""Value of ``rft.agent`` for programs that take their questions themselves."""
ATTEMPTS = 2
"""Attempts of an episode whose agent's process dies."""


class AgentRollouts:
    """Rolls out requests as a `GeneratorRouter` does, but an outside agent owns the loop."""

    def __init__(self, config: Config, router: GeneratorRouter):
        self.config, self.timeout_s = config, config.rft.agent_timeout_s
        self.key = secrets.token_urlsafe(24)
        self.episodes = Episodes(config, router)
        self.starting = asyncio.Lock()
        self.server: asyncio.Task | None = None
        self.url = ""
        self.runners = list[ActorHandle]()
        self.turn = itertools.count()

    async def rollout(self, request: RolloutRequest, reserved: Reservation | None = None) -> RolloutResult:
        """The group of a request. An episode whose agent fails is unscored, with the cause."""
        await self._start()
        played = await asyncio.gather(*(self._episode(request, i, reserved) for i in range(request.samples)))
        trajectories = [episode.trajectory() for episode in played]
        version = min(t.policy_version for t in trajectories)
        group = Group(
            id=request.group_id, question=request.question, trajectories=trajectories, policy_version=version
        )
        return RolloutResult(group, merge_views([episode.views() for episode in played]))

    async def _episode(
        self, request: RolloutRequest, sample: int, reserved: Reservation | None
    ) -> OutsideEpisode:
        sampling = replace(request.sampling, seed=request.sampling.seed + sample)
        for attempt in range(ATTEMPTS):
            episode = self.episodes.open(
                request.question, request.group_id, sampling, self.timeout_s, reservation=reserved
            )
            try:
                if self.runners:
                    episode.end(await self._run(episode))
                else:
                    await self.episodes.offered(episode)
            except RayActorError:
                episode.fail("agent_died")
            except TimeoutError:
                episode.fail("agent_timeout")
            except Exception as error:  # a user's function can raise anything
                episode.fail("agent_failed", error)
            self.episodes.close(episode)
            count("rollouts/agent_episodes", tags={"outcome": episode.cause or "ended"})
            if episode.cause not in ("agent_died", "agent_timeout") or attempt == ATTEMPTS - 1:
                break
        return episode

    async def _run(self, episode: OutsideEpisode) -> Outcome:
        runner = self.runners[next(self.turn) % len(self.runners)]
        url = f"{self.url}/v1/episodes/{episode.id}/v1"
        return await runner.play.remote(episode.question, url, self.key, self.timeout_s)

    async def _start(self) -> None:
        """Serve the episode routes, and start the processes of a function. Idempotent."""
        async with self.starting:
            if self.server is not None:
                return
            host, _, port = self.config.rft.agent_address.rpartition(":")
            server = uvicorn.Server(uvicorn.Config(create_app(self.episodes, self.key), log_level="warning"))
            try:
                listener = socket.create_server((host, int(port)))
            except OSError as error:
                raise InfraFailure(
                    f"the episode routes cannot listen at {host}:{port}: {error}", fix="set rft.agent_address"
                ) from None
            shown = ray.util.get_node_ip_address() if host in ("0.0.0.0", "::", "") else host
            self.url = f"http://{shown}:{listener.getsockname()[1]}"
            self.server = asyncio.create_task(server.serve(sockets=[listener]))
            reference = self.config.rft.agent
            assert reference is not None
            if reference == HTTP:
                file = Path(self.config.run.dir) / "episodes.json"
                with replacing(file) as out:
                    out.write(json.dumps({"url": self.url, "key": self.key}).encode())
                return
            # Loopback is enough for a function on this node, and nobody else can call.
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            options = {} if shown != host else {"scheduling_strategy": here}
            self.runners = [
                AgentRunner.options(num_cpus=0, **options).remote(reference, self.config.toolbox)
                for _ in range(self.config.rft.agent_workers)
            ]
