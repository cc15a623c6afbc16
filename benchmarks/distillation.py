"""On-policy distillation against plain rewards, with the embedded model.

    python -m benchmarks.distillation --parts sparse [--seeds 42 43 44] [--dir runs/distillation]
    python -m benchmarks.distillation --parts better --questions-per-step 16 --every 4 --dir runs/better

`better`: a teacher that knows more. The start is the imprecise SFT policy of `benchmarks.learning_trap`, which
answers at once and misses the cards when it looks; the teacher is one whose SFT always looked, precisely. From
the start go on GRPO, and, in half of its steps, distillation of the teacher without rewards. Printed at the end:
after how many steps each reaches the teacher's accuracy. `sparse`: a teacher that sees more. The start is an
SFT policy that hardly ever looks; half of its demonstrations have the evidence in the user's turn, so that it can
read that. From it go on GRPO, and a self-teacher, the start itself, with `context=evidence` and without rewards.
All have the same number of questions and rollouts a step and the same learning rate, and evaluate greedily on
held-out questions as they go. Appends one JSON line for each arm and seed to DIR/rows.jsonl when it is there. What
is finished is not repeated, so an interrupted benchmark can be restarted.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import keep_arguments, machine, parse_args
from benchmarks.learning_trap import sampled
from pixelis.config import Config, absolute, load
from pixelis.jobs import evaluate, rft, sft
from pixelis.jobs.driver import driver
from pixelis.policy import checkpoint
from pixelis.telemetry import events

STARTS = {
    "better": ["data.demonstrations=cards:?split=train&aim=0.15", "data.direct_share=0.7"],
    "sparse": ["data.demonstrations=cards:?split=train&hints=0.5", "data.direct_share=0.995"],
}
"""Demonstrations of each part's initial policy."""
EXPERT = ["data.demonstrations=cards:?split=train", "data.direct_share=0"]
"""Demonstrations of the better teacher."""
MARGIN = 0.02
"""By which an accuracy may be below the teacher's and still count as reaching it."""
REWARDS = ["rewards.weights.accuracy=1.0", "rewards.weights.format=0.1", "rewards.weights.curiosity=0"]
METRICS = (
    "train/accuracy",
    "rollout/rapr",
    "teacher/kl",
    "teacher/seconds",
    "learner/seconds",
    "rollout/seconds",
)
"""Of the steps, in the rows."""


def config_of(folder: Path, seed: int, *overrides: str) -> Config:
    shared = ["telemetry.rollouts=0", "telemetry.trajectories=0", "data.evaluate=cards:?split=test&seed=7"]
    shared += ["cluster.placement_timeout_s=900"]  # on a busy machine
    keys = [f"run.dir={folder}", f"run.seed={seed}", *shared, *overrides]
    return absolute(load("configs/nano/base.yaml", keys))


def policy_of(folder: Path, demonstrations: list[str], seed: int, args: argparse.Namespace) -> Path:
    """The checkpoint of an SFT policy; train it unless it exists."""
    keys = [f"sft.steps={args.sft_steps}", "learner.lr=2e-3", "learner.schedule=cosine", *demonstrations]
    return checkpoint.latest(folder) or sft.run(config_of(folder, seed, *keys))


def arms_of(part: str, folder: Path, seed: int, args: argparse.Namespace) -> dict[str, list[str]]:
    """Overrides of the arms of a part, in the order in which they run."""
    if part == "better":
        teacher = f"rft.teacher.model={policy_of(folder / 'expert', EXPERT, seed, args)}"
        return {
            "distilled": [teacher, "rft.teacher.rewards=false", f"rft.steps={args.grpo_steps // 2}"],
            "grpo": [*REWARDS, f"rft.steps={args.grpo_steps}"],
        }
    shown = ["rft.teacher.context=evidence", "rft.teacher.model=version:0", "rft.teacher.rewards=false"]
    steps = f"rft.steps={args.sparse_steps}"
    return {"grpo": [*REWARDS, steps], "evidence": [*shown, steps]}


def run(folder: Path, adapter: Path, seed: int, keys: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm; returns its held-out accuracy by step and its metrics by step."""
    shared = [
        f"policy.adapter={adapter}",
        f"rft.prompts_per_step={args.questions_per_step}",
        f"rft.group_size={args.group}",
        f"learner.lr={args.lr}",
        "learner.checkpoint_every=5",
        "rft.evaluate_first=true",
        f"rft.evaluate_every={args.every}",
        f"evaluate.questions={args.questions}",
    ]
    started = time.monotonic()
    rft.start(config_of(folder, seed, *shared, *keys))
    steps = events.read(folder, "step/policy")
    evaluations = events.read(folder, "evaluation")
    return {
        "accuracy": {row["step"]: row["evaluate/accuracy"] for row in evaluations},
        "rapr": {row["step"]: row["evaluate/rapr"] for row in evaluations},
        "steps": {name: [round(row[name], 4) for row in steps if name in row] for name in METRICS},
        "seconds": round(time.monotonic() - started, 1),
    }


def accuracy_of(folder: Path, seed: int, args: argparse.Namespace) -> float:
    """The better teacher's, on the questions of all evaluations."""
    adapter = policy_of(folder / "expert", EXPERT, seed, args)
    keys = [f"policy.adapter={adapter}", f"evaluate.questions={args.questions}", "evaluate.causal_use=0"]
    (summary,) = evaluate.run(config_of(folder / "teacher", seed, *keys))
    return summary["accuracy"]


def reached(accuracy: dict[int, float], goal: float) -> int | None:
    """The first step from which two evaluations in a row have at least this accuracy; of the last, one is enough."""
    steps = sorted(accuracy)
    pairs = zip(steps, [*steps[1:], steps[-1]], strict=True)
    return next((step for step, after in pairs if min(accuracy[step], accuracy[after]) >= goal), None)


def report(rows: list[dict[str, Any]]) -> None:
    """Print the steps of each arm to the teacher's accuracy less MARGIN."""
    for row in rows:
        if row["part"] == "better":
            curve = {int(step): value for step, value in row["accuracy"].items()}
            step = reached(curve, row["teacher"] - MARGIN)
            print(
                f"{row['arm']} {row['seed']}: {step} of {max(curve)} steps to {row['teacher'] - MARGIN:.3f}"
            )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(STARTS), default=list(STARTS))
    parser.add_argument("--arms", nargs="+", help="only these arms; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--sft-steps", type=int, default=150)
    parser.add_argument("--grpo-steps", type=int, default=80)
    parser.add_argument("--sparse-steps", type=int, default=20)
    parser.add_argument("--questions-per-step", type=int, default=8)
    parser.add_argument("--group", type=int, default=8, help="rollouts of a question")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--questions", type=int, default=200, help="held-out questions of each evaluation")
    parser.add_argument(
        "--episodes", type=int, default=1000, help="sampled episodes that measure a start's looks"
    )
    parser.add_argument("--every", type=int, default=2, help="steps between evaluations")
    parser.add_argument("--dir", type=Path, default=Path("runs/distillation"))
    smoke = {"sft_steps": 1, "grpo_steps": 2, "sparse_steps": 1, "questions_per_step": 2, "questions": 2}
    args = parse_args(parser, **smoke, seeds=[42], every=1, episodes=4)
    folder = args.dir.absolute()
    keep_arguments(folder, args, "seeds", "parts", "arms")
    path = folder / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["part"], row["arm"], row["seed"]) for row in rows}
    with driver("distillation"):
        for seed in args.seeds:
            for part in args.parts:
                place = folder / part / f"seed_{seed}"
                for arm, keys in arms_of(part, place, seed, args).items():
                    if (part, arm, seed) in done or (args.arms and arm not in args.arms):
                        continue
                    adapter = policy_of(place / "sft", STARTS[part], seed, args)
                    result = run(place / arm, adapter, seed, keys, args)
                    row = {"part": part, "arm": arm, "seed": seed, **result}
                    row["start"] = sampled(place / "sampled", adapter, args)
                    if part == "better":
                        row["teacher"] = accuracy_of(place, seed, args)
                    row["machine"] = machine()
                    with path.open("a", encoding="utf-8") as lines:
                        lines.write(json.dumps(row) + "\n")
                    rows.append(row)
                    print(f"{part} {arm} {seed}: accuracy {row['accuracy']}, looks {row['rapr']}")
    report(rows)


if __name__ == "__main__":
    main()
