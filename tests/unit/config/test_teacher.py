"""What a teacher of on-policy distillation may be combined with."""

from __future__ import annotations

import pytest

from pixelis.config import load
from pixelis.errors import BadConfig


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["rft.teacher.model=policy"], "agrees with itself"),
        (["rft.teacher.rewards=false"], "no teacher"),
        (["rft.teacher.model=http://host/v1"], "cannot be a teacher"),
        (["rft.teacher.model=version:0", "rft.sampling.top_p=0.9"], "counts as divergence"),
        (["rft.teacher.model=version:0", "rft.teacher.rewards=false", "rft.algorithm=ppo"], "no reward"),
        (["rft.teacher.model=version:0", "rft.teacher.rewards=false", "rft.algorithm=dapo"], "rft.filter"),
    ],
)
def test_contradictions_are_named(keys: list[str], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        load(None, ["policy.model=nano", *keys])


def test_what_a_teacher_sees_decides_whether_truths_are_read() -> None:
    def labelled(*keys: str) -> list[str]:
        return load(None, ["policy.model=nano", "rft.teacher.model=policy", *keys]).labelled

    assert labelled("rft.teacher.context=feedback", "rft.teacher.rewards=false") == []
    assert labelled("rft.teacher.context=answer", "rft.teacher.rewards=false") == ["rft.teacher.context"]
    assert "rewards.weights.accuracy" in labelled("rft.teacher.context=feedback")
