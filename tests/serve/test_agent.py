"""The agent with scripted generators, real memory shards and the real Embedder."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from scripted import picture_url

from pixelis.actors.embedder import Embedder
from pixelis.actors.memory_shard import place_shards
from pixelis.config import load
from pixelis.dialogue.session import SamplingParams
from pixelis.memory import Entry
from pixelis.records import UpdateTask, new_id
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import AgentQuery, Answer, Backends, TurnEvent

pytestmark = pytest.mark.slow


@ray.remote(num_cpus=0)
class RecordingEvolution:
    """Records the experiences from which an Evolution actor would learn."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    async def submit(self, task: UpdateTask, *others: Any) -> bool:
        self.ids.append(task.experience_id)
        return True

    async def received(self) -> list[str]:
        return self.ids


@pytest.fixture(scope="module")
def embedder(ray_cluster: None) -> Iterator[str]:
    actor = Embedder.options(name="agent-embedder", num_cpus=0.1).remote(load(None, []))
    ray.get(actor.health.remote())
    yield "agent-embedder"
    ray.kill(actor)


class Environment:
    """A memory and a recording Evolution for the agents of a test."""

    def __init__(self, folder: Path, name: str, generators: tuple[str, ...], embedder: str, *overrides: str):
        # A long timeout, because most tests do not depend on it and the machine may be busy.
        own = [f"run.dir={folder}", "memory.cpus=0", "evolution.cold_start=0", "memory.timeout_s=5"]
        self.overrides = [*own, *overrides]
        names, self.shards = place_shards(load(None, self.overrides), name)
        self.evolution = RecordingEvolution.options(name=f"{name}-evolution").remote()
        ray.get([shard.health.remote() for shard in self.shards])
        self.backends = Backends(generators, "pixelis", f"{name}-evolution", tuple(names), embedder)

    def agent(self, *overrides: str, **changes: Any) -> Agent:
        return Agent(load(None, [*self.overrides, *overrides]), dataclasses.replace(self.backends, **changes))

    def close(self) -> None:
        for actor in [*self.shards, self.evolution]:
            ray.kill(actor)

    def totals(self) -> dict[str, int]:
        stats = ray.get([shard.stats.remote() for shard in self.shards])
        return {name: sum(s[name] for s in stats) for name in ("size", "added", "retrievals", "successes")}

    def change(self, before: dict[str, int]) -> dict[str, int]:
        return {name: count - before[name] for name, count in self.totals().items()}


@pytest.fixture(scope="module")
def environment(
    backends: Backends, embedder: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Environment]:
    folder = tmp_path_factory.mktemp("agent")
    env = Environment(folder, "agent-tests", backends.generators, embedder, "memory.shards=2")
    yield env
    env.close()


def ask(question: str, size: tuple[int, int] = (40, 30), **changes: Any) -> AgentQuery:
    options = {"samples": 4, "sampling": SamplingParams(), "max_turns": 3, **changes}
    return AgentQuery(question, [picture_url(size)], **options)


def agent_without_memory(backends: Backends) -> Agent:
    return Agent(load(None, []), Backends(backends.generators, backends.namespace))


def run(work: Coroutine[Any, Any, Any], seconds: float = 30.0) -> Any:
    return asyncio.run(asyncio.wait_for(work, seconds))


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 25.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.02)


# -- answers and failures ------------------------------------------------------------------------------------


def test_requests_in_progress_share_a_decoded_picture(backends: Backends) -> None:
    async def decode() -> None:
        agent = agent_without_memory(backends)
        first, second = await asyncio.gather(agent.decode(ask("say 7")), agent.decode(ask("say 8")))
        other = await agent.decode(ask("say 7", (50, 30)))
        assert first.full == second.full != other.full
        ended = first.full["img0"].hex()
        del first, second
        gc.collect()
        assert (await agent.decode(ask("say 7"))).full["img0"].hex() != ended, "it outlived its requests"

    run(decode())


def test_a_generator_that_dies_during_a_stream_starts_a_new_attempt(backends: Backends) -> None:
    generator = ray.get_actor(backends.generators[0])

    async def back() -> bool:  # for the other tests
        try:
            return bool(await generator.health.remote())
        except ray.exceptions.RayActorError:
            return False

    async def watch() -> list[Any]:
        stream = agent_without_memory(backends).stream(ask("say 7 fall0", samples=2))
        items = [item async for item in stream]
        await until(back)
        return items

    *events, answer = run(watch())
    attempts = [event.attempt for event in events]
    assert attempts == sorted(attempts)
    assert attempts[0] == 0
    assert sum(event.attempt == 1 for event in events if isinstance(event, TurnEvent)) == 6
    assert answer.verdict.answer == "7"


# -- memory and evolution ------------------------------------------------------------------------------------


def test_a_cold_start_answers_with_the_first_answer_and_learns_nothing(environment: Environment) -> None:
    before = environment.totals()
    threshold = before["size"] + 2

    async def scenario() -> list[Answer]:
        answers = []
        for _ in range(3):
            agent = environment.agent(f"evolution.cold_start={threshold}", "memory.write_timeout_s=30")
            answers.append(await agent.answer(ask("say none,7,7,7 when it is cold")))
            await agent.drain()
        assert agent.memory is not None
        stored = [await agent.memory.get(answer.experience_id or "") for answer in answers]
        assert [(e.cold_start, e.priority) for e in stored if e] == [(True, 0.9), (True, 0.9), (False, 0.375)]
        return answers

    *cold, warm = run(scenario())
    for answer in cold:
        verdict = answer.verdict
        assert (verdict.strategy, verdict.reason, verdict.neighbours) == ("direct", "cold_start", 0)
        assert verdict.answer == answer.winner.answer == "7", "a sample without an answer is no answer"
        assert (len(verdict.votes), answer.retrieval_id, answer.cold_start) == (1, "", True)
    assert warm.verdict.strategy == "majority"
    assert len(warm.group.trajectories) == 4
    assert {cold[0].experience_id, cold[1].experience_id} <= {n.experience.id for n in warm.neighbours}
    assert all(v.source == "sample" for v in warm.verdict.votes)  # cold answers have no vote
    learnt = set(ray.get(environment.evolution.received.remote()))
    assert warm.experience_id in learnt
    assert not {cold[0].experience_id, cold[1].experience_id} & learnt
    assert environment.change(before)["successes"] == 0


def test_a_repeated_question_is_found_and_credited_once(environment: Environment) -> None:
    before = environment.totals()

    async def scenario() -> Answer:
        agent = environment.agent("evolution.neighbours.k=1")
        await agent.answer(ask("say 7 once more, joe.blow@example.org", (31, 41), remember=True))
        await agent.drain()
        middle = environment.totals()
        answer = await agent.answer(ask("say 7 once more, joe.blow@example.org", (31, 41)))
        await agent.drain()
        assert environment.change(middle)["successes"] == 1
        return answer

    answer = run(scenario())
    assert [n.similarity for n in answer.neighbours] == [pytest.approx(1.0, abs=1e-4)]
    assert [(v.answer, v.id) for v in answer.verdict.votes if v.source == "neighbour"] == [
        ("7", answer.neighbours[0].experience.id)
    ]
    assert (answer.verdict.neighbours, answer.verdict.partial) == (1, False)
    assert environment.change(before)["size"] == 2


@pytest.mark.parametrize(
    ("asked_by", "planted"),
    [("app.ann", "7"), ("web.bob", "7"), ("app.bob", "8")],
    ids=["another user", "another key", "the same user"],
)
def test_seven_experiences_decide_the_answers_of_their_own_user_alone(
    environment: Environment, asked_by: str, planted: str
) -> None:
    """They are about the same picture and say 8, where all samples say 7."""

    async def scenario() -> Answer:
        agent = environment.agent()
        assert agent.memory is not None
        query = ask(f"say 7 to {asked_by}", user=asked_by, samples=3)
        first = await agent.answer(query)
        await agent.drain()
        own = await agent.memory.get(first.experience_id or "")
        assert own is not None
        vector = await agent.retrieval.vector(own.question, (await agent.decode(query)).views)
        wrong = {"user": "app.bob", "verdict": own.verdict.model_copy(update={"answer": "8"})}
        await agent.memory.delete([own.id])
        copies = [own.model_copy(update={"id": new_id("exp"), **wrong}) for _ in range(7)]
        await agent.memory.add([Entry(experience, vector) for experience in copies])
        return await agent.answer(query)

    answer = run(scenario())
    assert [n.experience.verdict.answer for n in answer.neighbours] == ["8"] * 5
    assert answer.verdict.answer == planted


@pytest.mark.long
def test_a_dead_memory_or_embedder_costs_only_its_timeout(environment: Environment, tmp_path: Path) -> None:
    backends = environment.backends
    doomed = Environment(tmp_path, "agent-doomed", backends.generators, backends.embedder or "")

    async def scenario(agent: Agent, kill: bool) -> None:
        await agent.answer(ask("say 7", remember=not kill))
        await agent.drain()
        for shard in doomed.shards if kill else []:
            ray.kill(shard)
        started = time.monotonic()
        answer = await agent.answer(ask("say 7", samples=3, remember=not kill))
        assert time.monotonic() - started < 20, "0.3 s for each of its calls, and what a busy machine adds"
        assert (answer.verdict.partial, answer.verdict.answer, len(answer.verdict.votes)) == (True, "7", 3)
        await agent.drain()

    try:
        run(scenario(environment.agent("memory.timeout_s=0.3", embedder="agent-nobody"), kill=False))
        run(scenario(doomed.agent("memory.timeout_s=0.3"), kill=True))
    finally:
        doomed.close()
