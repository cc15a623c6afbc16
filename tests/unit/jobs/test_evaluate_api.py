"""`pixelis evaluate evaluate.api.url=...`: a model behind an OpenAI-compatible address."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer
from PIL import Image

from pixelis.config import parse
from pixelis.errors import InfraFailure
from pixelis.jobs import evaluate
from pixelis.jobs.chat_model import ChatModel
from pixelis.records import Exchange, Group, Media, Question

KEY = "sk-a-secret"


def picture_of(part: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))


def answer(messages: list[dict]) -> str:
    """The words that the test writes beside each picture's question: what the model says."""
    text = "".join(part.get("text", "") for part in messages[-1]["content"])
    return "The answer is red." if "stop sign" in text else "<think>so</think><answer>blue</answer>"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    server = ChatServer(answer)
    yield server
    server.close()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    Image.new("RGB", (40, 30), "red").save(tmp_path / "a.png")
    questions = [
        {"question": "What colour is the stop sign?", "answers": ["red"], "meta": {"category": "signs"}},
        {"question": "What colour is the sky?", "answers": ["blue"], "meta": {"category": "sky"}},
        {"question": "What colour is the sea?", "answers": ["green"], "meta": {"category": "sky"}},
    ]
    media = [{"id": "img0", "uri": "a.png"}]
    lines = [json.dumps({"id": f"q{i}", "media": media, **question}) for i, question in enumerate(questions)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path / "rows.jsonl"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
    try:
        evaluate.main()
    except SystemExit as error:
        return int(error.code or 0)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return 0


def words(server: ChatServer, rows: Path, folder: Path, key: str = "THEIR_KEY") -> list[str]:
    """Overrides of an evaluation of these rows by the server's model."""
    api = {"url": server.url, "model": "gpt", "api_key_env": key}
    keys = [f"evaluate.api.{name}={value}" for name, value in api.items()]
    return [*keys, f"data.evaluate={rows}", f"run.dir={folder}"]


@contextmanager
def chat_model(
    server: ChatServer, folder: Path, pixels: int | None = None, **api: Any
) -> Iterator[ChatModel]:
    keys = {"url": server.url, "model": "m", "api_key_env": "", "timeout_s": 10.0, **api}
    model = ChatModel(parse({"evaluate": {"api": keys}}), folder, max_pixels=pixels)
    yield model
    model.close()


@pytest.mark.slow
def test_a_model_behind_an_address_gets_the_table_and_the_files_of_a_policy(
    server: ChatServer,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)
    folder = tmp_path / "run"
    arguments = [*words(server, rows, folder), "run.name=colours", "evaluate.outputs=[r1_v]"]
    assert run(monkeypatch, *arguments) == 0
    out = capsys.readouterr().out
    assert "colours: accuracy 0.667 [" in out
    assert "  signs            1.000 [" in out
    summary = json.loads((folder / "evaluation.json").read_text())
    assert (summary["name"], summary["n"], summary["questions"]) == ("colours", 3, 3)
    assert summary["categories"]["sky"]["accuracy"] == 0.5
    lines = (folder / "trajectories-colours.jsonl").read_text().splitlines()
    groups = [Group.model_validate_json(line) for line in lines]
    assert [g.question.id for g in groups] == ["q0", "q1", "q2"]
    assert [t.rewards["accuracy"] for g in groups for t in g.trajectories] == [1.0, 1.0, 0.0]
    assert json.loads((folder / "r1_v_colours.json").read_text())["results"][0]["extracted_answer"] == "red"
    assert "data:image/" in (folder / "report.html").read_text()
    assert {request["model"] for request in server.requests} == {"gpt"}
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert not any(KEY.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert KEY not in out

    # Repeated, the same command asks nothing again; another sample is asked for each question.
    assert run(monkeypatch, *arguments) == 0
    assert len(server.requests) == 3
    assert run(monkeypatch, *arguments, "evaluate.samples=2") == 0
    assert len(server.requests) == 6
    assert "maj@2" in capsys.readouterr().out
    scores = [json.loads(line) for line in (folder / "scores-colours.jsonl").read_text().splitlines()]
    assert [row["scores"] for row in scores] == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    other = ["evaluate.seeds=[1, 2]", f"evaluate.baseline={folder}", f"run.dir={tmp_path / 'seeds'}"]
    assert run(monkeypatch, *arguments, *other) == 0
    out = capsys.readouterr().out
    assert "0.667 +- 0.000  (1: 0.667, 2: 0.667)" in out
    assert "minus baseline" in out
    assert len({request["seed"] for request in server.requests[6:]}) == 2
    assert run(monkeypatch, *arguments, "evaluate.questions=2") == 0
    notice = "\n  only the first questions of a larger set: evaluate.questions=0"
    assert f"on 2 questions, 2 episodes{notice}" in capsys.readouterr().out
    assert run(monkeypatch, *arguments, "evaluate.questions=0") == 0
    out = capsys.readouterr().out
    assert "on 3 questions, 3 episodes" in out
    assert "larger set" not in out
    assert len(server.requests) == 12
    assert run(monkeypatch, *arguments, "run.resume=false") == 0
    assert len(server.requests) == 15


@pytest.mark.slow
def test_a_wrong_key_ends_the_evaluation_at_once(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ChatServer((401, {}))
    monkeypatch.setenv("THEIR_KEY", KEY)
    arguments = words(server, rows, tmp_path / "run")
    assert run(monkeypatch, *arguments, "evaluate.api.concurrency=1") == 2
    assert len(server.requests) < 3
    error = capsys.readouterr().err
    assert "evaluate.api replied 401" in error
    assert KEY not in error
    monkeypatch.delenv("THEIR_KEY")
    assert run(monkeypatch, *arguments, "--dry-run") == 2
    assert "THEIR_KEY" in capsys.readouterr().err
    server.close()


def test_pictures_are_sent_as_their_files_are_and_shrunk_to_a_budget(
    server: ChatServer, rows: Path, tmp_path: Path
) -> None:
    history = [Exchange(question="And before?", answer="Nothing.", media=["img0"])]
    media = [Media(id=f"img{i}", uri=str(tmp_path / "a.png")) for i in range(2)]
    question = Question(id="q", question="Left <image> or not?", media=media, history=history)
    with chat_model(server, tmp_path) as model:
        trajectory = asyncio.run(model.episode(question, None, 0))
    (request,) = server.requests
    assert [message["role"] for message in request["messages"]] == ["user", "assistant", "user"]
    assert request["messages"][1]["content"] == "Nothing."
    kinds = [part["type"] for part in request["messages"][2]["content"]]
    assert kinds == ["text", "image_url", "text", "text"], "the picture stands where the question shows it"
    url = request["messages"][2]["content"][1]["image_url"]["url"]
    assert base64.b64decode(url.partition(",")[2]) == (tmp_path / "a.png").read_bytes()
    assert "seed" not in request
    assert [image.id for image in trajectory.images] == ["img0", "img1"]
    assert trajectory.turns[-1].text == "<think>so</think><answer>blue</answer>"

    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned, so sent upright
    Image.new("RGB", (40, 30), "red").save(tmp_path / "a.jpg", exif=exif)
    turned = Question(id="q", question="?", media=[Media(id="img0", uri=str(tmp_path / "a.jpg"))])
    with chat_model(server, tmp_path, pixels=300) as model:
        trajectory = asyncio.run(model.episode(question, 7, 0))
        asyncio.run(model.episode(turned, 7, 0))
    shown, upright = (picture_of(asked["messages"][0]["content"][0]) for asked in server.requests[1:])
    assert shown.size == (20, 15) == trajectory.images[0].view_size
    assert trajectory.images[0].source_size == (40, 30)
    assert upright.size == (15, 20)
    assert isinstance(server.requests[1]["seed"], int)


def body(**message: Any) -> bytes:
    finish = message.pop("finish_reason", "stop")
    return json.dumps({"choices": [{"message": message, "finish_reason": finish}]}).encode()


def test_replies_are_read_with_their_reasoning_and_their_reason_to_stop(tmp_path: Path) -> None:
    replies = [
        (429, {"Retry-After": "0"}),
        body(content="<answer>7</answer>", reasoning_content="seven"),
        body(content="<answer>7</answer>", finish_reason="length"),
        body(content=None),
        (400, {}),
        body(content=[{"type": "thinking", "thinking": []}, {"type": "text", "text": "<answer>7</answer>"}]),
    ]
    server = ChatServer(*replies)
    question = Question(id="q", question="How many?", answers=["7"])
    with chat_model(server, tmp_path, parameters={"reasoning_effort": "low", "max_tokens": 9}) as model:
        right, cut, empty, refused, parts = (
            asyncio.run(model.episode(question, None, sample)) for sample in range(5)
        )
    assert (right.answer, right.stop_reason.value) == ("7", "answer")
    assert right.turns[-1].text == "<think>seven</think>\n<answer>7</answer>"
    assert (cut.answer, cut.stop_reason.value, cut.unscored) == (None, "length", None)
    assert (empty.answer, empty.stop_reason.value) == (None, "no_action")
    assert (refused.stop_reason.value, refused.unscored) == ("error", "api_refused")
    assert parts.answer == "7"
    temperatures = {(r["temperature"], r["max_tokens"], r["reasoning_effort"]) for r in server.requests}
    assert temperatures == {(0.0, 9, "low")}, "retries change nothing"
    server.close()


def test_a_service_that_is_away_ends_the_evaluation_and_keeps_what_was_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pixelis.jobs.chat_model.MAX_FAILURES_IN_A_ROW", 3)
    server = ChatServer("<answer>7</answer>", *[(503, {})] * 3, "<answer>7</answer>")
    questions = [Question(id=f"q{i}", question=f"How many {i}?", answers=["7"]) for i in range(5)]
    with (
        chat_model(server, tmp_path, tries=1, concurrency=1) as model,
        pytest.raises(InfraFailure, match="3 questions in a row") as error,
    ):
        model.groups(questions, 1, [], lambda count: None)
    assert "repeat the command" in (error.value.fix or "")
    with chat_model(server, tmp_path, tries=1, concurrency=1) as model:
        groups = model.groups(questions, 1, [], lambda count: None)
    assert [t.answer for g in groups for t in g.trajectories] == ["7"] * 5
    asked = [request["messages"][0]["content"][0]["text"] for request in server.requests]
    assert len([text for text in asked if "How many 0?" in text]) == 1
    server.close()


@pytest.mark.slow
def test_a_stopped_evaluation_does_not_wait_for_a_slow_service(rows: Path, tmp_path: Path) -> None:
    server = ChatServer(3600.0)
    command = [sys.executable, "-m", "pixelis.jobs.evaluate", *words(server, rows, tmp_path / "run", key="")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while not server.requests:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert "stopped" in process.communicate(timeout=120)[1]
        assert process.returncode == 130
    finally:
        process.kill()
        server.close()


def test_no_more_requests_than_allowed_are_in_flight(tmp_path: Path) -> None:
    lock, active, peak = threading.Lock(), 0, 0

    def reply(messages: list[dict]) -> str:
        nonlocal active, peak
        with lock:
            active += 1
            peak = max(peak, active)
        time.sleep(0.01)  # others have time to arrive
        with lock:
            active -= 1
        return "<answer>7</answer>"

    server = ChatServer(reply)
    questions = [Question(id=f"q{i}", question=f"How many {i}?") for i in range(20)]
    with chat_model(server, tmp_path, concurrency=3) as model:
        groups = model.groups(questions, 2, [1, 2], lambda count: None)
    server.close()
    assert [len(group.trajectories) for group in groups] == [4] * 20
    assert len(server.requests) == 80
    assert 1 <= peak <= 3
    assert len({(r["seed"], r["messages"][0]["content"][0]["text"]) for r in server.requests}) == 80
