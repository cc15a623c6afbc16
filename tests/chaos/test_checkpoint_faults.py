"""Checkpoints under SIGKILL at chosen bytes, and optimizer steps that must not happen.

The numbers F4 and F15 are those of the project's list of faults.
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
from pixelis.policy import checkpoint, train_step
from pixelis.policy.samples import TrainSample

RecordFigures = Callable[..., None]

WRITER = """
import builtins, io, os, signal, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save
from pixelis.policy import checkpoint

class Killed:
    '''Everything that the writer does to the disk passes here and counts; at the given place the process kills itself.'''
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
    k = Killed(at)
    checkpoint.save_file = lambda arrays, path, metadata=None: k.write(path, save(arrays, metadata))
    Path.write_text = lambda path, text, encoding=None: k.write(path, text.encode())
    checkpoint._sync, os.rename, Path.mkdir = k.step(checkpoint._sync), k.step(os.rename), k.step(Path.mkdir)
    weights = {f"layer{i}.{part}": np.full((8, 24), step, np.float32) for i in range(4) for part in "AB"}
    moments = {f"{name}.{m}": values for name, values in weights.items() for m in ("exp_avg", "exp_avg_sq")}
    checkpoint.write(run_dir, step, {"adapter": weights, "optimizer": moments}, {"step": step}, keep=2)
    return k.done

for line in sys.stdin:
    step, at = line.split()
    child = os.fork()
    if not child:
        done = write(sys.argv[1], int(step), None if at == "-" else int(at))
        print("whole", done, flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status): print("killed", os.WTERMSIG(status), flush=True)
    elif status: print("failed", status, flush=True)
"""


def test_f04_a_writer_killed_at_any_byte_loses_no_more_than_what_it_was_writing(
    tmp_path: Path, record_figures: RecordFigures
) -> None:
    """F4: SIGKILL at 50 random bytes of a checkpoint with weights and optimizer, and around each flush and rename at its end.

    Goal: there is always one to load, no older than the last that was acknowledged; a torn one is never picked.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None

        def ask(step: int, at: int | str) -> list[str]:
            assert writer.stdin is not None
            assert writer.stdout is not None
            writer.stdin.write(f"{step} {at}\n")
            writer.stdin.flush()
            return writer.stdout.readline().split()

        outcome, size = ask(0, "-")
        assert outcome == "whole"
        chance, acknowledged, kills, newer = random.Random(4), 0, 0, 0
        places = [(chance.randrange(1, int(size) + 1), i % 5 == 4) for i in range(50)]
        places += [(int(size) + i, again) for i in range(-10, 5) for again in (False, True)]
        for attempt, (place, again) in enumerate(places):
            # Some write the newest step a second time, as a run that was stopped and goes on may do.
            step = acknowledged if again else acknowledged + 1
            outcome, signal_or_size = ask(step, place)
            kills += outcome == "killed" and signal_or_size == "9"
            latest = checkpoint.latest(tmp_path)
            assert latest is not None
            assert checkpoint.step_of(latest) >= acknowledged, "what was acknowledged is never lost"
            tensors, state = checkpoint.read(latest)
            assert state["step"] == checkpoint.step_of(latest)
            assert all((a == state["step"]).all() for part in tensors.values() for a in part.values())
            newer += checkpoint.step_of(latest) > acknowledged
            if attempt % 3 == 2:
                outcome, _ = ask(checkpoint.step_of(latest) + 1, "-")
                assert outcome == "whole"
                found = checkpoint.latest(tmp_path)
                assert found is not None
            acknowledged = checkpoint.step_of(found)
        writer.stdin.close()
    assert kills >= 65
    left = [p.name for p in (tmp_path / "checkpoints").iterdir()]
    assert len(left) <= 2 + 3, f"what dead writers left behind is swept away: {left}"
    record_figures(kills=kills, of_bytes=int(size), complete_before_the_kill=newer, acknowledged_lost=0, torn_picked=0)


def samples(spec: object, seed: int) -> list[TrainSample]:
    """Four texts of which the policy wrote the second half."""
    rng = np.random.default_rng(seed)
    words = [t for t in range(7, spec.vocab) if t not in spec.banned]  # type: ignore[attr-defined]
    made = []
    for advantage in (1.0, -1.0, 0.5, -0.5):
        tokens = rng.choice(words, 24)
        mask = np.arange(24) >= 12
        made.append(TrainSample(tokens.astype(np.int64), mask, np.full(24, -2.0, np.float32), advantage, []))
    return made


@pytest.fixture
def learner() -> Iterator[train_step.Trainer]:
    """The embedded model in training, with a learning rate that differs from step to step."""
    made = train_step.Trainer(
        config.PolicyConfig(model="nano"),
        config.LearnerConfig(lr=1e-3, schedule="cosine", warmup=0.2, row_tokens=64, rows=2),
        total_steps=20,
        device="cpu",
    )
    try:
        yield made
    finally:
        made.close()


FAULTS = ("nan loss", "inf loss", "nan gradient", "inf gradient")


@pytest.fixture
def broken(learner: train_step.Trainer, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Have the coming steps meet one of ``FAULTS``; None: a healthy one."""
    healthy, now = train_step.policy_loss, [""]

    def loss(*args: object, **kwargs: object) -> tuple:
        value, sums = healthy(*args, **kwargs)  # type: ignore[arg-type]
        kind, _, where = now[0].partition(" ")
        return (value + (float(kind) if where == "loss" else 0.0)), sums

    def gradient(grad: torch.Tensor) -> torch.Tensor:
        kind, _, where = now[0].partition(" ")
        if where != "gradient":
            return grad
        grad = grad.clone()
        grad.view(-1)[0] = float(kind)  # one number of one layer
        return grad

    next(iter(learner.zero.parameters.values())).register_hook(gradient)
    monkeypatch.setattr(train_step, "policy_loss", loss)

    def meet(kind: str | None) -> None:
        now[0] = kind or ""

    return meet


def held(learner: train_step.Trainer) -> tuple[dict[str, bytes], float]:
    """Weights, moments of the optimizer and the learning rate, to the last bit."""
    state = {**learner.adapter().tensors, **{f"moment {n}": a for n, a in learner.zero.moments().items()}}
    return {name: array.tobytes() for name, array in state.items()}, learner.lr()


def test_f15_a_step_that_is_not_finite_is_skipped_and_three_in_a_row_stop_the_run(
    learner: train_step.Trainer, broken: Callable[[str | None], None], tmp_path: Path, record_figures: RecordFigures
) -> None:
    """F15: NaN or inf in the loss or in one number of the gradient.

    Goal: the step is skipped and counted, weights, moments and learning rate stay bitwise; three in a row end the run, whose last
    good checkpoint loads to those very bits.
    """
    for _ in range(2):
        assert learner.update(samples(learner.spec, 0))["policy/grad_norm"] > 0
    for number, fault in enumerate(FAULTS):
        before = held(learner)
        broken(fault)
        metrics = learner.update(samples(learner.spec, 1))
        assert metrics["learner/skipped"] == number + 1, fault
        assert not math.isfinite(metrics["policy/grad_norm"])
        assert held(learner) == before, fault
        broken(None)
        learner.update(samples(learner.spec, 2))  # a good one in between starts the count again
        assert held(learner)[0] != before[0]
    kept = learner.save(tmp_path, {"consumed": 1})
    good = held(learner)
    for fault in ("nan gradient", "inf loss"):
        broken(fault)
        learner.update(samples(learner.spec, 3))
    broken("nan loss")
    with pytest.raises(InfraFailure, match="in three steps in a row") as caught:
        learner.update(samples(learner.spec, 3))
    assert caught.value.code == "non_finite_steps"
    assert learner.skipped_in_a_row == 3
    assert held(learner) == good
    broken(None)
    learner.update(samples(learner.spec, 4))
    assert held(learner)[0] != good[0]
    assert checkpoint.latest(tmp_path) == kept
    assert learner.restore(kept) == {"consumed": 1}
    assert held(learner) == good
    record_figures(faults=", ".join(FAULTS), skipped=4, bits_changed=0, stopped_after=3)
