"""Causal use tells a policy that reads what its calls show from one that calls and ignores them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pixelis.config import load
from pixelis.datasets import card_questions
from pixelis.datasets.refinement.sets import write_rows
from pixelis.jobs import evaluate, rft, sft
from pixelis.records import REAL, Demonstration, Group
from pixelis.telemetry import events

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("ray_cluster"),
]

QUESTIONS = 40


def trained(folder: Path, *, ignores: bool) -> Path:
    """A policy that zooms in on every card, and answers what it shows or always the same."""
    rows = card_questions.demonstration_rows("train", 1600, 5, direct_share=0.0)
    if ignores:
        rows = [{**row, "answers": ["7"], "turns": [*row["turns"][:-1], {"answer": "7"}]} for row in rows]
    folder.mkdir(parents=True)
    write_rows(folder / "rows.jsonl", map(Demonstration.model_validate, rows))
    keys = [f"data.demonstrations={folder / 'rows.jsonl'}", f"run.dir={folder / 'sft'}", "sft.steps=100"]
    return sft.run(load("configs/nano/sft.yaml", [*keys, "sft.batch=16", "learner.lr=2e-3"]))


def evaluated(folder: Path, adapter: Path) -> tuple[dict, list[Group]]:
    keys = [f"policy.adapter={adapter}", f"run.dir={folder}", f"evaluate.questions={QUESTIONS}"]
    (summary,) = evaluate.run(load("configs/nano/evaluate.yaml", keys))
    lines = (folder / "trajectories-evaluate.jsonl").read_text().splitlines()
    return summary, [Group.model_validate_json(line) for line in lines]


def test_a_policy_that_reads_its_crops_uses_them_and_one_that_ignores_them_does_not(tmp_path: Path) -> None:
    reads, groups = evaluated(tmp_path / "reads", trained(tmp_path / "a", ignores=False))
    ignores, _ = evaluated(tmp_path / "ignores", trained(tmp_path / "b", ignores=True))
    honest, idle = reads["looking"], ignores["looking"]
    assert honest["n"] >= 0.9 * QUESTIONS
    assert idle["n"] >= 0.9 * QUESTIONS, "it calls as often"
    assert honest["mean"] > 5 * honest["sham"] > 0
    assert abs(idle["mean"]) < 0.1 * honest["mean"]
    assert honest["unused"] < 0.3
    assert honest["kinds"]["another"] > honest["kinds"]["blank"], "another crop misleads"
    # Without the evidence the answer is a guess among ten digits.
    observations = [o for group in groups for t in group.trajectories for o in t.observations]
    guesses = [np.exp(o.answer_log_probs["blank"]) for o in observations if o.answer_log_probs]
    real = [np.exp(o.answer_log_probs[REAL]) for o in observations if o.answer_log_probs]
    assert np.mean(guesses) < 0.25 < 0.5 < np.mean(real)
    page = (tmp_path / "reads" / "report.html").read_text()
    assert page.count("This decided the answer") >= 1


def test_training_rewards_and_logs_causal_use(tmp_path: Path) -> None:
    adapter = trained(tmp_path / "a", ignores=False)
    keys = [
        f"policy.adapter={adapter}",
        f"run.dir={tmp_path / 'rft'}",
        "rft.steps=2",
        "rft.prompts_per_step=4",
    ]
    keys += ["rewards.weights.causal_use=0.5", "rewards.weights.accuracy=1", "evaluate.questions=4"]
    rft.start(load("configs/nano/rft.yaml", keys))
    steps = events.read(tmp_path / "rft", "step/policy")
    assert all(row["rollout/causal_use"] > 0 for row in steps)
    assert all(0 < row["reward/causal_use"] <= row["train/accuracy"] + 1e-6 for row in steps)
    assert all(row["rollout/unscored"] == 0 for row in steps)
    rows = [json.loads(line) for line in (tmp_path / "rft" / "rollouts.jsonl").read_text().splitlines()]
    assert rows
