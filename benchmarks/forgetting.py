"""Forgetting: what a policy loses on earlier domains while it is trained on the next ones.

    python -m benchmarks.forgetting --adapter runs/quickstart/rft/checkpoints/step_00000040 [--seeds 42 1337
    2024] [--dir DIR]

The policy, trained on the plain card world before, is trained by GRPO with labels on one shifted world after
the other: inverted ink, low contrast, another font of digits. After each stage it answers the same held-out
questions of all four worlds, greedily. Prints the matrix of accuracies (stage x world, mean over seeds) and
the backward transfer: for each earlier world the final accuracy minus that right after its own stage
(Lopez-Paz and Ranzato, NeurIPS 2017). Its 95 % intervals are over questions (would these policies forget
other questions?) and over seeds (would other runs forget?). Writes DIR/forgetting.json. Stages that are
already finished in DIR are not repeated, so an interrupted benchmark can be restarted.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.harness import keep_arguments, machine, parse_args
from pixelis.actors import placement
from pixelis.config import absolute, load
from pixelis.evaluation.statistics import bootstrap_mean, paired_bootstrap
from pixelis.jobs import evaluate, rft
from pixelis.jobs.driver import driver, run_folder
from pixelis.jobs.quickstart import newest
from pixelis.policy import checkpoint

WORLDS = ("plain", "invert", "lowcontrast", "digits")
"""In the order of training; all but the first are shifts of `cards:`."""

Scores = dict[str, dict[str, float]]
"""World -> question -> 1.0 for a correct answer, else 0.0."""


def source(split: str, world: str, seed: int) -> str:
    """The questions of a world."""
    return f"cards:?split={split}&seed={seed}&shift={'' if world == 'plain' else world}"


def stage(folder: Path, world: str, seed: int, adapter: Path, args: argparse.Namespace) -> Scores:
    """Train one stage from ``adapter`` (none for the first world) and answer the questions of all worlds."""
    path = folder / "scores.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    steps = 0 if world == WORLDS[0] else args.steps
    overrides = [
        f"run.dir={folder}",
        f"run.seed={seed}",
        f"policy.adapter={adapter}",
        f"data.train={source('train', world, seed)}",
    ]
    overrides += [
        f"rft.steps={max(1, steps)}",
        f"evaluate.questions={args.questions}",
        "evaluate.sampling.temperature=0",
    ]
    config = absolute(load("configs/nano/rft.yaml", [*overrides, "telemetry.rollouts=0"]))
    with run_folder(config), placement.placed(config, learner=steps > 0, initial=str(adapter)) as actors:
        if steps:
            rft.run(config, actors)
        version = newest(actors, "rft")
        arms = {
            world: evaluate.measure(config, actors, world, version, source=source("test", world, 7))
            for world in WORLDS
        }
    scores = {name: arm.correct for name, arm in arms.items()}
    path.write_text(json.dumps(scores), encoding="utf-8")
    return scores


def run(folder: Path, seed: int, args: argparse.Namespace) -> list[Scores]:
    """All stages of one seed, each from the checkpoint of the one before."""
    results, adapter = list[Scores](), args.adapter.absolute()
    for number, world in enumerate(WORLDS):
        place = folder / f"{seed}-{number}-{world}"
        results.append(stage(place, world, seed, adapter, args))
        adapter = checkpoint.latest(place) or adapter
    return results


def mean_over_seeds(runs: list[list[Scores]], number: int, world: str) -> dict[str, float]:
    """Question -> share of seeds that answered it correctly after a stage."""
    scores = [stages[number][world] for stages in runs]
    shared = set.intersection(*(set(of_seed) for of_seed in scores))
    return {
        question: statistics.fmean(of_seed[question] for of_seed in scores) for question in sorted(shared)
    }


def summarise(runs: list[list[Scores]]) -> dict[str, Any]:
    """The matrix, and for each earlier world its backward transfer; ``mean`` is that over these worlds."""
    matrix = {
        after: {w: _accuracy(mean_over_seeds(runs, i, w)) for w in WORLDS} for i, after in enumerate(WORLDS)
    }
    last, transfer, by_seed = len(WORLDS) - 1, dict[str, Any](), dict[str, list[float]]()
    changes = defaultdict[str, list[float]](list)
    for number, world in enumerate(WORLDS[:-1]):
        final, own = mean_over_seeds(runs, last, world), mean_over_seeds(runs, number, world)
        shared = sorted(final.keys() & own.keys())
        by_seed[world] = [
            statistics.fmean(stages[last][world][q] - stages[number][world][q] for q in shared)
            for stages in runs
        ]
        transfer[world] = {**paired_bootstrap(final, own), **_over_seeds(by_seed[world])}
        for question in shared:
            changes[question.removesuffix(f"-{world}")].append(final[question] - own[question])
    # A number is the same picture in all worlds but for the shift, so pictures are resampled, not the
    # questions of each world.
    pictures = [statistics.fmean(values) for values in changes.values() if len(values) == last]
    means = [statistics.fmean(values) for values in zip(*by_seed.values(), strict=True)]
    over_questions = {
        "mean": statistics.fmean(pictures),
        "ci95": list(bootstrap_mean(pictures)),
        "n": len(pictures),
    }
    return {
        "accuracy": matrix,
        "backward_transfer": {**transfer, "mean": {**over_questions, **_over_seeds(means)}},
    }


def _over_seeds(values: list[float]) -> dict[str, Any]:
    """The values of each seed, and the interval of their mean by Student's t for more than one."""
    if len(values) < 2:
        return {"by_seed": values, "ci95_seeds": None}
    interval = stats.t.interval(0.95, len(values) - 1, statistics.fmean(values), stats.sem(values))
    return {"by_seed": values, "ci95_seeds": [float(end) for end in interval]}


def _accuracy(scores: dict[str, float]) -> dict[str, Any]:
    return {
        "accuracy": statistics.fmean(scores.values()),
        "ci95": list(bootstrap_mean(list(scores.values()))),
        "n": len(scores),
    }


def report(folder: Path, runs: list[list[Scores]], args: argparse.Namespace) -> None:
    """Print the tables and write the JSON file."""
    summary = summarise(runs)
    print(f"\n{machine()}; seeds {args.seeds}, {args.steps} steps of 32 questions x 8 rollouts a stage")
    print(f"{args.questions} held-out questions of each world, greedy\n")
    print("after training on    " + "".join(f"{world:>14}" for world in WORLDS))
    for after, row in summary["accuracy"].items():
        print(f"{after:21}" + "".join(f"{row[world]['accuracy']:14.3f}" for world in WORLDS))
    print(
        "\nbackward transfer (final - right after its own stage), intervals over questions and over "
        "seeds, "
        "each seed"
    )
    for world, row in summary["backward_transfer"].items():
        over_seeds = "one seed" if row["ci95_seeds"] is None else _interval(row["ci95_seeds"])
        by_seed = " ".join(f"{value:+.3f}" for value in row["by_seed"])
        print(f"{world:21}{row['mean']:+.3f}  {_interval(row['ci95']):18}{over_seeds:18}{by_seed}")
    path = folder / "forgetting.json"
    path.write_text(
        json.dumps({"machine": machine(), "seeds": args.seeds, "steps": args.steps, **summary}),
        encoding="utf-8",
    )
    print(f"\n{path}")


def _interval(ends: list[float]) -> str:
    return f"[{ends[0]:+.3f}, {ends[1]:+.3f}]"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--adapter", type=Path, required=True, help="checkpoint of a policy trained on the plain world"
    )
    parser.add_argument("--steps", type=int, default=15, help="GRPO steps of each stage")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2024])
    parser.add_argument("--questions", type=int, default=300, help="held-out questions of each world")
    parser.add_argument("--dir", type=Path, default=Path("runs/forgetting"))
    args = parse_args(parser, steps=1, seeds=[42], questions=4)
    folder = args.dir.absolute()
    keep_arguments(folder, args, "seeds")
    with driver("forgetting"):
        report(folder, [run(folder, seed, args) for seed in args.seeds], args)


if __name__ == "__main__":
    main()
