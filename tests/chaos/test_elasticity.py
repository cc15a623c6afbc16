"""Generators of a run join and leave with nodes without a lost or doubled group; nodes come by need.

Shorter: test_rollout_faults.py, tests/serve/test_generator_scaling.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from own_process import play

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]


def test_generators_come_and_go_with_their_nodes(tmp_path: Path, record_figures: Callable[..., None]) -> None:
    result = play("elastic_run.py", "grow", tmp_path, RAY_AUTH_MODE="disabled")
    record_figures(**result)
    one, two, four = (result["rates"][count] for count in "124")
    assert two >= 1.7 * one
    assert four >= 3.2 * one
    # The goal is 10 s each on an idle machine; a busy one takes longer to start a process
    assert len(result["joined_s"]) == 3
    assert result["rate_after_the_loss"] == pytest.approx(two, rel=0.3)
    assert result["events"] == [2, 3, 4]
    assert result["groups"] > 80
    assert (result["lost"], result["doubled"]) == (0, 0)


def test_an_autoscaler_adds_nodes_for_generators_and_removes_them_after_the_job(
    tmp_path: Path, record_figures: Callable[..., None]
) -> None:
    result = play("elastic_run.py", "autoscale", tmp_path, RAY_AUTH_MODE="disabled")
    record_figures(**result)
    assert (result["nodes_before"], result["nodes"], result["nodes_after"]) == (1, 4, 1)
