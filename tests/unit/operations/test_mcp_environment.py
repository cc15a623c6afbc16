"""MCP servers as environments, with a server of the MCP SDK in processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pixelis.config import ToolboxConfig
from pixelis.errors import BadConfig, InfraFailure, MissingDependency, OperationError
from pixelis.operations.environment import Environment, environment_of, select_environments, start
from pixelis.records import Action, Question

pytestmark = pytest.mark.slow

SERVER = f"{Path(__file__).parents[1]}/mcp_pictures.py"
ENTRY = f"mcp:$TOKEN_OF_TEST {sys.executable} {SERVER}"
QUESTION = Question(id="q", question="?", environment="pictures")


def kind(entry: str = ENTRY, timeout_s: float = 40.0, name: str = "pictures") -> type[Environment]:
    return select_environments(ToolboxConfig(environments=[entry], timeout_s=timeout_s))[name]


@pytest.fixture(scope="module")
def pictures() -> Iterator[type[Environment]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKEN_OF_TEST", "secret")
        patch.setenv("OTHER_OF_TEST", "hidden")
        yield kind()


def call(environment: Environment, op: str, **arguments: object):
    return environment.execute(Action(op=op, target="", arguments=arguments))


def ended(pid: int) -> bool:
    """Whether a process has ended within ten seconds; a zombie has."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_tools_are_actions_and_each_episode_has_a_session(pictures: type[Environment]) -> None:
    assert [action.name for action in pictures.actions] == ["square", "mean", "fail"]
    with pytest.raises(OperationError, match="side") as error:
        pictures.actions[0].check({"side": "wide"})
    assert error.value.code == "bad_arguments"
    media = {"img0": np.full((8, 6, 3), 77, np.uint8)}
    one, first = start(pictures, QUESTION, media, 0)
    two, _ = start(pictures, QUESTION, media, 0)
    with closing(one), closing(two):
        assert first.text == "Count the squares."
        result = call(one, "square", side=5, color="blue")
        assert (result.text, result.done, result.reward) == ("square 1", False, 0.0)
        assert [image.shape for image in result.images] == [(5, 5, 3)]
        assert (result.images[0] == (0, 0, 255)).all()
        assert call(one, "square", side=3).text == "square 2"
        assert call(two, "square", side=3).text == "square 1"  # its own state
        assert call(one, "mean", picture="img0").text == "(77, 77, 77)"  # the question's picture was sent
        assert call(one, "fail", how="TOKEN_OF_TEST").text == "secret"
        for how in ("OTHER_OF_TEST", "raise"):  # the command gets only the variables that are named
            with pytest.raises(OperationError) as refused:
                call(one, "fail", how=how)
            assert refused.value.code == "tool_error"
        pids = [int(call(environment, "fail", how="pid").text) for environment in (one, two)]
        with pytest.raises(InfraFailure) as lost:
            call(one, "fail", how="exit")
        assert lost.value.code == "environment_lost"
        assert call(two, "square", side=2).text == "square 2"
    assert all(map(ended, pids))


@pytest.mark.long
def test_a_server_that_hangs_ends_its_episode_by_name() -> None:
    environment, _ = start(kind(f"mcp:{sys.executable} {SERVER}", timeout_s=30.0), QUESTION, {}, 0)
    with closing(environment):
        pid = int(call(environment, "fail", how="pid").text)
        with pytest.raises(InfraFailure) as late:
            call(environment, "fail", how="hang")
        assert late.value.code == "environment_timeout"
    assert ended(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of a parent's death")
@pytest.mark.long
def test_servers_die_with_a_process_that_is_killed() -> None:
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from operations.test_mcp_environment import *
environment, _ = start(kind("mcp:{sys.executable} {SERVER}"), QUESTION, {{}}, 0)
print(call(environment, "fail", how="pid").text, flush=True)
time.sleep(600)
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    assert ended(pid)


def test_a_server_on_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            entry = f"web=mcp+http://127.0.0.1:{port}/mcp"
            with pytest.raises(InfraFailure) as lost:  # it still starts
                kind(entry, name="web")
            assert lost.value.code == "environment_lost"
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.2)
            web = kind(entry, name="web")
            environment, _ = start(web, QUESTION, {}, 0)
            with closing(environment):
                assert call(environment, "square", side=4).images[0].shape == (4, 4, 3)
                server.kill()
                with pytest.raises(InfraFailure) as lost:
                    call(environment, "square", side=4)
                assert lost.value.code == "environment_lost"
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        ("mcp:no-such-command x", MissingDependency, "no command 'no-such-command'"),
        ("mcp:$NOT_SET_OF_TEST ls", BadConfig, "NOT_SET_OF_TEST' is no environment variable"),
        ("mcp:'ls", BadConfig, "No closing quotation"),
        ("mcp+http://example.com/mcp", BadConfig, "not encrypted"),
        ("mcp+http://127.example.com/mcp", BadConfig, "not encrypted"),
        ("mcp+https://token@example.com/mcp", BadConfig, "no environment variable"),
        ("mcp+ftp://example.com", BadConfig, "has no URL"),
        ("mcp:true", InfraFailure, "Connection closed"),
        (f"mcp:{sys.executable} {SERVER} mute", InfraFailure, "no answer in 1.5 s"),
    ],
)
def test_entries_that_cannot_be_used_are_named(entry: str, error: type, message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        kind(entry, timeout_s=2.0)
    assert raised.value.fix


def test_the_only_server_of_a_run_is_that_of_questions_that_name_nothing(
    pictures: type[Environment],
) -> None:
    one = {"pictures": pictures}
    plain = QUESTION.model_copy(update={"environment": None})
    assert environment_of(plain, one) is pictures
    assert environment_of(plain.model_copy(update={"tools": ["zoom_in"]}), one) is None
    assert environment_of(plain, {**one, "other": pictures}) is None
    assert os.environ.get("TOKEN_OF_TEST") == "secret"
