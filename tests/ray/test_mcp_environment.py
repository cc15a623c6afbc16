"""Episodes with an MCP server in toolbox processes: who ends when something dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from dialogue_models import ScriptedSession, renderer

from pixelis.actors.episode_tools import EnvironmentTools
from pixelis.actors.toolbox_pool import ToolboxPool
from pixelis.config import DialogueConfig, parse
from pixelis.dialogue.agent import Limits, run_episode
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import InfraFailure
from pixelis.operations.environment import select_environments
from pixelis.records import Action, Question, StopReason

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve()
SERVER = f"{HERE.parents[1]}/unit/mcp_pictures.py"


@pytest.fixture(scope="module")
def mcp_pool(ray_cluster: None) -> Iterator[tuple[asyncio.Runner, ToolboxPool]]:
    entry = f"squares=mcp:{sys.executable} {SERVER}"
    config = parse({"toolbox": {"environments": [entry], "workers": 2, "timeout_s": 60.0}})
    path = os.pathsep.join([str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])
    runtime_env = {"env_vars": {"PYTHONPATH": path}}
    with (
        asyncio.Runner() as runner,
        closing(ToolboxPool(config, 32, "thousand", runtime_env=runtime_env)) as pool,
    ):
        runner.run(pool.ready())
        yield runner, pool


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long  # tests/unit/operations/test_mcp_environment.py: servers that answer, hang and die
def test_episodes_with_an_mcp_server_end_alone_and_leave_no_process(
    mcp_pool: tuple[asyncio.Runner, ToolboxPool],
) -> None:
    """The agent's loop plays them; a server that dies ends its episode unscored, a killed toolbox those it held."""
    base = renderer("nano")
    environments = select_environments(mcp_pool[1].config.toolbox)
    rendering = Renderer(base.tokenizer, base.spec, DialogueConfig(), [], environments)
    question = Question(id="q", question="Draw.", environment=None)  # the run's only server is its own

    def call(name: str, **arguments: object) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    async def body(pool: ToolboxPool) -> None:
        opened, _ = await pool.open([])
        scripts = [
            [call("square", side=40), call("square", side=50), "<answer>2</answer>"],
            [call("square", side=40), call("fail", how="exit"), "<answer>2</answer>"],
            [call("square", side=40), call("fail", how="raise"), "<answer>2</answer>"],
        ]
        played = []
        for lines in scripts:
            tools = EnvironmentTools(pool, opened, question)
            played.append(
                run_episode(
                    ScriptedSession(rendering, lines),
                    rendering,
                    question,
                    [],
                    [],
                    tools,
                    Limits(10, 300, 4000, 12),
                    SamplingParams(),
                    "g",
                    0,
                )
            )
        kept, lost, refused = (episode.trajectory for episode in await asyncio.gather(*played))
        assert (kept.stop_reason, kept.answer) == (StopReason.ANSWER, "2")
        assert [o.text for o in kept.observations] == ["square 1", "square 2"]
        assert [image.id for image in kept.images] == ["obs1", "obs2"]
        assert kept.turns[0].text.endswith("Count the squares.")
        assert (lost.stop_reason, lost.unscored) == (StopReason.ERROR, "environment_lost")
        assert [o.code for o in refused.observations] == [None, "tool_error"]
        assert refused.stop_reason is StopReason.ANSWER

        running = [EnvironmentTools(pool, opened, question) for _ in range(4)]
        await asyncio.gather(*(tools.reset() for tools in running))
        ask = Action(op="fail", target="", arguments={"how": "pid"})
        servers = [int((await tools.execute(ask, [], {}))[0].text) for tools in running]
        os.kill(running[0].worker.pid, signal.SIGKILL)
        for tools, server in zip(running, servers, strict=True):
            if tools.worker is running[0].worker:
                with pytest.raises(InfraFailure) as error:
                    await tools.execute(ask, [], {})
                assert error.value.code in ("environment_lost", "environment_crashed")
            else:
                assert (await tools.execute(ask, [], {}))[0].text == str(server)
                tools.close()
        deadline = time.monotonic() + 20
        while any(map(exists, servers)) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        assert not any(map(exists, servers))

    mcp_pool[0].run(body(mcp_pool[1]))
