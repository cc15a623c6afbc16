"""Fixtures for the tests on a real cluster: jobs as processes, and the documented metrics."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def job() -> Callable[..., subprocess.Popen]:
    """Start ``python -m pixelis.jobs.NAME`` as a user would; output is one text stream each."""

    def start(name: str, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", f"pixelis.jobs.{name}", *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


@pytest.fixture(scope="session")
def documented_metrics() -> dict[str, tuple[re.Pattern[str], bool]]:
    """Metric of docs/metrics.md -> (pattern of its names, whether every step of rft logs it)."""
    metrics = {}
    for line in Path("docs/metrics.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("| `"):
            continue
        names, _, when = (cell.strip() for cell in line.strip("|").split(" | "))
        for name in re.findall(r"`([^`]+)`", names):
            pattern = "".join(
                r"[\w.:/]+" if part.isupper() else re.escape(part) for part in re.split(r"([A-Z]{2,})", name)
            )
            metrics[name] = re.compile(pattern), when.strip() == "always"
    return metrics
