"""Environments in toolbox processes: their state stays with the episode, and their end has a name."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import ray

from pixelis.actors import placement
from pixelis.actors.episode_tools import EnvironmentTools
from pixelis.actors.generator import Generator
from pixelis.actors.generator_router import GeneratorRouter, RolloutRequest, RolloutResult
from pixelis.actors.policy_store import PolicyStore
from pixelis.actors.toolbox_pool import ToolboxPool
from pixelis.config import absolute, load, parse
from pixelis.datasets.demonstrations import Player
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import InfraFailure
from pixelis.jobs import rft
from pixelis.jobs.driver import run_folder
from pixelis.nano import BASE
from pixelis.operations import Environment, EnvironmentAction, EnvironmentResult, OperationArguments
from pixelis.operations.environment import select_environments
from pixelis.records import Action, Demonstration, Question, StopReason
from pixelis.telemetry import events

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve()
WALK = f"{HERE.parents[2]}/docs/examples/grid_walk.py:GridWalk"
BROWSER = HERE.parents[2] / "docs/examples/browser.py"


class AddArguments(OperationArguments):
    number: int


class Add(EnvironmentAction):
    name = "add"
    description = "Add a number."
    Arguments = AddArguments


class Counter(Environment):
    """Counts; some numbers are harmful."""

    name = "counter"
    actions = (Add,)

    def reset(self, question, media, seed):
        self.total = 0
        return EnvironmentResult("Count.")

    def execute(self, action):
        number = action.arguments["number"]
        if number == 13:
            os._exit(1)
        if number == 14:
            time.sleep(3600)
        if number == 15:
            self.ballast = np.ones(10**9)
        self.total += number
        return EnvironmentResult(str(self.total), reward=number / 2, done=self.total >= 10)


class Crowd(Environment):
    """Writes how many of its episodes the process has to the file that its question names."""

    name = "crowd"
    actions = (Add,)
    episodes = 0

    def reset(self, question, media, seed):
        Crowd.episodes += 1
        with open(question.meta["file"], "a") as file:
            print(Crowd.episodes, file=file)
        return EnvironmentResult()

    def close(self):
        Crowd.episodes -= 1


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[tuple[asyncio.Runner, ToolboxPool]]:
    limits = {"timeout_s": 2.0, "memory_bytes": 250_000_000}
    config = parse({"toolbox": {"environments": [f"{HERE}:Counter"], "workers": 2, **limits}})
    path = os.pathsep.join([str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])
    runtime_env = {"env_vars": {"PYTHONPATH": path}}
    with (
        asyncio.Runner() as runner,
        closing(ToolboxPool(config, 32, "thousand", runtime_env=runtime_env)) as pool,
    ):
        runner.run(pool.ready())
        yield runner, pool


async def begin(pool: ToolboxPool, count: int) -> list[EnvironmentTools]:
    opened, _ = await pool.open([])
    question = Question(id="q", question="", environment="counter")
    tools = [EnvironmentTools(pool, opened, question) for _ in range(count)]
    results = await asyncio.gather(*(t.reset() for t in tools))
    assert {observation.text for observation, _ in results} == {"Count."}
    return tools


async def add(tools: EnvironmentTools, number: int) -> tuple[str, float, bool]:
    observation, _ = await tools.execute(Action(op="add", target="", arguments={"number": number}), [], {})
    return observation.text, observation.data["reward"], observation.data["done"]


def test_each_episode_keeps_its_state_on_the_worker_that_holds_it(
    pool: tuple[asyncio.Runner, ToolboxPool],
) -> None:
    async def body(pool: ToolboxPool) -> None:
        tools = await begin(pool, 6)
        assert sorted(len(worker.environments) for worker in pool.workers) == [3, 3]
        for turn in range(1, 4):
            results = await asyncio.gather(*(add(t, n) for n, t in enumerate(tools)))
            assert results == [(str(n * turn), n / 2, n * turn >= 10) for n in range(6)]
        for t in tools:
            t.close()
            t.close()
        assert not any(worker.environments for worker in pool.workers)
        with pytest.raises(InfraFailure) as error:
            await add(tools[0], 1)
        assert error.value.code == "environment_lost"

    pool[0].run(body(pool[1]))


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (13, "environment_crashed"),
        pytest.param(14, "environment_timeout", marks=pytest.mark.long),
        (15, "environment_out_of_memory"),
    ],
)
def test_the_end_of_a_process_is_that_of_its_episodes_alone(
    pool: tuple[asyncio.Runner, ToolboxPool], number: int, code: str
) -> None:
    async def body(pool: ToolboxPool) -> None:
        tools = await begin(pool, 4)
        await asyncio.gather(*(add(t, 1) for t in tools))
        with pytest.raises(InfraFailure) as error:
            await add(tools[0], number)
        assert error.value.code == code
        for t in tools[1:]:
            if t.worker is tools[0].worker and number != 15:
                with pytest.raises(InfraFailure) as lost:
                    await add(t, 1)
                assert lost.value.code == "environment_lost"
            else:
                assert (await add(t, 1))[0] == "2"
        for t in tools:
            t.close()
        (fresh, *_) = await begin(pool, 2)  # the replaced process serves new episodes
        assert (await add(fresh, 3))[0] == "3"

    pool[0].run(body(pool[1]))


@pytest.mark.long  # starts a generator
def test_no_more_environments_are_open_than_episodes_are_decoded(ray_cluster: None, tmp_path: Path) -> None:
    """Pages of a browser or processes of a command, of which a batch of rollouts would open hundreds."""
    store = PolicyStore.options(name="crowd-store").remote(str(tmp_path))  # type: ignore[attr-defined]
    overrides = [f"toolbox.environments=['{HERE}:Crowd']", "toolbox.workers=1", "toolbox.cpus=0"]
    overrides += ["engine.max_num_seqs=3", f"run.dir={tmp_path}"]
    config = load("configs/nano/base.yaml", overrides)
    actor = Generator.options(num_cpus=0).remote(config, "crowd-store")  # type: ignore[attr-defined]

    async def play() -> list[StopReason]:
        router = GeneratorRouter([actor], follows=True)
        meta = {"file": str(tmp_path / "episodes")}
        question = Question(id="q", question="?", environment="crowd", meta=meta)
        request = RolloutRequest(question, "g", 8, SamplingParams(max_tokens=4), max_turns=1)
        (result,) = [item async for item in router.episodes(request) if isinstance(item, RolloutResult)]
        return [trajectory.stop_reason for trajectory in result.group.trajectories]

    try:
        ray.get([actor.ready.remote(), actor.load.remote(0)], timeout=120)
        reasons = asyncio.run(asyncio.wait_for(play(), 120))
    finally:
        ray.kill(actor)
        ray.kill(store)
    assert StopReason.ERROR not in reasons
    counts = [int(line) for line in (tmp_path / "episodes").read_text().split()]
    assert (len(counts), max(counts)) == (8, 3)


@pytest.mark.long  # the other tests play episodes of an environment and its demonstrations
@pytest.mark.timeout(900)
def test_a_policy_trains_in_an_environment(ray_cluster: None, tmp_path: Path) -> None:
    """Rows with an environment and without one in one run."""
    walk = {"question": "Walk.", "answers": ["x"], "environment": "grid_walk"}
    rows = [
        walk | {"id": "w0"},
        walk | {"id": "w1"},
        {"id": "p", "question": "Which digit?", "answers": ["7"]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    overrides = [f"run.dir={tmp_path / 'run'}", f"data.train={file}", f"data.evaluate={file}"]
    overrides += ["rft.evaluate_every=1", "rft.evaluate_first=true", "evaluate.questions=3"]
    overrides += ["rft.steps=1", "rft.prompts_per_step=3", "rft.group_size=2", "dialogue.max_turn_tokens=16"]
    overrides += ["telemetry.trajectories=8"]
    overrides += ["rft.loss.entropy=0.001"]  # so that the learner also computes rollouts without an advantage
    overrides += ["toolbox.operations=[]", f"toolbox.environments=['{WALK}']"]
    overrides += ["rewards.weights={accuracy: 0.5, format: 0.5, environment: 1.0}"]
    config = absolute(load("configs/nano/rft.yaml", overrides))
    with run_folder(config, config.data.train), placement.placed(config) as actors:
        rft.run(config, actors)
    (step,) = events.read(tmp_path / "run", "step/policy")
    assert "reward/environment" in step
    assert step["learner/sequences"] == 6
    assert [event["step"] for event in events.read(tmp_path / "run", "evaluation")] == [0, 1]
    pages = [page.read_text(encoding="utf-8") for page in (tmp_path / "run" / "trajectories").glob("*.html")]
    assert any("Move the blue square to the red one." in page for page in pages), (
        "the policy was not shown the environment"
    )
    learnt = (tmp_path / "run/trajectories/trained_00000001.html").read_text(encoding="utf-8")
    drifts = re.findall(r"drift (\S+) a token", learnt)
    assert len(drifts) == 6
    assert all(float(drift) < 1e-3 for drift in drifts)


def collect(count: int, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BROWSER), str(count)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)


@pytest.mark.long  # Chromium takes half of a minute on a busy machine
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium: install chromium")
def test_a_browser_rewards_the_right_button_alone() -> None:
    """SFT plays what the example collects; of three buttons one earns a reward, and a click beside them none."""
    config = load("docs/examples/browser.yaml", [f"toolbox.environments=['{BROWSER}:Browser']"])
    browser, player = select_environments(config.toolbox)["browser"], Player(config, str(BASE))
    rows = [Demonstration.model_validate_json(line) for line in collect(2).stdout.splitlines()]
    assert len(rows) == 2
    for row in rows:
        trajectory, views = player.play(row)
        assert [o.data["reward"] for o in trajectory.observations] == [1.0]
        assert [trajectory.answer] == row.answers
        assert not np.array_equal(*views)
        buttons = re.findall(r"left:(\d+)px;top:(\d+)px;background:(\w+)", row.meta["html"])
        assert len(buttons) == 3
        corner = ("223", "-20", "none")  # without a button
        for left, top, color in [*buttons, corner]:
            episode = browser()
            episode.reset(row, {}, 0)
            x, y = round((int(left) + 32) * 1000 / 256), round((int(top) + 20) * 1000 / 256)
            result = episode.execute(Action(op="click", arguments={"x": x, "y": y}))
            is_right = f" {color} " in row.question
            assert (result.reward, result.done) == (float(is_right), not is_right and color != "none")
            assert len(result.images) == 1
            episode.close()
    example = sys.modules[browser.__module__]
    example.THREAD.submit(lambda: example.chromium().browser.close()).result()


def test_without_chromium_the_browser_says_what_to_install(tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path), "PLAYWRIGHT_BROWSERS_PATH": str(tmp_path)}
    result = collect(1, {**os.environ, **nowhere})
    assert result.returncode == 1
    assert "MissingDependency: Chromium does not start" in result.stderr
    assert "fix: apt install chromium, or playwright install chromium" in result.stderr
