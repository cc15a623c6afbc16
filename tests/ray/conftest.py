"""Fixtures for the tests on a real cluster: random models, jobs as processes, and the documented metrics."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SMALL = {
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "layers": 2,
    "feedforward": 96,
    "vision_hidden": 32,
    "vision_layers": 2,
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that returns the folder of a random model: ``model()`` or ``model("qwen2_5_vl",
    embedded=False)``.
    """
    from pixelis.nano import architecture
    from pixelis.nano.tokenizer import build_tokenizer

    folders: dict[tuple[str, bool], Path] = {}

    def make(family: str = "qwen3_vl", embedded: bool = True) -> Path:
        if (family, embedded) not in folders:
            folder = tmp_path_factory.mktemp(family)
            tokenizer = build_tokenizer()
            random = architecture.build(tokenizer, family, seed=1, **SMALL)  # type: ignore[arg-type]
            random.config.pixelis_nano = embedded
            architecture.save(random, tokenizer, folder)
            folders[family, embedded] = folder
        return folders[family, embedded]

    return make


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
