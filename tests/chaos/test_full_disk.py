"""F17: the disk of a training run, a real file system of its own, is full.

Shorter: test_driver.py, test_checkpoint.py, test_memory_disk.py, tests/serve/test_stored_before_reply.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from own_process import start_rft
from small_disks import fill, small_disk

from pixelis.policy import checkpoint
from pixelis.policy.adapters import load_adapter
from pixelis.telemetry import events

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

RUN = ["policy.model=nano", "rft.prompts_per_step=2", "rft.group_size=2", "dialogue.max_turn_tokens=16"]
# A policy without SFT never answers, so the reward is for short replies.
RUN += ["rewards.weights.length=1.0", "learner.checkpoint_every=1"]
RUN += ["telemetry.progress=false", "telemetry.trackers=[wandb]"]


def test_f17_a_full_disk_ends_a_run_with_its_name_and_the_run_resumes(
    tmp_path: Path, record_figures: Callable[..., None]
) -> None:
    """Checkpoints, events, versions, rollouts and the offline tracker all write to the full disk."""
    with small_disk(tmp_path / "disk", 60) as disk:
        run = disk / "run"
        job = start_rft(run, [*RUN, "rft.steps=2000"])
        try:
            while len(events.read(run, "step/policy")) < 2:
                assert job.poll() is None, job.communicate()
                time.sleep(0.05)
            ballast = fill(disk)
            filled = time.monotonic()
            _, text = job.communicate(timeout=400)
        finally:
            job.kill()
        ended = time.monotonic() - filled
        found = [word in text for word in ("No space left on device", "fix: free", "Traceback")]
        assert (job.returncode, found) == (1, [True, True, False]), text
        latest = checkpoint.latest(run)
        assert latest is not None
        assert load_adapter(latest).tensors
        reached = checkpoint.step_of(latest)
        ballast.unlink()
        job = start_rft(run, [*RUN, f"rft.steps={reached + 2}"])
        _, text = job.communicate(timeout=400)
        assert job.returncode == 0, text
        steps = [row["step"] for row in events.read(run, "step/policy")]
        assert steps[-2:] == [reached + 1, reached + 2]
        assert len(set(steps)) == len(steps)
        assert (run / "wandb").is_dir()
    record_figures(ended_s=ended, kept_step=reached)
