"""Names of the actors behind a gateway: a replica may start on any node at any time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backends:
    """Names of the running actors in ``namespace``: generators, memory shards in order, Evolution, the Embedder.

    Without shards nothing is remembered; without Evolution nothing is learnt, reviewed, promoted or rolled back.
    """

    generators: tuple[str, ...]
    namespace: str
    evolution: str | None = None
    memory: tuple[str, ...] = ()
    embedder: str | None = None
