"""What a service on loopback lets other machines reach: nothing of its own."""

from __future__ import annotations

import os

import psutil
import pytest
from scripted import Deployed

pytestmark = pytest.mark.slow


def test_a_service_on_loopback_binds_its_ports_to_loopback(deployed: Deployed) -> None:
    """Serve's proxy and the gateway's server for calls between deployments."""
    mine = {p.pid: " ".join(p.cmdline()) for p in psutil.Process(os.getpid()).children(recursive=True)}
    addresses: dict[str, list[tuple[str, int]]] = {
        "ray::ProxyActor": [],
        "ray::ServeReplica:pixelis:Gateway": [],
    }
    for connection in psutil.net_connections("tcp"):
        for title in addresses:
            if connection.status == psutil.CONN_LISTEN and title in mine.get(connection.pid or 0, ""):
                addresses[title].append((connection.laddr.ip, connection.laddr.port))
    for title, own in addresses.items():
        assert sum(ip not in ("127.0.0.1", "::ffff:127.0.0.1") for ip, _ in own) == 1, (title, own)
    assert ("127.0.0.1", deployed.config.serve.port) in addresses["ray::ProxyActor"]
    assert len(addresses["ray::ServeReplica:pixelis:Gateway"]) > 1
