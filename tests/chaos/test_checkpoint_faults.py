"""Checkpoints under SIGKILL at chosen bytes (F4) and steps with non-finite values (F15)."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import LEARNER, batch, trainer

from pixelis.errors import InfraFailure
from pixelis.policy import checkpoint

RecordFigures = Callable[..., None]

WRITER = """
import builtins, io, os, signal, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save
from pixelis.policy import checkpoint, tensor_parts

class KillSwitch:
    '''Counts the bytes and operations that the writer does on disk, and kills the process at a given count.'''
    def __init__(self, at): self.at, self.done = at, 0
    def write(self, path, data):
        with open(path, "wb", buffering=0) as file:
            room = len(data) if self.at is None else min(len(data), self.at - self.done)
            file.write(data[:room])
            self.done += room
            self.check()
    def step(self, call):
        def counted(*arguments, **options):
            self.done += 1
            self.check()
            result = call(*arguments, **options)
            self.done += 1
            self.check()
            return result
        return counted
    def check(self):
        if self.at is not None and self.done >= self.at: os.kill(os.getpid(), signal.SIGKILL)

def write(run_dir, step, at):
    switch = KillSwitch(at)
    tensor_parts.save_file = lambda arrays, path, metadata=None: switch.write(path, save(arrays, metadata))
    Path.write_text = lambda path, text, encoding=None: switch.write(path, text.encode())
    checkpoint.sync, os.rename, Path.mkdir = map(switch.step, (checkpoint.sync, os.rename, Path.mkdir))
    weights = {f"layer{i}.{part}": np.full((8, 24), step, np.float32) for i in range(4) for part in "AB"}
    moments = {f"{name}.{m}": values for name, values in weights.items() for m in ("exp_avg", "exp_avg_sq")}
    checkpoint.write(run_dir, step, {"adapter": weights, "optimizer": moments}, {"step": step}, keep=2)
    return switch.done

for line in sys.stdin:
    step, at = line.split()
    child = os.fork()
    if not child:
        done = write(sys.argv[1], int(step), None if at == "-" else int(at))
        print("complete", done, flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status): print("killed", os.WTERMSIG(status), flush=True)
    elif status: print("failed", status, flush=True)
"""


def test_f04_a_writer_killed_at_any_byte_loses_no_acknowledged_checkpoint(
    tmp_path: Path, record_figures: RecordFigures
) -> None:
    """F4: SIGKILL at 50 random bytes of a checkpoint, and around each flush and rename at its end."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None

        def write(step: int, at: int | str) -> list[str]:
            assert writer.stdin is not None
            assert writer.stdout is not None
            writer.stdin.write(f"{step} {at}\n")
            writer.stdin.flush()
            return writer.stdout.readline().split()

        outcome, size = write(0, "-")
        assert outcome == "complete"
        rng, acknowledged, kills, newer = random.Random(4), 0, 0, 0
        kill_points = [(rng.randrange(1, int(size) + 1), i % 5 == 4) for i in range(50)]
        kill_points += [(int(size) + i, rewrite) for i in range(-10, 5) for rewrite in (False, True)]
        for attempt, (kill_point, rewrite) in enumerate(kill_points):
            # Some attempts write the latest step again, as a resumed run may do.
            step = acknowledged if rewrite else acknowledged + 1
            outcome, signal_or_size = write(step, kill_point)
            kills += outcome == "killed" and signal_or_size == "9"
            latest = checkpoint.latest(tmp_path)
            assert latest is not None
            assert checkpoint.step_of(latest) >= acknowledged, "an acknowledged checkpoint is lost"
            tensors, state = checkpoint.read(latest)
            assert state["step"] == checkpoint.step_of(latest)
            assert all((a == state["step"]).all() for part in tensors.values() for a in part.values())
            newer += checkpoint.step_of(latest) > acknowledged
            if attempt % 3 == 2:
                outcome, _ = write(checkpoint.step_of(latest) + 1, "-")
                assert outcome == "complete"
                latest = checkpoint.latest(tmp_path)
                assert latest is not None
            acknowledged = checkpoint.step_of(latest)
        writer.stdin.close()
    assert kills >= 65
    names = [p.name for p in (tmp_path / "checkpoints").iterdir()]
    assert len(names) <= 2 + 3, f"files of killed writers are not removed: {names}"
    record_figures(kills=kills, of_bytes=int(size), complete_before_the_kill=newer)


def test_f15_a_step_with_one_non_finite_gradient_is_skipped_and_three_in_a_row_stop_the_run(
    tmp_path: Path, record_figures: RecordFigures
) -> None:
    """F15: no bit changes. A loss that is not finite: tests/unit/policy/test_train_step.py."""
    settings = LEARNER.model_copy(update={"schedule": "cosine", "warmup": 0.2})
    fault: list[float | None] = [None]

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        if fault[0] is None:
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[0] = fault[0]  # one value of one layer
        return gradient

    def bits() -> tuple[dict[str, bytes], float]:
        arrays = {**learner.adapter().tensors, **learner.model.zero.moments()}
        return {name: array.tobytes() for name, array in arrays.items()}, learner.lr()

    with trainer(learner=settings) as learner:
        next(iter(learner.model.zero.parameters.values())).register_hook(spoil)
        learner.update(batch())
        for number, value in enumerate((math.nan, math.inf)):
            before, fault[0] = bits(), value
            metrics = learner.update(batch())
            assert metrics["learner/skipped"] == number + 1
            assert not math.isfinite(metrics["policy/grad_norm"])
            assert bits() == before
            fault[0] = None
            learner.update(batch())  # a finite step resets the count
            assert bits()[0] != before[0]
        saved, good = learner.save(tmp_path, {"consumed": 1}), bits()
        fault[0] = math.nan
        learner.update(batch())
        learner.update(batch())
        with pytest.raises(InfraFailure, match="in three steps in a row") as caught:
            learner.update(batch())
        assert caught.value.code == "non_finite_steps"
        assert bits() == good
        fault[0] = None
        learner.update(batch())
        assert bits()[0] != good[0]
        assert checkpoint.latest(tmp_path) == saved
        assert learner.restore(saved) == {"consumed": 1}
        assert bits() == good
    record_figures(skipped=2, bits_changed=0, stopped_after=3)
