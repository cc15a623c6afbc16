"""Chat models get the same requests as ever from evaluation, with operations and without, and from imitation."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer
from PIL import Image

from pixelis.config import Config, parse
from pixelis.config.synthesis import TeacherConfig
from pixelis.datasets.media import open_media
from pixelis.datasets.questions import read_demonstrations
from pixelis.datasets.synthesis.executor import Executor
from pixelis.datasets.synthesis.imitation import Imitator
from pixelis.jobs import chat_agent
from pixelis.jobs.chat_agent import MULTIPLE, ChatAgent
from pixelis.jobs.chat_model import ChatModel
from pixelis.operations import Scene, execute, select
from pixelis.operations.media import first_look
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.records import Exchange, Media, Question

STORED = Path(__file__).with_name("chat_prompts.json")
ZOOM = '{"name":"zoom_in","arguments":{"bbox_2d":[100,100,900,900]}}'
AGAIN = '{"name":"zoom_in","arguments":{"bbox_2d":[100,100,900,900],"target":"obs1"}}'
READ = '{"name":"get_properties","arguments":{"object":"obj1"}}'
CALLS = {
    "qwen": [
        f"<think>I look.</think><tool_call>{ZOOM}</tool_call>\n<tool_call>{AGAIN}</tool_call>",
        f"<tool_call>{READ}</tool_call>",
    ],
    "mini_o3": [
        (
            '<think>I look.</think><grounding>{"bbox_2d": [0.1, 0.1, 0.9, 0.9], "source": '
            '"original_image"}</grounding>'
        ),
        '<grounding>{"bbox_2d": [0.1, 0.1, 0.9, 0.9], "source": "observation_7"}</grounding>',
    ],
    "pixel_reasoner": [
        'I look. <tool_call>{"name":"crop_image_normalized","arguments":'
        '{"bbox_2d":[0.1,0.1,0.9,0.9],"target_image":1}}</tool_call>',
        '<tool_call>{"name":"select_frames","arguments":{"target_frames":[2, 3]}}</tool_call>',
    ],
    "deepeyes": [
        '<think>I look.</think><tool_call>{"name":"image_zoom_in_tool","arguments":{"bbox_2d":[1,1,99,99]}}</tool_call>',
        '<tool_call>{"name":"image_rotate_tool","arguments":{"angle":90}}</tool_call>',
    ],
}
ANSWERS = {"pixel_reasoner": "It is \\boxed{7}"}


class LocalPool:
    """A toolbox pool in this process."""

    def __init__(self, config: Config, multiple: int, kind: str):
        self.config, self.multiple, self.kind = config, multiple, kind
        self.operations = {operation.name: operation for operation in select(config.toolbox.operations)}

    async def ready(self) -> None: ...

    def close(self) -> None: ...

    async def open(self, media: list[Media]) -> tuple[Any, Any]:
        opened = {item.id: open_media(item, self.config.toolbox) for item in media}
        return opened, first_look(opened, self.config.dialogue, self.multiple)

    async def execute(self, action: Any, images: Any, objects: Any, opened: Any) -> Any:
        scene = Scene(
            opened, images, objects, budget=PixelBudget(3136, 50176), multiple=self.multiple, kind=self.kind
        )
        return execute(action, scene, self.operations)


def plain(value: Any) -> Any:
    """Pictures as the type and the hash of their pixels, which no encoder changes."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items() if key != "seconds"}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, str) and value.startswith("data:image/"):
        kind, _, body = value.partition(",")
        picture = Image.open(io.BytesIO(base64.b64decode(body)))
        return f"{kind} {picture.size} {hashlib.sha256(picture.convert('RGB').tobytes()).hexdigest()[:16]}"
    return value


def question(folder: Path) -> Question:
    frames = []
    for i in range(4):
        Image.linear_gradient("L").rotate(90 * i).resize((64, 64)).convert("RGB").save(folder / f"{i}.png")
        frames.append(str(folder / f"{i}.png"))
    Image.radial_gradient("L").resize((168, 112)).convert("RGB").save(folder / "a.png")
    history = [Exchange(question="What is <image> this?", answer="A ring", media=["img0"])]
    media = [
        Media(id="img0", uri=str(folder / "a.png")),
        Media(id="vid0", kind="video", frames=frames, fps=2),
    ]
    return Question(id="q", question="And in <video> that one?", history=history, media=media, answers=["7"])


def config_for(server: ChatServer, dialect: str, system: str, calls: int) -> Config:
    api = {"url": server.url, "model": "m", "api_key_env": "", "tries": 1}
    budget = {"min_pixels": 3136, "max_pixels": 50176}
    dialogue = {"dialect": dialect, "system": system, "max_calls": calls, "frames": 3, "max_turns_test": 4}
    dialogue |= {"input": budget, "crop": budget, "frame": budget}
    return parse(
        {
            "evaluate": {"api": api},
            "dialogue": dialogue,
            "toolbox": {"operations": ["zoom_in", "select_frames", "get_properties", "rotate"]},
        }
    )


def evaluated(folder: Path, dialect: str, system: str, calls: int, operations: bool) -> Any:
    server = ChatServer(
        *CALLS[dialect], "I do not know.</tool_call>", ANSWERS.get(dialect, "<answer>7</answer>")
    )
    config = config_for(server, dialect, system, calls)
    model = ChatModel(config, folder)
    agent = ChatAgent(config, model)
    (group,) = agent.groups([question(folder)], 1, [3], lambda count: None, operations)
    model.close()
    server.close()
    return [server.requests, [t.model_dump(mode="json", exclude_defaults=True) for t in group.trajectories]]


def asked(folder: Path) -> Any:
    server = ChatServer("<think>So.</think><answer>7</answer>")
    model = ChatModel(config_for(server, "qwen", "auto", 1), folder)
    (group,) = model.groups([question(folder)], 1, [3], lambda count: None)
    model.close()
    server.close()
    return [server.requests, [t.model_dump(mode="json", exclude_defaults=True) for t in group.trajectories]]


def imitated(folder: Path, dialect: str) -> Any:
    replies = (
        [CALLS["qwen"][0].split("\n")[0], f"<tool_call>{AGAIN}</tool_call>"]
        if dialect == "qwen"
        else CALLS[dialect][:1]
    )
    server = ChatServer(
        "Let me think.", *replies, ANSWERS.get(dialect, "<think>Yes.</think><answer>7</answer>")
    )
    config = config_for(server, dialect, "auto", 1)
    settings = TeacherConfig(url=server.url, model="m", api_key_env="", calls_per_minute=60000, shots=2)
    imitator = Imitator(
        settings, Executor(dialogue=config.dialogue), read_demonstrations("cards:?split=train", 3, 5, 0.0)
    )
    sample = imitator.play(question(folder), 1)
    imitator.close()
    server.close()
    return [server.requests, sample.model_dump(mode="json", exclude_defaults=True)]


CASES = {f"evaluated {dialect}": (evaluated, dialect, "auto", 1, True) for dialect in CALLS}
CASES |= {
    "evaluated several calls": (evaluated, "qwen", "auto", 2, True),
    "evaluated without instructions": (evaluated, "deepeyes", "none", 1, True),
    "evaluated without operations": (evaluated, "qwen", "auto", 1, False),
    "asked": (asked,),
    **{f"imitated {dialect}": (imitated, dialect) for dialect in ("qwen", "mini_o3", "pixel_reasoner")},
}


def captured(case: str, folder: Path) -> Any:
    """The last request, which each earlier one begins, their number, and the episode."""
    build, *arguments = CASES[case]
    text = json.dumps(plain(build(folder, *arguments)), ensure_ascii=False)  # type: ignore[operator]
    text = re.sub(r"(<tools>).*?(</tools>)", r"\1\2", text.replace(str(folder), "FOLDER"))
    requests, result = json.loads(text)
    last = requests[-1]
    for request in requests:
        length = len(request["messages"])
        expected = {**last, "messages": last["messages"][:length], "temperature": 0}
        assert {**request, "temperature": 0} == expected
    return {"count": len(requests), "last": last, "result": result}


@pytest.mark.parametrize("case", CASES)
def test_requests_and_episodes_stay_as_they_are(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(chat_agent, "ToolboxPool", LocalPool)
    monkeypatch.setattr(chat_agent.cluster, "connect", lambda config: None)
    assert MULTIPLE == 28
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    result = captured(case, tmp_path)
    assert result == stored[case], json.dumps(result, ensure_ascii=False)  # what to store if it is meant
