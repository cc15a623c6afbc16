"""The engines of a service as a Serve application, with scripted generators."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from scripted import ScriptedGenerator

from pixelis.serve.agent_types import Backends

GENERATORS = ("redeployed-0", "redeployed-1")


@serve.deployment(name="System", ray_actor_options={"num_cpus": 0})
class System:
    """Owns two generators, as the real one does."""

    def __init__(self) -> None:
        self.generators = [
            ScriptedGenerator.options(name=name).remote(i) for i, name in enumerate(GENERATORS)
        ]

    def backends(self) -> Backends:
        return Backends(GENERATORS, ray.get_runtime_context().namespace)


def engines(arguments: dict[str, Any]) -> serve.Application:
    return System.bind()  # type: ignore[attr-defined]
