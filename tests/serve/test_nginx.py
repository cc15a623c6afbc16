"""The nginx file of docs/serving.md: TLS, streams, and callers that never finish their headers."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from gateway_helpers import until
from scripted import KEY, Deployed, free_port, picture_url

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed"),
]
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def proxy(deployed: Deployed, tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of nginx with the documented file, whose certificate and ports are those of this test."""
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(tmp_path / "service.key"), "-out", str(tmp_path / "service.crt")]
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *files]
    subprocess.run(request, check=True, capture_output=True)
    port = free_port()
    text = Path("docs/serving.md").read_text(encoding="utf-8").split("```nginx\n")[1].split("```")[0]
    own = {"/etc/pixelis": str(tmp_path), "listen 443": f"listen 127.0.0.1:{port}"}
    for old, new in {**own, "http://127.0.0.1:8000": deployed.url}.items():
        assert old in text
        text = text.replace(old, new)
    kinds = "client_body", "proxy", "fastcgi", "uwsgi", "scgi"
    lines = ["access_log off;", f"error_log {tmp_path}/error.log;"]
    lines += [f"{kind}_temp_path {tmp_path}/{kind};" for kind in kinds]
    (tmp_path / "nginx.conf").write_text(text.replace("http {", "http {\n" + "\n".join(lines)))
    command = ["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
    command += ["-g", f"daemon off; pid {tmp_path}/pid;"]
    process = subprocess.Popen([*command, "-e", str(tmp_path / "error.log")])
    trust = ssl.create_default_context(cafile=str(tmp_path / "service.crt"))
    try:
        with httpx.Client(
            base_url=f"https://localhost:{port}", verify=trust, timeout=60, trust_env=False
        ) as client:
            assert until(lambda: process.poll() is not None or is_up(client), 60)
            assert process.poll() is None, (tmp_path / "error.log").read_text()
            yield client
    finally:
        process.terminate()
        process.wait()


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").status_code == 200
    except httpx.HTTPError:
        return False


def test_questions_and_streams_are_answered_over_tls(proxy: httpx.Client) -> None:
    question = {"question": "say 7", "image": picture_url()}
    reply = proxy.post("/v1/agent", json=question, headers=HEADERS)
    assert (reply.status_code, reply.json()["answer"]) == (200, "7")
    assert reply.headers["Strict-Transport-Security"]
    assert proxy.post("/v1/agent", json=question).status_code == 401
    with proxy.stream("POST", "/v1/agent", json={**question, "stream": True}, headers=HEADERS) as stream:
        events = [line for line in stream.iter_lines() if line.startswith("event: ")]
    assert "event: turn" in events
    assert events[-1] == "event: answer"
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{proxy.base_url.port}", "-tls1_1"]
    old = subprocess.run(command, input=b"", capture_output=True, timeout=60, check=False)
    assert old.returncode != 0 or b"Cipher is (NONE)" in old.stdout + old.stderr


def test_headers_that_never_end_keep_nobody_out_and_are_cut_off(proxy: httpx.Client) -> None:
    address = ("127.0.0.1", proxy.base_url.port or 0)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with ExitStack() as stack:
        connections = []
        for _ in range(300):
            connection = stack.enter_context(
                context.wrap_socket(socket.create_connection(address, timeout=60))
            )
            connection.sendall(b"POST /v1/agent HTTP/1.1\r\nHost: localhost\r\nX: y")
            connections.append(connection)
        started = time.monotonic()
        assert is_up(proxy)
        ends = []
        for connection in connections:
            connection.settimeout(60)
            try:
                ends.append(connection.recv(1000))
            except (ConnectionResetError, ssl.SSLError):
                ends.append(b"")
        assert all(end == b"" or re.match(rb"HTTP/1.1 4", end) for end in ends)
        assert time.monotonic() - started < 40
