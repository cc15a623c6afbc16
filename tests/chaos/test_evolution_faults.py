"""Bad updates in online learning (F13), with real generators, learner, canary and agent.

Policy and canary answer 7 to every question, so that a poisoned update costs all of its accuracy.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import ray
from placed_actors import wait_until

from pixelis.actors import cluster
from pixelis.actors.evolution import Evolution
from pixelis.actors.generator import Generator
from pixelis.actors.memory_shard import place_shards
from pixelis.actors.policy_store import PolicyStore
from pixelis.actors.update_source import UpdateSource
from pixelis.actors.weights import CandidatePublisher
from pixelis.config import Config, LossConfig, load
from pixelis.datasets import cards
from pixelis.datasets.demonstration_stream import train_sample
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.questions import read_questions
from pixelis.dialogue.session import SamplingParams
from pixelis.evolution import audit
from pixelis.evolution.privacy import clean_png
from pixelis.operations.image import data_url
from pixelis.policy.adapters import load_adapter, save_adapter
from pixelis.policy.model_path import resolve
from pixelis.policy.train_step import Trainer
from pixelis.records import Demonstration, PolicyVersion, Question, Step, VersionStatus
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import AgentQuery, Answer, Backends

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NANO = Path(__file__).parents[2] / "configs" / "nano" / "base.yaml"
WATCH_S = 2.0
RecordFigures = Callable[..., None]


def canary_questions() -> list[Question]:
    questions = itertools.islice(read_questions("cards:?split=train&seed=1"), 8)
    changes = {"answers": ["7"], "annotations": None, "meta": {}}
    return [question.model_copy(update=changes) for question in questions]


def config(folder: Path, *overrides: str) -> Config:
    (folder / "canary.jsonl").write_text("".join(q.model_dump_json() + "\n" for q in canary_questions()))
    # So few questions rule nothing out
    canary = {"questions": f"{folder}/canary.jsonl", "count": 8, "every": 1, "risk": 1, "watch_s": WATCH_S}
    base = [f"evolution.canary.{key}={value}" for key, value in canary.items()]
    base += [f"run.dir={folder}", "toolbox.operations=[]", "memory.shards=2"]
    base += ["evolution.batch=4", "evolution.review.share=1", "evolution.cold_start=0"]
    base.append("evolution.max_share_per_question=1")  # the queries repeat one question
    return load(NANO, [*base, "toolbox.workers=1", "engine.max_num_seqs=32", *overrides])


def train_to_answer_seven(settings: Config) -> Path:
    """Return a checkpoint of a policy that nearly always answers 7."""
    player = Player(settings, str(resolve(settings.policy.model)))
    shown = [Demonstration(**q.model_dump(), turns=[Step(answer="7")]) for q in canary_questions()]
    samples = [train_sample(player, demonstration) for demonstration in shown]
    learner = settings.learner.model_copy(update={"lr": 2e-3, "warmup": 0.0})
    trainer = Trainer(settings.policy, learner, total_steps=11)
    for _ in range(11):
        trainer.update(samples, "sft")
    save_adapter(trainer.adapter(), Path(settings.run.dir) / "initial")
    trainer.close()
    return Path(settings.run.dir) / "initial"


class Service:
    """The actors of a service and its agent, which a thread asks continuously."""

    def __init__(self, settings: Config, initial: Path):
        self.config = settings
        name = f"faults-{time.monotonic_ns()}"
        self.store = cluster.spawn(PolicyStore, settings.run.dir, str(initial), name=f"{name}-store")
        serving, canary = (
            cluster.spawn(Generator, settings, f"{name}-store", i, name=f"{name}-{i}", num_cpus=0.25)
            for i in range(2)
        )
        memory, shards = place_shards(settings, name)
        self.evolution = cluster.spawn(
            Evolution, settings, [f"{name}-0"], f"{name}-store", f"{name}-1", memory, name=name
        )
        self.actors = [self.evolution, serving, canary, self.store, *shards]
        namespace = ray.get_runtime_context().namespace
        self.agent = Agent(settings, Backends((f"{name}-0",), namespace, name, tuple(memory)))
        picture = data_url(clean_png(cards.render(canary_questions()[0].media[0].uri)))
        self.query = AgentQuery(
            canary_questions()[0].question, [picture], 8, SamplingParams(1.0, 1.0, 24, 0), operations=False
        )
        self.answers: list[tuple[float, Answer]] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.queries: Future[None] | None = None
        self.stopped = False

    async def _send_queries(self) -> None:
        for seed in itertools.count():
            if self.stopped:
                break
            sampling = SamplingParams(1.0, 1.0, 24, seed)
            answer = await self.agent.answer(dataclasses.replace(self.query, sampling=sampling))
            self.answers.append((time.monotonic(), answer))

    def start_queries(self) -> None:
        ray.get([self.evolution.health.remote()])
        self.queries = asyncio.run_coroutine_threadsafe(self._send_queries(), self.loop)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return ray.get(getattr(self.evolution, method).remote(*arguments, **named), timeout=60)

    def experience_statuses(self) -> set[tuple[int, str]]:
        """Return the (policy version, status) pairs of all experiences."""
        assert self.agent.memory is not None
        experiences = asyncio.run_coroutine_threadsafe(self.agent.memory.list(10_000), self.loop).result(60)
        return {(experience.policy_version, experience.status) for experience in experiences}

    def versions(self) -> dict[int, PolicyVersion]:
        return {v.version: v for v in ray.get(self.store.list.remote())}

    def stop(self) -> None:
        self.stopped = True
        if self.queries is not None:
            self.queries.result(60)
            asyncio.run_coroutine_threadsafe(self.agent.drain(), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        for actor in self.actors:
            ray.kill(actor)


@pytest.fixture
def service(ray_cluster: None, tmp_path: Path) -> Iterator[Service]:
    # A high target disables the KL guard, which would stop such an update before the canary.
    settings = config(tmp_path, "evolution.lr=0.03", "evolution.guard.target=1000")
    service = Service(settings, train_to_answer_seven(settings))
    yield service
    service.stop()


def learn(source: UpdateSource, trainer: Trainer) -> dict[str, float]:
    """Run one iteration of the training loop; return its metrics."""
    batch = source.next()
    assert batch is not None
    metrics = trainer.step(batch)
    source.done(batch, source.weights.publish(trainer, metrics), metrics)
    return {**batch.metrics, **metrics}


def poison(service: Service, count: int) -> None:
    """Decide reviews as a malicious reviewer, with wrong answers, until ``count`` updates are queued."""
    decided: set[str] = set()
    while len(decided) < count:
        for review in service.call("reviews", "waiting", 200):
            votes = [v["answer"] or "" for v in review["verdict"]["votes"]]
            # Control tokens are refused
            wrong = [answer for answer in votes if answer not in ("", "7") and "<" not in answer]
            if wrong and len(decided) < count:
                assert service.call("decide", review["id"], True, "mallory", "", wrong[0])["queued"]
                decided.add(review["id"])
        time.sleep(0.2)


@pytest.mark.long
def test_f13_a_poisoned_update_is_refused_and_when_forced_is_rolled_back_within_the_watch_window(
    service: Service, record_figures: RecordFigures
) -> None:
    initial = load_adapter(Path(service.config.run.dir) / "initial")
    no_warmup = service.config.learner.model_copy(update={"warmup": 0.0})
    trainer = Trainer(service.config.policy, no_warmup, LossConfig(kl=0.01), total_steps=100, adapter=initial)
    service.start_queries()
    every = service.config.evolution.canary.every
    source = UpdateSource(service.config, service.evolution, CandidatePublisher(service.store, every))
    source.open(trainer, {}).__enter__()  # never closed, as by a killed learner
    poison(service, 8)
    assert learn(source, trainer)["evolve/skipped"] == 0
    (bad,) = (v.version for v in service.versions().values() if v.status is not VersionStatus.PROMOTED)
    assert service.versions()[bad].status is VersionStatus.ROLLED_BACK
    status = service.call("status")
    (canary,) = (entry for entry in service.call("canary_curve") if entry["decision"] != "keep")
    assert (status["served"], status["restoring"]) == (0, 0)
    assert (canary["version"], canary["decision"]) == (bad, "refuse")
    assert canary["accuracy"] < canary["reference_accuracy"] - service.config.evolution.canary.tolerance
    assert trainer.adapter().sha256() != initial.sha256()
    assert source.next() is not None  # the next batch resets the trainer to the promoted version
    assert trainer.adapter().sha256() == initial.sha256()
    assert len(service.answers) > 10
    assert {answer.group.policy_version for _, answer in service.answers} == {0}

    start = time.monotonic()
    assert service.call("promote", bad, "operator", force=True)["promoted"]
    wait_until(lambda: service.call("status")["served"] == 0, 120)
    rolled_back = time.monotonic() - start
    assert service.versions()[bad].status is VersionStatus.ROLLED_BACK
    count = len(service.answers)
    wait_until(lambda: len(service.answers) > count + 2, 120)
    assert {answer.group.policy_version for _, answer in service.answers[count + 1 :]} == {0}
    assert all(answer.verdict.answer is not None for _, answer in service.answers[count + 1 :])
    assert any(answer.group.policy_version == bad for _, answer in service.answers)
    # Experiences of the bad version are marked as failed and do not vote.
    taught = {(0, "processed")}  # those of which the poisoned update was made
    wait_until(lambda: service.experience_statuses() - taught == {(0, "pending"), (bad, "failed")}, 120)
    entries = [(e["event"], e["actor"], e["result"]) for e in reversed(service.call("recent_audit", 200))]
    for expected in (
        ("review", "mallory", "success"),
        ("update", "learner", "success"),
        ("candidate", "learner", "success"),
        ("canary", "canary", "refused"),
        ("promotion", "canary", "refused"),
        ("promotion", "operator", "success"),
        ("rollback", "watch", "success"),
        ("alert", "evolution", "success"),
    ):
        assert expected in entries
        entries = entries[entries.index(expected) + 1 :]
    assert audit.verify(Path(service.config.run.dir) / audit.FOLDER).ok
    unvetted = sum(answer.group.policy_version not in (0, bad) for _, answer in service.answers)
    record_figures(
        canary_accuracy=canary["accuracy"],
        served_accuracy=canary["reference_accuracy"],
        unvetted_answers=unvetted,
        forced_version_served_s=rolled_back,
        watch_window_s=WATCH_S,
        answers=len(service.answers),
    )
    assert unvetted == 0
    trainer.close()
