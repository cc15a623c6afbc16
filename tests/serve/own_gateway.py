"""A gateway of a test's own, beside the application of the other tests, with its memory and raw connections
to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import ray
from ray import serve
from scripted import ScriptedGenerator

from pixelis.config import Config, load
from pixelis.serve import app
from pixelis.serve.agent_types import Backends


@dataclass
class OwnGateway:
    """``url`` of the application ``name``, which has no key."""

    name: str
    url: str
    config: Config

    def client(self, timeout: float = 60.0) -> httpx.Client:
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
        return httpx.Client(base_url=self.url, timeout=timeout, limits=limits, verify=False)

    def private_bytes(self) -> int:
        """Memory of the gateway's processes, without what they share: the object store has its own limit."""
        return sum(private_bytes(p) for p in self.processes())

    def processes(self) -> list[psutil.Process]:
        title = f"ray::ServeReplica:{self.name}:Gateway"
        return [p for p in psutil.process_iter(["cmdline"]) if title in " ".join(p.info["cmdline"] or [])]


def private_bytes(process: psutil.Process) -> int:
    """Memory of a process that it shares with no other."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextmanager
def own_gateway(url: str, name: str, *overrides: str) -> Iterator[OwnGateway]:
    """Deploy an application of gateways and two scripted generators under ``url/name``."""
    config = load(
        None, ["engine.workers=2", "serve.cache=0", "serve.replicas=1", "evolution.enabled=false", *overrides]
    )
    generators = {f"{name}-{i}": ScriptedGenerator.options(name=f"{name}-{i}").remote(i) for i in range(2)}
    ray.get([actor.health.remote() for actor in generators.values()])
    serve.run(
        app.build(config, Backends(tuple(generators), ray.get_runtime_context().namespace), None),
        name=name,
        route_prefix=f"/{name}",
    )
    try:
        yield OwnGateway(name, f"{url}/{name}", config)
    finally:
        serve.delete(name)
        for actor in generators.values():
            ray.kill(actor)
