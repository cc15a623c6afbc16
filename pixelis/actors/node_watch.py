"""Reports the loss of a node with actors of a job within seconds; Ray needs 15 to 30 s.

It connects to the port of every node's raylet, which a dead process refuses and an unreachable machine does
not answer.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

POLL_S = 1.0
CONNECT_S = 1.0
"""Seconds that a node has to accept a connection."""
MISSED = 2
"""Consecutive checks that a lost node misses."""


class NodeWatch:
    """Calls `lost(node id, address, names of the actors there)` once for each lost node of a job.

    A thread of the driver during a `with` block. job: prefix of its placement groups; learners: node id by
    rank.
    """

    def __init__(
        self, job: str, learners: Callable[[], dict[int, str]], lost: Callable[[str, str, list[str]], None]
    ):
        self.job, self.learners, self.lost = job, learners, lost
        self.missed: dict[str, int] = {}
        self.groups: dict[str, str] = {}  # placement group and bundle -> node id, before a loss
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name="node-watch", daemon=True)

    def __enter__(self) -> NodeWatch:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stopping.set()
        self.thread.join()

    def _run(self) -> None:
        while not self.stopping.wait(POLL_S):
            with suppress(Exception):  # the head does not answer for a moment: the next check will tell
                self.check(ray.nodes())

    def check(self, nodes: list[dict[str, Any]]) -> None:
        for node in nodes:
            id = node["NodeID"]
            if self.missed.get(id, 0) >= MISSED:
                continue
            alive = node["Alive"] and _accepts(node["NodeManagerAddress"], node["NodeManagerPort"])
            self.missed[id] = 0 if alive else MISSED if not node["Alive"] else self.missed.get(id, 0) + 1
            if self.missed[id] < MISSED:
                continue
            names = [f"learner {rank}" for rank, place in sorted(self.learners().items()) if place == id]
            names += sorted(
                name.removeprefix(self.job).strip("-") for name, place in self.groups.items() if place == id
            )
            if names:
                self.lost(id, node["NodeManagerAddress"], names)
        doubtful = any(0 < missed < MISSED for missed in self.missed.values())
        if self.job and not doubtful:  # Ray may move what a lost node had before the loss is certain
            self.groups = {
                name if "generator" in name else f"{name}-{index}": node
                for group in placement_group_table().values()
                if (name := group["name"]).startswith(self.job)
                for index, node in group["bundles_to_node_id"].items()
            }


class HeadWatch:
    """Tells whether the cluster's head accepts connections. Ray waits a minute, then ends the process."""

    def __init__(self) -> None:
        self.address = ray.get_runtime_context().gcs_address
        self.since: float | None = None

    def silent_s(self) -> float:
        """Seconds since the head was first found not to accept a connection; 0 while it does."""
        host, _, port = self.address.rpartition(":")
        if _accepts(host.strip("[]"), int(port)):
            self.since = None
            return 0.0
        self.since = self.since or time.monotonic()
        return time.monotonic() - self.since


def _accepts(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), CONNECT_S).close()
    except OSError:
        return False
    return True
