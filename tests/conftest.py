"""One local Ray cluster for the whole test session, and a record of the figures of fault tests."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

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

# No deadline: a busy machine makes examples slow.
hypothesis.settings.register_profile("pixelis", deadline=None, max_examples=50)
hypothesis.settings.register_profile("full", deadline=None, max_examples=500)
hypothesis.settings.load_profile(os.environ.get("PIXELIS_HYPOTHESIS", "pixelis"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray cluster with token authentication, shared by all tests of the session."""
    import ray

    from pixelis.actors.cluster import connect
    from pixelis.config import load

    os.environ.pop("RAY_ADDRESS", None)
    connect(load(None, ["cluster.cpus=4", "cluster.object_store_bytes=300000000"]))
    yield
    ray.shutdown()


FIGURES: list[tuple[str, str]] = []


@pytest.fixture
def record_figures(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Callable[..., None]:
    """A function that records figures of this test for the summary: ``record_figures(detection_s=0.4)``."""

    def record(**figures: Any) -> None:
        for name, value in figures.items():
            record_property(name, value)
        text = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
        FIGURES.append((request.node.name, text))

    return record


QUICK_S = 5.0
"""Seconds after which a test or fixture that is not marked slow is listed in the summary, so that `make
test-fast` stays fast.
"""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the figures of the fault tests, and the tests that should be marked slow."""
    if FIGURES:
        terminalreporter.section("fault tests: measured figures")
        for name, text in FIGURES:
            terminalreporter.write_line(f"{name}: {text}")
    phases = [report for kind in ("passed", "") for report in terminalreporter.stats.get(kind, [])]
    slow = [report for report in phases if report.duration > QUICK_S and "slow" not in report.keywords]
    if slow:
        terminalreporter.section("not quick: mark these with pytest.mark.slow or make them faster")
        for report in slow:
            terminalreporter.write_line(f"{report.nodeid}: {report.when} {report.duration:.1f} s")
