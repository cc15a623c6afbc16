"""The MCP server of docs/agents.md."""

from __future__ import annotations

import sys
from contextlib import closing

import numpy as np
import pytest

from pixelis.config import ToolboxConfig
from pixelis.operations.environment import select_environments
from pixelis.records import Action, Media, Question

pytestmark = pytest.mark.slow


def test_the_example_magnifies_a_region_of_the_question() -> None:
    entry = f"mcp:{sys.executable} docs/examples/mcp_server.py"
    settings = ToolboxConfig(environments=[entry], timeout_s=40.0)
    kind = select_environments(settings)["magnifier"]
    picture = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    question = Question(id="q", question="?", media=[Media(id="img0", uri="x.png")])
    with closing(kind()) as environment:
        environment.reset(question, {"img0": picture}, 0)
        arguments = {"picture": "img0", "bbox": [10, 5, 16, 9]}
        (shown,) = environment.execute(Action(op="magnify", target="", arguments=arguments)).images
    assert np.array_equal(shown[::2, ::2].shape, (4, 6, 3))
    assert abs(shown.mean() - picture[5:9, 10:16].mean()) < 3
