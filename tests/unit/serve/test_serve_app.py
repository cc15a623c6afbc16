"""The Serve application of gateways: keys it requires, replicas, limits, stopping, ports."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pixelis.config import load
from pixelis.errors import BadConfig
from pixelis.serve import app
from pixelis.serve.agent_types import Backends
from pixelis.serve.keys import digest
from pixelis.serve.limits import running_limit


def test_a_key_is_required_off_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIXELIS_API_KEY", raising=False)
    assert app.api_key_digest(load(None, ["serve.host=127.0.0.1"])) is None
    assert app.api_key_digest(load(None, ["serve.host=localhost"])) is None
    assert app.api_key_digest(load(None, ["serve.host=::1"])) is None
    for host in ("0.0.0.0", "10.0.0.1", "my-machine"):
        with pytest.raises(BadConfig, match="PIXELIS_API_KEY"):
            app.api_key_digest(load(None, [f"serve.host={host}"]))
    expected = [True, True, True, False, False]
    assert [app.is_loopback(host) for host in ("::1", "[::1]", "127.8.9.1", "::", "")] == expected
    monkeypatch.setenv("PIXELIS_API_KEY", "secret")
    assert app.api_key_digest(load(None, ["serve.host=0.0.0.0"])) == digest("secret") != digest("secret2")


@pytest.mark.parametrize("key", ["schlüssel", "k\u200bey", "a\tb", "\udcff"])
def test_a_key_that_clients_cannot_send_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("PIXELIS_API_KEY", key)
    with pytest.raises(BadConfig, match="PIXELIS_API_KEY has characters"):
        app.api_key_digest(load(None, []))


@pytest.mark.parametrize(
    ("cores", "options", "replicas"),
    [(2, [], 1), (4, [], 2), (4, ["serve.max_replicas=1"], 1), (1, ["serve.replicas=3"], 3)],
)
def test_two_gateways_start_where_cores_allow(
    monkeypatch: pytest.MonkeyPatch, cores: int, options: list[str], replicas: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    deployment = app.build(load(None, options), Backends(("g",), "n"), None)._bound_deployment
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas if scaling else deployment.num_replicas) == replicas


def test_a_gateway_that_stops_has_time_for_its_requests_and_for_storing_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment = app.build(load(None, ["serve.timeout_s=60"]), Backends(("g",), "n"), None)._bound_deployment
    assert deployment._deployment_config.graceful_shutdown_timeout_s == 70
    applications, waits = {app.APP_NAME}, iter([TimeoutError("not deleted after 60s"), None])

    def delete(name: str) -> None:
        if (error := next(waits)) is not None:
            raise error
        applications.remove(name)

    monkeypatch.setattr(app.serve, "status", lambda: SimpleNamespace(applications=applications))
    monkeypatch.setattr(app.serve, "delete", delete)
    app.stop()
    assert not applications


def test_gateways_share_the_requests_that_the_generators_can_decode() -> None:
    one = load(None, ["engine.max_num_seqs=64", "serve.samples=8", "serve.replicas=1"])
    two = load(None, ["engine.max_num_seqs=64", "serve.samples=8", "serve.replicas=2"])
    assert (running_limit(one), running_limit(two)) == (8, 4)
    assert running_limit(two, 3) == 12
    assert running_limit(one, 3, replicas=2) == 12


def test_a_port_in_use_names_the_fix() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BadConfig, match=r"serve\.port"):
            app.require_free_port("127.0.0.1", taken.getsockname()[1])
