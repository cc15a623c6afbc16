"""The whole job on files: what comes out, what is dropped and counted, what ends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_server import ChatServer
from PIL import Image
from refined import TASKS, demonstration, zoom
from test_quality import rated

from pixelis.config import Config, from_command_line, load
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.refinement import judging, sets
from pixelis.datasets.refinement.pipeline import records
from pixelis.errors import BadConfig, BadInput, DataFailure
from pixelis.jobs import refine
from pixelis.records import Demonstration, Question, Step

KINDS = ("golden", "golden", "golden", "trap_logical", "self_correction")
GATES = {"per_task": 5, "sizes": 0, "corrupted": 0.1, "replay": 0.1}


def rows(folder: Path, count: int = 60) -> list[Demonstration]:
    """Demonstrations that have not been executed, each about a picture of its own."""
    out = []
    for i in range(count):
        small = np.random.default_rng(i).integers(0, 255, (6, 6, 3), np.uint8)
        path = folder / f"picture{i}.png"
        Image.fromarray(small).resize((96, 96), Image.Resampling.BICUBIC).save(path)
        task, kind = TASKS[i % 4], KINDS[(i // 4) % 5]
        calls = [zoom(n + 1, observation=None) for n in range(1 + i % 3)]
        if kind == "self_correction":
            right = zoom(1, think="Wait, that is not the frame", observation=None)
            calls = [zoom(7, learn=False, observation=None), right]
        said = "3" if kind == "trap_logical" else "7"
        turns = [*calls, Step(think=f"The digit in the red frame is {said}", answer=said)]
        media = [{"id": "img0", "uri": str(path)}]
        out.append(demonstration(f"d{i:03}", task=task, kind=kind, media=media, turns=turns))
    return out


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    result = rows(tmp_path)
    half = len(result) // 2
    for name, part in (("a.jsonl", result[:half]), ("b.jsonl", result[half:])):
        add(tmp_path / "data", *part, name=name)
    return tmp_path / "data"


def add(source: Path, *more: Any, name: str = "c.jsonl") -> None:
    with (source / name).open("a", encoding="utf-8") as out:
        for row in more:
            out.write((row if isinstance(row, str) else row.model_dump_json()) + "\n")


def settings(source: Path, *overrides: str, **gates: float) -> Config:
    given = [f"refinement.gates.{key}={value}" for key, value in {**GATES, **gates}.items()]
    fixed = [f"data.demonstrations={source}", f"run.dir={source.parent / 'run'}", "telemetry.progress=false"]
    fixed += ["refinement.quality.min_score=0.5", "refinement.sft.validation=0.2"]
    return load(None, [*fixed, *given, *overrides])


def read(path: Path, kind: type[Question] = Demonstration) -> list[Any]:
    return [kind.model_validate_json(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_sets_come_out_and_a_second_run_changes_nothing(source: Path):
    run = source.parent / "run"
    first, second = rows(source.parent, 2)
    lost = {"id": "lost", "media": [second.media[0].model_copy(update={"uri": "/no/such.png"})]}
    repeated = first.model_copy(update={"id": "again"}), demonstration("d000")
    add(source, *repeated, "{not json", second.model_copy(update=lost))
    config = settings(source)
    summary = refine.run(config)
    assert summary["rows"] == 64
    assert summary["bad_rows"] == {"not_json": 1, "duplicate_id": 1, "media_not_found": 1}
    assert summary["dropped"]["duplicate"] == 1
    kept = [d for level in ("simple", "medium", "hard") for d in read(run / f"{level}.jsonl")]
    # Each row is told of once
    assert len(kept) == summary["kept"] == 64 - 3 - sum(summary["dropped"].values())
    called = [step.observation for d in kept for step in d.steps if step.learn]
    assert all(observation is not None and observation.id for observation in called)
    assert {d.level for d in kept} == {"simple", "medium", "hard"}
    assert all(0.1 <= d.difficulty <= 1 and 0.5 <= d.quality <= 1 for d in kept)
    learnt, held = (read(run / name) for name in ("sft.jsonl", "sft_validation.jsonl"))
    assert len(held) == summary["sets"]["sft"]["validation"] > 0
    assert not {d.media[0].uri for d in learnt} & {d.media[0].uri for d in held}
    imitated = learnt + held
    assert len(imitated) == summary["sets"]["sft"]["count"]
    assert {d.kind for d in imitated} <= {"golden", "self_correction"}
    asked = read(run / "rft.jsonl", Question)
    assert any(q.meta["signals"]["wrong_answers"] == ["3"] for q in asked)
    assert all(gate["passed"] for gate in summary["gates"])
    assert "data card" in (run / "card.html").read_text(encoding="utf-8")
    assert (run / "sft.jsonl.lineage.json").is_file()
    names = (
        "simple.jsonl",
        "medium.jsonl",
        "hard.jsonl",
        "sft.jsonl",
        "rft.jsonl",
        "summary.json",
        "card.html",
    )
    before = {name: (run / name).read_bytes() for name in names}
    refine.run(config)
    assert before == {name: (run / name).read_bytes() for name in names}


def test_a_limit_keeps_the_first_usable_rows(source: Path):
    good = rows(source.parent, 4)
    (source / "a.jsonl").unlink()
    add(source, "{not json", *good, name="a.jsonl")
    bad, *read_rows = records(settings(source, "data.limit=3"))
    assert isinstance(bad, BadRow)
    assert [row.model_dump() for row in read_rows] == [row.model_dump() for row in good[:3]]
    assert len(list(records(settings(source)))) == 1 + 4 + 30


def test_the_judge_is_asked_once_and_its_contradictions_are_reported(source: Path, opened, monkeypatch):
    monkeypatch.setattr(judging, "REPEATED_SHARE", 1.0)
    for name in ("a.jsonl", "b.jsonl"):
        (source / name).unlink()
    add(source, *rows(source.parent, 3))
    judge = ["rewards.judge.model=m", "rewards.judge.api_key_env=", "rewards.judge.concurrency=1"]
    judge += ["refinement.quality.judge=true"]
    none = dict.fromkeys(GATES, 0) | {"corrupted": 1}
    with pytest.raises(BadConfig, match=r"rewards\.judge\.url"):
        refine.run(settings(source, *judge, **none))
    server = opened(ChatServer(*(rated(score) for score in (5, 5, 5, 5, 1, 3, 4, 4, 5))))
    config = settings(source, *judge, f"rewards.judge.url={server.url}", **none)
    summary = refine.run(config)
    assert (summary["kept"], summary["dropped"]) == (2, {"judge": 1})
    assert summary["judge"]["repeated"] == 3
    assert list(summary["judge"]["scattered"].values()) == [2.0]
    assert refine.run(config)["kept"] == 2
    assert len(server.requests) == 9  # verdicts are kept


def test_a_rejected_set_is_not_written(source: Path):
    answer = Step(think="The digit in the red frame is 7", answer="7")
    add(source, demonstration("culprit", turns=[zoom(1), zoom(1), answer]))
    message = r"gate cycles: .* is 1, limit 0 \(culprit: call 1: zoom_in is repeated\)"
    with pytest.raises(DataFailure, match=message):
        refine.run(settings(source))
    left = {path.name for path in (source.parent / "run").iterdir()}
    assert {"rejected.json", "card.html"} <= left
    assert not left & {*sets.FILES, "summary.json"}
    rejected = json.loads((source.parent / "run" / "rejected.json").read_text(encoding="utf-8"))
    ids = {gate["name"]: gate["ids"] for gate in rejected["gates"]}
    assert ids["cycles"] == {"culprit": "call 1: zoom_in is repeated"}


def test_evaluation_questions_end_the_job_or_are_dropped(source: Path):
    held = source.parent / "held.jsonl"
    first = rows(source.parent, 1)[0]
    question = Question(id="e", question=first.question, media=first.media, answers=["7"])
    held.write_text(question.model_dump_json() + "\n", encoding="utf-8")
    held_out = f"refinement.holdout.sources=['{held}']"
    with pytest.raises(DataFailure, match="d000 = e"):
        refine.run(settings(source, held_out))
    summary = refine.run(settings(source, held_out, "refinement.holdout.drop=true"))
    assert summary["dropped"]["held_out"] == 1
    assert summary["held_out"] == {"d000": "e"}


def test_nothing_to_refine(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text("{oops\n", encoding="utf-8")
    with pytest.raises(BadInput, match="has no usable demonstration"):
        refine.run(settings(tmp_path / "data"))
    short = demonstration(turns=[Step(answer="7")])
    (tmp_path / "data" / "a.jsonl").write_text(short.model_dump_json() + "\n", encoding="utf-8")
    with pytest.raises(DataFailure, match=r"is left of 1 rows \(length 1\)"):
        # Before the policy is asked
        refine.run(settings(tmp_path / "data", "refinement.pass_rate.episodes=2"))


def test_every_row_below_the_quality_of_its_level(source: Path, capsys: pytest.CaptureFixture[str]):
    floors = "refinement.quality.levels={simple: 1, medium: 1, hard: 1}"
    (source / "b.jsonl").write_text("{oops\n", encoding="utf-8")
    with pytest.raises(DataFailure, match=r"\(level_quality \d+, not_json 1\)"):
        refine.run(settings(source, floors))
    with pytest.raises(DataFailure, match="gate total"):
        refine.run(settings(source, sizes=1))
    told = capsys.readouterr().out
    assert "of 31 rows; dropped " in told, "what the gate lacks was dropped for these causes"


def dry_run(source: Path, *overrides: str) -> int:
    arguments = [f"data.demonstrations={source}", f"run.dir={source.parent / 'run'}", "--dry-run", *overrides]
    with pytest.raises(SystemExit) as ended:
        from_command_line(refine.__doc__ or "", "refine", arguments, "configs/nano/refine.yaml", refine.check)
    return ended.value.code


def test_a_dry_run_checks_the_inputs(source: Path, capsys: pytest.CaptureFixture[str]):
    assert dry_run(source, "refinement.pass_rate.episodes=8") == 0
    printed = capsys.readouterr()
    assert "refinement:" in printed.out
    assert f"ok     data.demonstrations={source}" in printed.err
    assert not (source.parent / "run").exists()


@pytest.mark.parametrize("key", ["data.demonstrations", "refinement.holdout.sources"])
def test_a_dry_run_names_a_missing_input(source: Path, key: str, capsys: pytest.CaptureFixture[str]):
    missing = source.parent / "missing.jsonl"
    value = f"[{missing}]" if key.endswith("sources") else str(missing)
    assert dry_run(source, f"{key}={value}") == 1
    assert f"{key}={missing}: " in capsys.readouterr().err
