"""Shared fixtures: one real local Ray cluster for the whole test session."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_private = tempfile.mkdtemp(prefix="pixelis-tests-")
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN_PATH"] = os.path.join(_private, "ray-token")
with open(os.environ["RAY_AUTH_TOKEN_PATH"], "w") as _token:
    _token.write(secrets.token_hex(32))

# Examples are slow when the machine has other work, and that is no fault of what they check.
hypothesis.settings.register_profile("pixelis", deadline=None)
hypothesis.settings.load_profile("pixelis")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray cluster with token authentication, shared by every test that needs one."""
    import ray

    from pixelis.actors.cluster import connect
    from pixelis.config import load

    os.environ.pop("RAY_ADDRESS", None)
    connect(load(None, ["cluster.cpus=4", "cluster.object_store_bytes=300000000"]))
    yield
    ray.shutdown()
