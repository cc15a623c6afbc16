"""Bad updates in online learning, with real generators, learner, canary and agent: what is bad is not served, or not for long.

The number F13 is that of the project's list of faults. The policy was taught in a second to answer 7 whatever it sees, and the
canary's truth is 7: to be poisoned costs it all it can do.
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

from pixelis.actors import cluster
from pixelis.actors.batch_sources import UpdateSource
from pixelis.actors.evolution import Evolution
from pixelis.actors.generator import Generator
from pixelis.actors.memory import place_shards
from pixelis.actors.policy_store import PolicyStore
from pixelis.actors.weights import CandidatePublisher
from pixelis.config import Config, LossConfig, load
from pixelis.datasets import cards
from pixelis.datasets.demonstration_stream import train_sample
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.questions import read_questions
from pixelis.dialogue.session import SamplingParams
from pixelis.evolution import audit
from pixelis.policy.adapters import load_adapter, save_adapter
from pixelis.policy.model_path import resolve
from pixelis.policy.train_step import Trainer
from pixelis.records import Demonstration, PolicyVersion, Question, Step, VersionStatus
from pixelis.serve.agent import Agent, png_url
from pixelis.serve.agent_types import AgentQuery, Answer
from pixelis.serve.backends import Backends

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NANO = Path(__file__).parents[2] / "configs" / "nano" / "base.yaml"
WATCH_S = 2.0
RecordFigures = Callable[..., None]


def some_questions() -> list[Question]:
    questions = itertools.islice(read_questions("cards:?split=train&seed=1"), 16)
    return [question.model_copy(update={"answers": ["7"], "annotations": None, "meta": {}}) for question in questions]


def config(folder: Path, *more: str) -> Config:
    (folder / "canary.jsonl").write_text("".join(q.model_dump_json() + "\n" for q in some_questions()))
    own = [f"run.dir={folder}", "toolbox.operations=[]", "evaluate.operations=false", "memory.shards=2"]
    own += [f"evolution.canary.questions={folder}/canary.jsonl", "evolution.canary.count=16", "evolution.canary.every=1"]
    own += [f"evolution.canary.watch_s={WATCH_S}", "evolution.batch=4", "evolution.review.share=1", "evolution.cold_start=0"]
    return load(NANO, [*own, "toolbox.workers=1", "engine.max_num_seqs=32", *more])


def teach_seven(settings: Config) -> Path:
    """A checkpoint of a policy that nearly always answers 7."""
    player = Player(settings, str(resolve(settings.policy.model)))
    samples = [train_sample(player, Demonstration(**q.model_dump(), turns=[Step(answer="7")])) for q in some_questions()[:8]]
    trainer = Trainer(settings.policy, settings.learner.model_copy(update={"lr": 2e-3, "warmup": 0.0}), total_steps=11)
    for _ in range(11):
        trainer.update(samples, "sft")
    save_adapter(trainer.adapter(), Path(settings.run.dir) / "taught")
    trainer.close()
    return Path(settings.run.dir) / "taught"


class Service:
    """Placed actors, the real agent under constant load, and the learner's side in this process."""

    def __init__(self, settings: Config, taught: Path):
        self.config = settings
        name = f"faults-{time.monotonic_ns()}"
        self.store = cluster.spawn(PolicyStore, settings.run.dir, str(taught), name=f"{name}-store")
        serving, canary = (
            cluster.spawn(Generator, settings, f"{name}-store", i, name=f"{name}-{i}", num_cpus=0.25) for i in range(2)
        )
        memory, shards = place_shards(settings, name)
        self.evolution = cluster.spawn(Evolution, settings, [f"{name}-0"], f"{name}-store", f"{name}-1", memory, name=name)
        self.actors = [self.evolution, serving, canary, self.store, *shards]
        namespace = ray.get_runtime_context().namespace
        self.agent = Agent(settings, Backends((f"{name}-0",), namespace, name, tuple(memory)))
        picture = png_url(cards.render(some_questions()[0].media[0].uri))
        self.ask = AgentQuery(some_questions()[0].question, [picture], 8, SamplingParams(1.0, 1.0, 24, 0), operations=False)
        self.answers: list[tuple[float, Answer]] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.asking: Future[None] | None = None
        self.ended = False

    async def _ask(self) -> None:
        for seed in itertools.count():
            if self.ended:
                break
            sampling = SamplingParams(1.0, 1.0, 24, seed)
            answer = await self.agent.answer(dataclasses.replace(self.ask, sampling=sampling))
            self.answers.append((time.monotonic(), answer))

    def begin(self) -> None:
        ray.get([self.evolution.health.remote()])
        self.asking = asyncio.run_coroutine_threadsafe(self._ask(), self.loop)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return ray.get(getattr(self.evolution, method).remote(*arguments, **named), timeout=60)

    def remembered(self) -> set[tuple[int, str]]:
        """Versions and status of all experiences."""
        assert self.agent.memory is not None
        listed = asyncio.run_coroutine_threadsafe(self.agent.memory.list(10_000), self.loop).result(60)
        return {(experience.policy_version, experience.status) for experience in listed}

    def versions(self) -> dict[int, PolicyVersion]:
        return {v.version: v for v in ray.get(self.store.list.remote())}

    def end(self) -> None:
        self.ended = True
        if self.asking is not None:
            self.asking.result(60)
            asyncio.run_coroutine_threadsafe(self.agent.drain(), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        for actor in self.actors:
            ray.kill(actor)


def until(condition: Callable[[], Any], timeout_s: float = 120) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.fixture
def service(ray_cluster: None, tmp_path: Path) -> Iterator[Service]:
    # The KL guard would not let so bad an update pass to the canary; it has tests of its own.
    settings = config(tmp_path, "evolution.lr=0.03", "evolution.guard.target=1000")
    running = Service(settings, teach_seven(settings))
    yield running
    running.end()


def learn(source: UpdateSource, trainer: Trainer) -> dict[str, float]:
    """One round of the training loop."""
    batch = source.next()
    assert batch is not None
    metrics = trainer.step(batch)
    source.done(batch, source.weights.publish(trainer, metrics), metrics)
    return {**batch.metrics, **metrics}


def poison(service: Service, count: int) -> None:
    """A malicious reviewer approves minority answers until ``count`` such updates are queued."""
    done: set[str] = set()
    while len(done) < count:
        for review in service.call("reviews", "waiting", 200):
            wrong = [v["answer"] for v in review["verdict"]["votes"] if v["answer"] not in (None, "7")]
            if wrong and len(done) < count:
                assert service.call("decide", review["id"], True, "mallory", "", wrong[0])["queued"]
                done.add(review["id"])
        time.sleep(0.2)


def test_f13_poison_is_refused_and_a_forced_bad_version_goes_within_a_watch_window(
    service: Service, record_figures: RecordFigures
) -> None:
    """F13: poisoned feedback. Goal: gate or canary refuses it, 0 requests by an unvetted version, a fall is rolled back."""
    taught = load_adapter(Path(service.config.run.dir) / "taught")
    calm = service.config.learner.model_copy(update={"warmup": 0.0})
    trainer = Trainer(service.config.policy, calm, LossConfig(kl=0.01), total_steps=100, adapter=taught)
    service.begin()
    every = service.config.evolution.canary.every
    source = UpdateSource(service.config, service.evolution, CandidatePublisher(service.store, every))
    source.open(trainer, {}).__enter__()  # the batches are taken by hand; it is never left, as by a killed learner
    poison(service, 8)
    assert learn(source, trainer)["evolve/skipped"] == 0
    (bad,) = (v.version for v in service.versions().values() if v.status is not VersionStatus.PROMOTED)
    assert service.versions()[bad].status is VersionStatus.ROLLED_BACK
    status = service.call("status")
    (judged,) = (entry for entry in service.call("canary_curve") if entry["decision"] != "keep")
    assert (status["served"], status["restoring"], judged["version"], judged["decision"]) == (0, 0, bad, "refuse")
    assert judged["accuracy"] < judged["reference_accuracy"] - service.config.evolution.canary.tolerance
    assert trainer.adapter().sha256() != taught.sha256()
    assert source.next() is not None  # the next batch starts from what is served
    assert trainer.adapter().sha256() == taught.sha256()
    assert len(service.answers) > 10
    assert {answer.group.policy_version for _, answer in service.answers} == {0}

    forced_at = time.monotonic()
    assert service.call("promote", bad, "operator", force=True)["promoted"]
    until(lambda: service.call("status")["served"] == 0)
    back = time.monotonic() - forced_at
    assert service.versions()[bad].status is VersionStatus.ROLLED_BACK
    count = len(service.answers)
    until(lambda: len(service.answers) > count + 2)
    assert {answer.group.policy_version for _, answer in service.answers[count + 1 :]} == {0}
    assert all(answer.verdict.answer is not None for _, answer in service.answers[count + 1 :])
    assert any(answer.group.policy_version == bad for _, answer in service.answers)
    until(lambda: service.remembered() == {(0, "pending"), (bad, "failed")})  # its answers vote no more
    events = [(e["event"], e["actor"], e["result"]) for e in reversed(service.call("recent_audit", 200))]
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
        assert expected in events
        events = events[events.index(expected) + 1 :]
    assert audit.verify(Path(service.config.run.dir) / audit.FOLDER).ok
    unvetted = sum(answer.group.policy_version not in (0, bad) for _, answer in service.answers)
    record_figures(
        canary_accuracy=judged["accuracy"],
        served_accuracy=judged["reference_accuracy"],
        unvetted_answers=unvetted,
        forced_version_served_s=back,
        watch_window_s=WATCH_S,
        answers=len(service.answers),
    )
    assert unvetted == 0
    trainer.close()
