"""The service's metrics reach Ray's exporter on the node, where Prometheus finds them whichever replica
answers.
"""

from __future__ import annotations

import httpx
import numpy as np
import pytest
import ray
from exported import ACTOR_METRICS, missing
from scripted import KEY, Deployed, picture_url

pytestmark = pytest.mark.slow


def test_the_metrics_of_gateway_evolution_and_memory_are_exported(deployed: Deployed) -> None:
    body = {"question": "say 7", "image": picture_url()}
    reply = httpx.post(
        f"{deployed.url}/v1/agent", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=30
    )
    assert reply.status_code == 200
    shard = ray.get_actor("under-test-memory-0")
    ray.get(shard.search.remote(np.ones((1, 32), np.float32), 1))
    expected = {key for key in ACTOR_METRICS if key.startswith(("gateway/", "evolution/", "memory/"))}
    # These four are there only after updates, or when a minute had enough answers.
    rare = {f"evolution/{name}" for name in ("update_rate", "mean_kl", "p99_latency", "faiss_failure_rate")}
    assert missing(expected - rare) == set()
