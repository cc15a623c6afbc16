"""Serve the agent over HTTP, remember its answers and, unless evolution.enabled=false, learn from its traffic.

Without a file the packaged agent of six operations is served.

    curl localhost:8000/v1/agent -H 'content-type: application/json' \\
        -d '{"question": "...", "image": "data:image/png;base64,..."}'

http://localhost:8000/ has a page to ask questions and to watch the evolution. Every request is sampled
serve.samples times; a confident vote becomes an update of the adapter, which is served unless the canary
rejects it. Ctrl-C stops the service; updates are in run.dir/checkpoints. On a cluster:

    PIXELIS_API_KEY=... serve run pixelis.jobs.serve:application config=FILE policy.adapter=CHECKPOINT
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayError

from pixelis import config as configuration
from pixelis.actors import cluster, learner, placement, reservations
from pixelis.actors.node_watch import HeadWatch
from pixelis.actors.serving import ServingActors, online
from pixelis.actors.train_job import TrainJob
from pixelis.actors.update_source import UpdateSource
from pixelis.actors.weights import CandidatePublisher
from pixelis.config import Config
from pixelis.errors import BadInput, InfraFailure, PixelisError
from pixelis.evolution.guard import AdaptiveKLController
from pixelis.jobs import dry_run
from pixelis.jobs.driver import job, run_folder, stop_file
from pixelis.jobs.watch import end_without_head, say
from pixelis.policy import checkpoint
from pixelis.serve import app
from pixelis.serve.agent_types import Backends
from pixelis.serve.gateway import SYSTEM

log = logging.getLogger(__name__)

GRACE_S = 8.0
"""Seconds for the learner's last checkpoint when the service stops."""
RETRY_S, LONGEST_RETRY_S = 1.0, 300.0
"""Seconds before a failed learner is restarted, doubled up to the second."""


@contextmanager
def serving(config: Config, actors: placement.Actors) -> Iterator[tuple[str, ServingActors]]:
    """Run the service on placed actors; yields its URL and actors. BadConfig if another runs on the cluster."""
    app.require_no_other(actors.name)
    with online(config, actors) as backend:
        try:
            yield app.start(config, backends(actors, backend)), backend
        finally:
            app.stop()


def backends(actors: placement.Actors, backend: ServingActors) -> Backends:
    return Backends(tuple(actors.names), ray.get_runtime_context().namespace, **backend.names)


def evolve(config: Config, actors: placement.Actors, evolution: ActorHandle) -> Path | None:
    """Learn from traffic until Evolution is drained or stopped; returns the last checkpoint, if any."""
    e = config.evolution
    # Traffic has no end, so schedules do not apply. The KL guard can undo an update of a single step.
    online_config = config.changed(
        {
            "learner.warmup": 0.0,
            "learner.schedule": "constant",
            "rft.minibatches": 1,
            "rft.epochs_per_batch": 1,
        }
    )
    # Independent of the offline algorithm's KL term; the controller adapts the weight.
    loss = config.rft.loss.model_copy(
        update={"kl": AdaptiveKLController(e.guard).beta, "kl_in": "loss", "kl_estimator": "k3"}
    )
    source = UpdateSource(
        online_config, evolution, CandidatePublisher(actors.store, e.canary.every if e.canary.enabled else 1)
    )
    # On processors that it shares with generators, learning waits for answers.
    train_job = TrainJob(
        online_config,
        source,
        loss,
        config.serve.sampling.temperature,
        e.ema,
        e.lr,
        background=not config.learner.gpus,
    )
    return learner.fit(train_job, name=actors.name)


class Learning:
    """The learner of a service, in a thread. Its failures raise an alert, never end the service.

    It is restarted after failures, except after a permanent one, ``failed``.
    """

    def __init__(self, config: Config, actors: placement.Actors, backend: ServingActors):
        self.config, self.actors, self.evolution = config, actors, backend.evolution
        self.failed: PixelisError | None = None
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(backend.evolution,), daemon=True)
        if self.evolution is not None:
            self.thread.start()

    def _run(self, evolution: ActorHandle) -> None:
        """Restart after transient failures, with a pause that doubles unless an update was made in between."""
        pause = RETRY_S
        while not self.stopping.is_set():
            before = checkpoint.latest(self.config.run.dir)
            try:
                evolve(self.config, self.actors, evolution)
                break
            except Exception as error:  # any failure must be reported
                cause = cluster.unwrap_ray_error(error) or InfraFailure(
                    f"the learner: {type(error).__name__}: {error}"
                )
                if self.stopping.is_set():
                    break
                log.exception("the learner failed")
                with contextlib.suppress(RayError):
                    ray.get(evolution.learner_failed.remote(str(cause)))
                if isinstance(cause, BadInput):
                    self.failed = cause
                    say(f"pixelis serve: learning has stopped, the service continues: {cause}")
                    break
                made_progress = checkpoint.latest(self.config.run.dir) != before
                pause = RETRY_S if made_progress else min(2 * pause, LONGEST_RETRY_S)
                say(f"pixelis serve: the learner restarts in {pause:g} s: {cause}")
                self.stopping.wait(pause)

    def stop(self) -> None:
        """Stop the learner; waits for its last checkpoint."""
        self.stopping.set()
        if self.evolution is not None:
            stop_file(self.config).touch()
            ray.get(self.evolution.stop.remote())
            self.thread.join(GRACE_S)


@serve.deployment(
    name=SYSTEM,
    num_replicas=1,
    graceful_shutdown_timeout_s=30.0,
    health_check_period_s=5.0,
    ray_actor_options={"num_cpus": 0},
)
class System:
    """Owns the actors behind the gateways and learns from their traffic; Serve restarts it if it dies."""

    def __init__(self, config: Config):
        self.stack = contextlib.ExitStack()
        with self.stack:
            self.stack.enter_context(run_folder(config))
            initial = config.policy.adapter
            # Fixed names, so that gateways find the actors of a restarted replica.
            placed = placement.placed(
                config, learner=config.learns_online, initial=initial, job="serve", online=True
            )
            actors = self.stack.enter_context(placed)
            backend = self.stack.enter_context(online(config, actors, job="serve"))
            self.names = backends(actors, backend)
            self.learning = Learning(config, actors, backend)
            self.stack.callback(self.learning.stop)
            self.stack = self.stack.pop_all()

    def backends(self) -> Backends:
        return self.names

    def __del__(self) -> None:
        self.stack.close()


def application(arguments: dict[str, Any]) -> serve.Application:
    """Application for `serve run`: ``config`` names a file, other keys override its values. BadConfig.

    Serve's address is not known here, so an API key is always required.
    """
    config = _config(arguments)
    return app.build(config, System.bind(config), app.api_key_digest(config, UNKNOWN_ADDRESS))  # type: ignore[attr-defined]


def engines(arguments: dict[str, Any]) -> serve.Application:
    """Application of everything behind the gateways; see configs/cluster/serve.yaml."""
    return System.bind(_config(arguments))  # type: ignore[attr-defined]


def gateways(arguments: dict[str, Any]) -> serve.Application:
    """Application of the gateways alone, of the application ``engines``; deployed again, it leaves that running."""
    arguments = dict(arguments)
    name = arguments.pop("engines", "engines")
    config = _config(arguments)
    return app.build(config, name, app.api_key_digest(config, UNKNOWN_ADDRESS))


UNKNOWN_ADDRESS = "the address that Serve binds"


def _config(arguments: dict[str, Any]) -> Config:
    """The configuration of a builder's arguments: those of a Serve file may be numbers and booleans too."""
    values = dict(arguments)
    path = values.pop("config", None)
    config = configuration.absolute(configuration.load(path, values))
    needs(config)  # raises for engine.colocate, before anything starts
    return config


def needs(config: Config) -> list[reservations.Need]:
    """What the service reserves. Raises BadConfig for a learning one with engine.colocate."""
    return reservations.needs(config, learner=config.learns_online, rollouts=True, online=True)


def inputs(config: Config) -> Iterator[dry_run.Input]:
    from pixelis.actors.canary import canary_questions

    yield from dry_run.policy_inputs(config)
    yield from dry_run.deepspeed_inputs(config)
    canary = config.evolution.canary
    if config.learns_online and canary.enabled:
        yield dry_run.Input(
            "evolution.canary.questions", canary.questions, lambda _: canary_questions(canary)
        )


def check(config: Config) -> None:
    dry_run.check("serve", config, inputs(config), dry_run.findings(config, "serve", needs(config)))


def main() -> None:
    with job("serve", __doc__, check, model="mini") as config:
        # Before anything starts: a missing API key, a port in use, engine.colocate
        needs(config)
        app.api_key_digest(config)
        if not (config.cluster.address or os.environ.get("RAY_ADDRESS")):  # else its Serve owns the port
            app.require_free_port(config.serve.host, config.serve.port)
        with (
            run_folder(config),
            placement.placed(
                config,
                learner=config.learns_online,
                initial=config.policy.adapter,
                job=f"serve-{uuid.uuid4().hex[:6]}",
                online=True,
            ) as actors,
            serving(config, actors) as (url, backend),
        ):
            print(f"serving on {url}  (open it in a browser; API: {url}/docs; Ctrl-C stops)", flush=True)
            learning, head = Learning(config, actors, backend), HeadWatch()
            try:
                while True:
                    time.sleep(1.0)
                    end_without_head("serve", head)
            except KeyboardInterrupt:
                learning.stop()
                raise


if __name__ == "__main__":
    main()
