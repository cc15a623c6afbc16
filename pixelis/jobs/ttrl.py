"""TTRL (arXiv 2504.16084): a policy adapts to questions without answers, the votes of its own rollouts being the reward.

    Question -> rft.group_size rollouts vote -> rft.train_samples of them are learnt from -> PolicyStore -> ...

The same questions are answered before and after, ttrl.samples times each: pass@1, the majority's answer, how far the episodes
agree. Truths, where the questions have some, are looked at for these figures alone. The run is that of `rft`, which ends early
when the votes agree no more than they did (ttrl.patience). Result: checkpoints and ttrl.json in run.dir. Re-running resumes.
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
from pixelis.config import Config, TtrlConfig, from_command_line
from pixelis.errors import BadConfig
from pixelis.evaluation.statistics import bootstrap_mean, paired_bootstrap
from pixelis.jobs import evaluate, rft
from pixelis.jobs.driver import driver, run_folder
from pixelis.jobs.dry_run import checks
from pixelis.records import Group
from pixelis.rewards.scorers import canonical
from pixelis.telemetry import events, lineage

LABELLED = ("accuracy", "wrong", "tool_if_correct", "tool_penalty", "unrepaired_error_zero", "length")
"""Terms of `rewards.weights` that look at a truth."""


def run(config: Config, actors: placement.Actors) -> dict[str, Any]:
    """Judge, adapt, judge again, on actors that are already placed; what ttrl.json holds."""
    folder = Path(config.run.dir)
    before = judge(config, actors, "before", 0)
    adapter = rft.run(config, actors, should_stop=lambda: plateau(shares(folder), config.ttrl))
    after = judge(config, actors, "after", ray.get(actors.store.promoted.remote()))
    steps = len(shares(folder))
    result = {
        "adapter": str(adapter),
        "steps": steps,
        "plateau": steps < config.rft.steps,
        "questions": len(before.groups),
        "samples": config.ttrl.samples,
        **compare(before.groups, after.groups, config.run.seed),
    }
    (folder / "ttrl.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
    lineage.record_in_run(folder / "ttrl.json", "evaluation")
    return result


def judge(config: Config, actors: placement.Actors, name: str, version: int) -> evaluate.Arm:
    """Several episodes of every question that is learnt from, or of the first ``evaluate.questions``."""
    arm = evaluate.measure(config, actors, name, version, source=config.data.train, samples=config.ttrl.samples)
    evaluate.save(Path(config.run.dir), arm)
    return arm


def unlabelled(config: Config) -> Config:
    """The configuration, if nothing it rewards looks at a truth; else BadConfig."""
    told = [f"rewards.own.{name}" for name in config.rewards.own]
    for mixture in config.rewards.mixtures:
        told += [f"rewards.weights.{name}" for name in LABELLED if getattr(mixture, name)]
    if told:
        raise BadConfig(
            f"{told[0]} may look at truths, which TTRL has not", fix="use rewards.preset=ttrl and no such term, or jobs.rft"
        )
    if not config.rewards.weights.majority_vote:
        raise BadConfig("nobody votes: rewards.weights.majority_vote is 0", fix="use rewards.preset=ttrl")
    return config


def shares(folder: Path) -> list[float]:
    """Of each step so far, the mean share of rollouts that agree with the majority; a group without one counts 0."""
    rows = {row["step"]: row for row in events.read(folder, "step/policy")}
    return [rows[step].get("vote/majority_share", 0.0) * (1 - rows[step].get("vote/none", 0.0)) for step in sorted(rows)]


def plateau(values: Sequence[float], settings: TtrlConfig) -> bool:
    """True when the mean of the last ``patience`` values is less than ``min_gain`` above that of as many before; 0: never."""
    size = settings.patience
    if not size or len(values) < 2 * size:
        return False
    return statistics.fmean(values[-size:]) - statistics.fmean(values[-2 * size : -size]) < settings.min_gain


def votes(groups: Sequence[Group]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """By question: agreement (the majority's share), and where a truth is known pass@1 and whether the majority is right."""
    agreement, single, majority = {}, {}, {}
    for group in groups:
        ballots = Counter(canonical(t.answer) for t in group.trajectories if t.answer is not None and canonical(t.answer))
        winner, most = ballots.most_common(1)[0] if ballots else (None, 0)
        agreement[group.question.id] = most / len(group.trajectories)
        scores = [t.rewards["accuracy"] for t in group.trajectories if "accuracy" in t.rewards]
        if scores:
            won = [t for t in group.trajectories if t.answer is not None and canonical(t.answer) == winner]
            single[group.question.id] = statistics.fmean(scores)
            majority[group.question.id] = won[0].rewards.get("accuracy", 0.0) if won else 0.0
    return agreement, single, majority


def compare(before: Sequence[Group], after: Sequence[Group], seed: int) -> dict[str, Any]:
    """Each figure before and after with its interval, and the difference over the same questions; None without truths."""
    result: dict[str, Any] = {}
    for name, old, new in zip(("agreement", "pass@1", "majority"), votes(before), votes(after), strict=True):
        if len(old) < 2 or len(new) < 2:
            result[name] = None
            continue
        sides = {
            side: {"mean": statistics.fmean(values.values()), "ci95": list(bootstrap_mean(list(values.values()), seed))}
            for side, values in (("before", old), ("after", new))
        }
        result[name] = {**sides, "difference": paired_bootstrap(new, old, seed)}
    return result


def main() -> None:
    """Entry point of `python -m pixelis.jobs.ttrl`."""
    config = from_command_line(__doc__, "ttrl", default="configs/nano/ttrl.yaml", check=checks("ttrl"))
    with (
        driver("ttrl"),
        run_folder(unlabelled(config), config.data.train),
        placement.placed(planned := rft.with_steps(config), initial=config.policy.adapter) as actors,
    ):
        found = run(planned, actors)
        why = "the votes agree no further" if found["plateau"] else "rft.steps"
        print(f"{found['steps']} steps ({why}); {found['questions']} questions x {found['samples']} episodes")
        for name in ("agreement", "pass@1", "majority"):
            if (row := found[name]) is None:
                print(f"{name:10} unknown: the questions have no answers")
                continue
            low, high = row["difference"]["ci95"]
            message = f"{row['before']['mean']:.3f} -> {row['after']['mean']:.3f}"
            print(f"{name:10} {message}  ({row['difference']['mean']:+.3f} [{low:+.3f}, {high:+.3f}])")
        print(f"checkpoint: {found['adapter']}")


if __name__ == "__main__":
    main()
