"""A synthesis whose driver and one worker are killed produces the same samples as an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from pixelis.config import Config, load
from pixelis.datasets.questions import read_demonstrations
from pixelis.datasets.synthesis.quota_scheduler import SHARD, QuotaScheduler, SourceRows
from pixelis.datasets.synthesis.sample_builder import SampleBuilder
from pixelis.errors import PixelisError
from pixelis.jobs import synthesize
from pixelis.records import Demonstration, Question

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

TASK = {"target_sample_count": 150, "source_datasets": ["digits"]}
SETTINGS = {
    "datasources": {"digits": {"path": "packaged:digits?split=train&count=300&seed=3"}},
    "tasks": {"detail_perception": TASK},
    "corrections": ["recrop_once", "oversized_zoom", "repaired_call"],
    "workers": 1,
}


def lines(folder: Path) -> list[str]:
    files = sorted((folder / "samples").glob("*.jsonl"))
    return [line for path in files for line in path.read_text().splitlines()]


def plain_loop(config: Config) -> list[str]:
    """Run the same synthesis in one process without Ray and without interruption; return its samples."""
    scheduler = QuotaScheduler(config.run.dir, config.synthesis, config.run.seed)
    rows = SourceRows(config.synthesis)
    maker = SampleBuilder(config.synthesis, config.run.seed, config.toolbox, config.dialogue, config.rewards)
    while scheduler.completed < scheduler.target and scheduler.plan(rows):
        while scheduler.completed < scheduler.target and (left := scheduler.left()[:SHARD]):
            outcomes: list[tuple[Demonstration | None, str]] = []
            for attempt in left:
                question = Question.model_validate_json(str(rows.get(attempt.source, attempt.row)))
                try:
                    outcomes.append((maker.build(attempt, question), ""))
                except PixelisError as error:
                    outcomes.append((None, error.code))
            scheduler.commit(outcomes)
    return lines(Path(config.run.dir))


def shards(folder: Path) -> int:
    return len(list((folder / "shards").glob("*.json")))


def kill_a_worker(folder: Path, initial_shards: int, killed: list[int]) -> None:
    """SIGKILL a synthesis actor of this process's cluster once a shard is finished; append its id."""
    deadline = time.monotonic() + 120
    while shards(folder) <= initial_shards and time.monotonic() < deadline:
        time.sleep(0.02)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "MapBatches(BuildSamples)" in " ".join(child.cmdline()):
                os.kill(child.pid, signal.SIGKILL)
                killed.append(child.pid)
                return


def test_a_synthesis_with_a_killed_driver_and_worker_gives_the_same_samples(
    ray_cluster: None, tmp_path: Path
) -> None:
    file = tmp_path / "synthesize.yaml"
    run = {"dir": str(tmp_path / "run")}
    file.write_text(yaml.safe_dump({"synthesis": SETTINGS, "run": run, "telemetry": {"progress": False}}))
    config = load(file)
    folder = Path(config.run.dir)
    command = [sys.executable, "-m", "pixelis.jobs.synthesize", str(file), "cluster.cpus=1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while shards(folder) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    _, errors = process.communicate()
    initial_shards = shards(folder)
    assert initial_shards >= 2, errors

    killed: list[int] = []
    killer = threading.Thread(target=kill_a_worker, args=(folder, initial_shards, killed))
    killer.start()
    summary = synthesize.run(config)
    killer.join()
    assert killed, "no worker was killed"

    assert summary["shortfall"] == {}
    expected = plain_loop(load(file, [f"run.dir={tmp_path / 'plain'}"]))
    assert lines(folder) == expected
    ids = {json.loads(line)["id"] for line in expected}
    assert len(ids) == len(expected) == TASK["target_sample_count"]
    assert summary["kinds"]["self_correction"] == 30
    assert len(read_demonstrations(str(folder / "samples"), 10, 0, 0.0)) == 10
    assert synthesize.run(config)["samples"] == summary["samples"]
