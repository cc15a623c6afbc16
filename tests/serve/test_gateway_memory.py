"""Memory of a gateway under pictures that are small on the wire and huge when decoded."""

from __future__ import annotations

import base64
import functools
import io
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
from gateway_helpers import until
from PIL import Image
from ray import serve
from scripted import Deployed, picture_url

from pixelis.config import load
from pixelis.serve import app
from pixelis.serve.agent_types import Backends

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

MB = 1_000_000


@functools.cache
def huge(side: int = 7000, format: str = "PNG") -> str:
    """A picture of one colour: 95 kB as PNG, 147 MB decoded."""
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (90, 120, 40)).save(buffer, format)
    return f"data:image/{format.lower()};base64," + base64.b64encode(buffer.getvalue()).decode()


@dataclass
class OwnGateway:
    """A gateway without a key, beside the application of the other tests."""

    url: str

    def client(self, timeout: float = 60.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout, verify=False)

    def private_bytes(self) -> int:
        """Memory of the gateway's processes, without what they share: the object store has its own limit."""
        title, total = "ray::ServeReplica:memory:Gateway", 0
        for process in psutil.process_iter(["cmdline"]):
            if title in " ".join(process.info["cmdline"] or []):
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
        return total


@pytest.fixture(scope="module")
def gateway(
    deployed: Deployed, backends: Backends, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnGateway]:
    own = ["engine.workers=2", "engine.max_num_seqs=64", "serve.samples=1", "serve.cache=0"]
    own += ["serve.replicas=1", "evolution.enabled=false", f"run.dir={tmp_path_factory.mktemp('memory')}"]
    application = app.build(load(None, own), Backends(backends.generators, backends.namespace), None)
    serve.run(application, name="memory", route_prefix="/memory")
    gateway = OwnGateway(f"{deployed.url}/memory")
    with gateway.client() as client:
        for _ in range(8):  # warm
            client.post("/v1/agent", json={"question": "say 7", "image": picture_url((800, 800))})
    yield gateway
    serve.delete("memory")


@contextmanager
def peak(gateway: OwnGateway) -> Iterator[SimpleNamespace]:
    """Growth of the gateway's memory in MB: ``most`` while the block runs, ``kept`` after it."""
    before, growth, done = gateway.private_bytes(), SimpleNamespace(most=0.0, kept=0.0), threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            growth.most = max(growth.most, (gateway.private_bytes() - before) / MB)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield growth
    finally:
        done.set()
        thread.join()
    until(lambda: gateway.private_bytes() < 1.1 * before, 15)
    growth.kept = (gateway.private_bytes() - before) / MB


def test_requests_with_too_many_pixels_take_no_memory(
    gateway: OwnGateway, record_figures: Callable[..., None]
) -> None:
    """Twelve times eight pictures of 49 million pixels at once, in bodies of 760 kB."""
    body = {"question": "say 7", "image": [huge()] * 8}
    with gateway.client() as client, peak(gateway) as growth, ThreadPoolExecutor(12) as pool:
        statuses = list(pool.map(lambda _: client.post("/v1/agent", json=body).status_code, range(12)))
    assert set(statuses) == {400}
    record_figures(most_mb=growth.most, kept_mb=growth.kept)
    assert growth.most < 100


def test_requests_with_huge_pictures_share_a_budget_and_their_memory_returns(
    gateway: OwnGateway, record_figures: Callable[..., None]
) -> None:
    """Each request decodes to 294 MB: two fit into the budget, the others wait or are told to come back."""
    body = {"question": "wait 0.5 say 7", "image": [huge(), huge()]}
    with gateway.client(180) as client, peak(gateway) as growth, ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda _: client.post("/v1/agent", json=body), range(12)))
    record_figures(
        most_mb=growth.most, kept_mb=growth.kept, statuses=dict(Counter(r.status_code for r in replies))
    )
    assert {r.status_code for r in replies} <= {200, 429, 504}
    assert any(r.status_code == 200 for r in replies)
    assert all(int(r.headers["Retry-After"]) >= 1 for r in replies if r.status_code != 200)
    assert growth.most < 2000
    assert growth.kept < 100
    with gateway.client() as client:
        assert client.post("/v1/agent", json={"question": "say 7", "image": picture_url()}).status_code == 200


def test_without_operations_a_jpeg_is_decoded_at_the_size_of_the_view(
    gateway: OwnGateway, record_figures: Callable[..., None]
) -> None:
    body = {"question": "say 7", "image": [huge(format="JPEG")] * 2, "operations": False}
    with gateway.client() as client, peak(gateway) as growth:
        assert client.post("/v1/agent", json=body).status_code == 200
    record_figures(most_mb=growth.most)
    assert growth.most < 100
