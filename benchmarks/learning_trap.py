"""The learning trap: does reinforcement learning discover that zooming helps when the first zooms do not?

    python -m benchmarks.learning_trap [--steps 25] [--seeds 42 1337 2024] [--dir runs/trap]

Two initial policies are trained on demonstrations of which 70 % answer without an operation. The others zoom in on the card in
question (`precise`) or miss it by up to 0.15 of the picture (`imprecise`). From each policy, GRPO runs with three rewards: plain
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
from pixelis.jobs import evaluate, rft, sft
from pixelis.jobs.driver import driver, run_folder
from pixelis.jobs.quickstart import newest
from pixelis.policy import checkpoint
from pixelis.telemetry import events
from pixelis.telemetry.html.render import render, write_page

AIMS = {"precise": 0.0, "imprecise": 0.15}
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


def initial_policy(folder: Path, aim: str, seed: int, args: argparse.Namespace) -> Path:
    """Return the checkpoint of the SFT policy that the runs start from; train it unless it exists."""
    config = config_of(
        folder,
        seed,
        f"data.demonstrations=cards:?split=train&aim={AIMS[aim]}",
        "sft.steps=150",
        "learner.lr=2e-3",
        "learner.schedule=cosine",
    )
    return args.adapter or checkpoint.latest(folder) or sft.run(config)


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


def report(folder: Path, results: dict[str, dict[str, list[dict[str, Any]]]], args: argparse.Namespace) -> None:
    """Print the table; write the JSON file and the page with the mean curves."""
    evaluation = f"{args.questions} held-out questions, greedy"
    print(f"\n{machine()}; {args.steps} steps of 16 questions x 8 rollouts, seeds {args.seeds}, {evaluation}\n")
    print(f"{'start':10} {'reward':15} {'accuracy before':>16} {'accuracy after (each seed)':>34} {'RaPR after':>22}")
    for aim, rewards in results.items():
        for reward, runs in rewards.items():
            before = statistics.mean(run["before"]["accuracy"] for run in runs)
            after = [run["after"]["accuracy"] for run in runs]
            rapr = " ".join(f"{run['after']['rapr']:.2f}" for run in runs)
            by_seed = " ".join(f"{value:.3f}" for value in after)
            print(f"{aim:10} {reward:15} {before:16.3f} {statistics.mean(after):12.3f} ({by_seed}) {rapr:>22}")
    (folder / "trap.json").write_text(
        json.dumps({"machine": machine(), "seeds": args.seeds, "results": results}), encoding="utf-8"
    )
    curves = {}
    for aim, rewards in results.items():
        for name in CURVES:
            lines = {
                reward: [statistics.mean(values) for values in zip(*(run["curves"][name] for run in runs), strict=False)]
                for reward, runs in rewards.items()
            }
            heading = f"{aim} start: {name}, mean of {len(args.seeds)} seeds"
            curves[heading] = {reward: list(enumerate(values, 1)) for reward, values in lines.items()}
    write_page(folder / "trap.html", render("curves.html", title="The learning trap", curves=curves, shares=list(curves)))
    print(f"\n{folder / 'trap.html'}\n{folder / 'trap.json'}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2024])
    parser.add_argument("--aims", nargs="+", choices=list(AIMS), default=list(AIMS), help="initial policies")
    parser.add_argument("--rewards", nargs="+", choices=list(REWARDS), default=list(REWARDS))
    parser.add_argument("--adapter", type=Path, help="start from this checkpoint instead of training an initial policy")
    parser.add_argument("--questions", type=int, default=300, help="held-out questions of each evaluation")
    parser.add_argument("--dir", type=Path, default=Path("runs/trap"))
    smoke = {"steps": 1, "questions": 4, "seeds": [42], "aims": ["precise"], "rewards": ["pixelis"]}
    args = parse_args(parser, **smoke)
    folder = args.dir.absolute()
    results: dict[str, dict[str, list[dict[str, Any]]]] = {a: {r: [] for r in args.rewards} for a in args.aims}
    with driver("learning_trap"):
        for seed in args.seeds:
            for aim in args.aims:
                adapter = initial_policy(folder / f"{aim}-{seed}" / "sft", aim, seed, args)
                for reward in args.rewards:
                    run = folder / f"{aim}-{seed}" / reward
                    results[aim][reward].append(train(run, reward, seed, args, adapter))
        report(folder, results, args)


if __name__ == "__main__":
    main()
