"""Checkpoints under SIGKILL at chosen bytes (F4 of the list of faults), and optimizer steps with non-finite
values (F15).
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pixelis import config
from pixelis.errors import InfraFailure
from pixelis.policy import checkpoint, objectives, train_step
from pixelis.policy.samples import TrainSample

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
    """F4: SIGKILL at 50 random bytes of a checkpoint with weights and optimizer, and around each flush and
    rename at its end.

    Goal: the latest checkpoint is always complete and no older than the last acknowledged one.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as writer:
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
    record_figures(
        kills=kills, of_bytes=int(size), complete_before_the_kill=newer, acknowledged_lost=0, torn_picked=0
    )


def samples(spec: object, seed: int) -> list[TrainSample]:
    """Return four random texts; the policy wrote the second half of each."""
    rng = np.random.default_rng(seed)
    words = [t for t in range(7, spec.vocab) if t not in spec.banned]  # type: ignore[attr-defined]
    texts = []
    for advantage in (1.0, -1.0, 0.5, -0.5):
        tokens = rng.choice(words, 24)
        mask = np.arange(24) >= 12
        texts.append(TrainSample(tokens.astype(np.int64), mask, np.full(24, -2.0, np.float32), advantage, []))
    return texts


@pytest.fixture
def learner() -> Iterator[train_step.Trainer]:
    """A trainer of the embedded model; its learning rate changes every step."""
    trainer = train_step.Trainer(
        config.PolicyConfig(model="nano"),
        config.LearnerConfig(lr=1e-3, schedule="cosine", warmup=0.2, row_tokens=64, rows=2),
        total_steps=20,
        device="cpu",
    )
    try:
        yield trainer
    finally:
        trainer.close()


FAULTS = ("nan loss", "inf loss", "nan gradient", "inf gradient")


@pytest.fixture
def inject(learner: train_step.Trainer, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """A function that injects one of ``FAULTS`` into the following steps; None: no fault."""
    original_loss, fault = objectives.policy_loss, [""]

    def loss(*args: object, **kwargs: object) -> tuple:
        value, sums = original_loss(*args, **kwargs)  # type: ignore[arg-type]
        number, _, target = fault[0].partition(" ")
        return (value + (float(number) if target == "loss" else 0.0)), sums

    def gradient(grad: torch.Tensor) -> torch.Tensor:
        number, _, target = fault[0].partition(" ")
        if target != "gradient":
            return grad
        grad = grad.clone()
        grad.view(-1)[0] = float(number)  # one value of one layer
        return grad

    next(iter(learner.model.zero.parameters.values())).register_hook(gradient)
    monkeypatch.setattr(objectives, "policy_loss", loss)

    def set_fault(name: str | None) -> None:
        fault[0] = name or ""

    return set_fault


def bits(learner: train_step.Trainer) -> tuple[dict[str, bytes], float]:
    """Return the bytes of weights and optimizer moments, and the learning rate."""
    state = {
        **learner.adapter().tensors,
        **{f"moment {n}": a for n, a in learner.model.zero.moments().items()},
    }
    return {name: array.tobytes() for name, array in state.items()}, learner.lr()


def test_f15_a_non_finite_step_is_skipped_and_three_in_a_row_stop_the_run(
    learner: train_step.Trainer,
    inject: Callable[[str | None], None],
    tmp_path: Path,
    record_figures: RecordFigures,
) -> None:
    """F15: NaN or inf in the loss or in one value of the gradient.

    Goal: the step is skipped and counted; weights, moments and learning rate do not change in any bit. Three
    skipped steps in a row end the run, and its last checkpoint restores the same bits.
    """
    for _ in range(2):
        assert learner.update(samples(learner.model.spec, 0))["policy/grad_norm"] > 0
    for number, fault in enumerate(FAULTS):
        before = bits(learner)
        inject(fault)
        metrics = learner.update(samples(learner.model.spec, 1))
        assert metrics["learner/skipped"] == number + 1, fault
        assert not math.isfinite(metrics["policy/grad_norm"])
        assert bits(learner) == before, fault
        inject(None)
        learner.update(samples(learner.model.spec, 2))  # a finite step resets the count
        assert bits(learner)[0] != before[0]
    saved = learner.save(tmp_path, {"consumed": 1})
    good = bits(learner)
    for fault in ("nan gradient", "inf loss"):
        inject(fault)
        learner.update(samples(learner.model.spec, 3))
    inject("nan loss")
    with pytest.raises(InfraFailure, match="in three steps in a row") as caught:
        learner.update(samples(learner.model.spec, 3))
    assert caught.value.code == "non_finite_steps"
    assert learner.skipped_in_a_row == 3
    assert bits(learner) == good
    inject(None)
    learner.update(samples(learner.model.spec, 4))
    assert bits(learner)[0] != good[0]
    assert checkpoint.latest(tmp_path) == saved
    assert learner.restore(saved) == {"consumed": 1}
    assert bits(learner) == good
    record_figures(faults=", ".join(FAULTS), skipped=4, bits_changed=0, stopped_after=3)
