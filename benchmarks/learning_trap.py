"""The learning trap: does reinforcement learning discover that zooming helps when the first zooms are rare,
or miss?

    python -m benchmarks.learning_trap [--starts precise imprecise] [--steps 25] [--seeds 42 1337 2024] [--dir
    runs/trap] python -m benchmarks.learning_trap --starts rare-5 rare-2 rare-0.5 --dir runs/trap-rare

Initial policies are trained on demonstrations of which 70 % answer without an operation. The others zoom in
on the card in question (`precise`) or miss it by up to 0.15 of the picture (`imprecise`). The `rare` starts
learn from few that zoom in, so that about 5, 2 and 0.5 % of sampled episodes do; the rate is measured. From
each policy, GRPO runs with several rewards as the arms of an ablation with the reference `plain` (accuracy
and format): Pixel-Reasoner (arXiv 2505.15966) as its paper and as its code compute it, Pixelis (curiosity by
a trained dynamics model, coherence, penalties for misuse) with all weights, and without curiosity and
coherence. Prints the table of each ablation, and the rate of pixel reasoning (RaPR) before and after. Writes
trap.json to DIR, and the reports to DIR/START/rewards. What is finished is not repeated, so an interrupted
benchmark can be restarted.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import keep_arguments, machine, parse_args
from pixelis.actors import placement
from pixelis.config import Config, absolute, load
from pixelis.config.ablation import AblationConfig
from pixelis.evaluation.statistics import wilson
from pixelis.jobs import ablate, evaluate, sft
from pixelis.jobs.driver import driver, run_folder
from pixelis.policy import checkpoint

RECIPE = "configs/nano/base.yaml"
SHARED = ["telemetry.rollouts=0", "learner.schedule=cosine"]
STARTS = {
    "precise": [],
    "imprecise": ["data.demonstrations=cards:?split=train&aim=0.15"],
    "rare-5": ["data.direct_share=0.93"],
    "rare-2": ["data.direct_share=0.97"],
    "rare-0.5": ["data.direct_share=0.99"],
}
"""Overrides of the demonstrations of each initial policy."""
REWARDS = {
    "plain": ["rewards.weights.accuracy=1.0", "rewards.weights.format=0.1", "rewards.weights.curiosity=0"],
    "pixel_reasoner": ["rewards.preset=pr-paper"],
    "pixel_reasoner_code": ["rewards.preset=pr-repo"],
    "pixelis": ["rewards.preset=pixelis-full"],
    "pixelis_base": ["rewards.preset=pixelis-base"],
}
SEED = 42
"""Of the initial policies; `--seeds` are those of the runs."""
SAMPLES = 4
"""Sampled episodes of a question, to measure how often an initial policy zooms in."""


def config_of(folder: Path, *overrides: str) -> Config:
    """Return a configuration of the embedded model with its own folder."""
    return absolute(load(RECIPE, [*SHARED, f"run.dir={folder}", f"run.seed={SEED}", *overrides]))


def initial_policy(folder: Path, start: str) -> Path:
    """Return the checkpoint of the SFT policy that the runs start from; train it unless it exists."""
    demonstrations = ["data.demonstrations=cards:?split=train", *STARTS[start]]
    return checkpoint.latest(folder) or sft.run(
        config_of(folder, "sft.steps=150", "learner.lr=2e-3", *demonstrations)
    )


def sampled(folder: Path, adapter: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return how often the policy zooms in at temperature 1 on held-out pictures, and how often it is right
    with and without.
    """
    path = folder / "result.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    questions = f"evaluate.questions={max(1, args.episodes // SAMPLES)}"
    config = config_of(folder, f"policy.adapter={adapter}", questions, "evaluate.sampling.temperature=1")
    with run_folder(config), placement.placed(config, learner=False, initial=str(adapter)) as actors:
        groups = evaluate.measure(config, actors, "sampled", 0, samples=SAMPLES).groups
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    right = {
        looks: [t.rewards["accuracy"] for t in episodes if (t.operations_ok > 0) == looks]
        for looks in (True, False)
    }
    looking, total = len(right[True]), len(episodes)
    result = {
        "episodes": total,
        "rapr": {"value": looking / total, "ci95": wilson(looking, total)},
        "accuracy_looking": statistics.fmean(right[True] or [0.0]),
        "accuracy_direct": statistics.fmean(right[False] or [0.0]),
    }
    path.write_text(json.dumps(result), encoding="utf-8")
    return result


def compare_rewards(folder: Path, adapter: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train with each reward and seed from ``adapter`` by `pixelis ablate`; return its report."""
    overrides = [
        *SHARED,
        f"policy.adapter={adapter}",
        f"rft.steps={args.steps}",
        f"evaluate.questions={args.questions}",
        "telemetry.trajectories=0",
        "rft.prompts_per_step=16",
        "rft.group_size=8",
        "learner.lr=1e-3",
    ]
    arms = {name: REWARDS[name] for name in dict.fromkeys(["plain", *args.rewards])}
    return ablate.run(
        AblationConfig(
            recipe=RECIPE,
            dir=str(folder),
            seeds=args.seeds,
            overrides=overrides,
            arms=arms,
            reference="plain",
        )
    )


def report(
    folder: Path,
    starts: dict[str, dict[str, Any]],
    results: dict[str, dict[str, Any]],
    args: argparse.Namespace,
) -> None:
    """Print how often each policy looks before and after; write the JSON file."""
    print(
        f"\n{machine()}; {args.steps} steps of 16 questions x 8 rollouts, seeds {args.seeds}, "
        f"{args.questions} questions"
    )
    print(f"{'start':10} {'reward':20} {'accuracy':>9} {'RaPR':>7}")
    for start, row in starts.items():
        low, high = row["rapr"]["ci95"]
        rate = (
            f"{row['rapr']['value']:.4f} [{low:.4f}, {high:.4f}] of {row['episodes']} sampled episodes look"
        )
        print(
            f"{start:10} before: {rate}; accuracy {row['accuracy_looking']:.3f} looking, "
            f"{row['accuracy_direct']:.3f} direct"
        )
        for arm in results[start]["arms"]:
            print(f"{start:10} {arm['arm']:20} {arm['mean']:9.3f} {arm['metrics']['rapr']:7.2f}")
    content = {"machine": machine(), "seeds": args.seeds, "starts": starts, "results": results}
    (folder / "trap.json").write_text(json.dumps(content), encoding="utf-8")
    print(f"\n{folder / 'trap.json'}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2024])
    parser.add_argument(
        "--starts", nargs="+", choices=list(STARTS), default=["precise", "imprecise"], help="initial policies"
    )
    parser.add_argument(
        "--rewards", nargs="+", choices=list(REWARDS), default=list(REWARDS), help="beside `plain`"
    )
    parser.add_argument(
        "--adapter", type=Path, help="start from this checkpoint instead of training an initial policy"
    )
    parser.add_argument("--questions", type=int, default=300, help="held-out questions of each evaluation")
    parser.add_argument(
        "--episodes",
        type=int,
        default=2000,
        help="sampled episodes of each initial policy, to measure its RaPR",
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/trap"))
    smoke = {
        "steps": 1,
        "questions": 4,
        "episodes": 4,
        "seeds": [42],
        "starts": ["precise"],
        "rewards": ["pixelis"],
    }
    args = parse_args(parser, **smoke)
    folder = args.dir.absolute()
    keep_arguments(folder, args, "seeds", "starts", "rewards")
    starts: dict[str, dict[str, Any]] = {}
    results: dict[str, dict[str, Any]] = {}
    with driver("learning_trap"):
        for start in args.starts:
            adapter = args.adapter or initial_policy(folder / start / "sft", start)
            starts[start] = sampled(folder / start / "sampled", adapter, args)
            results[start] = compare_rewards(folder / start / "rewards", adapter, args)
        report(folder, starts, results, args)


if __name__ == "__main__":
    main()
