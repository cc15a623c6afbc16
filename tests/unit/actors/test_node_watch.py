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


def test_a_lost_node_is_reported_once_with_its_actors() -> None:
    reports: list[tuple[str, str, list[str]]] = []
    watch = NodeWatch("", lambda: {0: "a", 1: "b", 2: "b"}, lambda *report: reports.append(report))
    with listening() as first:
        second = listening()
        nodes: list[dict[str, Any]] = [
            {
                "NodeID": id,
                "Alive": True,
                "NodeManagerAddress": "127.0.0.1",
                "NodeManagerPort": server.getsockname()[1],
            }
            for id, server in (("a", first), ("b", second))
        ]
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
    reports: list[tuple[str, str, list[str]]] = []
    watch = NodeWatch("run", dict, lambda *report: reports.append(report))
    with listening() as server:
        address = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": server.getsockname()[1]}
        left = {"NodeID": "a", "Alive": False, **address}
        watch.check([left, {"NodeID": "b", "Alive": True, **address}])
        watch.check([left, {"NodeID": "b", "Alive": False, **address}])
    assert reports == [("b", "127.0.0.1", ["generator-0"])]


def test_a_node_that_ray_reports_as_dead_is_lost_at_once_and_a_node_without_actors_is_not_reported() -> None:
    reports: list[tuple[str, str, list[str]]] = []
    watch = NodeWatch("", lambda: {0: "a"}, lambda *report: reports.append(report))
    dead = {"Alive": False, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 1}
    watch.check([{"NodeID": "a", **dead}, {"NodeID": "c", **dead}])
    assert [report[0] for report in reports] == ["a"]
