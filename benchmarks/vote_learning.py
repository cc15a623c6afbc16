"""How much does a service learn from its own votes, and how much would it learn from true labels?

    python -m benchmarks.vote_learning --adapter CHECKPOINT [--shifts warm brightness:4 frost:2] [--seeds 42
    1337 2024]
        [--arms service rehearsal labels votes ttrl] [--requests 1000] [--questions 800] [--set
        evolution.gate=0.5] [--dir runs/vote_learning]

The policy of the checkpoint samples eight answers to each of the changed, unlabelled pictures of a seed.
Every arm learns from such episodes in one pass with the settings of the quickstart's service, and answers
other changed and unchanged pictures. Unlike in the service, all votes are those of the starting policy, no
canary refuses an update, and unclear ones hinder no learning: arms differ in what they learn alone.
`--questions 0` only counts how often votes are clear, and right. A shift is one of the card world or
KIND:SEVERITY of ImageNet-C's corruptions. Trials that DIR has already are not run again.

- ``service``: the votes of the quickstart's service, with its augmentations.
- ``rehearsal``: the same with a memory, of requests about unchanged pictures and those learnt so far, that
  each update rehearses.
- ``labels``: the same episodes and updates, but true answers instead of votes.
- ``votes``: the vote of samples without augmentations, whose own answers are learnt (self-distillation).
- ``ttrl``: policy gradient on the majority of samples without augmentations, as TTRL (arXiv 2504.16084) does.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.actor_overhead import LocalGenerator
from benchmarks.harness import Report, keep_arguments, parse_args
from pixelis.actors.update_source import UpdateSource
from pixelis.actors.weights import CandidatePublisher
from pixelis.config import Config, LossConfig, load
from pixelis.datasets.questions import read_questions
from pixelis.dialogue.agent import Episode
from pixelis.dialogue.session import SamplingParams
from pixelis.evaluation.statistics import paired_bootstrap
from pixelis.evolution.gate import gate
from pixelis.evolution.updates import agreeing, as_group, relabel
from pixelis.policy.adapters import Adapter, load_adapter
from pixelis.policy.advantages import assign_advantages
from pixelis.policy.samples import from_trajectory
from pixelis.policy.train_step import Trainer
from pixelis.records import Group, Question, UpdateTask, Verdict
from pixelis.rewards.scorers import canonical
from pixelis.rewards.vote import vote

GROUP = 8
HISTORY = 300
"""Requests about unchanged pictures that the memory of the arm ``rehearsal`` begins with."""
AT_ONCE = 64
"""Questions whose episodes run together."""
PLAIN = ["serve.augmentations=[]", "evolution.vote.strategy=majority"]
ARMS: dict[str, list[str]] = {
    "service": [],
    "rehearsal": ["evolution.rehearse=32"],
    "labels": [],
    "votes": [*PLAIN, "evolution.gate=0.6"],
    "ttrl": [*PLAIN, "evolution.gate=0", "evolution.objective=policy"],
}
"""Overrides of the quickstart's configuration."""


@dataclass
class Request:
    """A question and the episodes of its samples."""

    question: Question
    episodes: list[Episode]

    def verdict(self, config: Config) -> Verdict:
        """The verdict of the samples."""
        return vote(
            [episode.trajectory for episode in self.episodes], [], config.evolution, self.question, 0.0
        )

    def group(self, config: Config, label: str) -> Group | None:
        """The episodes scored against a label; None if nothing can be learnt from them."""
        trajectories = [episode.trajectory for episode in self.episodes]
        task = UpdateTask(
            question_id=self.question.id,
            trajectories=trajectories,
            pseudo_label=label,
            confidence=1.0,
            created_at=0.0,
        )
        group = as_group(relabel(task, self.question, label, config.rewards))
        assign_advantages([group], config.rft.advantage)
        if config.evolution.objective == "answer":
            return group if agreeing(group.trajectories, label) else None
        return group if any(t.advantage for t in group.trajectories) else None


def truth(question: Question) -> str:
    """The true answer."""
    return (question.answers or [""])[0]


def is_right(answer: str | None, question: Question) -> bool:
    """Whether an answer is the true one."""
    return canonical(answer or "") == canonical(truth(question))


def answer(
    config: Config, generator: LocalGenerator, questions: list[Question], samples: int
) -> Iterator[list[Episode]]:
    """Answer every question with sampled episodes, or with a greedy one."""
    temperature = config.serve.sampling.temperature if samples > 1 else 0.0
    sampling = SamplingParams(temperature, 1.0, config.dialogue.max_turn_tokens, config.run.seed)
    for start in range(0, len(questions), AT_ONCE):
        episodes = generator.run(questions[start : start + AT_ONCE], sampling, samples)
        yield from (episodes[i : i + samples] for i in range(0, len(episodes), samples))


def use(generator: LocalGenerator, adapter: Adapter) -> None:
    """Answer with these weights from now on."""
    generator.loop.run_until_complete(generator.engine.load(generator.engine.version + 1, adapter))


def accuracy(
    config: Config, generator: LocalGenerator, adapter: Adapter, questions: list[Question]
) -> list[float]:
    """Whether the greedy answer to each question is right."""
    use(generator, adapter)
    answers = answer(config, generator, questions, 1)
    return [
        float(is_right(group[0].trajectory.answer, q)) for group, q in zip(answers, questions, strict=True)
    ]


class Remembered(NamedTuple):
    """What the memory keeps of a request: the elected episode, its views and its confidence."""

    group: Group
    views: dict[str, Any]
    confidence: float


def remember(config: Config, request: Request, label: str) -> Remembered:
    """The request as an experience: its first episode that gave the label."""
    group = request.group(config, label)
    assert group is not None
    elected = agreeing(group.trajectories, label)[0].model_copy(update={"advantage": None})
    (views,) = (episode.views for episode in request.episodes if episode.trajectory.id == elected.id)
    single = group.model_copy(update={"id": elected.id, "trajectories": [elected]})
    return Remembered(single, {elected.id: views}, request.verdict(config).confidence)


def rehearsed(known: Sequence[Remembered], count: int, rng: np.random.Generator) -> list[Remembered]:
    """A draw by the priority that the service gives to experiences."""
    priorities = np.array([0.5 * (1 - item.confidence) + 0.25 for item in known])
    drawn = rng.choice(len(known), min(count, len(known)), replace=False, p=priorities / priorities.sum())
    return [known[i] for i in drawn]


def learn(
    config: Config, labelled: Sequence[tuple[Request, str]], history: Sequence[tuple[Request, str]] = ()
) -> tuple[Adapter, int]:
    """The adapter to serve after one pass over requests and their labels, and the number of updates.

    With ``evolution.rehearse`` each update also imitates what was learnt before, of ``history`` and of these
    requests.
    """
    e, rng = config.evolution, np.random.default_rng(config.run.seed)
    known = [remember(config, *pair) for pair in history] if e.rehearse else []
    batch: list[tuple[Request, str]] = []
    trainer = Trainer(
        config.policy,
        config.learner,
        LossConfig(kl=e.guard.beta),
        total_steps=len(labelled),
        adapter=load_adapter(config.policy.adapter or ""),
        ema=e.ema,
    )
    source, updates = UpdateSource(config, None, CandidatePublisher(None, 1)), 0
    source.trainer = trainer
    groups, views = list[Group](), list[Any]()
    for request, label in labelled:
        if (group := request.group(config, label)) is None:
            continue
        groups.append(group)
        views.append({episode.trajectory.id: episode.views for episode in request.episodes})
        batch.append((request, label))
        if len(batch) == e.batch:
            drawn = rehearsed(known, e.rehearse, rng) if known else []
            groups += [item.group for item in drawn]
            views += [item.views for item in drawn]
            known += [remember(config, *pair) for pair in batch] if e.rehearse else []
            sampled = [
                from_trajectory(t, shown[t.id])
                for group, shown in zip(groups, views, strict=True)
                for t in group.trajectories
                if t.advantage is not None and t.augmentation is None
            ]
            source._score_transplanted(groups, sampled)
            options: dict[str, Any] = {"lr": e.lr, "kl_limit": 2 * e.guard.target, "sampled": sampled}
            if e.objective == "answer":
                metrics = trainer.update(source._agreeing(groups, views), "sft", **options)
            else:
                metrics = trainer.update(sampled, "policy", **options)
            updates += not metrics["evolve/skipped"]
            groups, views, batch = [], [], []
    adapter = trainer.served()
    trainer.close()
    return adapter, updates


def labels_of(
    config: Config, arm: str, requests: Sequence[Request]
) -> tuple[list[tuple[Request, str]], dict[str, float]]:
    """The requests that an arm learns from with their labels, and how often votes are right."""
    e, rng = config.evolution, random.Random(0)
    verdicts = [request.verdict(config) for request in requests]
    right = [
        is_right(verdict.answer, request.question)
        for verdict, request in zip(verdicts, requests, strict=True)
    ]
    clear = [gate(verdict, e) for verdict in verdicts]
    figures = {"vote_right": float(np.mean(right)), "clear": float(np.mean(clear))}
    figures["clear_right"] = (
        float(np.mean([r for r, c in zip(right, clear, strict=True) if c])) if any(clear) else 0.0
    )
    taught = []
    for request, verdict, is_clear in list(zip(requests, verdicts, clear, strict=True))[e.cold_start :]:
        held_out = rng.random() < e.canary.traffic_share
        if not held_out and (arm == "labels" or is_clear):
            taught.append((request, truth(request.question) if arm == "labels" else verdict.answer or ""))
    return taught, figures


def source_of(split: str, seed: int, shift: str = "") -> str:
    """The card world's questions about pictures with a shift or a corruption."""
    kind, _, severity = shift.partition(":")
    change = f"&corruption={kind}&severity={severity}" if severity else f"&shift={kind}" if kind else ""
    return f"cards:?split={split}&seed={seed}{change}"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--adapter", type=Path, required=True, help="checkpoint of the policy that answers and learns"
    )
    parser.add_argument("--shifts", nargs="+", default=["warm"], help="changes of the pictures")
    parser.add_argument("--seeds", nargs="+", type=int, default=[42], help="seeds of pictures and sampling")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument(
        "--questions", type=int, default=800, help="held-out changed pictures, and half as many others"
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of all arms")
    parser.add_argument("--dir", type=Path, default=Path("runs/vote_learning"), help="folder of the trials")
    args = parse_args(parser, requests=100, questions=8, dir=None)
    args.dir = args.dir if args.questions else None  # only trials with questions are kept
    if args.dir is not None:
        keep_arguments(args.dir, args, "shifts", "seeds", "arms")
    report, start = Report("vote_learning"), load_adapter(args.adapter)
    # As in the quickstart's last stage
    own = [f"policy.adapter={args.adapter}", "policy.lora.vision_tower=true"]
    configs = {arm: load("configs/nano/quickstart.yaml", [*own, *ARMS[arm], *args.set]) for arm in args.arms}
    generator = LocalGenerator(next(iter(configs.values())), start)
    for shift in args.shifts:
        for seed in args.seeds:
            run_seed(args, report, generator, configs, start, shift, seed)
    report.close()


def run_seed(
    args: argparse.Namespace,
    report: Report,
    generator: LocalGenerator,
    configs: dict[str, Config],
    start: Adapter,
    shift: str,
    seed: int,
) -> None:
    """Run the arms of a shift and a seed that have no result yet."""

    def questions(split: str, number: int, count: int, change: str = shift) -> list[Question]:
        return list(read_questions(source_of(split, number, change), limit=count, epochs=1))

    def ask(stream: list[Question], config: Config) -> list[Request]:
        use(generator, start)
        generator.augmentations = list(config.serve.augmentations)
        asked = [Request(q, e) for q, e in zip(stream, answer(config, generator, stream, GROUP), strict=True)]
        generator.augmentations = []
        return asked

    history: list[tuple[Request, str]] = []
    tests, before = dict[str, list[Question]](), dict[str, list[float]]()
    collected = dict[tuple[str, ...], list[Request]]()
    for arm, config in configs.items():
        path = args.dir / f"{shift.replace(':', '-')}_{seed}_{arm}.json" if args.dir is not None else None
        if path is not None and path.exists():
            report.row(f"{shift} {seed} {arm}", json.loads(path.read_text(encoding="utf-8")))
            continue
        config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
        if args.questions and not tests:
            tests = {
                "changed": questions("test", seed, args.questions),
                "old": questions("test", seed, args.questions // 2, ""),
            }
            generator.augmentations = []
            before = {name: accuracy(config, generator, start, test) for name, test in tests.items()}
        if (key := tuple(config.serve.augmentations)) not in collected:
            collected[key] = ask(questions("validation", seed, args.requests), config)
        if config.evolution.rehearse and not history:
            history, _ = labels_of(
                config,
                arm,
                ask(questions("validation", seed + 1000, min(HISTORY, args.requests), ""), config),
            )
        taught, row = labels_of(config, arm, collected[key])
        if not args.questions:
            report.row(f"{shift} {seed} {arm}", row)
            continue
        adapter, updates = learn(config, taught, history)
        result: dict[str, Any] = {**row, "updates": updates}
        for name, test in tests.items():
            after = accuracy(config, generator, adapter, test)
            means = {"before": float(np.mean(before[name])), "after": float(np.mean(after))}
            result[name] = means | paired_bootstrap(after, before[name])
        if path is not None:
            path.write_text(json.dumps(result), encoding="utf-8")
        report.row(f"{shift} {seed} {arm}", result)


if __name__ == "__main__":
    main()
