"""A checkpoint of four workers resumes on three, theirs on two and on one, bit for bit; the steps are those of one worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_two_workers import launch
from two_workers import CASES, samples_of
from world_sizes import NAMES, STEPS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("worlds", [(2, 1), pytest.param((4, 3, 2, 1), marks=pytest.mark.long)], ids=str)
def test_workers_then_fewer_take_the_steps_of_one(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    for world in worlds:
        launch("world_sizes.py", world, tmp_path)
    for folder, name in NAMES.items():
        case = CASES[name]
        losses = [loss for world in worlds for loss in json.loads((tmp_path / f"losses{world}.json").read_text())[folder]]
        alone = case.trainer(stage=0)
        try:
            expected = [alone.update(samples_of(case.family))["policy/loss"] for _ in range(len(worlds) * STEPS)]
        finally:
            alone.close()
        assert losses == pytest.approx(expected, abs=2e-5, rel=1e-3)
