"""Looking less: a policy that zooms into everything is distilled into one that zooms only where it must.

    python -m benchmarks.look_less [--seeds 42 43 44] [--sizes 1,8,9,9,10,10] [--dir runs/look_less]

For each seed: SFT on cards of graded sizes, where half of the demonstrations zoom in and the others, which are
told not to, answer at once; GRPO, after which the policy (P) zooms into nearly all cards; `pixelis distill`;
SFT on its demonstrations (Q). Both answer the same held-out questions greedily. A row with turns, tokens of the
policy, zooms by size, and the canary's test of Q against P is printed and appended to DIR/rows.jsonl when it is
there. What is finished is not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from benchmarks.harness import keep_arguments, machine, parse_args
from pixelis.actors import placement
from pixelis.config import Config, absolute, load
from pixelis.datasets import card_questions
from pixelis.datasets.refinement.sets import write_rows
from pixelis.evaluation.statistics import paired_bootstrap
from pixelis.evolution import canary
from pixelis.jobs import distill, evaluate, rft, sft
from pixelis.jobs.driver import driver, run_folder
from pixelis.jobs.evaluation_arms import Arm
from pixelis.policy import checkpoint
from pixelis.policy.adapters import load_adapter
from pixelis.records import Demonstration

BATCH = 16


def config_of(folder: Path, seed: int, recipe: str, *overrides: str) -> Config:
    shared = [f"run.dir={folder}", f"run.seed={seed}", "telemetry.rollouts=0", "learner.schedule=cosine"]
    return absolute(load(f"configs/nano/{recipe}.yaml", [*shared, *overrides]))


def demonstrations(path: Path, seed: int, args: argparse.Namespace) -> Path:
    """A file of demonstrations for SFT: those that answer at once are told so by `distill.hint`."""
    count = args.sft_steps * BATCH
    rows = card_questions.demonstration_rows("train", count, seed, direct_share=0.5, sizes=args.sizes)
    hint = load("configs/nano/distill.yaml").distill.hint
    told = (
        {**row, "question": f"{row['question']} {hint}"} if len(row["turns"]) == 1 else row for row in rows
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, map(Demonstration.model_validate, told))
    return path


def trained(config: Config, steps: int, train: Callable[[Config], Path]) -> Path:
    """The last checkpoint of a run, which is continued unless it has made its steps."""
    latest = checkpoint.latest(Path(config.run.dir))
    return latest if latest is not None and checkpoint.step_of(latest) >= steps else train(config)


def reinforced(config: Config) -> Path:
    with (
        run_folder(config, config.data.train),
        placement.placed(config, initial=config.policy.adapter) as actors,
    ):
        return rft.run(config, actors)


def measured(arm: Arm) -> dict[str, Any]:
    """Accuracy, turns, tokens and zooms of an arm, also by size."""

    def means(groups: list[Any]) -> dict[str, Any]:
        episodes = [trajectory for group in groups for trajectory in group.trajectories]
        return {
            "n": len(episodes),
            "accuracy": statistics.fmean(t.rewards["accuracy"] for t in episodes),
            "zooms": statistics.fmean(float(t.operations_ok > 0) for t in episodes),
            "turns": statistics.fmean(t.policy_turns for t in episodes),
            "tokens": statistics.fmean(t.learnt_tokens for t in episodes),
        }

    by_size = defaultdict[str, list[Any]](list)
    for group in arm.groups:
        by_size[group.question.meta["category"]].append(group)
    sizes = {name: means(by_size[name]) for name in sorted(by_size, key=lambda name: int(name.split()[1]))}
    return {**means(arm.groups), "ci95": arm.summary["ci95"], "sizes": sizes}


def measure(config: Config, policies: dict[str, Path]) -> dict[str, Arm]:
    """Every policy on the same held-out questions."""
    first, *_ = policies.values()
    with run_folder(config), placement.placed(config, learner=False, initial=str(first)) as actors:
        arms = dict[str, Arm]()
        for number, (name, adapter) in enumerate(policies.items()):
            version = 0
            if number:
                step = checkpoint.step_of(adapter)
                publish = actors.store.publish.remote(load_adapter(adapter), "sft", step, restart=True)
                version = ray.get(publish)
            arms[name] = evaluate.measure(config, actors, name, version)
    return arms


def row_of(folder: Path, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train, distil and measure with one seed."""
    started, cards = time.time(), f"cards:?split=train&sizes={args.sizes}"
    shown = [f"sft.batch={BATCH}", f"sft.steps={args.sft_steps}"]
    shown.append(f"data.demonstrations={demonstrations(folder / 'demonstrations.jsonl', seed, args)}")
    start = trained(config_of(folder / "sft", seed, "sft", *shown), args.sft_steps, sft.run)
    asked = [f"data.train={cards}", f"rft.steps={args.rft_steps}", f"policy.adapter={start}"]
    asked += ["rft.prompts_per_step=16", "learner.lr=5e-4"]
    looks = trained(config_of(folder / "rft", seed, "rft", *asked), args.rft_steps, reinforced)
    fresh = f"data.train={cards}&seed={seed + 1000}"
    limits = [f"data.limit={args.questions}", f"policy.adapter={looks}"]
    made = folder / "distill"
    summary = distill.run(config_of(made, seed, "distill", fresh, *limits))
    again = [f"data.demonstrations={made / distill.FILE}", f"policy.adapter={looks}"]
    again += [f"sft.steps={args.distilled_steps}", "learner.lr=5e-4"]
    decides = trained(config_of(folder / "distilled", seed, "sft", *again), args.distilled_steps, sft.run)
    held_out = [f"data.evaluate=cards:?split=test&seed=7&sizes={args.sizes}"]
    held_out.append(f"evaluate.questions={args.held_out}")
    config = config_of(folder / "evaluate", seed, "evaluate", *held_out)
    arms = measure(config, {"P": looks, "Q": decides})
    decision = canary.compare(arms["Q"].correct, arms["P"].correct, config.evolution.canary)
    p, q = (measured(arms[name]) for name in ("P", "Q"))
    return {
        "seed": seed,
        "P": p,
        "Q": q,
        "fewer_turns": 1 - q["turns"] / p["turns"],
        "fewer_tokens": 1 - q["tokens"] / p["tokens"],
        "q_minus_p": paired_bootstrap(arms["Q"].correct, arms["P"].correct, seed=seed),
        "canary": dataclasses.asdict(decision),
        "threshold": summary["threshold"],
        "at_once": summary["at_once"],
        "demonstrations": summary["demonstrations"],
        "seconds": round(time.time() - started),
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--sizes", default="1,8,9,9,10,10", help="factors of a card's size, equally likely")
    parser.add_argument("--sft-steps", type=int, default=600)
    parser.add_argument("--rft-steps", type=int, default=15)
    parser.add_argument("--questions", type=int, default=600, help="questions that are distilled")
    parser.add_argument("--distilled-steps", type=int, default=100)
    parser.add_argument("--held-out", type=int, default=800, help="questions of the evaluation")
    parser.add_argument("--dir", type=Path, default=Path("runs/look_less"))
    small = {"sft_steps": 1, "rft_steps": 1, "distilled_steps": 1, "questions": 8, "held_out": 4}
    args = parse_args(parser, seeds=[42], **small)
    folder = args.dir.absolute()
    keep_arguments(folder, args, "seeds")
    rows = folder / "rows.jsonl"
    done = [json.loads(line) for line in rows.read_text().splitlines()] if rows.is_file() else []
    with driver("look_less"):
        for seed in args.seeds:
            if seed in [row["seed"] for row in done]:
                continue
            row = json.dumps(row_of(folder / str(seed), seed, args))
            with rows.open("a", encoding="utf-8") as out:
                out.write(row + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
