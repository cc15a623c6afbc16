"""A checkpoint of four workers resumes on three, theirs on two and on one, bit for bit; the steps are those
of one worker.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_two_workers import launch
from two_workers import CASES, samples_of
from world_sizes import NAMES, STEPS

# Two workers, and one that resumes their checkpoint: test_two_workers.py.
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
WORLDS = (4, 3, 2, 1)


def test_four_workers_then_fewer_take_the_steps_of_one(tmp_path: Path) -> None:
    for world in WORLDS:
        launch("world_sizes.py", world, tmp_path)
    for folder, name in NAMES.items():
        case = CASES[name]
        losses = [
            loss
            for world in WORLDS
            for loss in json.loads((tmp_path / f"losses{world}.json").read_text())[folder]
        ]
        alone = case.trainer(stage=0)
        try:
            expected = [
                alone.update(samples_of(case.family))["policy/loss"] for _ in range(len(WORLDS) * STEPS)
            ]
        finally:
            alone.close()
        assert losses == pytest.approx(expected, abs=2e-5, rel=1e-3)
