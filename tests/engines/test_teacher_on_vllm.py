"""`vllm serve` as a teacher: it scores tokens and pictures as `TeacherModel` does, and teaches a run."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from running import served

from pixelis.config import Config, load
from pixelis.engines.teacher_server import TeacherServer
from pixelis.policy.model_path import resolve
from pixelis.policy.samples import TrainSample
from pixelis.policy.teacher_model import TeacherModel
from pixelis.telemetry import events

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
KEY, KEY_ENV = secrets.token_hex(8), "PIXELIS_TEACHER_API_KEY"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the embedded model."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("served")
    model = shutil.copytree(resolve("nano"), folder / "model")
    flags = [f"--api-key={KEY}", "--max-model-len=512", "--limit-mm-per-prompt", '{"image": 8, "video": 0}']
    with served(model, folder / "log", *flags) as address:
        yield f"{address}/v1"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def episodes(config: Config, teacher: TeacherServer, count: int) -> list[TrainSample]:
    """Two turns each, with a picture before each turn."""
    spec, rng, area = teacher.spec, np.random.default_rng(0), config.dialogue.input.max_pixels
    words = [token for token in range(7, spec.vocab) if token not in spec.banned]
    samples = []
    for _ in range(count):
        tokens, mask, views = list[int](), list[bool](), []
        for _ in range(2):
            side = int(area**0.5)
            views.append(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
            seen = [*rng.choice(words, 5), *spec.family.image_ids(spec, side, side), *rng.choice(words, 3)]
            said = [*rng.choice(words, rng.integers(1, 16)), spec.stop]
            tokens += seen + said
            mask += [False] * len(seen) + [True] * len(said)
        zeros = np.zeros(len(tokens), np.float32)
        samples.append(TrainSample(np.asarray(tokens), np.asarray(mask), zeros, 0.0, views))
    return samples


def test_a_server_scores_pictures_and_tokens_as_the_model_in_a_process_of_its_own(url: str) -> None:
    config = load(None, ["policy.model=nano", f"rft.teacher.model={url}"])
    server = TeacherServer(config, url)
    model = TeacherModel(config.policy, config.learner, "nano", 1.0, "cpu")
    model.module.banned.zero_()  # the server has no tokens that are never written
    samples = episodes(config, server, 12)
    scores = server.log_probs(samples)
    for values, expected in zip(scores, model.log_probs(samples), strict=True):
        assert np.abs(values - expected).max() < 1e-3


def test_a_server_of_the_same_model_agrees_with_its_student(url: str, tmp_path: Path) -> None:
    keys = [
        f"rft.teacher.model={url}",
        "rft.teacher.rewards=false",
        "rft.group_size=1",
        f"run.dir={tmp_path}",
    ]
    keys += ["policy.model=nano", "rft.steps=1", "rft.prompts_per_step=4"]
    command = [sys.executable, "-m", "pixelis.jobs.rft", *keys]
    planned = subprocess.run([*command, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"ok     rft.teacher={url}" in planned.stderr
    assert f"1 x teacher {url}" in planned.stderr
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert KEY not in run.stdout + run.stderr
    (row,) = events.read(tmp_path, "step/policy")
    # Before the first step an adapter changes nothing
    assert row["teacher/kl"] == pytest.approx(0, abs=2e-2)
    assert row["teacher/unscored"] == 0
