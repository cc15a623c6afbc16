"""What a service on loopback lets other machines reach: nothing of its own."""

from __future__ import annotations

import os

import psutil
import pytest
from scripted import Deployed

pytestmark = pytest.mark.slow


def test_a_service_on_loopback_binds_its_ports_to_loopback(deployed: Deployed) -> None:
    """The ingress with its statistics and metrics, and a gateway's two servers. Ray's core has another port."""
    mine = {p.pid: p for p in psutil.Process(os.getpid()).children(recursive=True)}
    ports: dict[str, list[tuple[str, int]]] = {"ingress": [], "gateway": []}
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.pid in mine:
            kind = "ingress" if mine[connection.pid].name() == "haproxy" else "gateway"
            if kind == "ingress" or "ServeReplica:pixelis:Gateway" in " ".join(mine[connection.pid].cmdline()):
                ports[kind].append((connection.laddr.ip, connection.laddr.port))
    assert deployed.config.serve.port in {port for _, port in ports["ingress"]}
    assert {ip for ip, _ in ports["ingress"]} == {"127.0.0.1"}
    assert sum(ip not in ("127.0.0.1", "::ffff:127.0.0.1") for ip, _ in ports["gateway"]) == 1
