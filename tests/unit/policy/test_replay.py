"""Selective sample replay: which rollouts are stored, for how long, and how often they are drawn."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from rewarded import group

from pixelis import config
from pixelis.policy.replay import SampleReplay, least_kept, subset
from pixelis.records import Group


def drawn(name: str, advantages: list[float | None]) -> Group:
    return group([0.0] * len(advantages), advantages=advantages, name=name)


def test_only_rollouts_with_an_advantage_are_stored():
    replay = SampleReplay(capacity=10)
    assert replay.add(drawn("a", [0.5, 0.0, None, -0.5]), "views", 0) == 2
    samples = replay.draw(10, 0, np.random.default_rng(0))
    assert sorted(sample.group.trajectories[0].id for sample in samples) == ["a-0", "a-3"]
    assert all(sample.views == "views" and len(sample.group.trajectories) == 1 for sample in samples)


def test_a_draw_never_repeats_a_rollout_and_follows_the_size_of_the_advantage():
    replay = SampleReplay(capacity=10)
    replay.add(drawn("a", [1.0, 0.1, 0.1, 0.1]), None, 0)
    rng, counts = np.random.default_rng(0), Counter[str]()
    for _ in range(2000):
        counts.update(sample.group.trajectories[0].id for sample in replay.draw(1, 0, rng))
        assert len({sample.group.trajectories[0].id for sample in replay.draw(4, 0, rng)}) == 4
    assert counts["a-0"] / 2000 == pytest.approx(1.0001 / 1.3004, abs=0.04)


def test_the_largest_advantages_of_a_batch_are_kept():
    settings = config.ReplayConfig(capacity=100, min_advantage=0.01, quantile=0.7)
    groups = [drawn("a", [0.1 * i for i in range(10)]), drawn("b", [None, -2.0, 0.0])]
    least = least_kept(groups, settings)
    replay = SampleReplay(capacity=100)
    kept = sum(replay.add(g, None, 0, least) for g in groups)
    assert kept == 4  # of twelve advantages the top 30 %: 0.7, 0.8, 0.9 and -2
    assert {round(abs(s.weight), 1) for s in replay.samples} == {0.7, 0.8, 0.9, 2.0}
    flat = drawn("c", [0.01, -0.01, 0.02])
    assert replay.add(flat, None, 0, least_kept([flat], settings.model_copy(update={"quantile": 0.0}))) == 1
    assert least_kept([], settings) > 0.01


def test_age_capacity_and_bytes_are_bounded():
    replay = SampleReplay(capacity=3, max_age=2)
    for step in range(4):
        replay.add(drawn(f"g{step}", [1.0, -1.0]), None, step)
    assert [sample.group.trajectories[0].id for sample in replay.samples] == ["g2-1", "g3-0", "g3-1"]
    assert replay.draw(9, 6, np.random.default_rng(0)) == []
    assert replay.bytes == 0
    small = SampleReplay(capacity=100, max_bytes=700)
    small.add(drawn("g", [1.0] * 5), None, 0)
    assert len(small) == 2
    assert small.bytes == 600


@pytest.mark.parametrize("method", ["first", "random", "stratified"])
def test_a_subset_has_scored_rollouts_in_their_order(method: str):
    complete = group([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], name="a")
    complete.trajectories[1].reward = None
    reduced = subset(complete, 4, method, np.random.default_rng(0))
    names = [t.id for t in reduced.trajectories]
    assert len(set(names)) == 4
    assert names == sorted(names)
    assert "a-1" not in names
    assert len(complete.trajectories) == 8, "all have voted"
    if method == "first":
        assert names == ["a-0", "a-2", "a-3", "a-4"]
    if method == "stratified":
        assert sum(t.reward or 0 for t in reduced.trajectories) == 1, "2 of 7 are right, so 1 of 4"
    assert subset(complete, 0, method, np.random.default_rng(0)) is complete
    assert subset(complete, 7, method, np.random.default_rng(0)) is complete
