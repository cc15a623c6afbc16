"""On-policy distillation as a user runs it: two steps of the embedded model that teaches itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pixelis.config import load
from pixelis.jobs import rft
from pixelis.telemetry import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RUN = (
    "policy.model=nano rft.steps=2 rft.prompts_per_step=4 learner.checkpoint_every=2 rft.teacher.model=policy "
    "telemetry.rollouts=64"
)


@pytest.mark.long  # tests/unit/policy/test_teacher_advantages.py: what a teacher teaches, and what is refused
@pytest.mark.parametrize("context", ["answer", "feedback"])
def test_a_self_teacher_with_more_to_see_teaches_without_rewards(
    context: str,
    ray_cluster: None,
    tmp_path: Path,
    documented_metrics: dict[str, tuple[re.Pattern[str], bool]],
) -> None:
    keys = [f"run.dir={tmp_path}", "rft.teacher.rewards=false", f"rft.teacher.context={context}"]
    rft.start(load(None, [*RUN.split(), "rft.group_size=1", *keys]))
    rows = events.read(tmp_path, "step/policy")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        # The card world has answers, and nobody's words
        assert row["teacher/unscored"] == (context == "feedback")
        assert (row["policy/grad_norm"] > 0) == (context == "answer")
        assert (row["teacher/kl"] != 0) == (context == "answer")
        assert row["teacher/seconds"] > 0
        patterns = [pattern for pattern, _ in documented_metrics.values()]
        assert [k for k in row if "/" in k and not any(p.fullmatch(k) for p in patterns)] == []
    saved = (tmp_path / "rollouts.jsonl").read_text(encoding="utf-8")
    assert "The answer is" not in saved, "only the teacher's copy of a trajectory has the answer"


@pytest.mark.long
def test_another_model_teaches_beside_rewards(ray_cluster: None, tmp_path: Path) -> None:
    keys = ["policy.model=nano", "rft.steps=1", "rft.prompts_per_step=4", "rft.group_size=2"]
    rft.start(load(None, [*keys, f"run.dir={tmp_path}", "rft.teacher.model=nano"]))
    (row,) = events.read(tmp_path, "step/policy")
    # Before the first step an adapter changes nothing
    assert row["teacher/kl"] == pytest.approx(0, abs=1e-4)
    assert row["teacher/unscored"] == 0
