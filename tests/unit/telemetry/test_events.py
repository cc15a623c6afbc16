"""The event log survives crashes and hostile values; progress estimates the remaining time."""

from __future__ import annotations

import copy
import io
import json
import multiprocessing

import numpy as np
import pytest

from pixelis.records import Question, StopReason
from pixelis.telemetry.events import REPLAYED, EventLog, Tail, drop_steps, last, mark_replayed, read
from pixelis.telemetry.progress import Progress


def test_an_incomplete_line_loses_only_itself(tmp_path):
    with EventLog(tmp_path) as log:
        log.write("a")
    with log.path.open("ab") as file:
        file.write(b'{"kind": "torn", "x": "\xc3')
    assert [e["kind"] for e in read(tmp_path)] == ["a"]
    with EventLog(tmp_path) as repeated:
        repeated.write("b")
    assert [e["kind"] for e in read(tmp_path)] == ["a", "b"]


def test_the_newest_event_of_a_kind_is_found_anywhere_in_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr("pixelis.telemetry.events.BLOCK", 64)
    assert last(tmp_path, "a") is None
    with EventLog(tmp_path) as log:
        for step in range(9):
            log.write("a", step=step, text="ä" * step)
            log.write("b", step=step)
        for _ in range(40):
            log.write("b", text="x" * 50)
    with log.path.open("ab") as file:
        file.write(b'{"kind": "a", "step": 99')
    for kind in ("a", "b", "c"):
        assert last(tmp_path, kind) == (read(tmp_path, kind) or [None])[-1]


def test_every_line_is_strict_json(tmp_path):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    with EventLog(tmp_path) as log:
        log.write(
            "odd",
            nan=float("nan"),
            inf=np.float32("inf"),
            array=np.arange(3),
            stop=StopReason.ANSWER,
            question=Question(id="q", question="line\nbreak\u2028\ud800"[:-1]),
            path=tmp_path,
            anything=object,
            nested={1: {2.5}},
        )
    lines = log.path.read_text().splitlines()
    assert len(lines) == 1
    event = json.loads(lines[0], parse_constant=refuse)
    assert (event["nan"], event["inf"], event["array"], event["stop"]) == ("nan", "inf", [0, 1, 2], "answer")
    assert event["question"]["question"] == "line\nbreak\u2028"
    assert event["nested"] == {"1": [2.5]}


def test_a_tail_gives_complete_new_events(tmp_path):
    with EventLog(tmp_path) as log:
        log.write("old")
        tail = Tail(tmp_path)
        assert tail.read() == []
        log.write("a")
        log.write("b")
        assert [event["kind"] for event in tail.read()] == ["a", "b"]
        with log.path.open("ab") as file:
            file.write(b'{"kind": "c"')
        assert tail.read() == []
        with log.path.open("ab") as file:
            file.write(b"}\n")
        assert [event["kind"] for event in tail.read()] == ["c"]
    assert Tail(tmp_path / "none").read() == []


def _write_many(log: EventLog, writer: int) -> None:
    for i in range(200):
        log.write("line", writer=writer, i=i, text="x" * 500)


def test_processes_append_without_mixing_lines(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write_many, args=(copy.copy(EventLog(tmp_path)), w)) for w in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    events = read(tmp_path)
    assert len(events) == 600
    for writer in range(3):
        assert [e["i"] for e in events if e["writer"] == writer] == list(range(200))


def test_replayed_steps_stand_once_in_the_log_while_others_append(tmp_path):
    with EventLog(tmp_path) as other:
        for step in range(1, 7):
            other.write("step/policy", step=step, **{"policy/loss": 1.0 / step})
        other.write("evaluation", step=4, accuracy=0.5)
        other.write("evaluation", step=6, accuracy=0.7)
        other.write("alarm", step=6, text="kept")
        size = (tmp_path / "events.jsonl").stat().st_size
        assert mark_replayed(tmp_path, 4) == 3
        assert (tmp_path / "events.jsonl").stat().st_size == size
        for step in (5, 6):
            other.write("step/policy", step=step)
    assert [row["step"] for row in read(tmp_path, "step/policy")] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in read(tmp_path, REPLAYED)] == [5, 6, 6]
    assert [row["step"] for row in read(tmp_path, "evaluation")] == [4]
    assert len(read(tmp_path)) == 11
    assert mark_replayed(tmp_path / "none", 0) == 0


def test_rows_of_steps_that_are_repeated_are_dropped(tmp_path):
    path = tmp_path / "consumed.jsonl"
    drop_steps(path, 1)
    assert not path.exists()
    path.write_text("".join(f'{{"step": {step}, "ids": []}}\n' for step in (0, 1, 2, 3)) + '{"step": 4, "i')
    drop_steps(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]
    drop_steps(path, 0)
    assert path.read_text() == ""


def test_progress_prints_plain_lines_and_no_time_left_while_a_run_waits():
    out = io.StringIO()
    with Progress("rft", total=4, every=0, stream=out) as progress:
        for step in range(1, 4):
            progress.update(step, **{"reward/accuracy": step / 4})
        progress.update(3, waiting=True, status="a node was lost")
        assert progress.seconds_left is None
        progress.update(2)  # the run has resumed from an earlier step
        assert progress.seconds_left is None
        progress.update(4)
    lines = out.getvalue().splitlines()
    assert lines[0] == "[rft] 1/4  reward/accuracy 0.25"
    assert lines[1].startswith("[rft] 2/4  0 s left  reward/accuracy 0.5")
    assert lines[3] == "[rft] 3/4  status a node was lost"
    assert lines[-1].startswith("[rft] 4/4  took 0 s")


@pytest.mark.parametrize(
    ("total", "start", "updates", "left"),
    [
        pytest.param(
            40, 20, [(60, 20), (0, 25), (10, 30)], 20.0, id="loading and earlier processes do not count"
        ),
        pytest.param(500, 0, [(0, 256), (2, 257)], None, id="items that finish together are no measure"),
        pytest.param(500, 0, [(0, 256), (2, 257), (2, 500)], 0.0, id="the end"),
    ],
)
def test_the_remaining_time_is_estimated(monkeypatch, total, start, updates, left):
    now = [100.0]
    monkeypatch.setattr("pixelis.telemetry.progress.time.monotonic", lambda: now[0])
    progress = Progress("rft", total=total, start=start, enabled=False)
    for seconds, done in updates:
        assert progress.seconds_left is None
        now[0] += seconds
        progress.update(done)
    assert progress.seconds_left == pytest.approx(left)
