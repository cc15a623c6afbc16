"""Models by their id, against a server that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest
from tiny_policy import folder

REPOSITORY, REVISION = "acme/tiny", "a" * 40
ROOT = Path(__file__).resolve().parents[3]


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        files = {file.name: file.read_bytes() for file in folder("qwen3_vl").iterdir()}
        if parts[:2] == ["api", "models"] and "/".join(parts[2:4]) == REPOSITORY:
            named = [(name, len(data), hashlib.sha1(data).hexdigest()) for name, data in files.items()]
            if "tree" in parts:
                self.answer(
                    json.dumps(
                        [{"type": "file", "path": n, "size": s, "oid": o} for n, s, o in named]
                    ).encode()
                )
            else:
                siblings = [{"rfilename": n, "size": s} for n, s, _ in named]
                self.answer(json.dumps({"id": REPOSITORY, "sha": REVISION, "siblings": siblings}).encode())
        elif "/".join(parts[:2]) == REPOSITORY and (data := files.get(parts[-1])) is not None:
            self.server.fetched.append((self.command, parts[-1]))  # type: ignore[attr-defined]
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            self.answer(data, {"X-Repo-Commit": REVISION, "ETag": etag})
        else:
            self.answer(b"{}", {"X-Error-Code": "RepoNotFound"}, status=404)

    def answer(self, data: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.fetched = []  # type: ignore[attr-defined]
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def run(
    code: str, hub: ThreadingHTTPServer | None, home: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """huggingface_hub reads its environment once, so each case has a process of its own."""
    port = hub.server_address[1] if hub is not None else 1
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        **variables,
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


DRY_RUN = f"""
import sys
from pixelis.jobs.sft import main
sys.argv = ["sft", "configs/nano/sft.yaml", "policy.model={REPOSITORY}", "--dry-run"]
main()
"""
LOAD = f"""
from pixelis.config import PolicyConfig
from pixelis.policy.model import load_model
from pixelis.policy.model_path import fingerprint, resolve
model, _, spec = load_model(PolicyConfig(model="{REPOSITORY}@main"), "cpu")
print(spec.family_name, fingerprint(resolve("{REPOSITORY}")))
"""
NAMED = """
from pixelis.errors import PixelisError
from pixelis.policy.model_path import resolve
try:
    resolve({name!r})
except PixelisError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_a_dry_run_fetches_settings_and_a_run_the_weights_once(hub: ThreadingHTTPServer, tmp_path: Path):
    planned = run(DRY_RUN, hub, tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert "of weights will be fetched" in planned.stderr
    assert not any(name.endswith(".safetensors") for _, name in hub.fetched)
    loaded = run(LOAD, hub, tmp_path)
    assert loaded.returncode == 0, loaded.stderr
    assert [pair for pair in hub.fetched if pair == ("GET", "model.safetensors")] == [
        ("GET", "model.safetensors")
    ]
    offline = run(LOAD, None, tmp_path, HF_HUB_OFFLINE="1")
    assert offline.stdout == loaded.stdout, offline.stderr


@pytest.mark.parametrize(
    ("name", "online", "kind"),
    [
        ("acme/other", True, "MissingFile"),
        ("acme/other", False, "InfraFailure"),
        ("models/with/parts", True, "MissingFile"),
    ],
)
def test_a_missing_model_is_named(
    hub: ThreadingHTTPServer, tmp_path: Path, name: str, online: bool, kind: str
):
    result = run(NAMED.format(name=name), hub if online else None, tmp_path)
    assert result.stdout.startswith(kind), result.stderr
    assert name in result.stdout
