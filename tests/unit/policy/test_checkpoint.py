"""Checkpoints under kill, truncation, bit rot and full disks."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pixelis import files
from pixelis.actors.train_job import best_step
from pixelis.errors import BadInput, InfraFailure, MissingFile
from pixelis.policy import checkpoint
from pixelis.policy.adapters import load_header
from pixelis.policy.tensor_parts import Part, StoredTensors, files_of
from pixelis.telemetry.events import EventLog

TENSORS = {
    "adapter": {"a": np.arange(6, dtype=np.float32).reshape(2, 3)},
    "optimizer": {"m": np.ones(4, np.float32)},
}


def write(root: Path, step: int, keep: int = 0) -> Path:
    tensors = {stem: {n: a + step for n, a in arrays.items()} for stem, arrays in TENSORS.items()}
    return checkpoint.write(root, step, tensors, {"step": step}, keep, {"adapter": {"kind": "lora"}})


def test_a_checkpoint_is_read_as_written(tmp_path: Path):
    folder = write(tmp_path, 7)
    assert folder == tmp_path / "checkpoints" / "step_00000007" == checkpoint.latest(tmp_path)
    tensors, state = checkpoint.read(folder)
    assert state == {"step": 7}
    assert np.array_equal(tensors["adapter"]["a"], TENSORS["adapter"]["a"] + 7)
    assert checkpoint.step_of(folder) == 7
    assert not any(p.suffix in (".pt", ".bin", ".pkl") for p in folder.iterdir())


def test_a_run_without_checkpoints_has_none(tmp_path: Path):
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(MissingFile, match="no checkpoint"):
        checkpoint.read(tmp_path / "step_00000001")
    with pytest.raises(BadInput, match="not named like"):
        checkpoint.step_of("best")


def test_pruning_does_not_count_damaged_checkpoints(tmp_path: Path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "checkpoints" / "step_00000003" / "state.json").write_text("{")
    checkpoint.prune(tmp_path, 2)
    assert checkpoint.latest(tmp_path).name == "step_00000002"
    assert (tmp_path / "checkpoints" / "step_00000001").is_dir()


def test_incomplete_and_corrupt_checkpoints_are_skipped(tmp_path: Path):
    good, newer = write(tmp_path, 1), write(tmp_path, 2)
    intact = tmp_path / "intact"
    shutil.copytree(newer, intact)
    rng = random.Random(0)
    for case in range(50):
        shutil.rmtree(newer)
        shutil.copytree(intact, newer)
        victim = rng.choice(sorted(newer.iterdir()))
        content = bytearray(victim.read_bytes())
        position = rng.randrange(len(content))
        if case % 2:
            victim.write_bytes(content[:position])
        elif victim.name == checkpoint.MANIFEST:
            victim.unlink()
        else:
            content[position] ^= 1 << rng.randrange(8)
            victim.write_bytes(content)
        assert checkpoint.latest(tmp_path) == good, (case, victim.name, position)
        with pytest.raises(BadInput, match="damaged"):
            checkpoint.read(newer)


def test_a_failed_write_leaves_only_the_old_checkpoint(tmp_path: Path):
    good = write(tmp_path, 1)

    def full_disk(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    with pytest.raises(InfraFailure, match="No space"):
        checkpoint.write_folder(tmp_path / "checkpoints" / "step_00000002", full_disk)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert checkpoint.latest(tmp_path) == good


def test_temporary_folders_of_killed_processes_are_removed_by_the_next_write(tmp_path: Path):
    here, ended = checkpoint._machine(), 2**22 + 1
    alive, elsewhere = f".rows.{here}-{os.getppid()}.aside", f".rows.0123abcd-{ended}.aside"
    for name in (alive, elsewhere, f".rows.{here}-{ended}.aside"):
        (tmp_path / name).mkdir()
    checkpoint.write_folder(tmp_path / "rows", lambda folder: (folder / "a").write_bytes(b"x") and None)
    assert {p.name for p in tmp_path.iterdir()} == {alive, elsewhere, "rows"}, (
        "another machine may still be writing"
    )


@pytest.mark.parametrize("workers", [1, 3])
def test_a_checkpoint_in_parts_is_read_as_a_whole(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {
        "a": np.arange(24, dtype=np.float32).reshape(4, 6),
        "b": np.ones(1, np.float32),
        "c": np.zeros((2, 0), np.float32),
    }
    group = together(workers, monkeypatch)
    for worker, writer in enumerate(group):
        parts: dict[str, np.ndarray | Part] = {}
        for name, values in whole.items():
            first, end = (values.size * (worker + i) // workers for i in (0, 1))
            if end > first or not (values.size or worker):
                parts[name] = Part(values.reshape(-1)[first:end], first, values.shape)
        folder = writer.start(
            tmp_path, 3, {"model": parts}, {"state": {"step": 3}}, {"model": {"kind": "full"}}
        )
    for writer in group:
        writer.wait()
    assert checkpoint.latest(tmp_path) == folder
    tensors, state = checkpoint.read(folder)
    assert state == {"step": 3}
    assert tensors["model"].keys() == whole.keys()
    assert all(np.array_equal(tensors["model"][name], values) for name, values in whole.items())
    assert len(list(folder.glob("model.*"))) == workers
    assert load_header(folder)[1]["kind"] == "full"
    if workers > 1:
        (folder / "model.2-of-3.safetensors").unlink()
        assert checkpoint.latest(tmp_path) is None
        with pytest.raises(BadInput, match="a part of a is missing"):
            StoredTensors(files_of(folder, "model"))["a"]


def test_a_worker_that_cannot_write_fails_the_checkpoint_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = together(2, monkeypatch)
    original = checkpoint.save_tensors

    def full(tensors: Any, path: Path, header: Any = None) -> None:
        if "2-of-2" in path.name:
            raise OSError(28, "No space left on device")
        original(tensors, path, header)

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    for writer in group:
        writer.start(tmp_path, 1, TENSORS, {"state": {}})
    for writer in group:
        with pytest.raises(InfraFailure, match="No space left") as caught:
            writer.wait()
        assert caught.value.code == "disk_full"
        writer.wait()  # raised once
    assert checkpoint.latest(tmp_path) is None
    assert not [p for p in (tmp_path / "checkpoints").rglob("*") if p.suffix == ".safetensors"]


def test_a_checkpoint_is_written_in_the_background_and_waits_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, original = threading.Event(), checkpoint.save_tensors
    monkeypatch.setattr(checkpoint, "save_tensors", lambda *arguments: go.wait(30) and original(*arguments))
    writer = checkpoint.Writer()
    writer.start(tmp_path, 1, TENSORS, {"state": {}})
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.steps(tmp_path) == set(), "best_step would link a checkpoint that is not complete"
    threading.Timer(0.2, go.set).start()
    writer.start(tmp_path, 2, TENSORS, {"state": {}})
    assert 1 in checkpoint.steps(tmp_path)
    writer.wait()
    assert checkpoint.steps(tmp_path) == {1, 2}


def together(workers: int, monkeypatch: pytest.MonkeyPatch) -> list[checkpoint.Writer]:
    """Writers of several workers in this process; the first one has to start first."""
    names: list[str] = []

    def broadcast(text: str) -> str:
        names.extend([text] * bool(text))
        return names[-1]

    monkeypatch.setattr(checkpoint, "broadcast_text", broadcast)
    return [checkpoint.Writer(worker, workers) for worker in range(workers)]


def test_a_step_can_be_written_again(tmp_path: Path):
    write(tmp_path, 3)
    folder = checkpoint.write(tmp_path, 3, {"adapter": {"a": np.zeros(2)}}, {"again": True})
    assert checkpoint.read(folder)[1] == {"again": True}
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_an_interrupted_replacement_is_finished(tmp_path: Path):
    folder = write(tmp_path, 3)
    os.rename(folder, folder.with_name(f".{folder.name}.{checkpoint._machine()}-{2**22 + 1}.old"))
    assert checkpoint.latest(tmp_path) == folder


def test_a_starting_learner_finishes_and_removes_what_another_node_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checkpoint, "rank_and_world_size", lambda: (0, 1))
    monkeypatch.setattr(checkpoint, "sum_over_workers", lambda values: values)
    older, folder = write(tmp_path, 2), write(tmp_path, 3)
    os.rename(folder, folder.with_name(f".{folder.name}.0123abcd-7.old"))
    (tmp_path / "checkpoints" / ".step_00000004.0123abcd-7.aside").mkdir()
    assert checkpoint.latest(tmp_path) == older, "another learner might be writing"
    assert checkpoint.latest_of_workers(tmp_path) == folder
    (folder / "state.json").write_text("{}")
    assert checkpoint.latest_of_workers(tmp_path) == older
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {older.name, folder.name}


def test_json_is_replaced_atomically(tmp_path: Path):
    path = tmp_path / "deep" / "versions.json"
    files.write_json(path, [1, 2])
    files.write_json(path, {"a": None})
    assert json.loads(path.read_text()) == {"a": None}
    with pytest.raises(TypeError):
        files.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": None}
    assert [p.name for p in path.parent.iterdir()] == ["versions.json"]


def test_the_checkpoint_with_the_best_evaluation_is_kept_and_linked(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log:
        for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7)):
            log.write("evaluation", step=step, **{"evaluate/accuracy": accuracy})
    assert best_step(str(tmp_path)) is None
    for step in range(1, 8):
        best = best_step(str(tmp_path))
        checkpoint.write(tmp_path, step, {"adapter": {"a": np.ones(2, np.float32)}}, {}, keep=2, best=best)
    assert checkpoint.steps(tmp_path) == {2, 6, 7}
    assert best_step(str(tmp_path)) == 2
    for step in (6, 2):
        checkpoint.link_best(tmp_path, step)
        assert checkpoint.step_of((tmp_path / "best").resolve()) == step
    with EventLog(tmp_path) as log:
        log.write("evaluation", step=7, **{"evaluate/accuracy": 0.9})
        log.write("step/sft", step=6, **{"evaluate/loss": 0.1})
    assert best_step(str(tmp_path)) == 7


def test_without_accuracies_the_lowest_loss_is_the_best(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.2)):
            log.write("step/sft", step=step, **{"evaluate/loss": loss})
            checkpoint.write(tmp_path, step, {"adapter": {"a": np.ones(2, np.float32)}}, {})
    assert best_step(str(tmp_path)) == 2
