"""What a run shows while it goes on: metrics as documented, trackers, pages with pictures of what the policy does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pixelis.actors import cluster
from pixelis.config import load
from pixelis.jobs import rft
from pixelis.jobs.driver import run_folder
from pixelis.telemetry import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FEW = [
    "policy.model=nano",
    "rft.steps=2",
    "rft.questions=4",
    "rft.group=4",
    "rft.evaluate_every=1",
    "rft.loss.kl=0.01",
    "rewards.weights.format=0.5",
    "evaluate.questions=4",
    "telemetry.tensorboard=true",
    "telemetry.trajectories=3",
]


@pytest.fixture(scope="module")
def run(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched")
    config = load(None, [*FEW, f"run.dir={folder}"])
    with run_folder(config, config.data.train), cluster.placed(config) as actors:
        rft.run(config, actors)
    return folder


def documented() -> dict[str, tuple[re.Pattern[str], bool]]:
    """Metric of docs/metrics.md -> (pattern of its names, whether every step of rft logs it)."""
    found = {}
    for line in Path("docs/metrics.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("| `"):
            continue
        names, _, when = (cell.strip() for cell in line.strip("|").split(" | "))
        for name in re.findall(r"`([^`]+)`", names):
            pattern = "".join(r"[\w.:/]+" if part.isupper() else re.escape(part) for part in re.split(r"([A-Z]{2,})", name))
            found[name] = re.compile(pattern), when.strip() == "always"
    return found


def test_every_metric_of_a_step_is_documented_and_the_other_way_round(run: Path) -> None:
    rows, table = events.read(run, "step/policy"), documented()
    assert len(rows) == 2
    for row in rows:
        logged = {key for key in row if "/" in key}
        assert {key for key in logged if not any(p.fullmatch(key) for p, _ in table.values())} == set()
        assert {name for name, (p, always) in table.items() if always and not any(map(p.fullmatch, logged))} == set()


def test_evaluations_leave_pages_with_pictures(run: Path) -> None:
    pages = sorted((run / "trajectories").iterdir())
    assert [page.name for page in pages] == ["step_00000001.html", "step_00000002.html"]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert text.count('<article class="episode"') == 3
        assert "data:image/" in text
        assert "was not kept" not in text


def test_tensorboard_gets_the_numbers_of_the_steps(run: Path) -> None:
    (file,) = (run / "tensorboard").glob("events.*")
    assert b"train/accuracy" in file.read_bytes()
