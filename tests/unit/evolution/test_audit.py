"""The audit log."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pixelis.config import AuditConfig
from pixelis.errors import BadInput, InfraFailure
from pixelis.evolution import audit
from pixelis.jobs import audit as job

SMALL = AuditConfig(rotate_bytes=1200)
HUGE = AuditConfig()


def log_of(folder: Path, count: int, config: AuditConfig = HUGE) -> None:
    with audit.AuditLog(folder, config) as log:
        for i in range(count):
            log.write("update", "learner", f"step {i}", details={"step": i, "kl": 0.01 * i})


def lines(folder: Path) -> list[str]:
    return (folder / "audit-00000001.jsonl").read_text().splitlines(keepends=True)


def put(folder: Path, changed: list[str]) -> None:
    (folder / "audit-00000001.jsonl").write_text("".join(changed))


def forget_anchor(folder: Path) -> None:
    """As after a crash at an earlier moment, or with a log of an older version."""
    audit.anchor_file(folder).unlink()


def kinds(folder: Path) -> list[tuple[int, str]]:
    return [(problem.line, problem.text.partition(":")[0]) for problem in audit.verify(folder).problems]


def test_an_event_is_on_disk_with_all_its_fields(tmp_path):
    with audit.AuditLog(tmp_path, HUGE) as log:
        written = log.write("promotion", "alice", "promote 3", "refused", {"version": 3, "pair": (1, 2)})
    (line,) = lines(tmp_path)
    assert json.loads(line) == {
        "id": written.id,
        "time": pytest.approx(time.time(), abs=60),
        "event": "promotion",
        "actor": "alice",
        "action": "promote 3",
        "result": "refused",
        "details": {"version": 3, "pair": [1, 2]},
        "previous": audit.GENESIS,
        "hash": written.hash,
    }
    assert audit.verify(tmp_path).ok


def forged(line: str, **values: str) -> str:
    """An event of other values with the hash that belongs to them."""
    fields = {**json.loads(line), **values}
    content = {key: value for key, value in fields.items() if key != "hash"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    fields["hash"] = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(fields, sort_keys=True, separators=(",", ":")) + "\n"


def insert_forged(old: list[str]) -> list[str]:
    return [*old[:4], forged(old[6], previous=json.loads(old[3])["hash"]), *old[4:]]


EDITS = {
    "changed": (lambda old: [*old[:5], old[5].replace("learner", "nobody"), *old[6:]], [(6, "changed")]),
    "forged": (lambda old: [*old[:4], forged(old[4], actor="nobody"), *old[5:]], [(6, "broken")]),
    "removed": (lambda old: [*old[:4], *old[5:]], [(5, "broken")]),
    "first removed": (lambda old: old[1:], [(1, "removed")]),
    "inserted": (insert_forged, [(6, "broken")]),
    "swapped": (lambda old: [*old[:4], old[5], old[4], *old[6:]], [(n, "broken") for n in (5, 6, 7)]),
    "copied": (lambda old: [*old[:4], old[1], *old[4:]], [(5, "broken"), (6, "broken")]),
    "respelled": (lambda old: [old[0], old[1].replace('":', '": ', 1), *old[2:]], [(2, "unreadable")]),
}


@pytest.mark.parametrize(("edit", "problems"), EDITS.values(), ids=EDITS)
def test_an_edit_is_found(tmp_path, edit, problems):
    log_of(tmp_path, 10)
    put(tmp_path, edit(lines(tmp_path)))
    assert kinds(tmp_path) == problems


@pytest.mark.parametrize("kept", [0, 1, 4])
def test_a_cut_end_is_found_and_stays_visible_when_the_log_goes_on(kept, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "audit"
    log_of(folder, 5)
    assert audit.verify(folder).anchored
    put(folder, lines(folder)[:kept])
    assert kinds(folder) == [(0, "head")]
    assert run_job(monkeypatch, str(tmp_path)) == 1
    assert "event 5, the last one written, is not in the chain" in capsys.readouterr().out
    log_of(folder, 3)
    assert kinds(folder) == [(kept + 1, "broken" if kept else "removed")]
    (repair,) = audit.search(folder, event="repair")
    assert repair.details["events"] == 5
    log_of(folder, 1)
    assert kinds(folder) == [(kept + 1, "broken" if kept else "removed")]


def test_a_removed_log_is_not_an_empty_one(tmp_path, monkeypatch, capsys):
    log_of(tmp_path / "audit", 5)
    (tmp_path / "audit" / "audit-00000001.jsonl").unlink()
    assert run_job(monkeypatch, str(tmp_path)) == 1
    assert "5 events were written to it" in capsys.readouterr().err


def test_an_end_cut_off_together_with_its_anchor_is_found_with_a_stored_head(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "audit"
    log_of(folder, 5)
    head = audit.verify(folder).head
    put(folder, lines(folder)[:3])
    forget_anchor(folder)
    assert run_job(monkeypatch, str(tmp_path)) == 0
    assert "no anchor" in capsys.readouterr().out
    assert [p.text[:5] for p in audit.verify(folder, head).problems] == ["head:"]


def test_a_crash_before_the_anchor_was_written_is_mended_on_reopening(tmp_path):
    log_of(tmp_path, 3)
    anchor = audit.anchor_file(tmp_path).read_bytes()
    log_of(tmp_path, 2)
    audit.anchor_file(tmp_path).write_bytes(anchor)
    assert audit.verify(tmp_path).ok
    log_of(tmp_path, 1)
    assert audit.verify(tmp_path).ok
    assert json.loads(audit.anchor_file(tmp_path).read_text())["events"] == 6


def test_the_chain_goes_on_over_files(tmp_path):
    log_of(tmp_path, 20, SMALL)
    paths = sorted(tmp_path.glob("audit-*"))
    assert len(paths) > 3
    report = audit.verify(tmp_path)
    assert (report.ok, report.files, report.lines) == (True, len(paths), 20)
    with gzip.open(paths[0].with_name(paths[0].name + ".gz"), "wb") as file:  # as earlier releases did
        file.write(paths[0].read_bytes())
    paths[0].unlink()
    assert audit.verify(tmp_path).ok
    assert [event.details["step"] for event in audit.search(tmp_path, event="update")] == list(range(20))
    log_of(tmp_path, 1, SMALL)
    assert audit.verify(tmp_path).ok
    paths[1].unlink()
    (problem,) = audit.verify(tmp_path).problems
    assert (problem.file, problem.line) == (paths[2].name, 1)


def test_retention_removes_old_files_and_the_rest_verifies(tmp_path):
    log_of(tmp_path, 20, SMALL)
    first, second, third, *_ = sorted(tmp_path.glob("audit-*"))
    for path in (first, second):
        os.utime(path, (time.time() - 400 * 86400,) * 2)
    with audit.AuditLog(tmp_path, SMALL) as log:
        (removal,) = audit.search(tmp_path, event="retention")
        assert removal.details["files"] == [first.name, second.name]
        assert log.prune() == []
    assert not first.exists()
    assert audit.verify(tmp_path).ok
    third.unlink()
    (problem,) = audit.verify(tmp_path).problems
    assert problem.text.startswith("removed"), "no retention recorded it"


@pytest.mark.parametrize("length", [1, 40, -1])
def test_a_torn_last_line_is_cut_and_recorded(tmp_path, length):
    log_of(tmp_path, 5)
    content = (tmp_path / "audit-00000001.jsonl").read_bytes()
    last = content.splitlines(keepends=True)[-1]
    torn = last[:length]
    forget_anchor(tmp_path)
    (tmp_path / "audit-00000001.jsonl").write_bytes(content[: -len(last)] + torn)
    assert audit.verify(tmp_path).ok
    assert audit.verify(tmp_path).torn
    log_of(tmp_path, 1)
    report = audit.verify(tmp_path)
    assert report.ok
    assert not report.torn
    repair = next(audit.search(tmp_path, event="repair"))
    assert repair.details == {"file": "audit-00000001.jsonl", "bytes": len(torn), "text": torn.decode()}
    assert report.lines == 4 + 1 + 1


def test_a_last_line_that_cannot_be_continued_is_refused(tmp_path):
    log_of(tmp_path, 2)
    with open(tmp_path / "audit-00000001.jsonl", "a") as file:
        file.write("no event\n")
    with pytest.raises(BadInput) as error:
        audit.AuditLog(tmp_path, HUGE)
    assert error.value.code == "audit_broken"
    assert kinds(tmp_path) == [(3, "unreadable")]


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path):
    log = audit.AuditLog(tmp_path, HUGE)
    with pytest.raises(BadInput) as error:
        audit.AuditLog(tmp_path, HUGE, lock_wait_s=0.0)
    assert error.value.code == "audit_in_use"
    log.close()
    with pytest.raises(InfraFailure):
        log.write("stop", "service", "stop")
    log_of(tmp_path, 1)
    assert audit.verify(tmp_path).lines == 1


def test_many_threads_write_one_chain(tmp_path):
    with audit.AuditLog(tmp_path, SMALL) as log:

        def write(name: str) -> None:
            for i in range(8):
                log.write("feedback", name, "said", details={"i": i})

        threads = [threading.Thread(target=write, args=(f"user {n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert audit.verify(tmp_path).ok
    for n in range(4):
        assert [e.details["i"] for e in audit.search(tmp_path, actor=f"user {n}")] == list(range(8))


WRITER = """
import sys
from pixelis.config import AuditConfig
from pixelis.evolution.audit import AuditLog
log = AuditLog(sys.argv[1], AuditConfig(rotate_bytes=4000))
for i in range(10**6):
    log.write("update", "learner", "step", details={"i": i})
    print(i, flush=True)
"""


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_by_a_kill(tmp_path):
    generator = random.Random(0)
    acknowledged: list[int] = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        count = generator.randrange(5, 25)
        printed = [int(process.stdout.readline()) for _ in range(count)]
        process.send_signal(signal.SIGKILL)
        printed += [int(line) for line in process.stdout.read().splitlines() if line]
        process.wait()
        acknowledged.append(printed[-1])
    with audit.AuditLog(tmp_path, SMALL):
        pass
    assert audit.verify(tmp_path).ok
    steps = [event.details["i"] for event in audit.search(tmp_path, event="update")]
    second = steps.index(0, 1)
    for part, last in zip((steps[:second], steps[second:]), acknowledged, strict=True):
        assert part == list(range(len(part)))
        assert len(part) > last


def test_a_full_disk_appends_nothing_and_the_chain_goes_on(tmp_path, monkeypatch):
    with audit.AuditLog(tmp_path, HUGE) as log:
        log.write("start", "service", "start")
        real = os.fsync

        def full(handle: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(InfraFailure) as error:
            log.write("update", "learner", "lost")
        assert error.value.code == "audit_write"
        monkeypatch.setattr(os, "fsync", real)
        log.write("update", "learner", "kept")
    assert [event.action for event in audit.search(tmp_path)] == ["start", "kept"]
    assert audit.verify(tmp_path).ok


def run_job(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["audit", *words])
    try:
        job.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_command_verifies_and_searches(tmp_path, monkeypatch, capsys):
    log_of(tmp_path / "audit", 3)
    assert run_job(monkeypatch, str(tmp_path)) == 0
    output = capsys.readouterr().out
    assert "3 events in 1 files" in output
    assert "the chain is intact" in output
    searched = "--event", "update", "--since", "2020-01-01", "--json"
    assert run_job(monkeypatch, str(tmp_path / "audit"), *searched) == 0
    assert [json.loads(line)["details"]["step"] for line in capsys.readouterr().out.splitlines()] == [0, 1, 2]
    assert run_job(monkeypatch, str(tmp_path), "--actor", "learner") == 0
    assert capsys.readouterr().out.count('update success by "learner"') == 3

    put(tmp_path / "audit", [line.replace("learner", "nobody") for line in lines(tmp_path / "audit")])
    assert run_job(monkeypatch, str(tmp_path)) == 1
    output = capsys.readouterr()
    assert "audit-00000001.jsonl line 1: changed" in output.out
    assert "broken in 3 places" in output.err


@pytest.mark.parametrize(
    "words", [[], ["x", "y"], ["x", "--bogus"], ["x", "--event", "gossip"], ["x", "--since", "soon"]]
)
def test_a_wrong_command_line_is_an_error(words, monkeypatch, capsys):
    assert run_job(monkeypatch, *words) == 2
    assert "fix:" in capsys.readouterr().err
