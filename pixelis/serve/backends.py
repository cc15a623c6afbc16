"""Names of the actors behind a gateway, by which a replica on any node finds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backends:
    """Names of the running actors in ``namespace``; ``memory`` lists the shards in order.

    ``scaler`` lists the generators while their number changes. Without shards nothing is stored; without Evolution nothing is
    learnt, reviewed, promoted or rolled back.
    """

    generators: tuple[str, ...]
    namespace: str
    evolution: str | None = None
    memory: tuple[str, ...] = ()
    embedder: str | None = None
    scaler: str | None = None
