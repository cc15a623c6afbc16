"""What is the conversation worth? Second questions that only the first one explains, answered with it and without it.

    python -m benchmarks.conversation [--steps 300] [--questions 600] [--seeds 42 1337 2024] [--dir runs/conversation]

The embedded model is trained on demonstrations of which half are second questions ("Is there a red frame?" "yes" "Which digit is
in it?"). Prints its accuracy on held-out second questions with their history, on the same ones without it, and on single
questions. Policies that already exist in DIR are not trained again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, parse_args
from pixelis.actors import placement
from pixelis.config import absolute, load
from pixelis.datasets import cards
from pixelis.jobs import evaluate, sft
from pixelis.jobs.driver import driver, run_folder
from pixelis.policy import checkpoint

ARMS = ("with", "without", "single")


def write_questions(folder: Path, count: int) -> dict[str, Path]:
    """Files with the same held-out pictures: second questions with and without their history, and single questions."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {arm: folder / f"{arm}.jsonl" for arm in ARMS}
    rows = {arm: [cards.question_row("test", 7, n, follow_up=float(arm != "single")) for n in range(count)] for arm in ARMS}
    for row in rows["without"]:
        del row["history"]
    for arm, file in files.items():
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[arm]), encoding="utf-8")
    return files


def measure(folder: Path, seed: int, files: dict[str, Path], args: argparse.Namespace) -> dict[str, Any]:
    """Train a policy; print and return its accuracy on each file."""
    results = {}
    shared = [f"run.seed={seed}", "telemetry.rollouts=0"]
    training = [f"run.dir={folder / 'sft'}", f"sft.steps={args.steps}", "data.direct_share=0"]
    config = absolute(load("configs/nano/sft.yaml", [*shared, *training, "data.demonstrations=cards:?split=train&follow_up=0.5"]))
    adapter = checkpoint.latest(folder / "sft") or sft.run(config)
    sets = "{" + ", ".join(f"{arm}: {file}" for arm, file in files.items()) + "}"
    test = [f"run.dir={folder / 'evaluate'}", f"policy.adapter={adapter}", f"evaluate.sets={sets}"]
    config = absolute(load("configs/nano/evaluate.yaml", [*shared, *test, f"evaluate.questions={args.questions}"]))
    with run_folder(config), placement.placed(config, initial=str(adapter)) as actors:
        for arm in files:
            summary = evaluate.measure(config, actors, arm, 0, source=str(files[arm])).summary
            low, high = summary["ci95"]
            results[arm] = {key: summary[key] for key in ("accuracy", "ci95", "n")}
            print(f"{seed:5} {arm:8} {summary['accuracy']:.3f} [{low:.3f}, {high:.3f}]", flush=True)
    return results


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of supervised training")
    parser.add_argument("--questions", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2024])
    parser.add_argument("--dir", type=Path, default=Path("runs/conversation"))
    args = parse_args(parser, steps=1, questions=4, seeds=[42])
    folder = args.dir.absolute()
    print(machine())
    with driver("conversation"):
        files = write_questions(folder, args.questions)
        results = {str(seed): measure(folder / str(seed), seed, files, args) for seed in args.seeds}
    print(json.dumps({"machine": machine(), **results}))


if __name__ == "__main__":
    main()
