"""`pixelis answer --url` against a deployed service: lines, resuming, refusals."""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted import KEY, Deployed, picture_url

from pixelis.jobs import answer as job
from pixelis.jobs import evaluate

pytestmark = pytest.mark.slow


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(base64.b64decode(picture_url().partition(",")[2]))
    earlier = [{"question": "say 7", "answer": "seven", "media": ["img0"]}]
    media = [{"id": "img0", "uri": str(tmp_path / "a.png")}]
    rows: list[dict[str, Any]] = [
        {"id": "picture", "question": "say 8,7,7,7", "media": media, "answers": ["no secret"]},
        {"id": "text", "question": "say 9", "media": []},
        {"id": "talk", "question": "recall", "media": media, "history": earlier},
        {"id": "refused", "question": "x" * 501, "media": media},
        {"id": "lost", "question": "say 7", "media": [{"id": "img0", "uri": str(tmp_path / "none.png")}]},
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(monkeypatch: pytest.MonkeyPatch, *words: str, key: str = KEY) -> None:
    monkeypatch.setenv("PIXELIS_API_KEY", key)
    monkeypatch.setattr(sys, "argv", ["pixelis answer", *words])
    job.main()


def lines(out: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}


def test_a_file_of_questions_is_answered_by_a_service(
    deployed: Deployed, questions: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = questions.parent / "out" / "answers.jsonl"
    words = (str(questions), "--url", deployed.url, "--out", str(out), "data.max_bad_rows=2")
    run(monkeypatch, *words, "--limit", "2")
    assert set(lines(out)) == {"picture", "text"}
    with out.open("ab") as file:
        file.write(b'{"a line that a crash cut')
    before = deployed.counters()["rollouts"]
    run(monkeypatch, *words)
    rows = lines(out)
    assert deployed.counters()["rollouts"] == before + 1
    for name, answer in (("picture", "7"), ("text", "9"), ("talk", "seven 1 of 1")):
        assert rows[name]["answer"] == answer
    assert rows["refused"]["error"]["code"] == "question_too_long"
    assert rows["picture"]["error"] is None
    assert rows["picture"]["trajectory"]["turns"][-1]["text"] == "<answer>7</answer>"
    assert "secret" not in out.read_text()
    assert "base64" not in out.read_text()
    assert "questions answered now, 2 before" in capsys.readouterr().err
    with pytest.raises(SystemExit):  # another service, another file
        run(monkeypatch, *words[:2], deployed.url + "/", *words[3:])


@pytest.mark.long
def test_a_service_is_evaluated_like_any_chat_model(
    deployed: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(base64.b64decode(picture_url().partition(",")[2]))
    media = [{"id": "img0", "uri": "a.png"}]
    truths = enumerate(["0", "1", "2", "8"])
    rows = [{"id": f"q{i}", "question": f"say {i}", "media": media, "answers": [t]} for i, t in truths]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"data.evaluate={tmp_path / 'rows.jsonl'}", f"run.dir={tmp_path / 'run'}", "run.name=own"]
    words += ["dialogue.system=none", f"evaluate.api.url={deployed.url}/v1"]
    words += ["evaluate.api.model=pixelis-nano", "evaluate.api.api_key_env=PIXELIS_API_KEY"]
    monkeypatch.setenv("PIXELIS_API_KEY", KEY)
    monkeypatch.setattr(sys, "argv", ["pixelis evaluate", *words])
    evaluate.main()
    assert "own: accuracy 0.750 [" in capsys.readouterr().out
    scores = [json.loads(line) for line in (tmp_path / "run/scores-own.jsonl").read_text().splitlines()]
    assert [row["answers"] for row in scores] == [["0"], ["1"], ["2"], ["3"]]
    files = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert KEY.encode() not in b"".join(files)


@pytest.mark.long
def test_what_cannot_go_on_ends_the_job(
    deployed: Deployed, questions: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = questions.parent / "answers.jsonl"
    for words, key, message in (
        ((str(questions), "--url", deployed.url, "--out", str(out)), "wrong", "PIXELIS_API_KEY"),
        ((str(questions), "--url", "localhost", "--out", str(out)), KEY, "no address"),
        (("cards:?split=test", "--url", deployed.url, "--out", str(out)), KEY, "--limit"),
        ((), KEY, "FILE"),
        ((str(questions), "--limit", "x"), KEY, "--limit"),
        ((str(questions), "--colour"), KEY, "--colour"),
    ):
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, *words, key=key)
        assert ended.value.code in (1, 2)
        assert message in capsys.readouterr().err
    assert not out.exists() or not out.read_text()
    os.environ.pop("PIXELIS_API_KEY", None)
