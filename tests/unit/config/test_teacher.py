"""What a teacher of on-policy distillation may be combined with."""

from __future__ import annotations

import pytest

from pixelis.actors import reservations
from pixelis.config import load
from pixelis.config.root import absolute
from pixelis.errors import BadConfig


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["rft.teacher.model=policy"], "agrees with itself"),
        (["rft.teacher.rewards=false"], "no teacher"),
        (["rft.teacher.by_task.math=http://host/v1", "rft.sampling.temperature=0.7"], "score at 1"),
        (["rft.teacher.model=version:0", "rft.sampling.top_p=0.9"], "counts as divergence"),
        (["rft.teacher.model=version:0", "rft.teacher.rewards=false", "rft.algorithm=ppo"], "no reward"),
        (["rft.teacher.model=version:0", "rft.teacher.rewards=false", "rft.algorithm=dapo"], "rft.filter"),
    ],
)
def test_contradictions_are_named(keys: list[str], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        load(None, ["policy.model=nano", *keys])


def test_servers_reserve_no_gpus_and_stay_addresses() -> None:
    keys = ["rft.teacher.model=nano", "rft.teacher.by_task={math: 'https://host/v1'}", "rft.teacher.gpus=1"]
    config = absolute(load(None, ["policy.model=nano", *keys]))
    needs = {n.role: n.bundles for n in reservations.needs(config, learner=True, rollouts=True)}
    assert needs["teacher https://host/v1"] == ({"CPU": 1.0},)
    assert needs["teacher nano"] == ({"CPU": 1.0, "GPU": 1.0},)


def test_what_a_teacher_sees_decides_whether_truths_are_read() -> None:
    def labelled(*keys: str) -> list[str]:
        return load(None, ["policy.model=nano", "rft.teacher.model=policy", *keys]).labelled

    assert labelled("rft.teacher.context=feedback", "rft.teacher.rewards=false") == []
    assert labelled("rft.teacher.context=answer", "rft.teacher.rewards=false") == ["rft.teacher.context"]
    assert "rewards.weights.accuracy" in labelled("rft.teacher.context=feedback")
