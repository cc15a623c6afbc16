"""Models and data sets by their id, against a server that speaks the hub's protocol."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest
import transformers
from tiny_policy import folder
from tiny_tokenizer import save_tokenizer

REPOSITORY, REVISION = "acme/tiny", "a" * 40
ROOT = Path(__file__).resolve().parents[3]


DETECTOR, DATASET = "acme/finder", "acme/digits"
ROWS = {
    f"data/{split}-00000.jsonl": json.dumps({"question": f"{split}?", "answer": "7"}).encode()
    for split in ("train", "test")
}


@functools.cache
def detector() -> Path:
    """A folder with a tiny random OWL-ViT."""
    root = Path(tempfile.mkdtemp(prefix="pixelis-finder-"))
    atexit.register(shutil.rmtree, root, True)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = small | {"vocab_size": 10, "max_position_embeddings": 8}
    vision = small | {"image_size": 64, "patch_size": 16}
    settings = transformers.OwlViTConfig(text_config=text, vision_config=vision, projection_dim=16)
    transformers.OwlViTForObjectDetection(settings).save_pretrained(root)
    save_tokenizer(root)
    return root


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        """Lists the files of a revision (/api/models/NAME/...), or sends one (/NAME/resolve/REVISION/FILE)."""
        path = unquote(urlsplit(self.path).path).removeprefix("/")
        is_listing, is_dataset = path.startswith("api/"), "datasets/" in path
        parts = path.removeprefix("api/").removeprefix("models/").removeprefix("datasets/").split("/")
        model, finder = (
            {file.name: file.read_bytes() for file in root.iterdir()}
            for root in (folder("qwen3_vl"), detector())
        )
        files = {REPOSITORY: model, DETECTOR: finder, DATASET: ROWS}.get("/".join(parts[:2]), {})
        name = "/".join(parts[4:])
        if not files or is_dataset is not (files is ROWS):
            self.answer(b"{}", {"X-Error-Code": "RepoNotFound"}, status=404)
        elif is_listing:
            listed = [(n, len(data), hashlib.sha1(data).hexdigest()) for n, data in files.items()]
            tree = [{"type": "file", "path": n, "size": s, "oid": o} for n, s, o in listed]
            siblings = [{"rfilename": n, "size": s} for n, s, _ in listed]
            about = {"id": "/".join(parts[:2]), "sha": REVISION, "siblings": siblings}
            self.answer(json.dumps(tree if "tree" in parts else about).encode())
        elif name in files:
            self.server.fetched.append((self.command, f"{'/'.join(parts[:2])}/{name}"))  # type: ignore[attr-defined]
            etag = f'"{hashlib.sha1(files[name]).hexdigest()}"'
            self.answer(files[name], {"X-Repo-Commit": REVISION, "ETag": etag})
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
sys.argv = ["sft", "configs/nano/sft.yaml", "policy.model={REPOSITORY}", "toolbox.detector={DETECTOR}", "--dry-run"]
main()
"""
LOAD = f"""
from pixelis.config import PolicyConfig, ToolboxConfig
from pixelis.operations.find import Find
from pixelis.policy.model import load_model
from pixelis.policy.model_path import fingerprint, resolve
model, _, spec = load_model(PolicyConfig(model="{REPOSITORY}@main"), "cpu")
Find.ready(ToolboxConfig(detector="{DETECTOR}"))
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


@pytest.mark.long  # test_a_data_set_is_read_by_its_split: what is asked for is fetched
@pytest.mark.slow
def test_a_dry_run_fetches_settings_and_a_run_the_weights_once(hub: ThreadingHTTPServer, tmp_path: Path):
    planned = run(DRY_RUN, hub, tmp_path)
    assert planned.returncode == 0, planned.stderr
    for key in ("policy.model", "toolbox.detector"):
        assert re.search(rf"{key}: .* GB of weights will be fetched", planned.stderr), planned.stderr
    assert not any(name.endswith(".safetensors") for _, name in hub.fetched)
    loaded = run(LOAD, hub, tmp_path)
    assert loaded.returncode == 0, loaded.stderr
    weights = [name for method, name in hub.fetched if method == "GET" and name.endswith(".safetensors")]
    assert sorted(weights) == [f"{DETECTOR}/model.safetensors", f"{REPOSITORY}/model.safetensors"]
    offline = run(LOAD, None, tmp_path, HF_HUB_OFFLINE="1")
    assert offline.stdout == loaded.stdout, offline.stderr


def test_a_data_set_is_read_by_its_split(hub: ThreadingHTTPServer, tmp_path: Path):
    read = f"""
from pixelis.datasets.questions import read_questions
print([q.question for q in read_questions("hf:{DATASET}?split=test", epochs=1)])
"""
    result = run(read, hub, tmp_path)
    assert result.stdout == "['test?']\n", result.stderr
    assert not any("train" in name for _, name in hub.fetched)
    assert "?split=train" in run(read.replace("?split=test", ""), hub, tmp_path).stderr


@pytest.mark.parametrize(
    ("name", "online", "kind"),
    [
        ("acme/other", True, "MissingFile"),
        ("acme/other", False, "MissingFile"),
        ("models/with/parts", True, "MissingFile"),
    ],
)
def test_a_missing_model_is_named(
    hub: ThreadingHTTPServer, tmp_path: Path, name: str, online: bool, kind: str
):
    result = run(NAMED.format(name=name), hub if online else None, tmp_path)
    assert result.stdout.startswith(kind), result.stderr
    assert name in result.stdout
