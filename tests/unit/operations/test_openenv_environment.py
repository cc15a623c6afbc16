"""Environments that openenv-core serves, in a Python of its own: it wants versions that ours cannot have.

`uv venv .venv/agents && uv pip install --python .venv/agents/bin/python openenv-core==0.3.0`
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pixelis.config import ToolboxConfig
from pixelis.errors import BadConfig, InfraFailure, OperationError
from pixelis.operations.environment import select_environments, start
from pixelis.records import Action, Question

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("PIXELIS_AGENTS_PYTHON", ROOT / ".venv/agents/bin/python"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs openenv-core in .venv/agents"),
]


@pytest.fixture
def served() -> Iterator[tuple[subprocess.Popen, str]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(PYTHON), f"{ROOT}/tests/unit/openenv_square.py", str(port)]
    with subprocess.Popen(command, env={"PATH": os.environ["PATH"]}, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(240):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.5)
            yield server, f"openenv+http://127.0.0.1:{port}"
        finally:
            server.kill()


def test_an_episode_is_a_session_of_the_server(served: tuple[subprocess.Popen, str]) -> None:
    server, entry = served
    (kind,) = select_environments(ToolboxConfig(environments=[entry])).values()
    assert kind.name == "Square"
    (action,) = kind.actions
    with pytest.raises(OperationError):
        action.check({"colour": 3})
    question = Question(id="q", question="?", environment="Square")
    (one, first), (two, same) = start(kind, question, {}, 0), start(kind, question, {}, 0)

    def paint(environment, color: int):
        return environment.execute(Action(op="step", target="", arguments={"color": color}))

    with closing(one), closing(two):
        goal = int(first.images[0][0, 0, 0])
        assert first.images[0].shape == (32, 32, 3)
        assert goal == same.images[0][0, 0, 0]
        with pytest.raises(OperationError, match="no such color"):
            paint(one, 256)
        result = paint(one, goal)
        assert (result.reward, result.done) == (1.0, True)
        assert '"step 1"' in result.text or result.text == "step 1"
        wrong = paint(two, (goal + 1) % 256)
        assert (wrong.reward, wrong.done) == (0.0, False)
        server.kill()
        with pytest.raises(InfraFailure) as lost:
            paint(two, goal)
        assert lost.value.code == "environment_lost"


def test_addresses_that_cannot_be_used_are_named() -> None:
    with pytest.raises(BadConfig, match="not encrypted"):
        select_environments(ToolboxConfig(environments=["openenv+http://example.com"]))
    with pytest.raises(InfraFailure, match=r"openenv\+http://127\.0\.0\.1:9"):
        select_environments(ToolboxConfig(environments=["openenv+http://127.0.0.1:9"]))
