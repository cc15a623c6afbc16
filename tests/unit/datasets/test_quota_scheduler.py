"""The plan of a synthesis: targets add up, and a run that was killed anywhere ends as one that was not."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelis.config.synthesis import SynthesisConfig
from pixelis.datasets.synthesis import quota_scheduler
from pixelis.datasets.synthesis.executor import sample_id
from pixelis.datasets.synthesis.quota_scheduler import QuotaScheduler, SourceRows, apportion, quotas
from pixelis.datasets.synthesis.sample_builder import Attempt
from pixelis.errors import BadConfig, BadInput
from pixelis.records import Demonstration, Question, Step

SHARD = 8


@given(st.integers(0, 5000), st.lists(st.floats(0.001, 1), min_size=1, max_size=12))
def test_counts_add_up(total: int, weights: list[float]) -> None:
    shares = [w / sum(weights) for w in weights]
    counts = apportion(total, shares)
    assert sum(counts) == total
    assert all(abs(count - total * share) < 1 + 1e-6 for count, share in zip(counts, shares, strict=True))


def settings(tmp_path: Path, rows: int = 30, **more: object) -> SynthesisConfig:
    lines = [Question(id=f"r{i}", question="?").model_dump_json() + "\n" for i in range(rows)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    tasks = {"t": {"target_sample_count": 40, "source_datasets": ["a"]}}
    sources = {"a": {"path": str(tmp_path / "a.jsonl")}}
    values = {"datasources": sources, "tasks": tasks, "round": 24, **more}
    return SynthesisConfig.model_validate(values)


def outcome(attempt: Attempt, _: str) -> tuple[Demonstration | None, str]:
    """Depends on the attempt alone: a third gives nothing, some say what another said."""
    luck = hashlib.sha256(repr(attempt).encode()).digest()[0]
    if luck < 80:
        return None, "unsuitable"
    name = f"{attempt.row if luck < 110 else repr(attempt)}"
    fields = {"question": name, "answers": ["x"], "turns": [Step(answer=name)], "kind": attempt.kind}
    return Demonstration(id=sample_id(repr(attempt)), **fields), ""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shards, so that few attempts fill several."""
    monkeypatch.setattr(quota_scheduler, "SHARD", SHARD)
    monkeypatch.setattr(quota_scheduler, "PASSES", 3)


class Killed(Exception):
    """Stands for SIGKILL between two writes."""


def synthesize(
    folder: Path, s: SynthesisConfig, seed: int = 0, stop_after: int | None = None
) -> QuotaScheduler:
    scheduler, rows, shards = QuotaScheduler(folder, s, seed), SourceRows(s), 0
    while scheduler.completed < scheduler.target and (scheduler.left() or scheduler.plan(rows)):
        left = scheduler.left()
        for begin in range(0, len(left), SHARD):
            if stop_after is not None and shards >= stop_after:
                raise Killed
            shard = left[begin : begin + SHARD]
            scheduler.commit([outcome(a, str(rows.get(a.source, a.row))) for a in shard])
            shards += 1
            if scheduler.completed >= scheduler.target:
                break
    return scheduler


def union(folder: Path) -> list[str]:
    paths = sorted((folder / "samples").glob("*.jsonl"))
    return [line for path in paths for line in path.read_text().splitlines()]


@pytest.mark.parametrize("stop_after", [1, 4, 7, pytest.param(10, marks=pytest.mark.long)])
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path: Path, stop_after: int) -> None:
    s = settings(tmp_path)
    whole = synthesize(tmp_path / "whole", s)
    with pytest.raises(Killed):
        synthesize(tmp_path / "killed", s, stop_after=stop_after)
    # What a kill between two writes leaves: half a file, and samples without the record of their shard
    (tmp_path / "killed" / "samples" / "000-00099.part").write_text("{")
    planned = max((path.stem for path in (tmp_path / "killed" / "rounds").glob("*.json")), default="")
    if records := sorted((tmp_path / "killed" / "shards").glob(f"{planned}-*.json")):
        records[-1].unlink()
    resumed = synthesize(tmp_path / "killed", s)
    assert union(tmp_path / "killed") == union(tmp_path / "whole")
    assert resumed.summary() == whole.summary()
    ids = [json.loads(line)["id"] for line in union(tmp_path / "killed")]
    assert len(set(ids)) == len(ids) == whole.completed


def test_targets_are_met_by_kind_and_never_passed(tmp_path: Path) -> None:
    summary = synthesize(tmp_path / "run", settings(tmp_path)).summary()
    traps = {"outcome_negative": 4, "trap_perceptual": 2, "trap_logical": 2}
    assert summary["kinds"] == {"golden": 24, **traps, "self_correction": 8}
    assert summary["shortfall"] == {}
    assert summary["dropped"]["unsuitable"] > 0


def test_targets_beyond_the_rows_are_a_shortfall(tmp_path: Path) -> None:
    scheduler = synthesize(tmp_path / "run", settings(tmp_path, rows=4))
    assert scheduler.completed < scheduler.target
    assert sum(scheduler.shortfall().values()) == scheduler.target - scheduler.completed
    assert scheduler.left() == []
    assert synthesize(tmp_path / "run", settings(tmp_path, rows=4)).completed == scheduler.completed


def test_rows_are_read_in_any_order_and_not_held_in_memory(tmp_path: Path) -> None:
    paths = {"a": {"path": str(tmp_path / "b.jsonl"), "rows": 300}, "c": {"path": str(tmp_path / "c.jsonl")}}
    s = settings(tmp_path, datasources=paths)
    texts = {f"r{i}": f"Größe {i}? " + "x" * 10_000 for i in range(310)}
    lines = [Question(id=id, question=text).model_dump_json() + "\n" for id, text in texts.items()]
    (tmp_path / "b.jsonl").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "c.jsonl").write_text("\n", encoding="utf-8")
    (tmp_path / "rows").mkdir()
    rows = SourceRows(s, folder=tmp_path / "rows")
    rows.get("a", 0)
    tracemalloc.start()
    for number in (3, 1, 200, 199, 299, 0, 150):
        assert Question.model_validate_json(str(rows.get("a", number))).question == texts[f"r{number}"]
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 1_500_000, "of 3 MB"
    assert (rows.get("a", 300), rows.count("a")) == (None, 300)
    with pytest.raises(BadInput, match="no question"):
        rows.get("c", 0)
    assert not list((tmp_path / "rows").iterdir())


def test_a_shard_without_samples_after_a_restart_leaves_no_file(tmp_path: Path) -> None:
    """Killed between samples and record: a model that is asked again may refuse."""
    s, rows = settings(tmp_path), SourceRows(settings(tmp_path))
    scheduler = QuotaScheduler(tmp_path / "run", s, 0)
    assert scheduler.plan(rows)
    scheduler.commit([outcome(a, "") for a in scheduler.left()[:SHARD]])
    assert union(tmp_path / "run")
    (tmp_path / "run" / "shards" / "000-00000.json").unlink()
    resumed = QuotaScheduler(tmp_path / "run", s, 0)
    resumed.commit([(None, "chat_timeout")] * SHARD)
    assert resumed.completed == len(union(tmp_path / "run")) == 0


def test_a_run_does_not_resume_with_another_seed_or_setting(tmp_path: Path) -> None:
    synthesize(tmp_path / "run", settings(tmp_path))
    with pytest.raises(BadConfig, match="other settings"):
        QuotaScheduler(tmp_path / "run", settings(tmp_path), 1)
    with pytest.raises(BadConfig, match="other settings"):
        QuotaScheduler(tmp_path / "run", settings(tmp_path, round=25), 0)
    assert QuotaScheduler(tmp_path / "run", settings(tmp_path, workers=7), 0).completed == 40


@pytest.mark.parametrize(
    "values",
    [
        {"tasks": {"t": {"source_datasets": ["nowhere"]}}},
        {"proportions": {"golden": 0, "trap": 0, "self_correction": 0}},
        {"traps": {"outcome_negative": 0, "trap_perceptual": 0, "trap_logical": 0}},
        {"datasources": {"a": {"path": "x"}}, "tasks": {"t": {"source_datasets": {"a": 0}}}},
    ],
)
def test_contradictory_settings_are_errors(values: dict) -> None:
    with pytest.raises(ValueError, match=r"nowhere|are 0|above 0"):
        SynthesisConfig.model_validate(values)


def test_a_plan_needs_an_enabled_task(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="no enabled task"):
        quotas(settings(tmp_path, tasks={"t": {"enabled": False, "source_datasets": ["a"]}}))
