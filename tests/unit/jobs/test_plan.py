"""The checks of a dry run across the parts of a job: machines, rewards, the judge of questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Command, job_of

from pixelis import config
from pixelis.errors import BadConfig
from pixelis.jobs import plan, serve
from pixelis.policy.estimate import Finding


def findings(job: str, subject: str, *overrides: str) -> list[Finding]:
    c = config.load(None, list(overrides))
    every = [*plan.check(c, job_of(job).needs(c)), *plan.rewards(c)]
    return [f for f in every if f.subject == subject]


TWO_NODES = ["cluster.nodes.count=2", "cluster.nodes.cpus=32", "cluster.nodes.gpus=4"]
TWO_NODES += ["learner.gpus=1", "engine.gpus=1"]


def test_learners_share_a_machine_and_generators_take_what_is_left() -> None:
    (placement,) = findings("rft", "placement", *TWO_NODES, "learner.workers=4", "engine.workers=4")
    assert placement.level == "ok"
    first, second = placement.text.partition(": ")[2].split("; ")
    assert "4 x learner" in first
    assert "generator" not in first
    assert "4 x generator" in second
    assert "learner" not in second


@pytest.mark.parametrize(
    ("overrides", "level", "words"),
    [
        (
            ("learner.workers=4", "engine.workers=5"),
            "error",
            "1 of 5 x generator with its toolboxes find no room",
        ),
        (("learner.workers=4", "engine.workers=5", "cluster.autoscaling=true"), "note", "1 of 5 x generator"),
        (("engine.tensor_parallel=8", "engine.gpus=8"), "error", "GPU 8 on one machine"),
        (("engine.cpus=20", "toolbox.workers=4", "toolbox.cpus=4"), "error", "CPU 36"),
    ],
)
def test_what_finds_no_room_is_named_with_its_needs(
    overrides: tuple[str, ...], level: str, words: str
) -> None:
    (placement,) = findings("rft", "placement", *TWO_NODES, *overrides)
    assert placement.level == level
    assert words in placement.text


def test_gpus_of_machines_that_are_not_named_are_only_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    levels = {f.level for f in findings("rft", "placement", "learner.gpus=1")}
    assert levels == {"note"}


def test_a_read_only_service_needs_neither_learner_nor_canary_nor_embedder() -> None:
    def roles(*overrides: str) -> set[str]:
        return {part.role for part in serve.needs(config.load(None, list(overrides)))}

    everything = roles()
    assert {"learner", "memory shard", "embedder of the memory", "canary with its toolboxes"} <= everything
    assert roles("serve.read_only=true") == {"generator with its toolboxes", "scorer"}
    with pytest.raises(BadConfig, match=r"engine\.colocate"):
        roles("engine.colocate=true")
    assert roles("engine.colocate=true", "evolution.enabled=false")


def test_a_missing_judge_or_key_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIXELIS_JUDGE_API_KEY", raising=False)
    (missing,) = findings("rft", "rewards", "rewards.preset=mini-o3")
    assert missing.level == "error"
    assert "rewards.judge.url" in missing.text
    server = ("rewards.judge.url=http://judge:8000/v1", "rewards.judge.model=m")
    (no_key,) = findings("rft", "rewards", *server)
    assert "PIXELIS_JUDGE_API_KEY" in no_key.text
    monkeypatch.setenv("PIXELIS_JUDGE_API_KEY", "secret")
    (ready,) = findings("rft", "rewards", *server)
    assert (ready.level, "secret" in ready.text) == ("ok", False)
    assert findings("rft", "rewards") == []


@pytest.mark.slow
def test_questions_that_need_a_judge_fail_the_dry_run_without_one(tmp_path: Path, pixelis: Command) -> None:
    rows = [{"id": str(i), "question": "?", "answers": ["7"], "scorer": "judge"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["rft", "configs/nano/rft.yaml", f"data.train={tmp_path / 'rows.jsonl'}", "--dry-run"]
    code, _, errors = pixelis(*command)
    assert code == 2
    assert "has questions with the scorer judge, which needs a judge" in errors
    judge = {"url": "http://127.0.0.1:9/v1", "model": "m", "api_key_env": ""}
    assert pixelis(*command, *(f"rewards.judge.{key}={value}" for key, value in judge.items()))[0] == 0
    assert pixelis(*command, "rewards.scorer=exact")[0] == 0
