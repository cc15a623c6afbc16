"""The agent that `pixelis serve` serves without a file: it looks before it answers the page's examples."""

from __future__ import annotations

from pathlib import Path

import pytest

import pixelis
from pixelis.config import load
from pixelis.serve.routes.page import SIX_OPERATIONS, page_files, page_settings

CONFIG = "configs/mini/serve.yaml"
PAGE = Path(pixelis.__file__).parent / "serve" / "page"
ANSWERS = {
    "example.jpg": ("3", ["zoom_in"]),
    "example-words.jpg": ("Theatre Garden 306", ["read_text"]),
    "example-things.jpg": ("red", ["segment_object_at", "get_properties"]),
    "example-clip.mp4": ("8", ["select_frames"]),
}


def test_every_example_of_the_page_has_its_file() -> None:
    examples = page_settings(load(CONFIG), needs_key=False)["examples"]
    assert {example["file"] for example in examples} == set(ANSWERS)
    assert set(ANSWERS) <= set(page_files())


@pytest.fixture(scope="module")
def agent() -> pixelis.Agent:
    return pixelis.Agent.load(config=CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize("file", ANSWERS)
def test_the_packaged_agent_looks_and_answers(agent: pixelis.Agent, file: str) -> None:
    answer, operations = ANSWERS[file]
    media = {"videos" if file.endswith(".mp4") else "images": [PAGE / file]}
    reply = agent.ask(SIX_OPERATIONS[file], **media)
    assert reply.answer == answer
    assert [action.op for action, _ in reply.trajectory.executed] == operations
