"""Caches replies for repeated requests. A cached reply is returned only while the version that produced it is served."""

from __future__ import annotations

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 64 * 2**20
"""Replies held at once, in bytes: those of ``/v1/agent`` carry the pictures that the policy saw."""


@dataclass(frozen=True, slots=True)
class CachedReply:
    """A reply as JSON bytes, the policy version that gave it, and the experience that was made of it."""

    body: bytes
    version: int
    experience_id: str | None
    until: float


class ReplyCache:
    """Least recently used replies, at most ``entries`` of them and ``max_bytes``, each for ``ttl_s`` seconds.

    Kept as bytes, so that nobody can change what another will get, and the size is known.
    """

    def __init__(self, entries: int, ttl_s: float, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic):
        self.entries, self.ttl_s, self.max_bytes, self.clock = entries, ttl_s, max_bytes, clock
        self.kept: OrderedDict[str, CachedReply] = OrderedDict()
        self.bytes = 0
        self.hits = 0

    def find(self, key: str) -> CachedReply | None:
        """What is kept under ``key``, if it is not too old. The caller compares versions."""
        result = self.kept.get(key)
        if result is None:
            return None
        if result.until <= self.clock():
            self.drop(key)
            return None
        self.kept.move_to_end(key)
        return result

    def keep(self, key: str, reply: dict[str, Any], version: int, experience_id: str | None) -> None:
        """Keep ``reply``, in place of what was there; the least recently used make room. Too large a reply is not kept."""
        body = json.dumps(reply).encode()
        if not self.entries or len(body) > self.max_bytes:
            return
        self.drop(key)
        self.kept[key] = CachedReply(body, version, experience_id, self.clock() + self.ttl_s)
        self.bytes += len(body)
        while len(self.kept) > self.entries or self.bytes > self.max_bytes:
            self.drop(next(iter(self.kept)))

    def drop(self, key: str) -> None:
        """Forget what is kept under ``key``, if anything."""
        if (old := self.kept.pop(key, None)) is not None:
            self.bytes -= len(old.body)

    def forget(self, experience_ids: set[str]) -> None:
        """Drop the replies that these experiences were made of: they have been deleted."""
        for key in [key for key, kept in self.kept.items() if kept.experience_id in experience_ids]:
            self.drop(key)


def key_of(parts: dict[str, Any]) -> str:
    """SHA-256 over everything that decides a reply but the policy version, which is compared on the way out."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
