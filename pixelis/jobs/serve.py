"""Serve the agent over HTTP, remember what it answers and, unless evolution.enabled=false, learn from its traffic.

    curl localhost:8000/v1/agent -H 'content-type: application/json' \\
        -d '{"question": "...", "image": "data:image/png;base64,..."}'

A page to ask and to watch the evolution is at http://localhost:8000/. Every request is sampled serve.samples times; a confident
vote becomes an update of the adapter, and what the canary does not refuse is served. Ctrl-C ends it; the updates so far are in
run.dir/checkpoints. On a cluster of machines, with gateways that scale:

    PIXELIS_API_KEY=... serve run pixelis.jobs.serve:application config=configs/nano/serve.yaml policy.adapter=CHECKPOINT
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayError

from pixelis import config as configuration
from pixelis.actors import cluster, learner, placement
from pixelis.actors.batch_sources import UpdateSource
from pixelis.actors.serving import ServingActors, online
from pixelis.actors.train_job import TrainJob
from pixelis.actors.weights import CandidatePublisher
from pixelis.config import Config, from_command_line
from pixelis.errors import BadInput, InfraFailure, PixelisError
from pixelis.jobs.driver import driver, run_folder, stop_file
from pixelis.jobs.dry_run import checks
from pixelis.policy import checkpoint
from pixelis.serve import app
from pixelis.serve.backends import Backends

log = logging.getLogger(__name__)

GRACE_S = 8.0
"""Seconds that a stopped service gives its learner for the last checkpoint."""
RETRY_S, LONGEST_RETRY_S = 1.0, 300.0
"""Seconds before a learner that failed is started again: the first time, and at most."""


@contextmanager
def serving(config: Config, actors: placement.Actors) -> Iterator[tuple[str, ServingActors]]:
    """The service on placed actors: its base URL, and what remembers and learns behind it."""
    with online(config, actors) as behind:
        try:
            yield app.start(config, backends(actors, behind)), behind
        finally:
            app.stop()


def backends(actors: placement.Actors, behind: ServingActors) -> Backends:
    """The names by which a gateway finds these actors."""
    names = behind.names
    return Backends(
        generators=tuple(actors.names),
        namespace=ray.get_runtime_context().namespace,
        evolution=next(iter(names.get("evolution", [])), None),
        memory=tuple(names.get("memory", [])),
        embedder=next(iter(names.get("embedder", [])), None),
    )


def evolve(config: Config, actors: placement.Actors, evolution: ActorHandle) -> Path | None:
    """Learn from traffic until Evolution is drained or stopped; returns the last checkpoint, if any."""
    e = config.evolution
    # Traffic has no end that a warm-up or a schedule could be a share of; an update is one step, which the KL guard judges whole.
    calm = config.learner.model_copy(update={"warmup": 0.0, "schedule": "constant"})
    steady = config.model_copy(
        update={"learner": calm, "rft": config.rft.model_copy(update={"minibatches": 1, "epochs_per_batch": 1})}
    )
    # The guard against drifting away is this stage's own, wherever the offline algorithm has its KL. Evolution weighs it.
    beta = max(e.guard.beta, e.guard.min_beta) if e.guard.mode == "auto" else e.guard.beta
    loss = config.rft.loss.model_copy(update={"kl": beta, "kl_in": "loss", "kl_estimator": "k3"})
    source = UpdateSource(steady, evolution, CandidatePublisher(actors.store, e.canary.every if e.canary.enabled else 1))
    return learner.fit(TrainJob(steady, source, loss, config.serve.sampling.temperature, e.ema, e.lr))


class Learning:
    """The learner in a thread beside a service, started again after a failure; ``failed`` is what ended it for good.

    A service answers without its learner: failures are told to Evolution, which alerts, and never end it.
    """

    def __init__(self, config: Config, actors: placement.Actors, behind: ServingActors):
        self.config, self.actors, self.evolution = config, actors, behind.evolution
        self.failed: PixelisError | None = None
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(behind.evolution,), daemon=True)
        if self.evolution is not None:
            self.thread.start()

    def _run(self, evolution: ActorHandle) -> None:
        """Once more after every failure that can heal, later each time that no update came in between."""
        pause = RETRY_S
        while not self.stopping.is_set():
            before = checkpoint.latest(self.config.run.dir)
            try:
                evolve(self.config, self.actors, evolution)
                break
            except Exception as error:  # whatever it is, a service that no longer learns must say so
                cause = cluster.unwrap_ray_error(error) or InfraFailure(f"the learner: {type(error).__name__}: {error}")
                if self.stopping.is_set():
                    break
                log.exception("the learner failed")
                with contextlib.suppress(RayError):
                    ray.get(evolution.learner_failed.remote(str(cause)))
                if isinstance(cause, BadInput):
                    self.failed = cause
                    print(f"pixelis.jobs.serve: nothing is learnt any more, the service goes on: {cause}", file=sys.stderr)
                    break
                pause = RETRY_S if checkpoint.latest(self.config.run.dir) != before else min(2 * pause, LONGEST_RETRY_S)
                print(f"pixelis.jobs.serve: the learner starts again in {pause:g} s: {cause}", file=sys.stderr)
                self.stopping.wait(pause)

    def stop(self) -> None:
        """End it and give it the time for a last checkpoint."""
        self.stopping.set()
        if self.evolution is not None:
            stop_file(self.config).touch()
            ray.get(self.evolution.stop.remote())
            self.thread.join(GRACE_S)


@serve.deployment(
    name="System",
    num_replicas=1,
    graceful_shutdown_timeout_s=30.0,
    health_check_period_s=5.0,
    ray_actor_options={"num_cpus": 0},
)
class System:
    """Owns the actors behind the gateways and learns from their traffic; Serve starts a dead one again, from run.dir."""

    def __init__(self, config: Config):
        self.stack = contextlib.ExitStack()
        with self.stack:
            self.stack.enter_context(run_folder(config))
            initial = config.policy.adapter
            # Fixed names: gateways that outlive this replica find its successor's actors by them.
            placed = placement.placed(config, learner=config.evolution.enabled, initial=initial, job="serve")
            actors = self.stack.enter_context(placed)
            behind = self.stack.enter_context(online(config, actors, job="serve"))
            self.names = backends(actors, behind)
            self.learning = Learning(config, actors, behind)
            self.stack.callback(self.learning.stop)
            self.stack = self.stack.pop_all()

    def backends(self) -> Backends:
        """Where the actors are."""
        return self.names

    def __del__(self) -> None:
        self.stack.close()


def application(arguments: dict[str, str]) -> serve.Application:
    """The whole service for `serve run` and `serve deploy`: ``config`` names a file, other keys override its values.

    What address Serve binds is not known here, so a key is always asked for. Raises BadConfig.
    """
    values = dict(arguments)
    path = values.pop("config", None)
    config = configuration.absolute(configuration.load(path, [f"{key}={value}" for key, value in values.items()]))
    return app.build(config, System.bind(config), app.api_key_digest(config, "the address that Serve binds"))  # type: ignore[attr-defined]


def main() -> None:
    """Entry point of `python -m pixelis.jobs.serve`."""
    config = from_command_line(__doc__, "serve", default="configs/nano/serve.yaml", check=checks("serve"))
    with driver("serve"):
        check_address(config)
        with (
            run_folder(config),
            placement.placed(config, learner=config.evolution.enabled, initial=config.policy.adapter) as actors,
            serving(config, actors) as (url, behind),
        ):
            print(f"serving on {url}  (open it in a browser, try {url}/healthz; Ctrl-C ends)", flush=True)
            learning = Learning(config, actors, behind)
            try:
                while True:
                    time.sleep(1.0)
            except KeyboardInterrupt:
                learning.stop()
                raise


def check_address(config: Config) -> None:
    """BadConfig, before anything is started, for a missing API key or a port that is taken."""
    app.api_key_digest(config)
    if not (config.cluster.address or os.environ.get("RAY_ADDRESS")):  # a Serve that already runs holds the port itself
        app.require_free_port(config.serve.host, config.serve.port)


if __name__ == "__main__":
    main()
