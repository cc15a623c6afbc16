"""What limits learning from votes: schedules of updates on one set of sampled requests, with votes and with true labels.

    python -m benchmarks.vote_learning --adapter CHECKPOINT [--arms ...]

The policy of the checkpoint samples eight answers to each of the quickstart's changed, unlabelled pictures. Every arm then
learns from the same episodes with the objective of the quickstart's service, and answers held-out changed and unchanged pictures.
Unlike in the service, all votes are those of the starting policy, and no canary refuses an update: arms differ in their schedule
alone. An arm with labels learns the true answers of the requests to which some sample gave it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.actor_overhead import LocalGenerator
from benchmarks.harness import Report, parse_args
from pixelis.actors.batch_sources import UpdateSource
from pixelis.actors.weights import CandidatePublisher
from pixelis.config import Config, LossConfig, load
from pixelis.datasets.questions import read_questions
from pixelis.dialogue.agent import Episode
from pixelis.dialogue.session import SamplingParams
from pixelis.evaluation.statistics import paired_bootstrap
from pixelis.evolution.gate import gate
from pixelis.evolution.updates import as_group, elected, relabel
from pixelis.evolution.vote import vote
from pixelis.policy.adapters import Adapter, load_adapter
from pixelis.policy.samples import TrainSample, from_trajectory
from pixelis.policy.train_step import Trainer
from pixelis.records import Question, UpdateTask, Verdict
from pixelis.rewards.scorers import canonical

GROUP = 8
AT_ONCE = 64
"""Questions whose episodes run together."""


@dataclass(frozen=True)
class Schedule:
    """How an arm learns: updates of ``new`` tasks and ``replayed`` earlier ones, ``samples`` episodes of each."""

    labels: bool = False
    gate: float = 0.6
    lr: float = 5e-4
    new: int = 16
    replayed: int = 0
    samples: int = 2
    call_weight: float = 0.1


ARMS = {
    "all-samples": Schedule(samples=8),
    "once": Schedule(),
    "replay": Schedule(new=4, replayed=12),
    "fast": Schedule(lr=2e-3),
    "fast-replay": Schedule(lr=2e-3, new=8, replayed=8),
    "fast-open-gate": Schedule(lr=2e-3, gate=0.4),
    "fast-strict-gate": Schedule(lr=2e-3, gate=0.7, call_weight=0.3),
    "fast-labels": Schedule(lr=2e-3, labels=True),
}


@dataclass
class Request:
    """A question, the episodes of its samples and their verdict."""

    question: Question
    episodes: list[Episode]
    verdict: Verdict

    @property
    def truth(self) -> str:
        """The true answer, which only ``labels`` arms learn from."""
        return (self.question.answers or [""])[0]


def answer(config: Config, generator: LocalGenerator, questions: list[Question], samples: int) -> Iterator[list[Episode]]:
    """Answer every question with sampled episodes, or with a greedy one."""
    temperature = config.serve.sampling.temperature if samples > 1 else 0.0
    sampling = SamplingParams(temperature, 1.0, config.dialogue.max_turn_tokens, config.run.seed)
    for start in range(0, len(questions), AT_ONCE):
        episodes = generator.run(questions[start : start + AT_ONCE], sampling, samples)
        yield from (episodes[i : i + samples] for i in range(0, len(episodes), samples))


def accuracy(config: Config, generator: LocalGenerator, adapter: Adapter, questions: list[Question]) -> list[float]:
    """Whether the greedy answer to each question is right."""
    generator.loop.run_until_complete(generator.engine.load(generator.engine.version + 1, adapter))
    answers = (group[0].trajectory.answer for group in answer(config, generator, questions, 1))
    return [float(canonical(a or "") == canonical((q.answers or [""])[0])) for a, q in zip(answers, questions, strict=True)]


def learn(config: Config, schedule: Schedule, requests: list[Request]) -> tuple[Adapter, int]:
    """The adapter to serve after one pass over the requests, and the number of updates."""
    e, rng = config.evolution.model_copy(update={"gate": schedule.gate, "call_weight": schedule.call_weight}), random.Random(0)
    trainer = Trainer(
        config.policy,
        config.learner,
        LossConfig(kl=e.guard.beta),
        total_steps=len(requests),
        adapter=load_adapter(config.policy.adapter or ""),
        ema=e.ema,
    )
    source = UpdateSource(config.model_copy(update={"evolution": e}), None, CandidatePublisher(None, 1))
    waiting, learnt, updates = list[Request](), list[Request](), 0
    samples: dict[str, tuple[list[TrainSample], list[TrainSample]]] = {}
    for request in requests[e.cold_start :]:
        held_out = rng.random() < e.canary.traffic_share
        if held_out or not (schedule.labels or gate(request.verdict, e)):
            continue
        trained, sampled = train_samples(
            config, source, request, request.truth if schedule.labels else request.verdict.answer or ""
        )
        if not trained:
            continue
        samples[request.question.id] = (rng.sample(trained, min(schedule.samples, len(trained))), sampled)
        waiting.append(request)
        if len(waiting) == schedule.new:
            batch = [*waiting, *rng.sample(learnt, min(schedule.replayed, len(learnt)))]
            metrics = trainer.update(
                [sample for task in batch for sample in samples[task.question.id][0]],
                "sft",
                lr=schedule.lr,
                kl_limit=2 * e.guard.target,
                sampled=[sample for task in waiting for sample in samples[task.question.id][1]],
            )
            updates += not metrics["evolve/skipped"]
            learnt, waiting = learnt + waiting, []
    adapter = trainer.served()
    trainer.close()
    return adapter, updates


def train_samples(
    config: Config, source: UpdateSource, request: Request, label: str
) -> tuple[list[TrainSample], list[TrainSample]]:
    """What an update learns from a request, and the episodes that the policy sampled."""
    trajectories = [episode.trajectory for episode in request.episodes]
    task = UpdateTask(
        question_id=request.question.id, trajectories=trajectories, pseudo_label=label, confidence=1.0, created_at=0.0
    )
    group, views = (
        as_group(relabel(task, request.question, label, config.rewards)),
        {e.trajectory.id: e.views for e in request.episodes},
    )
    if not elected(group.trajectories, label):
        return [], []
    sampled = [from_trajectory(t, views[t.id]) for t in trajectories if t.answer is not None]
    return source._elected([group], [views]), sampled


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, help="checkpoint of the policy that answers and learns")
    parser.add_argument("--shift", default="warm", help="change of the pictures")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--questions", type=int, default=1000, help="held-out changed pictures, and at most half as many others")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    args = parse_args(parser, requests=100, questions=8)
    config, report = load("configs/nano/quickstart.yaml", [f"policy.adapter={args.adapter}"]), Report("vote_learning")
    start = load_adapter(args.adapter)
    generator = LocalGenerator(config, start)

    def questions(source: str, count: int) -> list[Question]:
        return list(read_questions(f"cards:?{source}", limit=count, epochs=1))

    stream = questions(f"split=validation&seed=9&shift={args.shift}", args.requests)
    requests = []
    for question, episodes in zip(stream, answer(config, generator, stream, GROUP), strict=True):
        verdict = vote([episode.trajectory for episode in episodes], [], config.evolution, question, 0.0)
        requests.append(Request(question, episodes, verdict))
    votes = [canonical(r.verdict.answer or "") == canonical(r.truth) for r in requests]
    report.row("vote is right", float(np.mean(votes)))
    clear = [right for right, r in zip(votes, requests, strict=True) if gate(r.verdict, config.evolution)]
    report.row("vote above the gate is right", float(np.mean(clear)) if clear else 0.0, note=f"{len(clear)} of {len(votes)}")
    tests = {
        args.shift: questions(f"split=test&seed=8&shift={args.shift}", args.questions),
        "old": questions("split=test&seed=7", args.questions // 2),
    }
    before = {name: accuracy(config, generator, start, test) for name, test in tests.items()}
    for arm in args.arms:
        adapter, updates = learn(config, ARMS[arm], requests)
        row: dict[str, Any] = {"updates": updates}
        for name, test in tests.items():
            after = accuracy(config, generator, adapter, test)
            means = {"before": float(np.mean(before[name])), "after": float(np.mean(after))}
            row[name] = means | paired_bootstrap(after, before[name])
        report.row(arm, row)
    report.close()


if __name__ == "__main__":
    main()
