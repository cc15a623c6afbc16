"""Rates of keys: the same for all gateways of a run.dir, and the same after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelis.serve.limits import Allowance
from pixelis.serve.quotas import DAY, KeyQuota


def accepted(allowance: Allowance | None) -> bool:
    assert allowance is not None
    return allowance.retry_after_s is None


class Clock:
    def __init__(self, now: float):
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_a_days_quota_outlasts_restarts_and_ends_after_a_day(tmp_path: Path) -> None:
    clock = Clock(20_000.9 * DAY)  # shortly before midnight
    for _ in range(3):
        assert accepted(KeyQuota(tmp_path, "shop", 0, 0, 3, clock).take())
        clock.now += 0.05 * DAY
    assert not accepted(KeyQuota(tmp_path, "shop", 0, 0, 3, clock).take())
    assert accepted(KeyQuota(tmp_path, "other", 0, 0, 3, clock).take())
    clock.now = 20_001.91 * DAY
    assert accepted(KeyQuota(tmp_path, "shop", 0, 0, 3, clock).take())
    clock.now += 3 * DAY
    assert accepted(KeyQuota(tmp_path, "shop", 0, 0, 3, clock).take())


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 2000)), max_size=40))
def test_gateways_together_keep_to_the_rate(tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[int, float]]) -> None:
    """Never more than five in an hour, and none is refused while fewer were accepted."""
    folder, clock = tmp_path_factory.mktemp("run"), Clock(1e9)
    gateways = [KeyQuota(folder, "shop", 0, 5, 0, clock) for _ in range(3)]
    times: list[float] = []
    for gateway, pause in calls:
        clock.now += pause
        inside = sum(clock.now - 3600 < at for at in times)
        allowed = accepted(gateways[gateway].take())
        assert allowed == (inside < 5)
        if allowed:
            times.append(clock.now)


def test_a_folder_that_cannot_be_written_refuses_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "quotas").write_text("no folder")
    quota = KeyQuota(tmp_path, "shop", 0, 0, 2)
    assert [accepted(quota.take()) for _ in range(3)] == [True, True, False]
    assert caplog.text.count("in this gateway only") == 1


def test_a_wrong_clock_locks_nobody_out(tmp_path: Path) -> None:
    clock = Clock(2e9)
    assert accepted(KeyQuota(tmp_path, "shop", 0, 0, 1, clock).take())
    clock.now = 2e9 - 3600
    assert accepted(KeyQuota(tmp_path, "shop", 0, 0, 1, clock).take())


@pytest.mark.parametrize(("ahead", "remembered"), [(1800, True), (5 * DAY, False)])
def test_a_gateway_whose_own_clock_was_wrong_locks_nobody_out(ahead: float, remembered: bool, tmp_path: Path) -> None:
    clock = Clock(2e9)
    gateway, other = (KeyQuota(tmp_path, "shop", 0, 2, 0, clock) for _ in range(2))
    assert accepted(gateway.take())
    clock.now += ahead  # in five days the first request is forgotten
    assert [accepted(quota.take()) for quota in (gateway, other, gateway, other)] == [True, not remembered, False, False]
    clock.now = 2e9 + 60
    assert [accepted(quota.take()) for quota in (gateway, other, gateway, other)] == [True, False, not remembered, False]
    clock.now += 3600
    assert [accepted(quota.take()) for quota in (gateway, other, gateway, other)] == [True, True, False, False]
