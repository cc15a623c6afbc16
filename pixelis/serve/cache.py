"""Caches replies for repeated requests."""

from __future__ import annotations

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 64 * 2**20
"""Replies of ``/v1/agent`` carry the pictures that the policy saw."""


@dataclass(frozen=True, slots=True)
class CachedReply:
    """A reply as JSON bytes, which no caller can change for another one."""

    body: bytes
    version: int
    experience_id: str | None
    until: float


class ReplyCache:
    """An LRU cache of at most ``entries`` replies and ``max_bytes``, each for ``ttl_s`` seconds."""

    def __init__(
        self,
        entries: int,
        ttl_s: float,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.entries, self.ttl_s, self.max_bytes, self.clock = entries, ttl_s, max_bytes, clock
        self.replies: OrderedDict[str, CachedReply] = OrderedDict()
        self.bytes = 0
        self.hits = 0

    def get(self, key: str) -> CachedReply | None:
        """The reply under ``key``, unless it has expired; the caller compares versions."""
        result = self.replies.get(key)
        if result is None:
            return None
        if result.until <= self.clock():
            self.drop(key)
            return None
        self.replies.move_to_end(key)
        return result

    def put(self, key: str, reply: dict[str, Any], version: int, experience_id: str | None) -> None:
        body = json.dumps(reply).encode()
        if not self.entries or len(body) > self.max_bytes:
            return
        self.drop(key)
        self.replies[key] = CachedReply(body, version, experience_id, self.clock() + self.ttl_s)
        self.bytes += len(body)
        while len(self.replies) > self.entries or self.bytes > self.max_bytes:
            self.drop(next(iter(self.replies)))

    def drop(self, key: str) -> None:
        if (old := self.replies.pop(key, None)) is not None:
            self.bytes -= len(old.body)

    def forget(self, experience_ids: set[str]) -> None:
        for key in [key for key, reply in self.replies.items() if reply.experience_id in experience_ids]:
            self.drop(key)


def key_of(parts: dict[str, Any]) -> str:
    """SHA-256 of all that determines a reply but the policy version."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
