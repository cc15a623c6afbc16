"""Lineage files: written beside a result, traced to the sources, every hash compared."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import tiny_policy
from command_line import pixelis

from pixelis.config import Config, parse
from pixelis.datasets.questions import read_questions
from pixelis.errors import BadInput, MissingFile
from pixelis.jobs import driver as jobs
from pixelis.jobs import lineage as chain_of
from pixelis.policy import checkpoint
from pixelis.policy.adapters import save_adapter
from pixelis.telemetry import lineage
from pixelis.telemetry.events import EventLog
from pixelis.telemetry.trackers import log_results


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """raw.jsonl -> made/ (a data set) -> result.json; returns the folder of all."""
    (tmp_path / "raw.jsonl").write_text('{"id": "1"}\n')
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "part.jsonl").write_text("one\n")
    questions = {"questions": [str(tmp_path / "raw.jsonl"), "cards:?split=train"]}
    lineage.record(tmp_path / "made", inputs=questions, config=Config(), kind="dataset")
    (tmp_path / "result.json").write_text("{}")
    lineage.record(tmp_path / "result.json", inputs=[tmp_path / "made"], config=Config(), kind="evaluation")
    return tmp_path


def states(path: Path) -> dict[str, str]:
    return {node.name: node.state for node in chain_of.trace(path).walk()}


def test_a_chain_is_traced_to_its_sources(chain: Path) -> None:
    node = chain_of.trace(chain / "result.json")
    assert states(chain / "result.json") == {
        "result.json": "ok", "made": "ok", "raw.jsonl": "ok", "cards:?split=train": "unhashed"
    }  # fmt: skip
    assert not node.broken
    record = node.record
    assert (record.seed, record.config_sha256) == (42, Config().sha256)
    assert record.code == lineage.code()
    shown = "\n".join(chain_of.tree(node))
    assert shown.index("result.json") < shown.index("made") < shown.index("raw.jsonl")
    # Raw material beside the product is a source, not a product of the folder it lies in.
    assert lineage.find_record(chain / "raw.jsonl") is None
    assert lineage.find_record(chain / "made" / "part.jsonl") is not None


def test_the_chain_may_be_moved_and_names_no_folder_above_it(
    chain: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for file in chain.rglob("*lineage.json"):
        assert str(chain) not in file.read_text()
    moved = tmp_path_factory.mktemp("elsewhere") / "deeper"
    shutil.copytree(chain, moved)
    shutil.rmtree(chain)
    assert not chain_of.trace(moved / "result.json").broken


def test_changed_and_missing_inputs_are_reported(chain: Path) -> None:
    (chain / "raw.jsonl").write_text("other\n")
    assert states(chain / "result.json")["raw.jsonl"] == "changed"
    assert states(chain / "result.json")["made"] == "ok"
    (chain / "raw.jsonl").unlink()
    assert states(chain / "result.json")["raw.jsonl"] == "missing"
    (chain / "made" / "more.jsonl").write_text("two\n")
    assert states(chain / "result.json")["made"] == "changed"
    (chain / "result.json").write_text("[]")
    assert states(chain / "result.json")["result.json"] == "changed"
    assert len(chain_of.trace(chain / "result.json").broken) == 3


def test_a_result_made_from_itself_is_a_cycle_not_an_endless_loop(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name)
    lineage.record(tmp_path / "a", inputs=[tmp_path / "b"], kind="dataset")
    lineage.record(tmp_path / "b", inputs=[tmp_path / "a"], kind="dataset")
    assert [node.state for node in chain_of.trace(tmp_path / "a").walk()] == ["ok", "ok", "cycle"]


def test_the_packaged_model_is_compared_with_the_one_of_the_run(tmp_path: Path) -> None:
    with jobs.run_folder(parse({"run": {"dir": str(tmp_path / "run")}})) as folder:
        pass
    assert states(folder)["nano"] == "ok"
    known = json.loads((folder / "lineage.json").read_text())
    known["inputs"][0]["sha256"] = "0" * 64  # the package of then had another one
    (folder / "lineage.json").write_text(json.dumps(known))
    assert [node.name for node in chain_of.trace(folder).broken] == ["nano"]


def test_a_missing_lineage_input_or_result_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    with pytest.raises(MissingFile, match="no lineage"):
        chain_of.trace(tmp_path / "x")
    with pytest.raises(MissingFile, match="gone"):
        lineage.record(tmp_path / "x", inputs=[tmp_path / "gone.jsonl"], kind="dataset")
    with pytest.raises(MissingFile):
        lineage.record(tmp_path / "nothing", kind="dataset")
    (tmp_path / f"x.{lineage.NAME}").write_text('{"kind": 3}')
    with pytest.raises(BadInput, match="not a lineage file"):
        chain_of.trace(tmp_path / "x")


def test_sources_with_a_path_in_them(tmp_path: Path) -> None:
    (tmp_path / "coco").mkdir()
    (tmp_path / "a.jsonl").write_text("x")
    assert lineage.local_path(f"coco:{tmp_path}/coco?split=val") == tmp_path / "coco"
    assert lineage.local_path(f"{tmp_path}/*.jsonl") == tmp_path / "*.jsonl"
    for generated in ("cards:?split=train", "s3://bucket/a.parquet", "packaged:skimage?split=test"):
        assert lineage.local_path(generated) is None
    with pytest.raises(MissingFile):
        lineage.local_path(str(tmp_path / "b.jsonl"))


def test_digests_see_names_and_contents_but_not_pixels_or_their_own_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.json").write_text("1")
    picture = tmp_path / "deep" / "p.png"
    picture.write_bytes(b"abc")
    first = lineage.digest(tmp_path)
    assert first[1] == 4
    picture.write_bytes(b"abd")
    lineage.record(tmp_path, kind="dataset")
    assert lineage.digest(tmp_path) == first
    picture.write_bytes(b"abcd")
    assert lineage.digest(tmp_path) != first
    picture.unlink()
    (tmp_path / "a.json").rename(tmp_path / "b.json")
    assert lineage.digest(tmp_path)[0] != first[0]
    inside = tmp_path / "deep" / "out.json"
    before = lineage.digest(tmp_path, without=inside)
    inside.write_text("{}")
    assert lineage.digest(tmp_path, without=inside) == before


def settings(tmp_path: Path, *, rank: int = 4, **telemetry: object) -> Config:
    policy = {"model": str(tiny_policy.folder("qwen3_vl")), "lora": {"rank": rank, "alpha": 8}}
    policy["adapter"] = str(tmp_path / "start")
    return parse({"policy": policy, "run": {"dir": str(tmp_path / "run")}, "telemetry": telemetry})


def test_a_run_and_its_checkpoints_record_their_inputs(tmp_path: Path) -> None:
    save_adapter(tiny_policy.random_adapter(), tmp_path / "start")
    with jobs.run_folder(settings(tmp_path), sources={"demonstrations": "cards:?split=train"}) as folder:
        known = lineage.read(folder)
        assert [i.role for i in known.inputs] == ["model", "adapter", "demonstrations"]
        step = folder / "checkpoints" / "step_00000002"
        notes = lineage.of_run(step, "checkpoint")
        checkpoint.write(folder, 2, {}, {}, notes={"lineage": notes})
    inputs = states(step)
    assert inputs.pop("step_00000002") == "ok"
    assert sorted(inputs.values()) == ["ok", "ok", "unhashed"]
    (step / "state.json").write_text("[]")
    assert states(step)["step_00000002"] == "changed"
    # A run that is resumed with another configuration says so.
    with jobs.run_folder(settings(tmp_path), sources={"demonstrations": "cards:?split=validation"}):
        pass
    known = lineage.read(folder)
    assert [len(known.earlier), known.earlier[0].inputs[-1].source] == [1, "cards:?split=train"]


@pytest.mark.slow
@pytest.mark.long
def test_results_are_artifacts_of_weights_and_biases_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "w"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "set.jsonl").write_text("one\n")
    config = parse({"run": {"dir": str(run)}, "telemetry": {"trackers": ["wandb"]}})
    lineage.record(run / "set.jsonl", inputs=["cards:?split=train"], config=config, kind="dataset")
    log_results(config)
    (log,) = run.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60  # its own process writes the file
    while b"dataset-run" not in log.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert b"dataset-run" in log.read_bytes()


def test_the_job_prints_the_chain_and_fails_on_a_broken_one(
    chain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        return pixelis(capsys, monkeypatch, "lineage", *arguments)

    code, printed, _ = run(str(chain / "result.json"))
    assert (code, "raw.jsonl" in printed) == (0, True)
    (chain / "made" / "part.jsonl").write_text("two\n")
    code, printed, error = run(str(chain / "result.json"))
    assert (code, "CHANGED" in printed, "1 of 4" in error) == (1, True, True)
    assert run()[0] == 2
    assert run(str(chain / "raw.jsonl"))[0] == 1


def test_what_was_made_from_a_result_is_listed_with_the_state_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raw.jsonl").write_text("one\n")
    run, lost, after = (tmp_path / name for name in ("runs/sft", "runs/rft", "runs/answers.jsonl"))
    for folder, source, step in ((run, tmp_path / "raw.jsonl", 3), (lost, run / "checkpoints/step_3", 7)):
        folder.mkdir(parents=True)
        (run / "checkpoints/step_3").mkdir(parents=True, exist_ok=True)
        lineage.record(folder, inputs=[source], kind="run", grows=True)
        EventLog(folder).write("step/policy", step=step)
    after.write_text("42\n")
    lineage.record(after, inputs=[lost], kind="answers")
    (lost / "lock.json").write_text("{}")
    os.utime(lost / "lock.json", (0, 0))
    _, printed, _ = pixelis(
        capsys, monkeypatch, "lineage", str(tmp_path / "raw.jsonl"), "--descendants", str(tmp_path / "runs")
    )
    lines = [line.split() for line in printed.splitlines()]
    assert [line[0] for line in lines] == ["sft", "rft", "answers.jsonl"]
    assert [line[3:] for line in lines] == [
        ["step", "3"],
        ["step", "7,", "stopped", "without", "an", "end"],
        [],
    ]


def test_the_lineage_of_a_data_set_is_no_row_of_it(tmp_path: Path) -> None:
    (tmp_path / "part.jsonl").write_text('{"id": "1", "question": "what?", "answers": ["x"]}\n')
    lineage.record(tmp_path, inputs=["cards:?split=train"], kind="dataset")
    lineage.record(tmp_path / "part.jsonl", inputs=["cards:?split=train"], kind="dataset")
    assert [q.id for q in read_questions(str(tmp_path), epochs=1)] == ["1"]
    assert not chain_of.trace(tmp_path).broken
