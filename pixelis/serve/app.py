"""Builds and starts the Serve application of gateways in front of running actors."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, BackpressureConfig, HTTPOptions
from ray.serve.handle import DeploymentHandle

from pixelis.config import Config
from pixelis.errors import BadConfig
from pixelis.serve.access import is_loopback
from pixelis.serve.agent import DRAIN_S
from pixelis.serve.agent_types import Backends
from pixelis.serve.gateway import Gateway
from pixelis.serve.keys import KeyFile, digest, key_file
from pixelis.serve.limits import burst_limit, running_limit

APP_NAME = "pixelis"
_SERVICE = re.compile(r"(?P<name>(?P<run>.+)-serve-[0-9a-f]{6})-store")
"""Name of the policy store of a driver's service."""
SPARE_REQUESTS = 64
"""Further requests that reach the gateway: health checks, and those that it answers with 429."""


def build(
    config: Config, backends: Backends | DeploymentHandle | str, key_digest: bytes | None
) -> serve.Application:
    """The application for ``serve.run``. ``backends``: see ``Gateway``; ``key_digest`` None: no key."""
    # Two gateways where cores allow: the other one answers while Serve replaces one that died.
    default = min(2 if (os.cpu_count() or 1) >= 4 else 1, config.serve.max_replicas or 2)
    s = config.serve.model_copy(update={"replicas": config.serve.replicas or default})
    config = config.model_copy(update={"serve": s})
    max_requests = running_limit(config) + burst_limit(config) + SPARE_REQUESTS
    scaling: dict[str, Any] = {"num_replicas": s.replicas}
    if s.max_replicas is not None:
        load = float(max(1, running_limit(config)))
        limits = AutoscalingConfig(
            min_replicas=s.replicas,
            max_replicas=s.max_replicas,
            target_ongoing_requests=load,
            # A gateway holds no model: it starts in seconds and costs little.
            upscale_delay_s=5.0,
            downscale_delay_s=60.0,
        )
        scaling = {"autoscaling_config": limits}
    # The gateway refuses requests itself, with OpenAI's errors. Serve's proxy counts a request as queued until
    # a replica is chosen: a tight limit there would refuse bursts that the gateway can handle.
    deployment = Gateway.options(  # type: ignore[attr-defined]
        **scaling,
        max_ongoing_requests=max_requests,
        max_queued_requests=max_requests,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1.0),
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        # Serve kills it then, in the middle of its requests
        graceful_shutdown_timeout_s=s.timeout_s + DRAIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        max_surge_percent=100,  # a changed gateway starts before the one that it replaces stops
        ray_actor_options={"num_cpus": 0},
    )
    return deployment.bind(config, key_digest, backends)


def api_key_digest(config: Config, host: str | None = None) -> bytes | None:
    """Digest of the key in ``serve.api_key_env``; b"" if only the file has keys, None without any.

    Raises BadConfig for a key that is not printable ASCII, and without any key if ``host`` is not loopback.
    """
    key = os.environ.get(config.serve.api_key_env, "").strip()
    if key:
        if not (key.isascii() and key.isprintable()):
            raise BadConfig(
                f"the key in {config.serve.api_key_env} has characters that no HTTP header may have",
                fix="use printable ASCII, such as the output of `openssl rand -hex 32`",
            )
        return digest(key)
    if KeyFile(key_file(config)).entries():
        return b""
    if not is_loopback(host or config.serve.host):
        raise BadConfig(
            f"other machines may reach {host or config.serve.host}, and {config.serve.api_key_env} is unset",
            fix=f"export {config.serve.api_key_env}=... with a long random key, create one with "
            "`pixelis keys`, or set serve.host=127.0.0.1",
        )
    return None


def start(config: Config, backends: Backends) -> str:
    """Start Serve on ``serve.host:serve.port`` and deploy; returns the base URL once the service answers.

    Raises BadConfig for a port in use or a missing API key.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    application = build(config, backends, api_key_digest(config))
    if not serve.status().proxies:  # otherwise the port is in use by the running Serve
        require_free_port(config.serve.host, config.serve.port)
    serve.start(http_options=HTTPOptions(host=config.serve.host, port=config.serve.port))
    serve.run(application, name=APP_NAME, route_prefix="/")
    return url(config)


def require_no_other(own: str) -> None:
    """Raise BadConfig if a service with other actors runs on the cluster."""
    if APP_NAME not in serve.status().applications:
        return
    names = (actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True))
    for match in filter(None, map(_SERVICE.fullmatch, names)):
        if match["name"] != own:
            raise BadConfig(
                f"the service of run {match['run']!r} runs on this cluster already",
                fix="stop it first, or start this one on another cluster",
            )


def stop() -> None:
    """Stop the application once its requests are answered."""
    while APP_NAME in serve.status().applications:
        with contextlib.suppress(TimeoutError):  # Serve waits for 60 s, the last requests may take longer
            serve.delete(APP_NAME)


def url(config: Config) -> str:
    host = config.serve.host
    address = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # nosec B104
    return f"http://{address}:{config.serve.port}"


def require_free_port(host: str, port: int) -> None:
    """Raise BadConfig if ``host:port`` cannot be bound, which Serve would report in a log alone."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise BadConfig(
            f"serve cannot listen on {host}:{port}: {error.strerror or error}",
            fix="stop what uses the port, or choose another with serve.port=8001",
        ) from None
