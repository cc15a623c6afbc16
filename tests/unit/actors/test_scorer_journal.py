"""The Scorer's journal: a restarted actor continues exactly, whenever it was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pixelis.actors import scorer as scorers
from pixelis.config import load
from pixelis.records import Group, Question, StopReason, Trajectory, Turn

Scorer = scorers.Scorer.__ray_metadata__.modified_class  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorers, "count", lambda *_: None)
    monkeypatch.setattr(scorers, "use_reserved_gpus", lambda: None)


def group(number: int, right: int) -> Group:
    question = Question(
        id=f"q{number}", question="write to jane.doe@example.org", answers=["7"], scorer="exact"
    )
    turns = [Turn(role="assistant", text="thought " * 50, tokens=[1], log_probs=[-0.1])]
    trajectories = [
        Trajectory(
            id=f"t{number}.{i}",
            question_id=question.id,
            group_id=f"g{number}",
            turns=turns,
            answer="7" if i < right else "8",
            stop_reason=StopReason.ANSWER,
        )
        for i in range(4)
    ]
    return Group(id=f"g{number}", question=question, trajectories=trajectories)


def started(folder: Path) -> Any:
    return Scorer(load(None, [f"run.dir={folder}", "rewards.normalise.terms=[accuracy]"]))


def seen(scorer: Any) -> tuple[int, list[str]]:
    normaliser = scorer.grader.normaliser
    return normaliser.statistics["accuracy"][0] if "accuracy" in normaliser.statistics else 0, sorted(
        normaliser.pending
    )


def test_a_line_cut_by_a_crash_does_not_swallow_the_next_group(tmp_path: Path) -> None:
    scorer = started(tmp_path)
    scorer.load(None)
    scorer.score(group(0, 1), 0)
    with scorer.journal.open("a") as file:
        file.write('{"after": -1, "group": {"id"')
    scorer = started(tmp_path)
    scorer.score(group(1, 2), 0)
    assert seen(started(tmp_path)) == seen(scorer) == (0, ["g0", "g1"])


def test_a_group_of_a_step_that_ended_is_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = started(tmp_path)
    scorer.load(None)
    reduced = scorers._journal_group

    def end_step(scored: Group) -> Group:
        scorer.advance(0)  # between the scoring and the journal
        return reduced(scored)

    with monkeypatch.context() as patch:
        patch.setattr(scorers, "_journal_group", end_step)
        scorer.score(group(0, 2), 0)
    scorer.score(group(1, 2), 1)
    before = scorer.journal.read_bytes()
    restarted = started(tmp_path)
    assert seen(restarted) == seen(scorer) == (4, ["g1"])
    scorer.advance(1)
    scorer.journal.write_bytes(before)  # killed after the state was written, before the journal was removed
    assert seen(started(tmp_path)) == seen(scorer) == (8, [])


def test_the_journal_is_private_and_has_no_text(tmp_path: Path) -> None:
    scorer = started(tmp_path)
    scorer.load(None)
    scorer.score(group(0, 1), 0)
    text = scorer.journal.read_text()
    assert json.loads(text)["group"]["trajectories"][0]["rewards"]["accuracy"] == 1
    assert "jane.doe" not in text
    assert "thought" not in text
    assert scorer.journal.stat().st_mode & 0o777 == 0o600
