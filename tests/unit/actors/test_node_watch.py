"""The node watch notices a node whose raylet refuses connections, once, and names the actors there."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from pixelis.actors import node_watch
from pixelis.actors.node_watch import MISSED, NodeWatch


def listening() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


def node(id: str, port: int, alive: bool = True) -> dict[str, Any]:
    address = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
    return {"NodeID": id, "Alive": alive, **address}


def watching(learners: dict[int, str], prefix: str = "") -> tuple[NodeWatch, list[tuple[str, ...]]]:
    """A node watch and the list of its reports."""
    reports: list[tuple[str, ...]] = []
    return NodeWatch(prefix, lambda: learners, lambda *report: reports.append(report)), reports


def test_a_lost_node_is_reported_once_with_its_actors() -> None:
    watch, reports = watching({0: "a", 1: "b", 2: "b"})
    with listening() as first:
        second = listening()
        nodes = [node(id, server.getsockname()[1]) for id, server in (("a", first), ("b", second))]
        watch.check(nodes)
        assert reports == []
        second.close()
        for _ in range(MISSED + 2):
            watch.check(nodes)
        assert reports == [("b", "127.0.0.1", ["learner 1", "learner 2"])]


def test_a_lost_generator_node_is_reported_after_another_node_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = {"1": {"name": "run-generator-0", "bundles_to_node_id": {0: "b"}}}
    monkeypatch.setattr(node_watch, "placement_group_table", lambda: table)
    watch, reports = watching({}, "run")
    with listening() as server:
        port = server.getsockname()[1]
        for alive in (True, False):
            watch.check([node("a", port, alive=False), node("b", port, alive)])
    assert reports == [("b", "127.0.0.1", ["generator-0"])]


def test_a_node_that_ray_reports_as_dead_is_lost_at_once_and_a_node_without_actors_is_not_reported() -> None:
    watch, reports = watching({0: "a"})
    watch.check([node("a", 1, alive=False), node("c", 1, alive=False)])
    assert [report[0] for report in reports] == ["a"]
