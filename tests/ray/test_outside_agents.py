"""Training and evaluation with an agent that owns its loop: the record is that of our own loop, failures are counted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray

from pixelis.actors import placement
from pixelis.actors.canary import Canary
from pixelis.actors.group_views import UpdatePictures
from pixelis.config import absolute, load
from pixelis.errors import BadConfig
from pixelis.jobs import rft
from pixelis.jobs.driver import run_folder
from pixelis.records import Group, StopReason
from pixelis.telemetry import events

pytestmark = pytest.mark.slow

QUESTIONS = 4
AGENTS = '''
import asyncio
import os

async def ask(question, client):
    """The policy answers with its own operations; the agent adds nothing.

    Some requests carry the pictures, as those of frameworks do.
    """
    content = question.content
    if int(question.id.rsplit("-", 1)[-1]) % 2:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in question.pictures.values()]
        content = [*parts, {"type": "text", "text": question.text}]
    messages = [{"role": "user", "content": content}]
    await client.chat.completions.create(model="policy", messages=messages)

async def noted(question, client):
    await ask(question, client)
    with open(__file__ + ".played", "a") as file:
        print(question.id, question.answers, file=file)

async def moody(question, client):
    """Each of its ways to fail, and one reward, by the number of the question."""
    await ask(question, client)
    match int(question.id.rsplit("-", 1)[-1]) % 4:
        case 0:
            return 0.75
        case 1:
            raise RuntimeError("a bug")
        case 2:
            return float("nan")
        case 3:
            await asyncio.sleep(3)  # the others of its process have ended
            os._exit(1)
'''


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("agents") / "own_agents.py"
    file.write_text(AGENTS)
    return file


def evaluated(folder: Path, agent: str | None, *overrides: str, samples: int = 2) -> list[Group]:
    """The groups of the first questions, sampled at temperature 1."""
    own = [f"run.dir={folder}", "evaluate.sampling.temperature=1.0", *overrides]
    config = absolute(load("configs/nano/rft.yaml", own + ([f"rft.agent={agent}"] if agent else [])))
    folder.mkdir(parents=True, exist_ok=True)
    with placement.placed(config, learner=False) as actors:
        version = ray.get(actors.store.promoted.remote())
        call = actors.coordinator.evaluate.remote(
            "cards:zoom", QUESTIONS, version, True, seed=1, samples=samples
        )
        return ray.get(call)[0]


def records(groups: list[Group]) -> dict[str, Any]:
    return {
        f"{t.question_id} {number}": (t.token_ids(), t.loss_mask(), t.policy_version, len(t.images))
        for group in groups
        for number, t in enumerate(group.trajectories)
    }


def test_an_agent_that_only_asks_leaves_the_record_of_our_own_loop(
    ray_cluster: None, agents: Path, tmp_path: Path
) -> None:
    own = evaluated(tmp_path / "own", None)
    outside = evaluated(tmp_path / "outside", f"{agents}:ask")
    assert records(outside) == records(own)
    assert len({int(group.question.id.rsplit("-", 1)[-1]) % 2 for group in own}) == 2
    for theirs, ours in zip(outside, own, strict=True):
        for a, b in zip(theirs.trajectories, ours.trajectories, strict=True):
            assert a.behaviour_log_probs() == pytest.approx(b.behaviour_log_probs(), abs=1e-5)
            assert a.unscored is None
            assert [image.uri for image in a.images] == [image.uri for image in b.images]


@pytest.mark.long
def test_a_failure_of_an_agent_is_counted_and_never_a_reward(
    ray_cluster: None, agents: Path, tmp_path: Path
) -> None:
    groups = evaluated(tmp_path, f"{agents}:moody", samples=1)
    causes = Counter(t.unscored for group in groups for t in group.trajectories)
    assert causes == {None: 1, "agent_failed": 2, "agent_died": 1}
    rewards = [t.reward for group in groups for t in group.trajectories]
    assert sorted(r for r in rewards if r is not None) == [0.75]
    failures = list(events.read(tmp_path, "agent_failed"))
    assert len(failures) == 2
    assert any("a bug" in failure["error"] for failure in failures)


@pytest.mark.long
def test_programs_take_questions_over_http(ray_cluster: None, tmp_path: Path) -> None:
    """One rewards, one asks twice for its reward, one fails; a wrong key gets nothing."""
    seen: list[tuple[str, Any]] = []
    ready = threading.Event()

    async def harness() -> None:
        while not (tmp_path / "episodes.json").is_file():
            await asyncio.sleep(0.2)
        address = json.loads((tmp_path / "episodes.json").read_text())
        headers = {"Authorization": f"Bearer {address['key']}"}
        async with httpx.AsyncClient(base_url=address["url"], headers=headers, timeout=60) as http:
            refused = await http.post("/v1/episodes/next", json={}, headers={"Authorization": "Bearer x"})
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            for number in range(QUESTIONS):
                episode = (await http.post("/v1/episodes/next", json={"wait_s": 60})).json()
                content = [{"type": "image_url", "image_url": {"url": url}} for url in episode["images"]]
                content.append({"type": "text", "text": episode["question"]})
                async with openai.AsyncOpenAI(base_url=episode["base_url"], api_key=address["key"]) as client:
                    reply = await client.chat.completions.create(
                        model="policy", messages=[{"role": "user", "content": content}]
                    )
                assert reply.choices[0].message.content
                path = f"/v1/episodes/{episode['id']}"
                if number == 3:
                    await http.post(f"{path}/fail", json={"cause": "the browser crashed"})
                    continue
                rewards = [
                    (await http.post(f"{path}/reward", json={"reward": value})).json()["reward"]
                    for value in (number / 2, 9.0)
                ]
                seen.append((path, rewards))
        ready.set()

    thread = threading.Thread(target=asyncio.run, args=(harness(),), daemon=True)
    thread.start()
    groups = evaluated(tmp_path, "http", samples=1)
    assert ready.wait(30)
    assert [rewards for _, rewards in seen] == [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]
    trajectories = [t for group in groups for t in group.trajectories]
    assert sorted(t.reward for t in trajectories if t.reward is not None) == [0.0, 0.5, 1.0]
    assert Counter(t.unscored for t in trajectories) == {None: 3, "agent_failed": 1}
    assert all(t.stop_reason is not StopReason.ANSWER or t.learnt_tokens for t in trajectories)


@pytest.mark.long
@pytest.mark.parametrize("example", ["zoom_agent", "pydantic_agent"])
def test_an_agent_of_the_examples_trains(ray_cluster: None, tmp_path: Path, example: str) -> None:
    """With a tool of its own."""
    overrides = [f"run.dir={tmp_path / 'run'}", "data.train=cards:zoom"]
    overrides += [
        f"rft.agent=docs/examples/{example}.py:run",
        "toolbox.operations=[]",
        "rft.steps=1",
        "rft.prompts_per_step=2",
        "rft.group_size=2",
    ]
    config = absolute(load("configs/nano/rft.yaml", overrides))
    with run_folder(config, config.data.train), placement.placed(config) as actors:
        rft.run(config, actors)
    (step,) = events.read(tmp_path / "run", "step/policy")
    assert step["rollout/unusable_groups"] == 0


def test_an_agent_that_is_no_async_function_is_refused(agents: Path) -> None:
    for name, message in (("missing", "has no `missing`"), ("os", "no async function")):
        with pytest.raises(BadConfig, match=message):
            rft.checked(load("configs/nano/rft.yaml", [f"rft.agent={agents}:{name}"]))


@pytest.mark.long
def test_the_agent_of_a_service_plays_the_questions_of_its_canary(
    ray_cluster: None, agents: Path, tmp_path: Path
) -> None:
    """With its own tools alone it would answer nothing right by the policy's own loop."""
    few = ["evolution.canary.count=3", "evolution.canary.tolerance=1", "evolution.canary.risk=1"]
    own = [f"run.dir={tmp_path}", f"rft.agent={agents}:noted", *few]
    config = absolute(load("configs/nano/rft.yaml", own))
    with placement.placed(config, learner=False) as actors:
        canary = Canary(config, actors.generators[0], UpdatePictures())
        scores = asyncio.run(canary.judge(ray.get(actors.store.promoted.remote())))
    played = Path(f"{agents}.played").read_text().splitlines()
    assert sorted(played) == sorted(f"{name} None" for name in scores)
    assert None not in scores.values()
