"""TTRL (arXiv 2504.16084): adapt a policy to questions without answers by the votes of its own rollouts.

    Question -> rft.group_size rollouts vote -> train on rft.train_samples of them -> PolicyStore -> ...

Evaluates the same questions before and after, ttrl.samples times each: pass@1, accuracy of the majority,
agreement. True answers, if present, are used for these figures only. Trains like `rft` and stops early when
agreement no longer rises (ttrl.patience). Result: checkpoints and ttrl.json in run.dir. Re-running resumes.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from pixelis.actors import placement
from pixelis.config import Config, RewardsConfig, TtrlConfig
from pixelis.errors import BadConfig
from pixelis.evaluation.statistics import bootstrap_mean, paired_bootstrap
from pixelis.jobs import dry_run, evaluate, evaluation_arms, rft
from pixelis.jobs.driver import job, run_folder
from pixelis.jobs.rft import findings
from pixelis.jobs.rft import needs as needs
from pixelis.records import Group
from pixelis.rewards.equality import Equality, classes
from pixelis.rewards.extraction import answers_of
from pixelis.rewards.services import shared_services
from pixelis.telemetry import events, lineage


def run(config: Config, actors: placement.Actors) -> dict[str, Any]:
    """Evaluate, adapt and evaluate again on placed actors; returns the content of ttrl.json."""
    folder = Path(config.run.dir)
    before = evaluate_questions(config, actors, "before", 0)
    adapter = rft.run(config, actors, should_stop=lambda: plateau(shares(folder), config.ttrl))
    after = evaluate_questions(config, actors, "after", ray.get(actors.store.promoted.remote()))
    steps = len(shares(folder))
    result = {
        "adapter": str(adapter),
        "steps": steps,
        "plateau": steps < config.rft.steps,
        "questions": len(before.groups),
        "samples": config.ttrl.samples,
        **compare(before.groups, after.groups, config.rewards, config.run.seed),
    }
    (folder / "ttrl.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
    lineage.record_in_run(folder / "ttrl.json", "evaluation")
    return result


def evaluate_questions(
    config: Config, actors: placement.Actors, name: str, version: int
) -> evaluation_arms.Arm:
    arm = evaluate.measure(
        config, actors, name, version, source=config.data.train, samples=config.ttrl.samples
    )
    evaluation_arms.save(config, Path(config.run.dir), arm)
    return arm


def require_unlabelled(config: Config) -> Config:
    """The configuration; BadConfig if one of its rewards uses the true answer in any phase."""
    if labelled := config.labelled:
        raise BadConfig(
            f"{labelled[0]} may use true answers, which TTRL lacks",
            fix="use rewards.preset=ttrl without such terms, or `pixelis rft`",
        )
    if not config.rewards.weights.majority_vote:
        raise BadConfig("rewards.weights.majority_vote is 0", fix="use rewards.preset=ttrl")
    return rft.checked(config)


def shares(folder: Path) -> list[float]:
    """Mean share of rollouts that agree with the majority by step; a group without a majority counts 0."""
    rows = {row["step"]: row for row in events.read(folder, "step/policy")}
    return [
        rows[step].get("vote/majority_ratio", 0.0) * (1 - rows[step].get("vote/none", 0.0))
        for step in sorted(rows)
    ]


def plateau(values: Sequence[float], settings: TtrlConfig) -> bool:
    """Whether the last ``patience`` values exceed the ``patience`` before by less than ``min_gain`` on average."""
    size = settings.patience
    if not size or len(values) < 2 * size:
        return False
    return statistics.fmean(values[-size:]) - statistics.fmean(values[-2 * size : -size]) < settings.min_gain


def votes(
    groups: Sequence[Group], rewards: RewardsConfig
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """By question: share of the majority and, with a true answer, pass@1 and accuracy of the majority.

    Equal answers are grouped by the reward's equality. pass@1 is the mean over all samples.
    """
    agreement, single, majority = {}, {}, {}
    for group in groups:
        services, question = shared_services(rewards), group.question
        answers = list(answers_of([group], rewards, services).values())
        same = Equality(question, rewards.scorer_of(question.task, question.scorer), services)
        names = classes(answers, same)
        ballots = Counter(name for name in names if name is not None)
        winner, count = ballots.most_common(1)[0] if ballots else (None, 0)
        agreement[group.question.id] = count / len(group.trajectories)
        scores = [t.rewards["accuracy"] for t in group.trajectories if "accuracy" in t.rewards]
        if scores:
            single[group.question.id] = statistics.fmean(scores)
            first = group.trajectories[names.index(winner)] if winner is not None else None
            majority[group.question.id] = first.rewards.get("accuracy", 0.0) if first is not None else 0.0
    return agreement, single, majority


def compare(
    before: Sequence[Group], after: Sequence[Group], rewards: RewardsConfig, seed: int
) -> dict[str, Any]:
    """Each figure before and after with its interval, and the difference; None without true answers."""
    result: dict[str, Any] = {}
    for name, old, new in zip(
        ("agreement", "pass@1", "majority"), votes(before, rewards), votes(after, rewards), strict=True
    ):
        if len(old) < 2 or len(new) < 2:
            result[name] = None
            continue
        sides = {
            side: {
                "mean": statistics.fmean(values.values()),
                "ci95": list(bootstrap_mean(list(values.values()), seed)),
            }
            for side, values in (("before", old), ("after", new))
        }
        result[name] = {**sides, "difference": paired_bootstrap(new, old, seed)}
    return result


def check(config: Config) -> None:
    require_unlabelled(config)
    questions = dry_run.question_input(
        config, "data.train", config.data.train, player=dry_run.player_of(config)
    )
    inputs = [*dry_run.policy_inputs(config, trains=True), *dry_run.teacher_inputs(config), questions]
    dry_run.check("ttrl", config, inputs, findings(config))


def start(config: Config) -> dict[str, Any]:
    """Place the actors in run.dir and `run`; returns the content of ttrl.json."""
    with (
        run_folder(require_unlabelled(config), config.data.train),
        placement.placed(planned := rft.with_steps(config), initial=config.policy.adapter) as actors,
    ):
        return run(planned, actors)


def main() -> None:
    with job("ttrl", __doc__, check) as config:
        result = start(config)
        reason = "agreement no longer rises" if result["plateau"] else "rft.steps"
        print(
            f"{result['steps']} steps ({reason}); {result['questions']} questions x {result['samples']} "
            "episodes"
        )
        for name in ("agreement", "pass@1", "majority"):
            if (row := result[name]) is None:
                print(f"{name:10} unknown: the questions have no answers")
                continue
            low, high = row["difference"]["ci95"]
            message = f"{row['before']['mean']:.3f} -> {row['after']['mean']:.3f}"
            print(f"{name:10} {message}  ({row['difference']['mean']:+.3f} [{low:+.3f}, {high:+.3f}])")
        print(f"checkpoint: {result['adapter']}")


if __name__ == "__main__":
    main()
