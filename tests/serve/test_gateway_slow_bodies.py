"""Callers whose bodies trickle in over real sockets: they keep nobody else out, and are told to leave."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from gateway_helpers import error_of, until
from own_gateway import OwnGateway, own_gateway
from scripted import Deployed, picture_url

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def gateway(deployed: Deployed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnGateway]:
    """Four requests run and two wait."""
    options = ["engine.max_num_seqs=8", "serve.samples=4", "serve.max_queue=2", "serve.timeout_s=60"]
    folder = tmp_path_factory.mktemp("slow")
    with own_gateway(deployed.url, "slow", *options, f"run.dir={folder}") as gateway:
        yield gateway


def trickle(gateway: OwnGateway) -> socket.socket:
    """A connection that announces a body of 10 kB and has sent one byte of it."""
    address = urlsplit(gateway.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=60)
    lines = [f"POST {address.path}/v1/agent HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    connection.sendall("\r\n".join([*lines, "Content-Length: 10000", "", "{"]).encode())
    return connection


def status_line(connection: socket.socket) -> bytes:
    return connection.recv(65_536).split(b"\r\n", 1)[0]


def test_bodies_that_trickle_keep_nobody_out(gateway: OwnGateway) -> None:
    with ExitStack() as stack, gateway.client() as client:
        connections = [stack.enter_context(trickle(gateway)) for _ in range(20)]
        time.sleep(1)  # longer ago than any request takes
        replies = [
            client.post("/v1/agent", json={"question": "say 7", "image": picture_url()}) for _ in range(6)
        ]
        assert [r.status_code for r in replies] == [200] * 6
        for connection in connections:
            assert b" 408 " in status_line(connection)


@pytest.mark.long
def test_a_client_may_send_only_so_many_bodies_at_once(gateway: OwnGateway) -> None:
    body = {"question": "say 7", "image": picture_url()}
    replies = []
    with gateway.client() as client:

        def is_refused() -> bool:
            # New ones each time: a busy machine may have sent the earlier ones away before the reply.
            with ExitStack() as stack:
                for _ in range(40):  # some of which are refused
                    stack.enter_context(trickle(gateway))
                replies.append(client.post("/v1/agent", content=drip(), headers=JSON))
            return replies[-1].status_code == 429

        assert until(is_refused, 60)
        refused = replies[-1]
        assert "bodies already" in error_of(refused)["message"]
        assert int(refused.headers["Retry-After"]) >= 1
    assert until(lambda: gateway.client().post("/v1/agent", json=body).status_code == 200)


JSON = {"Content-Type": "application/json"}


def drip() -> Iterator[bytes]:
    yield b"{"
    time.sleep(0.5)
    yield json.dumps({"question": "say 7"}).encode()[1:]
