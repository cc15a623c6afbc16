"""The learning trap: does reinforcement learning discover that zooming helps when the first zooms are rare, or do not help?

    python -m benchmarks.learning_trap [--steps 25] [--seeds 42 1337 2024] [--dir runs/trap]
    python -m benchmarks.learning_trap --starts rare-5 rare-2 rare-0.5 --sft-seed 42 --dir runs/trap-rare

Initial policies are trained on demonstrations of which 70 % answer without an operation. The others zoom in on the card in
question (`precise`) or miss it by up to 0.15 of the picture (`imprecise`). The `rare` starts learn from few that zoom in, so that
about 5, 2 and 0.5 % of sampled episodes do; the rate is measured. From each policy, GRPO runs with three rewards: plain
(accuracy and format), Pixel-Reasoner (arXiv 2505.15966) and Pixelis (curiosity by a trained dynamics model, coherence, penalties
for misuse). Prints held-out accuracy and the rate of pixel reasoning (RaPR) of every run. Writes the curves to DIR/trap.html and
all results to DIR/trap.json. Runs that are already finished in DIR are not repeated, so an interrupted benchmark can be
restarted.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, parse_args
from pixelis.actors import placement
from pixelis.config import Config, absolute, load
from pixelis.evaluation.statistics import wilson
from pixelis.jobs import evaluate, rft, sft
from pixelis.jobs.driver import driver, run_folder
from pixelis.jobs.quickstart import newest
from pixelis.policy import checkpoint
from pixelis.telemetry import events
from pixelis.telemetry.html.render import render, write_page

STARTS = {
    "precise": [],
    "imprecise": ["data.demonstrations=cards:?split=train&aim=0.15"],
    "rare-5": ["data.direct_share=0.93"],
    "rare-2": ["data.direct_share=0.97"],
    "rare-0.5": ["data.direct_share=0.99"],
}
"""Overrides of the demonstrations of each initial policy."""
SAMPLES = 4
"""Sampled episodes of a question, to measure how often an initial policy zooms in."""
REWARDS = {
    "plain": ["rewards.weights.accuracy=1.0", "rewards.weights.format=0.1", "rewards.weights.curiosity=0"],
    "pixel_reasoner": ["rewards.preset=pr-paper"],
    "pixelis": ["rewards.preset=pixelis-full", "rewards.dynamics.state=96"],
}
CURVES = ("train/accuracy", "rollout/rapr")


def config_of(folder: Path, seed: int, *overrides: str) -> Config:
    """Return a configuration of the embedded model with its own folder."""
    shared = [f"run.dir={folder}", f"run.seed={seed}", "telemetry.rollouts=0"]
    return absolute(load("configs/nano/base.yaml", [*shared, *overrides]))


def initial_policy(folder: Path, start: str, seed: int, args: argparse.Namespace) -> Path:
    """Return the checkpoint of the SFT policy that the runs start from; train it unless it exists."""
    config = config_of(
        folder,
        seed,
        "data.demonstrations=cards:?split=train",
        "sft.steps=150",
        "learner.lr=2e-3",
        "learner.schedule=cosine",
        *STARTS[start],
    )
    return args.adapter or checkpoint.latest(folder) or sft.run(config)


def sampled(folder: Path, adapter: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return how often the policy zooms in at temperature 1 on held-out pictures, and is right with and without."""
    path = folder / "result.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    questions = f"evaluate.questions={max(1, args.episodes // SAMPLES)}"
    config = config_of(folder, 0, f"policy.adapter={adapter}", questions, "evaluate.sampling.temperature=1")
    with run_folder(config), placement.placed(config, learner=False, initial=str(adapter)) as actors:
        groups = evaluate.measure(config, actors, "sampled", 0, samples=SAMPLES).groups
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    right = {looks: [t.rewards["accuracy"] for t in episodes if (t.operations_ok > 0) == looks] for looks in (True, False)}
    looking, total = len(right[True]), len(episodes)
    result = {
        "episodes": total,
        "rapr": {"value": looking / total, "ci95": wilson(looking, total)},
        **{
            f"accuracy_{name}": statistics.fmean(right[looks]) if right[looks] else None
            for name, looks in (("looking", True), ("direct", False))
        },
    }
    path.write_text(json.dumps(result), encoding="utf-8")
    return result


def train(folder: Path, reward: str, seed: int, args: argparse.Namespace, adapter: Path) -> dict[str, Any]:
    """Train one run from ``adapter``; return held-out summaries before and after, and the training curves."""
    path = folder / "result.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    config = config_of(
        folder,
        seed,
        *REWARDS[reward],
        f"policy.adapter={adapter}",
        f"rft.steps={args.steps}",
        f"evaluate.questions={args.questions}",
        "rft.prompts_per_step=16",
        "rft.group_size=8",
        "learner.lr=1e-3",
        "learner.schedule=cosine",
    )
    with run_folder(config), placement.placed(config, initial=str(adapter)) as actors:
        before = evaluate.measure(config, actors, "before", 0).summary
        rft.run(config, actors)
        after = evaluate.measure(config, actors, "after", newest(actors, "rft")).summary
    rows = events.read(config.run.dir, "step/policy")
    result = {"before": before, "after": after, "curves": {name: [row.get(name) for row in rows] for name in CURVES}}
    path.write_text(json.dumps(result), encoding="utf-8")
    return result


def report(
    folder: Path,
    starts: dict[str, list[dict[str, Any]]],
    results: dict[str, dict[str, list[dict[str, Any]]]],
    args: argparse.Namespace,
) -> None:
    """Print the table; write the JSON file and the page with the mean curves."""
    evaluation = f"{args.questions} held-out questions, greedy"
    print(f"\n{machine()}; {args.steps} steps of 16 questions x 8 rollouts, seeds {args.seeds}, {evaluation}\n")
    for start, policies in starts.items():
        for row in policies:
            low, high = row["rapr"]["ci95"]
            accuracies = ", ".join(f"{name} {row[f'accuracy_{name}'] or 0:.3f}" for name in ("looking", "direct"))
            rate = f"{row['rapr']['value']:.4f} [{low:.4f}, {high:.4f}]"
            print(f"{start:10} looks in {rate} of {row['episodes']} sampled episodes; accuracy {accuracies}")
    print(f"\n{'start':10} {'reward':15} {'accuracy before':>16} {'accuracy after (each seed)':>34} {'RaPR after':>22}")
    for start, rewards in results.items():
        for reward, runs in rewards.items():
            before = statistics.mean(run["before"]["accuracy"] for run in runs)
            after = [run["after"]["accuracy"] for run in runs]
            rapr = " ".join(f"{run['after']['rapr']:.2f}" for run in runs)
            by_seed = " ".join(f"{value:.3f}" for value in after)
            print(f"{start:10} {reward:15} {before:16.3f} {statistics.mean(after):12.3f} ({by_seed}) {rapr:>22}")
    content = {"machine": machine(), "seeds": args.seeds, "starts": starts, "results": results}
    (folder / "trap.json").write_text(json.dumps(content), encoding="utf-8")
    curves = {}
    for start, rewards in results.items():
        for name in CURVES:
            lines = {
                reward: [statistics.mean(values) for values in zip(*(run["curves"][name] for run in runs), strict=False)]
                for reward, runs in rewards.items()
            }
            heading = f"{start} start: {name}, mean of {len(args.seeds)} seeds"
            curves[heading] = {reward: list(enumerate(values, 1)) for reward, values in lines.items()}
    write_page(folder / "trap.html", render("curves.html", title="The learning trap", curves=curves, shares=list(curves)))
    print(f"\n{folder / 'trap.html'}\n{folder / 'trap.json'}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2024])
    parser.add_argument("--starts", nargs="+", choices=list(STARTS), default=["precise", "imprecise"], help="initial policies")
    parser.add_argument("--rewards", nargs="+", choices=list(REWARDS), default=list(REWARDS))
    parser.add_argument("--sft-seed", type=int, help="one initial policy of this seed for all runs, instead of one for each seed")
    parser.add_argument("--adapter", type=Path, help="start from this checkpoint instead of training an initial policy")
    parser.add_argument("--questions", type=int, default=300, help="held-out questions of each evaluation")
    parser.add_argument("--episodes", type=int, default=2000, help="sampled episodes of each initial policy, to measure its RaPR")
    parser.add_argument("--dir", type=Path, default=Path("runs/trap"))
    smoke = {"steps": 1, "questions": 4, "episodes": 4, "seeds": [42], "starts": ["precise"], "rewards": ["pixelis"]}
    args = parse_args(parser, **smoke)
    folder = args.dir.absolute()
    starts: dict[str, list[dict[str, Any]]] = {start: [] for start in args.starts}
    results: dict[str, dict[str, list[dict[str, Any]]]] = {s: {r: [] for r in args.rewards} for s in args.starts}
    with driver("learning_trap"):
        for start in args.starts:
            for sft_seed in args.seeds if args.sft_seed is None else [args.sft_seed]:
                adapter = initial_policy(folder / f"{start}-{sft_seed}" / "sft", start, sft_seed, args)
                starts[start].append(sampled(folder / f"{start}-{sft_seed}" / "sampled", adapter, args))
        for seed in args.seeds:
            for start in args.starts:
                sft_seed = seed if args.sft_seed is None else args.sft_seed
                adapter = initial_policy(folder / f"{start}-{sft_seed}" / "sft", start, sft_seed, args)
                for reward in args.rewards:
                    run = folder / f"{start}-{seed}" / reward
                    results[start][reward].append(train(run, reward, seed, args, adapter))
        report(folder, starts, results, args)


if __name__ == "__main__":
    main()
