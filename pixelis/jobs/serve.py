"""Serve the agent over HTTP and, unless evolution.enabled=false, learn from its traffic.

    curl localhost:8000/v1/agent -H 'content-type: application/json' \\
        -d '{"question": "...", "image": "data:image/png;base64,..."}'

Every request is sampled serve.samples times; a confident vote becomes an update of the adapter, and the new version is
served. Ctrl-C ends it; the updates so far are in run.dir/checkpoints.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from pixelis.actors import cluster, learner
from pixelis.actors.evolution import Evolution
from pixelis.config import Config, from_command_line
from pixelis.errors import PixelisError
from pixelis.jobs.driver import driver, run_folder, stop_file
from pixelis.serve import app

ENDLESS = 10**9
GRACE_S = 8.0
"""Seconds that a stopped service gives its learner for the last checkpoint."""


@contextmanager
def serving(config: Config, actors: cluster.Actors) -> Iterator[tuple[str, ray.actor.ActorHandle]]:
    """The service on placed actors: its base URL and the Evolution actor that learns from it."""
    name = f"{config.run.name}-evolution-{actors.names[0]}"
    evolution = cluster.spawn(Evolution, config, actors.generators, name=name)
    try:
        yield app.start(config, actors.names, name), evolution
    finally:
        app.stop()
        ray.kill(evolution)


def evolve(config: Config, actors: cluster.Actors, evolution: ray.actor.ActorHandle) -> Path | None:
    """Learn from traffic until Evolution is drained or stopped; returns the last checkpoint, if any."""
    stream = learner.GroupStream(evolution, actors.store, stage="evolve", steps=ENDLESS)
    # Traffic has no end that a warm-up or a schedule could be a share of.
    steady = config.model_copy(update={"learner": config.learner.model_copy(update={"warmup": 0.0, "schedule": "constant"})})
    e = config.evolution
    # The guard against drifting away is this stage's own, wherever the offline algorithm has its KL.
    loss = config.rft.loss.model_copy(update={"kl": e.guard.beta, "kl_in": "loss", "kl_estimator": "k3"})
    return learner.fit(steady, stream, lr=e.lr, loss=loss, temperature=config.serve.sampling.temperature)


def main() -> None:
    """Entry point of `python -m pixelis.jobs.serve`."""
    config = from_command_line(__doc__, "serve", default="configs/nano/serve.yaml")
    with (
        driver("serve"),
        run_folder(config),
        cluster.placed(config, learner=config.evolution.enabled, initial=config.policy.adapter) as actors,
        serving(config, actors) as (url, evolution),
    ):
        print(f"serving on {url}  (try {url}/healthz; Ctrl-C ends)", flush=True)
        failed: list[PixelisError] = []

        def learn() -> None:
            try:
                evolve(config, actors, evolution)
            except PixelisError as error:
                failed.append(error)

        learning = threading.Thread(target=learn, daemon=True)
        if config.evolution.enabled:
            learning.start()
        try:
            while not failed:
                time.sleep(1.0)
            raise failed[0]
        except KeyboardInterrupt:
            stop_file(config).touch()
            ray.get(evolution.stop.remote())
            if learning.is_alive():
                learning.join(GRACE_S)
            raise


if __name__ == "__main__":
    main()
