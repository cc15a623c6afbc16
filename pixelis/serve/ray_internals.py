"""Uses of Ray's private interfaces. Written for Ray 2.60; check them when Ray is upgraded."""

from __future__ import annotations

from ray.serve._private import replica


def bind_calls_to_loopback() -> None:
    """Bind this replica's server for calls between deployments to loopback. Call it in ``__init__``.

    Serve binds it to all interfaces when the replica is initialised, has no setting for the address, and
    unpickles what arrives.
    """
    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: bind(
        server, address.replace("[::]", "127.0.0.1")
    )
