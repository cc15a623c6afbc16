"""What a run, an evaluation or a service that achieves nothing says, while it happens, at its end."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pixelis.actors.train_job import StepLog
from pixelis.config import Config, parse
from pixelis.evaluation.batches import batch_metrics
from pixelis.evaluation.metrics import summarise
from pixelis.jobs import watch as watching
from pixelis.jobs.top import draw_run
from pixelis.policy.advantages import assign_advantages
from pixelis.records import Group, Question, StopReason, Trajectory
from pixelis.telemetry import diagnosis
from pixelis.telemetry.diagnosis import Alarms
from pixelis.telemetry.html.report import render_report


def group(*rollouts: tuple[StopReason, float, str | None]) -> Group:
    """A scored group of rollouts, each with its end, its reward and its answer."""
    trajectories = []
    for i, (reason, reward, answer) in enumerate(rollouts):
        ids = {"id": f"t{i}", "question_id": "q", "group_id": "g"}
        rewards = {"reward": reward, "rewards": {"accuracy": min(reward, 1.0)}}
        trajectories.append(Trajectory(**ids, **rewards, stop_reason=reason, answer=answer))
    return Group(id="g", question=Question(id="q", question="which?"), trajectories=trajectories)


def step_of(groups: list[Group], norm: float = 0.0) -> dict[str, float]:
    """The metrics of a step that learns from these groups, by the functions that the Coordinator calls."""
    metrics = {**batch_metrics(groups), **assign_advantages(groups, parse({}).rft.advantage)}
    return {**metrics, "policy/grad_norm": norm, "rollout/calls": 1.0}


CUT, MUTE = (StopReason.LENGTH, 0.0, None), (StopReason.NO_ACTION, 0.0, None)
RIGHT, WRONG = (StopReason.ANSWER, 1.0, "7"), (StopReason.ANSWER, 0.0, "8")
FUTILE = step_of([group(*[CUT] * 7, MUTE) for _ in range(4)])
GOOD = step_of([group(WRONG, RIGHT)], norm=0.3)


def test_a_run_that_learns_nothing_says_what_happened_and_what_helps() -> None:
    told = diagnosis.of_run([FUTILE] * 20)
    happened, helps = told.split(" What helps: ")
    assert happened.startswith("20 of 20 steps taught nothing: all rewards of every group were equal (0)")
    assert "88 % were cut at their token limit, 12 % had neither a call nor an answer" in happened
    assert all(key in helps for key in ("dialogue.max_turn_tokens", "SFT first", "easier questions"))


def test_questions_that_are_too_easy_are_not_called_too_hard() -> None:
    told = diagnosis.of_run([step_of([group(*[(StopReason.ANSWER, 1.1, "7")] * 4)])])
    assert all(words in told for words in ("equal (1.1)", "harder questions"))
    assert not any(words in told for words in ("easier", "SFT"))


@pytest.mark.parametrize(
    ("steps", "futile"),
    [
        ([GOOD] * 3, False),
        ([], False),
        ([FUTILE, *[GOOD] * 2], False),
        ([{"policy/loss": 2.0, "policy/grad_norm": 0.4}], False),  # sft
        ([{"evolve/skipped": 1.0}], False),  # an update that the guard undid
        ([{**FUTILE, "policy/grad_norm": 0.2, "group/replayed": 8.0}], False),  # replayed rollouts teach
        ([{**FUTILE, "policy/grad_norm": 0.001}], True),  # the KL term alone
        ([{"policy/loss": 0.0, "policy/grad_norm": 0.0}], True),
    ],
)
def test_only_steps_without_a_signal_count(steps: list[dict[str, float]], futile: bool) -> None:
    assert (diagnosis.of_run(steps) is not None) == futile


def test_an_alarm_is_raised_in_time_and_not_at_every_step() -> None:
    alarms = Alarms(operations=True)
    raised = [step for step in range(1, 121) if alarms.check(step, FUTILE if step != 60 else GOOD)]
    assert raised == [3, 53, 103]
    assert not any(Alarms(operations=True).check(step, GOOD) for step in range(9))
    assert Alarms(operations=True).check(1, {**GOOD, "rollout/calls": 0.0})
    assert not Alarms(operations=False).check(1, {**GOOD, "rollout/calls": 0.0})


def test_a_policy_that_moves_far_raises_an_alarm() -> None:
    alarms = Alarms(operations=True)
    values = {1: 0.09, 2: 0.11, 3: 0.2, 4: 1.4, 5: 1.5}
    raised = {step: alarms.check(step, {**GOOD, "policy/kl": kl}) for step, kl in values.items()}
    assert [step for step, texts in raised.items() if texts] == [2, 4], "once, and again ten times further"
    assert "1.4 nats" in raised[4][0]
    assert Alarms(operations=True).check(1, {**GOOD, "policy/approx_kl": 1.4})


def log_steps(folder: Path, steps: list[dict[str, float]]) -> None:
    """Log steps as the first learner does."""
    config = parse({"run": {"dir": str(folder)}})
    trainer: Any = SimpleNamespace(is_first=True, batches=0)
    log = StepLog(SimpleNamespace(config=config, source=SimpleNamespace(kind="policy")), trainer)  # type: ignore[arg-type]
    for metrics in steps:
        trainer.batches += 1
        log.write(metrics)
    log.close()


def test_the_driver_prints_alarms_and_the_end_of_a_futile_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watching, "POLL_S", 0.05)
    config = Config.model_validate({"run": {"dir": str(tmp_path)}})

    def run(steps: list[dict[str, float]]) -> str:
        watching.watch(config, "rft", 4, lambda: log_steps(tmp_path, steps), lambda: (0, {}))
        return capsys.readouterr().err

    assert run([GOOD] * 4) == ""
    told = run([FUTILE] * 4)
    assert "warning: step 3: the last 3 steps taught nothing" in told
    assert "warning: 4 of 4 steps taught nothing" in told, "the steps of the run before do not count"
    screen = Console(width=300, record=True, file=io.StringIO())
    screen.print(draw_run(tmp_path))
    assert "4 of 4 steps taught nothing" in screen.export_text()


def test_an_evaluation_without_answers_says_so() -> None:
    answered, cut = group(RIGHT), group(CUT, CUT)
    assert diagnosis.of_evaluation(summarise([answered])) is None
    told = diagnosis.of_evaluation(summarise([answered, cut]))
    assert told.startswith(
        "2 of 3 episodes gave no answer: 67 % were cut at their token limit. What helps: longer turns"
    )
    # An answer that only a lenient reading finds is one.
    assert diagnosis.of_evaluation({**summarise([cut]), "answered": 2}) is None
    summary, step = {"arms": [{"name": "mine", **summarise([cut])}]}, {"kind": "step/policy", "step": 1}
    page = render_report(summary, [{**step, **FUTILE}], [])
    assert "2 of 2 episodes gave no answer" in page
    assert "1 of 1 steps taught nothing" in page
    assert "taught nothing" not in render_report({}, [{**step, **GOOD}], [])


@pytest.mark.parametrize(
    ("counts", "learns"),
    [({"gated": 99}, True), ({"gated": 300, "update_sent": 1}, True), ({"gated": 300}, False), ({}, True)],
)
def test_a_service_whose_votes_never_pass_the_gate_says_so(counts: dict[str, float], learns: bool) -> None:
    told = diagnosis.of_service(counts)
    assert (told is None) == learns
    assert learns or "evolution.gate" in str(told)
