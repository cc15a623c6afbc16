"""A chat model behind an address uses operations: toolboxes run its calls, it gets their pictures."""

from __future__ import annotations

import base64
import io
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from chat_server import ChatServer

from pixelis.jobs import evaluate
from pixelis.records import Group

pytestmark = pytest.mark.slow

ARGUMENTS = '{"name": "zoom_in", "arguments": {"bbox_2d": [500, 0, 1000, 1000]}}'
CALL = f"<think>Too small.</think><tool_call>{ARGUMENTS}</tool_call>"


def pictures(messages: list[dict[str, Any]]) -> list[Image.Image]:
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    urls = [part["image_url"]["url"] for parts in contents for part in parts if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


def answer(messages: list[dict[str, Any]]) -> str:
    """Names the colour in the middle of the last picture; zooms into the right half first where it may."""
    shown = pictures(messages)
    if "zoom_in" in str(messages[0]["content"]) and len(shown) == 1:
        return CALL if "broken" not in str(messages[-1]) else "<tool_call>{</tool_call>"
    picture = shown[-1].convert("RGB")
    red, _, blue = picture.getpixel((picture.width // 2, picture.height // 2))  # type: ignore[misc]
    return f"<answer>{'red' if red > blue else 'blue'}</answer>"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    server = ChatServer(answer)
    yield server
    server.close()


@pytest.mark.usefixtures("ray_cluster")
def test_a_chat_model_gains_by_operations(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    picture = Image.new("RGB", (224, 112), "red")  # blue on the right, red in the middle
    picture.paste("blue", (140, 0, 224, 112))
    picture.save(tmp_path / "a.png")

    asked = {"q0": "What is on the right?", "q1": "What is there?", "broken": "A broken call?"}
    more = {"media": [{"id": "img0", "uri": "a.png"}], "answers": ["blue"]}
    rows = [{"id": name, "question": question, **more} for name, question in asked.items()]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    api = {"url": server.url, "model": "m", "api_key_env": "", "operations": "true"}
    keys = [f"evaluate.api.{name}={value}" for name, value in api.items()]
    keys += [f"data.evaluate={tmp_path / 'rows.jsonl'}", f"run.dir={tmp_path / 'run'}", "run.name=own"]
    keys += ["dialogue.input.max_pixels=100352", "dialogue.crop.max_pixels=100352", "evaluate.direct=true"]
    keys += ["dialogue.max_turns_test=2", "toolbox.workers=1", "toolbox.operations=[zoom_in]"]
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["evaluate", *keys])
    try:
        evaluate.main()
    finally:
        signal.signal(signal.SIGTERM, handler)
    out = capfd.readouterr().out
    assert "own: accuracy 0.667" in out
    assert "gain by operations" in out
    summary = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert (summary["direct"]["accuracy"], summary["operations_gain"]["mean"]) == (0.0, pytest.approx(2 / 3))
    lines = (tmp_path / "run/trajectories-own.jsonl").read_text().splitlines()
    zoomed, _, broken = (Group.model_validate_json(line).trajectories[0] for line in lines)
    assert [turn.role for turn in zoomed.turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert [image.id for image in zoomed.images] == ["img0", "obs1"]
    assert zoomed.observations[0].status == "ok"
    assert broken.turns[2].error == "bad_json"
    assert broken.observations[0].code == "bad_json"
    asked = [request["messages"] for request in server.requests]
    assert any(len(pictures(messages)) == 2 for messages in asked), "the crop is shown"
    assert any("error bad_json" in str(messages[-1]["content"]) for messages in asked)
