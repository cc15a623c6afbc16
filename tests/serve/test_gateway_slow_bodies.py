"""Callers whose bodies trickle in over real sockets: they keep nobody else out, and are told to leave."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from scripted import KEY, Deployed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def trickle(deployed: Deployed) -> socket.socket:
    """A connection that announces a body of 10 kB and has sent one byte of it."""
    address = urlsplit(deployed.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=60)
    lines = ["POST /v1/agent HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}"]
    lines += ["Content-Type: application/json", "Content-Length: 10000", "", "{"]
    connection.sendall("\r\n".join(lines).encode())
    return connection


def status_line(connection: socket.socket) -> bytes:
    return connection.recv(65_536).split(b"\r\n", 1)[0]


def test_bodies_that_trickle_keep_nobody_out(deployed: Deployed) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(trickle(deployed)) for _ in range(20)]
        time.sleep(1)  # longer ago than any request takes
        assert [deployed.ask("say 7").status_code for _ in range(6)] == [200] * 6
        for connection in connections:
            assert b" 408 " in status_line(connection)
